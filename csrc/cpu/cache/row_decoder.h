/* row_decoder.h: a cache row of any format -> bf16 or fp32, for one instruction set.
 *
 * Computes     value = code * scale, the product in fp32, rounded once more for bf16. RoPE values
 *              of bf16 and bf16 rows are copied, or widened. kv_format.h draws the rows.
 * Numerics     Any scale byte is accepted. A NaN code with a NaN scale gives the NaN of the code.
 *
 * A file that includes this one is compiled for one instruction set, as for row_encoder.h.
 */
#pragma once

#include <math.h>

#include "cpu/cache/row_encoder.h"

/* Reads bf16 values, exactly. */
SMLA_INLINE void
read_bf16(const uint8_t *halves, int count, smla_float_type type, uint8_t *out)
{
    if (type == SMLA_FLOAT_BF16) {
        memcpy(out, halves, (size_t)count * sizeof(uint16_t));
        return;
    }
    for (int i = 0; i < count; i += QUAD) {
        store_float(load_bf16(halves + 2 * i), out + i * (int)sizeof(float));
    }
}

SMLA_INLINE void
load_row_scales(const smla_kv_format_info *format, const uint8_t *from, float *scales)
{
    if (format->scale_type == SMLA_SCALE_FP32) {
        memcpy(scales, from, (size_t)format->num_scales * sizeof *scales);
        return;
    }
#if defined(SMLA_HAVE_BYTES)
    if (format->scale_type == SMLA_SCALE_E4M3 && format->num_scales % WIDTH == 0) {
        for (int t = 0; t < format->num_scales; t += WIDTH) {
            store_words((vuint)load_eight_e4m3(from + t), scales + t, 0);
        }
        return;
    }
#endif
    for (int t = 0; t < format->num_scales; t++) {
        scales[t] = format->scale_type == SMLA_SCALE_UE8M0 ? smla_ue8m0_to_float(from[t])
                                                           : smla_e4m3_to_float(from[t]);
    }
}

#if defined(SMLA_HAVE_BYTES)
/* Reads the NoPE part of a row of e4m3 as bf16. Returns false, and what it wrote is wrong, if the
 * row has a NaN, or a scale that is one, or that is out of the ordinary. */
SMLA_INLINE bool
decode_ordinary_nope(const smla_kv_format_info *format, const uint8_t *row, const float *scales,
                     int num_scales, uint8_t *out)
{
    const bool is_exact = format->scale_type == SMLA_SCALE_UE8M0;
    vuint largest = {0};
    for (int t = 0; t < num_scales; t++) {
        if (!(fabsf(scales[t]) < SMLA_ORDINARY_MAX) ||
            (is_exact && scales[t] < SMLA_ORDINARY_LEAST)) {
            return false;
        }
    }
    for (int i = 0; i < format->nope_dim / QUAD; i++) {
        const int tile = num_scales == 1 ? 0 : i * QUAD / format->scale_tile;
        const float scale = scales[tile] * 0x1p8f;
        const duos x = load_scaled_e4m3(row + i * QUAD);
        uint8_t *const halves = out + 2 * i * QUAD;
        const vfloat values[4] = {x.first.even * scale, x.first.odd * scale, x.second.even * scale,
                                  x.second.odd * scale};
        largest = note_codes(largest, row + i * QUAD);
        if (is_exact) { /* four bits of mantissa */
            store_words(join_upper_halves((vuint)values[0], (vuint)values[1]), halves, 0);
            store_words(join_upper_halves((vuint)values[2], (vuint)values[3]), halves, 1);
        } else {
            store_words(join_upper_halves(round_finite(values[0]), round_finite(values[1])), halves,
                        0);
            store_words(join_upper_halves(round_finite(values[2]), round_finite(values[3])), halves,
                        1);
        }
    }
    return !has_nan_code(largest);
}

/* Reads the NoPE part of a row of e2m1 as bf16. Returns false, and has written nothing, if a scale
 * is NaN. */
SMLA_INLINE bool
decode_e2m1_nope(const smla_kv_format_info *format, const uint8_t *row, const float *scales,
                 uint8_t *out)
{
    bool has_nan = false;
    for (int t = 0; t < format->num_scales; t++) {
        has_nan |= isnan(scales[t]);
    }
    for (int i = 0; !has_nan && i < format->nope_dim; i += QUAD) {
        const __m256i tables = make_e2m1_tables(scales[i / format->scale_tile],
                                                scales[(i + DUO) / format->scale_tile]);
        write_e2m1_products(row + i / 2, tables, out + 2 * i);
    }
    return !has_nan;
}
#endif

/* Stores a quad as bf16 or fp32, at element `index` of `out`. */
SMLA_INLINE void
store_quad(quad values, smla_float_type type, int index, uint8_t *out)
{
    if (type == SMLA_FLOAT_BF16) {
        store_bf16(values, out + index * (int)sizeof(uint16_t));
    } else {
        store_float(values, out + index * (int)sizeof(float));
    }
}

/* Reads the NoPE part of a row that is quantised. */
SMLA_INLINE void
decode_nope(const smla_kv_format_info *format, smla_kv_token from, float kv_scale,
            smla_float_type type, uint8_t *out)
{
    float scales[SMLA_MAX_ROW_SCALES];
    float lanes[ROW_LANES] __attribute__((aligned(64)));
    load_row_scales(format, from.scales, scales);
#if defined(SMLA_HAVE_BYTES)
    if (type == SMLA_FLOAT_BF16 && format->nope_type == SMLA_NOPE_E4M3) {
        const bool has_scales = format->num_scales != 0;
        if (decode_ordinary_nope(format, from.row, has_scales ? scales : &kv_scale,
                                 has_scales ? format->num_scales : 1, out)) {
            return;
        }
    }
    if (type == SMLA_FLOAT_BF16 && format->nope_type == SMLA_NOPE_E2M1 &&
        decode_e2m1_nope(format, from.row, scales, out)) {
        return;
    }
#endif
    spread_tiles(scales, format->num_scales, format->scale_tile / 4, lanes);
    for (int i = 0; i < format->nope_dim / QUAD; i++) {
        const vfloat scale =
            format->num_scales != 0 ? *as_vectors(lanes + i * WIDTH) : splat(kv_scale);
        const quad values = format->nope_type == SMLA_NOPE_E4M3
                                ? load_e4m3_by(from.row + i * QUAD, scale)
                                : load_e2m1_by(from.row + i * QUAD / 2, scale);
        store_quad(values, type, i * QUAD, out);
    }
}

SMLA_INLINE void
decode_constant_format(const smla_kv_format_info *format, smla_kv_token from, float kv_scale,
                       smla_float_type type, uint8_t *out)
{
    if (format->nope_type == SMLA_NOPE_BF16) {
        read_bf16(from.row, format->nope_dim, type, out);
    } else {
        decode_nope(format, from, kv_scale, type, out);
    }
    const uint8_t *const rope = from.row + format->rope_offset;
    if (!smla_has_rope_codes(format)) {
        read_bf16(rope, format->rope_dim, type, out + format->nope_dim * element_bytes(type));
        return;
    }
    for (int i = 0; i < format->rope_dim; i += QUAD) {
        store_quad(load_e4m3_by(rope + i, splat(kv_scale)), type, format->nope_dim + i, out);
    }
}

/* Reads a row of any format: head_dim values. */
SMLA_INLINE void
decode_row(const smla_kv_format_info *format, smla_kv_token from, float kv_scale,
           smla_float_type type, uint8_t *out)
{
#define DECODE(number) \
    case number: decode_constant_format(&smla_kv_formats[number], from, kv_scale, type, out); break;
    switch (format->number) {
        SMLA_EACH_KV_ROW(DECODE)
    case SMLA_NUM_KV_FORMATS: break;
    }
#undef DECODE
}
