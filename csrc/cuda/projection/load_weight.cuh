/* load_weight.cuh: one value of a weight, times its scale if it has scales, as fp32, or as a
 * multiple of a unit, which is a power of two. */
#pragma once

#include "core/projection_scale.h"
#include "cuda/projection/load_value.cuh"

static __device__ __forceinline__ float
load_weight(const smla_weight &weight, int64_t row, int64_t column, float unit = 1.0f)
{
    const float value = load_value(weight.values, weight.type,
                                   row * weight.stride_row + column * weight.stride_column);
    return weight.scale == nullptr
               ? value
               : smla_scale_value(value, smla_scale_of_element(&weight, row, column) / unit);
}
