/* cache_scale.cuh: a scale that the caller gives, by which values of any size become codes. */
#pragma once

#include "cuda/ptx/numeric.cuh"

namespace {

/* No such scale is moderate that smla_quantize_halves_x4 does not take. */
__device__ __forceinline__ smla_scale
make_cache_scale(float scale)
{
    constexpr uint32_t MANTISSA = 0x007FFFFFu;
    smla_scale by = smla_make_scale(scale);
    by.is_moderate = by.is_moderate && (smla_float_bits(scale) & MANTISSA) != MANTISSA;
    return by;
}

} /* namespace */
