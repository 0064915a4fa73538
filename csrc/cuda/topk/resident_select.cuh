/* resident_select.cuh: top_k_per_row of rows whose keys a cluster keeps in its registers, or in its
 * registers and its shared memory. Of longer rows it keeps the beginning.
 *
 * Computes     what top_k.cuh computes
 * Shapes       as there; a row has one, two or three parts: 32 keys per thread of the cluster in
 *              registers, as many in shared memory, and the streamed part, which is not resident
 * Shared mem   resident_memory, 45 KB: counts of digit values, twice, and what CTAs send each
 *              other; then the CTA's logits of one part of the row, up to 128 KB
 * Roles        A cluster of 1, 2, 4 or 8 CTAs takes one row after the other. A thread has up to 32
 *              neighbouring columns of each resident part. One thread plans the rows, two ahead.
 *                load     Each warp has its logits of the first part copied to its own range of
 *                         shared memory, and loads them as keys into registers. Then the next
 *                         copy begins: of the second part, which stays in shared memory, or, if
 *                         there is none, of the next row. The copy of the next row runs under
 *                         all later steps. Each warp has a share of the streamed part brought to
 *                         L2, and reads it from there whenever keys are counted, compared or
 *                         written.
 *                digits   The three digits of the k-th key, 12, 12 and 8 bits, are counted in
 *                         shared memory and found by find_digit. Once the row takes all keys
 *                         that begin with the digits found, the others are not needed.
 *                compare  All keys are compared with the threshold, and each warp tells all CTAs
 *                         how many keys it takes. Where so many keys share the digits found that
 *                         they may well be equal, this step comes before the next digit, with
 *                         the first of them as threshold: the number of keys equal to it shows
 *                         whether all of them are.
 *                write    The columns are written, in order.
 *              Barriers of the CTA, per digit: the counts are complete, the digit is found. CTAs
 *              of a cluster wait at mbarriers for each other's bytes: sums of groups, counts of
 *              one group, counts of taken keys, first orders. A cluster of one CTA has barriers
 *              there.
 * Roofline     Memory: the row once. Instructions come close: 12 per key. Counting takes two cycles
 *              of the SM per warp and key. One row: latency of two digits and their barriers. A
 *              streamed part: L2, four or five times, at 30 bytes per cycle and SM.
 * Numerics     Integers, exact; the signs of float differences are exact, too. The result depends
 *              neither on the number of CTAs nor on the order of atomics, which only count. Starts
 *              and ends are clamped to 0...N.
 * Source       Radix selection is widely used (RAFT, TensorRT-LLM, SGLang). Ours: keys in registers
 *              under the copy of the next row, counts sent through the cluster, and columns in
 *              order by masks that are rotated, so that no sort follows.
 */
#pragma once

#include "cuda/topk/resident_results.cuh"

namespace {

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Computes the fields of a token's row. Past the last token, the row has no columns. */
template <bool IS_BF16, int NUM_RUNS>
__device__ __forceinline__ void
plan_row(const smla_top_k_params &p, uint32_t token, resident_row *row)
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

/* The address of the warp's range for logits in shared memory. */
template <bool IS_BF16>
__device__ __forceinline__ uint32_t
find_warp_logits(const resident_memory *shared)
{
    constexpr uint32_t WARP_BYTES = SMLA_WARP_LANES * MOST_KEYS * logit_type<IS_BF16>::BYTES;
    return ptx_shared_address(shared->logits) + ptx_thread() / SMLA_WARP_LANES * WARP_BYTES;
}

__device__ __forceinline__ uint32_t
find_row_barrier(const resident_memory *shared)
{
    return ptx_shared_address(&shared->row_barriers[ptx_thread() / SMLA_WARP_LANES]);
}

/* Starts the copy of the warp's vectors of a part to shared memory, if columns of the row are
 * selected. All lanes call this when they have read the former contents. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
start_copy(const resident_row &row, int part, resident_memory *shared)
{
    __syncwarp(); /* all lanes have read the former contents */
    if (row.is_selected && threadIdx.x % SMLA_WARP_LANES == 0) {
        const uint32_t run = part * CTAS * THREADS + cluster_thread<CTAS, THREADS>();
        copy_vectors(row, find_vectors(row, run), find_warp_logits<IS_BF16>(shared),
                     find_row_barrier(shared));
    }
}

/* Waits for the logits of the warp's runs of a part, and loads this thread's run. */
template <bool IS_BF16, typename Keys>
__device__ __forceinline__ void
finish_copy(const resident_row &row, uint32_t run, const resident_memory *shared, uint32_t parity,
            Keys *keys)
{
    const uint32_t memory = find_warp_logits<IS_BF16>(shared);
    const uint32_t first_run = run - threadIdx.x % SMLA_WARP_LANES;
    ptx_mbarrier_wait(find_row_barrier(shared), parity);
    mend_ends<IS_BF16>(row, find_vectors(row, first_run), memory);
    keys->load(row, open_run<IS_BF16>(row, run), memory);
}

template <int CTAS>
__device__ __forceinline__ void
init_memory(resident_memory *shared)
{
    /* One lane per warp, because lanes would run one after another. */
    if (threadIdx.x % SMLA_WARP_LANES == 0) {
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
        ptx_cluster_wait(); /* the mbarriers of all CTAs are initialised */
    }
}

/* Whether this is the thread that plans the rows. */
template <int THREADS>
__device__ __forceinline__ bool
is_planner(void)
{
    return ptx_thread() == THREADS - 1;
}

/* Selects the columns of a row with more than k logits. The copy of the next row starts as soon as
 * the warp's range of shared memory is free: with one part, when its logits are in registers. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
select_columns(uint32_t k, resident_memory *shared, uint32_t *state)
{
    thread_keys<IS_BF16, PARTS> keys;
    keys.resident.warp_steps = shared->warp_steps[0];
    taken_masks<PARTS> masks;
    {
        const resident_row &row = *find_row(shared, *state, 0);
        const uint32_t run = cluster_thread<CTAS, THREADS>();
        const uint32_t *const counts = shared->counts[shared->half];
        if constexpr (PARTS > RESIDENT_PARTS) {
            keys.streamed.row = &row;
            keys.streamed.shares = shared->shares;
            keys.streamed.open(RESIDENT_PARTS * CTAS * THREADS * logit_type<IS_BF16>::MOST_STEPS,
                               run / SMLA_WARP_LANES, CTAS * THREADS / SMLA_WARP_LANES);
        }
        finish_copy<IS_BF16>(row, run, shared, PARTS > 1 ? 0 : next_phase(state, ROW_PHASE),
                             &keys.resident);
        if constexpr (PARTS > 1) {
            start_copy<IS_BF16, CTAS, THREADS>(row, 1, shared);
            count_first_bits(keys.resident, counts);
            keys.parked.warp_steps = shared->warp_steps[1];
            keys.parked.memory = ptx_shared_address(shared->logits);
            finish_copy<IS_BF16>(row, CTAS * THREADS + run, shared, 1, &keys.parked);
            count_first_bits(keys.parked, counts);
        }
        if constexpr (PARTS > RESIDENT_PARTS) {
            count_first_bits(keys.streamed, counts);
        }
        if constexpr (PARTS == 1) {
            start_copy<IS_BF16, CTAS, THREADS>(*find_row(shared, *state, 1), 0, shared);
            count_first_bits(keys.resident, counts);
        }
    }
    /* Hide the value, so that the row's address is computed again; keeping it would cost
     * registers. */
    *state = ptx_forget(*state);
    choose_columns<IS_BF16, CTAS, THREADS, PARTS>(keys, k, shared, state, &masks);
    if constexpr (PARTS > 1) {
        start_copy<IS_BF16, CTAS, THREADS>(*find_row(shared, *state, 1), 0, shared);
    }
    write_taken<IS_BF16, CTAS, THREADS, PARTS>(keys, *find_row(shared, *state, 0), masks, shared);
}

/* The body of the kernels: each CTA of the cluster handles its part of every row. The last thread
 * of the CTA plans the rows, two ahead. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
select_resident_rows(const top_k_args &args)
{
    constexpr int NUM_RUNS = CTAS * THREADS * RESIDENT<PARTS>;
    extern __shared__ __align__(128) uint8_t memory[];
    resident_memory *const shared = (resident_memory *)memory;
    const smla_top_k_params &p = args.p;
    uint32_t state = 0;
    clear_counts<THREADS>(shared->counts[0]);
    init_memory<CTAS>(shared);
    __syncthreads(); /* the mbarriers are initialised, the first counts are clear */
    ptx_wait_for_grids();
    if (threadIdx.x >= THREADS - 2) { /* one thread for each of the first two rows */
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
            const resident_row &row = *find_row(shared, state, 0);
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
