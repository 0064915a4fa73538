/* merge_values.cuh: what the kernels of merges share: values of rows, weights, and how rows are
 * aligned. merge.cu has two parts, merge_partials.cu any number. Both weigh by
 *
 *   the largest lse, top;  lower = the sum of e^(lse_i - top) of all parts but one with lse top;
 *   lse = top + log1p(lower);  weight_i = e^(lse_i - top) / ((1 + lower) (1 + e^(sink - lse)))
 *
 * and add products by fused multiplications, in the order of the parts, so that two parts have the
 * same bits in either kernel.
 */
#pragma once

#include "core/params_merge.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

/* ---- Weights ------------------------------------------------------------------------------- */

/* The lse of an empty part is -inf. Some kernels write +inf for it. */
__device__ __forceinline__ float
read_lse(const smla_merge_part &part, int64_t token, int64_t head)
{
    const float lse = part.lse[token * part.lse_stride_token + head * part.lse_stride_head];
    return isinf(lse) ? -INFINITY : lse;
}

/* e^(sink - lse), by which the sum of all weights grows. lse is top + rest. */
__device__ __forceinline__ float
weigh_sink(const smla_merge_rows &rows, int64_t head, float top, float rest)
{
    if (rows.sinks.values == NULL || isinf(top)) {
        return 0.0f;
    }
    return expf(__ldg(rows.sinks.values + head * rows.sinks.stride) - top - rest);
}

__device__ __forceinline__ void
store_lse(const smla_merge_rows &rows, int64_t token, int64_t head, float lse)
{
    rows.lse[token * rows.lse_stride_token + head * rows.lse_stride_head] = lse;
}

/* ---- Values -------------------------------------------------------------------------------- */

/* Loads the bits of COUNT elements, unconverted. */
template <int TYPE, int COUNT>
__device__ __forceinline__ void
load_bits(const void *array, int64_t index, uint32_t *words)
{
    if constexpr (COUNT > 1) { /* 16 bytes */
        const int64_t bytes = TYPE == SMLA_FLOAT_FP32 ? 4 : 2;
        smla_load_own_vector_4((const uint8_t *)array + index * bytes, words);
    } else if constexpr (TYPE == SMLA_FLOAT_FP32) {
        words[0] = ((const uint32_t *)array)[index];
    } else {
        words[0] = ((const uint16_t *)array)[index];
    }
}

/* Element i of what load_bits loaded, as a float. */
template <int TYPE>
__device__ __forceinline__ float
take_value(const uint32_t *words, int i)
{
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        return smla_bits_float(words[i]);
    } else if constexpr (TYPE == SMLA_FLOAT_FP16) {
        return smla_cvt_float((uint16_t)(words[i / 2] >> i % 2 * 16));
    } else {
        return i % 2 == 0 ? smla_low_bf16(words[i / 2]) : smla_high_bf16(words[i / 2]);
    }
}

template <int TYPE, int COUNT>
__device__ __forceinline__ void
store_values(void *array, int64_t index, const float *values)
{
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        uint32_t words[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            words[i] = smla_float_bits(values[i]);
        }
        smla_store_words<COUNT * 4, true>((float *)array + index, words);
    } else if constexpr (COUNT == 1) {
        ((uint16_t *)array)[index] =
            TYPE == SMLA_FLOAT_FP16 ? smla_float_to_half(values[0]) : smla_float_to_bf16(values[0]);
    } else {
        uint32_t words[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            words[i] = TYPE == SMLA_FLOAT_FP16
                           ? smla_cvt_f16x2(values[2 * i], values[2 * i + 1])
                           : smla_floats_to_bf16x2(values[2 * i], values[2 * i + 1]);
        }
        smla_store_words<COUNT * 2, true>((uint16_t *)array + index, words);
    }
}

/* ---- Rows in memory ------------------------------------------------------------------------ */

int64_t
bytes_of(smla_float_type type)
{
    return type == SMLA_FLOAT_FP32 ? 4 : 2;
}

/* Whether all rows of an array begin at multiples of 16 bytes. */
bool
is_aligned(const void *rows, int64_t stride_token, int64_t stride_head, int64_t element_bytes)
{
    return smla_is_multiple(rows, stride_token * element_bytes, 16) &&
           stride_head * element_bytes % 16 == 0;
}

/* Elements per vector: 16 bytes of a part, or one element. */
int32_t
choose_count(const smla_merge_rows *rows, const smla_merge_part *parts, int64_t num_parts)
{
    const int64_t bytes = bytes_of(rows->type);
    bool good = rows->value_dim * bytes % 16 == 0 &&
                is_aligned(rows->out, rows->out_stride_token, rows->out_stride_head,
                           bytes_of(rows->out_type));
    for (int64_t i = 0; good && i < num_parts; i++) {
        good = is_aligned(parts[i].out, parts[i].out_stride_token, parts[i].out_stride_head, bytes);
    }
    return good ? 16 / (int32_t)bytes : 1;
}

} /* namespace */
