/* state_pool.cuh: the softmax of DeepSeek V4's compressor over the states of a group, channel by
 * channel. params_compressor.h has the order of operations, and csrc/cpu/compressor/pool_kernel.h
 * has the same operations. */
#pragma once

#include "core/backend.h"
#include "core/numeric.h"
#include "core/params_compressor.h"

namespace {

enum { SLICE_STATES = SMLA_POOL_ROWS / SMLA_POOL_SLICES }; /* states that a slice takes at a time */

static_assert(SLICE_STATES == 2, "a slice takes its states in pairs");

/* exp(score) by the polynomial of exp2_lanes in simd.h, for score <= 0, each operation rounded as
 * there. */
__device__ __forceinline__ float
pool_exp(float score)
{
    const float magic = 0x1.8p23f; /* adding it leaves round(x) in the low bits */
    const float x = __fmul_rn(score, SMLA_LOG2_E);
    const float shifted = __fadd_rn(x, magic);
    const float f = __fsub_rn(x, __fsub_rn(shifted, magic));
    float p = __fadd_rn(__fmul_rn(f, 0x1.41fbbcp-13f), 0x1.5f3e54p-10f);
    p = __fadd_rn(__fmul_rn(p, f), 0x1.3b2d4cp-7f);
    p = __fadd_rn(__fmul_rn(p, f), 0x1.c6aee8p-5f);
    p = __fadd_rn(__fmul_rn(p, f), 0x1.ebfbdcp-3f);
    p = __fadd_rn(__fmul_rn(p, f), 0x1.62e430p-1f);
    p = __fadd_rn(__fmul_rn(p, f), 1.0f);
    const float power = smla_bits_float((smla_float_bits(shifted) << 23) + (127u << 23));
    return x < -126.0f ? 0.0f : __fmul_rn(p, power);
}

/* The number that scores are relative to: the largest score, or 0 while all are -inf. */
__device__ __forceinline__ float
base_of(float largest)
{
    return largest > -INFINITY ? largest : 0.0f;
}

/* The sums of a slice for a channel, over the states added so far. */
struct channel_sums {
    float largest;
    float weights;
    float totals;
};

/* Adds two states. The former sums are multiplied by a factor; if IS_FIRST, they are 0 and stay so.
 * The two weights and the factor are exps of scores relative to the largest score. The largest
 * score itself has the weight 1. So two exps are enough, and one for the first pair. */
template <bool IS_FIRST>
__device__ __forceinline__ void
add_states(channel_sums &sums, const float scores[SLICE_STATES], const float values[SLICE_STATES])
{
    /* A NaN score is never the largest. */
    const float largest = fmaxf(fmaxf(sums.largest, scores[0]), scores[1]);
    const float base = base_of(largest);
    const float of_largest = largest > -INFINITY ? 1.0f : 0.0f;
    const bool is_first = scores[0] == largest;
    float weights[SLICE_STATES];
    if constexpr (IS_FIRST) {
        const float other = pool_exp(__fsub_rn(is_first ? scores[1] : scores[0], base));
        weights[0] = is_first ? of_largest : other;
        weights[1] = is_first ? other : of_largest;
    } else {
        const bool is_second = !is_first && scores[1] == largest;
        const float in_first = pool_exp(__fsub_rn(is_first ? sums.largest : scores[0], base));
        const float in_second = pool_exp(__fsub_rn(is_second ? sums.largest : scores[1], base));
        weights[0] = is_first ? of_largest : in_first;
        weights[1] = is_second ? of_largest : in_second;
        const float factor = is_first ? in_first : is_second ? in_second : of_largest;
        sums.weights = __fmul_rn(sums.weights, factor);
        sums.totals = __fmul_rn(sums.totals, factor);
    }
    sums.largest = largest;
#pragma unroll
    for (int i = 0; i < SLICE_STATES; i++) {
        const float value = scores[i] == -INFINITY ? 0.0f : values[i];
        sums.weights = __fadd_rn(sums.weights, weights[i]);
        sums.totals = __fadd_rn(sums.totals, __fmul_rn(weights[i], value));
    }
}

/* The sums of all slices, by channel. */
template <int DIM> struct pool_memory {
    alignas(16) float largest[SMLA_POOL_SLICES][DIM];
    alignas(16) float weights[SMLA_POOL_SLICES][DIM];
    alignas(16) float totals[SMLA_POOL_SLICES][DIM];
};

/* The pooled value of a channel. */
template <int DIM>
__device__ __forceinline__ float
join_slices(const pool_memory<DIM> &memory, int channel)
{
    float largest = memory.largest[0][channel];
#pragma unroll
    for (int s = 1; s < SMLA_POOL_SLICES; s++) {
        largest = fmaxf(largest, memory.largest[s][channel]);
    }
    const float base = base_of(largest);
    float weights[SMLA_POOL_SLICES];
    float totals[SMLA_POOL_SLICES];
#pragma unroll
    for (int s = 0; s < SMLA_POOL_SLICES; s++) {
        const float factor = pool_exp(__fsub_rn(memory.largest[s][channel], base));
        weights[s] = __fmul_rn(memory.weights[s][channel], factor);
        totals[s] = __fmul_rn(memory.totals[s][channel], factor);
    }
    const float weight =
        __fadd_rn(__fadd_rn(weights[0], weights[1]), __fadd_rn(weights[2], weights[3]));
    const float total = __fadd_rn(__fadd_rn(totals[0], totals[1]), __fadd_rn(totals[2], totals[3]));
    return weight == 0.0f ? 0.0f : __fdiv_rn(total, weight);
}

} /* namespace */
