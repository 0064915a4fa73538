/* plan_v32.c: DeepSeek-V3.2's plan of a step. An indexer chooses among all tokens of a request. The
 * path says which attention calls a layer makes.
 */
#include "step/plans/plan_v32.h"

#include "core/attention/params_attention.h"
#include "ops/check.h"
#include "step/chunks.h"
#include "step/plans.h"

/* ---- Config -------------------------------------------------------------------------------- */

static const smla_path python_paths[] = {SMLA_PATH_MIXED, SMLA_PATH_SEPARATE, SMLA_PATH_BF16,
                                         SMLA_PATH_DIRECT, SMLA_PATH_AUTO};

#define COUNT(field, most, ...) SMLA_COUNT_FIELD(smla_builder_config, field, most, __VA_ARGS__)
#define FIELD(field, kind, ...) \
    SMLA_CONFIG_FIELD(smla_builder_config, field, SMLA_FIELD_##kind, __VA_ARGS__)

static const smla_config_field fields[] = {
    COUNT(num_heads, SMLA_MAX_HEADS),
    COUNT(block_size, INT32_MAX),
    COUNT(topk_tokens, INT32_MAX),
    COUNT(max_num_seqs, INT32_MAX),
    COUNT(max_num_batched_tokens, INT32_MAX),
    COUNT(max_model_len, INT32_MAX),
    COUNT(decode_threshold, INT32_MAX, .standard = 1),
    COUNT(min_heads_for_bf16_prefill, INT32_MAX, .standard = 32),
    /* Row numbers of the workspace are int32. */
    COUNT(prefill_workspace_tokens, INT32_MAX, .is_optional = true),
    FIELD(kv_format, FORMAT, .in_python = "kv_cache_dtype"),
    FIELD(path, PATH, .paths = python_paths),
    FIELD(device, DEVICE),
    SMLA_SHARE_FIELD(smla_builder_config),
};

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
        return smla_fail_value(error, smla_create_op, "`path` must be a smla_path, got %d",
                               config->path);
    }
    if ((config->path == SMLA_PATH_BF16) == is_fp8) {
        return smla_fail_value(error, smla_create_op,
                               "`path` must serve a %s cache (%s), got \"%s\"",
                               is_fp8 ? "fp8_ds_mla" : "bfloat16",
                               is_fp8 ? "\"mixed\", \"separate\" or \"direct\"" : "\"bf16\"", name);
    }
    return SMLA_OK;
}

static smla_status
check(smla_step *s, smla_error *error)
{
    smla_builder *const b = (smla_builder *)s;
    smla_builder_config *const config = &b->config;
    const smla_kv_format_info *const format = smla_find_kv_format(config->kv_format);
    if (format == NULL) {
        return smla_fail_value(error, smla_create_op,
                               "`kv_format` must be a known cache format, got %d",
                               config->kv_format);
    }
    if (format->head_dim != SMLA_HEAD_DIM) {
        return smla_fail_value(error, smla_create_op,
                               "`kv_format` must be one of keys of %d values, got %s",
                               SMLA_HEAD_DIM, format->name);
    }
    if (config->workspace == NULL && config->prefill_workspace_tokens == 0) {
        const int64_t tokens = smla_prefill_workspace_size(config->max_model_len);
        config->prefill_workspace_tokens = tokens > INT32_MAX ? INT32_MAX : tokens;
    }
    b->plans_path = config->path == SMLA_PATH_AUTO;
    SMLA_TRY(choose_path(config, error));
    SMLA_TAKE_CONFIG(s, config);
    s->limits.has_uniform_decodes = true;
    b->share = SMLA_SHARE_OF(config);
    return SMLA_OK;
}

/* ---- Buffers ------------------------------------------------------------------------------- */

/* Arrays for prefills are empty on paths that do not read them. */
static void
list_arrays(smla_step *s)
{
    const bool has_workspace = smla_step_modes[s->path].gathers;
    const int64_t tokens = s->limits.max_num_batched_tokens;
    const int64_t prefill_tokens = has_workspace ? tokens : 0;
    const int64_t prefills = has_workspace ? s->limits.max_num_seqs : 0;
    SMLA_ADD_ARRAY(&s->sent, smla_v32_sent, req_id_per_token, tokens);
    SMLA_ADD_ARRAY(&s->sent, smla_v32_sent, prefill_request_ids, prefill_tokens);
    SMLA_ADD_ARRAY(&s->sent, smla_v32_sent, prefill_seq_lens, prefills);
    SMLA_ADD_ARRAY(&s->sent, smla_v32_sent, prefill_workspace_starts, prefills);
    const smla_builder *const b = (const smla_builder *)s;
    const int64_t columns = b->config.topk_tokens;
    const int64_t ranks_tokens = b->share.size == 0 ? 0 : tokens;
    SMLA_ADD_ARRAY(&s->made, smla_v32_made, indices, prefill_tokens * columns);
    SMLA_ADD_ARRAY(&s->made, smla_v32_made, own_topk, ranks_tokens * columns);
    SMLA_ADD_ARRAY(&s->made, smla_v32_made, own_lens, ranks_tokens);
    SMLA_ADD_ARRAY(&s->kept, smla_v32_kept, seq_lens, s->limits.max_num_seqs);
}

/* The shape of an attention call over `num_tokens` tokens. A size for the largest batch covers all
 * formats, so that it has none. */
static smla_attention_shape
shape_of(const smla_step *s, int64_t num_tokens, const smla_kv_format_info *format)
{
    return (smla_attention_shape){.num_tokens = num_tokens,
                                  .num_heads = s->num_heads,
                                  .topk = ((const smla_builder *)s)->config.topk_tokens,
                                  .device_id = s->device.device_id,
                                  .formats = {format}};
}

static int64_t
find_scratch_bytes(const smla_step *s)
{
    const smla_attention_shape largest = shape_of(s, s->limits.max_num_batched_tokens, NULL);
    return s->backend->attention_workspace_size(&largest);
}

/* A given workspace is used for as many tokens as it has rows, or for the config's number. */
static smla_status
find_workspaces(const smla_step *s, smla_workspace_rule rules[SMLA_MAX_WORKSPACES],
                smla_error *error)
{
    const smla_builder_config *const config = &((const smla_builder *)s)->config;
    const int64_t tokens = config->prefill_workspace_tokens;
    const int64_t rows = tokens > 0 ? tokens : SMLA_ANY;
    (void)error;
    rules[SMLA_GATHERED] =
        (smla_workspace_rule){.name = "workspace",
                              .given = config->workspace,
                              .columns = SMLA_HEAD_DIM,
                              .rows = smla_step_modes[s->path].gathers ? rows : 0,
                              .least = tokens > 0 ? tokens : 1};
    return SMLA_OK;
}

static smla_status
report_no_memory(const smla_step *s, smla_error *error)
{
    const smla_builder_config *const config = &((const smla_builder *)s)->config;
    const int64_t tokens = config->prefill_workspace_tokens;
    return smla_fail(
        error, SMLA_ERROR_MEMORY,
        "%s: buffers for %lld tokens x %lld topk and a workspace of %lld tokens must fit "
        "in memory, got none",
        smla_create_op, (long long)config->max_num_batched_tokens, (long long)config->topk_tokens,
        (long long)(tokens > 0 ? tokens : smla_size(config->workspace, 0)));
}

/* ---- A step -------------------------------------------------------------------------------- */

static smla_batch
read_batch(const void *args)
{
    return SMLA_BATCH_OF((const smla_build_args *)args);
}

/* Counts the rank's rows of each request. Checks the block table, which has a page for each. */
static smla_status
check_args(const smla_step *s, const smla_batch *batch, const void *given, smla_error *error)
{
    const smla_build_args *const args = given;
    smla_checker c;
    smla_open_checker(&c, smla_build_op, error);
    SMLA_TRY(smla_require_table(&c, "block_table", args->block_table, args->num_reqs, 0));
    const smla_builder *const b = (const smla_builder *)s;
    for (int64_t req = 0; req < args->num_reqs; req++) {
        const int64_t rows = smla_count_own(&b->share, batch->seq_lens[req]);
        b->kept.seq_lens[req] = (int32_t)rows;
        SMLA_TRY(smla_check_table_width(smla_build_op, args->block_table, b->config.block_size, req,
                                        rows, error));
    }
    return SMLA_OK;
}

static bool
prefers_direct(const smla_step *s, const smla_batch *batch, const smla_step_facts *facts)
{
    const smla_kv_format_info *const format =
        smla_find_kv_format(((const smla_builder *)s)->config.kv_format);
    const smla_attention_shape prefills = shape_of(s, facts->split.num_prefill_tokens, format);
    int64_t num_rows = 0;
    for (int64_t req = facts->split.num_decodes; req < batch->num_reqs; req++) {
        num_rows += ((const smla_builder *)s)->kept.seq_lens[req];
    }
    return s->backend->prefers_direct(&prefills, num_rows, facts->num_chunks);
}

static smla_status
cut_chunks(const smla_step *s, const smla_batch *batch, smla_step_facts *facts, smla_error *error)
{
    const smla_builder *const b = (const smla_builder *)s;
    smla_prefills prefills = smla_prefills_of(batch, facts->split.num_decodes,
                                              smla_size(&s->workspaces[SMLA_GATHERED].tensor, 0));
    prefills.lens = b->kept.seq_lens + facts->split.num_decodes;
    if (!smla_step_modes[s->path].gathers) {
        return SMLA_OK;
    }
    SMLA_TRY(smla_cut_chunks(s, &prefills, facts, error));
    if (facts->num_chunks > 0 && b->plans_path && prefers_direct(s, batch, facts)) {
        facts->path = SMLA_PATH_DIRECT;
        facts->num_chunks = 0;
    }
    return SMLA_OK;
}

/* Fills the arrays of prefills. Workspace starts count from 0 in each chunk. */
static void
fill_prefills(const smla_step *s, const smla_batch *batch, const smla_v32_sent *host)
{
    const int64_t first = s->facts.split.num_decodes;
    const int32_t *const seq_lens = ((const smla_builder *)s)->kept.seq_lens + first;
    for (int64_t t = 0; t < batch->num_actual_tokens; t++) {
        host->prefill_request_ids[t] = -1;
    }
    for (int64_t chunk = 0; chunk < s->facts.num_chunks; chunk++) {
        int32_t start = 0;
        for (int64_t req = s->chunks[chunk].req_start; req < s->chunks[chunk].req_end; req++) {
            host->prefill_seq_lens[req] = seq_lens[req];
            host->prefill_workspace_starts[req] = start;
            start += seq_lens[req];
            const int32_t end = batch->query_start_loc[first + req + 1];
            for (int32_t t = batch->query_start_loc[first + req]; t < end; t++) {
                host->prefill_request_ids[t] = (int32_t)req;
            }
        }
    }
}

static void
fill(const smla_step *s, const smla_batch *batch, int32_t *memory)
{
    smla_v32_sent host;
    smla_cut_arena(&s->sent, memory, &host);
    smla_fill_req_ids(&s->limits, batch, host.req_id_per_token);
    if (s->facts.num_chunks > 0) {
        fill_prefills(s, batch, &host);
    }
}

static void
commit(smla_step *s, const void *given)
{
    smla_builder *const b = (smla_builder *)s;
    const smla_build_args *const args = given;
    const smla_step_facts *const facts = &s->facts;
    const smla_attention_shape decode =
        shape_of(s, facts->num_first_tokens, smla_find_kv_format(b->config.kv_format));
    smla_attention_plan plan;
    s->backend->plan_attention(&decode, &plan);
    b->metadata = (smla_metadata){
        SMLA_METADATA_OF(facts),
        .decode_num_splits = plan.runs[0].num_splits,
        .req_id_per_token = b->sent.req_id_per_token,
    };
    if (facts->num_chunks > 0) {
        b->metadata.prefill_seq_lens = b->sent.prefill_seq_lens;
        b->metadata.prefill_request_ids = b->sent.prefill_request_ids;
        b->metadata.prefill_workspace_starts = b->sent.prefill_workspace_starts;
        b->metadata.chunks = s->chunks;
        b->metadata.num_chunks = facts->num_chunks;
    }
    smla_slice_rows(&b->block_table, args->block_table, 0, args->num_reqs);
}

static int
describe(const smla_step *s, smla_step_view views[SMLA_MAX_STEP_VIEWS])
{
    const smla_metadata *const m = &((const smla_builder *)s)->metadata;
    const int64_t prefills = m->split.num_prefills;
    int n = 0;
    smla_show_list(&views[n++], "chunks", &s->chunks->req_start, s->facts.num_chunks,
                   SMLA_CHUNK_NUMBERS);
    smla_show_number(&views[n++], "decode_num_splits", m->decode_num_splits);
    smla_show_vector(&views[n++], "req_id_per_token", m->req_id_per_token, m->num_actual_tokens);
    smla_show_vector(&views[n++], "prefill_seq_lens", m->prefill_seq_lens, prefills);
    smla_show_vector(&views[n++], "prefill_request_ids", m->prefill_request_ids,
                     m->num_actual_tokens);
    smla_show_vector(&views[n++], "prefill_workspace_starts", m->prefill_workspace_starts,
                     prefills);
    return n;
}

const smla_step_plan smla_v32_plan = {
    SMLA_PLAN_TYPES("v32", smla_builder, smla_build_args, fields),
    SMLA_PLAN_SENDS(smla_builder),
    SMLA_PLAN_FUNCTIONS,
    .kept = offsetof(smla_builder, kept),
    .cut_chunks = cut_chunks,
};
