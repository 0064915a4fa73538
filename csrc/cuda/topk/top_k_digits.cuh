/* top_k_digits.cuh: one digit of the k-th largest key, from the counts of all CTAs of a cluster.
 *
 * A key has three digits, of 11, 11 and 10 bits. Every CTA counts in its own shared memory. After a
 * barrier the other CTAs read these counts: first the sums of groups of values, then the counts of
 * one group.
 */
#pragma once

#include "cuda/topk/top_k_keys.cuh"

namespace {

enum {
    NUM_VALUES = 2048, /* values that a digit may have */
    GROUP_VALUES = 32, /* digit values whose counts are shared as one sum first */
    NUM_GROUPS = NUM_VALUES / GROUP_VALUES,
    LIST_ENTRIES = 256, /* most candidates of a warp's list */
    LIST_ELEMENTS = 1 << 16,
};

struct select_memory {
    uint32_t counts[2][NUM_VALUES]; /* this CTA's counts: of digits 0 and 2, and of digit 1 */
    uint32_t group_counts[2][NUM_GROUPS];
    uint32_t taken[NUM_WARPS][2]; /* each warp's keys above the threshold, and those equal to it */
    uint32_t digit;
    uint32_t num_left;    /* how many keys are taken that begin with the digits found */
    uint32_t digit_count; /* how many keys begin with the digits found */
    int32_t slot_counts[2][SLOT_COUNTS];
    uint16_t lists[NUM_WARPS][LIST_ENTRIES]; /* each warp's candidates, as elements in order */
    __align__(VECTOR_BYTES) uint8_t keys[];
};

/* ---- The cluster --------------------------------------------------------------------------- */

/* Loads two words of CTA `rank`, from the address that `from` has in this CTA. */
template <int CTAS>
__device__ __forceinline__ void
load_pair_of(uint32_t rank, const uint32_t *from, uint32_t pair[2])
{
    const uint32_t address = ptx_shared_address(from);
    if constexpr (CTAS == 1) {
        ptx_load_shared_8(address, pair);
    } else {
        ptx_load_cluster_8(ptx_cluster_address(address, rank), pair);
    }
}

template <int CTAS>
__device__ __forceinline__ uint32_t
load_word_of(uint32_t rank, const uint32_t *from)
{
    const uint32_t address = ptx_shared_address(from);
    if constexpr (CTAS == 1) {
        return ptx_load_shared_4(address);
    } else {
        return ptx_load_cluster_4(ptx_cluster_address(address, rank));
    }
}

/* ---- A digit ------------------------------------------------------------------------------- */

template <int DIGIT>
__device__ __forceinline__ uint32_t
digit_of(uint32_t key)
{
    return DIGIT == 0 ? key >> 21 : DIGIT == 1 ? key >> 10 & 2047 : key & 1023;
}

/* The digits before digit DIGIT, as one number. */
template <int DIGIT>
__device__ __forceinline__ uint32_t
prefix_of(uint32_t key)
{
    return key >> (DIGIT == 1 ? 21 : 10);
}

/* Counts a later digit of keys that begin with `prefix`. Elements without a logit have the smallest
 * key and may be counted with prefix 0; this changes no digit that is found. */
template <int DIGIT>
__device__ __forceinline__ void
count_digit(uint32_t key, uint32_t prefix, uint32_t *counts)
{
    if (prefix_of<DIGIT>(key) == prefix) {
        atomicAdd(&counts[digit_of<DIGIT>(key)], 1u);
    }
}

/* Clears one half of the counts. */
__device__ __forceinline__ void
clear_counts(uint32_t *counts)
{
    static_assert(NUM_VALUES == 4 * BLOCK_THREADS, "a vector per thread");
    *(uint4 *)(counts + 4 * threadIdx.x) = make_uint4(0, 0, 0, 0);
}

/* Adds the counts of each group, for the other CTAs. Eight threads share a group. */
__device__ __forceinline__ void
sum_groups(const uint32_t *counts, uint32_t *group_counts)
{
    const uint4 four = *(const uint4 *)(counts + 4 * threadIdx.x);
    uint32_t sum = four.x + four.y + four.z + four.w;
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    sum += __shfl_xor_sync(ALL_LANES, sum, 4);
    if (threadIdx.x % 8 == 0) {
        group_counts[threadIdx.x / 8] = sum;
    }
}

/* Finds the value of a digit of the key that is number `num_left`, counting down from the largest.
 * A lane adds up two groups of values first. Then each lane has one value of the group found. One
 * warp calls this. */
template <int CTAS>
__device__ __forceinline__ void
search_digit(select_memory *shared, int half, uint32_t num_left)
{
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
    const uint32_t low_group = NUM_GROUPS - 2 - 2 * lane;
    uint32_t low = 0;
    uint32_t high = 0;
    uint32_t count = 0;
#pragma unroll
    for (int rank = 0; rank < CTAS; rank++) {
        uint32_t pair[2];
        load_pair_of<CTAS>(rank, &shared->group_counts[half][low_group], pair);
        low += pair[0];
        high += pair[1];
    }
    uint32_t sum = scan_lanes(low + high);
    uint32_t before = sum - low - high;
    uint32_t owner = __ballot_sync(ALL_LANES, before < num_left && num_left <= sum);
    const bool is_high = num_left <= before + high;
    const uint32_t group =
        __shfl_sync(ALL_LANES, is_high ? low_group + 1 : low_group, __ffs(owner) - 1);
    const uint32_t above =
        __shfl_sync(ALL_LANES, is_high ? before : before + high, __ffs(owner) - 1);
    const uint32_t value = group * GROUP_VALUES + (GROUP_VALUES - 1 - lane);
#pragma unroll
    for (int rank = 0; rank < CTAS; rank++) {
        count += load_word_of<CTAS>(rank, &shared->counts[half][value]);
    }
    sum = above + scan_lanes(count);
    before = sum - count;
    if (before < num_left && num_left <= sum) {
        shared->digit = value;
        shared->num_left = num_left - before;
        shared->digit_count = count;
    }
}

/* Finds a digit from the counts of all CTAs, and clears the other half of the counts, which no CTA
 * reads any more, for the next digit. All threads call this when they have counted. */
template <int CTAS>
__device__ __forceinline__ void
find_digit(select_memory *shared, int half, uint32_t num_left)
{
    __syncthreads(); /* the counts are complete */
    sum_groups(shared->counts[half], shared->group_counts[half]);
    sync_ctas<CTAS>(); /* the group counts are complete, too */
    clear_counts(shared->counts[half ^ 1]);
    if (threadIdx.x < SMLA_WARP_LANES) {
        search_digit<CTAS>(shared, half, num_left);
    }
    __syncthreads(); /* the digit is found */
}

} // namespace
