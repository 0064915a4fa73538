/* merge_weights.cuh: the arguments of merge.cu's kernels, and the weights of a row's parts. Only
 * merge.cu includes it.
 */
#pragma once

#include "core/attention/visible.h"
#include "cuda/attention/partials/part_rows.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    STATES = 2,    /* parts of a merge of states */
    FEW_PARTS = 4, /* partials of the same strides, which each thread weighs itself */
    MANY_PARTS = SMLA_MAX_PARTS,
    UNROLL = 2, /* vectors per part at a time */
};

/* What differs between merges of at most so many parts. */
template <int MOST_PARTS> struct merge_size;

template <> struct merge_size<STATES> {
    static constexpr int GROUP = 2; /* parts at a time */
    static constexpr int THREADS = 256;
    static constexpr int BLOCKS_PER_SM = 4; /* or more: 64 registers per thread at most */
};

template <> struct merge_size<FEW_PARTS> {
    static constexpr int GROUP = 4;
    static constexpr int THREADS = 128;
    static constexpr int BLOCKS_PER_SM = 8; /* 64 registers */
};

template <> struct merge_size<MANY_PARTS> {
    static constexpr int GROUP = 8;
    static constexpr int THREADS = 128;
    static constexpr int BLOCKS_PER_SM = 4; /* 128 registers */
};

/* TYPE, OUT_TYPE: smla_float_type. COUNT: elements per vector. */
template <int TYPE_, int OUT_TYPE_, int COUNT_, int MOST_PARTS_> struct merge_shape {
    static constexpr int TYPE = TYPE_;
    static constexpr int OUT_TYPE = OUT_TYPE_;
    static constexpr int COUNT = COUNT_;
    static constexpr int MOST_PARTS = MOST_PARTS_;
    static constexpr bool IS_STATES = MOST_PARTS == STATES;
    static constexpr int GROUP = merge_size<MOST_PARTS>::GROUP;
    static constexpr int WORDS = TYPE == SMLA_FLOAT_FP32 ? COUNT : (COUNT + 1) / 2;
    static constexpr int THREADS = merge_size<MOST_PARTS>::THREADS;
    static constexpr int BLOCKS_PER_SM = merge_size<MOST_PARTS>::BLOCKS_PER_SM;
};

template <int MOST_PARTS> struct merge_args {
    smla_merge_rows rows;
    int64_t merged_tokens; /* states: tokens behind these have no side a */
    smla_merge_part parts[MOST_PARTS];
    int32_t num_parts;
    int32_t row_threads; /* a power of two; a warp's, where the parts are partials */
    smla_divisor num_heads;
    const int32_t *num_tokens; /* partials: tokens behind so many stay as they are; NULL: none */
};

template <typename Shape> using args_of = merge_args<Shape::MOST_PARTS>;

/* The part that has the strides of part `part`: few partials have one address computation. */
template <int MOST_PARTS>
static __device__ __forceinline__ const smla_merge_part &
find_strides(const merge_args<MOST_PARTS> &args, int part)
{
    return args.parts[MOST_PARTS == FEW_PARTS ? 0 : part];
}

template <typename Shape>
static __device__ __forceinline__ int64_t
count_tokens(const args_of<Shape> &args)
{
    const int64_t most = args.rows.num_tokens;
    return Shape::IS_STATES || args.num_tokens == NULL
               ? most
               : smla_clamp_int64(__ldg(args.num_tokens), 0, most);
}

template <typename Shape>
static __device__ __forceinline__ int
count_row_threads(const args_of<Shape> &args)
{
    return Shape::IS_STATES ? args.row_threads : SMLA_WARP_LANES;
}

/* Whether there is no part `part`. */
template <typename Shape>
static __device__ __forceinline__ bool
is_past(const args_of<Shape> &args, int part)
{
    return !Shape::IS_STATES && part >= args.num_parts;
}

/* Where a thread works: a row, and its first value there. */
struct row_place {
    int64_t token;
    int64_t head;
    int64_t start;
};

/* ---- Weights ------------------------------------------------------------------------------- */

enum { NO_WEIGHT = -1 }; /* the weight of an empty part, whose row does not count */

/* What a thread knows of a row's parts: of many, parts `lane` and `lane` + 32, else all. */
template <int MOST_PARTS>
constexpr int known_parts = MOST_PARTS == MANY_PARTS ? MANY_PARTS / SMLA_WARP_LANES : MOST_PARTS;

template <int MOST_PARTS> struct row_lses {
    float of[known_parts<MOST_PARTS>]; /* -inf where there is no such part */
};

template <int MOST_PARTS> struct row_weights {
    float of[known_parts<MOST_PARTS>];
    float lse;    /* the merged one */
    bool is_copy; /* the only part that counts has weight 1 */
};

template <int MOST_PARTS>
static __device__ __forceinline__ float
load_lse(const merge_args<MOST_PARTS> &args, int part, int64_t token, int64_t head)
{
    const smla_merge_part &strides = find_strides(args, part);
    const int64_t at = token * strides.lse_stride_token + head * strides.lse_stride_head;
    return args.parts[part].lse[at];
}

/* The lse of an empty part is -inf. Some kernels write +inf for it. */
static __device__ __forceinline__ float
normal_lse(float lse)
{
    return isinf(lse) ? -INFINITY : lse;
}

/* e^(sink - lse), by which the sum of all weights grows. lse is top + rest. */
static __device__ __forceinline__ float
weigh_sink(const smla_merge_rows &rows, int64_t head, float top, float rest)
{
    if (rows.sinks.values == NULL || isinf(top)) {
        return 0.0f;
    }
    return expf(__ldg(rows.sinks.values + head * rows.sinks.stride) - top - rest);
}

/* Weighs a row's states. If both are empty, a counts, unless b is all. */
static __device__ __forceinline__ row_weights<STATES>
weigh_states(const merge_args<STATES> &args, int64_t token, int64_t head)
{
    const bool takes_b = token >= args.merged_tokens;
    const float a = takes_b ? -INFINITY : normal_lse(load_lse(args, 0, token, head));
    const float b = normal_lse(load_lse(args, 1, token, head));
    const bool is_b_alone = isinf(a) && (takes_b || !isinf(b));
    if (is_b_alone || isinf(b)) {
        const float lse = is_b_alone ? b : a;
        const float weight = 1.0f / (1.0f + weigh_sink(args.rows, head, lse, 0.0f));
        return {{is_b_alone ? (float)NO_WEIGHT : weight, is_b_alone ? weight : (float)NO_WEIGHT},
                lse,
                weight == 1.0f};
    }
    const float lower = expf(-fabsf(a - b)); /* weight of the smaller side if the larger has 1 */
    const float top = fmaxf(a, b);
    const float rest = log1pf(lower);
    const float weight = 1.0f / ((1.0f + lower) * (1.0f + weigh_sink(args.rows, head, top, rest)));
    const float lower_weight = lower * weight;
    return {{a >= b ? weight : lower_weight, a >= b ? lower_weight : weight}, top + rest, false};
}

/* What lane `part` % 32 has for a part, in all lanes. */
static __device__ __forceinline__ float
from_lane(const float of[2], int part)
{
    return __shfl_sync(ALL_LANES, part < SMLA_WARP_LANES ? of[0] : of[1], part % SMLA_WARP_LANES);
}

static __device__ __forceinline__ float
find_largest(float x)
{
#pragma unroll
    for (int step = SMLA_WARP_LANES / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    return x;
}

/* The number of the first part that has lse `top`; SMLA_MAX_PARTS if none has. */
static __device__ __forceinline__ int
find_first(const float lse[2], float top)
{
    const unsigned low = __ballot_sync(ALL_LANES, lse[0] == top);
    const unsigned high = __ballot_sync(ALL_LANES, lse[1] == top);
    return low != 0    ? __ffs(low) - 1
           : high != 0 ? SMLA_WARP_LANES + __ffs(high) - 1
                       : SMLA_MAX_PARTS;
}

/* Loads the lses of a row's partials that the thread knows, and does not wait for them. */
template <int MOST_PARTS>
static __device__ __forceinline__ row_lses<MOST_PARTS>
load_lses(const merge_args<MOST_PARTS> &args, int64_t token, int64_t head)
{
    constexpr bool BY_LANES = MOST_PARTS == MANY_PARTS;
    const int lane = threadIdx.x % SMLA_WARP_LANES;
    row_lses<MOST_PARTS> lses;
#pragma unroll
    for (int k = 0; k < known_parts<MOST_PARTS>; k++) {
        const int part = BY_LANES ? lane + k * SMLA_WARP_LANES : k;
        lses.of[k] = part < args.num_parts ? load_lse(args, part, token, head) : -INFINITY;
    }
    return lses;
}

/* The end of weighing partials: `power` has e^(lse - top), `lower` the sum of all but one that is
 * 1, and num_full parts count. If none does, the first one, which `has_first` threads know, has
 * weight 1. */
template <int MOST_PARTS>
static __device__ __forceinline__ row_weights<MOST_PARTS>
share_weights(const merge_args<MOST_PARTS> &args, int64_t head, const row_lses<MOST_PARTS> &lses,
              const row_lses<MOST_PARTS> &power, float top, float lower, int num_full,
              bool has_first)
{
    const float rest = log1pf(lower);
    const float sum = (1.0f + lower) * (1.0f + weigh_sink(args.rows, head, top, rest));
    const float highest = 1.0f / sum;
    row_weights<MOST_PARTS> weights;
    weights.lse = top + rest;
    weights.is_copy = num_full < 2 && highest == 1.0f;
#pragma unroll
    for (int k = 0; k < known_parts<MOST_PARTS>; k++) {
        weights.of[k] = isinf(lses.of[k]) ? (float)NO_WEIGHT : power.of[k] * highest;
    }
    weights.of[0] = num_full == 0 && has_first ? 1.0f : weights.of[0];
    return weights;
}

/* Weighs a row's partials, of which each thread knows all. */
static __device__ __forceinline__ row_weights<FEW_PARTS>
weigh_partials(const merge_args<FEW_PARTS> &args, int64_t head, const row_lses<FEW_PARTS> &lses)
{
    float top = lses.of[0];
#pragma unroll
    for (int k = 1; k < FEW_PARTS; k++) {
        top = fmaxf(top, lses.of[k]);
    }
    row_lses<FEW_PARTS> power;
    float lower = 0.0f;
    int num_full = 0;
    bool has_top = false;
#pragma unroll
    for (int k = 0; k < FEW_PARTS; k++) {
        const bool is_first = !has_top && lses.of[k] == top;
        power.of[k] = isinf(lses.of[k]) ? 0.0f : expf(lses.of[k] - top);
        lower += is_first ? 0.0f : power.of[k];
        has_top = has_top || is_first;
        num_full += !isinf(lses.of[k]);
    }
    return share_weights(args, head, lses, power, top, lower, num_full, true);
}

/* Weighs a row's partials together with the other lanes. */
static __device__ __forceinline__ row_weights<MANY_PARTS>
weigh_partials(const merge_args<MANY_PARTS> &args, int64_t head, const row_lses<MANY_PARTS> &lses)
{
    const float top = find_largest(fmaxf(lses.of[0], lses.of[1]));
    const int first = find_first(lses.of, top);
    row_lses<MANY_PARTS> power;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        power.of[k] = isinf(lses.of[k]) ? 0.0f : expf(lses.of[k] - top);
    }
    float lower = 0.0f;
    for (int part = 0; part < args.num_parts; part++) {
        const float one = from_lane(power.of, part);
        lower += part == first ? 0.0f : one;
    }
    const int num_full = __popc(__ballot_sync(ALL_LANES, !isinf(lses.of[0]))) +
                         __popc(__ballot_sync(ALL_LANES, !isinf(lses.of[1])));
    return share_weights(args, head, lses, power, top, lower, num_full,
                         threadIdx.x % SMLA_WARP_LANES == 0);
}

/* The weights of the parts from `part` on, in every thread of the row. */
template <typename Shape>
static __device__ __forceinline__ void
find_weights(const args_of<Shape> &args, int part, const row_weights<Shape::MOST_PARTS> &weights,
             float of[Shape::GROUP])
{
#pragma unroll
    for (int k = 0; k < Shape::GROUP; k++) {
        if constexpr (Shape::MOST_PARTS == MANY_PARTS) {
            of[k] =
                is_past<Shape>(args, part + k) ? (float)NO_WEIGHT : from_lane(weights.of, part + k);
        } else {
            of[k] = weights.of[k];
        }
    }
}
