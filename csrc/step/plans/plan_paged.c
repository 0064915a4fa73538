/* plan_paged.c: the plan of attention to pages: its config, its arrays, and what a build shows.
 *
 * The host knows shapes, the device knows lengths. So a build sends nothing: one kernel reads the
 * arrays of the engine and writes those of the step, and the same kernel refreshes a captured step.
 * Each mode has arrays of its own, so a build leaves the metadata of other modes valid.
 */
#include "step/plans/plan_paged.h"

#include "core/rule.h"
#include "step/plans.h"

enum { MOST_ROWS = 1024 }; /* branches, drafts */
enum { MOST_STEPS = 32 };  /* views of a draft's steps have to fit SMLA_MAX_STEP_VIEWS */

/* ---- Config -------------------------------------------------------------------------------- */

#define FIELD(field, lowest, highest, ...) \
    SMLA_NUMBER_FIELD(smla_paged_config, field, lowest, highest, __VA_ARGS__)

static const smla_config_field fields[] = {
    FIELD(max_bs, 1, INT32_MAX / MOST_ROWS),
    FIELD(max_num_tokens, 1, INT32_MAX),
    FIELD(max_context_len, 1, INT32_MAX / 2),
    FIELD(page_size, 1, INT32_MAX, .standard = 1),
    FIELD(topk, 0, MOST_ROWS, .standard = 1),
    FIELD(num_draft_tokens, 0, MOST_ROWS),
    FIELD(speculative_num_steps, 0, MOST_STEPS),
    FIELD(attention_chunk, 0, INT32_MAX / 2),
    FIELD(sliding_window_size, -1, INT32_MAX / 2),
    FIELD(has_window, 0, 1),
    FIELD(has_window_pool, 0, 1),
    FIELD(is_encoder_decoder, 0, 1),
    FIELD(drafts_only, 0, 1),
    SMLA_CONFIG_FIELD(smla_paged_config, device, SMLA_FIELD_DEVICE),
};

static smla_status
check(smla_step *s, smla_error *error)
{
    smla_paged_builder *const b = (smla_paged_builder *)s;
    smla_paged_config *const config = &b->config;
    const int64_t chunk = config->attention_chunk;
    if (chunk % config->page_size != 0) {
        return smla_fail_value(error, smla_create_op,
                               "`attention_chunk` must be a multiple of page_size = %lld, got %lld",
                               (long long)config->page_size, (long long)chunk);
    }
    if (chunk > 0 && config->topk > 1) {
        return smla_fail_value(error, smla_create_op,
                               "`attention_chunk` must be 0 with topk = %lld, got %lld",
                               (long long)config->topk, (long long)chunk);
    }
    if (config->is_encoder_decoder && (config->topk > 1 || config->has_window)) {
        return smla_fail_value(
            error, smla_create_op,
            "`is_encoder_decoder` must be False with topk > 1 or a sliding window, got True");
    }
    const int64_t drafts = config->num_draft_tokens > config->speculative_num_steps
                               ? config->num_draft_tokens
                               : config->speculative_num_steps;
    config->sliding_window_size = config->has_window ? config->sliding_window_size : -1;
    b->table_width = (config->max_context_len + drafts + config->page_size - 1) / config->page_size;
    s->device = config->device;
    s->limits = (smla_batch_limits){.max_num_seqs = config->max_bs,
                                    .max_num_batched_tokens = config->max_num_tokens};
    return SMLA_OK;
}

/* ---- Arrays -------------------------------------------------------------------------------- */

/* Adds an array of a mode, which begins at a multiple of 64 bytes. */
static void
add(smla_step *s, size_t field, int64_t count)
{
    if (count > 0) {
        smla_add_array(&s->made, field, (count + 15) / 16 * 16);
    }
}

static void
list_rows(smla_step *s, size_t rows, int64_t steps, int64_t count, int64_t columns)
{
    if (count > 0) {
        add(s, rows + offsetof(smla_paged_row_state, seqlens), steps * count);
        add(s, rows + offsetof(smla_paged_row_state, starts), steps * (count + 1));
        add(s, rows + offsetof(smla_paged_row_state, slots), count * columns);
    }
}

static void
list_mode(smla_step *s, int mode)
{
    const smla_paged_builder *const b = (const smla_paged_builder *)s;
    const smla_paged_config *const c = &b->config;
    const smla_paged_mode *const row = &smla_paged_modes[mode];
    const int64_t steps = row->is_draft ? c->speculative_num_steps : 1;
    const int64_t pages = c->max_bs * b->table_width;
    const int64_t rows = c->max_bs * smla_paged_number(c, row->rows, 0);
    const int64_t locals = smla_paged_most_local(c, mode);
    const int64_t encoders = c->is_encoder_decoder ? c->max_bs : 0;
    const size_t at = offsetof(smla_paged_made, modes) + (size_t)mode * sizeof(smla_paged_state);
#define ADD(field, count) add(s, at + offsetof(smla_paged_state, field), count)
    ADD(cache_seqlens, steps * c->max_bs);
    ADD(cu_seqlens_k, steps * (c->max_bs + 1));
    ADD(cu_seqlens_q, c->max_bs + 1);
    ADD(page_table, pages);
    ADD(swa_page_table, c->has_window_pool ? pages : 0);
    ADD(swa_cache_loc, c->has_window_pool ? smla_paged_most_loc(c) : 0);
    ADD(leftpad, row->shares_prefix ? c->max_bs : encoders);
    ADD(encoder_seqlens, encoders);
    ADD(encoder_starts, encoders == 0 ? 0 : encoders + 1);
    ADD(encoder_table, encoders == 0 ? 0 : pages);
    list_rows(s, at + offsetof(smla_paged_state, expand), steps, rows,
              smla_paged_expand_columns(c, mode));
    list_rows(s, at + offsetof(smla_paged_state, swa), steps, c->has_window ? rows : 0,
              smla_paged_swa_columns(c, mode));
    ADD(local_starts, locals == 0 ? 0 : locals + 1);
    ADD(local_seqlens, steps * locals);
    ADD(local_table, steps * locals * (c->attention_chunk / c->page_size));
    ADD(prefix, row->shares_prefix ? SMLA_PREFIX_SIZE : 0);
    ADD(rest_seqlens, row->shares_prefix ? c->max_bs : 0);
#undef ADD
}

/* Arrays of a mode at most: those of smla_paged_state. A config has one of the two rows of drafts,
 * and of verification. */
_Static_assert((int)SMLA_MAX_ARENA_ROWS >=
                   (SMLA_NUM_PAGED_MODES - 2) * (int)(sizeof(smla_paged_state) / sizeof(void *)) +
                       1,
               "room for all arrays");

static void
list_arrays(smla_step *s)
{
    const smla_paged_config *const c = &((const smla_paged_builder *)s)->config;
    int64_t most_tokens = 0;
    for (int mode = 0; mode < SMLA_NUM_PAGED_MODES; mode++) {
        if (smla_paged_has_mode(c, mode)) {
            const int64_t tokens = smla_paged_most_tokens(c, mode);
            most_tokens = tokens > most_tokens ? tokens : most_tokens;
            list_mode(s, mode);
        }
    }
    add(s, offsetof(smla_paged_made, token_ids), most_tokens + 1);
}

static int64_t
count_other_bytes(const smla_step *s)
{
    return smla_arena_bytes(&s->made);
}

static smla_status
report_no_memory(const smla_step *s, smla_error *error)
{
    const smla_paged_builder *const b = (const smla_paged_builder *)s;
    return smla_fail(error, SMLA_ERROR_MEMORY,
                     "%s: the tables of %lld requests x %lld pages must fit in memory, got none",
                     smla_create_op, (long long)b->config.max_bs, (long long)b->table_width);
}

/* ---- What a build shows -------------------------------------------------------------------- */

static smla_paged_part
show_rows(const smla_paged_row_state *state, const int32_t *token_ids, int64_t num_rows,
          int64_t columns, int64_t used)
{
    return (smla_paged_part){.num_rows = num_rows,
                             .columns = used,
                             .max_seq_len_q = 1,
                             .max_seq_len_k = used,
                             .cache_seqlens = state->seqlens,
                             .cu_seqlens_q = token_ids,
                             .cu_seqlens_k = state->starts,
                             .entries = state->slots,
                             .entries_stride = columns};
}

/* Virtual requests of a batch at most. */
static int64_t
count_local(const smla_paged_config *config, const smla_paged_batch *batch, int64_t num_reqs)
{
    const int64_t most = smla_paged_most_local(config, batch->mode);
    const int64_t len = batch->max_query_len;
    const int64_t chunks =
        len == 0 ? 0 : (len - 2 + config->attention_chunk) / config->attention_chunk + 1;
    const int64_t per_req = chunks < len ? chunks : len;
    return num_reqs * per_req < most ? num_reqs * per_req : most;
}

static void
commit(smla_step *s, const void *given)
{
    smla_paged_builder *const b = (smla_paged_builder *)s;
    const smla_paged_build_args *const args = given;
    const smla_paged_config *const c = &b->config;
    const smla_paged_batch batch = smla_paged_find_batch(b, args);
    const smla_paged_mode *const row = &smla_paged_modes[batch.mode];
    const smla_paged_state *const state = &b->made.modes[batch.mode];
    const int64_t first = row->is_draft ? args->spec_step : 0;
    const int64_t num_rows = args->num_reqs * batch.rows_per_req;
    const int64_t most_rows = c->max_bs * batch.rows_per_req;
    const int64_t slots = row->is_draft ? first + 1 : c->num_draft_tokens;
    const int64_t locals = smla_paged_most_local(c, batch.mode);
    smla_paged_metadata *const m = &b->metadata;
    *m = (smla_paged_metadata){
        .mode = (smla_forward_mode)args->mode,
        .num_reqs = args->num_reqs,
        .num_steps = batch.num_steps,
        .first_step = first,
        .is_fixed = args->is_fixed,
        .requests = {.num_rows = args->num_reqs,
                     .columns = batch.table_columns,
                     .max_seq_len_q = batch.max_query_len,
                     .max_seq_len_k = batch.max_keys,
                     .cache_seqlens = state->cache_seqlens + first * c->max_bs,
                     .cu_seqlens_q = state->cu_seqlens_q,
                     .cu_seqlens_k = state->cu_seqlens_k + first * (c->max_bs + 1),
                     .entries = state->page_table,
                     .entries_stride = b->table_width},
        .swa_page_table = state->swa_page_table,
        .cache_leftpad =
            args->common_prefix_len > 0 || c->is_encoder_decoder ? state->leftpad : NULL,
        .token_ids = b->made.token_ids,
        .num_tokens = smla_least_of(batch.num_tokens, smla_paged_most_tokens(c, batch.mode)),
        .seqlens_stride = c->max_bs,
        .starts_stride = c->max_bs + 1,
        .row_seqlens_stride = most_rows,
        .row_starts_stride = most_rows + 1,
        .local_stride = locals,
    };
    if (batch.rows_per_req > 0) {
        const smla_paged_row_state expand = {state->expand.seqlens + first * most_rows,
                                             state->expand.starts + first * (most_rows + 1),
                                             state->expand.slots};
        m->expand = show_rows(&expand, b->made.token_ids, num_rows,
                              smla_paged_expand_columns(c, batch.mode), slots);
    }
    if (batch.rows_per_req > 0 && c->has_window) {
        const smla_paged_row_state swa = {state->swa.seqlens + first * most_rows,
                                          state->swa.starts + first * (most_rows + 1),
                                          state->swa.slots};
        m->swa_spec =
            show_rows(&swa, b->made.token_ids, num_rows, smla_paged_swa_columns(c, batch.mode),
                      smla_least_of(c->sliding_window_size + 1, batch.max_keys) + slots);
    }
    if (c->is_encoder_decoder) {
        m->encoder =
            (smla_paged_part){.num_rows = args->num_reqs,
                              .columns = (batch.max_encoder_len + c->page_size - 1) / c->page_size,
                              .max_seq_len_q = batch.max_query_len,
                              .max_seq_len_k = batch.max_encoder_len,
                              .cache_seqlens = state->encoder_seqlens,
                              .cu_seqlens_k = state->encoder_starts,
                              .entries = state->encoder_table,
                              .entries_stride = b->table_width};
    }
    if (args->common_prefix_len > 0) {
        m->prefix = (smla_paged_part){.num_rows = 1,
                                      .columns = (args->common_prefix_len + c->page_size - 1) /
                                                 c->page_size,
                                      .max_seq_len_q = batch.num_tokens,
                                      .max_seq_len_k = args->common_prefix_len,
                                      .cache_seqlens = state->prefix + SMLA_PREFIX_SEQLEN,
                                      .cu_seqlens_q = state->prefix + SMLA_PREFIX_STARTS,
                                      .cu_seqlens_k = state->prefix + SMLA_PREFIX_KEY_STARTS,
                                      .entries = state->page_table,
                                      .entries_stride = b->table_width};
        const int64_t pages = args->common_prefix_len / c->page_size;
        m->prefix_pages = m->prefix;
        m->prefix_pages.cache_seqlens = state->prefix + SMLA_PREFIX_PAGES_SEQLEN;
        m->rest = m->requests;
        m->rest.cache_seqlens = state->rest_seqlens;
        m->rest.entries += pages;
        m->rest.columns -= pages;
    }
    if (c->attention_chunk > 0) {
        m->local = (smla_paged_local){
            .num_batches = count_local(c, &batch, args->num_reqs),
            .columns = c->attention_chunk / c->page_size,
            .max_query_len = batch.query_len > 0
                                 ? batch.query_len /* padding is not cut */
                                 : smla_least_of(batch.max_query_len, c->attention_chunk),
            .max_seq_len = smla_least_of(batch.max_keys + batch.num_steps - 1, c->attention_chunk),
            .query_start_loc = state->local_starts,
            .seqused_k = state->local_seqlens + first * locals,
            .block_table =
                state->local_table + first * locals * (c->attention_chunk / c->page_size)};
    }
    if (c->has_window_pool && args->out_cache_loc != NULL) {
        m->swa_out_cache_loc = state->swa_cache_loc;
        m->num_cache_loc = smla_size(args->out_cache_loc, 0);
    }
}

/* The groups of views: those of step i are SHOWN_PARTS * i and on. */
enum { SHOWN_STEP, SHOWN_EXPAND, SHOWN_SWA, SHOWN_PREFIX, SHOWN_LOCAL, SHOWN_PARTS };

/* Moves new views to a group, and returns how many there are. */
static int
group_views(smla_step_view *views, int count, int group)
{
    for (int i = 0; i < count; i++) {
        views[i].group = group;
    }
    return count;
}

/* Lists the views of a part in one of its steps, whose lengths lie so much further. */
static int
show_part(const smla_paged_part *part, const char *name, int64_t seqlens, int64_t starts,
          int64_t more, smla_step_view *views)
{
    int n = 0;
    smla_show_vector(&views[n++], "cache_seqlens_int32", part->cache_seqlens + seqlens,
                     part->num_rows);
    smla_show_vector(&views[n++], "cu_seqlens_k", part->cu_seqlens_k + starts, part->num_rows + 1);
    smla_show_vector(&views[n++], "cu_seqlens_q", part->cu_seqlens_q, part->num_rows + 1);
    smla_show_number(&views[n++], "max_seq_len_q", part->max_seq_len_q);
    smla_show_number(&views[n++], "max_seq_len_k", part->max_seq_len_k + more);
    smla_show_rows(&views[n++], name, part->entries, 0, part->num_rows, part->columns + more,
                   part->entries_stride);
    return n;
}

static int
show_local(const smla_paged_local *local, int64_t first, smla_step_view *views)
{
    int n = 0;
    smla_show_vector(&views[n++], "local_query_start_loc", local->query_start_loc,
                     local->num_batches + 1);
    smla_show_vector(&views[n++], "local_seqused_k", local->seqused_k + first, local->num_batches);
    smla_show_rows(&views[n++], "local_block_table", local->block_table, first, local->num_batches,
                   local->columns, local->columns);
    smla_show_number(&views[n++], "local_max_query_len", local->max_query_len);
    smla_show_number(&views[n++], "local_max_seq_len", local->max_seq_len);
    return n;
}

/* Lists the views that all steps share. */
static int
show_shared(const smla_paged_metadata *m, smla_step_view *views)
{
    int n = 0;
    if (m->cache_leftpad != NULL) {
        smla_show_vector(&views[n++], "cache_leftpad", m->cache_leftpad, m->num_reqs);
    }
    if (m->swa_page_table != NULL) {
        smla_show_rows(&views[n++], "swa_page_table", m->swa_page_table, 0, m->num_reqs,
                       m->requests.columns, m->requests.entries_stride);
    }
    if (m->swa_out_cache_loc != NULL) {
        smla_show_vector(&views[n++], "swa_out_cache_loc", m->swa_out_cache_loc, m->num_cache_loc);
    }
    if (m->encoder.entries != NULL) {
        smla_show_vector(&views[n++], "encoder_lens_int32", m->encoder.cache_seqlens, m->num_reqs);
        smla_show_vector(&views[n++], "encoder_cu_seqlens_k", m->encoder.cu_seqlens_k,
                         m->num_reqs + 1);
        smla_show_number(&views[n++], "encoder_max_seq_len_k", m->encoder.max_seq_len_k);
        smla_show_rows(&views[n++], "encoder_page_table", m->encoder.entries, 0, m->num_reqs,
                       m->encoder.columns, m->encoder.entries_stride);
    }
    if (m->prefix.entries != NULL) {
        smla_show_vector(&views[n++], "_prefix_pages", m->prefix_pages.cache_seqlens, 1);
        smla_show_vector(&views[n++], "_rest_seqlens", m->rest.cache_seqlens, m->num_reqs);
        smla_show_rows(&views[n++], "_rest_table", m->rest.entries, 0, m->num_reqs, m->rest.columns,
                       m->rest.entries_stride);
    }
    smla_show_vector(&views[n++], "_token_ids", m->token_ids, m->num_tokens);
    return n;
}

static int
describe(const smla_step *s, smla_step_view views[SMLA_MAX_STEP_VIEWS])
{
    const smla_paged_metadata *const m = &((const smla_paged_builder *)s)->metadata;
    const bool is_tree = m->expand.entries != NULL;
    int n = 0;
    for (int64_t step = 0; step < m->num_steps; step++) {
        const int group = SHOWN_PARTS * (int)step;
        n += group_views(&views[n], show_shared(m, &views[n]), group + SHOWN_STEP);
        n += group_views(&views[n],
                         show_part(&m->requests, "page_table", step * m->seqlens_stride,
                                   step * m->starts_stride, 0, &views[n]),
                         group + SHOWN_STEP);
        /* max_seq_len_k; the table is of all steps. */
        views[n - 2].shape[0] += is_tree || m->is_fixed ? 0 : step;
        if (is_tree) {
            n += group_views(&views[n],
                             show_part(&m->expand, "slot_table", step * m->row_seqlens_stride,
                                       step * m->row_starts_stride, step, &views[n]),
                             group + SHOWN_EXPAND);
        }
        if (m->swa_spec.entries != NULL) {
            n += group_views(&views[n],
                             show_part(&m->swa_spec, "slot_table", step * m->row_seqlens_stride,
                                       step * m->row_starts_stride, step, &views[n]),
                             group + SHOWN_SWA);
        }
        if (m->local.block_table != NULL) {
            n += group_views(&views[n], show_local(&m->local, step * m->local_stride, &views[n]),
                             group + SHOWN_LOCAL);
        }
    }
    if (m->prefix.entries != NULL) {
        n += group_views(&views[n], show_part(&m->prefix, "page_table", 0, 0, 0, &views[n]),
                         SHOWN_PREFIX);
    }
    return n;
}

/* A step has at most eleven views that all share, and three parts of six, because a tree has no
 * virtual requests. */
_Static_assert((int)SMLA_MAX_STEP_VIEWS >= 29 * MOST_STEPS + 6, "room for all views");

const smla_step_plan smla_paged_plan = {
    SMLA_PLAN_TYPES("paged", smla_paged_builder, smla_paged_build_args, fields),
    .check = check,
    .list_arrays = list_arrays,
    .count_other_bytes = count_other_bytes,
    .report_no_memory = report_no_memory,
    .read_batch = smla_paged_read_batch,
    .check_args = smla_paged_check_args,
    .fill_lists = smla_paged_fill_lists,
    .commit = commit,
    .describe = describe,
};
