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

/* A unit as it lies in memory. */
template <int TYPE, int COUNT> struct unit_words {
    static constexpr int WORDS = TYPE == SMLA_FLOAT_FP32 ? COUNT : (COUNT + 1) / 2;

    uint32_t words[WORDS];
};

template <int TYPE, int COUNT>
static __device__ __forceinline__ float
raise_amax(float amax, const unit_words<TYPE, COUNT> &unit)
{
    float values[COUNT < 4 ? 4 : COUNT];
    widen_unit<TYPE, COUNT>(unit.words, values);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        amax = fmaxf(amax, fabsf(values[i])); /* fmaxf ignores NaN */
    }
    return amax;
}

/* Stores the e4m3 of a unit. */
template <int COUNT>
static __device__ __forceinline__ void
store_codes(uint8_t *to, const uint32_t *bytes)
{
    if constexpr (COUNT == 1) {
        *to = (uint8_t)bytes[0];
    } else {
        smla_store_words<COUNT, true>(to, bytes);
    }
}

/* The row of a table for a type and a number of elements per unit. */
template <typename Row, int ROWS>
static const Row *
find_row(const Row (&table)[ROWS], smla_float_type type, int32_t count)
{
    for (const Row &row : table) {
        if (row.type == type && row.count == count) {
            return &row;
        }
    }
    return NULL;
}
