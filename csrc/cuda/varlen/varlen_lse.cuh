/* varlen_lse.cuh: what the kernels of varlen_attention share about a finished row. */
#pragma once

#include "core/params_varlen.h"
#include "cuda/ptx/launch.cuh"

constexpr float LOG2_E = 1.44269504f;

/* Weights of fp16 are multiplied by 2^7, so that weights down to 2^-21 of a row's largest keep all
 * bits, and none exceeds 2^15. */
template <bool HALF> constexpr float WEIGHT_SHIFT = HALF ? 7.0f : 0.0f;

/* The lse of a row whose weights 2^(logit - reference) have this sum. A row without keys, or with
 * no logit but -inf, has sum 0. */
__device__ __forceinline__ float
find_lse(float reference, float sum)
{
    const float ln_2_high = 0x1.62e43p-1f;
    const float ln_2_low = -0x1.05c61p-29f;
    return sum == 0.0f ? -INFINITY
                       : fmaf(reference, ln_2_high, fmaf(reference, ln_2_low, logf(sum)));
}

/* Writes a row's lse, if the call wants it. */
__device__ __forceinline__ void
write_lse(const smla_varlen_params &p, int64_t token, int64_t head, float lse)
{
    if (p.lse != NULL) {
        p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = lse;
    }
}
