/* simd.h: vectors of SMLA_SIMD_WIDTH floats, and 2^x on them.
 *
 * GCC's vector extension, so one text serves SSE2, AVX2, AVX-512 and NEON: `a * b + c` becomes one
 * FMA where there is one (-ffp-contract=fast), and a scalar operand is broadcast. The file that
 * includes this one defines SMLA_SIMD_WIDTH as 4, 8 or 16.
 */
#ifndef SMLA_CPU_SIMD_H
#define SMLA_CPU_SIMD_H

#include <stdint.h>

enum { WIDTH = SMLA_SIMD_WIDTH };

typedef float vfloat __attribute__((vector_size(4 * SMLA_SIMD_WIDTH), may_alias));
typedef int32_t vint __attribute__((vector_size(4 * SMLA_SIMD_WIDTH), may_alias));
typedef uint32_t vuint __attribute__((vector_size(4 * SMLA_SIMD_WIDTH), may_alias));

/* Kernels are generic code with constant arguments: the compiler must see through every call. */
#define SMLA_INLINE static inline __attribute__((always_inline))

/* An aligned load or store is a dereference of one of these. */
SMLA_INLINE const vfloat *
as_vectors(const float *x)
{
    return (const vfloat *)x;
}

SMLA_INLINE vfloat
splat(float x)
{
    return x - (vfloat){0}; /* x + 0 would lose the sign of -0 */
}

SMLA_INLINE vuint
splat_bits(uint32_t x)
{
    return x + (vuint){0};
}

/* mask ? a : b, for a mask of all ones or all zeros per lane, as comparisons give. */
SMLA_INLINE vfloat
select_lanes(vint mask, vfloat a, vfloat b)
{
    return (vfloat)((mask & (vint)a) | (~mask & (vint)b));
}

/* The larger of two; a NaN in `x` is passed over. */
SMLA_INLINE vfloat
max_lanes(vfloat best, vfloat x)
{
    return select_lanes(x > best, x, best);
}

/* 2^x for x <= 127, error below 1 ulp. Exact for integers; 0 below -126 and for -inf; NaN stays.
 * 2^x = 2^n * 2^f with n = round(x): the polynomial is minimax in relative error on [-1/2, 1/2]
 * (2^-28.9), with the constant term fixed to 1. */
SMLA_INLINE vfloat
exp2_lanes(vfloat x)
{
    const float magic = 0x1.8p23f; /* adding it leaves round(x) in the low bits */
    const vfloat shifted = x + magic;
    const vfloat f = x - (shifted - magic);
    vfloat p = f * 0x1.41fbbcp-13f + 0x1.5f3e54p-10f;
    p = p * f + 0x1.3b2d4cp-7f;
    p = p * f + 0x1.c6aee8p-5f;
    p = p * f + 0x1.ebfbdcp-3f;
    p = p * f + 0x1.62e430p-1f;
    p = p * f + 1.0f;
    /* A product, not an addition to the exponent field: NaN must come out as NaN. */
    const vfloat power = (vfloat)(((vuint)shifted << 23) + (127u << 23));
    return (vfloat)((vint)(p * power) & ~(x < -126.0f));
}

/* An integer in [x, x + 1), or x itself where |x| >= 2^22 (and +-inf). */
SMLA_INLINE vfloat
ceil_lanes(vfloat x)
{
    const float magic = 0x1.8p23f;
    const vfloat nearest = (x + magic) - magic;
    const vfloat up = nearest - (vfloat)((nearest < x) & (vint)splat(-1.0f));
    const vfloat magnitude = (vfloat)((vuint)x & 0x7FFFFFFFu);
    return select_lanes(magnitude < 0x1p22f, up, x);
}

#endif /* SMLA_CPU_SIMD_H */
