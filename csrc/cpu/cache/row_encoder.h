/* row_encoder.h: bf16 values -> a cache row of any format, for one instruction set.
 *
 * Computes     values are rounded to bf16; then per tile of NoPE values, in fp32
 *                scale = the format's scale for the tile's amax, code = round(x / scale)
 *              RoPE values and bf16 rows are copied. kv_format.h draws the rows.
 * Scales       fp32, any   max(amax / 448, FLT_MIN), and a true division
 *              power of 2  the smallest with top * scale >= max(amax, least_amax), where top is 448
 *                          or 6: x / scale is exact, as a product with 1 / scale
 *              e4m3        satE4M3(min(max(amax / 6, 2^-9), 448)), and true divisions
 *              per cache   x * (1 / kv_scale), both in fp32; x / kv_scale in rows with RoPE codes
 *              amax leaves out NaN and takes an infinity for FLT_MAX.
 * Numerics     Every byte is what the functions of numeric.h give, for every input, in
 *              SMLA_FP_EXACT, and where cache.c chooses it in SMLA_FP_FLUSH: a subnormal value is
 *              far below half of the smallest code there. Where scales are any fp32, tiles of
 *              values below SMLA_TINY are computed 2^64 times as large.
 *
 * A file that includes this one is compiled for one instruction set, see simd.h. Every function is
 * inlined with a constant format, so that the compiler folds the format's facts.
 */
#pragma once

#include <float.h>
#include <string.h>

#include "core/backend.h"
#include "core/numeric.h"
#include "cpu/machine/bytes_avx2.h"
#include "cpu/machine/quads.h"

enum {
    ROW_QUADS = SMLA_KV_LORA_RANK / QUAD, /* quads of a row, or more */
    ROW_LANES = SMLA_KV_LORA_RANK / 4,    /* lanes of them: each has four values */
};

_Static_assert(SMLA_QK_ROPE_HEAD_DIM % QUAD == 0, "a row must hold whole quads");
_Static_assert(SMLA_INDEX_HEAD_DIM % QUAD == 0, "a key of the indexer must hold whole quads");

/* ---- Values -------------------------------------------------------------------------------- */

/* Loads values, rounded to bf16. */
SMLA_INLINE quad
load_rounded(const uint8_t *values, smla_float_type type, int64_t index)
{
    quad x = load_quad(element_at(values, type, index), type);
    if (type != SMLA_FLOAT_BF16) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            x.v[k] = (vfloat)round_upper_half(x.v[k]);
        }
    }
    return x;
}

/* Writes values rounded to bf16. Values that are bf16 keep their bits, NaN included. */
SMLA_INLINE void
write_bf16(const uint8_t *values, smla_float_type type, int count, uint8_t *out)
{
    if (type == SMLA_FLOAT_BF16) { /* GCC makes `rep movs` of memcpy, slow on rows at odd places */
#pragma GCC unroll 4
        for (int i = 0; i < count / DUO; i++) {
            store_words(load_words(values, i), out, i);
        }
        return;
    }
#if defined(SMLA_HAVE_BYTES)
    for (int i = 0; i < count; i += DUO) {
        const uint8_t *const x = element_at(values, type, i);
        const uint8_t *const y = element_at(x, type, WIDTH);
        const bool is_half = type == SMLA_FLOAT_FP16;
        store_sixteen_bf16(is_half ? load_eight_fp16(x) : (vfloat)load_words(x, 0),
                           is_half ? load_eight_fp16(y) : (vfloat)load_words(y, 0), out + 2 * i);
    }
#else
    for (int i = 0; i < count; i += QUAD) {
        store_bf16(load_quad(element_at(values, type, i), type), out + i * (int)sizeof(uint16_t));
    }
#endif
}

/* ---- Scales -------------------------------------------------------------------------------- */

/* Folds the lanes of `best` pair by pair, until there is one lane per tile of `tile_lanes` lanes.
 * Vectors behind the first `count` are zero. Infinities become FLT_MAX. */
SMLA_INLINE void
fold_tiles(vfloat *best, int count, int tile_lanes)
{
    for (int lanes = 1; lanes < tile_lanes; lanes *= 2) {
        const int left = (count + 1) / 2;
        for (int i = 0; i < left; i++) {
            const vuint a = (vuint)best[2 * i];
            const vuint b = 2 * i + 1 < count ? (vuint)best[2 * i + 1] : (vuint){0};
            best[i] = max_lanes((vfloat)even_lanes(a, b), (vfloat)odd_lanes(a, b));
        }
        count = left;
    }
    for (int i = 0; i < count; i++) {
        best[i] = select_lanes(best[i] > FLT_MAX, splat(FLT_MAX), best[i]);
    }
}

/* Gives all lanes, one per tile of a row, the largest. Lanes behind the tiles are zero. */
SMLA_INLINE vfloat
join_tiles(vfloat best)
{
    float largest = best[0];
    for (int t = 1; t < WIDTH; t++) {
        largest = largest < best[t] ? best[t] : largest;
    }
    return splat(largest);
}

/* Stores the low byte of each of the first `count` words. */
SMLA_INLINE void
store_low_bytes(const uint32_t *words, int count, uint8_t *bytes)
{
    for (int t = 0; t < count; t++) {
        bytes[t] = (uint8_t)words[t];
    }
}

/* Whether scales may be as small as values are: FLT_MIN at least. */
SMLA_INLINE bool
has_any_scales(const smla_kv_format_info *format)
{
    return format->scale_type == SMLA_SCALE_FP32 && format->least_amax == 0;
}

/* Turns the maxima of `count` tiles into their scales, one word each, and into the numbers
 * `factors` that values are divided by, or multiplied with if scales are powers of two. The factors
 * of small tiles are for lifted values if scales may be small. */
SMLA_INLINE void
choose_scales(const smla_kv_format_info *format, int count, const vfloat *largest, float *factors,
              uint32_t *words)
{
    const bool is_power = format->least_amax != 0;
    const float top = format->nope_type == SMLA_NOPE_E4M3 ? SMLA_E4M3_MAX : SMLA_E2M1_MAX;
    for (int t = 0; t < count; t += WIDTH) {
        const vfloat amax = largest[t / WIDTH];
        vfloat factor;
        vuint word;
        if (is_power) {
            const vfloat least = max_lanes(splat(format->least_amax), amax);
            const uint32_t bits = smla_float_bits(top);
            word =
                (((vuint)least + (0x7FFFFFu - (bits & 0x7FFFFFu))) >> 23) - ((bits >> 23) - 127u);
            factor = (vfloat)((254u - word) << 23);
            word = format->scale_type == SMLA_SCALE_FP32 ? word << 23 : word;
        } else if (format->scale_type == SMLA_SCALE_E4M3) {
            factor = amax / top;
            if (has_lane(factor < 0x1p-6f)) { /* e4m3's smallest normal number */
                factor = max_lanes(factor, splat(0x1p-9f));
                word = round_to_e4m3(factor); /* saturates */
                factor = e4m3_to_float(word << 24, splat(1.0f));
            } else {
                word = round_normal_to_e4m3(min_lanes(factor, splat(SMLA_E4M3_MAX)));
                factor = (vfloat)((word << 20) + (120u << 23));
            }
        } else {
            factor = max_lanes(amax / top, splat(FLT_MIN));
            word = (vuint)factor;
            const vint is_small = amax < SMLA_TINY;
            if (has_lane(is_small & ((vint)amax != 0))) { /* zeros need no care */
                const vfloat lifted = max_lanes(lift_lanes(amax) / top, splat(FLT_MIN * 0x1p64f));
                factor = select_lanes(is_small, lifted, factor);
                word = (vuint)factor - ((vuint)is_small & (64u << 23));
            }
        }
        *(vuint *)(words + t) = word;
        *(vfloat *)(factors + t) = factor;
    }
}

/* Writes the scales of a row. */
SMLA_INLINE void
write_scales(const smla_kv_format_info *format, const uint32_t *words, uint8_t *scales)
{
    const int count = format->num_scales;
    if (format->scale_type == SMLA_SCALE_FP32) {
        memcpy(scales, words, (size_t)count * sizeof *words);
        return;
    }
    store_low_bytes(words, count, scales);
    memset(scales + count, 0, (size_t)(format->scale_bytes - count));
}

/* Gives every lane of a row the number of its tile. */
SMLA_INLINE void
spread_tiles(const float *tiles, int count, int tile_lanes, float *lanes)
{
    for (int t = 0; t < count; t++) {
        for (int i = 0; i < tile_lanes; i++) {
            lanes[t * tile_lanes + i] = tiles[t];
        }
    }
}

/* ---- Rows ---------------------------------------------------------------------------------- */

SMLA_INLINE quad
scale_quad(quad x, vfloat factor, bool divides)
{
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        x.v[k] = divides ? x.v[k] / factor : x.v[k] * factor;
    }
    return x;
}

#if defined(SMLA_HAVE_BYTES)
/* Turns the numbers that choose_scales gave into what the values of each tile are multiplied with.
 * A true division takes the divisors, too. */
SMLA_INLINE void
choose_factors(const smla_kv_format_info *format, int count, float *factors, float *inverses)
{
    for (int t = 0; t < count; t += WIDTH) {
        vfloat *const factor = (vfloat *)(factors + t);
        vfloat *const inverse = (vfloat *)(inverses + t);
        if (format->nope_type == SMLA_NOPE_E2M1) {
            *inverse =
                format->least_amax != 0 ? *factor * SMLA_E2M1_FACTOR : SMLA_E2M1_FACTOR / *factor;
        } else {
            *factor *= 0x1p8f;
            *inverse = 1.0f / *factor;
        }
    }
}

/* Writes the NoPE part of a row from bf16, by the numbers of its tiles. */
SMLA_INLINE void
store_ordinary_nope(const smla_kv_format_info *format, const uint8_t *values, const float *factors,
                    const float *inverses, uint8_t *row)
{
    const int tile_size = format->scale_tile;
    const bool is_e2m1 = format->nope_type == SMLA_NOPE_E2M1;
    if (format->least_amax != 0 && !is_e2m1) {
        for (int t = 0; t < format->num_scales; t++) {
            store_products_e4m3(values + 2 * t * tile_size, tile_size, factors[t],
                                row + t * tile_size);
        }
        return;
    }
    for (int i = 0; i < format->nope_dim; i += QUAD) {
        const int t = i / tile_size;
        const uint8_t *const x = values + 2 * i;
        if (is_e2m1) {
            store_e2m1_by(x, inverses[t], inverses[(i + DUO) / tile_size], row + i / 2);
        } else {
            store_quotients_e4m3(x, factors[t], inverses[t], row + i);
        }
    }
}

/* `count` bf16 values, 2^64 times as large. */
SMLA_INLINE void
lift_bf16(const uint8_t *values, int count, uint8_t *lifted)
{
    for (int i = 0; i < count / DUO; i++) {
        const vuint words = load_words(values, i);
        const vfloat even = lift_lanes((vfloat)(words << 16));
        const vfloat odd = lift_lanes(bf16_to_float(words));
        store_words(join_upper_halves((vuint)even, (vuint)odd), lifted, i);
    }
}

/* Writes the NoPE part of a row that has small tiles, if has_any_scales. `factors` and `words` are
 * those of choose_scales. */
SMLA_INLINE void
store_small_nope(const smla_kv_format_info *format, const uint8_t *values, vfloat amax,
                 const float *factors, uint8_t *row)
{
    uint8_t lifted[SMLA_SCALE_TILE * sizeof(uint16_t)];
    for (int t = 0; t < format->num_scales; t++) {
        const uint8_t *x = values + 2 * t * format->scale_tile;
        if (amax[t] < SMLA_TINY) {
            lift_bf16(x, format->scale_tile, lifted);
            x = lifted;
        }
        const float divisor = factors[t] * 0x1p8f;
        const float inverse = 1.0f / divisor;
        for (int i = 0; i < format->scale_tile; i += QUAD) {
            store_quotients_e4m3(x + 2 * i, divisor, inverse, row + t * format->scale_tile + i);
        }
    }
}

/* Writes the NoPE parts of `num_rows` rows that have scales, from bf16. The way from a tile's
 * maximum to its scale is a long chain, so all tiles take it together. Returns false, and has
 * written nothing, if a value is NaN, infinite or very large. */
SMLA_INLINE bool
encode_ordinary_nope(const smla_kv_format_info *format, int num_rows, const uint8_t *const *values,
                     const smla_kv_token *to)
{
    const int row_tiles = format->num_scales;
    const int count = num_rows * row_tiles;
    const int tile_size = format->scale_tile;
    const bool is_e2m1 = format->nope_type == SMLA_NOPE_E2M1;
    const bool divides = format->least_amax == 0;
    const float most =
        format->scale_type == SMLA_SCALE_E4M3 ? SMLA_E2M1_MAX * SMLA_E4M3_MAX : SMLA_ORDINARY_MAX;
    __m256i largest[SMLA_MAX_ROW_SCALES + WIDTH]; /* per tile */
    vfloat best[SMLA_MAX_ROW_SCALES / WIDTH + 1]; /* a lane per tile */
    float factors[SMLA_MAX_ROW_SCALES + WIDTH] __attribute__((aligned(64)));
    float inverses[SMLA_MAX_ROW_SCALES + WIDTH] __attribute__((aligned(64)));
    uint32_t words[SMLA_MAX_ROW_SCALES + WIDTH] __attribute__((aligned(64)));
    for (int t = 0; t < count; t++) {
        largest[t] =
            find_largest_halves(values[t / row_tiles] + 2 * (t % row_tiles) * tile_size, tile_size);
    }
    for (int t = count; count > 1 && t % WIDTH != 0; t++) {
        largest[t] = _mm256_setzero_si256();
    }
    for (int t = 0; t < count; t += WIDTH) {
        const vfloat amax = count == 1 ? fold_one_half(largest[0]) : fold_eight_halves(largest + t);
        if (has_lane(~(amax < most))) { /* or NaN */
            return false;
        }
        best[t / WIDTH] = format->has_one_scale ? join_tiles(amax) : amax;
    }
    choose_scales(format, count, best, factors, words);
    if (has_any_scales(format) && has_lane((best[0] < SMLA_TINY) & ((vint)best[0] != 0))) {
        write_scales(format, words, to[0].scales);
        store_small_nope(format, values[0], best[0], factors, to[0].row);
        return true;
    }
    if (divides || is_e2m1) {
        choose_factors(format, count, factors, inverses);
    }
    for (int i = 0; i < num_rows; i++) {
        write_scales(format, words + i * row_tiles, to[i].scales);
        store_ordinary_nope(format, values[i], factors + i * row_tiles, inverses + i * row_tiles,
                            to[i].row);
    }
    return true;
}

/* Writes the NoPE part of a row of e4m3 whose values are multiplied with one number, from bf16.
 * Returns false, and has written nothing, if a product is NaN or above 448, or the number is out of
 * the ordinary. */
SMLA_INLINE bool
encode_by_cache_scale(const smla_kv_format_info *format, const uint8_t *values, float factor,
                      uint8_t *row)
{
    const bool is_ordinary = factor < SMLA_ORDINARY_MAX && factor > 1.0f / SMLA_ORDINARY_MAX;
    const vfloat largest = (vfloat)find_largest_magnitudes(values, format->nope_dim);
    if (!is_ordinary || has_lane(~(largest * factor <= SMLA_E4M3_MAX))) {
        return false;
    }
    if ((smla_float_bits(factor) & 0x7FFFFFu) == 0) { /* a power of two */
        store_all_exact_e4m3(values, format->nope_dim, factor, row);
        return true;
    }
    const float scaled = factor * 0x1p-8f;
    for (int i = 0; i < format->nope_dim; i += QUAD) {
        const duo first = load_bf16_duo(values + 2 * i);
        const duo second = load_bf16_duo(values + 2 * (i + DUO));
        store_scaled_e4m3((duo){first.even * scaled, first.odd * scaled},
                          (duo){second.even * scaled, second.odd * scaled}, row + i);
    }
    return true;
}
#endif

/* Lifts the values of small tiles, where `best` has a lane per tile. A maximum below FLT_MIN, which
 * may count as zero, becomes FLT_MIN: the scale is the least one in any case. */
SMLA_INLINE void
lift_small_tiles(const smla_kv_format_info *format, vfloat *best, int tile_lanes, float *lanes,
                 quad *x)
{
    best[0] = max_lanes(best[0], splat(FLT_MIN));
    spread_tiles((const float *)best, format->num_scales, tile_lanes, lanes);
    for (int i = 0; i < format->nope_dim / QUAD; i++) {
        const vint is_small = *as_vectors(lanes + i * WIDTH) < SMLA_TINY;
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            x[i].v[k] = select_lanes(is_small, lift_lanes(x[i].v[k]), x[i].v[k]);
        }
    }
}

/* Writes the NoPE part of a row that is quantised. Computes all maxima first, because the way from
 * a maximum to its scale is a long chain. */
SMLA_INLINE void
encode_nope(const smla_kv_format_info *format, smla_float_type type, const uint8_t *values,
            float kv_scale, smla_kv_token to)
{
    const float inverse = 1.0f / kv_scale; /* the factor of formats that have no scales in a row */
#if defined(SMLA_HAVE_BYTES)
    uint8_t rounded[SMLA_KV_LORA_RANK * sizeof(uint16_t)];
    const uint8_t *halves = values;
    if (type != SMLA_FLOAT_BF16) {
        write_bf16(values, type, format->nope_dim, rounded);
        halves = rounded;
    }
    if (format->num_scales != 0 ? encode_ordinary_nope(format, 1, &halves, &to)
                                : encode_by_cache_scale(format, halves, inverse, to.row)) {
        return;
    }
#endif
    const int num_quads = format->nope_dim / QUAD;
    const int tile_lanes = format->scale_tile / 4;
    const bool divides = format->least_amax == 0 && format->num_scales != 0;
    quad x[ROW_QUADS];
    vfloat best[ROW_QUADS];
    float factors[SMLA_MAX_ROW_SCALES + WIDTH] __attribute__((aligned(64)));
    uint32_t words[SMLA_MAX_ROW_SCALES + WIDTH] __attribute__((aligned(64)));
    float lanes[ROW_LANES] __attribute__((aligned(64)));
    for (int i = 0; i < num_quads; i++) {
        x[i] = load_rounded(values, type, (int64_t)i * QUAD);
        best[i] = max_of_quad((vfloat){0}, x[i]);
    }
    if (format->num_scales != 0) {
        fold_tiles(best, num_quads, tile_lanes);
        best[0] = format->has_one_scale ? join_tiles(best[0]) : best[0];
        if (has_any_scales(format) && has_lane(best[0] < SMLA_TINY)) {
            lift_small_tiles(format, best, tile_lanes, lanes, x);
        }
        choose_scales(format, format->num_scales, best, factors, words);
        write_scales(format, words, to.scales);
        spread_tiles(factors, format->num_scales, tile_lanes, lanes);
    }
    for (int i = 0; i < num_quads; i++) {
        const vfloat factor =
            format->num_scales != 0 ? *as_vectors(lanes + i * WIDTH) : splat(inverse);
        const quad scaled = scale_quad(x[i], factor, divides);
        if (format->nope_type == SMLA_NOPE_E4M3) {
            store_e4m3(scaled, to.row + i * QUAD);
        } else {
            store_e2m1(scaled, to.row + i * QUAD / 2);
        }
    }
}

/* Writes values divided by the scale of their cache. */
SMLA_INLINE void
encode_quotients(smla_float_type type, const uint8_t *values, int count, float kv_scale,
                 uint8_t *codes)
{
    for (int i = 0; i < count; i += QUAD) {
        store_e4m3(scale_quad(load_rounded(values, type, i), splat(kv_scale), true), codes + i);
    }
}

/* Writes a row of a constant format from its NoPE values and its RoPE values. */
SMLA_INLINE void
encode_constant_format(const smla_kv_format_info *format, smla_float_type type, const uint8_t *nope,
                       const uint8_t *rope, float kv_scale, smla_kv_token to)
{
    if (smla_has_rope_codes(format)) {
        encode_quotients(type, nope, format->nope_dim, kv_scale, to.row);
        encode_quotients(type, rope, format->rope_dim, kv_scale, to.row + format->rope_offset);
        return;
    }
    if (format->nope_type == SMLA_NOPE_BF16) {
        write_bf16(nope, type, format->nope_dim, to.row);
    } else {
        encode_nope(format, type, nope, kv_scale, to);
    }
    if (format->rope_dim > 0) { /* without it, rope may be NULL */
        write_bf16(rope, type, format->rope_dim, to.row + format->rope_offset);
    }
}

/* Writes a row of any format. */
SMLA_INLINE void
encode_row(const smla_kv_format_info *format, smla_float_type type, const uint8_t *nope,
           const uint8_t *rope, float kv_scale, smla_kv_token to)
{
#define ENCODE(number)                                                                    \
    case number:                                                                          \
        encode_constant_format(&smla_kv_formats[number], type, nope, rope, kv_scale, to); \
        break;
    switch (format->number) {
        SMLA_EACH_KV_ROW(ENCODE)
    case SMLA_NUM_KV_FORMATS: break;
    }
#undef ENCODE
}

/* Writes keys of the indexer of a constant format. A row has few tiles, so rows look for their
 * scales together. */
SMLA_INLINE void
encode_constant_keys(const smla_kv_format_info *format, smla_float_type type,
                     const uint8_t *const *keys, const smla_kv_token *to, int count)
{
    int i = 0;
#if defined(SMLA_HAVE_BYTES)
    const int together = WIDTH / format->num_scales;
    while (type == SMLA_FLOAT_BF16 && i + together <= count &&
           encode_ordinary_nope(format, together, keys + i, to + i)) {
        i += together;
    }
#endif
    for (; i < count; i++) {
        encode_constant_format(format, type, keys[i], keys[i], 1.0f, to[i]);
    }
}

/* Writes keys of the indexer of any of its formats, whose rows are no values. */
SMLA_INLINE void
encode_keys(const smla_kv_format_info *format, smla_float_type type, const uint8_t *const *keys,
            const smla_kv_token *to, int count)
{
#define ENCODE(number)                                                             \
    case number:                                                                   \
        if (smla_kv_formats[number].value_dim == 0) {                              \
            encode_constant_keys(&smla_kv_formats[number], type, keys, to, count); \
        }                                                                          \
        break;
    switch (format->number) {
        SMLA_EACH_KV_ROW(ENCODE)
    case SMLA_NUM_KV_FORMATS: break;
    }
#undef ENCODE
}
