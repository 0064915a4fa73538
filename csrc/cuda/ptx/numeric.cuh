/* numeric.cuh: bf16, fp16 and e4m3 <-> float for kernels: several values per instruction.
 *
 * numeric.h defines the results. The functions here give the same bits in fewer instructions. Usual
 * values take one short path. One test per word finds the rare values (NaN, scales at the ends of
 * the range), which go through numeric.h.
 */
#pragma once

#include <float.h>

#include "core/numeric.h"
#include "cuda/ptx/ptx.cuh"

/* ---- One instruction each ------------------------------------------------------------------ */

/* Rounds to nearest even; the sign of a NaN is lost. */
static __device__ __forceinline__ uint32_t
smla_cvt_bf16x2(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Converts exactly, but for the sign of a NaN. */
PTX_UNARY(smla_cvt_float, "cvt.f32.f16", f, h)

PTX_UNARY(smla_abs_bf16x2, "abs.bf16x2", r, r)

/* The larger value in each half. A number is chosen over a NaN; two NaN give a NaN. */
PTX_BINARY(smla_max_bf16x2, "max.bf16x2", r, r)

/* The smaller of |x| and `most`; a NaN stays. */
static __device__ __forceinline__ float
smla_bound_magnitude(float x, float most)
{
    float bounded;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(bounded) : "f"(fabsf(x)), "f"(most));
    return bounded;
}

/* Returns 1 / x, off by at most a unit in the last place. */
PTX_UNARY(smla_rcp, "rcp.approx.ftz.f32", f, f)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
/* Rounds to nearest even and saturates at +-448, infinities included; the sign of a NaN is lost. */
static __device__ __forceinline__ uint32_t
smla_cvt_e4m3x2(float low, float high)
{
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Converts exactly, but for the sign of a NaN. */
PTX_UNARY(smla_cvt_halves, "cvt.rn.f16x2.e4m3x2", r, h)
#endif

/* ---- From bf16 and fp16 -------------------------------------------------------------------- */

static __device__ __forceinline__ float
smla_low_bf16(uint32_t pair)
{
    return smla_bits_float(pair << 16);
}

static __device__ __forceinline__ float
smla_high_bf16(uint32_t pair)
{
    return smla_bits_float(pair & 0xFFFF0000u);
}

/* Element `at` of a read-only array of bf16 or fp32. */
static __device__ __forceinline__ float
smla_read_float(const void *array, bool are_bf16, int64_t at)
{
    return are_bf16 ? smla_bf16_to_float(__ldg((const uint16_t *)array + at))
                    : __ldg((const float *)array + at);
}

/* Number `i` of values of bf16, two per word. */
static __device__ __forceinline__ float
smla_bf16_of_pairs(const uint32_t *pairs, int i)
{
    return i % 2 == 0 ? smla_low_bf16(pairs[i / 2]) : smla_high_bf16(pairs[i / 2]);
}

/* Converts COUNT bf16, two per word. */
template <int COUNT>
static __device__ __forceinline__ void
smla_widen_bf16(const uint32_t *pairs, float *x)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = smla_bf16_of_pairs(pairs, i);
    }
}

/* The four floats of a vector. */
static __device__ __forceinline__ void
smla_spread_vector(const float4 &vector, float *x)
{
    x[0] = vector.x;
    x[1] = vector.y;
    x[2] = vector.z;
    x[3] = vector.w;
}

/* Converts two fp16 to fp32. */
static __device__ __forceinline__ void
smla_halves_to_floats(uint32_t halves, float floats[2])
{
    const uint16_t low = (uint16_t)halves;
    const uint16_t high = (uint16_t)(halves >> 16);
    /* Patterns above 0x7C00 (infinity) are NaN: then the sum carries into the sign bit of its
     * half. */
    if (((halves & 0x7FFF7FFFu) + 0x03FF03FFu) & 0x80008000u) {
        floats[0] = smla_half_to_float(low);
        floats[1] = smla_half_to_float(high);
        return;
    }
    floats[0] = smla_cvt_float(low);
    floats[1] = smla_cvt_float(high);
}

/* ---- To bf16 ------------------------------------------------------------------------------- */

static __device__ __noinline__ uint32_t
smla_round_rare_floats(float low, float high)
{
    return smla_float_to_bf16(low) | (uint32_t)smla_float_to_bf16(high) << 16;
}

/* smla_float_to_bf16 of two values, as a pair. */
static __device__ __forceinline__ uint32_t
smla_floats_to_bf16x2(float low, float high)
{
    return isnan(low) || isnan(high) ? smla_round_rare_floats(low, high)
                                     : smla_cvt_bf16x2(low, high);
}

/* smla_float_to_bf16 of COUNT values, two per word. */
template <int COUNT>
static __device__ __forceinline__ void
smla_round_to_bf16(const float *x, uint32_t *pairs)
{
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        pairs[i] = smla_floats_to_bf16x2(x[2 * i], x[2 * i + 1]);
    }
}

/* ---- From e4m3 ----------------------------------------------------------------------------- */

/* Returns value * scale. A NaN keeps its bits, and the value's NaN comes before the scale's.
 * Without these rules the hardware would choose which NaN a product gives. */
static __device__ __forceinline__ float
smla_scale_value(float value, float scale)
{
    if (isnan(value)) {
        return value;
    }
    return isnan(scale) ? smla_bits_float(smla_float_bits(scale) | 0x00400000u) : value * scale;
}

/* smla_e4m3x4_to_halves gives four e4m3 (no NaN) as fp16, divided by SMLA_E4M3_UNIT. The unit is 1
 * where an instruction converts. Elsewhere exponent and mantissa keep their bits. fp16 then reads
 * the exponent with a bias of 15 instead of 7, which divides by 256, subnormal values included. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define SMLA_E4M3_UNIT 1.0f
#else
#define SMLA_E4M3_UNIT 256.0f
#endif

static __device__ __forceinline__ void
smla_e4m3x4_to_halves(uint32_t bytes, uint32_t halves[2])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    halves[0] = smla_cvt_halves((uint16_t)bytes);
    halves[1] = smla_cvt_halves((uint16_t)(bytes >> 16));
#else
    /* Bytes 0 and 1 as the upper bytes of two halves. */
    const uint32_t low = __byte_perm(bytes, 0, 0x1404);
    const uint32_t high = __byte_perm(bytes, 0, 0x3424);
    halves[0] = (low & 0x80008000u) | (low >> 1 & 0x3F803F80u);
    halves[1] = (high & 0x80008000u) | (high >> 1 & 0x3F803F80u);
#endif
}

/* Sets the top bit of each byte of the result if the byte is NaN; the other bits mean nothing. */
static __device__ __forceinline__ uint32_t
smla_mark_nan_e4m3x4(uint32_t bytes)
{
    return (bytes & 0x7F7F7F7Fu) + 0x01010101u;
}

/* smla_e4m3x4_to_halves for any four e4m3; NaN becomes NaN. */
static __device__ __forceinline__ void
smla_widen_e4m3x4(uint32_t bytes, uint32_t halves[2])
{
    smla_e4m3x4_to_halves(bytes, halves);
    if constexpr (SMLA_E4M3_UNIT != 1.0f) {
        const uint32_t nan = smla_mark_nan_e4m3x4(bytes) & 0x80808080u;
        if (nan != 0) {
            halves[0] |= (__byte_perm(nan, 0, 0x1404) >> 15) * 0x7C00u;
            halves[1] |= (__byte_perm(nan, 0, 0x3424) >> 15) * 0x7C00u;
        }
    }
}

/* Whether the product of this scale and any e4m3 number is not NaN. */
static __device__ __forceinline__ bool
smla_is_plain_scale(float scale)
{
    return fabsf(scale * SMLA_E4M3_UNIT) <= FLT_MAX;
}

/* Multiplies four e4m3 (no NaN) by a plain scale. Each product is rounded once, because scale *
 * SMLA_E4M3_UNIT and fp16 -> fp32 are exact. */
static __device__ __forceinline__ void
smla_scale_plain_e4m3x4(uint32_t bytes, float scale, float products[4])
{
    const float by = scale * SMLA_E4M3_UNIT;
    uint32_t halves[2];
    smla_e4m3x4_to_halves(bytes, halves);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        products[2 * i] = smla_cvt_float((uint16_t)halves[i]) * by;
        products[2 * i + 1] = smla_cvt_float((uint16_t)(halves[i] >> 16)) * by;
    }
}

/* Multiplies any four e4m3 by any scale. */
static __device__ __noinline__ float4
smla_scale_rare_e4m3x4(uint32_t bytes, float scale)
{
    return make_float4(smla_scale_value(smla_e4m3_to_float((uint8_t)bytes), scale),
                       smla_scale_value(smla_e4m3_to_float((uint8_t)(bytes >> 8)), scale),
                       smla_scale_value(smla_e4m3_to_float((uint8_t)(bytes >> 16)), scale),
                       smla_scale_value(smla_e4m3_to_float((uint8_t)(bytes >> 24)), scale));
}

static __device__ __noinline__ uint2
smla_scale_rare_e4m3x4_to_bf16(uint32_t bytes, float scale)
{
    const float4 values = smla_scale_rare_e4m3x4(bytes, scale);
    return make_uint2(smla_round_rare_floats(values.x, values.y),
                      smla_round_rare_floats(values.z, values.w));
}

/* ---- To e4m3 ------------------------------------------------------------------------------- */

/* A scale that many values are divided by. */
typedef struct smla_scale {
    float scale;
    float reciprocal; /* 1 / scale, correctly rounded if the scale is moderate */
    float rest;       /* the true reciprocal minus `reciprocal` */
    bool is_moderate;
} smla_scale;

static __device__ __forceinline__ smla_scale
smla_make_scale(float scale)
{
    /* Take one Newton step, as in nvcc's code for 1 / x, but without its care for the ends of the
     * range. */
    const float first = smla_rcp(scale);
    const float reciprocal = fmaf(first, fmaf(-scale, first, 1.0f), first);
    return smla_scale{scale, reciprocal, fmaf(-scale, reciprocal, 1.0f) * reciprocal,
                      scale >= 0x1p-60f && scale <= 0x1p60f};
}

/* Improves a quotient x / divisor. `reciprocal` is 1 / divisor. */
static __device__ __forceinline__ float
smla_correct_quotient(float quotient, float x, float divisor, float reciprocal)
{
    return fmaf(fmaf(-divisor, quotient, x), reciprocal, quotient);
}

/* Returns the scale of a tile of bf16 values. amax is their largest absolute value, or FLT_MAX. The
 * quotient has the bits of a division for every such amax, unless the scale is the lower bound. */
static __device__ __forceinline__ float
smla_scale_of_tile(float amax)
{
    const float reciprocal = 1.0f / SMLA_E4M3_MAX;
    const float quotient =
        smla_correct_quotient(amax * reciprocal, amax, SMLA_E4M3_MAX, reciprocal);
    return fmaxf(quotient, FLT_MIN);
}

/* Returns x / scale, rounded as a division rounds. This needs a moderate scale, |x| <= 448 scale,
 * and a quotient that is not 0 as e4m3. The first quotient is off by less than two units in the
 * last place. The second is a neighbour of the true quotient. From there, a correctly rounded
 * reciprocal and an exact remainder give the rounded quotient (Markstein, 1990). The remainder is
 * exact because nothing underflows: it is a multiple of 2^-23 scale times 2^-33. */
static __device__ __forceinline__ float
smla_divide_moderate(float x, const smla_scale &by)
{
    const float first = x * by.reciprocal;
    const float second = smla_correct_quotient(first, x, by.scale, by.reciprocal);
    return smla_correct_quotient(second, x, by.scale, by.reciprocal);
}

static __device__ __noinline__ float4
smla_divide_rare_x4(float4 x, float scale)
{
    return make_float4(x.x / scale, x.y / scale, x.z / scale, x.w / scale);
}

/* Rounds four quotients to e4m3. The signs of 0 and NaN are lost, so callers set all signs. */
static __device__ __forceinline__ uint32_t
smla_floats_to_e4m3x4(const float quotients[4])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return smla_cvt_e4m3x2(quotients[0], quotients[1]) | smla_cvt_e4m3x2(quotients[2], quotients[3])
                                                             << 16;
#else
    return smla_float_to_e4m3(quotients[0]) | (uint32_t)smla_float_to_e4m3(quotients[1]) << 8 |
           (uint32_t)smla_float_to_e4m3(quotients[2]) << 16 |
           (uint32_t)smla_float_to_e4m3(quotients[3]) << 24;
#endif
}

/* Returns the sign of each value as the top bit of its byte; the other bits mean nothing. */
static __device__ __forceinline__ uint32_t
smla_signs_of_floats(const float x[4])
{
    const uint32_t low = __byte_perm(smla_float_bits(x[0]), smla_float_bits(x[1]), 0x0073);
    const uint32_t high = __byte_perm(smla_float_bits(x[2]), smla_float_bits(x[3]), 0x0073);
    return __byte_perm(low, high, 0x5410);
}

static __device__ __forceinline__ uint32_t
smla_signs_of_bf16(const uint32_t pairs[2])
{
    return __byte_perm(pairs[0], pairs[1], 0x7531);
}

/* smla_float_to_e4m3(x / scale) of four values, for |x| <= 448 scale and for NaN and infinities. */
static __device__ __forceinline__ uint32_t
smla_quantize_x4(const float x[4], uint32_t signs, const smla_scale &by)
{
    float quotients[4];
    if (by.is_moderate) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            quotients[i] = smla_divide_moderate(x[i], by);
        }
    } else {
        smla_spread_vector(smla_divide_rare_x4(make_float4(x[0], x[1], x[2], x[3]), by.scale),
                           quotients);
    }
    return smla_floats_to_e4m3x4(quotients) | (signs & 0x80808080u);
}

/* smla_float_to_e4m3(x / scale) of four bf16 or fp16 of any size, for a moderate scale whose
 * mantissa is not all ones. Values above 448 scales are bounded first, because infinities leave no
 * remainder.
 *
 * x has at most 11 bits, so that 46 bits of the reciprocal are enough. The product could round to
 * another code than the rounded quotient only next to the middle between an fp32 t that is midway
 * between two of e4m3, and its neighbour. There X 2^c = S T + S 2^-20, almost, with x, the scale
 * and t as integers X, S and T of 11, 24 and 5 bits, and c >= 16. So S is k 2^20 + e, where k is 8
 * to 16 and e is small, and 2^c divides e T + k. That is too small for it, and 0 only if S is all
 * ones. */
static __device__ __forceinline__ uint32_t
smla_quantize_halves_x4(const float x[4], uint32_t signs, const smla_scale &by)
{
    const float most = SMLA_E4M3_MAX * by.scale;
    float quotients[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float bounded = smla_bound_magnitude(x[i], most);
        quotients[i] = fmaf(bounded, by.reciprocal, bounded * by.rest);
    }
    return smla_floats_to_e4m3x4(quotients) | (signs & 0x80808080u);
}

/* smla_quantize_x4 of floats of any size. */
static __device__ __forceinline__ uint32_t
smla_quantize_floats_x4(const float x[4], const smla_scale &by)
{
    const float most = SMLA_E4M3_MAX * by.scale;
    float bounded[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bounded[i] = smla_bound_magnitude(x[i], most);
    }
    return smla_quantize_x4(bounded, smla_signs_of_floats(x), by);
}

/* Rounds products of COUNT bf16 and a factor to e4m3. */
template <int COUNT>
static __device__ __forceinline__ void
smla_quantize_products(const uint32_t *pairs, float factor, uint32_t *codes)
{
    float products[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        products[i] = smla_bf16_of_pairs(pairs, i) * factor;
    }
#pragma unroll
    for (int k = 0; k < COUNT / 4; k++) {
        codes[k] = smla_floats_to_e4m3x4(products + 4 * k) |
                   (smla_signs_of_bf16(pairs + 2 * k) & 0x80808080u);
    }
}

/* The largest magnitudes of a lane's COUNT bf16: of even values, and of odd ones. NaN is left
 * out. */
template <int COUNT>
static __device__ __forceinline__ uint32_t
smla_find_largest(const uint32_t *pairs)
{
    uint32_t largest = smla_abs_bf16x2(pairs[0]);
#pragma unroll
    for (int k = 1; k < COUNT / 2; k++) {
        largest = smla_max_bf16x2(largest, smla_abs_bf16x2(pairs[k]));
    }
    return largest;
}

/* The largest magnitudes in two tiles, from what smla_find_largest gave each of LANES neighbouring
 * lanes. A tile that has only NaN gives NaN. The tiles share the words of the exchange: the first
 * one has the lower halves. */
template <int LANES>
static __device__ __forceinline__ void
smla_find_amax_of_tiles(uint32_t first, uint32_t second, float amax[2])
{
    uint32_t both =
        smla_max_bf16x2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) {
        both = smla_max_bf16x2(both, __shfl_xor_sync(0xFFFFFFFFu, both, lanes));
    }
    amax[0] = smla_low_bf16(both);
    amax[1] = smla_high_bf16(both);
}

/* smla_quantize_x4 for bf16 and a moderate scale of smla_scale_of_tile. A quotient of two 8-bit
 * mantissas is a rounding tie or far from one. So x times 48 bits of the reciprocal lies on the
 * same side of each tie as x / scale, which was tried for every pair of mantissas. */
static __device__ __forceinline__ uint32_t
smla_quantize_moderate_bf16x4(const uint32_t pairs[2], const smla_scale &by)
{
    float quotients[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = smla_bf16_of_pairs(pairs, i);
        quotients[i] = fmaf(x, by.reciprocal, x * by.rest);
    }
    return smla_floats_to_e4m3x4(quotients) | (smla_signs_of_bf16(pairs) & 0x80808080u);
}

/* smla_quantize_x4 for bf16 and any scale. */
static __device__ __noinline__ uint32_t
smla_quantize_rare_bf16x4(uint32_t low, uint32_t high, float scale)
{
    const float quotients[4] = {smla_low_bf16(low) / scale, smla_high_bf16(low) / scale,
                                smla_low_bf16(high) / scale, smla_high_bf16(high) / scale};
    const uint32_t pairs[2] = {low, high};
    return smla_floats_to_e4m3x4(quotients) | (smla_signs_of_bf16(pairs) & 0x80808080u);
}
