/* compressor.c: save_partial_states and compress_norm_rope_store. pool_kernel.h has the arithmetic.
 *
 * A call that does both saves all states first, and then closes groups from the state alone.
 */
#include <math.h>
#include <string.h>

#include "cpu/cache/cache.h"
#include "cpu/cache/slot_shares.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/thread_scratch.h"
#include "cpu/norm/norm.h"
#include "cpu/rope/rotate.h"

enum { FLOATS_PER_LINE = 16 }; /* a cache line has 64 bytes */

static int64_t
read_position_of(const smla_partial_states_params *p, int64_t token)
{
    const int64_t at = token * p->positions_stride;
    return p->positions_are_int64 ? ((const int64_t *)p->positions)[at]
                                  : ((const int32_t *)p->positions)[at];
}

/* ---- Save ---------------------------------------------------------------------------------- */

smla_status
smla_cpu_check_partial_states(const smla_partial_states_params *p, smla_error *error)
{
    for (int64_t token = 0; token < p->rows.num_tokens; token++) {
        const int64_t position = read_position_of(p, token);
        if (position < 0) {
            return smla_fail_value(error, p->call.op,
                                   "`positions` must be >= 0, got %lld for token %lld",
                                   (long long)position, (long long)token);
        }
    }
    return smla_cpu_check_cache_write(&p->rows, error);
}

/* Saves the tokens of one share in order. */
static void
save_share(const smla_norm_isa *norm, const smla_partial_states_params *p, int share,
           slot_shares shares)
{
    const smla_cache_write_params *const rows = &p->rows;
    const int64_t bytes = rows->input_type == SMLA_FLOAT_BF16 ? 2 : 4;
    const token_range range = range_of_share(rows, share, shares);
    for (int64_t token = range.first; token < range.end; token++) {
        const int64_t slot = read_slot(rows, token);
        if (is_in_share(slot, share, shares)) {
            const int64_t offset = read_position_of(p, token) % p->ratio;
            norm->save_state((const uint8_t *)rows->kv_c + token * rows->kv_c_stride_token * bytes,
                             (const uint8_t *)rows->k_pe + token * rows->k_pe_stride_token * bytes,
                             rows->input_type, p->ape + offset * p->ape_stride, p->width,
                             (float *)(void *)smla_kv_slot(&rows->kv, slot).row);
        }
    }
}

static void
save_states(const smla_norm_isa *norm, const smla_partial_states_params *p)
{
    const slot_shares shares = smla_cpu_divide_tokens(&p->rows);
#pragma omp parallel for schedule(static) if (shares.count > 1)
    for (int share = 0; share < shares.count; share++) {
        save_share(norm, p, share, shares);
    }
}

smla_status
smla_cpu_save_partial_states(const smla_partial_states_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    SMLA_TRY(smla_cpu_check_partial_states(p, error));
    save_states(isa->norm, p);
    return SMLA_OK;
}

/* ---- Checks of values ---------------------------------------------------------------------- */

/* Whether a token closes a group that has a row in the cache. */
static bool
closes_group(const smla_compress_params *p, int64_t token)
{
    return read_slot(&p->states.rows, token) >= 0 && read_slot(&p->insert, token) >= 0 &&
           (read_position(&p->rope, token) + 1) % p->states.ratio == 0;
}

/* The first position that a group closed at `position` pools, or a negative number. */
static int64_t
first_of_group(const smla_compress_params *p, int64_t position)
{
    return position + 1 - p->states.width / p->dim * p->states.ratio;
}

static int32_t
read_page(const smla_page_table *table, int64_t req, int64_t block)
{
    return table->block_table[req * table->stride_req + block * table->stride_block];
}

/* Checks the pages of the positions that a token pools. */
static smla_status
check_pages(const smla_compress_params *p, int64_t token, smla_error *error)
{
    const smla_page_table *const table = &p->table;
    const int64_t position = read_position(&p->rope, token);
    const int64_t first = first_of_group(p, position);
    const int64_t req = p->req_id_per_token[token * p->req_id_stride];
    const int64_t num_pages = p->states.rows.kv.num_pages;
    for (int64_t block = (first < 0 ? 0 : first) / table->block_size;
         block <= position / table->block_size && block < table->num_blocks; block++) {
        const int32_t page = read_page(table, req, block);
        if (page >= num_pages) {
            return smla_fail_value(error, p->call.op,
                                   "`block_table` must name pages of `state` (0 to %lld) or be "
                                   "negative, got %d for request %lld, block %lld",
                                   (long long)num_pages - 1, page, (long long)req,
                                   (long long)block);
        }
    }
    return SMLA_OK;
}

smla_status
smla_cpu_check_compress(const smla_compress_params *p, smla_error *error)
{
    const char *const op = p->call.op;
    const int64_t num_tokens = p->insert.num_tokens;
    SMLA_TRY(smla_cpu_check_positions(op, &p->rope, num_tokens, error));
    SMLA_TRY(smla_cpu_check_cache_write(&p->states.rows, error));
    SMLA_TRY(smla_cpu_check_cache_write(&p->insert, error));
    for (int64_t token = 0; token < num_tokens; token++) {
        if (!closes_group(p, token)) {
            continue;
        }
        const int64_t req = p->req_id_per_token[token * p->req_id_stride];
        if (req < 0 || req >= p->num_reqs) {
            return smla_fail_value(error, op,
                                   "`req_id_per_token` must name a row of `block_table` (0 to "
                                   "%lld), got %lld at token %lld",
                                   (long long)p->num_reqs - 1, (long long)req, (long long)token);
        }
        SMLA_TRY(check_pages(p, token, error));
    }
    return SMLA_OK;
}

/* ---- Groups -------------------------------------------------------------------------------- */

/* A state that takes no part. */
typedef struct absent_state {
    float values[SMLA_V4_HEAD_DIM];
    float scores[SMLA_V4_HEAD_DIM];
} absent_state;

/* The state of a position of request `req`; NULL where it has none. */
static const float *
find_state(const smla_compress_params *p, int64_t req, int64_t position)
{
    const smla_page_table *const table = &p->table;
    const int64_t block = position / table->block_size;
    if (position < 0 || block >= table->num_blocks) {
        return NULL;
    }
    const int32_t page = read_page(table, req, block);
    const smla_kv_view *const state = &p->states.rows.kv;
    return page < 0 ? NULL
                    : (const float *)(const void *)smla_kv_token_at(state, page,
                                                                    position % table->block_size)
                          .row;
}

/* Finds the states `first` and those after it of the group that a token closes. */
static smla_pool_rows
find_rows(const smla_compress_params *p, int64_t token, int64_t first, const absent_state *absent)
{
    const int64_t num_rows = p->states.width / p->dim * p->states.ratio;
    const int64_t start = first_of_group(p, read_position(&p->rope, token));
    const int64_t req = p->req_id_per_token[token * p->req_id_stride];
    smla_pool_rows rows;
    for (int i = 0; i < SMLA_POOL_ROWS; i++) {
        const int64_t j = first + i;
        const float *const state = j < num_rows ? find_state(p, req, start + j) : NULL;
        const int64_t channel = j < num_rows - p->states.ratio ? 0 : p->states.width - p->dim;
        rows.values[i] = state == NULL ? absent->values : state + channel;
        rows.scores[i] = state == NULL ? absent->scores : state + p->states.width + channel;
    }
    return rows;
}

/* Starts to fetch the states `first` and those after it, into the second cache. GCC 12 would remove
 * a call of such a function as one without effects. */
static inline __attribute__((always_inline)) void
fetch_states(const smla_compress_params *p, int64_t token, int64_t first,
             const absent_state *absent)
{
    const smla_pool_rows rows = find_rows(p, token, first, absent);
    for (int i = 0; i < SMLA_POOL_ROWS; i++) {
        for (int64_t channel = 0; channel < p->dim; channel += FLOATS_PER_LINE) {
            __builtin_prefetch(rows.values[i] + channel, 0, 2);
            __builtin_prefetch(rows.scores[i] + channel, 0, 2);
        }
    }
}

static void
close_group(const smla_cpu_isa *isa, const smla_compress_params *p, int64_t token, float kv_scale,
            const absent_state *absent, smla_pool *pool)
{
    const smla_norm_isa *const norm = isa->norm;
    const smla_pool_norm by = {p->norm_weight, p->weight_type, p->eps};
    const int64_t num_rows = p->states.width / p->dim * p->states.ratio;
    for (int64_t first = 0; first < num_rows; first += SMLA_POOL_ROWS) {
        const smla_pool_rows rows = find_rows(p, token, first, absent);
        if (first + SMLA_POOL_ROWS < num_rows) {
            fetch_states(p, token, first + SMLA_POOL_ROWS, absent);
        }
        norm->pool_states(pool, &rows, p->dim, first == 0);
    }
    uint16_t key[SMLA_V4_HEAD_DIM];
    const int64_t group = read_position(&p->rope, token) / p->states.ratio;
    const float *const cos_sin =
        p->rope.cos_sin + group * p->states.ratio * p->rope.cos_sin_stride_pos;
    norm->finish_pool(pool, p->dim, &by, cos_sin, key);
    const smla_kv_format_info *const format = p->insert.kv.format;
    isa->cache->write_row(format, SMLA_FLOAT_BF16, key, 0, key, format->nope_dim, kv_scale,
                          smla_kv_slot(&p->insert.kv, read_slot(&p->insert, token)));
}

/* Closes the groups whose rows are in one share, in order. While a group is pooled, the first
 * states of the next one are fetched. */
static void
close_share(const smla_cpu_isa *isa, const smla_compress_params *p, const absent_state *absent,
            int share, slot_shares shares, smla_pool *pool)
{
    const float kv_scale = smla_read_scale(&p->insert.kv_scale);
    int64_t former = -1;
    for (int64_t token = 0; token < p->insert.num_tokens; token++) {
        if (is_in_share(read_slot(&p->insert, token), share, shares) && closes_group(p, token)) {
            fetch_states(p, token, 0, absent);
            if (former >= 0) {
                close_group(isa, p, former, kv_scale, absent, pool);
            }
            former = token;
        }
    }
    if (former >= 0) {
        close_group(isa, p, former, kv_scale, absent, pool);
    }
}

smla_status
smla_cpu_compress_norm_rope_store(const smla_compress_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    SMLA_TRY(smla_cpu_check_compress(p, error));
    const slot_shares shares = divide_slots(&p->insert, p->insert.num_tokens / p->states.ratio);
    const smla_scratch_size size = {smla_count_threads(shares.count), sizeof(smla_pool)};
    smla_thread_scratch pools;
    SMLA_TRY(smla_open_scratch(&pools, p->call.op, size, error));
    if (p->states.ape != NULL) {
        save_states(isa->norm, &p->states);
    }
    absent_state absent = {.values = {0}};
    for (int i = 0; i < SMLA_V4_HEAD_DIM; i++) {
        absent.scores[i] = -INFINITY;
    }
#pragma omp parallel for schedule(static) num_threads(size.num_parts)
    for (int share = 0; share < shares.count; share++) {
        close_share(isa, p, &absent, share, shares, smla_own_scratch(&pools));
    }
    smla_close_scratch(&pools);
    return SMLA_OK;
}
