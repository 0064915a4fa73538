/* softmax.cuh: the arithmetic of an unfinished softmax row, for the kernels that make such rows and
 * the one that folds them.
 *
 * A row is (max_log2, sum, out): the largest score so far in the log2 domain, and sum and out as
 * multiples of 2^reference(max_log2). The reference is an integer, the maximum rounded up. So every
 * rescaling is by a power of two and exact, however often the maximum moves. In calls with a unit
 * of keys, out is divided by it.
 */
#pragma once

#include "core/attention/params_attention.h"
#include "core/backend.h"
#include "core/numeric.h"
#include "cuda/ptx/launch.cuh"

/* A call's scales of caches, for smla_choose_key_unit. */
typedef struct given_key_scales {
    smla_given_scale given[2];
    float unit; /* 0 if a scale is on the device */
} given_key_scales;

static inline given_key_scales
key_scales_of(const smla_logits *logits)
{
    given_key_scales scales = {{logits->kv_scale[0], logits->kv_scale[1]}, 0.0f};
    if (scales.given[0].pointer == NULL && scales.given[1].pointer == NULL) {
        scales.unit = smla_choose_key_unit(scales.given[0].value, scales.given[1].value);
    }
    return scales;
}

/* What scales of keys are divided by. A launch says in front whether it may have a unit other than
 * 1, because its scales lie further behind. */
template <typename Launch>
static __device__ __forceinline__ float
find_key_unit(const Launch &launch)
{
    if (!launch.has_key_unit) {
        return 1.0f;
    }
    return launch.key_scales.unit != 0.0f
               ? launch.key_scales.unit
               : smla_choose_key_unit(smla_load_given_scale(launch.key_scales.given[0]),
                                      smla_load_given_scale(launch.key_scales.given[1]));
}

/* The reference: an integer to subtract from the scores; 0 where there are no scores. */
static __device__ __forceinline__ float
softmax_reference(float max_log2)
{
    return max_log2 == -INFINITY ? 0.0f : ceilf(max_log2);
}

/* 2^(reference of an older maximum - reference); 0 for an older row without scores. */
static __device__ __forceinline__ float
softmax_rescale(float older_max_log2, float reference)
{
    const float exponent = fmaxf(ceilf(older_max_log2) - reference, -127.0f);
    return exponent < -126.0f ? 0.0f : smla_bits_float((uint32_t)((int32_t)exponent + 127) << 23);
}

/* ln(sum * 2^reference). The integer part of log2 is exact, so only one rounding remains, in the
 * last place of the result. */
static __device__ __forceinline__ float
softmax_lse(float sum, float reference)
{
    const float ln_2_high = 0x1.62e43p-1f;
    const float ln_2_low = -0x1.05c61p-29f;
    int32_t exponent;
    const float mantissa = frexpf(sum, &exponent);
    const float integer = reference + (float)exponent;
    return fmaf(integer, ln_2_high, fmaf(integer, ln_2_low, logf(mantissa)));
}

/* The sink of a head; 0 if the call has no sinks. */
static __device__ __forceinline__ float
softmax_sink(const smla_sinks &sinks, int64_t head)
{
    uint32_t sink = 0;
    if (sinks.values != NULL) {
        smla_load_vector_1(sinks.values + head * sinks.stride, &sink);
    }
    return smla_bits_float(sink);
}

/* Returns the factor that turns the out of a row into the result, and writes lse and max_logits if
 * `writes`. A row without keys (or with nothing but logits of -inf) has sum 0. Results may be any
 * struct whose fields are named as in smla_results. */
template <typename Results>
static __device__ __forceinline__ float
softmax_finish(const Results &results, const smla_sinks &sinks, int64_t token, int64_t head,
               float max_log2, float sum, float sink, bool writes)
{
    const float ln_2 = 0x1.62e43p-1f;
    const float empty_lse = results.empty_lse_is_plus_inf ? INFINITY : -INFINITY;
    const float lse = sum == 0.0f ? empty_lse : softmax_lse(sum, softmax_reference(max_log2));
    if (writes && results.lse != NULL) {
        results.lse[token * results.lse_stride_token + head * results.lse_stride_head] = lse;
    }
    if (writes && results.max_logits != NULL) {
        results.max_logits[token * results.max_logits_stride_token +
                           head * results.max_logits_stride_head] =
            isnan(sum) ? sum : max_log2 * ln_2;
    }
    if (sum == 0.0f) {
        return 0.0f;
    }
    float factor = 1.0f / sum;
    if (sinks.values != NULL) {
        factor /= 1.0f + expf(sink - lse);
    }
    return factor;
}

/* ---- Sums ---------------------------------------------------------------------------------- */

/* An unfinished row, without its out. */
typedef struct softmax_row {
    float max_log2;
    float sum;
    float excess; /* the amount by which sum is too large */
    float unused; /* pads the row to 16 bytes */
} softmax_row;

/* Sums in pairs. This is half as deep as a chain for two values, a third as deep for eight, and
 * exact where COUNT, a power of two, values are equal. */
template <int COUNT>
static __device__ __forceinline__ float
sum_values(const float *values)
{
    if constexpr (COUNT == 1) {
        return values[0];
    } else {
        return sum_values<COUNT / 2>(values) + sum_values<COUNT / 2>(values + COUNT / 2);
    }
}

/* Adds `block_sum` to the row, whose sum is first multiplied by `shrink`, a power of two. */
static __device__ __forceinline__ void
add_to_sum(softmax_row *row, float shrink, float block_sum)
{
    const float older = row->sum * shrink;
    const float term = block_sum - row->excess * shrink;
    row->sum = older + term;
    row->excess = (row->sum - older) - term;
}
