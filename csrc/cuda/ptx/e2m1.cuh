/* e2m1.cuh: e2m1 <-> float for kernels, eight values at a time, by way of fp16.
 *
 * An e2m1 times 2^-14 is an fp16, subnormal values included: the exponents of both begin at the
 * same bit, and bits 9 to 11 of the fp16 are the code without its sign. numeric.h defines the
 * results; these functions give the same bits in fewer instructions.
 */
#pragma once

#include <float.h>

#include "cuda/ptx/numeric.cuh"

#define SMLA_E2M1_UNIT 0x1p14f /* ratio of an e2m1 and the fp16 with its bits */

/* Clamps both halves to +-limit. A NaN becomes +limit. */
static __device__ __forceinline__ uint32_t
smla_clamp_f16x2(uint32_t x, uint32_t limits)
{
    uint32_t pair;
    asm("{\n\t"
        ".reg .b32 top;\n\t"
        "min.f16x2 top, %1, %2;\n\t"
        "max.f16x2 %0, top, %3;\n\t"
        "}"
        : "=r"(pair)
        : "r"(x), "r"(limits), "r"(limits | 0x80008000u));
    return pair;
}

/* smla_float_to_e2m1(x[i] / scale) as eight codes. `factor` is 1 / (scale * SMLA_E2M1_UNIT), off by
 * at most a few units in the last place. x[i] has the 8-bit mantissa of a bf16. The scale has at
 * most 4 bits of mantissa, so a rounding tie times the scale has at most 8 bits. Thus a quotient is
 * a tie, or differs from every tie by 2^-8 of itself. fp16 keeps 11 bits, or 2^-8 of the least tie.
 * So exactly the products near a tie become the tie, which the last step rounds to even. */
static __device__ __forceinline__ uint32_t
smla_quantize_e2m1x8(const float x[8], float factor)
{
    const uint32_t six = 0x0E000E00u; /* 6 / SMLA_E2M1_UNIT in both halves */
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) { /* value i and value i + 4, whose codes are 16 bits apart */
        const uint32_t pair =
            smla_clamp_f16x2(ptx_cvt_f16x2(x[i] * factor, x[i + 4] * factor), six);
        const uint32_t rounded = pair + 0x00FF00FFu + (pair >> 9 & 0x00010001u);
        const uint32_t code = rounded >> 9 & 0x00070007u;
        const uint32_t sign = pair >> 12 & 0x00080008u;
        codes |= (code | sign) << (4 * i);
    }
    return codes;
}

/* Whether the products of this scale and any e2m1 are finite, and scale * SMLA_E2M1_UNIT, too. */
static __device__ __forceinline__ bool
smla_is_plain_e2m1_scale(float scale)
{
    return fabsf(scale) <= FLT_MAX / SMLA_E2M1_UNIT;
}

/* Multiplies eight e2m1 by a plain scale; each product is rounded once. */
static __device__ __forceinline__ void
smla_scale_plain_e2m1x8(uint32_t codes, float scale, float products[8])
{
    const float by = scale * SMLA_E2M1_UNIT;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t pair = codes >> (4 * i);
        const uint32_t halves = (pair << 9 & 0x0E000E00u) | (pair << 12 & 0x80008000u);
        products[i] = smla_cvt_float((uint16_t)halves) * by;
        products[i + 4] = smla_cvt_float((uint16_t)(halves >> 16)) * by;
    }
}
