/* rank_lists.c: what of a request a rank of context parallelism has: positions become the rank's
 * own, lists of them without holes, and lengths their share. core/attention/visible.h has the rule.
 */
#include "core/params_index.h"
#include "cpu/cpu.h"
#include "cpu/index/slot.h"
#include "cpu/machine/threads.h"

enum { MIN_PARALLEL_ENTRIES = 1 << 15 }; /* below, starting threads costs more than they save */

/* An int32 position divides in 32 bits, which takes processors a third of the time. */
static inline int32_t
find_own_int32(const smla_rank_share *share, int32_t position)
{
    const uint32_t block = (uint32_t)position / (uint32_t)share->interleave;
    const uint32_t round = block / (uint32_t)share->size;
    return position < 0 ? -1 : (int32_t)smla_own_position(share, position, block, round);
}

static inline int64_t
find_own_int64(const smla_rank_share *share, int64_t position)
{
    const int64_t block = position / share->interleave;
    return position < 0 ? -1 : smla_own_position(share, position, block, block / share->size);
}

smla_status
smla_cpu_cp_local_positions(const smla_rank_lists_params *p, smla_error *error)
{
    (void)error;
    const int64_t count = p->num_rows * p->num_columns;
#pragma omp parallel for schedule(static) if (count >= MIN_PARALLEL_ENTRIES)
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = i / p->num_columns;
        const int64_t column = i - row * p->num_columns;
        const int64_t from = row * p->in_stride_row + column * p->in_stride_column;
        const int64_t to = row * p->out_stride_row + column;
        if (p->are_int64) {
            ((int64_t *)p->out)[to] = find_own_int64(&p->share, ((const int64_t *)p->in)[from]);
        } else {
            ((int32_t *)p->out)[to] = find_own_int32(&p->share, ((const int32_t *)p->in)[from]);
        }
    }
    return SMLA_OK;
}

/* An entry of another rank is written, too, and the next one in its place. */
static void
write_own_list(const smla_rank_lists_params *p, int64_t row)
{
    const int32_t *const in = (const int32_t *)p->in + row * p->in_stride_row;
    int32_t *const out = (int32_t *)p->out + row * p->out_stride_row;
    int64_t count = 0;
    for (int64_t i = 0; i < p->num_columns; i++) {
        const int32_t own = find_own_int32(&p->share, in[i]);
        out[count] = own;
        count += own >= 0;
    }
    smla_clear_columns(out, count, p->num_columns);
    p->lens[row * p->lens_stride] = (int32_t)count;
}

smla_status
smla_cpu_cp_local_topk(const smla_rank_lists_params *p, smla_error *error)
{
    (void)error;
#pragma omp parallel for schedule(static) if (p->num_rows * p->num_columns >= MIN_PARALLEL_ENTRIES)
    for (int64_t row = 0; row < p->num_rows; row++) {
        write_own_list(p, row);
    }
    return SMLA_OK;
}

smla_status
smla_cpu_cp_local_lengths(const smla_rank_lists_params *p, smla_error *error)
{
    (void)error;
    for (int64_t i = 0; i < p->num_columns; i++) {
        const int32_t length = ((const int32_t *)p->in)[i * p->in_stride_column];
        ((int32_t *)p->out)[i] = (int32_t)smla_count_own(&p->share, length < 0 ? 0 : length);
    }
    return SMLA_OK;
}
