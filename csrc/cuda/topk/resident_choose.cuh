/* resident_choose.cuh: chooses the columns of a row that a cluster takes. It finds the digits of
 * the k-th key, then masks and counts of the keys that each thread takes. */
#pragma once

#include "cuda/topk/resident_stream.cuh"

namespace {

/* ---- Parts --------------------------------------------------------------------------------- */

/* The number of parts of which each thread holds a run: the resident parts. */
template <int PARTS> constexpr int RESIDENT = PARTS < RESIDENT_PARTS ? PARTS : RESIDENT_PARTS;

/* The keys of a thread: its run of the first part lies in registers, its run of the second in
 * shared memory. Keys of the third part are read again at each visit. */
template <bool IS_BF16, int PARTS> struct thread_keys {
    resident_keys<IS_BF16> resident;
    parked_keys<IS_BF16> parked;
    streamed_keys<IS_BF16> streamed;

    template <typename Use> __device__ __forceinline__ void visit(const Use &use) const
    {
        resident.visit(use);
        if constexpr (PARTS > 1) {
            parked.visit(use);
        }
        if constexpr (PARTS > RESIDENT_PARTS) {
            streamed.visit(use);
        }
    }
};

/* The state of a warp, in one register: the index of its row in resident_memory, then one phase bit
 * per barrier. */
enum { ROW_PHASE = NUM_ROWS, TAKEN_PHASE = 2 * NUM_ROWS, FIRST_PHASE = 4 * NUM_ROWS };

/* The row that comes `ahead` rows after the warp's present row. */
__device__ __forceinline__ resident_row *
find_row(resident_memory *shared, uint32_t state, uint32_t ahead)
{
    return &shared->rows[(state + ahead) % NUM_ROWS];
}

__device__ __forceinline__ uint32_t
next_row(uint32_t state)
{
    return state / NUM_ROWS * NUM_ROWS + (state + 1) % NUM_ROWS;
}

/* Returns the parity of a barrier's phase, and moves the state to the next phase. */
__device__ __forceinline__ uint32_t
next_phase(uint32_t *state, uint32_t which)
{
    const uint32_t parity = (*state & which) != 0;
    *state ^= which;
    return parity;
}

/* The index of this thread in the cluster, which is also the index of its first run. */
template <int CTAS, int THREADS>
__device__ __forceinline__ uint32_t
cluster_thread(void)
{
    return cluster_rank<CTAS>() * THREADS + ptx_thread();
}

/* ---- Choice -------------------------------------------------------------------------------- */

/* The keys that a thread takes of each resident part, as a mask with a bit per element of its run.
 * `taken` has the keys before the threshold. `equal` has the keys that equal it, of which the row
 * may take only some. */
template <int PARTS> struct taken_masks {
    uint32_t taken[RESIDENT<PARTS>];
    uint32_t equal[RESIDENT<PARTS>];
    uint32_t order; /* the threshold's order, which the streamed part needs */
};

/* The key that has this order; order_of is the inverse. */
__device__ __forceinline__ uint32_t
key_of_order(uint32_t order)
{
    return (int32_t)order < 0 ? order ^ 0x80000000u : ~order;
}

/* Finds the keys of lower order than `order`, or with is_through also those of this order. The mask
 * has a bit per register, the first one highest. The sign of a float difference says which key is
 * less, which takes half the time of an integer comparison. From the order of -inf on, differences
 * may be NaN, so integers are compared there. */
template <typename Keys>
__device__ __forceinline__ uint32_t
find_before(const Keys &keys, uint32_t order, uint32_t is_through)
{
    constexpr uint32_t ORDER_OF_MINUS_INF = 0xFF800000u;
    uint32_t mask = 0;
    if (order < ORDER_OF_MINUS_INF - 1) {
        const float end = __uint_as_float(key_of_order(order + is_through));
        keys.visit([&](uint32_t, uint32_t key) {
            const float difference = __fsub_rn(__uint_as_float(key), end);
            mask = __funnelshift_l(__float_as_uint(difference), mask, 1);
        });
    } else {
        const int32_t last = (int32_t)(key_of_order(order) - 1 + is_through);
        keys.visit(
            [&](uint32_t, uint32_t key) { mask = mask << 1 | ((int32_t)key <= last ? 1 : 0); });
    }
    return mask;
}

/* Finds the keys of a run that are before the threshold, and the keys that equal it. */
template <bool IS_BF16, typename Keys>
__device__ __forceinline__ void
compare_keys(const Keys &keys, resident_memory *shared, uint32_t state, uint32_t run_idx,
             const key_threshold &threshold, uint32_t *taken, uint32_t *equal)
{
    uint32_t mask = 0;
    uint32_t end_mask = 0;
#pragma unroll 1
    for (uint32_t is_through = threshold.num_equal == 0 ? 0 : 1; is_through < 2; is_through--) {
        end_mask = mask;
        mask = find_before(keys, threshold.order, is_through);
    }
    /* Make the row's index depend on the mask, so that the compiler loads no field of the row
     * before the comparison. */
    const uint32_t late_state = state + ((uint32_t)ptx_forget((int)mask) - mask);
    const resident_row &row = *find_row(shared, late_state, 0);
    const resident_run run = open_run<IS_BF16>(row, run_idx);
    *taken = to_columns(run, in_order(run, mask));
    *equal = to_columns(run, in_order(run, end_mask & ~mask)) & find_logits(row, run);
}

/* Compares all keys with the threshold, and tells all CTAs how many the warp takes. The row's
 * fields are read after each comparison, because a comparison needs all registers. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
choose_keys(const thread_keys<IS_BF16, PARTS> &keys, const key_threshold &threshold,
            resident_memory *shared, uint32_t *state, taken_masks<PARTS> *masks)
{
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    /* Words of counts per warp. */
    constexpr uint32_t WORDS = PARTS <= RESIDENT_PARTS ? PARTS : RESIDENT_PARTS + 2;
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const uint32_t thread = cluster_thread<CTAS, THREADS>();
    const uint32_t warp = thread / SMLA_WARP_LANES;
    uint32_t counts[RESIDENT<PARTS>];
    if constexpr (PARTS > RESIDENT_PARTS) {
        const key_counts streamed = keys.streamed.count(threshold);
        if (lane < 2 * CTAS) {
            ptx_send_4(address_in(lane % CTAS, &shared->streamed[lane / CTAS * WARPS + warp]),
                       lane < CTAS ? streamed.before : streamed.equal,
                       address_in(lane % CTAS, &shared->taken_barrier));
        }
        masks->order = threshold.order;
    }
    compare_keys<IS_BF16>(keys.resident, shared, *state, cluster_thread<CTAS, THREADS>(), threshold,
                          &masks->taken[0], &masks->equal[0]);
    if constexpr (PARTS > 1) {
        compare_keys<IS_BF16>(keys.parked, shared, *state,
                              CTAS * THREADS + cluster_thread<CTAS, THREADS>(), threshold,
                              &masks->taken[1], &masks->equal[1]);
    }
#pragma unroll
    for (int part = 0; part < RESIDENT<PARTS>; part++) {
        counts[part] = __reduce_add_sync(ALL_LANES, __popc(masks->taken[part]) |
                                                        __popc(masks->equal[part]) << 16);
    }
    if constexpr (CTAS == 1) {
        if (lane < PARTS) {
            shared->taken[lane * WARPS + warp] =
                lane == 0 ? counts[0] : counts[RESIDENT<PARTS> - 1];
        }
        __syncthreads(); /* the counts of all warps are written */
    } else {
        const uint32_t part = lane / CTAS % RESIDENT<PARTS>;
        if (lane < CTAS * RESIDENT<PARTS>) {
            ptx_send_4(address_in(lane % CTAS, &shared->taken[part * WARPS + warp]),
                       part == 0 ? counts[0] : counts[RESIDENT<PARTS> - 1],
                       address_in(lane % CTAS, &shared->taken_barrier));
        }
        receive(&shared->taken_barrier, ptx_thread() == 0, WORDS * WARPS * 4,
                next_phase(state, TAKEN_PHASE));
    }
}

/* How many keys the first `count` warps take: those before the threshold, and those equal to it. A
 * warp counts once per resident part. The counts of the streamed part lie in an array of their
 * own. */
template <int WARPS, int PARTS>
__device__ __forceinline__ key_counts
sum_taken(const resident_memory *shared, uint32_t count)
{
    constexpr uint32_t RESIDENT_WARPS = WARPS * RESIDENT<PARTS>;
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    key_counts sums = {};
#pragma unroll
    for (uint32_t first = 0; first < RESIDENT_WARPS; first += SMLA_WARP_LANES) {
        const uint32_t other = first + lane < count ? shared->taken[first + lane] : 0;
        sums.before += other & 0xFFFFu;
        sums.equal += other >> 16;
    }
    if constexpr (PARTS > RESIDENT_PARTS) {
#pragma unroll
        for (uint32_t first = 0; first < WARPS; first += SMLA_WARP_LANES) {
            if (RESIDENT_WARPS + first + lane < count) {
                sums.before += shared->streamed[first + lane];
                sums.equal += shared->streamed[WARPS + first + lane];
            }
        }
    }
    return {__reduce_add_sync(ALL_LANES, sums.before), __reduce_add_sync(ALL_LANES, sums.equal)};
}

/* The lowest order, from `least` on, that a key of the row has, as a distance from `least`. */
template <int CTAS, int THREADS, typename Keys>
__device__ __forceinline__ uint32_t
find_first(const Keys &keys, uint32_t least, resident_memory *shared, uint32_t *state)
{
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const uint32_t warp = cluster_thread<CTAS, THREADS>() / SMLA_WARP_LANES;
    const order_rule rule = order_rule_of(least);
    const uint32_t offset = rule.offset - least;
    uint32_t first = 0xFFFFFFFFu; /* orders below `least` wrap round and become the highest */
    keys.visit([&](uint32_t, uint32_t key) { first = min(first, key * rule.sign + offset); });
    first = __reduce_min_sync(ALL_LANES, first);
    if constexpr (CTAS == 1) {
        if (lane == 0) {
            shared->first[warp] = first;
        }
        __syncthreads(); /* the first orders of all warps are written */
    } else {
        if (lane < CTAS) {
            ptx_send_4(address_in(lane, &shared->first[warp]), first,
                       address_in(lane, &shared->first_barrier));
        }
        receive(&shared->first_barrier, ptx_thread() == 0, WARPS * 4,
                next_phase(state, FIRST_PHASE));
    }
#pragma unroll
    for (uint32_t other = 0; other < WARPS; other += SMLA_WARP_LANES) {
        first = min(first, other + lane < WARPS ? shared->first[other + lane] : 0xFFFFFFFFu);
    }
    return __reduce_min_sync(ALL_LANES, first);
}

/* How many of the keys that begin with the digits found the row takes, or 0 if it takes all of
 * them. */
__device__ __forceinline__ uint32_t
count_equal(const resident_memory *shared)
{
    return shared->digit_count == shared->num_left ? 0 : shared->num_left;
}

/* The distance from `least` to the order of the only bf16 key among 256 orders. */
__device__ __forceinline__ uint32_t
find_bf16(uint32_t least)
{
    const bool is_nan = least == 0xFFFFFF00u;
    return (int32_t)least < 0 && !is_nan ? 0 : 0xFF;
}

/* Finds digit after digit, until the row takes all keys that begin with the digits found, or all of
 * these keys are equal. Where many keys share the digits, they are first assumed to be equal, as
 * equal logits are. Their number soon shows whether that is true, and then spares the other
 * digits. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
choose_columns(const thread_keys<IS_BF16, PARTS> &keys, uint32_t k, resident_memory *shared,
               uint32_t *state, taken_masks<PARTS> *masks)
{
    enum { CROWD = 8, FEW = 4 };
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    uint32_t shift = FIRST_SHIFT;
    for (;;) {
        const bool is_first = shift == FIRST_SHIFT;
        find_digit<CTAS, THREADS>(shared, shift, is_first ? k : shared->num_left);
        const uint32_t num_equal = count_equal(shared);
        const bool is_done = num_equal == 0 || shift == (IS_BF16 ? 8 : 0);
        const uint32_t crowd = is_first ? find_row(shared, *state, 0)->count / CROWD : FEW;
        if (is_done || shared->digit_count > crowd) {
            uint32_t step = 1u << shift; /* the distance from `least` to the threshold's order */
            if (num_equal != 0) {
                step = is_done ? (IS_BF16 ? find_bf16(shared->least) : 0)
                               : find_first<CTAS, THREADS>(keys, shared->least, shared, state);
            }
            const key_threshold threshold = {shared->least + step, count_equal(shared)};
            choose_keys<IS_BF16, CTAS, THREADS, PARTS>(keys, threshold, shared, state, masks);
            if (is_done) {
                return;
            }
            if (sum_taken<WARPS, PARTS>(shared, WARPS * PARTS).equal == shared->digit_count) {
                return;
            }
        }
        shift = is_first ? 8 : 0;
        count_digits(keys, shared->least, shift, shared->counts[shared->half]);
    }
}

} // namespace
