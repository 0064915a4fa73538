/* held_choose.cuh: which columns of a row a cluster takes: digits of the k-th key, then masks and
 * counts of what each thread takes.
 */
#pragma once

#include "cuda/select/held_stream.cuh"

namespace {

/* ---- Parts --------------------------------------------------------------------------------- */

/* The parts of which a thread holds a run. */
template <int PARTS> constexpr int HELD = PARTS < HELD_PARTS ? PARTS : HELD_PARTS;

/* The keys of a thread: a run of each part, the second of which stays in shared memory, and what it
 * reads of the third. */
template <bool IS_BF16, int PARTS> struct thread_keys {
    held_keys<IS_BF16> held;
    parked_keys<IS_BF16> parked;
    streamed_keys<IS_BF16> streamed;

    template <typename Use> __device__ __forceinline__ void visit(const Use &use) const
    {
        held.visit(use);
        if constexpr (PARTS > 1) {
            parked.visit(use);
        }
        if constexpr (PARTS > HELD_PARTS) {
            streamed.visit(use);
        }
    }
};

/* Where a warp is, in one register: the row's number in held_memory, and the phases of barriers, a
 * bit each. */
enum { ROW_PHASE = NUM_ROWS, TAKEN_PHASE = 2 * NUM_ROWS, FIRST_PHASE = 4 * NUM_ROWS };

/* The row `ahead` of the one that the warp is at. */
__device__ __forceinline__ held_row *
find_row(held_memory *shared, uint32_t state, uint32_t ahead)
{
    return &shared->rows[(state + ahead) % NUM_ROWS];
}

__device__ __forceinline__ uint32_t
next_row(uint32_t state)
{
    return state / NUM_ROWS * NUM_ROWS + (state + 1) % NUM_ROWS;
}

/* The parity of a barrier's phase; the next call is about the next phase. */
__device__ __forceinline__ uint32_t
next_phase(uint32_t *state, uint32_t which)
{
    const uint32_t parity = (*state & which) != 0;
    *state ^= which;
    return parity;
}

/* The number of this thread among those of the cluster, which is that of its first run. */
template <int CTAS, int THREADS>
__device__ __forceinline__ uint32_t
cluster_thread(void)
{
    return cluster_rank<CTAS>() * THREADS + ptx_thread();
}

/* ---- Choice -------------------------------------------------------------------------------- */

/* What a thread takes of each part that is held, a bit per element of the run, and the elements in
 * the place next to the last one of those, of which some are taken. */
template <int PARTS> struct taken_masks {
    uint32_t taken[HELD<PARTS>];
    uint32_t equal[HELD<PARTS>];
    uint32_t place; /* the threshold's, for the streamed part */
};

/* The key in a place. */
__device__ __forceinline__ uint32_t
key_in(uint32_t place)
{
    return (int32_t)place < 0 ? place ^ 0x80000000u : ~place;
}

/* The keys in places before `place`, or through it: a bit per register, the first one highest. The
 * sign of a difference of floats says which key is less, which takes half the time of a comparison.
 * From the place of -inf on differences may be NaN. */
template <typename Keys>
__device__ __forceinline__ uint32_t
find_before(const Keys &keys, uint32_t place, uint32_t is_through)
{
    constexpr uint32_t PLACE_OF_MINUS_INF = 0xFF800000u;
    uint32_t mask = 0;
    if (place < PLACE_OF_MINUS_INF - 1) {
        const float end = __uint_as_float(key_in(place + is_through));
        keys.visit([&](uint32_t, uint32_t key) {
            const float difference = __fsub_rn(__uint_as_float(key), end);
            mask = __funnelshift_l(__float_as_uint(difference), mask, 1);
        });
    } else {
        const int32_t last = (int32_t)(key_in(place) - 1 + is_through);
        keys.visit(
            [&](uint32_t, uint32_t key) { mask = mask << 1 | ((int32_t)key <= last ? 1 : 0); });
    }
    return mask;
}

/* What a run has of keys before the threshold, and of those in its place. */
template <bool IS_BF16, typename Keys>
__device__ __forceinline__ void
compare_keys(const Keys &keys, held_memory *shared, uint32_t state, uint32_t run_idx,
             const key_threshold &threshold, uint32_t *taken, uint32_t *equal)
{
    uint32_t mask = 0;
    uint32_t end_mask = 0;
#pragma unroll 1
    for (uint32_t is_through = threshold.num_equal == 0 ? 0 : 1; is_through < 2; is_through--) {
        end_mask = mask;
        mask = find_before(keys, threshold.place, is_through);
    }
    /* A state that needs the mask, so that no load of the row comes before the comparison. */
    const uint32_t late_state = state + ((uint32_t)ptx_forget((int)mask) - mask);
    const held_row &row = *find_row(shared, late_state, 0);
    const held_run run = open_run<IS_BF16>(row, run_idx);
    *taken = to_columns(run, in_order(run, mask));
    *equal = to_columns(run, in_order(run, end_mask & ~mask)) & find_logits(row, run);
}

/* Compares all keys, and tells all CTAs what the warp takes. The row's fields are read behind each
 * comparison, because a comparison needs all registers. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
choose_keys(const thread_keys<IS_BF16, PARTS> &keys, const key_threshold &threshold,
            held_memory *shared, uint32_t *state, taken_masks<PARTS> *masks)
{
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    constexpr uint32_t WORDS = PARTS <= HELD_PARTS ? PARTS : HELD_PARTS + 2; /* per warp */
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const uint32_t thread = cluster_thread<CTAS, THREADS>();
    const uint32_t warp = thread / SMLA_WARP_LANES;
    uint32_t counts[HELD<PARTS>];
    if constexpr (PARTS > HELD_PARTS) {
        const key_counts streamed = keys.streamed.count(threshold);
        if (lane < 2 * CTAS) {
            ptx_send_4(address_in(lane % CTAS, &shared->streamed[lane / CTAS * WARPS + warp]),
                       lane < CTAS ? streamed.before : streamed.equal,
                       address_in(lane % CTAS, &shared->taken_barrier));
        }
        masks->place = threshold.place;
    }
    compare_keys<IS_BF16>(keys.held, shared, *state, cluster_thread<CTAS, THREADS>(), threshold,
                          &masks->taken[0], &masks->equal[0]);
    if constexpr (PARTS > 1) {
        compare_keys<IS_BF16>(keys.parked, shared, *state,
                              CTAS * THREADS + cluster_thread<CTAS, THREADS>(), threshold,
                              &masks->taken[1], &masks->equal[1]);
    }
#pragma unroll
    for (int part = 0; part < HELD<PARTS>; part++) {
        counts[part] = __reduce_add_sync(ALL_LANES, __popc(masks->taken[part]) |
                                                        __popc(masks->equal[part]) << 16);
    }
    if constexpr (CTAS == 1) {
        if (lane < PARTS) {
            shared->taken[lane * WARPS + warp] = lane == 0 ? counts[0] : counts[HELD<PARTS> - 1];
        }
        __syncthreads(); /* all counts are there */
    } else {
        const uint32_t part = lane / CTAS % HELD<PARTS>;
        if (lane < CTAS * HELD<PARTS>) {
            ptx_send_4(address_in(lane % CTAS, &shared->taken[part * WARPS + warp]),
                       part == 0 ? counts[0] : counts[HELD<PARTS> - 1],
                       address_in(lane % CTAS, &shared->taken_barrier));
        }
        receive(&shared->taken_barrier, ptx_thread() == 0, WORDS * WARPS * 4,
                next_phase(state, TAKEN_PHASE));
    }
}

/* What the first `count` warps take: keys before the threshold and keys in its place. Warps count
 * once per part; the streamed part's counts are apart. */
template <int WARPS, int PARTS>
__device__ __forceinline__ key_counts
sum_taken(const held_memory *shared, uint32_t count)
{
    constexpr uint32_t HELD_WARPS = WARPS * HELD<PARTS>;
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    key_counts sums = {};
#pragma unroll
    for (uint32_t first = 0; first < HELD_WARPS; first += SMLA_WARP_LANES) {
        const uint32_t other = first + lane < count ? shared->taken[first + lane] : 0;
        sums.before += other & 0xFFFFu;
        sums.equal += other >> 16;
    }
    if constexpr (PARTS > HELD_PARTS) {
#pragma unroll
        for (uint32_t first = 0; first < WARPS; first += SMLA_WARP_LANES) {
            if (HELD_WARPS + first + lane < count) {
                sums.before += shared->streamed[first + lane];
                sums.equal += shared->streamed[WARPS + first + lane];
            }
        }
    }
    return {__reduce_add_sync(ALL_LANES, sums.before), __reduce_add_sync(ALL_LANES, sums.equal)};
}

/* The first place from `least` on that a key of the row has, counted from there. */
template <int CTAS, int THREADS, typename Keys>
__device__ __forceinline__ uint32_t
find_first(const Keys &keys, uint32_t least, held_memory *shared, uint32_t *state)
{
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const uint32_t warp = cluster_thread<CTAS, THREADS>() / SMLA_WARP_LANES;
    const key_places places = places_like(least);
    const uint32_t offset = places.offset - least;
    uint32_t first = 0xFFFFFFFFu; /* places before `least` are behind all others */
    keys.visit([&](uint32_t, uint32_t key) { first = min(first, key * places.sign + offset); });
    first = __reduce_min_sync(ALL_LANES, first);
    if constexpr (CTAS == 1) {
        if (lane == 0) {
            shared->first[warp] = first;
        }
        __syncthreads(); /* all are there */
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

/* How many keys in the place behind the digits found are taken: 0 if those in front of it are all
 * that is left. */
__device__ __forceinline__ uint32_t
count_equal(const held_memory *shared)
{
    return shared->digit_count == shared->num_left ? 0 : shared->num_left;
}

/* How far the place of the only bf16 key among 256 places is from the least of these. */
__device__ __forceinline__ uint32_t
find_bf16(uint32_t least)
{
    const bool is_nan = least == 0xFFFFFF00u;
    return (int32_t)least < 0 && !is_nan ? 0 : 0xFF;
}

/* Finds digit after digit, until all keys that begin with the digits found are taken, or are one
 * and the same. Where many keys share the digits, as equal logits do, they are taken for equal
 * until their number says something else: that is soon known, and spares the other digits. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
choose_columns(const thread_keys<IS_BF16, PARTS> &keys, uint32_t k, held_memory *shared,
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
            uint32_t step = 1u << shift; /* the way from the least place to the threshold */
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
