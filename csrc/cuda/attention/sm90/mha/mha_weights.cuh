/* mha_weights.cuh: a block's scores become weights 2^(logit - reference).
 *
 * A row's first reference is the largest logit of its first block. It moves only if a later logit
 * is far above it, so that its weight would exceed 2^MOST_EXPONENT. What a row does
 * depends on its own logits, though all rows of a warp branch alike. */
#pragma once

#include "cuda/attention/sm90/mha/block_weights.cuh"
#include "cuda/attention/sm90/mha/mha_products.cuh"

/* The pairs of a row's elements in `scores` (mha_consumer). */
enum { ROW_PAIRS = BLOCK_KEYS / 8 };

/* ---- Masks ---------------------------------------------------------------------------------- */

/* Hides the first `count` keys of a block from all rows. */
__device__ __forceinline__ void
hide_front(int count, float (&scores)[BLOCK_KEYS / 2])
{
    const int own_count = count - lane_again() % 4 * 2;
#pragma unroll
    for (int n = 0; n < ROW_PAIRS; n++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ptx_keep_below(own_count, 8 * n + k + 1, &scores[4 * n + 2 * i + k]);
            }
        }
    }
}

/* Hides what a causal mask hides of a tile's first block: row r of the tile sees keys 0 to r. The
 * diagonal crosses the half of the keys that has the group's number. */
template <int HALF_IDX>
__device__ __forceinline__ void
hide_future_of_group(int row, float (&scores)[BLOCK_KEYS / 2])
{
    const int end = row + 1 - lane_again() % 4 * 2; /* relative to the lane's first key */
#pragma unroll
    for (int n = 0; n < ROW_PAIRS; n++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int key = 8 * n + k % 2 - HALF_IDX * BLOCK_KEYS / 2 - k / 2 * 8;
            if (n / (ROW_PAIRS / 2) == HALF_IDX) {
                ptx_keep_below(key, end, &scores[4 * n + k]);
            } else if (n / (ROW_PAIRS / 2) > HALF_IDX) {
                ptx_hide(&scores[4 * n + k]);
            }
        }
    }
}

template <int D>
__device__ __forceinline__ void
hide_future(mha_consumer<D> *state)
{
    static_assert(GROUPS * GROUP_ROWS == BLOCK_KEYS, "the diagonal is that of a square");
    const int row = state->warp * WARP_ROWS + lane_again() / 4; /* in the group */
    if (state->group == 0) {
        hide_future_of_group<0>(row, state->scores);
    } else {
        hide_future_of_group<1>(row, state->scores);
    }
}

/* ---- Weights -------------------------------------------------------------------------------- */

/* Notes the lane's largest exponents, and says whether a row of the warp may have to move its
 * reference. */
template <int D, bool HALF>
__device__ __forceinline__ bool
may_move(mha_consumer<D> *state)
{
    const bool is_above = find_tops<HALF, 0, 2>(state->scores, state->top);
    const bool is_empty = state->reference[0] == -INFINITY || state->reference[1] == -INFINITY;
    return __any_sync(ALL_LANES, is_above || is_empty);
}

/* Moves the reference of a row whose largest exponent is too high, to that logit. Exponents, sums
 * and out follow, for the row of every lane or for none. */
template <int D, bool HALF>
__device__ __forceinline__ void
move_reference(int i, mha_consumer<D> *state)
{
    const float older = state->reference[i];
    const bool is_empty = older == -INFINITY;
    const float own = is_empty ? max_of_lane(i, state->scores) : __int_as_float(state->top[i]);
    const float highest = smla_max_of_lanes<SMLA_QUAD_LANES>(own);
    const bool moves = highest > (is_empty ? -INFINITY : MOST_EXPONENT<HALF>);
    if (!__any_sync(ALL_LANES, moves)) {
        return;
    }
    const float base = is_empty ? 0.0f : older;
    const float newer = moves ? base + (highest - TOP_EXPONENT<HALF>) : base;
    const float rise = newer - base; /* as later blocks see it: rounded, like the reference */
    const float factor = is_empty ? 1.0f : ptx_exp2(-rise);
    state->reference[i] = moves ? newer : older;
    state->top[i] = __float_as_int(own - rise);
    lower_row(i, rise, factor, state->scores, state->sum, state->rest, state->out);
}

/* The first block of a tile: masks, references and weights. */
template <int D, bool HALF>
__device__ __forceinline__ void
weigh_first(const mha_args &args, int absent_keys, mha_consumer<D> *state)
{
    if (args.is_causal) {
        hide_future(state);
    }
    if (__builtin_expect(absent_keys > 0, false)) {
        hide_front(absent_keys, state->scores);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float highest = max_of_lane(i, state->scores);
        state->reference[i] =
            __fmul_rn(smla_max_of_lanes<SMLA_QUAD_LANES>(highest), args.scale_log2);
        state->sum[i] = 0.0f;
        state->rest[i] = 0.0f;
        state->top[i] =
            __float_as_int(fmaf(highest, args.scale_log2, find_shift<HALF>(state->reference[i])));
    }
    find_exponents<HALF, 0, 2>(args.scale_log2, state->reference, state->scores);
    find_weights<0, 2>(state->scores, state->sum, state->rest);
    pack_weights<HALF>(state->scores, state->weights);
}

/* A later block, while the values of the block before are added to out. At the end they are. */
template <int D, bool HALF>
__device__ __forceinline__ void
weigh_next(const mha_args &args, int absent_keys, mha_consumer<D> *state)
{
    if (__builtin_expect(absent_keys > 0, false)) {
        hide_front(absent_keys, state->scores);
    }
    find_exponents<HALF, 0, 2>(args.scale_log2, state->reference, state->scores);
    if (__builtin_expect(may_move<D, HALF>(state), false)) {
        wgmma_wait<0>(); /* out is complete */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            move_reference<D, HALF>(i, state);
        }
    }
    find_weights<0, 2>(state->scores, state->sum, state->rest);
    wgmma_wait<0>();
}
