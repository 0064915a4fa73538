/* paged_weights.cuh: a block's scores become weights 2^(logit - reference), as in mha_weights.cuh.
 *
 * A row's first reference is the largest logit of its first block with one. It moves only if a
 * later logit is far above it, so that its weight would exceed 2^MOST_EXPONENT. What a row does
 * depends on its own logits, though all rows of a warp branch alike; and a block that it does not
 * see changes none of its bits. */
#pragma once

#include "cuda/attention/sm90/mha/block_weights.cuh"
#include "cuda/attention/sm90/paged/paged_products.cuh"

/* ---- Capped logits -------------------------------------------------------------------------- */

/* cap * tanh(logit / cap), to 2^-21 of itself, where `exponent` is 2 log2(e) logit / cap but for
 * its sign. A small one takes a series, because the other form would lose its bits. */
__device__ __forceinline__ float
cap_logit(float logit, float exponent, float cap)
{
    const float reciprocal = smla_rcp(ptx_exp2(fabsf(exponent)) + 1.0f);
    const float large = copysignf(fmaf(-2.0f * cap, reciprocal, cap), logit);
    const float square = exponent * exponent;
    float series = fmaf(square, 4.55200101e-06f, -9.35214345e-05f);
    series = fmaf(series, square, 0.00192362582f);
    series = fmaf(series, square, -0.0400377512f);
    const float small = fmaf(series * square, logit, logit);
    return square < 0.5f ? small : large;
}

/* Turns a row's scores into logits, perhaps capped, where masks need that. */
template <int ROW, int D>
__device__ __forceinline__ void
cap_scores(const paged_args &args, paged_consumer<D> *state)
{
#pragma unroll
    for (int i = 0; i < paged_consumer<D>::KEYS / 2; i++) {
        if (is_of_rows<ROW, ROW + 1>(i)) {
            const float score = state->scores[i];
            const float logit = score * args.early_scale;
            state->scores[i] = args.cap_log2 == 0.0f
                                   ? logit
                                   : cap_logit(logit, score * args.cap_exponent, args.cap_log2);
        }
    }
}

/* ---- Masks ---------------------------------------------------------------------------------- */

/* The warp's rows: their number, their limits, and what all of them see. */
struct paged_view {
    int32_t num_rows; /* 0 or less: there are none */
    const paged_limits *limits;
    paged_limits shared;
};

/* Limits grow from row to row. */
template <int D>
__device__ __forceinline__ paged_view
find_view(const paged_memory<D> *shared, uint32_t number, const paged_item &item, int first_row)
{
    const paged_limits *const limits =
        &shared->limits[shared->slots.first_limit(number) + first_row];
    const int32_t num_rows = item.num_rows - first_row;
    const int32_t last = max(min(num_rows, (int32_t)WARP_ROWS) - 1, 0);
    return paged_view{num_rows, limits, {limits[last].begin, limits[0].end}};
}

/* Hides the keys that a row does not see of the block that begins at key first_key. */
template <int ROW, int D>
__device__ __forceinline__ void
hide_unseen(const paged_limits *limits, int32_t first_key, paged_consumer<D> *state)
{
    const int own_key = first_key + lane_again() % 4 * 2;
    const paged_limits row = limits[lane_again() / 4 + 8 * ROW];
    const int before = row.begin - own_key - 1;
    const int end = row.end - own_key;
#pragma unroll
    for (int n = 0; n < paged_consumer<D>::KEYS / 8; n++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            float *const score = &state->scores[4 * n + 2 * ROW + k];
            ptx_keep_below(8 * n + k, end, score);
            ptx_keep_below(before, 8 * n + k, score);
        }
    }
}

/* The hidden keys of a block, as bits, in the lane that frees the buffer; zeros in others. So no
 * lane reads memory whose end of use another one announces: racecheck does not know that lanes
 * which have met are in order. */
template <int D> struct paged_hidden {
    uint32_t words[4];
};

template <int D>
__device__ __forceinline__ paged_hidden<D>
load_hidden(const paged_memory<D> *shared, uint32_t count, const paged_consumer<D> &state)
{
    paged_hidden<D> hidden;
    ptx_load_shared_16_if(ptx_shared_address(shared->hidden[count % paged_shape<D>::BUFFERS]),
                          state.frees, hidden.words);
    return hidden;
}

template <int D>
__device__ __forceinline__ bool
hides_any(const paged_hidden<D> &hidden)
{
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < paged_shape<D>::HIDDEN_WORDS; i++) {
        any |= hidden.words[i];
    }
    return __any_sync(ALL_LANES, any != 0);
}

template <int ROW, int D>
__device__ __forceinline__ void
hide_keys(const paged_hidden<D> &hidden, paged_consumer<D> *state)
{
#pragma unroll
    for (int n = 0; n < paged_consumer<D>::KEYS / 8; n++) {
        const uint32_t word = __shfl_sync(ALL_LANES, hidden.words[n / 4], 0);
        const uint32_t own = word >> (n % 4 * 8 + lane_again() % 4 * 2);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            ptx_keep_below((int)(own >> k & 1), 1, &state->scores[4 * n + 2 * ROW + k]);
        }
    }
}

/* ---- Weights -------------------------------------------------------------------------------- */

/* Gives a row without a reference the largest of its logits as one. */
template <int ROW, int D>
__device__ __forceinline__ void
start_reference(float scale, paged_consumer<D> *state)
{
    const float highest = smla_max_of_lanes<SMLA_QUAD_LANES>(max_of_lane(ROW, state->scores));
    if (state->reference[ROW] == -INFINITY) {
        state->reference[ROW] = __fmul_rn(highest, scale); /* not a part of an FMA */
    }
}

/* Moves the reference of a row whose largest exponent is too high, to that logit. Exponents, sums
 * and out follow, for the row of every lane. */
template <int ROW, bool HALF, int D>
__device__ __forceinline__ void
move_reference(int top, paged_consumer<D> *state)
{
    const float highest = smla_max_of_lanes<SMLA_QUAD_LANES>(__int_as_float(top));
    const bool moves = highest > MOST_EXPONENT<HALF>;
    const float older = state->reference[ROW];
    const float newer = moves ? older + (highest - TOP_EXPONENT<HALF>) : older;
    const float rise = moves ? newer - older : 0.0f; /* as later blocks see it: rounded */
    state->reference[ROW] = newer;
    lower_row(ROW, rise, ptx_exp2(-rise), state->scores, state->sum, state->rest, state->out);
}

/* Makes weights of a row's scores. FIRST: no products are under way. Else those with the values of
 * the block before are. */
template <int ROW, bool HALF, bool FIRST, int D>
__device__ __forceinline__ void
weigh_row(const paged_args &args, const paged_view &view, int32_t first_key,
          const paged_hidden<D> &hidden, paged_consumer<D> *state)
{
    if (__builtin_expect(args.is_early, false)) {
        cap_scores<ROW>(args, state);
    }
    if (first_key < view.shared.begin || first_key > view.shared.end - paged_consumer<D>::KEYS) {
        hide_unseen<ROW>(view.limits, first_key, state);
    }
    if (hides_any(hidden)) {
        hide_keys<ROW>(hidden, state);
    }
    if (FIRST || __any_sync(ALL_LANES, state->reference[ROW] == -INFINITY)) {
        start_reference<ROW>(args.scale, state);
    }
    find_exponents<HALF, ROW, ROW + 1>(args.scale, state->reference, state->scores);
    int top[2] = {INT32_MIN, INT32_MIN};
    if (!FIRST && __any_sync(ALL_LANES, find_tops<HALF, ROW, ROW + 1>(state->scores, top))) {
        wgmma_wait<0>(); /* out is complete */
        move_reference<ROW, HALF>(top[ROW], state);
    }
    find_weights<ROW, ROW + 1>(state->scores, state->sum, state->rest);
}

/* Makes weights of a block's scores. A warp of a decode has few rows or none, and takes no time for
 * others: what these have as weights, and so as out, is never read. At the end, no products are
 * under way. */
template <int D, bool HALF, bool FIRST>
__device__ __forceinline__ void
weigh_block(const paged_args &args, const paged_view &view, int32_t first_key,
            const paged_hidden<D> &hidden, paged_consumer<D> *state)
{
    if (view.num_rows > 0) {
        weigh_row<0, HALF, FIRST>(args, view, first_key, hidden, state);
    }
    if (view.num_rows > WARP_ROWS / 2) {
        weigh_row<1, HALF, FIRST>(args, view, first_key, hidden, state);
    }
    if (!FIRST) {
        wgmma_wait<0>();
    }
    pack_weights<HALF>(state->scores, state->weights);
}
