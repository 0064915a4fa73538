/* narrow.h: converts bf16, fp16, e4m3 and e2m1 <-> fp32, a quad of four vectors at a time. Every
 * result is bit for bit that of numeric.h.
 *
 * 4 WIDTH values in a row are dealt out like cards: value 4 j + k goes to lane j of vector k. So
 * four e4m3 are the bytes of a 32-bit lane, two bf16 are its halves, and four e2m1 are a 16-bit
 * lane. Shifts replace widening and narrowing, which GCC 12 does byte by byte. Memory needs no
 * alignment.
 */
#pragma once

#include "core/numeric.h"
#include "cpu/machine/simd.h"

enum { QUAD = 4 * WIDTH };

typedef struct quad {
    vfloat v[4];
} quad;

typedef vuint vuint_unaligned __attribute__((aligned(1)));
typedef vhalf vhalf_unaligned __attribute__((aligned(1)));

SMLA_INLINE vuint
load_words(const void *memory, int index)
{
    return ((const vuint_unaligned *)memory)[index];
}

/* Notes in the upper bit of each half that a bf16 value is above 2^64, infinite or NaN. Kernels in
 * SMLA_FP_FLUSH leave such values to SMLA_FP_EXACT, because their products with numbers that would
 * be flushed may matter. */
SMLA_INLINE vuint
note_huge(vuint noted, vuint words)
{
    return noted | ((words & 0x7FFF7FFFu) + 0x207F207Fu);
}

/* note_huge for values that are no NaN. */
SMLA_INLINE vuint
note_huge_number(vuint noted, vuint words)
{
    const vuint magnitudes = words & 0x7FFF7FFFu;
    return noted | ((magnitudes + 0x207F207Fu) & ~(magnitudes + 0x007F007Fu));
}

/* note_huge for bf16 values that are subnormal instead of huge. */
SMLA_INLINE vuint
note_subnormal(vuint noted, vuint words)
{
    const vuint magnitudes = words & 0x7FFF7FFFu;
    return noted | ((magnitudes + 0x7FFF7FFFu) & ~(magnitudes + 0x7F807F80u));
}

SMLA_INLINE bool
has_noted(vuint noted)
{
    return has_lane((vint)(noted | noted << 16) >> 31);
}

SMLA_INLINE void
store_words(vuint words, void *memory, int index)
{
    ((vuint_unaligned *)memory)[index] = words;
}

/* ---- Parts of vectors ---------------------------------------------------------------------- */

/* The ends of rows are loaded and stored without a copy in memory: a vector's load would wait until
 * the smaller stores before it are in the cache. `bytes` is even. */

#if defined(__AVX512BW__) && SMLA_SIMD_WIDTH == 16

SMLA_INLINE __mmask32
mask_of_part(int64_t bytes)
{
    return (__mmask32)(bytes >= 4 * WIDTH ? UINT32_MAX : (1u << (bytes > 0 ? bytes / 2 : 0)) - 1u);
}

/* The first `bytes` bytes of a vector, and zeros. No byte behind them is read. */
SMLA_INLINE vuint
load_part_of_words(const void *memory, int64_t bytes)
{
    return (vuint)_mm512_maskz_loadu_epi16(mask_of_part(bytes), memory);
}

SMLA_INLINE void
store_part_of_words(vuint words, void *memory, int64_t bytes)
{
    _mm512_mask_storeu_epi16(memory, mask_of_part(bytes), (__m512i)words);
}

#else

typedef uint16_t any_half __attribute__((may_alias, aligned(1)));
typedef uint32_t any_word __attribute__((may_alias, aligned(1)));
typedef uint64_t any_long __attribute__((may_alias, aligned(1)));

/* Up to 8 bytes. All offsets are constants, because GCC 12 loses the last two bytes of 4 if a
 * copy's place depends on `bytes`. */
SMLA_INLINE uint64_t
load_few_bytes(const uint8_t *memory, int64_t bytes)
{
    if (bytes >= 8) {
        return *(const any_long *)memory;
    }
    if (bytes >= 4) {
        const uint64_t word = *(const any_word *)memory;
        return bytes == 4 ? word : word | (uint64_t)*(const any_half *)(memory + 4) << 32;
    }
    return bytes == 2 ? *(const any_half *)memory : 0;
}

SMLA_INLINE void
store_few_bytes(uint64_t all, uint8_t *memory, int64_t bytes)
{
    if (bytes >= 8) {
        *(any_long *)memory = all;
        return;
    }
    if (bytes >= 4) {
        *(any_word *)memory = (uint32_t)all;
        memory += 4;
        all >>= 32;
    }
    if (bytes == 2 || bytes == 6) {
        *(any_half *)memory = (uint16_t)all;
    }
}

typedef uint64_t vlong __attribute__((vector_size(4 * SMLA_SIMD_WIDTH), may_alias));

/* The first `bytes` bytes of a vector, and zeros. No byte behind them is read. */
SMLA_INLINE vuint
load_part_of_words(const void *memory, int64_t bytes)
{
    vlong parts;
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH / 2; i++) {
        const int at = 8 * i; /* a pointer behind the end would not be valid */
        parts[i] = at < bytes ? load_few_bytes((const uint8_t *)memory + at, bytes - at) : 0;
    }
    return (vuint)parts;
}

SMLA_INLINE void
store_part_of_words(vuint words, void *memory, int64_t bytes)
{
    const vlong parts = (vlong)words;
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH / 2; i++) {
        const int at = 8 * i;
        if (at < bytes) {
            store_few_bytes(parts[i], (uint8_t *)memory + at, bytes - at);
        }
    }
}

#endif

/* ---- Lanes --------------------------------------------------------------------------------- */

/* Widens a finite float to fp32. It lies at the top of the lane: sign 0, then `exponent_bits`. A
 * subnormal is read with an implicit one, as 2^-bias (1 + m), and corrected to 2^(1 - bias) m. This
 * uses no subnormal fp32, which would cost an assist on many cores. */
SMLA_INLINE vuint
widen_magnitude(vuint magnitude, const int exponent_bits)
{
    const uint32_t bias = (1u << (exponent_bits - 1)) - 1u;
    const vint is_subnormal = (vint)magnitude < 1 << (31 - exponent_bits);
    const vfloat normal = (vfloat)((magnitude >> (8 - exponent_bits)) + ((127u - bias) << 23));
    const vfloat subnormal = normal * 2.0f - (vfloat)splat_bits((128u - bias) << 23);
    return (vuint)select_lanes(is_subnormal, subnormal, normal);
}

/* The upper byte of every lane, times `scale`. A NaN byte gives its own NaN even if `scale` is NaN:
 * which of two NaNs a product returns depends on the compiler. */
SMLA_INLINE vfloat
e4m3_to_float(vuint x, vfloat scale)
{
    const vuint magnitude = x & 0x7F000000u;
    const vuint sign = x & 0x80000000u;
    const vint is_nan = magnitude == 0x7F000000u;
    const vfloat value = (vfloat)(widen_magnitude(magnitude, 4) | sign);
    return select_lanes(is_nan, (vfloat)(sign | 0x7FC00000u), value * scale);
}

/* The upper four bits of every lane. */
SMLA_INLINE vfloat
e2m1_to_float(vuint x)
{
    return (vfloat)(widen_magnitude(x & 0x70000000u, 2) | (x & 0x80000000u));
}

/* The upper half of every lane. */
SMLA_INLINE vfloat
half_to_float(vuint x)
{
    const vuint magnitude = x & 0x7FFF0000u;
    const vuint is_special = (vuint)((vint)magnitude >= 0x7C000000); /* inf, NaN */
    const vuint special = is_special & 0x7F800000u;
    return (vfloat)(widen_magnitude(magnitude, 5) | special | (x & 0x80000000u));
}

SMLA_INLINE vfloat
bf16_to_float(vuint x)
{
    return (vfloat)(x & 0xFFFF0000u);
}

/* The code of |x| in a format with `mantissa_bits` whose largest value is `top` and whose smallest
 * normal one is `least`; that of `top` for NaN. For an x of exponent e, the sum with 2^(e + shift)
 * is rounded to nearest even in units of 2^(e - mantissa_bits), and ends in their number. Values
 * below `least` have its exponent. */
SMLA_INLINE vuint
round_magnitude(vfloat x, float top, float least, const int mantissa_bits)
{
    const uint32_t shift = 23u - (uint32_t)mantissa_bits;
    const vfloat clamped = min_lanes((vfloat)((vuint)x & 0x7FFFFFFFu), splat(top));
    const vuint exponent = (vuint)max_lanes(splat(least), (vfloat)((vuint)clamped & 0x7F800000u));
    const vuint sum = (vuint)(clamped + (vfloat)(exponent + (shift << 23)));
    return (sum - exponent) + (exponent >> shift) -
           ((shift << 23) + (smla_float_bits(least) >> shift));
}

/* The result is the lowest byte of each lane. */
SMLA_INLINE vuint
round_to_e4m3(vfloat x)
{
    const vuint code = round_magnitude(x, SMLA_E4M3_MAX, 0x1p-6f, 3);
    const vuint is_nan = (vuint)(x != x);
    return (code - is_nan) | ((vuint)x >> 24 & 0x80u); /* NaN has the code behind that of 448 */
}

/* The codes of numbers from 2^-6 to 448. fp32 has 20 bits of mantissa more, and another bias. */
SMLA_INLINE vuint
round_normal_to_e4m3(vfloat x)
{
    const vuint is_odd = (vuint)x >> 20 & 1u;
    return (((vuint)x + 0x7FFFFu + is_odd) >> 20) - (120u << 3);
}

/* The result is the lowest four bits of each lane. A NaN has the code of 6, whatever its sign. */
SMLA_INLINE vuint
round_to_e2m1(vfloat x)
{
    const vuint code = round_magnitude(x, SMLA_E2M1_MAX, 1.0f, 1);
    return code | ((vuint)x >> 28 & 8u & (vuint)(x == x));
}

/* smla_float_to_half of every lane: the lower half. */
SMLA_INLINE vuint
round_to_half(vfloat x)
{
    const vuint sign = (vuint)x >> 16 & 0x8000u;
    const vuint magnitude = (vuint)x & 0x7FFFFFFFu;
    const vuint special = 0x7C00u | ((vuint)(magnitude > 0x7F800000u) & 0x0200u);
    const vuint subnormal = (vuint)((vfloat)magnitude + 0.5f) - 0x3F000000u;
    const vuint normal = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    const vuint finite =
        (vuint)select_lanes((vint)(magnitude < 0x38800000u), (vfloat)subnormal, (vfloat)normal);
    return sign |
           (vuint)select_lanes((vint)(magnitude >= 0x477FF000u), (vfloat)special, (vfloat)finite);
}

/* ---- Duos ---------------------------------------------------------------------------------- */

/* 2 WIDTH values in a row, the even ones in one vector and the odd ones in another: bf16 values
 * become a duo, and a duo becomes bf16, without moving between lanes. */
enum { DUO = 2 * WIDTH };

typedef struct duo {
    vfloat even;
    vfloat odd;
} duo;

SMLA_INLINE duo
bf16_to_duo(vuint words)
{
    return (duo){(vfloat)(words << 16), bf16_to_float(words)};
}

SMLA_INLINE duo
fp16_to_duo(vuint words)
{
    return (duo){half_to_float(words << 16), half_to_float(words)};
}

SMLA_INLINE duo
float_to_duo(vuint first, vuint second)
{
    return (duo){(vfloat)even_lanes(first, second), (vfloat)odd_lanes(first, second)};
}

SMLA_INLINE duo
load_bf16_duo(const void *halves)
{
    return bf16_to_duo(load_words(halves, 0));
}

SMLA_INLINE duo
load_fp16_duo(const void *halves)
{
    return fp16_to_duo(load_words(halves, 0));
}

SMLA_INLINE duo
load_float_duo(const void *floats)
{
    return float_to_duo(load_words(floats, 0), load_words(floats, 1));
}

SMLA_INLINE void
store_float_duo(duo x, void *floats)
{
    store_words(interleave_first((vuint)x.even, (vuint)x.odd), floats, 0);
    store_words(interleave_second((vuint)x.even, (vuint)x.odd), floats, 1);
}

/* ---- Quads --------------------------------------------------------------------------------- */

SMLA_INLINE quad
load_e4m3_by(const void *bytes, vfloat scale)
{
    const vuint x = load_words(bytes, 0);
    return (quad){{e4m3_to_float(x << 24, scale), e4m3_to_float(x << 16, scale),
                   e4m3_to_float(x << 8, scale), e4m3_to_float(x, scale)}};
}

SMLA_INLINE quad
load_e4m3(const void *bytes, float scale)
{
    return load_e4m3_by(bytes, splat(scale));
}

SMLA_INLINE quad
load_e2m1_by(const void *bytes, vfloat scale)
{
    const vuint x = __builtin_convertvector(*(const vhalf_unaligned *)bytes, vuint);
    return (quad){{e2m1_to_float(x << 28) * scale, e2m1_to_float(x << 24) * scale,
                   e2m1_to_float(x << 20) * scale, e2m1_to_float(x << 16) * scale}};
}

/* The values of two duos in a row. */
SMLA_INLINE quad
join_duos(duo first, duo second)
{
    const vuint even[2] = {(vuint)first.even, (vuint)second.even};
    const vuint odd[2] = {(vuint)first.odd, (vuint)second.odd};
    return (quad){{(vfloat)even_lanes(even[0], even[1]), (vfloat)even_lanes(odd[0], odd[1]),
                   (vfloat)odd_lanes(even[0], even[1]), (vfloat)odd_lanes(odd[0], odd[1])}};
}

SMLA_INLINE quad
load_half(const void *halves)
{
    const vuint even = even_lanes(load_words(halves, 0), load_words(halves, 1));
    const vuint odd = odd_lanes(load_words(halves, 0), load_words(halves, 1));
    return (quad){{half_to_float(even << 16), half_to_float(even), half_to_float(odd << 16),
                   half_to_float(odd)}};
}

SMLA_INLINE quad
load_bf16(const void *halves)
{
    const vuint even = even_lanes(load_words(halves, 0), load_words(halves, 1));
    const vuint odd = odd_lanes(load_words(halves, 0), load_words(halves, 1));
    return (quad){{bf16_to_float(even << 16), bf16_to_float(even), bf16_to_float(odd << 16),
                   bf16_to_float(odd)}};
}

SMLA_INLINE quad
load_float(const void *floats)
{
    return join_duos(load_float_duo(floats),
                     load_float_duo((const uint8_t *)floats + DUO * sizeof(float)));
}

SMLA_INLINE void
store_e4m3(quad x, void *bytes)
{
    store_words(round_to_e4m3(x.v[0]) | round_to_e4m3(x.v[1]) << 8 | round_to_e4m3(x.v[2]) << 16 |
                    round_to_e4m3(x.v[3]) << 24,
                bytes, 0);
}

SMLA_INLINE void
store_e2m1(quad x, void *bytes)
{
    const vuint words = round_to_e2m1(x.v[0]) | round_to_e2m1(x.v[1]) << 4 |
                        round_to_e2m1(x.v[2]) << 8 | round_to_e2m1(x.v[3]) << 12;
    *(vhalf_unaligned *)bytes = __builtin_convertvector(words, vhalf);
}

SMLA_INLINE void
store_bf16(quad x, void *halves)
{
    const vuint first = join_upper_halves(round_to_upper_half(x.v[0]), round_to_upper_half(x.v[1]));
    const vuint second =
        join_upper_halves(round_to_upper_half(x.v[2]), round_to_upper_half(x.v[3]));
    store_words(interleave_first(first, second), halves, 0);
    store_words(interleave_second(first, second), halves, 1);
}

SMLA_INLINE void
store_float(quad x, void *floats)
{
    const vuint even[2] = {interleave_first((vuint)x.v[0], (vuint)x.v[2]),
                           interleave_second((vuint)x.v[0], (vuint)x.v[2])};
    const vuint odd[2] = {interleave_first((vuint)x.v[1], (vuint)x.v[3]),
                          interleave_second((vuint)x.v[1], (vuint)x.v[3])};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        store_words(interleave_first(even[i], odd[i]), floats, 2 * i);
        store_words(interleave_second(even[i], odd[i]), floats, 2 * i + 1);
    }
}
