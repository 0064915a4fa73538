/* bytes_avx2.h: converts rows of e4m3 from and to fp32 with the fp16 conversions of machines that
 * have AVX2 (F16C), and rows of e2m1, 32 values at a time. The callers leave other values than
 * ordinary ones to narrow.h.
 *
 * An e4m3 value times 2^-8 is an fp16 value whose bits are those of the e4m3 code, apart:
 *
 *   e4m3   s eeee mmm           fp16   s 0 eeee mmm 0000000
 *
 * That holds for subnormal codes, too, because both exponents then end at the same place. So the
 * processor's conversion does what narrow.h computes with ten instructions. Normal e4m3 values
 * that are bf16 values times a power of two need no conversion (store_normal_e4m3).
 */
#pragma once

#include <stdbool.h>

#include "cpu/machine/narrow.h"

#if defined(__F16C__) && SMLA_SIMD_WIDTH == 8
#define SMLA_HAVE_BYTES 1

/* Powers of two between which the numbers of a row must be to be ordinary. Then no product of them
 * overflows, and none that matters is subnormal. */
#define SMLA_ORDINARY_MAX   0x1p100f
#define SMLA_ORDINARY_LEAST 0x1p-50f

SMLA_INLINE vuint
max_words(vuint a, vuint b)
{
    return (vuint)_mm256_max_epu32((__m256i)a, (__m256i)b);
}

/* ---- fp32 to e4m3 -------------------------------------------------------------------------- */

/* The larger magnitude of the two bf16 values in each lane, as bits of fp32. A NaN is larger than
 * anything. */
SMLA_INLINE vuint
find_magnitudes(vuint halves)
{
    const vuint magnitudes = halves & 0x7FFF7FFFu;
    return max_words(magnitudes << 16, magnitudes & 0xFFFF0000u);
}

/* The magnitudes of 16 bf16 values. */
SMLA_INLINE __m256i
load_magnitudes(const void *halves, int i)
{
    return (__m256i)(load_words(halves, i) & 0x7FFF7FFFu);
}

/* The largest magnitudes among `count` bf16 values in a row: lane i has that of values i, i + 16,
 * i + 32 and so on. */
SMLA_INLINE __m256i
find_largest_halves(const void *halves, int count)
{
    __m256i largest = load_magnitudes(halves, 0);
#pragma GCC unroll 8
    for (int i = 1; i < count / DUO; i++) {
        largest = _mm256_max_epi16(largest, load_magnitudes(halves, i));
    }
    return largest;
}

/* find_largest_halves with the larger half of each 32-bit lane, as bits of fp32. */
SMLA_INLINE vuint
find_largest_magnitudes(const void *halves, int count)
{
    return find_magnitudes((vuint)find_largest_halves(halves, count));
}

/* The larger of values i and i + 4 in each lane of 128 bits, interleaved: one of `a`, one of `b`,
 * and so on. */
SMLA_INLINE __m256i
fold_halves(__m256i a, __m256i b)
{
    return _mm256_max_epi16(_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
}

/* The largest of 16 magnitudes of bf16, in each of eight vectors, as fp32 in order. */
SMLA_INLINE vfloat
fold_eight_halves(const __m256i *x)
{
    __m256i pairs[4]; /* pair i has the results of vectors i and i + 4 */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        pairs[i] = fold_halves(x[i], x[i + 4]);
    }
    const __m256i all =
        fold_halves(fold_halves(pairs[0], pairs[2]), fold_halves(pairs[1], pairs[3]));
    const __m128i largest =
        _mm_max_epi16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    return (vfloat)((vuint)_mm256_cvtepu16_epi32(largest) << 16);
}

/* The largest of 16 magnitudes of bf16, as fp32 in lane 0; the others are zero. */
SMLA_INLINE vfloat
fold_one_half(__m256i x)
{
    const __m128i largest =
        _mm_max_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i rest = _mm_minpos_epu16(_mm_xor_si128(largest, _mm_set1_epi16(-1)));
    const uint32_t bits = ~(uint32_t)_mm_cvtsi128_si32(rest) << 16;
    return (vfloat)_mm256_zextsi128_si256(_mm_cvtsi32_si128((int)bits));
}

SMLA_INLINE __m256i
narrow_to_fp16(vfloat first, vfloat second)
{
    return _mm256_set_m128i(_mm256_cvtps_ph((__m256)second, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph((__m256)first, _MM_FROUND_TO_NEAREST_INT));
}

/* The fp16 values of even and odd lanes -> the bytes of their codes, in order. The bits of a code's
 * magnitude move left by one when they are added to themselves. */
SMLA_INLINE void
store_codes(__m256i even, __m256i odd, void *bytes)
{
    const __m256i magnitude = _mm256_set1_epi16(0x7F80);
    even = _mm256_add_epi16(even, _mm256_and_si256(even, magnitude));
    odd = _mm256_add_epi16(odd, _mm256_and_si256(odd, magnitude));
    const __m256i is_odd = _mm256_set1_epi16((short)0xFF00);
    const __m256i codes = _mm256_blendv_epi8(_mm256_srli_epi16(even, 8), odd, is_odd);
    _mm256_storeu_si256(bytes, codes);
}

/* Rounds fp16 values to the three bits of mantissa that e4m3 has. Values below 2^-17 are multiples
 * of the smallest fp16, and so of e4m3's units. */
SMLA_INLINE __m256i
round_fp16(__m256i x)
{
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi16(x, 7), one);
    return _mm256_add_epi16(x, _mm256_add_epi16(is_odd, _mm256_set1_epi16(0x3F)));
}

/* Times a factor 2^n, this is the factor that store_exact_e4m3 takes. A bf16 value times 2^(n - 8)
 * has 8 bits of mantissa, which fp16 holds, but for values of less than half of e4m3's smallest
 * number, and their doubles. The 2^-12 makes those that lie behind the middle of two numbers be
 * rounded up. It never changes how another value is rounded, because it is less than half of fp16's
 * last bit. */
#define SMLA_EXACT_FACTOR (0x1p-8f * (1.0f + 0x1p-12f))

/* 32 bf16 values times a power of two, at most 448, as e4m3. */
SMLA_INLINE void
store_exact_e4m3(const void *halves, float exact_factor, void *bytes)
{
    const duo first = load_bf16_duo(halves);
    const duo second = load_bf16_duo((const uint8_t *)halves + sizeof(vuint));
    const __m256i even = narrow_to_fp16(first.even * exact_factor, second.even * exact_factor);
    const __m256i odd = narrow_to_fp16(first.odd * exact_factor, second.odd * exact_factor);
    store_codes(round_fp16(even), round_fp16(odd), bytes);
}

/* The codes of 16 bf16 values times a power of two, one in each 16-bit word, without signs. A bf16
 * value and the code of a normal e4m3 value have the same form: an exponent, and bits of mantissa
 * behind it. So four bits are rounded away, and the exponents' difference is subtracted. */
SMLA_INLINE __m256i
round_to_normal_codes(__m256i magnitude, __m256i difference)
{
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi16(magnitude, 4), one);
    const __m256i most = _mm256_add_epi16(magnitude, _mm256_set1_epi16(7));
    const __m256i rounded = _mm256_srli_epi16(_mm256_add_epi16(most, is_odd), 4);
    return _mm256_subs_epu16(rounded, difference); /* 0 stays 0 */
}

/* `count` bf16 values times 2^exponent, at most 448, as e4m3. Returns false, and has written
 * nothing, unless each is zero or a normal number of e4m3: 2^-6 or more. */
SMLA_INLINE bool
store_normal_e4m3(const void *halves, int count, int exponent, void *bytes)
{
    const int bias = 120 - exponent; /* 127 of bf16, 7 of e4m3 */
    const __m256i least = _mm256_set1_epi16((short)(((bias + 1) << 7) - 1));
    const __m256i difference = _mm256_set1_epi16((short)(bias << 3));
    __m256i smallest = _mm256_set1_epi16(-1); /* less one, so that zero is the largest */
#pragma GCC unroll 8
    for (int i = 0; i < count / DUO; i++) {
        const __m256i less = _mm256_add_epi16(load_magnitudes(halves, i), _mm256_set1_epi16(-1));
        smallest = _mm256_min_epu16(smallest, less);
    }
    const __m256i is_normal = _mm256_cmpeq_epi16(_mm256_min_epu16(smallest, least), least);
    if (_mm256_movemask_epi8(is_normal) != -1) {
        return false;
    }
#pragma GCC unroll 4
    for (int i = 0; i < count / QUAD; i++) {
        const __m256i first = round_to_normal_codes(load_magnitudes(halves, 2 * i), difference);
        const __m256i second =
            round_to_normal_codes(load_magnitudes(halves, 2 * i + 1), difference);
        /* Saturation keeps the signs. */
        const __m256i signs = _mm256_packs_epi16((__m256i)load_words(halves, 2 * i),
                                                 (__m256i)load_words(halves, 2 * i + 1));
        const __m256i codes =
            _mm256_or_si256(_mm256_packus_epi16(first, second),
                            _mm256_and_si256(signs, _mm256_set1_epi8((char)0x80)));
        store_words((vuint)_mm256_permute4x64_epi64(codes, 0xD8), bytes, i);
    }
    return true;
}

/* `count` bf16 values times a power of two, at most 448, as e4m3. */
SMLA_INLINE void
store_all_exact_e4m3(const void *halves, int count, float power, void *bytes)
{
    for (int i = 0; i < count; i += QUAD) {
        store_exact_e4m3((const uint16_t *)halves + i, power * SMLA_EXACT_FACTOR,
                         (uint8_t *)bytes + i);
    }
}

/* The same for values of which most are normal. */
SMLA_INLINE void
store_products_e4m3(const void *halves, int count, float power, void *bytes)
{
    const int exponent = (int)(smla_float_bits(power) >> 23) - 127;
    if (!store_normal_e4m3(halves, count, exponent, bytes)) {
        store_all_exact_e4m3(halves, count, power, bytes);
    }
}

/* Rounds x >= 0 to an e4m3 value times 2^-8. The ulp of the sum is the distance of the e4m3 values
 * near x. */
SMLA_INLINE vfloat
round_magnitude_scaled(vfloat x)
{
    const vuint exponent = max_words((vuint)x & 0x7F800000u, splat_bits((127u - 14u) << 23));
    const vfloat magic = (vfloat)(exponent + (20u << 23));
    return (x + magic) - magic;
}

SMLA_INLINE vfloat
round_scaled(vfloat x)
{
    const vuint sign = (vuint)x & 0x80000000u;
    return (vfloat)((vuint)round_magnitude_scaled((vfloat)((vuint)x ^ sign)) | sign);
}

/* 32 values times 2^-8, at most 448 before that, as e4m3. */
SMLA_INLINE void
store_scaled_e4m3(duo first, duo second, void *bytes)
{
    store_codes(narrow_to_fp16(round_scaled(first.even), round_scaled(second.even)),
                narrow_to_fp16(round_scaled(first.odd), round_scaled(second.odd)), bytes);
}

/* x / divisor, rounded once, from `inverse`, the rounded 1 / divisor. The second step corrects the
 * first. For x of bf16 that gives the rounded quotient of all significands, which was tried. A
 * division takes four times as long. A zero is positive. */
SMLA_INLINE vfloat
divide_by(vfloat x, float divisor, float inverse)
{
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256 quotient = (__m256)(x * inverse);
    const __m256 rest = _mm256_fnmadd_ps(quotient, _mm256_set1_ps(divisor), (__m256)x);
    return (vfloat)_mm256_fmadd_ps(rest, by, quotient);
}

/* 32 bf16 values, divided by `divisor`, as e4m3. The quotients are 2^-8 times numbers of at most
 * 448. */
SMLA_INLINE void
store_quotients_e4m3(const void *halves, float divisor, float inverse, void *bytes)
{
    const vuint words[2] = {load_words(halves, 0), load_words(halves, 1)};
    vfloat even[2];
    vfloat odd[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const vuint magnitude = words[i] & 0x7FFF7FFFu;
        even[i] = divide_by((vfloat)(magnitude << 16), divisor, inverse);
        odd[i] = divide_by((vfloat)(magnitude & 0xFFFF0000u), divisor, inverse);
        even[i] = round_magnitude_scaled(even[i]);
        odd[i] = round_magnitude_scaled(odd[i]);
    }
    /* Saturation keeps the signs of the 16-bit words, in another order. */
    const __m256i packed = _mm256_packs_epi16((__m256i)words[0], (__m256i)words[1]);
    const vuint signs = (vuint)_mm256_permute4x64_epi64(packed, 0xD8) & 0x80808080u;
    const __m256i even_codes = _mm256_srli_epi16(narrow_to_fp16(even[0], even[1]), 7);
    const __m256i odd_codes = _mm256_slli_epi16(narrow_to_fp16(odd[0], odd[1]), 1);
    store_words((vuint)_mm256_or_si256(even_codes, odd_codes) | signs, bytes, 0);
}

/* The largest lane of each of four vectors without NaN. */
SMLA_INLINE __m128
fold_four(const vfloat *x)
{
    __m128 half[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        half[i] = _mm_max_ps(_mm256_castps256_ps128((__m256)x[i]),
                             _mm256_extractf128_ps((__m256)x[i], 1));
    }
    const __m128 first = _mm_max_ps(_mm_unpacklo_ps(half[0], half[1]), /* 0 1 0 1 */
                                    _mm_unpackhi_ps(half[0], half[1]));
    const __m128 second = _mm_max_ps(_mm_unpacklo_ps(half[2], half[3]), /* 2 3 2 3 */
                                     _mm_unpackhi_ps(half[2], half[3]));
    return _mm_max_ps(_mm_movelh_ps(first, second), _mm_movehl_ps(second, first));
}

/* ---- fp32 to e2m1 -------------------------------------------------------------------------- */

/* Factors of store_e2m1_by have this number in them, which makes rounding to even a comparison.
 * The middles of neighbouring e2m1 values have the mantissas 1, 1.25, 1.5 and 1.75. A quotient in
 * the middle goes down at 1 and 1.25, and up at 1.5 and 1.75. When it has grown by 0.0057 of its
 * size, its mantissa is less than 1/128 above the first two, and more than 1/128 above the others.
 * A quotient of a bf16 value by a number of four bits that is not the middle is further from it
 * than 2^-8 of its size, so it stays on its side of that limit. From 0.0053 to 0.0062 all of this
 * holds, which leaves room for the rounding of factors and products. */
#define SMLA_E2M1_FACTOR 1.0057f

/* Products of values and factors fall into bins by the upper half of their bits. Bin 0 is what
 * rounds to zero, from 1/4 down; each bin after it is a quarter of a power of two: 1 to 4 up to
 * 1/2, 5 to 8 up to 1. Bin 1 begins at the next bf16 after 1/4, which is 0x3E80, and a bin has 0x20
 * of them. Bins 1 to 6 have code 1, bins from 18 on code 7. Products are below 10, so no bin is
 * above 31. */
enum { E2M1_BIN_0 = 0x3E81 - 0x20 };

#if defined(__AVX512BW__)
/* 32 bf16 values as e2m1, the first 16 times one factor and the others times another. */
SMLA_INLINE void
store_e2m1_by(const void *halves, float first_factor, float second_factor, void *bytes)
{
    const __m512i words = _mm512_loadu_si512(halves);
    const __m512 factors =
        _mm512_mask_broadcastss_ps(_mm512_set1_ps(first_factor), 0xFF00, _mm_set_ss(second_factor));
    const __m512i magnitudes = _mm512_and_si512(words, _mm512_set1_epi32(0x7FFF7FFF));
    const __m512i odd_bits = _mm512_and_si512(words, _mm512_set1_epi32(0x7FFF0000));
    const __m512 even = _mm512_mul_ps((__m512)_mm512_slli_epi32(magnitudes, 16), factors);
    const __m512 odd = _mm512_mul_ps((__m512)odd_bits, factors);
    const __m512i products =
        _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32((__m512i)even, 16), (__m512i)odd);
    const __m512i bins =
        _mm512_srli_epi16(_mm512_subs_epu16(products, _mm512_set1_epi16(E2M1_BIN_0)), 5);
    const __m512i code_of_bin =
        _mm512_set_epi16(7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 6, 6, /* bins 31 to 16 */
                         5, 5, 4, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0);
    const __m512i signs = _mm512_and_si512(_mm512_srli_epi16(words, 12), _mm512_set1_epi16(8));
    const __m512i codes = _mm512_or_si512(_mm512_permutexvar_epi16(bins, code_of_bin), signs);
    const __m512i pairs = _mm512_or_si512(codes, _mm512_srli_epi32(codes, 12));
    _mm_storeu_si128(bytes, _mm512_cvtepi32_epi8(pairs));
}
#else
/* The bins of 16 bf16 values times a factor, in 16-bit words. */
SMLA_INLINE __m256i
find_e2m1_bins(const void *halves, int i, float factor)
{
    const vuint magnitudes = load_words(halves, i) & 0x7FFF7FFFu;
    const vuint even = (vuint)((vfloat)(magnitudes << 16) * factor) >> 16;
    const vuint odd = (vuint)((vfloat)(magnitudes & 0xFFFF0000u) * factor);
    const __m256i products = _mm256_blend_epi16((__m256i)even, (__m256i)odd, 0xAA);
    return _mm256_srli_epi16(_mm256_subs_epu16(products, _mm256_set1_epi16(E2M1_BIN_0)), 5);
}

/* The codes of the magnitudes in 32 bins. The table begins with bin 3. */
SMLA_INLINE __m256i
find_e2m1_codes(__m256i bins)
{
    const __m256i codes =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7));
    const __m256i place =
        _mm256_min_epu8(_mm256_subs_epu8(bins, _mm256_set1_epi8(3)), _mm256_set1_epi8(15));
    const __m256i is_code = _mm256_min_epu8(bins, _mm256_set1_epi8(1));
    return _mm256_max_epu8(_mm256_shuffle_epi8(codes, place), is_code);
}

/* 32 bf16 values as e2m1, the first 16 times one factor and the others times another. */
SMLA_INLINE void
store_e2m1_by(const void *halves, float first_factor, float second_factor, void *bytes)
{
    const __m256i bins = _mm256_packus_epi16(find_e2m1_bins(halves, 0, first_factor),
                                             find_e2m1_bins(halves, 1, second_factor));
    /* Saturation keeps the signs. */
    const __m256i packed =
        _mm256_packs_epi16((__m256i)load_words(halves, 0), (__m256i)load_words(halves, 1));
    const __m256i signs = _mm256_and_si256(_mm256_srli_epi16(packed, 4), _mm256_set1_epi8(8));
    const __m256i codes = _mm256_or_si256(find_e2m1_codes(bins), signs);
    /* The weights of a pair of codes are 1 and 16. */
    const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
    const __m128i joined =
        _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128(bytes, _mm_shuffle_epi32(joined, 0xD8));
}
#endif

/* ---- fp32 and fp16 to bf16 ----------------------------------------------------------------- */

/* 16 values as bf16. */
SMLA_INLINE void
store_sixteen_bf16(vfloat first, vfloat second, void *halves)
{
    const __m256i words = _mm256_packus_epi32((__m256i)(round_to_upper_half(first) >> 16),
                                              (__m256i)(round_to_upper_half(second) >> 16));
    store_words((vuint)_mm256_permute4x64_epi64(words, 0xD8), halves, 0);
}

SMLA_INLINE vfloat
widen_fp16(__m128i x)
{
    return (vfloat)_mm256_cvtph_ps(x);
}

SMLA_INLINE vfloat
load_eight_fp16(const void *halves)
{
    return widen_fp16(_mm_loadu_si128(halves));
}

/* ---- e2m1 to bf16 -------------------------------------------------------------------------- */

/* The products of two scales and the magnitudes of e2m1, for write_e2m1_products: in each half, the
 * lower bytes of eight bf16 values, and then their upper bytes. A product of two or four bits of
 * mantissa with two is exact. */
SMLA_INLINE __m256i
make_e2m1_tables(float first, float second)
{
    const vfloat magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const __m256i words = _mm256_packus_epi32((__m256i)((vuint)(magnitudes * first) >> 16),
                                              (__m256i)((vuint)(magnitudes * second) >> 16));
    const __m256i bytes_apart =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, /* the lower bytes */
                                                  1, 3, 5, 7, 9, 11, 13, 15));
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(words, 0xD8), bytes_apart);
}

/* 32 e2m1 values times their scales, 16 of each, as bf16. */
SMLA_INLINE void
write_e2m1_products(const void *bytes, __m256i tables, void *halves)
{
    const __m128i codes = _mm_loadu_si128(bytes);
    const __m128i even = _mm_and_si128(codes, _mm_set1_epi8(0x0F));
    const __m128i odd = _mm_and_si128(_mm_srli_epi16(codes, 4), _mm_set1_epi8(0x0F));
    const __m256i x = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi8(7));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi8(8)), 4);
    const __m256i lower = _mm256_shuffle_epi8(tables, magnitude);
    const __m256i upper = _mm256_xor_si256(
        _mm256_shuffle_epi8(tables, _mm256_or_si256(magnitude, _mm256_set1_epi8(8))), sign);
    const __m256i first = _mm256_unpacklo_epi8(lower, upper);  /* values 0-7, 16-23 */
    const __m256i second = _mm256_unpackhi_epi8(lower, upper); /* values 8-15, 24-31 */
    store_words((vuint)_mm256_permute2x128_si256(first, second, 0x20), halves, 0);
    store_words((vuint)_mm256_permute2x128_si256(first, second, 0x31), halves, 1);
}

/* Eight e4m3 values. */
SMLA_INLINE vfloat
load_eight_e4m3(const uint8_t *bytes)
{
    const vuint codes = (vuint)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
    return e4m3_to_float(codes << 24, splat(1.0f));
}

/* ---- e4m3 to fp32 -------------------------------------------------------------------------- */

typedef struct duos {
    duo first;
    duo second;
} duos;

/* 32 e4m3 values times 2^-8. The codes of NaN give numbers. */
SMLA_INLINE duos
load_scaled_e4m3(const void *bytes)
{
    const __m256i codes = _mm256_set1_epi16((short)0xBF80);
    const __m256i x = _mm256_loadu_si256(bytes);
    const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 1), codes);
    const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(x, 1), codes);
    return (
        duos){{widen_fp16(_mm256_castsi256_si128(even)), widen_fp16(_mm256_castsi256_si128(odd))},
              {widen_fp16(_mm256_extracti128_si256(even, 1)),
               widen_fp16(_mm256_extracti128_si256(odd, 1))}};
}

/* Adds the codes of 32 bytes to the largest ones so far. */
SMLA_INLINE vuint
note_codes(vuint largest, const void *bytes)
{
    const __m256i codes = (__m256i)(load_words(bytes, 0) & 0x7F7F7F7Fu);
    return (vuint)_mm256_max_epu8((__m256i)largest, codes);
}

SMLA_INLINE bool
has_nan_code(vuint largest)
{
    const __m256i nan = _mm256_set1_epi8(0x7F);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8((__m256i)largest, nan)) != 0;
}
#endif
