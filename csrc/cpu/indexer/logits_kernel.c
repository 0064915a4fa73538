/* logits_kernel.c: scores a tile of keys for one instruction set.
 *
 * Computes     pack_keys  transposes the keys of a tile, so that a vector has a value of WIDTH keys
 *              add_heads  sums[n] += sum_h weights[h] * relu(q[h] . key n)
 * Shapes       keys [64][128], q [4][128], panel [128][64], all fp32
 * Roofline     The multipliers bind: 64 * 128 products per head and tile.
 * Numerics     fp32. A dot product is the sum of four sums of 32 products, and four heads are
 *              summed before they join the others: errors are below 2^-18 of the sum of sizes.
 *              NaN passes relu. The order depends on the number of heads alone.
 * Source       DeepSeek V3.2's lightning indexer, for the formula.
 */
#define SMLA_SIMD_WIDTH SMLA_LANES

#include "cpu/indexer/score_tiles.h"
#include "cpu/machine/simd.h"

enum {
    KEYS = SMLA_LOGITS_KEYS,
    HEADS = SMLA_LOGITS_HEADS,
    DIM = SMLA_INDEX_HEAD_DIM,
    VECTORS = 2,    /* vectors of keys per step */
    BLOCK_DIM = 32, /* products that are summed on their own */
    STEP_KEYS = VECTORS * WIDTH,
};

_Static_assert(KEYS % STEP_KEYS == 0 && DIM % BLOCK_DIM == 0, "whole steps");

static void
pack_keys(const float *keys, float *panel)
{
    for (int d = 0; d < DIM; d += WIDTH) {
        for (int n = 0; n < KEYS; n += WIDTH) {
            vuint square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                square[i] = *(const vuint *)(keys + (n + i) * DIM + d);
            }
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; i++) {
                *(vuint *)(panel + (d + i) * KEYS + n) = square[i];
            }
        }
    }
}

/* The same for a constant number of heads. */
SMLA_INLINE void
add_some_heads(const float *q, const float *weights, const float *panel, float *sums,
               const int count)
{
    for (int n = 0; n < KEYS; n += STEP_KEYS) {
        vfloat dots[HEADS * VECTORS] = {{0}};
        for (int block = 0; block < DIM; block += BLOCK_DIM) {
            vfloat part[HEADS * VECTORS];
#pragma GCC unroll 8
            for (int i = 0; i < count * VECTORS; i++) {
                part[i] = (vfloat){0};
            }
            for (int d = block; d < block + BLOCK_DIM; d++) {
#pragma GCC unroll 4
                for (int h = 0; h < count; h++) {
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; v++) {
                        part[h * VECTORS + v] +=
                            q[h * DIM + d] * *as_vectors(panel + d * KEYS + n + v * WIDTH);
                    }
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < count * VECTORS; i++) {
                dots[i] += part[i];
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            vfloat sum = (vfloat){0};
#pragma GCC unroll 4
            for (int h = 0; h < count; h++) {
                const vfloat dot = dots[h * VECTORS + v];
                sum += weights[h] * select_lanes(dot < 0.0f, (vfloat){0}, dot);
            }
            *(vfloat *)(sums + n + v * WIDTH) += sum;
        }
    }
}

static void
add_heads(const float *q, const float *weights, int count, const float *panel, float *sums)
{
    switch (count) {
    case 1: add_some_heads(q, weights, panel, sums, 1); break;
    case 2: add_some_heads(q, weights, panel, sums, 2); break;
    case 3: add_some_heads(q, weights, panel, sums, 3); break;
    default: add_some_heads(q, weights, panel, sums, HEADS);
    }
}

const smla_logits_isa SMLA_OF_ISA(smla_logits) = {.pack_keys = pack_keys, .add_heads = add_heads};
