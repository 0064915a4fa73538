/* v4_builder.c: the metadata builder of DeepSeek V4. It keeps every array of a step in buffers that
 * are made once, for the largest batch.
 *
 * A build sends what the host knows (positions, lengths) in one copy. Then one kernel writes what
 * depends on block tables and on slot_mapping. v4_plan.c has the numbers.
 */
#include "step/v4_builder.h"

#include <stddef.h>
#include <stdlib.h>

#include "core/entry.h"
#include "core/params_attention.h"
#include "core/rule.h"
#include "ops/check.h"
#include "step/arena.h"
#include "step/plan.h"

static const char create_op[] = "MetadataBuilder";
static const char build_op[] = "MetadataBuilder.build";

/* ---- Arrays -------------------------------------------------------------------------------- */

enum {
    MAX_STEP_ROWS = sizeof(smla_v4_step) / sizeof(int32_t *),
    MAX_LIST_ROWS = sizeof(smla_v4_lists) / sizeof(int32_t *),
};

typedef struct arena_table {
    int num_rows;
    smla_arena_row rows[MAX_LIST_ROWS];
} arena_table;

_Static_assert((int)MAX_STEP_ROWS <= (int)MAX_LIST_ROWS, "a table has room for both structs");

static void
add_row(arena_table *table, size_t field, int64_t count)
{
    table->rows[table->num_rows++] = (smla_arena_row){field, count};
}

/* The arrays in the mirror. */
static arena_table
list_step(const smla_v4_config *config)
{
    const int64_t tokens = config->max_num_batched_tokens;
    const int64_t reqs = config->max_num_seqs;
    arena_table table = {.num_rows = 0};
    add_row(&table, offsetof(smla_v4_step, req_id_per_token), tokens);
    add_row(&table, offsetof(smla_v4_step, positions), tokens);
    add_row(&table, offsetof(smla_v4_step, query_start_loc), reqs + 1);
    add_row(&table, offsetof(smla_v4_step, seq_lens), reqs);
    add_row(&table, offsetof(smla_v4_step, gather_lens), reqs);
    for (int i = 0; i < config->num_ratios; i++) {
        add_row(&table, offsetof(smla_v4_step, compressed_lens[i]), reqs);
    }
    return table;
}

/* The arrays that kernels write. */
static arena_table
list_lists(const smla_v4_builder *b)
{
    const int64_t tokens = b->config.max_num_batched_tokens;
    arena_table table = {.num_rows = 0};
    add_row(&table, offsetof(smla_v4_lists, is_valid), (tokens + 3) / 4);
    add_row(&table, offsetof(smla_v4_lists, swa_indices), tokens * b->config.window);
    add_row(&table, offsetof(smla_v4_lists, swa_lens), tokens);
    for (int i = 0; i < smla_v4_num_groups(&b->config); i++) {
        const size_t group = offsetof(smla_v4_lists, groups) + (size_t)i * sizeof(smla_v4_group);
        add_row(&table, group + offsetof(smla_v4_group, slot_mapping), tokens);
        add_row(&table, group + offsetof(smla_v4_group, state_slot_mapping), tokens);
        add_row(&table, group + offsetof(smla_v4_group, context_lens), tokens);
        add_row(&table, group + offsetof(smla_v4_group, lens), tokens);
        add_row(&table, group + offsetof(smla_v4_group, indices), tokens * b->columns[i]);
    }
    return table;
}

static smla_v4_step
cut_step(const smla_v4_config *config, int32_t *memory)
{
    const arena_table table = list_step(config);
    smla_v4_step step = {.positions = NULL};
    smla_cut_arena(table.rows, table.num_rows, memory, &step);
    return step;
}

/* ---- Creating a builder -------------------------------------------------------------------- */

/* Sets the widths of the lists. Only layers without an indexer have lists of their groups. */
static void
set_columns(smla_v4_builder *b)
{
    const smla_v4_config *config = &b->config;
    int64_t most = config->topk_tokens;
    for (int i = 0; i < config->num_ratios; i++) {
        const bool is_indexed = config->ratios[i] == SMLA_V4_INDEXED_RATIO;
        b->columns[i] = is_indexed ? 0 : smla_v4_list_columns(config, config->ratios[i]);
        most = b->columns[i] > most ? b->columns[i] : most;
    }
    if (config->path == SMLA_PATH_SEPARATE) { /* a token's list holds its window, too */
        most += config->window + SMLA_V4_LIST_ALIGN - 1;
        most -= most % SMLA_V4_LIST_ALIGN;
    }
    b->index_columns = most;
}

static smla_status
report_no_memory(const smla_v4_builder *b, smla_error *error)
{
    return smla_fail(error, SMLA_ERROR_MEMORY,
                     "%s: lists of %lld tokens x %lld columns and a workspace of %lld rows must "
                     "fit in memory, got none",
                     create_op, (long long)b->config.max_num_batched_tokens,
                     (long long)b->index_columns, (long long)smla_v4_workspace_size(&b->config));
}

/* Whether the bytes of all lists are a number. */
static bool
has_list_size(const smla_v4_builder *b)
{
    int64_t columns = b->index_columns + b->config.window + 64;
    int64_t bytes;
    for (int i = 0; i < SMLA_MAX_STEP_GROUPS; i++) {
        columns += b->columns[i];
    }
    return !__builtin_mul_overflow(columns * (int64_t)sizeof(int32_t),
                                   b->config.max_num_batched_tokens, &bytes);
}

/* The largest calls of attention: over the caches, and over the workspace. */
static int64_t
find_scratch_bytes(const smla_v4_builder *b)
{
    const bool has_workspace = b->config.path == SMLA_PATH_SEPARATE;
    const smla_attention_shape shapes[] = {
        {.topk = b->config.window, .extra_topk = b->index_columns},
        {.topk = has_workspace ? b->index_columns : 0},
    };
    int64_t most = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        smla_attention_shape shape = shapes[i];
        shape.num_tokens = b->config.max_num_batched_tokens;
        shape.num_heads = b->config.num_heads;
        shape.device_id = b->config.device.device_id;
        const int64_t bytes = b->backend->attention_workspace_size(&shape);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* [requests, M, 512], whose rows all lie the same distance apart, as [rows, 512]. Other arrays stay
 * as they are. */
static const DLTensor *
flatten_rows(smla_view *view, const DLTensor *tensor)
{
    int64_t num_rows;
    int64_t distance; /* the stride of requests whose rows follow each other */
    if (tensor->ndim != 3 || tensor->shape == NULL ||
        __builtin_mul_overflow(tensor->shape[1], smla_stride(tensor, 1), &distance) ||
        __builtin_mul_overflow(tensor->shape[0], tensor->shape[1], &num_rows) ||
        smla_stride(tensor, 0) != distance) {
        return tensor;
    }
    const int64_t shape[2] = {num_rows, tensor->shape[2]};
    smla_make_view(view, smla_data(tensor), tensor->dtype, tensor->device, 2, shape);
    view->strides[0] = smla_stride(tensor, 1);
    view->strides[1] = smla_stride(tensor, 2);
    return &view->tensor;
}

/* Takes the caller's workspace, or makes one. */
static smla_status
find_workspace(smla_v4_builder *b, smla_error *error)
{
    const DLTensor *const given = b->config.workspace;
    const DLDataType bf16 = {.code = kDLBfloat, .bits = 16, .lanes = 1};
    const int64_t shape[2] = {smla_v4_workspace_size(&b->config), SMLA_V4_HEAD_DIM};
    if (shape[0] > INT32_MAX) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `prefill_chunk_size` must make a workspace of less than 2^31 rows, "
                         "got %lld rows: lower it, max_model_len or max_num_batched_tokens",
                         create_op, (long long)shape[0]);
    }
    if (given == NULL) {
        if (shape[0] > 0) {
            const int64_t bytes = shape[0] * shape[1] * (int64_t)sizeof *b->own_workspace;
            b->own_workspace = b->backend->allocate(b->config.device.device_id, bytes);
            if (b->own_workspace == NULL) {
                return report_no_memory(b, error);
            }
        }
        smla_make_view(&b->workspace, b->own_workspace, bf16, b->config.device, 2, shape);
        return SMLA_OK;
    }
    smla_checker c;
    smla_view flat;
    const DLTensor *const workspace = flatten_rows(&flat, given);
    smla_open_checker(&c, create_op, error);
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "workspace",
                                           .tensor = workspace,
                                           .dtypes = SMLA_DTYPE_BF16,
                                           .flags = SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS,
                                           .ndim = 2,
                                           .shape = {shape[0], SMLA_V4_HEAD_DIM},
                                           .hint = "prefill_chunk_size requests of the largest "
                                                   "size"}));
    if (c.device.device_type != b->config.device.device_type ||
        c.device.device_id != b->config.device.device_id) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `workspace` must be on the device of the config, got another one",
                         create_op);
    }
    smla_slice_rows(&b->workspace, workspace, 0, shape[0]);
    return SMLA_OK;
}

static smla_status
allocate_buffers(smla_v4_builder *b, smla_error *error)
{
    const smla_backend *backend = b->backend;
    const int32_t device_id = b->config.device.device_id;
    const int64_t tokens = b->config.max_num_batched_tokens;
    if (!has_list_size(b)) {
        return report_no_memory(b, error);
    }
    SMLA_TRY(find_workspace(b, error));
    const arena_table step = list_step(&b->config);
    const arena_table lists = list_lists(b);
    b->scratch_bytes = find_scratch_bytes(b);
    b->mirror = backend->create_mirror(device_id, smla_arena_bytes(step.rows, step.num_rows));
    b->list_memory = backend->allocate(device_id, smla_arena_bytes(lists.rows, lists.num_rows));
    b->indices =
        backend->allocate(device_id, tokens * b->index_columns * (int64_t)sizeof *b->indices);
    b->index_lens = backend->allocate(device_id, tokens * (int64_t)sizeof *b->index_lens);
    b->scratch = backend->allocate(device_id, b->scratch_bytes);
    b->chunks = malloc((size_t)b->config.max_num_seqs * sizeof *b->chunks);
    if (b->mirror == NULL || b->list_memory == NULL || b->indices == NULL ||
        b->index_lens == NULL || b->scratch == NULL || b->chunks == NULL) {
        return report_no_memory(b, error);
    }
    b->step = cut_step(&b->config, b->mirror->device);
    smla_cut_arena(lists.rows, lists.num_rows, b->list_memory, &b->lists);
    return SMLA_OK;
}

static smla_status
initialize(smla_v4_builder *b, const smla_v4_config *config, smla_error *error)
{
    SMLA_TRY(smla_v4_check_config(config, error));
    b->config = *config;
    b->config.device = smla_normal_device(config->device);
    if (config->path == SMLA_PATH_AUTO) {
        b->config.path = SMLA_PATH_DIRECT;
    }
    SMLA_TRY(smla_find_backend(create_op, b->config.device, &b->backend, error));
    set_columns(b);
    return allocate_buffers(b, error);
}

smla_status
smla_v4_builder_create(const smla_v4_config *config, smla_v4_builder **builder, smla_error *error)
{
    smla_v4_builder *b = calloc(1, sizeof *b);
    if (b == NULL) {
        return smla_fail(error, SMLA_ERROR_MEMORY, "%s: a builder must fit in memory, got none",
                         create_op);
    }
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    const smla_status status = initialize(b, config, error);
    smla_fp_change(callers);
    if (status != SMLA_OK) {
        smla_v4_builder_destroy(b);
        return status;
    }
    *builder = b;
    return SMLA_OK;
}

void
smla_v4_builder_destroy(smla_v4_builder *b)
{
    if (b == NULL) {
        return;
    }
    if (b->backend != NULL) {
        void *const buffers[] = {b->list_memory, b->indices, b->index_lens, b->scratch,
                                 b->own_workspace};
        for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) {
            b->backend->release(b->config.device.device_id, buffers[i]);
        }
        b->backend->destroy_mirror(b->mirror);
    }
    free(b->chunks);
    free(b);
}

/* ---- Checking a step ----------------------------------------------------------------------- */

/* The tables that a group reads. The indexer's are those of the indexed ratio if it has none. */
typedef struct group_source {
    const DLTensor *compressed; /* NULL: the step has no such group */
    const DLTensor *state;      /* NULL: it has no states */
} group_source;

static group_source
find_source(const smla_v4_builder *b, const smla_v4_build_args *args, int group)
{
    const int num_ratios = (int)b->config.num_ratios;
    const DLTensor *compressed =
        args->compressed_tables[group < num_ratios ? group : SMLA_V4_MAX_RATIOS];
    const DLTensor *state = args->state_tables[group < num_ratios ? group : SMLA_V4_MAX_RATIOS];
    if (group == num_ratios) {
        const int indexed = smla_v4_find_ratio(&b->config, SMLA_V4_INDEXED_RATIO);
        const group_source cache = {args->compressed_tables[indexed], args->state_tables[indexed]};
        compressed = compressed != NULL ? compressed : cache.compressed;
        state = state != NULL ? state : cache.state;
    }
    return (group_source){compressed, state};
}

static smla_status
check_tables(const smla_v4_builder *b, const smla_v4_build_args *args, smla_error *error)
{
    const int64_t num_reqs = args->batch.num_reqs;
    smla_checker c;
    smla_open_checker(&c, build_op, error);
    SMLA_TRY(smla_require_table(&c, "block_table", args->block_table, num_reqs, 0));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "slot_mapping",
                                           .tensor = args->slot_mapping,
                                           .dtypes = SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                                           .flags = SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                                           .ndim = 1,
                                           .shape = {args->batch.num_actual_tokens},
                                           .hint = "a slot per token"}));
    for (int i = 0; i < SMLA_MAX_STEP_GROUPS; i++) {
        const bool is_index = i == SMLA_V4_MAX_RATIOS;
        SMLA_TRY(smla_require_table(&c, is_index ? "index" : "compressed",
                                    args->compressed_tables[i], num_reqs, SMLA_RULE_OPTIONAL));
        SMLA_TRY(smla_require_table(&c, is_index ? "index_states" : "states", args->state_tables[i],
                                    num_reqs, SMLA_RULE_OPTIONAL));
    }
    const smla_backend *backend;
    SMLA_TRY(smla_find_backend(build_op, c.device, &backend, error));
    if (backend != b->backend || c.device.device_id != b->config.device.device_id) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `block_table` must be on the device of the config, got another one",
                         build_op);
    }
    for (int i = 0; i < smla_v4_num_groups(&b->config); i++) {
        const group_source source = find_source(b, args, i);
        if (source.compressed == NULL && source.state != NULL) {
            return smla_fail(error, SMLA_ERROR_VALUE,
                             "%s: `compressed` must have a table of each ratio in `states`, got "
                             "none of ratio %lld",
                             build_op, (long long)smla_v4_group_ratio(&b->config, i));
        }
    }
    return SMLA_OK;
}

static smla_status
check_step(const smla_v4_builder *b, const smla_v4_build_args *args,
           const smla_batch_limits *limits, smla_error *error)
{
    SMLA_TRY(smla_check_batch(build_op, limits, &args->batch, error));
    for (int64_t req = 0; req < args->batch.num_reqs; req++) {
        if (args->batch.seq_lens[req] > args->max_seq_len) {
            return smla_fail(error, SMLA_ERROR_VALUE,
                             "%s: `max_seq_len` must be at least the longest request (%d), got "
                             "%lld",
                             build_op, args->batch.seq_lens[req], (long long)args->max_seq_len);
        }
    }
    return check_tables(b, args, error);
}

/* ---- Building a step ----------------------------------------------------------------------- */

static smla_step_group
group_of(const smla_v4_builder *b, const smla_v4_metadata *m, const group_source *source, int i)
{
    const smla_v4_group *const lists = &b->lists.groups[i];
    const int64_t ratio = smla_v4_group_ratio(&b->config, i);
    const int place = smla_v4_find_ratio(&b->config, ratio);
    return (smla_step_group){
        .ratio = ratio,
        .pages = smla_page_table_of(source->compressed, b->config.block_size / ratio),
        .state_pages = smla_page_table_of(source->state, b->config.state_block_sizes[place]),
        .width = m->widths[i],
        .slot_mapping = lists->slot_mapping,
        .state_slot_mapping = source->state == NULL ? NULL : lists->state_slot_mapping,
        .context_lens = lists->context_lens,
        .lens = lists->lens,
        .indices = b->columns[i] == 0 ? NULL : lists->indices,
        .indices_stride_token = b->columns[i],
    };
}

/* Starts the kernel that fills the lists, behind the copy of the step. */
static smla_status
fill_lists(const smla_v4_builder *b, const smla_v4_build_args *args, const smla_v4_metadata *m,
           smla_stream stream, smla_error *error)
{
    smla_step_lists_params params = {
        .call = {.op = build_op, .stream = stream},
        .num_rows = b->config.max_num_batched_tokens,
        .num_tokens = m->num_actual_tokens,
        .num_query_tokens = args->batch.query_start_loc[m->num_reqs],
        .num_decode_tokens = m->split.num_decode_tokens,
        .req_id_per_token = b->step.req_id_per_token,
        .positions = b->step.positions,
        .slot_mapping = smla_data(args->slot_mapping),
        .slot_stride = smla_stride(args->slot_mapping, 0),
        .slots_are_int64 = smla_dtype(args->slot_mapping) == SMLA_DTYPE_INT64,
        .window = b->config.window,
        .swa_pages = smla_page_table_of(args->block_table, b->config.swa_block_size),
        .is_valid = (uint8_t *)b->lists.is_valid,
        .swa_indices = b->lists.swa_indices,
        .swa_lens = b->lists.swa_lens,
    };
    for (int i = 0; i < smla_v4_num_groups(&b->config); i++) {
        const group_source source = find_source(b, args, i);
        if (m->has_group[i]) {
            params.groups[params.num_groups++] = group_of(b, m, &source, i);
        }
    }
    return b->backend->fill_step_lists(&params, error);
}

static smla_v4_metadata
plan_step(const smla_v4_builder *b, const smla_v4_build_args *args, const smla_batch_split *split)
{
    smla_v4_metadata m = {.num_reqs = args->batch.num_reqs,
                          .num_actual_tokens = args->batch.num_actual_tokens,
                          .split = *split};
    for (int64_t req = 0; req < split->num_decodes; req++) {
        const int64_t len = smla_query_len(args->batch.query_start_loc, req);
        m.decode_query_len = len > m.decode_query_len ? len : m.decode_query_len;
    }
    for (int i = 0; i < smla_v4_num_groups(&b->config); i++) {
        const group_source source = find_source(b, args, i);
        const int64_t ratio = smla_v4_group_ratio(&b->config, i);
        m.has_group[i] = source.compressed != NULL;
        m.has_state[i] = source.state != NULL;
        m.widths[i] = smla_v4_used_columns(&b->config, ratio, args->max_seq_len);
    }
    return m;
}

/* Keeps views of the tables that the step's layers read. */
static void
keep_tables(smla_v4_builder *b, const smla_v4_build_args *args)
{
    smla_slice_rows(&b->swa_table, args->block_table, 0, args->batch.num_reqs);
    for (int i = 0; i < b->config.num_ratios; i++) {
        if (args->compressed_tables[i] != NULL) {
            smla_slice_rows(&b->compressed_tables[i], args->compressed_tables[i], 0,
                            args->batch.num_reqs);
        }
    }
}

static smla_status
run_build(smla_v4_builder *b, const smla_v4_build_args *args, smla_error *error)
{
    const smla_v4_config *const config = &b->config;
    const smla_batch_limits limits = {.max_num_seqs = config->max_num_seqs,
                                      .max_num_batched_tokens = config->max_num_batched_tokens,
                                      .max_model_len = config->max_model_len,
                                      .decode_threshold = config->decode_threshold};
    SMLA_TRY(check_step(b, args, &limits, error));
    smla_batch_split split = {0};
    SMLA_TRY(smla_split_decodes_and_prefills(args->batch.query_start_loc, args->batch.num_reqs,
                                             args->batch.num_actual_tokens,
                                             config->decode_threshold, false, &split, error));
    SMLA_TRY(smla_check_batch_order(build_op, &limits, &args->batch, error));
    smla_v4_metadata m = plan_step(b, args, &split);
    const smla_stream stream = {.device_id = config->device.device_id, .handle = args->stream};
    void *memory = NULL;
    SMLA_TRY(b->backend->begin_write(build_op, b->mirror, stream, &memory, error));
    /* From here on the metadata of the last build is overwritten. */
    b->is_built = false;
    const smla_v4_step host = cut_step(config, memory);
    smla_v4_fill_step(config, &args->batch, &host);
    m.num_chunks = smla_v4_cut_chunks(config, &args->batch, split.num_decodes, b->chunks);
    SMLA_TRY(b->backend->end_write(build_op, b->mirror, stream, error));
    SMLA_TRY(b->backend->begin_use(build_op, b->mirror, stream, error));
    const smla_status status = fill_lists(b, args, &m, stream, error);
    /* Layers on other streams wait for this use, and so for the lists. */
    const smla_status ended =
        b->backend->end_use(build_op, b->mirror, stream, status == SMLA_OK ? error : NULL);
    SMLA_TRY(status);
    SMLA_TRY(ended);
    b->metadata = m;
    keep_tables(b, args);
    b->is_built = true;
    if (smla_is_logging) {
        smla_log_device(config->device);
        smla_log_text(" requests %lld, tokens %lld, path %s, chunks %lld,",
                      (long long)args->batch.num_reqs, (long long)m.num_actual_tokens,
                      smla_path_name((smla_path)config->path), (long long)m.num_chunks);
    }
    return SMLA_OK;
}

smla_status
smla_v4_builder_build(smla_v4_builder *b, const smla_v4_build_args *args, smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, build_op);
    return smla_leave(&entry, run_build(b, args, error));
}
