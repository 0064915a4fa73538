/* rms_norm.cuh: the sum of a row's squares by a warp, in the order that backend.h gives, and the
 * factor of RMSNorm. Lane l has vectors l, l + 32, l + 64 ... of 8 values.
 */
#pragma once

#include "core/backend.h"
#include "core/params_norm.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    NORM_VECTOR = SMLA_NORM_SUMS / SMLA_WARP_LANES
}; /* values per vector, which are also the partial sums per lane */

static_assert(NORM_VECTOR == 8, "a vector is 16 bytes of bf16");

static __device__ __forceinline__ void
norm_add_squares(float sums[NORM_VECTOR], const float x[NORM_VECTOR])
{
#pragma unroll
    for (int i = 0; i < NORM_VECTOR; i++) {
        sums[i] = __fadd_rn(sums[i], __fmul_rn(x[i], x[i]));
    }
}

/* Adds the partial sums of all lanes, for every lane. All lanes get the same bits, because the
 * order of two summands does not matter. */
static __device__ __forceinline__ float
norm_fold_sums(const float sums[NORM_VECTOR])
{
    const float low = __fadd_rn(__fadd_rn(sums[0], sums[1]), __fadd_rn(sums[2], sums[3]));
    const float high = __fadd_rn(__fadd_rn(sums[4], sums[5]), __fadd_rn(sums[6], sums[7]));
    float sum = __fadd_rn(low, high);
#pragma unroll
    for (int lanes = SMLA_WARP_LANES / 2; lanes > 0; lanes /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, lanes));
    }
    return sum;
}

static __device__ __forceinline__ float
norm_factor_of_mean(float mean, float eps)
{
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

static __device__ __forceinline__ float
norm_factor(float sum, int64_t size, float eps)
{
    return norm_factor_of_mean(__fdiv_rn(sum, (float)size), eps);
}
