/* top_k.cuh: top_k_per_row: the columns of the k largest logits of each row, exactly.
 *
 * Computes     out[t] = the columns starts[t]...ends[t] - 1 with the k largest keys, of equal keys
 *              the first, in ascending order and counted from starts[t], then -1; values[t] = their
 *              logits, then -inf; slots[t], lens[t] = the slots of out[t] without holes
 * Shapes       logits [T, N] fp32 or bf16, values [T, K] alike, out, slots [T, K] int32, rows any
 *              stride apart; starts, ends, lens [T] int32, any stride
 * Shared mem   select_memory, 25 KB: counts of digit values, twice, and lists of candidates; then
 *              the keys of the CTA's part of the row, as many as fit
 * Roles        A cluster of 1, 2, 4 or 8 CTAs takes one row at a time, a warp a run of columns.
 *                load     Each warp brings its logits to shared memory as keys, and counts their
 *                         first digit.
 *                digit 0  It is found in the counts of all CTAs (find_digit).
 *                digit 1  Keys with digit 0 are counted. Each warp lists its candidates: the keys
 *                         whose first digit is not too small.
 *                digit 2  Candidates with digits 0 and 1 are counted, but not for bf16.
 *                index    Each warp counts the keys that it takes, and learns how many earlier
 *                         warps take.
 *                write    The columns are written in order; votes give each its index.
 *              A warp with more candidates than its list can hold reads all its keys again.
 *              Barriers (CTA, or cluster): counts are complete; group counts are complete; the
 *              digit is found; the warps' counts are complete; all CTAs have read them.
 * Roofline     Memory: the row once. Columns that do not fit in shared memory are read from L2 once
 *              more, for digit 1. One row: latency of three digits and their barriers.
 * Numerics     Integers, exact. The result depends neither on the number of CTAs nor on the order
 *              of atomics, which only count. Starts and ends are clamped to 0...N.
 * Source       Radix selection is widely used (RAFT, TensorRT-LLM, SGLang). Ours: counts shared by
 *              groups through the cluster, and the ordered lists, so that no sort follows.
 */
#pragma once

#include "cuda/topk/top_k_digits.cuh"

namespace {

/* The keys that a warp reads after digit 0 is known: those of its list, or all. */
typedef struct candidates {
    bool are_listed;
    uint32_t count; /* entries of the list, or all elements of the warp */
} candidates;

/* The row takes all keys above `key`, and the first `num_equal` keys equal to it. */
typedef struct key_threshold {
    uint32_t key;
    uint32_t num_equal;
} key_threshold;

/* ---- Counting ------------------------------------------------------------------------------ */

template <bool IS_BF16>
__device__ __forceinline__ void
count_vector(const uint32_t words[4], uint32_t *counts)
{
#pragma unroll
    for (int i = 0; i < (int)logit_vector<IS_BF16>::ELEMENTS; i++) {
        atomicAdd(&counts[digit_of<0>(logit_vector<IS_BF16>::key(words, i))], 1u);
    }
}

/* Brings the warp's part of the row to shared memory, and counts all first digits. */
template <bool IS_BF16>
__device__ __forceinline__ void
load_row(const row_part &part, uint32_t *counts)
{
    constexpr uint32_t ELEMENTS = logit_vector<IS_BF16>::ELEMENTS;
#pragma unroll 1
    for (uint32_t step = 0; step < COPIES; step++) {
        start_copy<IS_BF16>(part, step);
    }
#pragma unroll 1
    for (uint32_t step = 0; step < part.memory_steps; step++) {
        uint32_t words[4];
        ptx_cp_async_wait<COPIES - 1>();
        finish_copy<IS_BF16>(part, step, words);
        start_copy<IS_BF16>(part, step + COPIES);
        if (vector_of(part, step) * ELEMENTS < part.end) {
            count_vector<IS_BF16>(words, counts);
        }
    }
#pragma unroll 1
    for (uint32_t step = part.memory_steps; step < part.num_steps; step += BATCH) {
        uint32_t words[BATCH][4] = {};
        load_batch<IS_BF16>(part, step, words);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const uint32_t vector = vector_of(part, step + i);
            if (step + i < part.num_steps && vector * ELEMENTS < part.end) {
                count_vector<IS_BF16>(words[i], counts);
            }
        }
    }
}

/* Appends the candidates of a step to the warp's list, in order. Returns the new length, which also
 * counts entries that found no room in the list. */
template <bool IS_BF16>
__device__ __forceinline__ uint32_t
list_step(const uint32_t words[4], uint32_t step, uint32_t digit, uint16_t *list, uint32_t length)
{
    constexpr uint32_t ELEMENTS = logit_vector<IS_BF16>::ELEMENTS;
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < (int)ELEMENTS; i++) {
        found |= (uint32_t)(digit_of<0>(logit_vector<IS_BF16>::key(words, i)) >= digit) << i;
    }
    if (!__any_sync(ALL_LANES, found != 0)) {
        return length;
    }
    const uint32_t sum = scan_lanes(__popc(found));
    uint32_t index = length + sum - __popc(found);
#pragma unroll
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        if ((found >> i & 1) != 0) {
            if (index < LIST_ENTRIES) {
                list[index] = (uint16_t)((step * SMLA_WARP_LANES + lane) * ELEMENTS + i);
            }
            index++;
        }
    }
    return length + __shfl_sync(ALL_LANES, sum, SMLA_WARP_LANES - 1);
}

/* Counts digit 1 of the keys whose digit 0 is `digit`, and lists the warp's candidates. */
template <bool IS_BF16>
__device__ __forceinline__ candidates
count_and_list(const row_part &part, uint32_t digit, uint32_t *counts, uint16_t *list)
{
    constexpr uint32_t ELEMENTS = logit_vector<IS_BF16>::ELEMENTS;
    const uint32_t num_elements = part.num_steps * (SMLA_WARP_LANES * ELEMENTS);
    uint32_t length = num_elements <= LIST_ELEMENTS ? 0 : LIST_ENTRIES + 1;
#pragma unroll 1
    for (uint32_t step = 0; step < part.num_steps; step += BATCH) {
        uint32_t words[BATCH][4];
        read_batch<IS_BF16>(part, step, words);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int j = 0; j < (int)ELEMENTS; j++) {
                count_digit<1>(logit_vector<IS_BF16>::key(words[i], j), digit, counts);
            }
            if (length <= LIST_ENTRIES && step + i < part.num_steps) {
                length = list_step<IS_BF16>(words[i], step + i, digit, list, length);
            }
        }
    }
    __syncwarp(); /* the list is written */
    return length <= LIST_ENTRIES ? candidates{true, length} : candidates{false, num_elements};
}

/* Returns the key of the warp's candidate `i`, and its element; the key is 0 past the last
 * candidate. */
template <bool IS_BF16>
__device__ __forceinline__ uint32_t
read_candidate(const row_part &part, const candidates &found, const uint16_t *list, uint32_t i,
               uint32_t *element)
{
    *element = i >= found.count ? 0 : found.are_listed ? list[i] : i;
    return i < found.count ? read_key<IS_BF16>(part, *element) : 0;
}

/* Calls use(key) for all of the warp's candidates. */
template <bool IS_BF16, typename Use>
__device__ __forceinline__ void
visit_candidates(const row_part &part, const candidates &found, const uint16_t *list,
                 const Use &use)
{
    if (found.are_listed) {
        for (uint32_t i = threadIdx.x % SMLA_WARP_LANES; i < found.count; i += SMLA_WARP_LANES) {
            use(read_key<IS_BF16>(part, list[i]));
        }
        __syncwarp();
        return;
    }
#pragma unroll 1
    for (uint32_t step = 0; step < part.num_steps; step += BATCH) {
        uint32_t words[BATCH][4];
        read_batch<IS_BF16>(part, step, words);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
#pragma unroll
            for (int j = 0; j < (int)logit_vector<IS_BF16>::ELEMENTS; j++) {
                use(logit_vector<IS_BF16>::key(words[i], j));
            }
        }
    }
}

/* Counts the warp's keys above the threshold, and those equal to it. */
template <bool IS_BF16>
__device__ __forceinline__ void
count_taken(const row_part &part, const candidates &found, const uint16_t *list, uint32_t key,
            uint32_t taken[2])
{
    uint32_t above = 0;
    uint32_t equal = 0;
    visit_candidates<IS_BF16>(part, found, list, [&](uint32_t candidate) {
        above += candidate > key;
        equal += candidate == key;
    });
    taken[0] = __reduce_add_sync(ALL_LANES, above);
    taken[1] = __reduce_add_sync(ALL_LANES, equal);
}

/* ---- Threshold ----------------------------------------------------------------------------- */

/* Finds the threshold. Once the row takes all keys that begin with `prefix`, the threshold is the
 * number below the smallest of them. */
template <bool IS_BF16, int CTAS>
__device__ __forceinline__ key_threshold
find_threshold(const row_part &part, uint32_t k, select_memory *shared, candidates *found)
{
    uint16_t *const list = shared->lists[threadIdx.x / SMLA_WARP_LANES];
    *found = {false, part.num_steps * (SMLA_WARP_LANES * logit_vector<IS_BF16>::ELEMENTS)};
    load_row<IS_BF16>(part, shared->counts[0]);
    find_digit<CTAS>(shared, 0, k);
    uint32_t prefix = shared->digit;
    uint32_t num_left = shared->num_left;
    if (shared->digit_count == num_left) {
        return {(prefix << 21) - 1, 0};
    }
    *found = count_and_list<IS_BF16>(part, prefix, shared->counts[1], list);
    find_digit<CTAS>(shared, 1, num_left);
    prefix = prefix << 11 | shared->digit;
    num_left = shared->num_left;
    if (shared->digit_count == num_left) {
        return {(prefix << 10) - 1, 0};
    }
    if constexpr (IS_BF16) {
        return {prefix << 10, num_left};
    }
    visit_candidates<IS_BF16>(part, *found, list, [=](uint32_t key) {
        count_digit<2>(key, prefix, shared->counts[0]);
    });
    find_digit<CTAS>(shared, 0, num_left);
    return {prefix << 10 | shared->digit, shared->num_left};
}

/* ---- Results ------------------------------------------------------------------------------- */

/* Adds up how many keys earlier warps take: keys above the threshold, and keys equal to it. */
template <int CTAS>
__device__ __forceinline__ void
sum_earlier_warps(const select_memory *shared, uint32_t warp, uint32_t before[2])
{
    uint32_t above = 0;
    uint32_t equal = 0;
#pragma unroll
    for (uint32_t first = 0; first < CTAS * NUM_WARPS; first += SMLA_WARP_LANES) {
        const uint32_t other = first + threadIdx.x % SMLA_WARP_LANES;
        if (other < warp) {
            uint32_t pair[2];
            load_pair_of<CTAS>(other / NUM_WARPS, shared->taken[other % NUM_WARPS], pair);
            above += pair[0];
            equal += pair[1];
        }
    }
    __syncwarp();
    before[0] = __reduce_add_sync(ALL_LANES, above);
    before[1] = __reduce_add_sync(ALL_LANES, equal);
}

/* Writes the columns that the warp takes, after those of earlier warps. `taken` counts the warp's
 * keys above the threshold and those equal to it; of the latter the row takes the first
 * num_equal. */
template <bool IS_BF16>
__device__ __forceinline__ void
write_taken(const row_part &part, const candidates &found, const uint16_t *list,
            const key_threshold &threshold, const uint32_t taken[2], const uint32_t before[2],
            const result_row &row)
{
    const uint32_t lanes_before = (1u << threadIdx.x % SMLA_WARP_LANES) - 1;
    const uint32_t start = part.first_vector * logit_vector<IS_BF16>::ELEMENTS - part.begin;
    const uint32_t all_above = before[0] + taken[0];
    const uint32_t all_equal = min(before[1] + taken[1], threshold.num_equal);
    uint32_t above = before[0];
    uint32_t equal = min(before[1], threshold.num_equal);
#pragma unroll 2
    for (uint32_t first = 0; above < all_above || equal < all_equal; first += SMLA_WARP_LANES) {
        uint32_t element;
        const uint32_t key =
            read_candidate<IS_BF16>(part, found, list, first + threadIdx.x % SMLA_WARP_LANES,
                                    &element);
        const uint32_t above_votes = __ballot_sync(ALL_LANES, key > threshold.key);
        const uint32_t equal_votes = __ballot_sync(ALL_LANES, key == threshold.key);
        const uint32_t above_index = above + __popc(above_votes & lanes_before);
        const uint32_t equal_index =
            min(equal + __popc(equal_votes & lanes_before), threshold.num_equal);
        if (key > threshold.key || (key == threshold.key && equal_index < threshold.num_equal)) {
            write_column<IS_BF16>(row, above_index + equal_index, start + element);
        }
        above += __popc(above_votes);
        equal = min(equal + __popc(equal_votes), threshold.num_equal);
    }
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Selects the row of a token with more than k columns. */
template <bool IS_BF16, int CTAS>
__device__ __forceinline__ void
select_columns(const top_k_args &args, const result_row &row, uint32_t count, select_memory *shared)
{
    const uint32_t cta_warp = threadIdx.x / SMLA_WARP_LANES;
    const uint32_t warp = cluster_rank<CTAS>() * NUM_WARPS + cta_warp;
    const row_part part = open_part<IS_BF16>(row.logits, count, warp, CTAS * NUM_WARPS,
                                             args.memory_steps, ptx_shared_address(shared->keys));
    candidates found;
    uint32_t taken[2];
    uint32_t before[2];
    clear_counts(shared->counts[0]);
    __syncthreads(); /* the counts are clear */
    const key_threshold threshold =
        find_threshold<IS_BF16, CTAS>(part, (uint32_t)args.p.k, shared, &found);
    const uint16_t *const list = shared->lists[cta_warp];
    count_taken<IS_BF16>(part, found, list, threshold.key, taken);
    if (threadIdx.x % SMLA_WARP_LANES == 0) {
        shared->taken[cta_warp][0] = taken[0];
        shared->taken[cta_warp][1] = taken[1];
    }
    sync_ctas<CTAS>(); /* the warps' counts are complete */
    sum_earlier_warps<CTAS>(shared, warp, before);
    if constexpr (CTAS > 1) {
        __syncwarp();
        ptx_cluster_arrive_release();
    }
    write_taken<IS_BF16>(part, found, list, threshold, taken, before, row);
    if constexpr (CTAS > 1) {
        __syncwarp();
        ptx_cluster_wait(); /* no CTA reads this one's counts any more */
    }
}

template <bool IS_BF16, int CTAS>
__device__ __forceinline__ void
select_row(const top_k_args &args, int64_t token, select_memory *shared, int *slot_half)
{
    const smla_top_k_params &p = args.p;
    const token_columns columns = load_columns(p, token);
    const result_row row = open_result<IS_BF16>(p, token, columns);
    if (columns.count <= p.k) {
        write_all<IS_BF16, CTAS, BLOCK_THREADS>(row, columns.count, (uint32_t)p.k);
    } else {
        select_columns<IS_BF16, CTAS>(args, row, columns.count, shared);
    }
    if (p.slots.out != nullptr) {
        sync_ctas<CTAS>(); /* the row of out is written */
        if (cluster_rank<CTAS>() == 0) {
            write_slot_row<BLOCK_THREADS>(p.slots, args.pages, token, shared->slot_counts,
                                          slot_half);
        }
    }
}

/* The body of the kernels: each CTA of the cluster handles its part of every row. */
template <bool IS_BF16, int CTAS>
__device__ __forceinline__ void
select_rows(const top_k_args &args)
{
    extern __shared__ __align__(128) uint8_t memory[];
    select_memory *const shared = (select_memory *)memory;
    const int64_t num_clusters = gridDim.x / CTAS;
    int slot_half = 0;
    ptx_wait_for_grids();
    for (int64_t token = blockIdx.x / CTAS; token < args.p.num_tokens; token += num_clusters) {
        select_row<IS_BF16, CTAS>(args, token, shared, &slot_half);
        if (token + num_clusters < args.p.num_tokens) {
            sync_ctas<CTAS>(); /* the row is done, and the next one may use its memory */
        }
    }
}

} // namespace
