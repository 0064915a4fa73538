/* resident_digits.cuh: one digit of the k-th largest key of a row, from the counts of all CTAs of a
 * cluster.
 *
 * A key has three digits, of 12, 12 and 8 bits. Every CTA counts the values of a digit in its own
 * shared memory, and each warp adds the counts of a group of values. The warps send the sums of
 * their groups to all CTAs. In each CTA, one warp owns the group that has the digit, and sends this
 * group's counts to the other CTAs. mbarriers count the bytes that arrive, so the cluster needs no
 * barrier of its own.
 */
#pragma once

#include "cuda/topk/resident_row.cuh"

namespace {

enum {
    NUM_VALUES = 4096, /* values that a digit may have */
    FIRST_SHIFT = 20,  /* bits of a key that follow its first digit */
    GROUP_VALUES = 128,
    NUM_GROUPS = NUM_VALUES / GROUP_VALUES,
    MOST_CTAS = 8,
    MOST_WARPS = 32,
    RESIDENT_PARTS = 2, /* resident parts of a row, at most; the third part is streamed */
    NUM_ROWS = 4, /* this row, two later ones, and the one before, which slow warps may read */
};

/* A range of vectors of the streamed part. */
typedef struct vector_range {
    uint32_t first;
    uint32_t end;
} vector_range;

struct resident_memory {
    /* This CTA's counts of each value and, behind them, of all other keys. Digits alternate between
     * the two halves. */
    uint32_t counts[2][NUM_VALUES + 4];
    uint32_t group_counts[2][MOST_CTAS][NUM_GROUPS];
    /* Counts of the group with the digit, sent by each CTA. */
    uint32_t found_counts[MOST_CTAS][GROUP_VALUES];
    /* Per part and warp of the cluster: in the lower half, the number of keys that are surely
     * taken. In the upper half, the number of keys that equal the threshold, where not all of those
     * are taken. */
    uint32_t taken[RESIDENT_PARTS * MOST_CTAS * MOST_WARPS];
    /* The same numbers for each warp's share of the streamed part, but in words of their own: first
     * the keys taken by all warps, then the keys that equal the threshold. */
    uint32_t streamed[2 * MOST_CTAS * MOST_WARPS];
    uint32_t first[MOST_CTAS * MOST_WARPS]; /* each warp's lowest order from `least` on */
    resident_row rows[NUM_ROWS];
    uint32_t half;        /* the half of the counts in use */
    uint32_t least;       /* the lowest order of keys that begin with the digits found */
    uint32_t num_left;    /* how many of these keys are taken */
    uint32_t digit_count; /* how many of these keys there are */
    uint64_t row_barriers[MOST_WARPS]; /* phase ends when the warp's logits have arrived */
    uint64_t group_barrier;
    uint64_t found_barrier;
    uint64_t taken_barrier;
    uint64_t first_barrier;
    uint32_t warp_steps[RESIDENT_PARTS][MOST_WARPS]; /* vectors per run of each warp */
    vector_range shares[MOST_WARPS];                 /* the share that each warp streams */
    int32_t slot_counts[2][SLOT_COUNTS];
    __align__(128) uint8_t logits[];
};

/* ---- The cluster --------------------------------------------------------------------------- */

/* The cluster address of the variable that lies at `here` in this CTA, but in CTA `rank`. */
__device__ __forceinline__ uint32_t
address_in(uint32_t rank, const void *here)
{
    return ptx_cluster_address(ptx_shared_address(here), rank);
}

/* Waits until `bytes` bytes have arrived from all CTAs together. All threads call this. */
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

/* How to compute the order of keys of one sign: key * sign + offset. A key of the other sign gets
 * an order on its own side of all these, but not the right one. */
typedef struct order_rule {
    uint32_t sign;
    uint32_t offset;
} order_rule;

/* The rule for keys that have the same sign as the key with this order. */
__device__ __forceinline__ order_rule
order_rule_of(uint32_t order)
{
    const bool has_logits_below_0 = (int32_t)order < 0;
    return {has_logits_below_0 ? 1 : 0xFFFFFFFFu, has_logits_below_0 ? 0x80000000u : 0xFFFFFFFFu};
}

/* Counts the first 12 bits of all keys. These bits are not digits yet, because load_counts puts
 * them in order. Elements without a logit may be counted as the last key, which changes no digit
 * that is found. */
template <typename Keys>
__device__ __forceinline__ void
count_first_bits(const Keys &keys, const uint32_t *counts)
{
    const uint32_t address = ptx_shared_address(counts);
    keys.visit([=](uint32_t, uint32_t key) { ptx_count_shared(address + (key >> 20) * 4); });
}

/* Counts the digit above the lowest `shift` bits, for keys that begin with the digits found. Other
 * keys are counted as well, where they do no harm: in the entry past the last value, or, just above
 * the range, in a value that no key of the range has. To leave them out would take longer, because
 * each count would become a branch. */
template <typename Keys>
__device__ __forceinline__ void
count_digits(const Keys &keys, uint32_t least, uint32_t shift, const uint32_t *counts)
{
    const uint32_t address = ptx_shared_address(counts);
    const order_rule rule = order_rule_of(least);
    const uint32_t offset = rule.offset - least;
    keys.visit([=](uint32_t, uint32_t key) {
        const uint32_t order = key * rule.sign + offset;
        ptx_count_shared(address + min(order >> shift, (uint32_t)NUM_VALUES) * 4);
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

/* Loads this CTA's counts of four values of a group; lane 0 has the smallest values. Counts of
 * first bits lie in the order of the bits; digits come in this order: 4095, 4094 ... 2048, which
 * are negative keys, then 0, 1 ... 2047. */
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

/* Sends the sum of this CTA's counts of a group to all CTAs. */
template <int CTAS>
__device__ __forceinline__ void
send_group(resident_memory *shared, uint32_t half, uint32_t group, bool are_first_bits)
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

/* Adds all CTAs' counts of four values of the group that has the digit. */
template <int CTAS>
__device__ __forceinline__ void
sum_found_counts(resident_memory *shared, uint32_t half, uint32_t group, bool are_first_bits,
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

/* Finds the value of a digit in this warp's group; `before` is the number of keys in earlier
 * groups. One warp calls this. */
template <int CTAS>
__device__ __forceinline__ void
find_value(resident_memory *shared, uint32_t half, uint32_t group, uint32_t shift, uint32_t before,
           uint32_t num_left)
{
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const bool is_first = shift == FIRST_SHIFT;
    uint32_t four[4];
    sum_found_counts<CTAS>(shared, half, group, is_first, four);
    const uint32_t in_lane = four[0] + four[1] + four[2] + four[3];
    /* Number of keys before the lane's values. */
    uint32_t sum = before + scan_lanes(in_lane) - in_lane;
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

/* Finds the digit in front of `shift` bits of the key that is number `num_left` from the largest
 * logit on. All threads of the cluster call this when they have counted. It also clears the other
 * half of the counts for the next digit. */
template <int CTAS, int THREADS>
__device__ __forceinline__ void
find_digit(resident_memory *shared, uint32_t shift, uint32_t num_left)
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
        __syncthreads(); /* the groups' sums are written */
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
