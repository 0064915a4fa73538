/* held_select.cuh: top_k_per_row of rows whose keys all fit in the registers of a cluster, or in
 * its registers and its shared memory.
 *
 * Computes     what top_k.cuh computes
 * Shapes       as there; N up to 32 keys per thread of the cluster and part of the row
 * Shared mem   held_memory, 40 KB: counts of digit values, twice, and what CTAs send each other;
 *              then the CTA's logits of one part of the row, up to 128 KB
 * Roles        A cluster of 1, 2, 4 or 8 CTAs takes one row after the other, a thread up to 32
 *              neighbouring columns of each part. One thread works out where rows are, two ahead.
 *                load     Each warp has its logits of the first part copied to a place of its own
 *                         in shared memory, and takes them as keys to registers. Then the next
 *                         copy begins, of the second part, which stays in shared memory; or, if
 *                         there is none, of the next row, which goes on under all that follows
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
 *              of the SM per warp and key. One row: latency of two digits and their barriers.
 * Numerics     Integers, exact; signs of differences of floats, exact, too. The result depends
 *              neither on the number of CTAs nor on the order of atomics, which only count. Starts
 *              and ends are clamped to 0...N.
 * Source       Radix selection is widely used (RAFT, TensorRT-LLM, SGLang). Ours: keys in registers
 *              under the copy of the next row, counts sent through the cluster, and columns in
 *              order by masks that are rotated, so that no sort follows.
 */
#pragma once

#include "cuda/select/held_digits.cuh"

namespace {

/* Taken are the keys in places before `place`, and the first `num_equal` of those in it. */
typedef struct key_threshold {
    uint32_t place;
    uint32_t num_equal;
} key_threshold;

/* ---- Parts --------------------------------------------------------------------------------- */

/* The keys of a thread: a run of each part, the second of which stays in shared memory. */
template <bool IS_BF16, int PARTS> struct thread_keys {
    held_keys<IS_BF16> held;
    parked_keys<IS_BF16> parked;

    template <typename Use> __device__ __forceinline__ void visit(const Use &use) const
    {
        held.visit(use);
        if constexpr (PARTS > 1) {
            parked.visit(use);
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

/* What a thread takes of each part, a bit per element of the run, and the elements in the place
 * next to the last one of those, of which some are taken. */
template <int PARTS> struct taken_masks {
    uint32_t taken[PARTS];
    uint32_t equal[PARTS];
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
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    const uint32_t thread = cluster_thread<CTAS, THREADS>();
    const uint32_t warp = thread / SMLA_WARP_LANES;
    uint32_t counts[PARTS];
    compare_keys<IS_BF16>(keys.held, shared, *state, cluster_thread<CTAS, THREADS>(), threshold,
                          &masks->taken[0], &masks->equal[0]);
    if constexpr (PARTS > 1) {
        compare_keys<IS_BF16>(keys.parked, shared, *state,
                              CTAS * THREADS + cluster_thread<CTAS, THREADS>(), threshold,
                              &masks->taken[1], &masks->equal[1]);
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        counts[part] = __reduce_add_sync(ALL_LANES, __popc(masks->taken[part]) |
                                                        __popc(masks->equal[part]) << 16);
    }
    if constexpr (CTAS == 1) {
        if (lane < PARTS) {
            shared->taken[lane * WARPS + warp] = lane == 0 ? counts[0] : counts[PARTS - 1];
        }
        __syncthreads(); /* all counts are there */
    } else {
        const uint32_t part = lane / CTAS % PARTS;
        if (lane < CTAS * PARTS) {
            ptx_send_4(address_in(lane % CTAS, &shared->taken[part * WARPS + warp]),
                       part == 0 ? counts[0] : counts[PARTS - 1],
                       address_in(lane % CTAS, &shared->taken_barrier));
        }
        receive(&shared->taken_barrier, ptx_thread() == 0, PARTS * WARPS * 4,
                next_phase(state, TAKEN_PHASE));
    }
}

/* What the first `count` warps take: `above` keys above the threshold and `equal` that equal it.
 * Warps count once per part. */
template <int WARPS>
__device__ __forceinline__ void
sum_taken(const held_memory *shared, uint32_t count, uint32_t *above, uint32_t *equal)
{
    const uint32_t lane = ptx_thread() % SMLA_WARP_LANES;
    uint32_t sums[2] = {};
#pragma unroll
    for (uint32_t first = 0; first < WARPS; first += SMLA_WARP_LANES) {
        const uint32_t other = first + lane < count ? shared->taken[first + lane] : 0;
        sums[0] += other & 0xFFFFu;
        sums[1] += other >> 16;
    }
    *above = __reduce_add_sync(ALL_LANES, sums[0]);
    *equal = __reduce_add_sync(ALL_LANES, sums[1]);
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
            const uint32_t least = shared->least;
            uint32_t step = 1u << shift; /* the way from `least` to the threshold */
            if (num_equal != 0) {
                step = is_done ? (IS_BF16 ? find_bf16(least) : 0)
                               : find_first<CTAS, THREADS>(keys, least, shared, state);
            }
            const key_threshold threshold = {least + step, num_equal};
            choose_keys<IS_BF16, CTAS, THREADS, PARTS>(keys, threshold, shared, state, masks);
            if (is_done) {
                return;
            }
            uint32_t above;
            uint32_t equal;
            sum_taken<WARPS * PARTS>(shared, WARPS * PARTS, &above, &equal);
            if (equal == shared->digit_count) {
                return;
            }
        }
        shift = is_first ? 8 : 0;
        count_digits(keys, shared->least, shift, shared->counts[shared->half]);
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

/* Writes the columns that the warp takes of all parts, behind those of the warps before it. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
write_taken(const held_row &row, const taken_masks<PARTS> &masks, const held_memory *shared)
{
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    const result_row result = row.result;
    const uint32_t num_equal = count_equal(shared);
#pragma unroll 1
    for (uint32_t part = 0; part < PARTS; part++) {
        const uint32_t run = part * CTAS * THREADS + cluster_thread<CTAS, THREADS>();
        uint32_t taken = masks.taken[0];
        uint32_t equal = masks.equal[0];
        if constexpr (PARTS > 1) {
            taken = part == 0 ? taken : masks.taken[1];
            equal = part == 0 ? equal : masks.equal[1];
        }
        uint32_t place;
        uint32_t equal_before;
        sum_taken<WARPS * PARTS>(shared, run / SMLA_WARP_LANES, &place, &equal_before);
        if (num_equal != 0) {
            const uint32_t count = __popc(equal);
            const uint32_t before = equal_before + scan_lanes(count) - count;
            place += min(equal_before, num_equal);
            taken |= lowest_bits(equal, num_equal - min(before, num_equal));
        }
        const uint32_t count = __popc(taken);
        write_columns<IS_BF16>(result, taken, place + scan_lanes(count) - count,
                               open_run<IS_BF16>(row, run).first - row.begin);
    }
}

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
        finish_copy<IS_BF16>(row, run, shared, PARTS > 1 ? 0 : next_phase(state, ROW_PHASE),
                             &keys.held);
        if constexpr (PARTS > 1) {
            start_copy<IS_BF16, CTAS, THREADS>(row, 1, shared);
            count_first_bits(keys.held, counts);
            keys.parked.warp_steps = shared->warp_steps[1];
            keys.parked.memory = ptx_shared_address(shared->logits);
            finish_copy<IS_BF16>(row, CTAS * THREADS + run, shared, 1, &keys.parked);
            count_first_bits(keys.parked, counts);
        } else {
            start_copy<IS_BF16, CTAS, THREADS>(*find_row(shared, *state, 1), 0, shared);
            count_first_bits(keys.held, counts);
        }
    }
    *state = ptx_forget(*state); /* the row's address is made anew, to spare registers */
    choose_columns<IS_BF16, CTAS, THREADS, PARTS>(keys, k, shared, state, &masks);
    if constexpr (PARTS > 1) {
        start_copy<IS_BF16, CTAS, THREADS>(*find_row(shared, *state, 1), 0, shared);
    }
    write_taken<IS_BF16, CTAS, THREADS, PARTS>(*find_row(shared, *state, 0), masks, shared);
}

/* What the kernels do, each CTA of the cluster for its part of every row. The last thread of the
 * CTA works out the rows, two ahead. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
select_held_rows(const top_k_args &args)
{
    constexpr int NUM_RUNS = CTAS * THREADS * PARTS;
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
