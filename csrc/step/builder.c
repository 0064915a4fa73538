/* builder.c: the metadata builder. Chooses the path once, plans every step with plan.c, and keeps
 * the result in buffers that are made once, for the largest batch.
 *
 * forward.c and the backend decide which kernels run.
 */
#include "step/builder.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "core/args.h"
#include "core/entry.h"
#include "core/params_attention.h"
#include "core/rule.h"
#include "step/arena.h"
#include "step/batch.h"
#include "step/plan.h"

enum { DEFAULT_MIN_HEADS_FOR_BF16_PREFILL = 32 };

/* ---- Creating a builder -------------------------------------------------------------------- */

static const char create_op[] = "MetadataBuilder";
static const char build_op[] = "MetadataBuilder.build";

static smla_status
check_config_counts(const smla_builder_config *config, smla_error *error)
{
    const smla_config_count counts[] = {
        {"num_heads", config->num_heads, SMLA_MAX_HEADS},
        {"block_size", config->block_size, INT32_MAX},
        {"topk_tokens", config->topk_tokens, INT32_MAX},
        {"max_num_seqs", config->max_num_seqs, INT32_MAX},
        {"max_num_batched_tokens", config->max_num_batched_tokens, INT32_MAX},
        {"max_model_len", config->max_model_len, INT32_MAX},
        {"decode_threshold", config->decode_threshold, INT32_MAX},
        {"min_heads_for_bf16_prefill", config->min_heads_for_bf16_prefill, INT32_MAX},
        /* Row numbers of the workspace are int32. */
        {"prefill_workspace_tokens", config->prefill_workspace_tokens, INT32_MAX},
    };
    return smla_check_config_counts(create_op, counts, sizeof counts / sizeof counts[0], error);
}

/* Chooses the path that serves every batch of this configuration. If the config leaves the path
 * open, a step on path "separate" may still become "direct" (prefers_direct). */
static smla_status
choose_path(smla_builder_config *config, smla_error *error)
{
    const bool is_fp8 = config->kv_format == SMLA_KV_FP8_DS_MLA;
    if (config->path == SMLA_PATH_AUTO) {
        if (!is_fp8) {
            config->path = SMLA_PATH_BF16;
        } else {
            config->path = config->num_heads < config->min_heads_for_bf16_prefill
                               ? SMLA_PATH_MIXED
                               : SMLA_PATH_SEPARATE;
        }
        return SMLA_OK;
    }
    const char *name = smla_path_name((smla_path)config->path);
    if (name == NULL) {
        return smla_fail(error, SMLA_ERROR_VALUE, "%s: `path` must be a smla_path, got %d",
                         create_op, config->path);
    }
    if ((config->path == SMLA_PATH_BF16) == is_fp8) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `path` must serve a %s cache (%s), got \"%s\"", create_op,
                         is_fp8 ? "fp8_ds_mla" : "bfloat16",
                         is_fp8 ? "\"mixed\", \"separate\" or \"direct\"" : "\"bf16\"", name);
    }
    return SMLA_OK;
}

/* Takes the caller's workspace. It is used for as many tokens as it has rows, or for `tokens_asked`
 * tokens if the caller gave that number. */
static smla_status
adopt_workspace(smla_builder *b, int64_t tokens_asked, smla_error *error)
{
    const DLTensor *workspace = b->config.workspace;
    smla_checker c;
    smla_open_checker(&c, create_op, error);
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "workspace",
                                           .tensor = workspace,
                                           .dtypes = SMLA_DTYPE_BF16,
                                           .flags = SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS,
                                           .ndim = 2,
                                           .shape = {tokens_asked > 0 ? tokens_asked : 1,
                                                     SMLA_HEAD_DIM}}));
    const smla_backend *backend;
    SMLA_TRY(smla_find_backend(create_op, c.device, &backend, error));
    if (backend != b->backend || c.device.device_id != b->config.device.device_id) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `workspace` must be on the device of the config, got another one",
                         create_op);
    }
    const int64_t tokens = tokens_asked > 0 ? tokens_asked : smla_size(workspace, 0);
    b->config.prefill_workspace_tokens = tokens;
    smla_slice_rows(&b->prefill_workspace, workspace, 0, tokens);
    return SMLA_OK;
}

static smla_status
report_no_memory(const smla_builder_config *config, smla_error *error)
{
    return smla_fail(
        error, SMLA_ERROR_MEMORY,
        "%s: buffers for %lld tokens x %lld topk and a workspace of %lld tokens must fit "
        "in memory, got none",
        create_op, (long long)config->max_num_batched_tokens, (long long)config->topk_tokens,
        (long long)config->prefill_workspace_tokens);
}

enum { NUM_STEP_ARRAYS = sizeof(smla_step_arrays) / sizeof(int32_t *) };

/* Lists the arrays in the mirror. Arrays for prefills are empty on paths that do not read them. */
static void
list_step_arrays(const smla_builder_config *config, smla_arena_row rows[NUM_STEP_ARRAYS])
{
    const bool has_workspace = config->path == SMLA_PATH_SEPARATE;
    const int64_t tokens = config->max_num_batched_tokens;
    const int64_t prefills = has_workspace ? config->max_num_seqs : 0;
    rows[0] = (smla_arena_row){offsetof(smla_step_arrays, req_id_per_token), tokens};
    rows[1] = (smla_arena_row){offsetof(smla_step_arrays, prefill_request_ids),
                               has_workspace ? tokens : 0};
    rows[2] = (smla_arena_row){offsetof(smla_step_arrays, prefill_seq_lens), prefills};
    rows[3] = (smla_arena_row){offsetof(smla_step_arrays, prefill_workspace_starts), prefills};
}

/* Cuts the mirror's memory, on the host or on the device, into its arrays. */
static smla_step_arrays
cut_step(const smla_builder_config *config, int32_t *memory)
{
    smla_arena_row rows[NUM_STEP_ARRAYS];
    smla_step_arrays arrays;
    list_step_arrays(config, rows);
    smla_cut_arena(rows, NUM_STEP_ARRAYS, memory, &arrays);
    return arrays;
}

static smla_status
allocate_buffers(smla_builder *b, smla_error *error)
{
    const smla_builder_config *config = &b->config;
    const smla_backend *backend = b->backend;
    const int32_t device_id = config->device.device_id;
    const smla_attention_shape largest = {.num_tokens = config->max_num_batched_tokens,
                                          .num_heads = config->num_heads,
                                          .topk = config->topk_tokens,
                                          .device_id = device_id};
    const bool has_workspace = config->path == SMLA_PATH_SEPARATE;
    smla_arena_row rows[NUM_STEP_ARRAYS];
    int64_t index_bytes;
    if (__builtin_mul_overflow(config->max_num_batched_tokens * (int64_t)sizeof *b->indices,
                               config->topk_tokens, &index_bytes)) {
        return report_no_memory(config, error);
    }
    b->scratch_bytes = backend->attention_workspace_size(&largest);
    list_step_arrays(config, rows);
    b->mirror = backend->create_mirror(device_id, smla_arena_bytes(rows, NUM_STEP_ARRAYS));
    b->indices = has_workspace ? backend->allocate(device_id, index_bytes) : NULL;
    b->scratch = backend->allocate(device_id, b->scratch_bytes);
    b->chunks = malloc((size_t)config->max_num_seqs * sizeof *b->chunks);
    b->chunk_ends = malloc((size_t)config->max_num_seqs * sizeof *b->chunk_ends);
    bool good = b->mirror != NULL && (b->indices != NULL || !has_workspace) && b->scratch != NULL &&
                b->chunks != NULL && b->chunk_ends != NULL;
    if (good && has_workspace && config->workspace == NULL) {
        const int64_t shape[2] = {config->prefill_workspace_tokens, SMLA_HEAD_DIM};
        const DLDataType bf16 = {.code = kDLBfloat, .bits = 16, .lanes = 1};
        b->own_workspace =
            backend->allocate(device_id, shape[0] * shape[1] * (int64_t)sizeof *b->own_workspace);
        good = b->own_workspace != NULL;
        smla_make_view(&b->prefill_workspace, b->own_workspace, bf16, config->device, 2, shape);
    }
    if (!good) {
        return report_no_memory(config, error);
    }
    b->arrays = cut_step(config, b->mirror->device);
    return SMLA_OK;
}

static smla_status
initialize(smla_builder *b, const smla_builder_config *config, smla_error *error)
{
    SMLA_TRY(smla_read_args(create_op, &b->config, sizeof b->config, config, error));
    smla_builder_config *known = &b->config;
    const int64_t tokens_asked = known->prefill_workspace_tokens;
    known->device = smla_normal_device(known->device);
    if (known->decode_threshold == 0) {
        known->decode_threshold = 1;
    }
    if (known->min_heads_for_bf16_prefill == 0) {
        known->min_heads_for_bf16_prefill = DEFAULT_MIN_HEADS_FOR_BF16_PREFILL;
    }
    if (tokens_asked == 0) {
        const int64_t tokens = smla_prefill_workspace_size(known->max_model_len);
        known->prefill_workspace_tokens = tokens > INT32_MAX ? INT32_MAX : tokens;
    }
    SMLA_TRY(check_config_counts(known, error));
    const smla_kv_format_info *const format = smla_find_kv_format(known->kv_format);
    if (format == NULL) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `kv_format` must be a known cache format, got %d", create_op,
                         known->kv_format);
    }
    if (format->head_dim != SMLA_HEAD_DIM) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `kv_format` must be one of keys of %d values, got %s", create_op,
                         SMLA_HEAD_DIM, format->name);
    }
    b->plans_path = known->path == SMLA_PATH_AUTO;
    SMLA_TRY(choose_path(known, error));
    SMLA_TRY(smla_find_backend(create_op, known->device, &b->backend, error));
    if (known->workspace != NULL) {
        SMLA_TRY(adopt_workspace(b, tokens_asked, error));
    }
    return allocate_buffers(b, error);
}

smla_status
smla_builder_create(const smla_builder_config *config, smla_builder **builder, smla_error *error)
{
    SMLA_TRY(smla_require_pointer(create_op, "builder", builder, error));
    smla_builder *b = calloc(1, sizeof *b);
    if (b == NULL) {
        return smla_fail(error, SMLA_ERROR_MEMORY, "%s: a builder must fit in memory, got none",
                         create_op);
    }
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    const smla_status status = initialize(b, config, error);
    smla_fp_change(callers);
    if (status != SMLA_OK) {
        smla_builder_destroy(b);
        return status;
    }
    *builder = b;
    return SMLA_OK;
}

void
smla_builder_destroy(smla_builder *b)
{
    if (b == NULL) {
        return;
    }
    if (b->backend != NULL) {
        void *const buffers[] = {b->indices, b->scratch, b->own_workspace};
        for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) {
            b->backend->release(b->config.device.device_id, buffers[i]);
        }
        b->backend->destroy_mirror(b->mirror);
    }
    free(b->chunks);
    free(b->chunk_ends);
    free(b);
}

int64_t
smla_builder_workspace_bytes(const smla_builder *b)
{
    return b == NULL || b->config.path != SMLA_PATH_SEPARATE
               ? 0
               : b->config.prefill_workspace_tokens * SMLA_HEAD_DIM * (int64_t)sizeof(uint16_t);
}

/* ---- Building a step ----------------------------------------------------------------------- */

static smla_batch_limits
limits_of(const smla_builder_config *config)
{
    return (smla_batch_limits){.max_num_seqs = config->max_num_seqs,
                               .max_num_batched_tokens = config->max_num_batched_tokens,
                               .max_model_len = config->max_model_len,
                               .decode_threshold = config->decode_threshold};
}

/* Checks the block table, which has a page for every token of a request. */
static smla_status
check_block_table(const smla_builder *b, const smla_build_args *args, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, build_op, error);
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "block_table",
                                           .tensor = args->block_table,
                                           .dtypes = SMLA_DTYPE_INT32,
                                           .flags = SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                                           .ndim = 2,
                                           .shape = {args->num_reqs, SMLA_ANY}}));
    const int64_t num_blocks = smla_size(args->block_table, 1);
    for (int64_t req = 0; req < args->num_reqs; req++) {
        const int64_t seq_len = args->seq_lens_cpu[req];
        const int64_t blocks = (seq_len + b->config.block_size - 1) / b->config.block_size;
        if (blocks > num_blocks) {
            return smla_fail(
                error, SMLA_ERROR_VALUE,
                "%s: `block_table` must have at least %lld columns for the %lld tokens of "
                "request %lld, got %lld",
                build_op, (long long)blocks, (long long)seq_len, (long long)req,
                (long long)num_blocks);
        }
    }
    return SMLA_OK;
}

/* Fills in the arrays and the chunks of prefills. Workspace starts count from 0 in each chunk. */
static void
fill_prefill(smla_builder *b, const smla_build_args *args, int64_t num_decodes, int64_t num_chunks,
             const smla_step_arrays *arrays)
{
    const int32_t *starts = args->query_start_loc_cpu;
    for (int64_t t = 0; t < args->num_actual_tokens; t++) {
        arrays->prefill_request_ids[t] = -1;
    }
    int64_t req = 0;
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        smla_prefill_chunk *c = &b->chunks[chunk];
        *c = (smla_prefill_chunk){.req_start = req,
                                  .req_end = b->chunk_ends[chunk],
                                  .token_start = starts[num_decodes + req],
                                  .token_end = starts[num_decodes + b->chunk_ends[chunk]]};
        for (; req < c->req_end; req++) {
            const int32_t seq_len = args->seq_lens_cpu[num_decodes + req];
            arrays->prefill_seq_lens[req] = seq_len;
            arrays->prefill_workspace_starts[req] = (int32_t)c->tot_seqlen;
            c->tot_seqlen += seq_len;
            for (int32_t t = starts[num_decodes + req]; t < starts[num_decodes + req + 1]; t++) {
                arrays->prefill_request_ids[t] = (int32_t)req;
            }
        }
    }
}

static bool
prefers_direct(const smla_builder *b, const smla_build_args *args, const smla_batch_split *split,
               int64_t num_chunks)
{
    const smla_attention_shape prefills = {
        .num_tokens = split->num_prefill_tokens,
        .num_heads = b->config.num_heads,
        .topk = b->config.topk_tokens,
        .device_id = b->config.device.device_id,
        .formats = {smla_find_kv_format(b->config.kv_format)},
    };
    int64_t num_rows = 0;
    for (int64_t req = split->num_decodes; req < args->num_reqs; req++) {
        num_rows += args->seq_lens_cpu[req];
    }
    return b->backend->prefers_direct(&prefills, num_rows, num_chunks);
}

static smla_status
plan_step(smla_builder *b, const smla_build_args *args, smla_error *error)
{
    const smla_batch_limits limits = limits_of(&b->config);
    const smla_batch batch = {.query_start_loc = args->query_start_loc_cpu,
                              .seq_lens = args->seq_lens_cpu,
                              .num_reqs = args->num_reqs,
                              .num_actual_tokens = args->num_actual_tokens};
    SMLA_TRY(smla_check_batch(build_op, &limits, &batch, error));
    SMLA_TRY(check_block_table(b, args, error));
    smla_batch_split split = {0};
    SMLA_TRY(smla_split_decodes_and_prefills(args->query_start_loc_cpu, args->num_reqs,
                                             args->num_actual_tokens, b->config.decode_threshold,
                                             true, &split, error));
    smla_path path = (smla_path)b->config.path;
    const bool has_parts = path == SMLA_PATH_SEPARATE || path == SMLA_PATH_DIRECT;
    bool has_workspace = path == SMLA_PATH_SEPARATE && split.num_prefills > 0;
    int64_t num_chunks = 0;
    if (has_parts) {
        SMLA_TRY(smla_check_batch_order(build_op, &limits, &batch, error));
    }
    if (has_workspace) {
        SMLA_TRY(smla_split_prefill_chunks(args->seq_lens_cpu + split.num_decodes,
                                           split.num_prefills, b->config.prefill_workspace_tokens,
                                           b->chunk_ends, &num_chunks, error));
        if (b->plans_path && prefers_direct(b, args, &split, num_chunks)) {
            path = SMLA_PATH_DIRECT;
            has_workspace = false;
            num_chunks = 0;
        }
    }
    const smla_stream stream = {.device_id = b->config.device.device_id, .handle = args->stream};
    void *memory = NULL;
    SMLA_TRY(b->backend->begin_write(build_op, b->mirror, stream, &memory, error));
    /* From here on the metadata of the last build is overwritten. */
    b->is_built = false;
    const smla_step_arrays host = cut_step(&b->config, memory);
    smla_fill_req_ids(&limits, &batch, host.req_id_per_token);
    if (has_workspace) {
        fill_prefill(b, args, split.num_decodes, num_chunks, &host);
    }
    SMLA_TRY(b->backend->end_write(build_op, b->mirror, stream, error));
    const int64_t decode_tokens = has_parts ? split.num_decode_tokens : args->num_actual_tokens;
    const smla_attention_shape decode = {.num_tokens = decode_tokens,
                                         .num_heads = b->config.num_heads,
                                         .topk = b->config.topk_tokens,
                                         .device_id = stream.device_id,
                                         .formats = {smla_find_kv_format(b->config.kv_format)}};
    smla_attention_plan plan;
    b->backend->plan_attention(&decode, &plan);
    b->metadata = (smla_metadata){
        .path = path,
        .num_reqs = args->num_reqs,
        .num_actual_tokens = args->num_actual_tokens,
        .split = split,
        .decode_query_len =
            has_parts && split.num_decodes > 0 ? smla_query_len(args->query_start_loc_cpu, 0) : 0,
        .decode_num_splits = plan.runs[0].num_splits,
        .req_id_per_token = b->arrays.req_id_per_token,
    };
    if (has_workspace) {
        b->metadata.prefill_seq_lens = b->arrays.prefill_seq_lens;
        b->metadata.prefill_request_ids = b->arrays.prefill_request_ids;
        b->metadata.prefill_workspace_starts = b->arrays.prefill_workspace_starts;
        b->metadata.chunks = b->chunks;
        b->metadata.num_chunks = num_chunks;
    }
    smla_slice_rows(&b->block_table, args->block_table, 0, args->num_reqs);
    b->is_built = true;
    return SMLA_OK;
}

static smla_status
run_build(smla_builder *b, const smla_build_args *args, const smla_metadata **metadata,
          smla_error *error)
{
    smla_build_args known;
    SMLA_TRY(smla_require_pointer(build_op, "builder", b, error));
    SMLA_TRY(smla_read_args(build_op, &known, sizeof known, args, error));
    SMLA_TRY(plan_step(b, &known, error));
    if (smla_is_logging) {
        const smla_metadata *const m = &b->metadata;
        smla_log_device(b->config.device);
        smla_log_text(" requests %lld, tokens %lld, path %s, chunks %lld,", (long long)m->num_reqs,
                      (long long)m->num_actual_tokens, smla_path_name(m->path),
                      (long long)m->num_chunks);
    }
    if (metadata != NULL) {
        *metadata = &b->metadata;
    }
    return SMLA_OK;
}

smla_status
smla_builder_build(smla_builder *b, const smla_build_args *args, const smla_metadata **metadata,
                   smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, build_op);
    return smla_leave(&entry, run_build(b, args, metadata, error));
}
