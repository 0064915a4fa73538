/* load_value.cuh: one value of an array of any float type, as fp32. */
#pragma once

#include "core/params.h"
#include "cuda/ptx/numeric.cuh"

static __device__ __forceinline__ float
load_value(const void *x, smla_float_type type, int64_t index)
{
    switch (type) {
    case SMLA_FLOAT_BF16: return smla_bf16_to_float(__ldg((const uint16_t *)x + index));
    case SMLA_FLOAT_FP16: return smla_half_to_float(__ldg((const uint16_t *)x + index));
    case SMLA_FLOAT_E4M3: return smla_e4m3_to_float(__ldg((const uint8_t *)x + index));
    default: return __ldg((const float *)x + index);
    }
}
