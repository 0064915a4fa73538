/* simd.h: vectors of SMLA_SIMD_WIDTH floats: 2^x, rounding to bf16, interleaving, transposition.
 *
 * This is GCC's vector extension, so one text serves SSE2, AVX2, AVX-512 and NEON. `a * b + c`
 * becomes one FMA on machines with FMA (-ffp-contract=fast). A scalar operand is broadcast. The
 * file that includes this one defines SMLA_SIMD_WIDTH as 4, 8 or 16.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { WIDTH = SMLA_SIMD_WIDTH };

typedef float vfloat __attribute__((vector_size(4 * SMLA_SIMD_WIDTH), may_alias));
typedef int32_t vint __attribute__((vector_size(4 * SMLA_SIMD_WIDTH), may_alias));
typedef uint32_t vuint __attribute__((vector_size(4 * SMLA_SIMD_WIDTH), may_alias));

/* Kernels are generic code with constant arguments, so the compiler must inline every call. Builds
 * that are not for speed leave it to the compiler: cache_kernel.c takes 1 s, not 20, at -O0. */
#if defined(SMLA_FREE_INLINING)
#define SMLA_INLINE static inline
#else
#define SMLA_INLINE static inline __attribute__((always_inline))
#endif

/* Dereferencing the result is an aligned load. */
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

/* mask ? a : b, for a mask of all ones or all zeros per lane, as comparisons give. AVX2 has one
 * instruction for it, which GCC does not see in three. */
SMLA_INLINE vfloat
select_lanes(vint mask, vfloat a, vfloat b)
{
#if defined(__AVX2__) && SMLA_SIMD_WIDTH == 8
    return (vfloat)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
#else
    return (vfloat)((mask & (vint)a) | (~mask & (vint)b));
#endif
}

/* Whether the mask of a comparison has a lane that is true. */
SMLA_INLINE bool
has_lane(vint mask)
{
#if defined(__AVX512F__) && SMLA_SIMD_WIDTH == 16
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__) && SMLA_SIMD_WIDTH == 8
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE__) && SMLA_SIMD_WIDTH == 4
    return _mm_movemask_ps((__m128)mask) != 0;
#else
    int32_t any = 0;
    for (int i = 0; i < WIDTH; i++) {
        any |= mask[i];
    }
    return any != 0;
#endif
}

/* The larger value per lane; a NaN in `x` is ignored. x86 has an instruction for just this, which
 * GCC does not see in the comparison. */
SMLA_INLINE vfloat
max_lanes(vfloat best, vfloat x)
{
#if defined(__AVX512F__) && SMLA_SIMD_WIDTH == 16
    return (vfloat)_mm512_max_ps((__m512)x, (__m512)best);
#elif defined(__AVX__) && SMLA_SIMD_WIDTH == 8
    return (vfloat)_mm256_max_ps((__m256)x, (__m256)best);
#elif defined(__SSE__) && SMLA_SIMD_WIDTH == 4
    return (vfloat)_mm_max_ps((__m128)x, (__m128)best);
#else
    return select_lanes(x > best, x, best);
#endif
}

/* The smaller value per lane; `most` for a NaN in `x`. */
SMLA_INLINE vfloat
min_lanes(vfloat x, vfloat most)
{
#if defined(__AVX512F__) && SMLA_SIMD_WIDTH == 16
    return (vfloat)_mm512_min_ps((__m512)x, (__m512)most);
#elif defined(__AVX__) && SMLA_SIMD_WIDTH == 8
    return (vfloat)_mm256_min_ps((__m256)x, (__m256)most);
#elif defined(__SSE__) && SMLA_SIMD_WIDTH == 4
    return (vfloat)_mm_min_ps((__m128)x, (__m128)most);
#else
    return select_lanes(x < most, x, most);
#endif
}

/* 2^x for -127 <= x <= 127, error below 1 ulp; 0 where x rounds to -127. Exact for integers; NaN
 * for NaN. 2^x = 2^n * 2^f with n = round(x): the polynomial is minimax in relative error on
 * [-1/2, 1/2] (2^-28.9), with the constant term fixed to 1. */
SMLA_INLINE vfloat
exp2_in_range(vfloat x)
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
    /* Multiply instead of adding to the exponent field, so that NaN stays NaN. */
    const vfloat power = (vfloat)(((vuint)shifted << 23) + (127u << 23));
    return p * power;
}

/* 2^x for x <= 127; 0 below -126 and for -inf. */
SMLA_INLINE vfloat
exp2_lanes(vfloat x)
{
    return (vfloat)((vint)exp2_in_range(x) & ~(x < -126.0f));
}

/* The same by fewer instructions, except that results below 2^-126 are not 0 in SMLA_FP_EXACT. */
SMLA_INLINE vfloat
exp2_flushed(vfloat x)
{
    return exp2_in_range(max_lanes(x, splat(-127.0f)));
}

/* tanh(x), error below 2 ulp; NaN for NaN. The polynomial is that of Cephes; larger numbers take
 * (1 - t) / (1 + t) with t = e^(-2 |x|). */
SMLA_INLINE vfloat
tanh_lanes(vfloat x)
{
    const vuint sign = (vuint)x & 0x80000000u;
    const vfloat magnitude = (vfloat)((vuint)x ^ sign);
    const vfloat square = x * x;
    const vfloat power = exp2_lanes(magnitude * -0x1.715476p1f);
    const vfloat large = (1.0f - power) / (1.0f + power);
    vfloat p = square * -0x1.75e1d4p-8f + 0x1.52269cp-6f;
    p = p * square - 0x1.b83c5ap-5f;
    p = p * square + 0x1.110726p-3f;
    p = p * square - 0x1.555532p-2f;
    return select_lanes(magnitude < 0.625f, x + x * square * p, (vfloat)((vuint)large | sign));
}

/* An integer in [x, x + 1), or x itself where |x| >= 2^22, +-inf included. */
SMLA_INLINE vfloat
ceil_lanes(vfloat x)
{
    const float magic = 0x1.8p23f;
    const vfloat nearest = (x + magic) - magic;
    const vfloat up = nearest - (vfloat)((nearest < x) & (vint)splat(-1.0f));
    const vfloat magnitude = (vfloat)((vuint)x & 0x7FFFFFFFu);
    return select_lanes(magnitude < 0x1p22f, up, x);
}

/* ---- Small numbers ------------------------------------------------------------------------- */

/* Sums of products that would be subnormal are computed 2^64 times as large, in SMLA_FP_FLUSH. Rows
 * whose values are below SMLA_TINY are: their products with any number stay finite then. */
#define SMLA_TINY 0x1p-74f

/* x * 2^64, without arithmetic on subnormal numbers. Their bits count units of 2^-149. */
SMLA_INLINE vfloat
lift_lanes(vfloat x)
{
    const vuint magnitude = (vuint)x & 0x7FFFFFFFu;
    const vint is_subnormal = (vint)(magnitude < 0x00800000u);
    const vfloat count = __builtin_convertvector((vint)magnitude, vfloat) * 0x1p-85f;
    const vfloat subnormal = (vfloat)((vuint)count | ((vuint)x & 0x80000000u));
    const vfloat normal = (vfloat)((vint)x & ~is_subnormal) * 0x1p64f;
    return select_lanes(is_subnormal, subnormal, normal);
}

/* x * 2^-64, rounded once, to subnormal numbers too. The last bit of the sum is 2^-149 then. */
SMLA_INLINE vfloat
lower_lanes(vfloat x)
{
    const vuint sign = (vuint)x & 0x80000000u;
    const vfloat magnitude = (vfloat)((vuint)x ^ sign);
    const vuint count = (vuint)(magnitude * 0x1p85f + 0x1p23f) - 0x4B000000u; /* bits of 2^23 */
    return select_lanes(magnitude < 0x1p-62f, (vfloat)(count | sign), x * 0x1p-64f);
}

/* ---- bf16 ---------------------------------------------------------------------------------- */

typedef uint16_t vhalf __attribute__((vector_size(2 * SMLA_SIMD_WIDTH), may_alias, aligned(2)));

/* smla_float_to_bf16 of every lane that is not NaN, in its upper half; the lower half is
 * anything. */
SMLA_INLINE vuint
round_finite(vfloat x)
{
    const vuint bits = (vuint)x;
    return bits + 0x7FFFu + (bits >> 16 & 1u);
}

/* smla_float_to_bf16 of every lane, in its upper half; the lower half is anything. */
SMLA_INLINE vuint
round_to_upper_half(vfloat x)
{
    const vuint quiet_nan = ((vuint)x & 0x80000000u) | 0x7FC00000u;
    return (vuint)select_lanes(x == x, (vfloat)round_finite(x), (vfloat)quiet_nan);
}

/* The same with zeros in the lower half. */
SMLA_INLINE vuint
round_upper_half(vfloat x)
{
    return round_to_upper_half(x) & 0xFFFF0000u;
}

/* The upper halves of `odd` beside those of `even`: the bf16 values even[0], odd[0], even[1] ... */
SMLA_INLINE vuint
join_upper_halves(vuint even, vuint odd)
{
    return even >> 16 | (odd & 0xFFFF0000u);
}

SMLA_INLINE vhalf
round_to_bf16(vfloat x)
{
    return __builtin_convertvector(round_upper_half(x) >> 16, vhalf);
}

/* ---- Interleaving and transposition -------------------------------------------------------- */

#if defined(__clang__)
#define SMLA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SMLA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vuint){__VA_ARGS__})
#endif

#if SMLA_SIMD_WIDTH == 16
#define SMLA_FIRST  0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SMLA_SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define SMLA_EVEN   0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define SMLA_ODD    1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif SMLA_SIMD_WIDTH == 8
#define SMLA_FIRST  0, 8, 1, 9, 2, 10, 3, 11
#define SMLA_SECOND 4, 12, 5, 13, 6, 14, 7, 15
#define SMLA_EVEN   0, 2, 4, 6, 8, 10, 12, 14
#define SMLA_ODD    1, 3, 5, 7, 9, 11, 13, 15
#else
#define SMLA_FIRST  0, 4, 1, 5
#define SMLA_SECOND 2, 6, 3, 7
#define SMLA_EVEN   0, 2, 4, 6
#define SMLA_ODD    1, 3, 5, 7
#endif

/* Interleaves the first halves of two vectors: a0 b0 a1 b1 ... */
SMLA_INLINE vuint
interleave_first(vuint a, vuint b)
{
    return SMLA_SHUFFLE(a, b, SMLA_FIRST);
}

SMLA_INLINE vuint
interleave_second(vuint a, vuint b)
{
    return SMLA_SHUFFLE(a, b, SMLA_SECOND);
}

/* Lanes 0, 2, 4 ... of `a` followed by `b`; with odd_lanes the inverse of interleaving. */
SMLA_INLINE vuint
even_lanes(vuint a, vuint b)
{
    return SMLA_SHUFFLE(a, b, SMLA_EVEN);
}

SMLA_INLINE vuint
odd_lanes(vuint a, vuint b)
{
    return SMLA_SHUFFLE(a, b, SMLA_ODD);
}

/* Transposes a WIDTH x WIDTH square. Interleaving rows i and i + WIDTH / 2 into rows 2i and 2i + 1
 * rotates the bits of an element's index (row, column) left by one. After log2(WIDTH) rotations row
 * and column are swapped. */
SMLA_INLINE void
transpose(vuint *square)
{
#pragma GCC unroll 4
    for (int step = 1; step < WIDTH; step *= 2) {
        vuint next[WIDTH];
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2; i++) {
            next[2 * i] = interleave_first(square[i], square[i + WIDTH / 2]);
            next[2 * i + 1] = interleave_second(square[i], square[i + WIDTH / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) {
            square[i] = next[i];
        }
    }
}
