/* paged_weights.cuh: a block's scores become weights 2^(logit - reference), as in mha_weights.cuh.
 *
 * A row's first reference is the largest logit of its first block with one. It moves only if a later
 * logit is far above it, so that its weight would exceed 2^MOST_EXPONENT. What a row does depends on
 * its own logits, though all rows of a warp branch alike; and a block that it does not see changes
 * none of its bits. */
#pragma once

#include "cuda/attention/sm90/mha/block_weights.cuh"
#include "cuda/attention/sm90/paged/paged_products.cuh"

/* ---- Capped logits -------------------------------------------------------------------------- */

/* cap * tanh(logit / cap), to 2^-21 of itself; cap_exponent is 2 log2(e) / cap. A small quotient
 * takes a series, because the other form would lose its bits. */
__device__ __forceinline__ float
cap_logit(float logit, float cap, float cap_exponent)
{
    const float x = logit * (cap_exponent * 0.34657359f);
    const float power = ptx_exp2(fabsf(logit) * cap_exponent);
    const float large = copysignf(fmaf(-2.0f, smla_rcp(power + 1.0f), 1.0f), logit) * cap;
    const float square = x * x;
    float series = fmaf(square, 0.02186949f, -0.05396825f);
    series = fmaf(series, square, 0.13333333f);
    series = fmaf(series, square, -0.33333333f);
    const float small = fmaf(series * square, logit, logit);
    return square < 0.0625f ? small : large;
}

/* Turns scores into logits, perhaps capped, where masks need that. */
template <int D>
__device__ __forceinline__ void
cap_scores(const paged_args &args, paged_consumer<D> *state)
{
#pragma unroll
    for (int i = 0; i < paged_consumer<D>::KEYS / 2; i++) {
        const float logit = state->scores[i] * args.early_scale;
        state->scores[i] =
            args.cap_log2 == 0.0f ? logit : cap_logit(logit, args.cap_log2, args.cap_exponent);
    }
}

/* ---- Masks ---------------------------------------------------------------------------------- */

/* The rows' limits, and what all rows of the warp see. */
struct paged_view {
    const paged_limits *limits; /* those of the warp's rows */
    paged_limits shared;
};

/* Limits grow from row to row. A warp without rows sees all. */
template <int D>
__device__ __forceinline__ paged_view
find_view(const paged_memory<D> *shared, uint32_t number, const paged_item &item, int first_row)
{
    const paged_limits *const limits = &shared->limits[number % ITEM_SLOTS][first_row];
    const int last = min(item.num_rows - first_row, (int)WARP_ROWS) - 1;
    return paged_view{limits, {last < 0 ? 0 : limits[max(last, 0)].begin, limits[0].end}};
}

/* Hides the keys that a row does not see of the block that begins at key first_key. */
template <int D>
__device__ __forceinline__ void
hide_unseen(const paged_limits *limits, int32_t first_key, paged_consumer<D> *state)
{
    const int own_key = first_key + lane_again() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const paged_limits row = limits[lane_again() / 4 + 8 * i];
        const int before = row.begin - own_key - 1;
        const int end = row.end - own_key;
#pragma unroll
        for (int n = 0; n < paged_consumer<D>::KEYS / 8; n++) {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float *const score = &state->scores[4 * n + 2 * i + k];
                ptx_keep_below(8 * n + k, end, score);
                ptx_keep_below(before, 8 * n + k, score);
            }
        }
    }
}

/* The hidden keys of a block, as bits. */
template <int D> struct paged_hidden {
    uint32_t words[paged_shape<D>::HIDDEN_WORDS];
};

template <int D>
__device__ __forceinline__ paged_hidden<D>
load_hidden(const paged_memory<D> *shared, uint32_t count)
{
    const uint32_t from = ptx_shared_address(shared->hidden[count % paged_shape<D>::BUFFERS]);
    paged_hidden<D> hidden;
    if constexpr (paged_shape<D>::HIDDEN_WORDS == 4) {
        ptx_load_shared_16(from, hidden.words);
    } else {
        ptx_load_shared_8(from, hidden.words);
    }
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
    return any != 0;
}

template <int D>
__device__ __forceinline__ void
hide_keys(const paged_hidden<D> &hidden, paged_consumer<D> *state)
{
#pragma unroll
    for (int n = 0; n < paged_consumer<D>::KEYS / 8; n++) {
        const uint32_t own = hidden.words[n / 4] >> (n % 4 * 8 + lane_again() % 4 * 2);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int is_hidden = (int)(own >> k & 1);
            ptx_keep_below(is_hidden, 1, &state->scores[4 * n + k]);
            ptx_keep_below(is_hidden, 1, &state->scores[4 * n + 2 + k]);
        }
    }
}

/* ---- Weights -------------------------------------------------------------------------------- */

/* Gives rows without a reference the largest of their logits as one. */
template <int D>
__device__ __forceinline__ void
start_references(float scale, paged_consumer<D> *state)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float highest = smla_max_of_lanes<SMLA_QUAD_LANES>(max_of_lane(i, state->scores));
        if (state->reference[i] == -INFINITY) {
            state->reference[i] = __fmul_rn(highest, scale); /* not a part of an FMA */
        }
    }
}

/* Finds the lane's largest exponents, and says whether a row of the warp may have to move its
 * reference. */
template <int D, bool HALF>
__device__ __forceinline__ bool
may_move(const paged_consumer<D> &state, int (&top)[2])
{
    top[0] = top[1] = INT32_MIN;
    return __any_sync(ALL_LANES, find_tops<HALF>(state.scores, top));
}

/* Moves the reference of a row whose largest exponent is too high, to that logit. Exponents, sums
 * and out follow, for the row of every lane or for none. */
template <int D, bool HALF>
__device__ __forceinline__ void
move_reference(int i, int top, paged_consumer<D> *state)
{
    const float highest = smla_max_of_lanes<SMLA_QUAD_LANES>(__int_as_float(top));
    const bool moves = highest > MOST_EXPONENT<HALF>;
    if (!__any_sync(ALL_LANES, moves)) {
        return;
    }
    const float older = state->reference[i];
    const float newer = moves ? older + (highest - TOP_EXPONENT<HALF>) : older;
    const float rise = moves ? newer - older : 0.0f; /* as later blocks see it: rounded */
    state->reference[i] = newer;
    lower_row(i, rise, ptx_exp2(-rise), state->scores, state->sum, state->rest, state->out);
}

/* Whether a row of the warp has seen no logit so far. */
template <int D>
__device__ __forceinline__ bool
lacks_reference(const paged_consumer<D> &state)
{
    return __any_sync(ALL_LANES, fminf(state.reference[0], state.reference[1]) == -INFINITY);
}

/* Makes weights of a block's scores. FIRST: no product is under way. Else that of the block before
 * is, and at the end it is done. */
template <int D, bool HALF, bool FIRST>
__device__ __forceinline__ void
weigh_block(const paged_args &args, const paged_view &view, int32_t first_key,
            const paged_hidden<D> &hidden, paged_consumer<D> *state)
{
    if (__builtin_expect(args.is_early, false)) {
        cap_scores(args, state);
    }
    if (first_key < view.shared.begin || first_key > view.shared.end - paged_consumer<D>::KEYS) {
        hide_unseen(view.limits, first_key, state);
    }
    if (hides_any(hidden)) {
        hide_keys(hidden, state);
    }
    if (FIRST || __builtin_expect(lacks_reference(*state), false)) {
        start_references(args.scale, state);
    }
    find_exponents<HALF>(args.scale, state->reference, state->scores);
    int top[2];
    if (!FIRST && __builtin_expect(may_move<D, HALF>(*state, top), false)) {
        wgmma_wait<0>(); /* out is complete */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            move_reference<D, HALF>(i, top[i], state);
        }
    }
    find_weights(state->scores, state->sum, state->rest);
    if (!FIRST) {
        wgmma_wait<0>();
    }
}
