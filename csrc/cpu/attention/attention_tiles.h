/* attention_tiles.h: the two products of the attention kernel in AMX tiles, with the operands that
 * mqa_unit_bf16.h lays out.
 *
 * A product multiplies 32 rows (keys, or dimensions of the values) with one or two vectors of
 * heads. A step is 16 pairs of bf16 deep. A tile is 16 x 64 bytes:
 *   0 1   sums of rows 0...15 with vector 0, 1      4   rows 0...15     6   pairs of vector 0
 *   2 3   sums of rows 16...31                      5   rows 16...31    7   pairs of vector 1
 * A key already is a row of pairs, and queries and probs already are rows of heads. Only the values
 * must be transposed, from rows of dimensions to rows of keys: 64 shuffles per 16 x 32 values, once
 * per block.
 *
 * Roofline     tdpbf16ps takes 16 cycles for 8192 multiply-adds, 16 times the rate of vdpbf16ps on
 *              the same core. A key and 128 heads take 272 cycles, which hide the tile loads of 8
 *              cycles each (3 loads per 2 products, or 4 per 4). Transposing adds 64 cycles per key
 *              for any number of heads; softmax, probs and scales take their time as before.
 *              Measured on a Xeon with AMX, one thread: FP8 rows 147 GFLOP/s at 16 heads and 197 at
 *              128 (AVX-512 BF16 there: 56 and 67), so the products no longer bind.
 * Numerics     A step sums 16 products of even values and 16 of odd values, adds both sums, and
 *              adds the result to the tile. The 4 steps of a scale tile are 21 roundings deep,
 *              where lanes have 24. All roundings are to nearest, and the order is fixed.
 *
 * GCC's tile loads do not tell the compiler that they read memory; finish_stores does.
 */
#pragma once

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

/* The operand of ldtilecfg. */
typedef struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "the processor's layout");

/* Gives the calling thread eight tiles of full size, until end_products. */
SMLA_INLINE void
begin_products(void)
{
    static const tile_config config __attribute__((aligned(64))) = {
        .palette = 1,
        .bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    _tile_loadconfig(&config);
}

/* Linux switches threads faster that use no tiles. */
SMLA_INLINE void
end_products(void)
{
    _tile_release();
}

/* A compiler barrier: tile loads after it see the stores before it. */
SMLA_INLINE void
finish_stores(void)
{
    __asm__ volatile("" ::: "memory");
}

/* sums += rows . heads over `steps` steps. Rows of a tile are `rows_bytes` bytes apart. The rows of
 * tile 5 lie `rows_16` elements after those of tile 4; steps are `rows_step` elements apart. */
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

/* Loads the sums of 32 rows, which lie one row after another. */
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

/* scores[r][z] (+)= scale[r] * sum_k keys[r][k] * q[k][z] over `dims` dimensions, for 32 keys.
 * Without scales, `first` is true. */
SMLA_INLINE void
score_rows(const unit_scalar *keys, const unit_scalar *q, int dims, const float *scale, bool first,
           float *scores, const bool has_scales, const int rows, const int vectors)
{
    float sums[32 * 2 * WIDTH] __attribute__((aligned(64)));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    finish_stores();
    multiply_tiles(keys, KEY_STRIDE * 4, TILE_ROWS * KEY_STRIDE, WIDTH, q, dims / 32, vectors);
    if (!has_scales) {
        store_sums(scores, vectors);
        return;
    }
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

/* Transposes the value pairs of a block in place, 16 dimensions of 16 pairs at a time. A row of a
 * tile is then a dimension. Pairs past `count` keys become zeros. */
SMLA_INLINE void
arrange_values(unit_scalar *values, int num_dims, int count)
{
    const int pairs = (count + 1) / 2;
    for (int chunk = 0; chunk < num_dims / 16; chunk++) {
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
    vint changes = {0}; /* maxima grow in few blocks */
    for (int v = 0; v < vectors; v++) {
        changes |= alpha[v] != 1.0f;
    }
    for (int r = 0; r < rows && has_lane(changes); r++) {
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
