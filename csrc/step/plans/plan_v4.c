/* plan_v4.c: DeepSeek V4's plan of a step: a sliding window, and compressed caches of some ratios.
 *
 * The host sends positions and lengths. One kernel writes what depends on block tables and on
 * slot_mapping: the slots of a token's rows, and the lists of the rows that it sees.
 */
#include "step/plans/plan_v4.h"

#include <stdio.h>

#include "core/attention/params_attention.h"
#include "ops/check.h"
#include "step/chunks.h"
#include "step/plans.h"

/* ---- Config -------------------------------------------------------------------------------- */

static const smla_path python_paths[] = {SMLA_PATH_DIRECT, SMLA_PATH_SEPARATE, SMLA_PATH_AUTO};

#define COUNT(field, most, ...) SMLA_COUNT_FIELD(smla_v4_config, field, most, __VA_ARGS__)
#define FIELD(field, kind, ...) \
    SMLA_CONFIG_FIELD(smla_v4_config, field, SMLA_FIELD_##kind, __VA_ARGS__)
#define OF_RATIOS                                                                  \
    .count = offsetof(smla_v4_config, num_ratios), .capacity = SMLA_V4_MAX_RATIOS, \
    .keys = offsetof(smla_v4_config, compress_ratios), .most = INT32_MAX

static const smla_config_field fields[] = {
    COUNT(num_heads, SMLA_MAX_HEADS),
    COUNT(window, INT32_MAX / 2),
    COUNT(topk_tokens, INT32_MAX / 2),
    COUNT(block_size, INT32_MAX),
    COUNT(swa_block_size, INT32_MAX),
    COUNT(max_num_seqs, INT32_MAX - 1),
    COUNT(max_num_batched_tokens, INT32_MAX),
    COUNT(max_model_len, INT32_MAX / 2),
    COUNT(decode_threshold, INT32_MAX, .standard = 1),
    COUNT(prefill_chunk_size, INT32_MAX, .standard = 4),
    FIELD(compress_ratios, LIST, OF_RATIOS, .least = 2),
    FIELD(state_block_sizes, BY_NUMBER, OF_RATIOS, .least = 1),
    FIELD(softmax_scale, NUMBER),
    FIELD(q_scale, SCALE, .standard = 1),
    FIELD(kv_scale, SCALE, .standard = 1),
    FIELD(kv_format, FORMAT, .in_python = "kv_cache_dtype"),
    FIELD(compressed_kv_format, FORMAT, .in_python = "compressed_kv_cache_dtype"),
    FIELD(path, PATH, .paths = python_paths),
    FIELD(device, DEVICE),
    SMLA_SHARE_FIELD(smla_v4_config),
};

static smla_status
check_ratios(const smla_v4_config *config, smla_error *error)
{
    for (int i = 0; i < config->num_ratios; i++) {
        const int64_t ratio = config->compress_ratios[i];
        if (smla_v4_find_ratio(config, ratio) != i) {
            return smla_fail_value(error, smla_create_op,
                                   "`compress_ratios` must be different, got %lld twice",
                                   (long long)ratio);
        }
        if (config->block_size % ratio != 0) {
            return smla_fail_value(
                error, smla_create_op,
                "`block_size` must be a multiple of each compress ratio (%lld), got %lld",
                (long long)ratio, (long long)config->block_size);
        }
    }
    return SMLA_OK;
}

static smla_status
check_format(const char *name, int32_t number, smla_kv_set served, smla_error *error)
{
    const smla_kv_format_info *const format = smla_find_kv_format(number);
    if (smla_find_kv_row(number, SMLA_V4_HEAD_DIM, served) != NULL) {
        return SMLA_OK;
    }
    return smla_fail_value(
        error, smla_create_op,
        "`%s` must be a format of keys of %d values that attention takes, got %s", name,
        SMLA_V4_HEAD_DIM, format == NULL ? "an unknown one" : format->name);
}

int
smla_v4_find_ratio(const smla_v4_config *config, int64_t ratio)
{
    for (int i = 0; i < config->num_ratios; i++) {
        if (config->compress_ratios[i] == ratio) {
            return i;
        }
    }
    return -1;
}

/* The groups of a step: the ratios, and the indexer if a ratio has one. */
static int
num_groups(const smla_v4_config *config)
{
    return (int)config->num_ratios + (smla_v4_find_ratio(config, SMLA_V4_INDEXED_RATIO) >= 0);
}

static int64_t
group_ratio(const smla_v4_config *config, int group)
{
    return group < config->num_ratios ? config->compress_ratios[group] : SMLA_V4_INDEXED_RATIO;
}

/* ---- Widths and rows ----------------------------------------------------------------------- */

static int64_t
round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* Columns of a group's `indices`: all complete groups of the longest request, rounded up. */
static int64_t
list_columns(const smla_v4_config *config, int64_t ratio)
{
    return round_up((config->max_model_len + ratio - 1) / ratio, SMLA_V4_LIST_ALIGN);
}

/* Those of them that a step uses. */
static int64_t
used_columns(const smla_v4_config *config, int64_t ratio, int64_t max_seq_len)
{
    const int64_t most = list_columns(config, ratio);
    int64_t used = SMLA_V4_LIST_ALIGN;
    while (used < max_seq_len / ratio && used < most) {
        used *= 2;
    }
    return used < most ? used : most;
}

smla_v4_rows
smla_v4_workspace_rows(const smla_v4_config *config, int64_t ratio)
{
    const int64_t start = ratio > 1 ? (config->max_model_len + ratio - 1) / ratio : 0;
    return (smla_v4_rows){.window_start = start,
                          .request_rows = start + config->window + config->max_num_batched_tokens};
}

/* Rows of the workspace that all layers share. */
static int64_t
workspace_size(const smla_v4_config *config)
{
    int64_t most = smla_v4_workspace_rows(config, 1).request_rows;
    for (int i = 0; i < config->num_ratios; i++) {
        const int64_t rows =
            smla_v4_workspace_rows(config, config->compress_ratios[i]).request_rows;
        most = rows > most ? rows : most;
    }
    return smla_step_modes[config->path].gathers ? most * config->prefill_chunk_size : 0;
}

/* Sets the widths of the lists. Only layers without an indexer have lists of their groups. */
static void
set_columns(smla_v4_builder *b)
{
    const smla_v4_config *config = &b->config;
    int64_t most = config->topk_tokens;
    for (int i = 0; i < config->num_ratios; i++) {
        const bool is_indexed = config->compress_ratios[i] == SMLA_V4_INDEXED_RATIO;
        b->columns[i] = is_indexed ? 0 : list_columns(config, config->compress_ratios[i]);
        most = b->columns[i] > most ? b->columns[i] : most;
    }
    if (smla_step_modes[config->path].gathers) { /* a token's list holds its window, too */
        most = round_up(most + config->window, SMLA_V4_LIST_ALIGN);
    }
    b->index_columns = most;
}

static void
name_tables(smla_v4_builder *b)
{
    for (int i = 0; i < SMLA_V4_MAX_RATIOS; i++) {
        const long long ratio = b->config.compress_ratios[i];
        smla_v4_names *const names = &b->names[i];
        snprintf(names->compressed, sizeof names->compressed, "compressed[%lld]", ratio);
        snprintf(names->states, sizeof names->states, "states[%lld]", ratio);
    }
}

static smla_status
check(smla_step *s, smla_error *error)
{
    smla_v4_builder *const b = (smla_v4_builder *)s;
    smla_v4_config *const config = &b->config;
    SMLA_TRY(check_ratios(config, error));
    SMLA_TRY(check_format("kv_format", config->kv_format, SMLA_KV_ATTENTION, error));
    SMLA_TRY(
        check_format("compressed_kv_format", config->compressed_kv_format, SMLA_KV_EXTRA, error));
    b->share = SMLA_SHARE_OF(config);
    if (b->share.size > 0 && config->path == SMLA_PATH_SEPARATE) {
        return smla_fail_value(error, smla_create_op,
                               "`path` must be \"direct\" or left out with `cp` of several ranks, "
                               "whose prefills read the caches, got \"separate\"");
    }
    if (config->path == SMLA_PATH_AUTO) {
        b->plans_path = config->workspace != NULL && b->share.size == 0;
        config->path = b->plans_path ? SMLA_PATH_SEPARATE : SMLA_PATH_DIRECT;
    }
    if (config->path != SMLA_PATH_DIRECT && config->path != SMLA_PATH_SEPARATE) {
        return smla_fail_value(error, smla_create_op,
                               "`path` must be \"direct\" or \"separate\", got %d", config->path);
    }
    SMLA_TAKE_CONFIG(s, config);
    set_columns(b);
    name_tables(b);
    return SMLA_OK;
}

/* ---- Buffers ------------------------------------------------------------------------------- */

static void
list_arrays(smla_step *s)
{
    const smla_v4_builder *const b = (const smla_v4_builder *)s;
    const int64_t tokens = s->limits.max_num_batched_tokens;
    const int64_t reqs = s->limits.max_num_seqs;
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, req_id_per_token, tokens);
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, positions, tokens);
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, query_start_loc, reqs + 1);
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, seq_lens, reqs);
    SMLA_ADD_ARRAY(&s->sent, smla_v4_sent, gather_lens, reqs);
    if (smla_step_modes[s->path].gathers) {
        smla_v4_list_chunks(s);
    }
    /* Kernels read the lists of a call in vectors, so they begin where the memory does. */
    SMLA_ADD_ARRAY(&s->made, smla_v4_made, indices,
                   round_up(tokens * b->index_columns, SMLA_V4_LIST_ALIGN));
    SMLA_ADD_ARRAY(&s->made, smla_v4_made, index_lens, round_up(tokens, SMLA_V4_LIST_ALIGN));
    SMLA_ADD_ARRAY(&s->made, smla_v4_made, is_valid, (tokens + 3) / 4);
    SMLA_ADD_ARRAY(&s->made, smla_v4_made, swa_indices, tokens * b->config.window);
    SMLA_ADD_ARRAY(&s->made, smla_v4_made, swa_lens, tokens);
    const int64_t ranks_tokens = b->share.size == 0 ? 0 : tokens;
    SMLA_ADD_ARRAY(&s->made, smla_v4_made, no_lens, ranks_tokens);
    SMLA_ADD_ARRAY(&s->made, smla_v4_made, own_topk, ranks_tokens * b->config.topk_tokens);
    for (int i = 0; i < num_groups(&b->config); i++) {
        SMLA_ADD_ARRAY(&s->made, smla_v4_made, groups[i].slot_mapping, tokens);
        SMLA_ADD_ARRAY(&s->made, smla_v4_made, groups[i].state_slot_mapping, tokens);
        SMLA_ADD_ARRAY(&s->made, smla_v4_made, groups[i].context_lens, tokens);
        SMLA_ADD_ARRAY(&s->made, smla_v4_made, groups[i].lens, tokens);
        SMLA_ADD_ARRAY(&s->made, smla_v4_made, groups[i].indices, tokens * b->columns[i]);
    }
}

_Static_assert((int)SMLA_MAX_ARENA_ROWS >= 7 + 5 * SMLA_MAX_STEP_GROUPS, "room for all arrays");

/* The bytes of the largest calls of attention: over the caches, and over the workspace. */
static int64_t
find_scratch_bytes(const smla_step *s)
{
    const smla_v4_builder *const b = (const smla_v4_builder *)s;
    const smla_attention_shape shapes[] = {
        {.topk = b->config.window, .extra_topk = b->index_columns},
        {.topk = smla_step_modes[s->path].gathers ? b->index_columns : 0},
    };
    int64_t most = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        smla_attention_shape shape = shapes[i];
        shape.num_tokens = s->limits.max_num_batched_tokens;
        shape.num_heads = s->num_heads;
        shape.device_id = s->device.device_id;
        const int64_t bytes = s->backend->attention_workspace_size(&shape);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static smla_status
find_workspaces(const smla_step *s, smla_workspace_rule rules[SMLA_MAX_WORKSPACES],
                smla_error *error)
{
    const smla_v4_config *const config = &((const smla_v4_builder *)s)->config;
    const int64_t rows = workspace_size(config);
    if (rows > INT32_MAX) {
        return smla_fail_value(
            error, smla_create_op,
            "`prefill_chunk_size` must make a workspace of less than 2^31 rows, got %lld rows: "
            "lower it, max_model_len or max_num_batched_tokens",
            (long long)rows);
    }
    rules[SMLA_GATHERED] =
        (smla_workspace_rule){.name = "workspace",
                              .given = config->workspace,
                              .columns = SMLA_V4_HEAD_DIM,
                              .rows = rows,
                              .least = rows,
                              .may_be_pages = true,
                              .hint = "prefill_chunk_size requests of the largest size"};
    return SMLA_OK;
}

static smla_status
report_no_memory(const smla_step *s, smla_error *error)
{
    const smla_v4_builder *const b = (const smla_v4_builder *)s;
    return smla_fail(error, SMLA_ERROR_MEMORY,
                     "%s: lists of %lld tokens x %lld columns and a workspace of %lld rows must "
                     "fit in memory, got none",
                     smla_create_op, (long long)s->limits.max_num_batched_tokens,
                     (long long)b->index_columns, (long long)workspace_size(&b->config));
}

/* ---- Checking a step ----------------------------------------------------------------------- */

static smla_batch
read_batch(const void *args)
{
    return SMLA_BATCH_OF((const smla_v4_build_args *)args);
}

/* The tables that a group reads. The indexer's are those of the indexed ratio if it has none. */
typedef struct group_source {
    const DLTensor *compressed; /* NULL: the step has no such group */
    const DLTensor *state;      /* NULL: it has no states */
} group_source;

static group_source
find_source(const smla_v4_config *config, const smla_v4_build_args *args, int group)
{
    const int ratio = smla_v4_find_ratio(config, group_ratio(config, group));
    group_source source = {args->compressed_tables[ratio], args->state_tables[ratio]};
    if (group == config->num_ratios) {
        source.compressed = args->index_table != NULL ? args->index_table : source.compressed;
        source.state = args->index_state_table != NULL ? args->index_state_table : source.state;
    }
    return source;
}

static smla_status
check_tables(smla_checker *c, const smla_v4_names *names, const smla_v4_build_args *args)
{
    const int64_t num_reqs = args->num_reqs;
    SMLA_TRY(smla_require_table(c, "block_table", args->block_table, num_reqs, 0));
    SMLA_TRY(smla_require_slots(c, "slot_mapping", args->slot_mapping, args->num_actual_tokens,
                                SMLA_RULE_MORE_ROWS));
    for (int i = 0; i < SMLA_V4_MAX_RATIOS; i++) {
        SMLA_TRY(smla_require_table(c, names[i].compressed, args->compressed_tables[i], num_reqs,
                                    SMLA_RULE_OPTIONAL));
        SMLA_TRY(smla_require_table(c, names[i].states, args->state_tables[i], num_reqs,
                                    SMLA_RULE_OPTIONAL));
    }
    SMLA_TRY(smla_require_table(c, "index", args->index_table, num_reqs, SMLA_RULE_OPTIONAL));
    return smla_require_table(c, "index_states", args->index_state_table, num_reqs,
                              SMLA_RULE_OPTIONAL);
}

static smla_status
check_args(const smla_step *s, const smla_batch *batch, const void *given, smla_error *error)
{
    const smla_v4_config *const config = &((const smla_v4_builder *)s)->config;
    const smla_v4_build_args *const args = given;
    for (int64_t req = 0; req < args->num_reqs; req++) {
        if (batch->seq_lens[req] > args->max_seq_len) {
            return smla_fail_value(
                error, smla_build_op,
                "`max_seq_len` must be at least the longest request (%d), got %lld",
                batch->seq_lens[req], (long long)args->max_seq_len);
        }
    }
    smla_checker c;
    smla_open_checker(&c, smla_build_op, error);
    SMLA_TRY(check_tables(&c, ((const smla_v4_builder *)s)->names, args));
    SMLA_TRY(smla_require_step_device(s, smla_build_op, "block_table", c.device, error));
    const DLTensor *const index_tables[] = {args->index_table, args->index_state_table};
    for (int i = 0; i < 2; i++) {
        if (index_tables[i] != NULL && smla_v4_find_ratio(config, SMLA_V4_INDEXED_RATIO) < 0) {
            return smla_fail_value(
                error, smla_build_op,
                "`index` must be absent for a config without compress ratio %d, got an array",
                SMLA_V4_INDEXED_RATIO);
        }
    }
    for (int i = 0; i < num_groups(config); i++) {
        const group_source source = find_source(config, args, i);
        if (source.compressed == NULL && source.state != NULL) {
            return smla_fail_value(
                error, smla_build_op,
                "`compressed` must have a table of each ratio in `states`, got none of ratio %lld",
                (long long)group_ratio(config, i));
        }
    }
    return SMLA_OK;
}

/* ---- Building a step ----------------------------------------------------------------------- */

static void
fill_positions(const smla_step *s, const smla_batch *batch, int32_t *positions)
{
    int64_t t = 0;
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        const int64_t end = batch->query_start_loc[req + 1];
        for (; t < end; t++) {
            positions[t] = (int32_t)(batch->seq_lens[req] - (end - t));
        }
    }
    for (; t < s->limits.max_num_batched_tokens; t++) {
        positions[t] = 0;
    }
}

static void
fill(const smla_step *s, const smla_batch *batch, int32_t *memory)
{
    const smla_v4_config *const config = &((const smla_v4_builder *)s)->config;
    smla_v4_sent host = {.positions = NULL};
    smla_cut_arena(&s->sent, memory, &host);
    smla_fill_req_ids(&s->limits, batch, host.req_id_per_token);
    fill_positions(s, batch, host.positions);
    host.query_start_loc[0] = 0;
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        host.query_start_loc[req + 1] = batch->query_start_loc[req + 1];
        host.seq_lens[req] = batch->seq_lens[req];
        host.gather_lens[req] = (int32_t)smla_v4_gather_len(config, batch, req);
    }
    if (smla_step_modes[s->path].gathers) {
        smla_v4_fill_chunks(s, batch, &host);
    }
}

static smla_step_group
group_of(const smla_v4_builder *b, const smla_v4_build_args *args, int i)
{
    const smla_v4_lists *const lists = &b->made.groups[i];
    const group_source source = find_source(&b->config, args, i);
    const int64_t ratio = group_ratio(&b->config, i);
    const int64_t state_size = b->config.state_block_sizes[smla_v4_find_ratio(&b->config, ratio)];
    return (smla_step_group){
        .ratio = ratio,
        .pages = smla_page_table_of(source.compressed, b->config.block_size / ratio),
        .state_pages = smla_page_table_of(source.state, state_size),
        .width = used_columns(&b->config, ratio, args->max_seq_len),
        .slot_mapping = lists->slot_mapping,
        .state_slot_mapping = source.state == NULL ? NULL : lists->state_slot_mapping,
        .context_lens = lists->context_lens,
        .lens = lists->lens,
        .indices = b->columns[i] == 0 ? NULL : lists->indices,
        .indices_stride_token = b->columns[i],
    };
}

static smla_status
fill_lists(const smla_step *s, const void *given, smla_stream stream, smla_error *error)
{
    const smla_v4_builder *const b = (const smla_v4_builder *)s;
    const smla_v4_build_args *const args = given;
    smla_step_lists_params params = {
        .call = {.op = smla_build_op, .stream = stream},
        .num_rows = s->limits.max_num_batched_tokens,
        .num_tokens = args->num_actual_tokens,
        .num_query_tokens = args->query_start_loc_cpu[args->num_reqs],
        .num_decode_tokens = s->facts.split.num_decode_tokens,
        .req_id_per_token = b->sent.req_id_per_token,
        .positions = b->sent.positions,
        .slot_mapping = smla_data(args->slot_mapping),
        .slot_stride = smla_stride(args->slot_mapping, 0),
        .slots_are_int64 = smla_dtype(args->slot_mapping) == SMLA_DTYPE_INT64,
        .window = b->config.window,
        .share = b->share,
        .swa_pages = smla_page_table_of(args->block_table, b->config.swa_block_size),
        .is_valid = (uint8_t *)b->made.is_valid,
        .swa_indices = b->made.swa_indices,
        .swa_lens = b->made.swa_lens,
    };
    for (int i = 0; i < num_groups(&b->config); i++) {
        if (find_source(&b->config, args, i).compressed != NULL) {
            params.groups[params.num_groups++] = group_of(b, args, i);
        }
    }
    return s->backend->fill_step_lists(&params, error);
}

static smla_v4_group
show_group(const smla_v4_builder *b, const smla_v4_build_args *args, int i)
{
    if (find_source(&b->config, args, i).compressed == NULL) {
        return (smla_v4_group){.ratio = 0};
    }
    const smla_step_group group = group_of(b, args, i);
    return (smla_v4_group){.ratio = group.ratio,
                           .slot_mapping = group.slot_mapping,
                           .state_slot_mapping = group.state_slot_mapping,
                           .context_lens = group.context_lens,
                           .lens = group.lens,
                           .indices = group.indices,
                           .width = group.width,
                           .indices_stride_token = group.indices_stride_token};
}

static void
commit(smla_step *s, const void *given)
{
    smla_v4_builder *const b = (smla_v4_builder *)s;
    const smla_v4_build_args *const args = given;
    b->metadata = (smla_v4_metadata){
        SMLA_METADATA_OF(&s->facts),
        .req_id_per_token = b->sent.req_id_per_token,
        .positions = b->sent.positions,
        .query_start_loc = b->sent.query_start_loc,
        .seq_lens = b->sent.seq_lens,
        .gather_lens = b->sent.gather_lens,
        .is_valid = (const uint8_t *)b->made.is_valid,
        .swa_indices = b->made.swa_indices,
        .swa_lens = b->made.swa_lens,
        .chunks = s->chunks,
        .num_chunks = s->facts.num_chunks,
        .num_groups = num_groups(&b->config),
    };
    for (int i = 0; i < num_groups(&b->config); i++) {
        b->metadata.groups[i] = show_group(b, args, i);
    }
    smla_slice_rows(&b->swa_table, args->block_table, 0, args->num_reqs);
    for (int i = 0; i < b->config.num_ratios; i++) {
        if (args->compressed_tables[i] != NULL) {
            smla_slice_rows(&b->compressed_tables[i], args->compressed_tables[i], 0,
                            args->num_reqs);
        }
    }
}

/* Lists what a binding shows of a group. Decodes and prefills have rows of their own. */
static int
describe_group(const smla_v4_metadata *m, int group, smla_step_view *views)
{
    const smla_v4_group *const g = &m->groups[group];
    const smla_batch_split *const split = &m->split;
    const int32_t *const decode_lens = g->indices == NULL ? NULL : g->lens;
    int n = 0;
    smla_show_vector(&views[n++], "slot_mapping", g->slot_mapping, m->num_actual_tokens);
    smla_show_vector(&views[n++], "state_slot_mapping", g->state_slot_mapping,
                     m->num_actual_tokens);
    smla_show_vector(&views[n++], "context_lens", g->context_lens, m->num_actual_tokens);
    smla_show_vector(&views[n++], "decode_lens", decode_lens, split->num_decode_tokens);
    smla_show_rows(&views[n++], "decode_indices", g->indices, 0, split->num_decode_tokens, g->width,
                   g->indices_stride_token);
    smla_show_rows(&views[n++], "prefill_indices", g->indices, split->num_decode_tokens,
                   split->num_prefill_tokens, g->width, g->indices_stride_token);
    for (int i = 0; i < n; i++) {
        views[i].group = group;
    }
    return n;
}

static int
describe(const smla_step *s, smla_step_view views[SMLA_MAX_STEP_VIEWS])
{
    const smla_v4_metadata *const m = &((const smla_v4_builder *)s)->metadata;
    const int64_t window = ((const smla_v4_builder *)s)->config.window;
    const int64_t tokens = m->num_actual_tokens;
    const int64_t first = m->split.num_decodes;
    const int64_t prefills = m->split.num_prefills;
    int n = 0;
    smla_show_list(&views[n++], "chunks", &s->chunks->req_start, s->facts.num_chunks,
                   SMLA_CHUNK_NUMBERS);
    smla_show_vector(&views[n++], "req_id_per_token", m->req_id_per_token, tokens);
    smla_show_vector(&views[n++], "positions", m->positions, tokens);
    smla_show_vector(&views[n], "is_valid", m->is_valid, tokens);
    views[n++].dtype = (DLDataType){kDLBool, 8, 1};
    smla_show_rows(&views[n++], "swa_indices", m->swa_indices, 0, tokens, window, window);
    smla_show_vector(&views[n++], "swa_lens", m->swa_lens, tokens);
    smla_show_vector(&views[n++], "seq_lens", m->seq_lens + first, prefills);
    smla_show_vector(&views[n++], "gather_lens", m->gather_lens + first, prefills);
    for (int i = 0; i < m->num_groups; i++) {
        n += m->groups[i].ratio == 0 ? 0 : describe_group(m, i, &views[n]);
    }
    return n;
}

const smla_step_plan smla_v4_plan = {
    SMLA_PLAN_TYPES("v4", smla_v4_builder, smla_v4_build_args, fields),
    SMLA_PLAN_SENDS(smla_v4_builder),
    SMLA_PLAN_FUNCTIONS,
    .kept = offsetof(smla_v4_builder, kept),
    .cut_chunks = smla_v4_cut_chunks,
    .fill_lists = fill_lists,
};
