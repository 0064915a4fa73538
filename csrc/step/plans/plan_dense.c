/* plan_dense.c: the plan of a step of dense MLA. Every token attends to the tokens of its request
 * up to itself. The host sends where the requests' queries start; what depends on lengths, which
 * only the device knows exactly, one kernel writes behind that copy: positions, and the range of
 * keys that each token sees. Layers read both. The chunks of path "separate" are in
 * plan_dense_context.c.
 */
#include "step/plans/plan_dense.h"

#include "core/rule.h"
#include "ops/check.h"
#include "step/chunks.h"
#include "step/plans.h"

/* ---- Config -------------------------------------------------------------------------------- */

static const smla_path python_paths[] = {SMLA_PATH_SEPARATE, SMLA_PATH_MIXED, SMLA_PATH_AUTO};
static const char *const context_plans[] = {[SMLA_CONTEXT_EQUAL] = "equal",
                                            [SMLA_CONTEXT_PACKED] = "packed",
                                            NULL};

#define COUNT(field, most, ...) SMLA_COUNT_FIELD(smla_dense_config, field, most, __VA_ARGS__)
#define FIELD(field, kind, ...) \
    SMLA_CONFIG_FIELD(smla_dense_config, field, SMLA_FIELD_##kind, __VA_ARGS__)

enum { NO_ROPE = -1 }; /* what configs have as qk_rope_head_dim for R = 0 */

static const smla_config_field fields[] = {
    COUNT(num_heads, SMLA_MAX_HEADS),
    COUNT(block_size, INT32_MAX),
    COUNT(qk_nope_head_dim, INT32_MAX),
    FIELD(qk_rope_head_dim, COUNT, .least = NO_ROPE, .most = SMLA_QK_ROPE_HEAD_DIM,
          .standard = SMLA_QK_ROPE_HEAD_DIM),
    COUNT(v_head_dim, INT32_MAX),
    COUNT(max_num_seqs, INT32_MAX - 2),
    COUNT(max_num_batched_tokens, INT32_MAX),
    COUNT(max_model_len, INT32_MAX),
    COUNT(decode_threshold, INT32_MAX, .standard = 1),
    FIELD(kv_format, FORMAT, .in_python = "kv_cache_dtype"),
    /* Row numbers of the workspace are int32. */
    COUNT(prefill_workspace_tokens, INT32_MAX, .is_optional = true),
    FIELD(context_plan, NAME, .names = context_plans),
    FIELD(path, PATH, .paths = python_paths),
    FIELD(device, DEVICE),
    SMLA_SHARE_FIELD(smla_dense_config),
};

/* Whether varlen_attention serves heads of these sizes, and a latent's memory holds their values:
 * with absorbed weights, it is the scratch of prefills. */
static bool
can_separate(const smla_dense_config *config)
{
    const int64_t nope = config->qk_nope_head_dim, values = config->v_head_dim;
    return nope % 8 == 0 && nope <= SMLA_KV_LORA_RANK && values % 8 == 0 &&
           values <= SMLA_KV_LORA_RANK;
}

static smla_status
choose_path(smla_dense_config *config, smla_error *error)
{
    const char *const name = smla_path_name((smla_path)config->path);
    switch (config->path) {
    case SMLA_PATH_AUTO:
        config->path = can_separate(config) ? SMLA_PATH_AUTO : SMLA_PATH_MIXED;
        return SMLA_OK;
    case SMLA_PATH_MIXED: return SMLA_OK;
    case SMLA_PATH_SEPARATE:
        return can_separate(config)
                   ? SMLA_OK
                   : smla_fail_value(
                         error, smla_create_op,
                         "`path` must be \"mixed\" unless qk_nope_head_dim and v_head_dim are "
                         "multiples of 8, at most %d, got \"separate\" with %lld and %lld",
                         SMLA_KV_LORA_RANK, (long long)config->qk_nope_head_dim,
                         (long long)config->v_head_dim);
    default:
        return smla_fail_value(error, smla_create_op,
                               "`path` must be \"separate\" or \"mixed\", got \"%s\"",
                               name == NULL ? "an unknown one" : name);
    }
}

/* Finds the rows of a chunk of context at most. */
static smla_status
find_workspace_tokens(smla_dense_builder *b, smla_error *error)
{
    const smla_dense_config *const config = &b->config;
    const DLTensor *const given = config->workspace;
    int64_t tokens = config->prefill_workspace_tokens;
    if (tokens == 0 && given != NULL) { /* take_workspaces checks it */
        tokens = given->shape == NULL || given->ndim < 1 ? 0 : given->shape[0];
    } else if (tokens == 0) {
        tokens = smla_context_workspace_size(config->max_model_len, config->max_num_seqs,
                                             config->block_size);
    }
    tokens = tokens < INT32_MAX ? tokens : INT32_MAX;
    const bool gathers = smla_step_modes[config->path].gathers;
    b->workspace_tokens = gathers ? tokens : 0;
    return !gathers || tokens >= config->block_size
               ? SMLA_OK
               : smla_fail_value(
                     error, smla_create_op,
                     "`%s` must be at least a page of block_size = %lld tokens, got %lld",
                     config->prefill_workspace_tokens == 0 ? "workspace"
                                                           : "prefill_workspace_tokens",
                     (long long)config->block_size, (long long)tokens);
}

static smla_status
check(smla_step *s, smla_error *error)
{
    smla_dense_builder *const b = (smla_dense_builder *)s;
    smla_dense_config *const config = &b->config;
    if (config->qk_rope_head_dim != SMLA_QK_ROPE_HEAD_DIM && config->qk_rope_head_dim != NO_ROPE) {
        return smla_fail_value(error, smla_create_op,
                               "`qk_rope_head_dim` must be %d or %d, got %lld",
                               SMLA_QK_ROPE_HEAD_DIM, NO_ROPE, (long long)config->qk_rope_head_dim);
    }
    if (config->qk_rope_head_dim == NO_ROPE) {
        config->qk_rope_head_dim = 0;
    }
    const int64_t head_dim = SMLA_KV_LORA_RANK + config->qk_rope_head_dim;
    if (smla_find_kv_row(config->kv_format, head_dim, SMLA_KV_CONCAT) == NULL) {
        const smla_kv_format_info *const format = smla_find_kv_format(config->kv_format);
        return smla_fail_value(error, smla_create_op,
                               "`kv_format` must be one of keys of %lld values, got %s",
                               (long long)head_dim,
                               format == NULL ? "an unknown one" : format->name);
    }
    SMLA_TRY(choose_path(config, error));
    SMLA_TAKE_CONFIG(s, config);
    b->share = SMLA_SHARE_OF(config);
    return find_workspace_tokens(b, error);
}

/* ---- Buffers ------------------------------------------------------------------------------- */

/* Entries of int32 that hold so many values of 16 bits, whole lines of 64 bytes. */
static int64_t
halves(int64_t count)
{
    return (count + 31) / 32 * 16;
}

/* Every array of `made` begins at a multiple of 64 bytes. */
static void
list_arrays(smla_step *s)
{
    const int64_t tokens = (s->limits.max_num_batched_tokens + 15) / 16 * 16;
    const int64_t rows = s->limits.max_num_batched_tokens * s->num_heads;
    const int64_t rope = ((const smla_dense_builder *)s)->config.qk_rope_head_dim;
    SMLA_ADD_ARRAY(&s->sent, smla_dense_sent, query_start_loc, s->limits.max_num_seqs + 1);
    SMLA_ADD_ARRAY(&s->sent, smla_dense_sent, prefill_query_start_loc, s->limits.max_num_seqs + 2);
    SMLA_ADD_ARRAY(&s->sent, smla_dense_sent, padded_query_start_loc, s->limits.max_num_seqs + 2);
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, positions, 2 * tokens);
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, req_ids, tokens);
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, begin, tokens);
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, end, tokens);
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, q_pe, halves(rows * rope));
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, k_pe, halves(tokens * rope));
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, latent,
                   halves(rows * SMLA_KV_LORA_RANK) +
                       halves(s->limits.max_num_batched_tokens *
                              smla_dense_result_values(s->num_heads)));
    SMLA_ADD_ARRAY(&s->made, smla_dense_made, lse, (rows + 15) / 16 * 16);
    const int64_t partial_rows = smla_step_modes[s->path].gathers ? rows : 0;
    for (size_t i = 0; i < 2; i++) {
        SMLA_ADD_ARRAY(&s->made, smla_dense_made, partial[i],
                       halves(partial_rows * ((const smla_dense_builder *)s)->config.v_head_dim));
        SMLA_ADD_ARRAY(&s->made, smla_dense_made, partial_lse[i], (partial_rows + 15) / 16 * 16);
    }
    smla_dense_list_chunks(s);
}

static int64_t
find_scratch_bytes(const smla_step *s)
{
    const smla_attention_shape largest = {.num_tokens = s->limits.max_num_batched_tokens,
                                          .num_heads = s->num_heads,
                                          .topk = s->limits.max_model_len,
                                          .device_id = s->device.device_id,
                                          .covers_tables = true};
    return s->backend->attention_workspace_size(&largest);
}

static smla_status
find_workspaces(const smla_step *s, smla_workspace_rule rules[SMLA_MAX_WORKSPACES],
                smla_error *error)
{
    const smla_dense_builder *const b = (const smla_dense_builder *)s;
    const smla_dense_config *const config = &b->config;
    const int64_t tokens = b->workspace_tokens;
    const int64_t most =
        tokens > config->max_num_batched_tokens ? tokens : config->max_num_batched_tokens;
    (void)error;
    rules[SMLA_GATHERED] =
        (smla_workspace_rule){.name = "workspace",
                              .given = config->workspace,
                              .columns = SMLA_KV_LORA_RANK + config->qk_rope_head_dim,
                              .rows = tokens,
                              .least = tokens};
    rules[SMLA_DENSE_UP_PROJECTED] =
        (smla_workspace_rule){.name = "up_workspace",
                              .given = config->up_workspace,
                              .columns = config->num_heads *
                                         (config->qk_nope_head_dim + config->v_head_dim),
                              .rows = tokens == 0 ? 0 : most,
                              .least = tokens == 0 ? 0 : most,
                              .hint = "a row per token of a chunk, and of a batch"};
    return SMLA_OK;
}

/* All buffers on the device. */
static int64_t
count_other_bytes(const smla_step *s)
{
    return s->mirror->bytes + smla_arena_bytes(&s->made) + s->scratch_bytes;
}

static smla_status
report_no_memory(const smla_step *s, smla_error *error)
{
    return smla_fail(error, SMLA_ERROR_MEMORY,
                     "%s: queries and results of %lld tokens x %lld heads must fit in memory, got "
                     "none",
                     smla_create_op, (long long)s->limits.max_num_batched_tokens,
                     (long long)s->num_heads);
}

/* ---- A step -------------------------------------------------------------------------------- */

static smla_batch
read_batch(const void *args)
{
    return SMLA_BATCH_OF((const smla_dense_build_args *)args);
}

/* The tokens that request `req` is known to attend to: on the CPU all of its own, elsewhere those
 * of a prefill that may gather its context. Other lengths of the host may be too large. */
static int64_t
find_known_tokens(const smla_step *s, const smla_batch *batch, const smla_dense_build_args *args,
                  int64_t req)
{
    const int32_t query_len = smla_query_len(batch->query_start_loc, req);
    if (s->device.device_type == kDLCPU && query_len > 0) {
        const int32_t *const seq_lens = smla_data(args->seq_lens);
        return seq_lens[req * smla_stride(args->seq_lens, 0)];
    }
    const bool is_exact =
        smla_step_modes[s->path].gathers && query_len > s->limits.decode_threshold;
    return is_exact ? batch->seq_lens[req] : 0;
}

static smla_status
check_table_width(const smla_step *s, const smla_batch *batch, const smla_dense_build_args *args,
                  smla_error *error)
{
    const smla_dense_builder *const b = (const smla_dense_builder *)s;
    for (int64_t req = 0; req < args->num_reqs; req++) {
        const int64_t known = find_known_tokens(s, batch, args, req);
        SMLA_TRY(smla_check_table_width(smla_build_op, args->block_table, b->config.block_size, req,
                                        smla_count_own(&b->share, known), error));
    }
    return SMLA_OK;
}

static smla_status
check_args(const smla_step *s, const smla_batch *batch, const void *given, smla_error *error)
{
    const smla_dense_build_args *const args = given;
    smla_checker c;
    smla_open_checker(&c, smla_build_op, error);
    SMLA_TRY(smla_require_table(&c, "block_table", args->block_table, args->num_reqs, 0));
    SMLA_TRY(smla_require_slots(&c, "slot_mapping", args->slot_mapping, args->num_actual_tokens,
                                SMLA_RULE_MORE_ROWS));
    SMLA_TRY(smla_require_vector(&c, "seq_lens", args->seq_lens, args->num_reqs,
                                 SMLA_RULE_MORE_ROWS, "a length per request"));
    SMLA_TRY(smla_require_step_device(s, smla_build_op, "block_table", c.device, error));
    return check_table_width(s, batch, args, error);
}

static void
fill(const smla_step *s, const smla_batch *batch, int32_t *memory)
{
    const int64_t num_reqs = batch->num_reqs, first = s->facts.split.num_decodes;
    const int64_t num_prefills = num_reqs - first;
    const int32_t *const starts = batch->query_start_loc;
    smla_dense_sent host;
    smla_cut_arena(&s->sent, memory, &host);
    for (int64_t i = 0; i <= s->limits.max_num_seqs; i++) {
        host.query_start_loc[i] = starts[i < num_reqs ? i : num_reqs];
    }
    for (int64_t i = 0; i < s->limits.max_num_seqs + 2; i++) {
        const int32_t end = starts[i < num_prefills ? first + i : num_reqs] - starts[first];
        host.prefill_query_start_loc[i] = end;
        host.padded_query_start_loc[i] =
            i <= num_prefills ? end : (int32_t)(batch->num_actual_tokens - starts[first]);
    }
    if (s->facts.num_chunks > 0) {
        smla_dense_fill_chunks(s, batch, &host);
    } else { /* arrays of chunks may be megabytes, and are the last ones */
        s->mirror->used_bytes =
            smla_arena_bytes_before(&s->sent, offsetof(smla_dense_sent, context_starts));
    }
}

static smla_key_ranges_params
ranges_of(const smla_dense_builder *b, const smla_dense_build_args *args, smla_stream stream)
{
    return (smla_key_ranges_params){
        .call = {.op = smla_build_op, .stream = stream},
        .reqs = {.num_tokens = args->num_actual_tokens,
                 .num_reqs = args->num_reqs,
                 .query_starts = b->sent.query_start_loc,
                 .query_starts_stride = 1,
                 .seq_lens = smla_data(args->seq_lens),
                 .seq_lens_stride = smla_stride(args->seq_lens, 0)},
        .rule = {.left = -1, .right = 0, .share = b->share},
        .to = {b->made.req_ids, b->made.begin, b->made.end},
        .positions = (int64_t *)(void *)b->made.positions,
    };
}

static smla_status
fill_lists(const smla_step *s, const void *given, smla_stream stream, smla_error *error)
{
    const smla_dense_builder *const b = (const smla_dense_builder *)s;
    const smla_key_ranges_params params = ranges_of(b, given, stream);
    return s->backend->find_key_ranges(&params, error);
}

static void
commit(smla_step *s, const void *given)
{
    smla_dense_builder *const b = (smla_dense_builder *)s;
    const smla_dense_build_args *const args = given;
    const smla_stream stream = {.device_id = s->device.device_id, .handle = args->stream};
    b->ranges = ranges_of(b, args, stream);
    b->metadata = (smla_dense_metadata){
        SMLA_METADATA_OF(&s->facts),
        .query_start_loc = b->sent.query_start_loc,
        .req_id_per_token = b->made.req_ids,
        .input_positions = b->ranges.positions,
        .prefill_query_start_loc = b->sent.prefill_query_start_loc,
    };
    if (s->facts.num_chunks > 0) {
        b->metadata.num_context_chunks = s->facts.num_chunks;
        b->metadata.context_chunks = (const void *)b->kept.context_chunks;
        b->metadata.context_chunk_starts = b->sent.context_starts;
        b->metadata.context_chunk_lens = b->sent.context_lens;
        b->metadata.context_chunk_key_starts = b->sent.context_key_starts;
        b->metadata.context_chunk_query_starts = b->sent.context_query_starts;
    }
    smla_slice_rows(&b->seq_lens, args->seq_lens, 0, args->num_reqs);
    smla_slice_rows(&b->block_table, args->block_table, 0, args->num_reqs);
    smla_slice_rows(&b->slot_mapping, args->slot_mapping, 0, args->num_actual_tokens);
}

static int
describe(const smla_step *s, smla_step_view views[SMLA_MAX_STEP_VIEWS])
{
    const smla_dense_metadata *const m = &((const smla_dense_builder *)s)->metadata;
    int n = m->num_context_chunks > 0 ? smla_dense_show_chunks(s, views) : 0;
    smla_show_vector(&views[n++], "req_id_per_token", m->req_id_per_token, m->num_actual_tokens);
    smla_show_vector(&views[n++], "query_start_loc", m->query_start_loc, m->num_reqs + 1);
    smla_show_vector(&views[n++], "prefill_query_start_loc", m->prefill_query_start_loc,
                     m->split.num_prefills + 1);
    smla_show_vector(&views[n], "input_positions", m->input_positions, m->num_actual_tokens);
    views[n++].dtype.bits = 64;
    return n;
}

int64_t
smla_dense_value_dim(const smla_dense_builder *b)
{
    return b->config.v_head_dim;
}

const smla_step_plan smla_dense_plan = {
    SMLA_PLAN_TYPES("dense", smla_dense_builder, smla_dense_build_args, fields),
    SMLA_PLAN_SENDS(smla_dense_builder),
    SMLA_PLAN_FUNCTIONS,
    .workspaces[SMLA_DENSE_UP_PROJECTED] = offsetof(smla_dense_config, up_workspace),
    .kept = offsetof(smla_dense_builder, kept),
    .count_other_bytes = count_other_bytes,
    .cut_chunks = smla_dense_cut_chunks,
    .fill_lists = fill_lists,
};
