/* block_weights.cuh: how a block's scores become weights 2^(logit - reference), for the kernels of
 * Hopper that take keys and values of KV heads. A thread has two rows i of a block, and of each the
 * elements scores[4 j + 2 i] and scores[4 j + 2 i + 1]. Functions do for rows ROW to PAST - 1 what
 * they do.
 */
#pragma once

#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/logit.cuh"
#include "cuda/ptx/numeric.cuh"

/* The exponent of the weight of a logit that is the reference, and the largest one that a weight
 * may have. Between them a logit can rise without a move: by 2^32, so that rows whose first block
 * has but a few keys seldom move. Values may be up to 2^76 then, even if 2^17 keys have the largest
 * weight, and exponents keep 18 bits behind the point. fp16 has no room for more than 2^8 if light
 * weights are to keep their bits. The reference's exponent is above 0, where the order of floats is
 * that of their bits. */
template <bool HALF> constexpr float TOP_EXPONENT = HALF ? 7.0f : 2.0f;
template <bool HALF> constexpr float MOST_EXPONENT = HALF ? 15.0f : 34.0f;

/* The largest of a row's elements in this lane; a NaN counts as none. */
template <int COUNT>
__device__ __forceinline__ float
max_of_lane(int i, const float (&scores)[COUNT])
{
    float pair[2] = {scores[2 * i], scores[2 * i + 1]};
#pragma unroll
    for (int n = 1; n < COUNT / 4; n++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            pair[k] = fmaxf(pair[k], scores[4 * n + 2 * i + k]);
        }
    }
    return fmaxf(pair[0], pair[1]);
}

/* What is added to a row's scaled scores, so that they become exponents. */
template <bool HALF>
__device__ __forceinline__ float
find_shift(float reference)
{
    return TOP_EXPONENT<HALF> - (reference == -INFINITY ? 0.0f : reference);
}

/* Whether an element is one of rows ROW to PAST - 1. */
template <int ROW, int PAST>
__device__ __forceinline__ constexpr bool
is_of_rows(int element)
{
    return element / 2 % 2 >= ROW && element / 2 % 2 < PAST;
}

/* scores become exponents of weights. */
template <bool HALF, int ROW, int PAST, int COUNT>
__device__ __forceinline__ void
find_exponents(float scale, const float (&reference)[2], float (&scores)[COUNT])
{
    float shift[2];
#pragma unroll
    for (int i = ROW; i < PAST; i++) {
        shift[i] = find_shift<HALF>(reference[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (is_of_rows<ROW, PAST>(i)) {
            scores[i] = fmaf(scores[i], scale, shift[i / 2 % 2]);
        }
    }
}

/* Exponents become weights, whose sums are added to the rows' sums; `rest` is what roundings of
 * these have lost. */
template <int ROW, int PAST, int COUNT>
__device__ __forceinline__ void
find_weights(float (&scores)[COUNT], float (&sum)[2], float (&rest)[2])
{
    float terms[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (is_of_rows<ROW, PAST>(i)) {
            scores[i] = ptx_exp2(scores[i]);
            terms[i % 4] += scores[i];
        }
    }
#pragma unroll
    for (int i = ROW; i < PAST; i++) {
        const float term = terms[2 * i] + terms[2 * i + 1];
        const float older = sum[i];
        sum[i] = older + term;
        rest[i] += term - (sum[i] - older);
    }
}

/* Rounds weights, for the product with values. */
template <bool HALF, int COUNT>
__device__ __forceinline__ void
pack_weights(const float (&scores)[2 * COUNT], uint32_t (&weights)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float low = scores[2 * i];
        const float high = scores[2 * i + 1];
        weights[i] = HALF ? ptx_cvt_f16x2(low, high) : smla_cvt_bf16x2(low, high);
    }
}

/* Raises the rows' largest exponents, as bits, and says whether one of the lane's is too large.
 * Floats above a positive one are integers above its bits, and so is NaN. Of negative exponents
 * alone, weights below the reference's by 2^2 or more, one is noted. */
template <bool HALF, int ROW, int PAST, int COUNT>
__device__ __forceinline__ bool
find_tops(const float (&scores)[COUNT], int (&top)[2])
{
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
#pragma unroll
        for (int k = ROW; k < PAST; k++) {
            top[k] = __vimax3_s32(top[k], __float_as_int(scores[i + 2 * k]),
                                  __float_as_int(scores[i + 2 * k + 1]));
        }
    }
    return max(top[ROW], top[PAST - 1]) > __float_as_int(MOST_EXPONENT<HALF>);
}

/* Lowers a row's exponents by `rise`, and multiplies what the row has by 2^-rise, because its
 * reference has risen by as much. */
template <int COUNT, int OUT>
__device__ __forceinline__ void
lower_row(int i, float rise, float factor, float (&scores)[COUNT], float (&sum)[2],
          float (&rest)[2], float (&out)[OUT])
{
    sum[i] *= factor;
    rest[i] *= factor;
#pragma unroll
    for (int n = 0; n < COUNT / 4; n++) {
        scores[4 * n + 2 * i] -= rise;
        scores[4 * n + 2 * i + 1] -= rise;
    }
#pragma unroll
    for (int n = 0; n < OUT / 4; n++) {
        out[4 * n + 2 * i] *= factor;
        out[4 * n + 2 * i + 1] *= factor;
    }
}

/* ln(sum * 2^(reference - top)), for sums that are normal numbers, 0 or NaN. The logarithm of the
 * mantissa is off by 2^-23, and exponents are exact. */
__device__ __forceinline__ float
find_lse(float reference, int top, float sum)
{
    const float ln_2_high = 0x1.62e43p-1f;
    const float ln_2_low = -0x1.05c61p-29f;
    const uint32_t least = 0x3F3504F3; /* sqrt(1/2) */
    const uint32_t bits = smla_float_bits(sum);
    const int32_t exponent = (int32_t)(bits - least) >> 23;
    const float log2 = ptx_log2(smla_bits_float(bits - ((uint32_t)exponent << 23)));
    const float ln = fmaf((float)(exponent - top), ln_2_high, log2 * ln_2_high);
    const float lse = fmaf(reference, ln_2_high, fmaf(reference, ln_2_low, ln));
    return sum > 0.0f ? lse : sum == 0.0f ? -INFINITY : sum;
}
