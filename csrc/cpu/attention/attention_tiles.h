/* attention_tiles.h: the two products of the attention kernel in AMX tiles, on what unit_bf16.h
 * lays out.
 *
 * A product multiplies 32 rows (keys, or dimensions of the values) with one or two vectors of
 * heads, 16 pairs of bf16 deep per step. A tile is 16 x 64 bytes:
 *   0 1   sums of rows 0...15 with vector 0, 1      4   rows 0...15     6   pairs of vector 0
 *   2 3   sums of rows 16...31                      5   rows 16...31    7   pairs of vector 1
 * A key is a row of pairs already, and queries and probs are rows of heads; only the values have to
 * be turned, from rows of dimensions into rows of keys: 64 shuffles for 16 x 32 of them, once per
 * block.
 *
 * Roofline     tdpbf16ps takes 16 cycles for 8192 multiply-adds, 16 times what vdpbf16ps does on
 *              the same core. Per key and 128 heads that is 272 cycles; tile loads, 8 cycles each
 *              (3 for 2 products, or 4 for 4), hide behind it. Turning adds 64 cycles per key,
 *              whatever the number of heads, and what is no product stays: softmax, probs, scales.
 *              Measured on a Xeon with AMX, one thread: FP8 rows 147 GFLOP/s at 16 heads and 197 at
 *              128 (AVX-512 BF16 there 56 and 67), so the products no longer bind.
 * Numerics     A step sums the products of even and odd values, 16 each, adds both, and adds that
 *              to the tile: with the 4 steps of a scale tile 21 roundings deep, where lanes have
 *              24. All are to nearest, and the order is fixed.
 *
 * GCC's tile loads do not tell the compiler that they read memory: barriers do.
 */
#ifndef SMLA_CPU_ATTENTION_TILES_H
#define SMLA_CPU_ATTENTION_TILES_H

#include <immintrin.h>

#include "cpu/machine/simd.h"

enum {
    TILE_ROWS = 16,
    TILE_BYTES_PER_ROW = 64,
    TILE_ELEMENTS = TILE_ROWS * WIDTH,
    VALUE_DEPTH = 16, /* steps of keys that add_value_rows takes at a time */
};

_Static_assert(UNIT_STEP == 2 && WIDTH == 16, "a row of a tile is a vector of pairs");
_Static_assert(KEY_ROWS_1 == 32 && KEY_ROWS_2 == 32, "two tiles of keys");
_Static_assert(VALUE_ROWS_1 == 32 && VALUE_ROWS_2 == 32, "two tiles of dimensions");
_Static_assert((int)VALUE_STEP == (int)WIDTH, "the pairs of a value chunk must lie in a row");

/* What ldtilecfg reads. */
typedef struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "the processor's layout");

/* Eight tiles of full size, for the calling thread, until release_tiles. */
SMLA_INLINE void
configure_tiles(void)
{
    static const tile_config config __attribute__((aligned(64))) = {
        .palette = 1,
        .bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    _tile_loadconfig(&config);
}

/* Without tiles in use a thread is switched faster. */
SMLA_INLINE void
release_tiles(void)
{
    _tile_release();
}

/* Stores before it are in memory for the tile loads after it. */
SMLA_INLINE void
finish_stores(void)
{
    __asm__ volatile("" ::: "memory");
}

/* sums += rows . heads over `steps` steps. `rows_bytes` separates two rows of a tile, `rows_16` the
 * 16 rows of tile 4 from those of tile 5, and `rows_step` one step from the next. */
SMLA_INLINE void
multiply_tiles(const unit_scalar *rows, int rows_bytes, int rows_16, int rows_step,
               const unit_scalar *heads, int steps, const int vectors)
{
    for (int step = 0; step < steps; step++) {
        _tile_loadd(4, rows, rows_bytes);
        _tile_loadd(6, heads, vectors * TILE_BYTES_PER_ROW);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, rows + rows_16, rows_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (vectors == 2) {
            _tile_loadd(7, heads + WIDTH, vectors * TILE_BYTES_PER_ROW);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        rows += rows_step;
        heads += vectors * TILE_ELEMENTS;
    }
}

/* Sums of 32 rows, one row after the other. */
SMLA_INLINE void
load_sums(const float *from, const int vectors)
{
    const float *const second = from + vectors * TILE_ELEMENTS;
    _tile_loadd(0, from, vectors * TILE_BYTES_PER_ROW);
    _tile_loadd(2, second, vectors * TILE_BYTES_PER_ROW);
    if (vectors == 2) {
        _tile_loadd(1, from + WIDTH, vectors * TILE_BYTES_PER_ROW);
        _tile_loadd(3, second + WIDTH, vectors * TILE_BYTES_PER_ROW);
    }
}

SMLA_INLINE void
store_sums(float *to, const int vectors)
{
    float *const second = to + vectors * TILE_ELEMENTS;
    _tile_stored(0, to, vectors * TILE_BYTES_PER_ROW);
    _tile_stored(2, second, vectors * TILE_BYTES_PER_ROW);
    if (vectors == 2) {
        _tile_stored(1, to + WIDTH, vectors * TILE_BYTES_PER_ROW);
        _tile_stored(3, second + WIDTH, vectors * TILE_BYTES_PER_ROW);
    }
}

/* scores[r][z] (+)= scale[r] * sum_k keys[r][k] * q[k][z] over one tile of `dims` dimensions, for
 * 32 keys. */
SMLA_INLINE void
score_rows(const unit_scalar *keys, const unit_scalar *q, int dims, const float *scale, bool first,
           float *scores, const int rows, const int vectors)
{
    float sums[32 * 2 * WIDTH] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    finish_stores();
    multiply_tiles(keys, KEY_STRIDE * 4, TILE_ROWS * KEY_STRIDE, WIDTH, q, dims / 32, vectors);
    store_sums(sums, vectors);
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            const int at = (r * vectors + v) * WIDTH;
            vfloat *const score = (vfloat *)(scores + at);
            const vfloat tile_sum = *as_vectors(sums + at) * scale[r];
            *score = tile_sum + (first ? (vfloat){0} : (vfloat)*score);
        }
    }
}

/* Turns the value pairs of a block, 16 dimensions of 16 pairs at a time, in place: a row of a tile
 * is a dimension. Pairs past `count` keys become zeros. */
SMLA_INLINE void
arrange_values(unit_scalar *values, int count)
{
    const int pairs = (count + 1) / 2;
    for (int chunk = 0; chunk < SMLA_KV_LORA_RANK / 16; chunk++) {
        for (int begin = 0; begin < pairs; begin += TILE_ROWS) {
            vuint *const tile = (vuint *)(values + chunk * VALUE_CHUNK + begin * VALUE_STEP);
            vuint square[WIDTH];
            for (int i = 0; i < WIDTH; i++) {
                square[i] = begin + i < pairs ? tile[i] : (vuint){0};
            }
            transpose(square);
            for (int i = 0; i < WIDTH; i++) {
                tile[i] = square[i];
            }
        }
    }
}

/* out[r][z] = out[r][z] * alpha[z] + sum_j values[j][r] * probs[j][z], for 32 dimensions. */
SMLA_INLINE void
add_value_rows(const unit_scalar *values, const unit_scalar *probs, int steps, const vfloat *alpha,
               float *out, const int rows, const int vectors)
{
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            vfloat *const sum = (vfloat *)(out + (r * vectors + v) * WIDTH);
            *sum = *sum * alpha[v];
        }
    }
    finish_stores();
    load_sums(out, vectors);
    multiply_tiles(values, TILE_BYTES_PER_ROW, VALUE_CHUNK, TILE_ELEMENTS, probs,
                   steps / VALUE_DEPTH, vectors);
    store_sums(out, vectors);
}

#endif /* SMLA_CPU_ATTENTION_TILES_H */
