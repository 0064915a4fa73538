/* quant_units.cuh: units of COUNT contiguous elements of bf16, fp16 or fp32, for kernels that
 * quantise arrays. A unit is one load. */
#pragma once

#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

/* Loads the bits of COUNT elements, without conversion. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void
load_unit(const void *x, int64_t index, uint32_t *words)
{
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        smla_load_words<COUNT * 4, true>((const float *)x + index, words);
    } else if constexpr (COUNT == 1) {
        words[0] = __ldg((const uint16_t *)x + index);
    } else {
        smla_load_words<COUNT * 2, true>((const uint16_t *)x + index, words);
    }
}

/* Converts a unit to at least 4 floats; zeros follow the last element. */
template <int TYPE, int COUNT>
static __device__ __forceinline__ void
widen_unit(const uint32_t *words, float *values)
{
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            values[i] = smla_bits_float(words[i]);
        }
    } else if constexpr (TYPE == SMLA_FLOAT_BF16) {
        smla_widen_bf16<COUNT>(words, values);
    } else {
#pragma unroll
        for (int i = 0; i < (COUNT + 1) / 2; i++) {
            smla_halves_to_floats(words[i], values + 2 * i);
        }
    }
#pragma unroll
    for (int i = COUNT; i < 4; i++) {
        values[i] = 0.0f;
    }
}
