/* held_digits.cuh: one digit of the k-th largest key of a row, from the counts of all CTAs of a
 * cluster.
 *
 * A key has three digits, of 12, 12 and 8 bits. Every CTA counts in its own shared memory, and each
 * warp has the counts of a group of values. The warps send the sums of their groups to all CTAs.
 * Then the warp whose group has the digit, the same in each CTA, sends the group's counts. Barriers
 * of memory count the bytes that arrive, so the cluster needs no barrier of its own.
 */
#pragma once

#include "cuda/select/held_row.cuh"

namespace {

enum {
    NUM_VALUES = 4096, /* values that a digit may have */
    FIRST_SHIFT = 20,  /* the bits of a key behind its first digit */
    GROUP_VALUES = 128,
    NUM_GROUPS = NUM_VALUES / GROUP_VALUES,
    MOST_CTAS = 8,
    MOST_WARPS = 32,
    HELD_PARTS = 2, /* parts of a row that are held at most; the third is streamed */
    NUM_ROWS =
        4, /* the row, two that follow, and the one before, which slow warps may still read */
};

/* Vectors of the streamed part. */
typedef struct vector_range {
    uint32_t first;
    uint32_t end;
} vector_range;

struct held_memory {
    uint32_t counts[2][NUM_VALUES + 4]; /* this CTA's counts, and others; digits take turns */
    uint32_t group_counts[2][MOST_CTAS][NUM_GROUPS];
    uint32_t found_counts[MOST_CTAS][GROUP_VALUES]; /* the group that has the digit */
    /* What each warp of the cluster has of each part: keys that are surely taken, and in the upper
     * half keys that equal the threshold where not all of those are taken. */
    uint32_t taken[HELD_PARTS * MOST_CTAS * MOST_WARPS];
    /* What each warp takes of its share of the streamed part; then the keys that equal the
     * threshold, as above. */
    uint32_t streamed[2 * MOST_CTAS * MOST_WARPS];
    uint32_t first[MOST_CTAS * MOST_WARPS]; /* the first place of a range that each warp has */
    held_row rows[NUM_ROWS];
    uint32_t half;        /* the half of the counts whose turn it is */
    uint32_t least;       /* the least place of keys that begin with the digits found */
    uint32_t num_left;    /* how many keys are to be taken that begin with them */
    uint32_t digit_count; /* how many keys there are that begin with them */
    uint64_t row_barriers[MOST_WARPS]; /* the warp's logits have come */
    uint64_t group_barrier;
    uint64_t found_barrier;
    uint64_t taken_barrier;
    uint64_t first_barrier;
    uint32_t warp_steps[HELD_PARTS][MOST_WARPS]; /* vectors of each warp's runs */
    vector_range shares[MOST_WARPS];             /* vectors that each warp streams */
    int32_t slot_counts[2][SLOT_COUNTS];
    __align__(128) uint8_t logits[];
};

/* ---- The cluster --------------------------------------------------------------------------- */

/* The address of this CTA's variable in CTA `rank`. */
__device__ __forceinline__ uint32_t
address_in(uint32_t rank, const void *here)
{
    return ptx_cluster_address(ptx_shared_address(here), rank);
}

/* Waits until all CTAs have sent `bytes` together. All threads call this. */
__device__ __forceinline__ void
receive(const uint64_t *barrier, bool is_first, uint32_t bytes, uint32_t parity)
{
    const uint32_t address = ptx_shared_address(barrier);
    if (is_first) {
        ptx_mbarrier_arrive_expect(address, bytes);
    }
    ptx_mbarrier_wait(address, parity);
}

/* ---- Counts -------------------------------------------------------------------------------- */

/* The place of a key, if it has the same sign as others, is key * sign + offset. A key of the other
 * sign has a place on its side of them all, too, but in no order. */
typedef struct key_places {
    uint32_t sign;
    uint32_t offset;
} key_places;

/* For keys of the sign that the key in `place` has. */
__device__ __forceinline__ key_places
places_like(uint32_t place)
{
    const bool has_logits_below_0 = (int32_t)place < 0;
    return {has_logits_below_0 ? 1 : 0xFFFFFFFFu, has_logits_below_0 ? 0x80000000u : 0xFFFFFFFFu};
}

/* Counts the first 12 bits of all keys, which are no digits yet: load_counts puts them in order.
 * Elements without a logit may be counted as the last key, which moves no digit that is found. */
template <typename Keys>
__device__ __forceinline__ void
count_first_bits(const Keys &keys, const uint32_t *counts)
{
    const uint32_t address = ptx_shared_address(counts);
    keys.visit([=](uint32_t, uint32_t key) { ptx_count_shared(address + (key >> 20) * 4); });
}

/* Counts the digit in front of `shift` bits of keys that begin with the digits found. Keys before
 * and behind them count as a value that is none; or, if they are little behind, as one behind those
 * that these have. A condition would take longer: each count would become a branch. */
template <typename Keys>
__device__ __forceinline__ void
count_digits(const Keys &keys, uint32_t least, uint32_t shift, const uint32_t *counts)
{
    const uint32_t address = ptx_shared_address(counts);
    const key_places places = places_like(least);
    const uint32_t offset = places.offset - least;
    keys.visit([=](uint32_t, uint32_t key) {
        const uint32_t place = key * places.sign + offset;
        ptx_count_shared(address + min(place >> shift, (uint32_t)NUM_VALUES) * 4);
    });
}

template <int THREADS>
__device__ __forceinline__ void
clear_counts(uint32_t *counts)
{
#pragma unroll
    for (int first = 0; first < NUM_VALUES; first += 4 * THREADS) {
        *(uint4 *)(counts + first + 4 * threadIdx.x) = make_uint4(0, 0, 0, 0);
    }
}

/* This CTA's counts of four values of a group; lane 0 has the smallest values. Counts of first bits
 * are those of digits in this order: 4095, 4094 ... 2048, which are negative, 0, 1 ... 2047. */
__device__ __forceinline__ void
load_counts(const uint32_t *counts, uint32_t group, bool are_first_bits, uint32_t four[4])
{
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const uint32_t value = group * GROUP_VALUES + 4 * lane;
    const bool is_negative = are_first_bits && group < NUM_GROUPS / 2;
    const uint32_t from = is_negative      ? NUM_VALUES - 4 - value
                          : are_first_bits ? value - NUM_VALUES / 2
                                           : value;
    uint32_t words[4];
    ptx_load_shared_16(ptx_shared_address(counts + from), words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        four[i] = is_negative ? words[3 - i] : words[i];
    }
}

/* Sends the sum of a group's counts to all CTAs. */
template <int CTAS>
__device__ __forceinline__ void
send_group(held_memory *shared, uint32_t half, uint32_t group, bool are_first_bits)
{
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    uint32_t four[4];
    load_counts(shared->counts[half], group, are_first_bits, four);
    const uint32_t sum = __reduce_add_sync(ALL_LANES, four[0] + four[1] + four[2] + four[3]);
    if constexpr (CTAS == 1) {
        if (lane == 0) {
            shared->group_counts[half][0][group] = sum;
        }
    } else if (lane < CTAS) {
        ptx_send_4(address_in(lane, &shared->group_counts[half][ptx_cluster_rank()][group]), sum,
                   address_in(lane, &shared->group_barrier));
    }
}

/* The counts of four values of the group that has the digit, of all CTAs. */
template <int CTAS>
__device__ __forceinline__ void
sum_found_counts(held_memory *shared, uint32_t half, uint32_t group, bool are_first_bits,
                 uint32_t four[4])
{
    load_counts(shared->counts[half], group, are_first_bits, four);
    if constexpr (CTAS > 1) {
        const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
        const uint32_t rank = ptx_cluster_rank();
#pragma unroll 1
        for (uint32_t i = 1; i < CTAS; i++) {
            const uint32_t to = (rank + i) % CTAS;
            ptx_send_16(address_in(to, &shared->found_counts[rank][4 * lane]), four,
                        address_in(to, &shared->found_barrier));
        }
        receive(&shared->found_barrier, lane == 0, (CTAS - 1) * GROUP_VALUES * 4, half);
#pragma unroll 1
        for (uint32_t i = 1; i < CTAS; i++) {
            uint32_t others[4];
            ptx_load_shared_16(ptx_shared_address(
                                   &shared->found_counts[(rank + i) % CTAS][4 * lane]),
                               others);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                four[j] += others[j];
            }
        }
    }
}

/* For one warp: finds the value of a digit in its group. `before` keys are in groups before it. */
template <int CTAS>
__device__ __forceinline__ void
find_value(held_memory *shared, uint32_t half, uint32_t group, uint32_t shift, uint32_t before,
           uint32_t num_left)
{
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const bool is_first = shift == FIRST_SHIFT;
    uint32_t four[4];
    sum_found_counts<CTAS>(shared, half, group, is_first, four);
    const uint32_t in_lane = four[0] + four[1] + four[2] + four[3];
    uint32_t sum = before + scan_lanes(in_lane) - in_lane; /* keys before the lane's values */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (sum < num_left && num_left <= sum + four[i]) {
            const uint32_t digit = group * GROUP_VALUES + 4 * lane + i;
            shared->least = (is_first ? 0 : shared->least) + (digit << shift);
            shared->num_left = num_left - sum;
            shared->digit_count = four[i];
        }
        sum += four[i];
    }
}

/* Finds the digit in front of `shift` bits of key number `num_left`, counting from the largest
 * logit, when all threads of the cluster have counted. Then the other half of the counts is clear
 * for the next digit. */
template <int CTAS, int THREADS>
__device__ __forceinline__ void
find_digit(held_memory *shared, uint32_t shift, uint32_t num_left)
{
    constexpr uint32_t WARPS = THREADS / SMLA_WARP_LANES;
    const uint32_t half = shared->half;
    const uint32_t warp = ptx_thread() / SMLA_WARP_LANES;
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    __syncthreads(); /* the counts are complete */
#pragma unroll 1
    for (uint32_t group = warp; group < NUM_GROUPS; group += WARPS) {
        send_group<CTAS>(shared, half, group, shift == FIRST_SHIFT);
    }
    clear_counts<THREADS>(shared->counts[half ^ 1]);
    if constexpr (CTAS == 1) {
        __syncthreads(); /* the groups' sums are there */
    } else {
        receive(&shared->group_barrier, ptx_thread() == 0, CTAS * NUM_GROUPS * 4, half);
    }
    uint32_t in_group = 0;
#pragma unroll
    for (int rank = 0; rank < CTAS; rank++) {
        in_group += shared->group_counts[half][rank][lane];
    }
#pragma unroll 1
    for (uint32_t group = warp; group < NUM_GROUPS; group += WARPS) {
        const uint32_t before = __reduce_add_sync(ALL_LANES, lane < group ? in_group : 0);
        const uint32_t all = __reduce_add_sync(ALL_LANES, lane <= group ? in_group : 0);
        if (before < num_left && num_left <= all) {
            find_value<CTAS>(shared, half, group, shift, before, num_left);
        }
    }
    if (ptx_thread() == 0) {
        shared->half = half ^ 1;
    }
    __syncthreads(); /* the digit is found */
}

} // namespace
