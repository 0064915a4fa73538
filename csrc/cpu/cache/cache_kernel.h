/* cache_kernel.h: writes and reads a cache row, quantises an array, for one instruction set.
 *
 * Computes     write     nope, rope -> bf16; fp8_ds_mla: per tile of 128 values of nope
 *                        scale = max(amax / 448, FLT_MIN), byte = e4m3(x / scale)
 *              read      e4m3 * scale, as fp32 or rounded once more to bf16; bf16 parts unchanged
 *              find_amax, quantize: the halves of `write`, for an array of any length and any scale
 * Shapes       nope [512], rope [64], x [count] of bf16, fp16 or fp32, contiguous; a row as
 *              kv_format.h draws it; out [576] bf16 or fp32, or [count] bytes
 * Roofline     Memory binds, or the divider where values are divided: the 32 zmm divisions of a row
 *              take 57 ns. GB/s read and written by one Zen 5 core (CPU time, one thread, 256 rows
 *              in L2, 2026-11-20) with AVX-512, AVX2, SSE2. A copy moves 220 (50 for 32768 rows):
 *                write  bf16 -> fp8_ds_mla  13, 8.4, 4.3      fp32 -> fp8_ds_mla  17, 10, 6.0
 *                read   fp8_ds_mla -> bf16  25, 12, 5.7       fp8_ds_mla -> fp32  62, 32, 15
 *                quant  bf16                25, 12, 6.5       fp32                42, 19, 11
 *              Tried: byte vectors of GCC 12, which converts them byte by byte, halve reads and
 *              AVX2. A write tile after tile waits for maximum, scale and broadcast: -30 %.
 * Numerics     Every byte is what the functions of numeric.h give, for every input: true divisions,
 *              NaN with its sign, infinities as FLT_MAX in amax. There are no sums, so no order
 *              matters. A NaN byte with a NaN scale gives the NaN of the byte.
 * Source       concat_and_cache_mla and cp_gather_and_upconvert_fp8_kv_cache of vLLM, for the
 *              formats.
 *
 * The including file defines SMLA_SIMD_WIDTH, and names its table of functions (SMLA_CACHE).
 */
#pragma once

#include <float.h>
#include <string.h>

#include "core/numeric.h"
#include "cpu/cache/cache.h"
#include "cpu/machine/quads.h"

enum {
    TILE = SMLA_SCALE_TILE,
    TILE_QUADS = TILE / QUAD,
};

_Static_assert(SMLA_QK_ROPE_HEAD_DIM % QUAD == 0, "a row must hold whole quads");

SMLA_INLINE quad
divide_quad(quad x, float scale)
{
    return (quad){{x.v[0] / scale, x.v[1] / scale, x.v[2] / scale, x.v[3] / scale}};
}

/* ---- Arrays -------------------------------------------------------------------------------- */

static float
find_amax(const void *x, smla_float_type type, int64_t start, int64_t count)
{
    const uint8_t *const values = element_at(x, type, start);
    quad best = {{{0}}};
    float largest[4];
    int64_t i = 0;
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
    for (; i + QUAD <= count; i += QUAD) {
        store_e4m3(divide_quad(load_quad(element_at(values, type, i), type), scale), out + i);
    }
    if (i < count) {
        uint8_t last[QUAD];
        store_e4m3(divide_quad(load_part(element_at(values, type, i), type, count - i), scale),
                   last);
        memcpy(out + i, last, (size_t)(count - i));
    }
}

/* ---- Write --------------------------------------------------------------------------------- */

/* Writes values rounded to bf16. Values that are bf16 keep their bits, NaN included. */
static void
write_bf16(const uint8_t *values, smla_float_type type, int count, uint8_t *out)
{
    if (type == SMLA_FLOAT_BF16) {
        memcpy(out, values, (size_t)count * sizeof(uint16_t));
        return;
    }
    for (int i = 0; i < count; i += QUAD) {
        store_bf16(load_quad(element_at(values, type, i), type), out + i * (int)sizeof(uint16_t));
    }
}

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

/* Computes all maxima first, because the way from a maximum to its scale is a long chain. */
static void
write_e4m3(const uint8_t *values, smla_float_type type, uint8_t *bytes, uint8_t *scale_bytes)
{
    quad x[SMLA_KV_LORA_RANK / QUAD];
    quad best = {{{0}}};
    float scales[SMLA_NUM_SCALE_TILES];
    for (int t = 0; t < SMLA_NUM_SCALE_TILES; t++) {
        for (int i = t * TILE_QUADS; i < (t + 1) * TILE_QUADS; i++) {
            x[i] = load_rounded(values, type, (int64_t)i * QUAD);
            best.v[t] = max_of_quad(best.v[t], x[i]);
        }
    }
    finish_max(best, scales);
    for (int t = 0; t < SMLA_NUM_SCALE_TILES; t++) {
        scales[t] /= SMLA_E4M3_MAX;
        scales[t] = scales[t] < FLT_MIN ? FLT_MIN : scales[t];
        for (int i = t * TILE_QUADS; i < (t + 1) * TILE_QUADS; i++) {
            store_e4m3(divide_quad(x[i], scales[t]), bytes + i * QUAD);
        }
    }
    memcpy(scale_bytes, scales, sizeof scales);
}

static void
write_row(const smla_kv_format_info *format, smla_float_type type, const void *nope,
          int64_t nope_start, const void *rope, int64_t rope_start, smla_kv_token to)
{
    const uint8_t *const values = element_at(nope, type, nope_start);
    if (format->nope_type == SMLA_NOPE_BF16) {
        write_bf16(values, type, SMLA_KV_LORA_RANK, to.row);
    } else {
        write_e4m3(values, type, to.row, to.scales);
    }
    write_bf16(element_at(rope, type, rope_start), type, format->rope_dim,
               to.row + format->rope_offset);
}

/* ---- Read ---------------------------------------------------------------------------------- */

/* Reads bf16 values, exactly. */
static void
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

static void
read_e4m3(const uint8_t *bytes, const uint8_t *scale_bytes, smla_float_type type, uint8_t *out)
{
    float scale;
    memcpy(&scale, scale_bytes, sizeof scale);
    for (int i = 0; i < TILE; i += QUAD) {
        const quad values = load_e4m3(bytes + i, scale);
        if (type == SMLA_FLOAT_BF16) {
            store_bf16(values, out + i * (int)sizeof(uint16_t));
        } else {
            store_float(values, out + i * (int)sizeof(float));
        }
    }
}

static void
read_row(const smla_kv_format_info *format, smla_kv_token from, smla_float_type type, void *array,
         int64_t start)
{
    const int64_t bytes = element_bytes(type);
    uint8_t *const out = (uint8_t *)array + start * bytes;
    if (format->nope_type == SMLA_NOPE_BF16) {
        read_bf16(from.row, SMLA_KV_LORA_RANK, type, out);
    } else {
        for (int t = 0; t < SMLA_NUM_SCALE_TILES; t++) {
            read_e4m3(from.row + t * TILE, from.scales + t * (int)sizeof(float), type,
                      out + t * TILE * bytes);
        }
    }
    read_bf16(from.row + format->rope_offset, format->rope_dim, type,
              out + SMLA_KV_LORA_RANK * bytes);
}

const smla_cache_isa SMLA_CACHE = {
    .write_row = write_row,
    .read_row = read_row,
    .find_amax = find_amax,
    .quantize = quantize,
};
