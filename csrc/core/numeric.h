/* numeric.h: bf16, fp16, e4m3, e2m1 and UE8M0 <-> float, bit-exact and portable. Compiles as C and
 * as CUDA, for host and device.
 *
 * A conversion rounds at most once, to nearest even. The scalar functions here define the results
 * of the whole library; vector code elsewhere must agree with them bit for bit.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SMLA_E4M3_MAX 448.0f
#define SMLA_E2M1_MAX 6.0f

#ifdef __CUDACC__
#define SMLA_HOST_DEVICE __host__ __device__
#else
#define SMLA_HOST_DEVICE
#endif

SMLA_HOST_DEVICE static inline uint32_t
smla_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

SMLA_HOST_DEVICE static inline float
smla_bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

SMLA_HOST_DEVICE static inline float
smla_bf16_to_float(uint16_t x)
{
    return smla_bits_float((uint32_t)x << 16);
}

/* A NaN becomes the quiet NaN of its sign. */
SMLA_HOST_DEVICE static inline uint16_t
smla_float_to_bf16(float x)
{
    const uint32_t bits = smla_float_bits(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)((bits >> 16 & 0x8000u) | 0x7FC0u);
    }
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

SMLA_HOST_DEVICE static inline float
smla_half_to_float(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    const uint32_t magnitude = x & 0x7FFFu;
    if (magnitude >= 0x7C00u) { /* inf, NaN */
        return smla_bits_float(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    }
    if (magnitude >= 0x0400u) {
        return smla_bits_float(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
    }
    const float subnormal = (float)magnitude * 0x1p-24f;
    return smla_bits_float(sign | smla_float_bits(subnormal));
}

/* Rounds once, to infinity from 65520 on. A NaN becomes the quiet NaN of its sign. */
SMLA_HOST_DEVICE static inline uint16_t
smla_float_to_half(float x)
{
    const uint32_t bits = smla_float_bits(x);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= 0x477FF000u) {
        return (uint16_t)(sign | (magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u));
    }
    if (magnitude < 0x38800000u) { /* below 2^-14: the last bit of the sum is 2^-24 */
        return (uint16_t)(sign |
                          (smla_float_bits(smla_bits_float(magnitude) + 0.5f) - 0x3F000000u));
    }
    return (uint16_t)(sign | (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13);
}

/* e4m3 (the "fn" variant): 1 sign, 4 exponent bits of bias 7, 3 mantissa bits; no infinity, one NaN
 * per sign (0x7F, 0xFF), largest value 448, smallest positive value 2^-9. */
SMLA_HOST_DEVICE static inline float
smla_e4m3_to_float(uint8_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x80u) << 24;
    const uint32_t magnitude = x & 0x7Fu;
    if (magnitude == 0x7Fu) {
        return smla_bits_float(sign | 0x7FC00000u);
    }
    if (magnitude >= 8u) {
        return smla_bits_float(sign | ((magnitude << 20) + ((127u - 7u) << 23)));
    }
    return smla_bits_float(sign | smla_float_bits((float)magnitude * 0x1p-9f));
}

/* Rounds to nearest even and saturates at +-448, infinities included; NaN keeps its sign. */
SMLA_HOST_DEVICE static inline uint8_t
smla_float_to_e4m3(float x)
{
    const uint32_t bits = smla_float_bits(x);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80u);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return (uint8_t)(sign | 0x7Fu);
    }
    if (magnitude >= 0x43E00000u) { /* 448 */
        return (uint8_t)(sign | 0x7Eu);
    }
    if (magnitude < 0x3C800000u) { /* below 2^-6: subnormal, a multiple of 2^-9 */
        /* The ulp at 2^14 is 2^-9: the sum is rounded to nearest even and ends in the multiple. */
        const uint32_t sum = smla_float_bits(smla_bits_float(magnitude) + 0x1p14f);
        return (uint8_t)(sign | (sum & 0xFFu));
    }
    const uint32_t rounded = magnitude + 0x7FFFFu + (magnitude >> 20 & 1u);
    return (uint8_t)(sign | ((rounded >> 20) - ((127u - 7u) << 3)));
}

/* |x| as quantisers use it: NaN gives 0, an infinity gives FLT_MAX. */
SMLA_HOST_DEVICE static inline float
smla_finite_abs(float x)
{
    const uint32_t magnitude = smla_float_bits(x) & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return 0.0f;
    }
    return smla_bits_float(magnitude == 0x7F800000u ? 0x7F7FFFFFu : magnitude);
}

/* e2m1: a sign (8), then the code of 0, 0.5, 1, 1.5, 2, 3, 4 or 6. */
SMLA_HOST_DEVICE static inline float
smla_e2m1_to_float(uint8_t x)
{
    const uint32_t sign = (uint32_t)(x & 8u) << 28;
    const uint32_t code = x & 7u;
    const uint32_t magnitude = code < 2u ? code * 0x3F000000u : (code << 22) + (126u << 23);
    return smla_bits_float(sign | magnitude);
}

/* Rounds to nearest, ties to the even code, and saturates at +-6, infinities included. A NaN of any
 * sign becomes code 7. */
SMLA_HOST_DEVICE static inline uint8_t
smla_float_to_e2m1(float x)
{
    const uint32_t bits = smla_float_bits(x);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) {
        return 7;
    }
    const uint8_t sign = (uint8_t)(bits >> 28 & 8u);
    if (magnitude >= 0x40C00000u) { /* 6 */
        return (uint8_t)(sign | 7u);
    }
    if (magnitude < 0x3F800000u) { /* below 1: a multiple of 1/2, which is the ulp at 2^22 */
        const uint32_t sum = smla_float_bits(smla_bits_float(magnitude) + 0x1p22f);
        return (uint8_t)(sign | (sum & 3u));
    }
    const uint32_t rounded = magnitude + 0x1FFFFFu + (magnitude >> 22 & 1u);
    return (uint8_t)(sign | ((rounded >> 22) - (126u << 1)));
}

/* UE8M0: byte e is 2^(e - 127), and 255 is NaN. */
SMLA_HOST_DEVICE static inline float
smla_ue8m0_to_float(uint8_t e)
{
    const uint32_t bits = (uint32_t)e << 23;
    return smla_bits_float(e == 0 ? 0x00400000u : e == 255u ? 0x7FC00000u : bits);
}

/* The UE8M0 byte of the smallest power of two s with top * s >= amax. Both are positive, normal and
 * finite. A mantissa above that of `top` carries into the exponent. */
SMLA_HOST_DEVICE static inline uint32_t
smla_power_scale(float amax, float top)
{
    const uint32_t bits = smla_float_bits(top);
    const uint32_t carry = 0x7FFFFFu - (bits & 0x7FFFFFu);
    return ((smla_float_bits(amax) + carry) >> 23) - ((bits >> 23) - 127u);
}

/* 1 / 2^(e - 127), for a byte of smla_power_scale: 1 to 253. */
SMLA_HOST_DEVICE static inline float
smla_invert_power(uint32_t e)
{
    return smla_bits_float((254u - e) << 23);
}

/* The smallest power of two s with top * s >= max(amax, floor). In amax NaN counts as 0, and an
 * infinity as FLT_MAX. amax is no negative number, and floor / top is at least FLT_MIN. */
SMLA_HOST_DEVICE static inline float
smla_power_of_two_scale(float amax, float top, float floor)
{
    const float finite = smla_finite_abs(amax);
    return smla_bits_float(smla_power_scale(finite > floor ? finite : floor, top) << 23);
}
