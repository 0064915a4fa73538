/* held_select.cuh: top_k_per_row of rows whose keys a cluster holds in its registers, or in its
 * registers and its shared memory; of longer rows it holds the beginning.
 *
 * Computes     what top_k.cuh computes
 * Shapes       as there; a row has one, two or three parts: 32 keys per thread of the cluster in
 *              registers, as many in shared memory, and the streamed part, which is not held
 * Shared mem   held_memory, 45 KB: counts of digit values, twice, and what CTAs send each other;
 *              then the CTA's logits of one part of the row, up to 128 KB
 * Roles        A cluster of 1, 2, 4 or 8 CTAs takes one row after the other, a thread up to 32
 *              neighbouring columns of each part that is held. One thread works out where rows
 *              are, two ahead.
 *                load     Each warp has its logits of the first part copied to a place of its own
 *                         in shared memory, and takes them as keys to registers. Then the next
 *                         copy begins, of the second part, which stays in shared memory; or, if
 *                         there is none, of the next row, which goes on under all that follows.
 *                         Each warp has a share of the streamed part brought to L2, and reads it
 *                         from there each time that keys are counted, compared or written
 *                digits   of the k-th key, 12, 12 and 8 bits, each counted in shared memory and
 *                         found by find_digit; none after one whose keys are all taken
 *                compare  all keys with the threshold; each warp tells all CTAs what it takes.
 *                         Where so many keys share the digits found that they may well be equal,
 *                         this comes before the next digit, with the first of them as threshold:
 *                         the number of equal keys shows whether it was right
 *                write    the columns, in order
 *              Barriers of the CTA: per digit, the counts are complete, the digit is found. CTAs of
 *              a cluster wait for each other's bytes at mbarriers: sums of groups, counts of one
 *              group, counts of taken keys, first keys. A cluster of one CTA has barriers there.
 * Roofline     Memory: the row once. Instructions come close: 12 per key. Counting takes two cycles
 *              of the SM per warp and key. One row: latency of two digits and their barriers. A
 *              streamed part: L2, four or five times, at 30 bytes per cycle and SM.
 * Numerics     Integers, exact; signs of differences of floats, exact, too. The result depends
 *              neither on the number of CTAs nor on the order of atomics, which only count. Starts
 *              and ends are clamped to 0...N.
 * Source       Radix selection is widely used (RAFT, TensorRT-LLM, SGLang). Ours: keys in registers
 *              under the copy of the next row, counts sent through the cluster, and columns in
 *              order by masks that are rotated, so that no sort follows.
 */
#pragma once

#include "cuda/select/held_results.cuh"

namespace {

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Works out the row of a token. Behind the last token there is none. */
template <bool IS_BF16, int NUM_RUNS>
__device__ __forceinline__ void
plan_row(const smla_top_k_params &p, uint32_t token, held_row *row)
{
    row->token = token;
    row->is_selected = false;
    if (token < p.num_tokens) {
        const token_columns columns = load_columns(p, token);
        row->result = open_result<IS_BF16>(p, token, columns);
        open_row<IS_BF16, NUM_RUNS>(row, row->result.logits, columns, (uint32_t)p.num_columns);
        row->is_selected = columns.count > p.k;
    }
}

/* The place of the warp's logits in shared memory. */
template <bool IS_BF16>
__device__ __forceinline__ uint32_t
find_place(const held_memory *shared)
{
    constexpr uint32_t WARP_BYTES = SMLA_WARP_LANES * MOST_KEYS * logit_type<IS_BF16>::BYTES;
    return ptx_shared_address(shared->logits) + ptx_thread() / SMLA_WARP_LANES * WARP_BYTES;
}

__device__ __forceinline__ uint32_t
find_row_barrier(const held_memory *shared)
{
    return ptx_shared_address(&shared->row_barriers[ptx_thread() / SMLA_WARP_LANES]);
}

/* Begins to bring the warp's vectors of a part to shared memory, if columns of the row are
 * selected. All lanes call this when they have read what lay there. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
start_copy(const held_row &row, int part, held_memory *shared)
{
    __syncwarp(); /* all lanes have read */
    if (row.is_selected && threadIdx.x % SMLA_WARP_LANES == 0) {
        const uint32_t run = part * CTAS * THREADS + cluster_thread<CTAS, THREADS>();
        copy_vectors(row, find_vectors(row, run), find_place<IS_BF16>(shared),
                     find_row_barrier(shared));
    }
}

/* Waits for the logits of the warp's runs of a part, and takes this thread's. */
template <bool IS_BF16, typename Keys>
__device__ __forceinline__ void
finish_copy(const held_row &row, uint32_t run, const held_memory *shared, uint32_t parity,
            Keys *keys)
{
    const uint32_t memory = find_place<IS_BF16>(shared);
    const uint32_t first_run = run - threadIdx.x % SMLA_WARP_LANES;
    ptx_mbarrier_wait(find_row_barrier(shared), parity);
    mend_ends<IS_BF16>(row, find_vectors(row, first_run), memory);
    keys->load(row, open_run<IS_BF16>(row, run), memory);
}

template <int CTAS>
__device__ __forceinline__ void
init_memory(held_memory *shared)
{
    if (threadIdx.x % SMLA_WARP_LANES == 0) { /* lanes of one warp would take turns */
        ptx_mbarrier_init(find_row_barrier(shared), 1);
        ptx_fence_mbarrier_init();
    }
    if (threadIdx.x == 0) {
        shared->half = 0;
        ptx_mbarrier_init(ptx_shared_address(&shared->group_barrier), 1);
        ptx_mbarrier_init(ptx_shared_address(&shared->found_barrier), 1);
        ptx_mbarrier_init(ptx_shared_address(&shared->taken_barrier), 1);
        ptx_mbarrier_init(ptx_shared_address(&shared->first_barrier), 1);
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

/* Selects the columns of a row with more than k. A warp's place in shared memory is soon free for
 * the next row: if there is one part, when its logits are in registers. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
select_columns(uint32_t k, held_memory *shared, uint32_t *state)
{
    thread_keys<IS_BF16, PARTS> keys;
    keys.held.warp_steps = shared->warp_steps[0];
    taken_masks<PARTS> masks;
    {
        const held_row &row = *find_row(shared, *state, 0);
        const uint32_t run = cluster_thread<CTAS, THREADS>();
        const uint32_t *const counts = shared->counts[shared->half];
        if constexpr (PARTS > HELD_PARTS) {
            keys.streamed.row = &row;
            keys.streamed.shares = shared->shares;
            keys.streamed.open(HELD_PARTS * CTAS * THREADS * logit_type<IS_BF16>::MOST_STEPS,
                               run / SMLA_WARP_LANES, CTAS * THREADS / SMLA_WARP_LANES);
        }
        finish_copy<IS_BF16>(row, run, shared, PARTS > 1 ? 0 : next_phase(state, ROW_PHASE),
                             &keys.held);
        if constexpr (PARTS > 1) {
            start_copy<IS_BF16, CTAS, THREADS>(row, 1, shared);
            count_first_bits(keys.held, counts);
            keys.parked.warp_steps = shared->warp_steps[1];
            keys.parked.memory = ptx_shared_address(shared->logits);
            finish_copy<IS_BF16>(row, CTAS * THREADS + run, shared, 1, &keys.parked);
            count_first_bits(keys.parked, counts);
        }
        if constexpr (PARTS > HELD_PARTS) {
            count_first_bits(keys.streamed, counts);
        }
        if constexpr (PARTS == 1) {
            start_copy<IS_BF16, CTAS, THREADS>(*find_row(shared, *state, 1), 0, shared);
            count_first_bits(keys.held, counts);
        }
    }
    *state = ptx_forget(*state); /* the row's address is made anew, to spare registers */
    choose_columns<IS_BF16, CTAS, THREADS, PARTS>(keys, k, shared, state, &masks);
    if constexpr (PARTS > 1) {
        start_copy<IS_BF16, CTAS, THREADS>(*find_row(shared, *state, 1), 0, shared);
    }
    write_taken<IS_BF16, CTAS, THREADS, PARTS>(keys, *find_row(shared, *state, 0), masks, shared);
}

/* What the kernels do, each CTA of the cluster for its part of every row. The last thread of the
 * CTA works out the rows, two ahead. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
select_held_rows(const top_k_args &args)
{
    constexpr int NUM_RUNS = CTAS * THREADS * HELD<PARTS>;
    extern __shared__ __align__(128) uint8_t memory[];
    held_memory *const shared = (held_memory *)memory;
    const smla_top_k_params &p = args.p;
    uint32_t state = 0;
    clear_counts<THREADS>(shared->counts[0]);
    init_memory<CTAS>(shared);
    __syncthreads(); /* the barriers are there, the first counts are clear */
    ptx_wait_for_grids();
    if (threadIdx.x >= THREADS - 2) { /* one thread per row */
        const uint32_t ahead = THREADS - 1 - threadIdx.x;
        plan_row<IS_BF16, NUM_RUNS>(p, (blockIdx.x + ahead * gridDim.x) / CTAS,
                                    &shared->rows[ahead]);
    }
    __syncthreads(); /* the first two rows are planned */
    start_copy<IS_BF16, CTAS, THREADS>(shared->rows[0], 0, shared);
    for (; find_row(shared, state, 0)->token < p.num_tokens; state = next_row(state)) {
        if (is_planner<THREADS>()) {
            plan_row<IS_BF16, NUM_RUNS>(p,
                                        find_row(shared, state, 0)->token + 2 * (gridDim.x / CTAS),
                                        find_row(shared, state, 2));
        }
        __syncwarp();
        if (find_row(shared, state, 0)->is_selected) {
            select_columns<IS_BF16, CTAS, THREADS, PARTS>((uint32_t)p.k, shared, &state);
        } else {
            const held_row &row = *find_row(shared, state, 0);
            start_copy<IS_BF16, CTAS, THREADS>(*find_row(shared, state, 1), 0, shared);
            __syncthreads(); /* the row after the next is planned */
            write_all<IS_BF16, CTAS, THREADS>(row.result, row.count, (uint32_t)p.k);
        }
        if (p.slots.out != nullptr) {
            sync_ctas<CTAS>(); /* the row of out is written */
            if (cluster_rank<CTAS>() == 0) {
                int slot_half = 0;
                state = ptx_forget(state);
                write_slot_row<THREADS>(p.slots, args.pages, find_row(shared, state, 0)->token,
                                        shared->slot_counts, &slot_half);
            }
        }
    }
}

} // namespace
