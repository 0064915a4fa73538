/* step_lists.c: the lists of a DeepSeek V4 step that depend on block tables and on slot_mapping:
 * windows, slots of compressed rows and of states.
 *
 * A token's rows are written by one thread.
 */
#include "core/params_step.h"
#include "cpu/cpu.h"
#include "cpu/index/slot.h"
#include "cpu/machine/threads.h"

enum { MIN_PARALLEL_TOKENS = 256 }; /* below, starting threads costs more than they save */

static bool
has_slot(const smla_step_lists_params *p, int64_t token)
{
    const int64_t at = token * p->slot_stride;
    return (p->slots_are_int64 ? ((const int64_t *)p->slot_mapping)[at]
                               : ((const int32_t *)p->slot_mapping)[at]) >= 0;
}

static int32_t
find_index(const smla_page_table *pages, int64_t req, int64_t position)
{
    const smla_page_row row = smla_page_row_of(pages, req);
    return (int32_t)smla_find_slot(&row, position);
}

/* The slot of a compressed row; -1 if another rank has it. */
static int32_t
find_row(const smla_step_lists_params *p, const smla_page_table *pages, int64_t req, int64_t row)
{
    const int64_t own = smla_find_own_row(&p->share, row);
    return own < 0 ? -1 : find_index(pages, req, own);
}

/* Writes a token's row of lists. A token that is not valid sees no tokens and no groups. */
static void
write_token(const smla_step_lists_params *p, int64_t token)
{
    const bool is_valid = token < p->num_query_tokens && has_slot(p, token);
    const int64_t req = p->req_id_per_token[token];
    const int64_t position = p->positions[token];
    const int64_t seen = is_valid ? position + 1 : 0;
    const int64_t window_len = seen < p->window ? seen : p->window;
    int32_t *const window = p->swa_indices + token * p->window;
    p->is_valid[token] = is_valid;
    p->swa_lens[token] = (int32_t)window_len;
    if (is_valid) {
        const smla_page_row swa = smla_page_row_of(&p->swa_pages, req);
        smla_write_slots(window, &swa, seen - window_len, window_len);
    }
    smla_clear_columns(window, window_len, p->window);
    for (int i = 0; i < p->num_groups; i++) {
        const smla_step_group *const g = &p->groups[i];
        const int64_t num_groups = smla_count_own(&p->share, seen / g->ratio);
        const int64_t len = num_groups < g->width ? num_groups : g->width;
        const bool ends_group = is_valid && seen % g->ratio == 0;
        g->slot_mapping[token] = ends_group ? find_row(p, &g->pages, req, position / g->ratio) : -1;
        g->context_lens[token] = (int32_t)num_groups;
        g->lens[token] = (int32_t)len;
        if (g->state_slot_mapping != NULL) {
            g->state_slot_mapping[token] =
                is_valid ? find_index(&g->state_pages, req, position) : -1;
        }
        if (g->indices == NULL) {
            continue;
        }
        int32_t *const out = g->indices + token * g->indices_stride_token;
        if (token >= p->num_decode_tokens) {
            smla_write_run(out, 0, len);
        } else if (len > 0) {
            const smla_page_row row = smla_page_row_of(&g->pages, req);
            smla_write_slots(out, &row, 0, len);
        }
        smla_clear_columns(out, len, g->width);
    }
}

/* Clears the entries of vectors behind the step's tokens. */
static void
clear_row(const smla_step_lists_params *p, int64_t row)
{
    p->is_valid[row] = 0;
    p->swa_lens[row] = 0;
    for (int i = 0; i < p->num_groups; i++) {
        const smla_step_group *const g = &p->groups[i];
        g->slot_mapping[row] = -1;
        g->context_lens[row] = 0;
        g->lens[row] = 0;
        if (g->state_slot_mapping != NULL) {
            g->state_slot_mapping[row] = -1;
        }
    }
}

smla_status
smla_cpu_fill_step_lists(const smla_step_lists_params *p, smla_error *error)
{
    (void)error;
#pragma omp parallel for schedule(static) if (p->num_tokens >= MIN_PARALLEL_TOKENS)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        write_token(p, token);
    }
    for (int64_t row = p->num_tokens; row < p->num_rows; row++) {
        clear_row(p, row);
    }
    return SMLA_OK;
}
