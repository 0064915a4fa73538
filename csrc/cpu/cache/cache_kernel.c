/* cache_kernel.c: writes and reads a cache row, quantises an array, for one instruction set.
 *
 * Computes     write     row_encoder.h
 *              read      row_decoder.h
 *              find_amax, quantize: the halves of `write`, for an array of any length and any scale
 *              multiply, raise_columns, finish_groups, multiply_columns: for scaled_quantize
 * Shapes       nope [512], rope [64], x [count] of bf16, fp16 or fp32, contiguous; a row as
 *              kv_format.h draws it; out [576] bf16 or fp32, or [count] bytes
 * Roofline     Memory binds, or the divider where values are divided: the 32 zmm divisions of a row
 *              take 57 ns. GB/s read and written by one Zen 5 core (CPU time, one thread, 256 rows
 *              in L2, 2026-11-20) with AVX-512, AVX2, SSE2. A copy moves 220 (50 for 32768 rows):
 *                write  bf16 -> fp8_ds_mla  13, 8.4, 4.3      fp32 -> fp8_ds_mla  17, 10, 6.0
 *                read   fp8_ds_mla -> bf16  25, 12, 5.7       fp8_ds_mla -> fp32  62, 32, 15
 *                quant  bf16                25, 12, 6.5       fp32                42, 19, 11
 *              Since 2026-11-23 values are rounded in fewer instructions: ns per row written from
 *              bf16, before and after, on a busy Zen 4 with AVX-512, AVX2, SSE2:
 *                fp8_ds_mla  196 -> 155, 205 -> 177, 414 -> 304
 *                fp8_v4      168 -> 125, 174 -> 151, 338 -> 245
 *                fp4_v41     204 -> 160, 216 -> 181, 485 -> 361
 *              Since 2026-11-24 AVX2 converts e4m3 by way of fp16 (bytes_avx2.h): ns per row on a
 *              Zen 3, written from bf16 and read to it, before and after:
 *                fp8_ds_mla  252 -> 154, 175 -> 82
 *                fp8_v4      213 -> 81, 168 -> 53
 *                fp8_index   79 -> 30, 47 -> 22
 *              Since 2026-11-25 normal values by powers of two are rounded as 16-bit integers, e2m1
 *              is read by shuffles of bytes, and fp32 and fp16 are rounded to bf16 first; ns per
 *              row of a call on one core of a Zen 3, its cache in L2, before and after:
 *                write, bf16  fp8_v4 97 -> 83, fp8_index 37 -> 29, fp8_e4m3 177 -> 88
 *                write, fp32  fp8_v4 371 -> 152, fp4_v41 417 -> 231, bfloat16 293 -> 98
 *                read         fp4_v41 223 -> 85
 *              Maxima of tiles are folded as 16-bit words since then, and e4m3 scales are rounded
 *              as integers: fp4_v41 163 -> 147, fp8_index 40 -> 31. A tensor of bf16 is quantised
 *              that way, too, maximum included: 6.6 -> 11.5 GB/s.
 *              e2m1 is rounded without a conversion since then: of 49 instructions for 32 values,
 *              28 for products and bins, 21 for codes and signs. On a Zen 4, before and after:
 *                fp4_v41 97 -> 84, mxfp4_index 28 -> 23
 *              Machines with AVX-512 take vectors of 8 lanes as well, which are 1.2 to 1.8 times as
 *              fast on a Sapphire Rapids as those of 16 (RESULTS.md), but e2m1 is rounded in 20
 *              instructions for 32 values: fp4_v41 83.4 -> 72.0 on a Zen 4.
 *              Tried: byte vectors of GCC 12, which converts them byte by byte, halve reads and
 *              AVX2. A write tile after tile waits for maximum, scale and broadcast: -30 %.
 * Numerics     Every byte is what the functions of numeric.h give, for every input: true divisions,
 *              NaN with its sign, infinities as FLT_MAX in amax. There are no sums, so no order
 *              matters. A NaN byte with a NaN scale gives the NaN of the byte.
 * Source       concat_and_cache_mla and cp_gather_and_upconvert_fp8_kv_cache of vLLM, for the
 *              formats.
 */
#define SMLA_SIMD_WIDTH SMLA_BYTE_LANES

#include <float.h>

#include "core/params_projection.h"
#include "cpu/cache/cache.h"
#include "cpu/cache/row_decoder.h"

/* ---- Arrays -------------------------------------------------------------------------------- */

SMLA_INLINE quad
divide_quad(quad x, float scale)
{
    return (quad){{x.v[0] / scale, x.v[1] / scale, x.v[2] / scale, x.v[3] / scale}};
}

#if defined(SMLA_HAVE_BYTES)
/* find_amax of bf16 values; -1 if a value is NaN. Reads `count` values, a multiple of QUAD. */
SMLA_INLINE float
find_amax_of_bf16(const uint8_t *values, int64_t count)
{
    __m256i largest = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += QUAD) {
        largest = _mm256_max_epi16(largest, find_largest_halves(values + 2 * i, QUAD));
    }
    const float amax = fold_one_half(largest)[0];
    return amax == amax ? smla_finite_abs(amax) : -1.0f;
}

/* 32 bf16 values divided by `scale`, as e4m3. Returns false, and has written nothing, if a value is
 * not ordinary. `most` is 448 scales as bf16, and `divisor` 2^8 of them. */
SMLA_INLINE bool
quantize_ordinary(const uint8_t *values, __m256i most, float divisor, float inverse, uint8_t *out)
{
    const __m256i is_above = _mm256_cmpgt_epi16(find_largest_halves(values, QUAD), most);
    if (_mm256_movemask_epi8(is_above) != 0) {
        return false;
    }
    store_quotients_e4m3(values, divisor, inverse, out);
    return true;
}
#endif

static float
find_amax(const void *x, smla_float_type type, int64_t start, int64_t count)
{
    const uint8_t *const values = element_at(x, type, start);
    quad best = {{{0}}};
    float largest[4];
    int64_t i = 0;
#if defined(SMLA_HAVE_BYTES)
    if (type == SMLA_FLOAT_BF16) {
        const int64_t whole = count - count % QUAD;
        const float amax = find_amax_of_bf16(values, whole);
        if (amax >= 0.0f) {
            best.v[0] = splat(amax);
            i = whole;
        }
    }
#endif
    for (; i + QUAD <= count; i += QUAD) {
        const quad magnitude = magnitude_of(load_quad(element_at(values, type, i), type));
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            best.v[k] = max_lanes(best.v[k], magnitude.v[k]);
        }
    }
    if (i < count) {
        const quad part = load_part(element_at(values, type, i), type, count - i);
        best.v[0] = max_of_quad(best.v[0], part);
    }
    finish_max(best, largest);
    return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
}

static void
quantize(const void *x, smla_float_type type, int64_t start, int64_t count, float scale,
         uint8_t *out)
{
    const uint8_t *const values = element_at(x, type, start);
    int64_t i = 0;
#if defined(SMLA_HAVE_BYTES)
    const bool is_ordinary =
        type == SMLA_FLOAT_BF16 && scale > SMLA_ORDINARY_LEAST && scale < SMLA_ORDINARY_MAX;
    const float divisor = scale * 0x1p8f;
    const float inverse = 1.0f / divisor;
    const __m256i most = _mm256_set1_epi16((short)(smla_float_bits(scale * SMLA_E4M3_MAX) >> 16));
#endif
    for (; i + QUAD <= count; i += QUAD) {
#if defined(SMLA_HAVE_BYTES)
        if (is_ordinary && quantize_ordinary(values + 2 * i, most, divisor, inverse, out + i)) {
            continue;
        }
#endif
        store_e4m3(divide_quad(load_quad(element_at(values, type, i), type), scale), out + i);
    }
    if (i < count) {
        uint8_t last[QUAD];
        store_e4m3(divide_quad(load_part(element_at(values, type, i), type, count - i), scale),
                   last);
        memcpy(out + i, last, (size_t)(count - i));
    }
}

/* ---- Products ------------------------------------------------------------------------------ */

SMLA_INLINE quad
multiply_quads(quad x, quad factors)
{
    return (quad){{x.v[0] * factors.v[0], x.v[1] * factors.v[1], x.v[2] * factors.v[2],
                   x.v[3] * factors.v[3]}};
}

/* out[i] = e4m3(x[start + i] * factors[i]), or * factors[0] for all. */
SMLA_INLINE void
multiply_by(const void *x, smla_float_type type, int64_t start, int64_t count, const float *factors,
            const bool has_columns, uint8_t *out)
{
    const uint8_t *const values = element_at(x, type, start);
    const quad same = {{splat(*factors), splat(*factors), splat(*factors), splat(*factors)}};
    int64_t i = 0;
    for (; i + QUAD <= count; i += QUAD) {
        const quad whole = load_quad(element_at(values, type, i), type);
        store_e4m3(multiply_quads(whole, has_columns ? load_float(factors + i) : same), out + i);
    }
    if (i < count) {
        uint8_t last[QUAD];
        const quad part = load_part(element_at(values, type, i), type, count - i);
        store_e4m3(multiply_quads(part, has_columns
                                            ? load_part(factors + i, SMLA_FLOAT_FP32, count - i)
                                            : same),
                   last);
        memcpy(out + i, last, (size_t)(count - i));
    }
}

static void
multiply(const void *x, smla_float_type type, int64_t start, int64_t count, float factor,
         uint8_t *out)
{
    multiply_by(x, type, start, count, &factor, false, out);
}

static void
multiply_columns(const void *x, smla_float_type type, int64_t start, int64_t count,
                 const float *factors, uint8_t *out)
{
    multiply_by(x, type, start, count, factors, true, out);
}

/* max_lanes takes `best` where a value is NaN. Infinities stay until the maximum is used. */
SMLA_INLINE quad
raise_quad(quad best, quad x)
{
    const quad magnitude = magnitude_of(x);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        best.v[k] = max_lanes(best.v[k], magnitude.v[k]);
    }
    return best;
}

static void
raise_columns(const void *x, smla_float_type type, int64_t start, int64_t count, float *amax)
{
    const uint8_t *const values = element_at(x, type, start);
    int64_t i = 0;
    for (; i + QUAD <= count; i += QUAD) {
        const quad raised =
            raise_quad(load_float(amax + i), load_quad(element_at(values, type, i), type));
        store_float(raised, amax + i);
    }
    if (i < count) {
        float last[QUAD];
        const quad best = load_part(amax + i, SMLA_FLOAT_FP32, count - i);
        store_float(raise_quad(best, load_part(element_at(values, type, i), type, count - i)),
                    last);
        memcpy(amax + i, last, (size_t)(count - i) * sizeof *amax);
    }
}

/* ---- Narrow groups ------------------------------------------------------------------------- */

/* x[i] = max(x[2 i], x[2 i + 1]) for i below `count` */
SMLA_INLINE void
halve_maxima(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i += WIDTH) {
        const vuint first = load_words(x + 2 * i, 0);
        const vuint second = load_words(x + 2 * i, 1);
        const vfloat even = (vfloat)even_lanes(first, second);
        store_words((vuint)max_lanes(even, (vfloat)odd_lanes(first, second)), x + i, 0);
    }
}

/* x[2 i] = x[2 i + 1] = x[i] for i below `count` */
SMLA_INLINE void
double_factors(float *x, int64_t count)
{
    for (int64_t i = (count - 1) / WIDTH * WIDTH; i >= 0; i -= WIDTH) {
        const vuint once = load_words(x + i, 0);
        store_words(interleave_first(once, once), x + 2 * i, 0);
        store_words(interleave_second(once, once), x + 2 * i, 1);
    }
}

/* x[i] = max(x[i * width] ... x[i * width + width - 1]) for i below `count`. Windows grow from each
 * column on, because vectors fold them without looking for the groups' borders. */
SMLA_INLINE void
fold_maxima(float *x, int64_t count, int64_t width)
{
    for (int64_t reach = 1, next; reach < width; reach = next) {
        next = 3 * reach < width ? 3 * reach : width;
        const int64_t middle = reach < next - reach ? reach : next - reach;
        for (int64_t i = 0; i < count * width; i += WIDTH) {
            const vfloat first = (vfloat)load_words(x + i, 0);
            const vfloat best = max_lanes(first, (vfloat)load_words(x + i + middle, 0));
            store_words((vuint)max_lanes(best, (vfloat)load_words(x + i + next - reach, 0)), x + i,
                        0);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        x[i] = x[i * width];
    }
}

/* to[i * width] ... to[i * width + width - 1] = x[i] for i below `count`, in steps of 4 */
SMLA_INLINE void
repeat_factors(const float *x, int64_t count, int64_t width, float *to)
{
    typedef float four __attribute__((vector_size(16), may_alias, aligned(4)));
    for (int64_t i = 0; i < count; i++) {
        const four same = {x[i], x[i], x[i], x[i]};
        *(four *)(to + i * width) = same;
        for (int64_t at = 4; at < width; at += 4) {
            *(four *)(to + i * width + at) = same;
        }
    }
}

/* finish_group of scaled_quantize.c. No maximum is NaN. */
SMLA_INLINE void
divide_maxima(const float *amax, int64_t count, float *factors, float *descales)
{
    for (int64_t i = 0; i < count; i += WIDTH) {
        const vfloat finite = min_lanes((vfloat)load_words(amax + i, 0), splat(FLT_MAX));
        const vfloat used = max_lanes(finite, splat(SMLA_SCALED_QUANTIZE_FLOOR));
        store_words((vuint)(used / SMLA_E4M3_MAX), descales + i, 0);
        store_words((vuint)(SMLA_E4M3_MAX / used), factors + i, 0);
    }
}

SMLA_INLINE void
finish_odd_groups(float *amax, int64_t num_groups, const int64_t width, float *factors,
                  float *descales)
{
    fold_maxima(amax, num_groups, width);
    divide_maxima(amax, num_groups, amax, descales);
    repeat_factors(amax, num_groups, width, factors);
}

/* Even widths are halved, and doubled again, which moves a vector at a time. */
static void
finish_groups(float *amax, int64_t num_groups, int64_t width, float *factors, float *descales)
{
    int64_t odd = width;
    for (; odd % 2 == 0; odd /= 2) {
        halve_maxima(amax, num_groups * odd / 2);
    }
    switch (odd) { /* constants unroll loops */
    case 1: divide_maxima(amax, num_groups, factors, descales); break;
    case 3: finish_odd_groups(amax, num_groups, 3, factors, descales); break;
    case 5: finish_odd_groups(amax, num_groups, 5, factors, descales); break;
    case 7: finish_odd_groups(amax, num_groups, 7, factors, descales); break;
    default: finish_odd_groups(amax, num_groups, odd, factors, descales); break;
    }
    for (; odd < width; odd *= 2) {
        double_factors(factors, num_groups * odd);
    }
}

/* ---- Rows ---------------------------------------------------------------------------------- */

static void
write_row(const smla_kv_format_info *format, smla_float_type type, const void *nope,
          int64_t nope_start, const void *rope, int64_t rope_start, float kv_scale,
          smla_kv_token to)
{
    encode_row(format, type, element_at(nope, type, nope_start), element_at(rope, type, rope_start),
               kv_scale, to);
}

static void
write_index_keys(const smla_kv_format_info *format, smla_float_type type,
                 const uint8_t *const *keys, const smla_kv_token *to, int count)
{
    encode_keys(format, type, keys, to, count);
}

static void
read_row(const smla_kv_format_info *format, smla_kv_token from, float kv_scale,
         smla_float_type type, void *array, int64_t start)
{
    decode_row(format, from, kv_scale, type, (uint8_t *)array + start * element_bytes(type));
}

const smla_cache_isa SMLA_OF_ISA(smla_cache) = {
    .write_row = write_row,
    .write_index_keys = write_index_keys,
    .read_row = read_row,
    .find_amax = find_amax,
    .quantize = quantize,
    .multiply = multiply,
    .raise_columns = raise_columns,
    .finish_groups = finish_groups,
    .multiply_columns = multiply_columns,
};
