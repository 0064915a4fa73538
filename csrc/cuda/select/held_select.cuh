/* held_select.cuh: top_k_per_row of rows whose keys all fit in the registers of a cluster.
 *
 * Computes     what top_k.cuh computes
 * Shapes       as there; N up to 32 keys per thread of the cluster
 * Shared mem   held_memory, 40 KB: counts of digit values, twice, and what CTAs send each other;
 *              then the CTA's logits of one row, up to 128 KB
 * Roles        A cluster of 1, 2, 4 or 8 CTAs takes one row after the other, a thread up to 32
 *              neighbouring columns. One thread works out where rows are, one row ahead.
 *                load     logits from shared memory, as keys, to registers; then the copy of the
 *                         next row begins, and goes on under all that follows
 *                digits   of the k-th key, 12, 12 and 8 bits, each counted in shared memory and
 *                         found by find_digit; none after one whose keys are all taken
 *                place    each warp tells all CTAs how many keys it takes
 *                write    the columns, in order
 *              Barriers of the CTA: logits are in registers; per digit: the counts are complete,
 *              the digit is found. CTAs of a cluster wait for each other's bytes at mbarriers: sums
 *              of groups, counts of one group, counts of taken keys. A cluster of one CTA has
 *              barriers there.
 * Roofline     Memory: the row once. Instructions come close: 12 per key, most of 2 cycles. One
 *              row: latency of two digits and their barriers.
 * Numerics     Integers, exact. The result depends neither on the number of CTAs nor on the order
 *              of atomics, which only count. Starts and ends are clamped to 0...N.
 * Source       Radix selection is widely used (RAFT, TensorRT-LLM, SGLang). Ours: keys in registers
 *              under the copy of the next row, counts sent through the cluster, and columns in
 *              order by masks that are rotated, so that no sort follows.
 */
#pragma once

#include "cuda/select/held_digits.cuh"

namespace {

/* Taken are the keys whose places, key * sign + offset, are at most `last`, and the first
 * `num_equal` of those in the next place. */
typedef struct key_threshold {
    uint32_t sign;
    uint32_t offset;
    uint32_t last;
    uint32_t num_equal;
} key_threshold;

/* ---- Threshold ----------------------------------------------------------------------------- */

/* Finds digit after digit, until all keys that begin with the digits found are taken. */
template <int CTAS, int THREADS, typename Keys>
__device__ __forceinline__ key_threshold
find_threshold(const Keys &keys, uint32_t k, held_memory *shared)
{
    key_range range = {};
    uint32_t num_left = k;
    uint32_t least = 0; /* the least place of the range */
    uint32_t offset = 0;
    range.shift = 20;
    for (;;) {
        const bool is_first = range.shift == 20;
        if (is_first) {
            count_first_bits(keys, shared->counts[shared->half]);
        } else {
            count_digits(keys, range, shared->counts[shared->half]);
        }
        find_digit<CTAS, THREADS>(shared, is_first, num_left);
        num_left = shared->num_left;
        least += shared->digit << range.shift;
        const bool are_all_taken = shared->digit_count == num_left;
        if (is_first) {
            range.sign = (int32_t)least < 0 ? 1 : 0xFFFFFFFFu;
            offset = (int32_t)least < 0 ? 0x80000000u : 0xFFFFFFFFu;
        }
        range.offset = offset - least;
        if (are_all_taken || range.shift == 0) {
            return {range.sign, offset,
                    are_all_taken ? least + ((1u << range.shift) - 1) : least - 1,
                    are_all_taken ? 0 : num_left};
        }
        range.shift = is_first ? 8 : 0;
    }
}

/* ---- Results ------------------------------------------------------------------------------- */

/* The lowest `count` bits of a mask. */
__device__ __forceinline__ uint32_t
lowest_bits(uint32_t mask, uint32_t count)
{
#pragma unroll 1
    for (uint32_t extra = __popc(mask); extra > count && count != 0; extra--) {
        mask &= 0x7FFFFFFFu >> __clz(mask);
    }
    return count == 0 ? 0 : mask;
}

/* The elements of the run that are taken, and those in the place next to the last one that is. */
template <typename Keys>
__device__ __forceinline__ void
compare_keys(const Keys &keys, const held_row &row, const held_run &run,
             const key_threshold &threshold, uint32_t *taken, uint32_t *equal)
{
    uint32_t mask = 0;
    uint32_t equal_mask = 0;
    if (threshold.num_equal == 0) {
        keys.visit([&](uint32_t i, uint32_t key) {
            const uint32_t place = key * threshold.sign + threshold.offset;
            mask |= place <= threshold.last ? 1u << i : 0;
        });
    } else {
        keys.visit([&](uint32_t i, uint32_t key) {
            const uint32_t place = key * threshold.sign + threshold.offset;
            mask |= place <= threshold.last ? 1u << i : 0;
            equal_mask |= place == threshold.last + 1 ? 1u << i : 0;
        });
    }
    *taken = to_columns(run, mask);
    *equal = to_columns(run, equal_mask) & find_logits(row, run);
}

/* Tells all CTAs what the warp takes, and learns what the warps before it take: `before` keys above
 * the threshold and `equal_before` that equal it. */
template <int CTAS, int THREADS>
__device__ __forceinline__ void
exchange_counts(held_memory *shared, uint32_t warp, uint32_t above, uint32_t equal, uint32_t parity,
                uint32_t *above_before, uint32_t *equal_before)
{
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    const uint32_t counts = __reduce_add_sync(ALL_LANES, above | equal << 16);
    if constexpr (CTAS == 1) {
        if (lane == 0) {
            shared->taken[warp] = counts;
        }
        __syncthreads(); /* all counts are there */
    } else {
        if (lane < CTAS) {
            ptx_send_4(address_in(lane, &shared->taken[warp]), counts,
                       address_in(lane, &shared->taken_barrier));
        }
        receive(&shared->taken_barrier, threadIdx.x == 0, WARPS * 4, parity);
    }
    uint32_t sums[2] = {};
#pragma unroll
    for (uint32_t first = 0; first < WARPS; first += SMLA_WARP_LANES) {
        const uint32_t other = first + lane < warp ? shared->taken[first + lane] : 0;
        sums[0] += other & 0xFFFFu;
        sums[1] += other >> 16;
    }
    *above_before = __reduce_add_sync(ALL_LANES, sums[0]);
    *equal_before = __reduce_add_sync(ALL_LANES, sums[1]);
}

/* Writes the columns that the warp takes, each lane those of its run from `column` on. Runs of
 * which much is taken are written by all lanes together, one after the other. */
template <bool IS_BF16>
__device__ __forceinline__ void
write_columns(const result_row &result, uint32_t mask, uint32_t place, uint32_t column)
{
    enum { MANY = 12 };
    if (!__any_sync(ALL_LANES, __popc(mask) > MANY)) {
        int32_t *out = result.out + place;
#pragma unroll 1
        for (uint32_t left = mask; left != 0; left &= left - 1) {
            *out++ = (int32_t)(column + __ffs(left) - 1);
        }
        if (result.values != nullptr) {
#pragma unroll 1
            for (; mask != 0; mask &= mask - 1) {
                copy_value<IS_BF16>(result, place++, column + __ffs(mask) - 1);
            }
        }
        return;
    }
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
#pragma unroll 4
    for (int run = 0; run < SMLA_WARP_LANES; run++) {
        const uint32_t run_mask = __shfl_sync(ALL_LANES, mask, run);
        const uint32_t run_place = __shfl_sync(ALL_LANES, place, run);
        const uint32_t run_column = __shfl_sync(ALL_LANES, column, run);
        if ((run_mask >> lane & 1) != 0) {
            write_column<IS_BF16>(result, run_place + __popc(run_mask & ((1u << lane) - 1)),
                                  run_column + lane);
        }
    }
}

/* Writes the columns that the warp takes, behind those of the warps before it. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
write_taken(const held_row &row, const held_run &run, uint32_t warp, uint32_t taken, uint32_t equal,
            uint32_t num_equal, held_memory *shared)
{
    const result_row result = row.result;
    uint32_t place;
    uint32_t equal_before;
    exchange_counts<CTAS, THREADS>(shared, warp, __popc(taken), __popc(equal), row.parity, &place,
                                   &equal_before);
    if (num_equal != 0) {
        const uint32_t count = __popc(equal);
        const uint32_t before = equal_before + scan_lanes(count) - count;
        place += min(equal_before, num_equal);
        taken |= lowest_bits(equal, num_equal - min(before, num_equal));
    }
    const uint32_t count = __popc(taken);
    write_columns<IS_BF16>(result, taken, place + scan_lanes(count) - count, run.first - row.begin);
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Works out the row of a token. Behind the last token there is none. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
plan_row(const smla_top_k_params &p, uint32_t token, held_memory *shared, held_row *row)
{
    row->token = token;
    row->is_selected = false;
    if (token < p.num_tokens) {
        const token_columns columns = load_columns(p, token);
        row->result = open_result<IS_BF16>(p, token, columns);
        open_row<IS_BF16, CTAS, THREADS>(row, row->result.logits, columns, (uint32_t)p.num_columns);
        row->is_selected = columns.count > p.k;
        row->parity = shared->next_parity;
        shared->next_parity ^= row->is_selected;
    }
}

/* Begins to bring a row of which columns are selected to shared memory. All threads have read what
 * lay there. */
template <int CTAS, int THREADS>
__device__ __forceinline__ void
start_copy(const held_row &row, held_memory *shared)
{
    if (!row.is_selected) {
        return;
    }
    const uint32_t barrier = ptx_shared_address(&shared->row_barrier);
    const uint32_t first = cluster_rank<CTAS>() * THREADS * row.steps;
    ptx_mbarrier_arrive_expect(barrier, row.copy_bytes);
    if (row.copy_bytes != 0) {
        ptx_bulk_copy(ptx_shared_address(shared->logits) + (row.copied - first) * VECTOR_BYTES,
                      row.vectors + (uint64_t)row.copied * VECTOR_BYTES, row.copy_bytes, barrier);
    }
}

/* Waits for the row's logits, and takes the keys of this thread. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
finish_copy(const held_row &row, held_memory *shared, held_keys<IS_BF16> *keys)
{
    const uint32_t thread = cluster_rank<CTAS>() * THREADS + threadIdx.x;
    const uint32_t memory = ptx_shared_address(shared->logits);
    const uint32_t warp_vectors = threadIdx.x / SMLA_WARP_LANES * SMLA_WARP_LANES * row.steps;
    ptx_mbarrier_wait(ptx_shared_address(&shared->row_barrier), row.parity);
    mend_ends<IS_BF16>(row, thread / SMLA_WARP_LANES, memory + warp_vectors * VECTOR_BYTES);
    keys->load(row, open_run<IS_BF16>(row, thread), memory);
}

template <int CTAS>
__device__ __forceinline__ void
init_memory(held_memory *shared)
{
    if (threadIdx.x == 0) {
        shared->half = 0;
        shared->next_parity = 0;
        ptx_mbarrier_init(ptx_shared_address(&shared->row_barrier), 1);
        ptx_mbarrier_init(ptx_shared_address(&shared->group_barrier), 1);
        ptx_mbarrier_init(ptx_shared_address(&shared->found_barrier), 1);
        ptx_mbarrier_init(ptx_shared_address(&shared->taken_barrier), 1);
        ptx_fence_mbarrier_init();
    }
    if constexpr (CTAS > 1) {
        __syncwarp();
        ptx_cluster_arrive();
        ptx_cluster_wait(); /* the barriers of all CTAs are there */
    }
}

/* Whether this is the thread that works out the rows. */
template <int THREADS>
__device__ __forceinline__ bool
is_planner(void)
{
    return ptx_thread() == THREADS - 1;
}

/* Selects the columns of a row with more than k, and has the next row copied when the logits of
 * this one are in registers. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
select_columns(int turn, uint32_t k, held_memory *shared)
{
    held_keys<IS_BF16> keys;
    uint32_t taken;
    uint32_t equal;
    finish_copy<IS_BF16, CTAS, THREADS>(shared->rows[turn], shared, &keys);
    __syncthreads(); /* the logits are in registers, the next row is planned */
    if (is_planner<THREADS>()) {
        start_copy<CTAS, THREADS>(shared->rows[(turn + 1) % NUM_ROWS], shared);
    }
    const key_threshold threshold = find_threshold<CTAS, THREADS>(keys, k, shared);
    const held_row &row = shared->rows[ptx_forget(turn)];
    const uint32_t thread = cluster_rank<CTAS>() * THREADS + ptx_thread();
    const held_run run = open_run<IS_BF16>(row, thread);
    compare_keys(keys, row, run, threshold, &taken, &equal);
    write_taken<IS_BF16, CTAS, THREADS>(row, run, thread / SMLA_WARP_LANES, taken, equal,
                                        threshold.num_equal, shared);
}

/* What the kernels do, each CTA of the cluster for its part of every row. The last thread of the
 * CTA works out the rows, one ahead, and has them copied. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
select_held_rows(const top_k_args &args)
{
    extern __shared__ __align__(128) uint8_t memory[];
    held_memory *const shared = (held_memory *)memory;
    const smla_top_k_params &p = args.p;
    clear_counts<THREADS>(shared->counts[0]);
    init_memory<CTAS>(shared);
    __syncthreads(); /* the barriers are there, the first counts are clear */
    ptx_wait_for_grids();
    if (is_planner<THREADS>()) {
        plan_row<IS_BF16, CTAS, THREADS>(p, blockIdx.x / CTAS, shared, &shared->rows[0]);
        start_copy<CTAS, THREADS>(shared->rows[0], shared);
    }
    __syncthreads(); /* the first row is planned */
    for (int turn = 0; shared->rows[turn].token < p.num_tokens; turn = (turn + 1) % NUM_ROWS) {
        const held_row &row = shared->rows[turn];
        held_row &next = shared->rows[(turn + 1) % NUM_ROWS];
        if (is_planner<THREADS>()) {
            plan_row<IS_BF16, CTAS, THREADS>(p, row.token + gridDim.x / CTAS, shared, &next);
        }
        __syncwarp();
        if (row.is_selected) {
            select_columns<IS_BF16, CTAS, THREADS>(turn, (uint32_t)p.k, shared);
        } else {
            __syncthreads(); /* the next row is planned */
            if (is_planner<THREADS>()) {
                start_copy<CTAS, THREADS>(next, shared);
            }
            write_all<IS_BF16, CTAS, THREADS>(row.result, row.count, (uint32_t)p.k);
        }
        if (p.slots.out != nullptr) {
            sync_ctas<CTAS>(); /* the row of out is written */
            if (cluster_rank<CTAS>() == 0) {
                int slot_half = 0;
                write_slot_row<THREADS>(p.slots, args.pages, shared->rows[ptx_forget(turn)].token,
                                        shared->slot_counts, &slot_half);
            }
        }
    }
}

} // namespace
