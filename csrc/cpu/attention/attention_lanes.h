/* attention_lanes.h: the two products of the attention kernel in vectors of heads. The unit's
 * multiply_add multiplies a scalar of a key or value with a vector of heads.
 */
#pragma once

#include "cpu/machine/simd.h"

enum {
    CHUNK_DIMS = 16, /* dimensions per innermost sum of a score */
    VALUE_DEPTH = 1, /* steps of keys that add_value_rows takes at a time */
};

/* Vectors need no preparation, unlike attention_tiles.h. */
SMLA_INLINE void
begin_products(void)
{
}

SMLA_INLINE void
end_products(void)
{
}

_Static_assert(16 % VALUE_ROWS_1 == 0 && 16 % VALUE_ROWS_2 == 0, "whole steps of value chunks");

/* scores[r][z] (+)= scale[r] * sum_k keys[r][k] * q[k][z] over one tile of `dims` dimensions, for
 * `rows` keys. Each chunk's sum starts from zero, which bounds the depth of the sum and takes the
 * latency of the multiply-add off the critical path. Without scales they are 1. */
SMLA_INLINE void
score_rows(const unit_scalar *keys, const unit_scalar *q, int dims, const float *scale, bool first,
           float *scores, const bool has_scales, const int rows, const int vectors)
{
    vfloat total[16];
    for (int i = 0; i < rows * vectors; i++) {
        total[i] = (vfloat){0};
    }
    for (int chunk = 0; chunk < dims / CHUNK_DIMS; chunk++) {
        vfloat sum[16];
#pragma GCC unroll 16
        for (int i = 0; i < rows * vectors; i++) {
            sum[i] = (vfloat){0};
        }
#pragma GCC unroll 16
        for (int k = 0; k < CHUNK_DIMS / UNIT_STEP; k++) {
            unit_vector b[2];
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                b[v] = *(const unit_vector *)(q + (k * vectors + v) * WIDTH);
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++) {
                    sum[r * vectors + v] =
                        multiply_add(sum[r * vectors + v], keys[r * KEY_STRIDE + k], b[v]);
                }
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows * vectors; i++) {
            total[i] += sum[i];
        }
        keys += CHUNK_DIMS / UNIT_STEP;
        q += CHUNK_DIMS / UNIT_STEP * vectors * WIDTH;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) {
            vfloat *const score = (vfloat *)(scores + (r * vectors + v) * WIDTH);
            vfloat tile_sum = total[r * vectors + v];
            if (has_scales) {
                tile_sum *= scale[r];
            }
            *score = tile_sum + (first ? (vfloat){0} : (vfloat)*score);
        }
    }
}

/* Nothing to do: values stay where the unit has put them. */
SMLA_INLINE void
arrange_values(unit_scalar *values, int num_dims, int count)
{
    (void)values;
    (void)num_dims;
    (void)count;
}

/* out[r][z] = out[r][z] * alpha[z] + sum_j values[j][r] * probs[j][z], for `rows` dimensions. */
SMLA_INLINE void
add_value_rows(const unit_scalar *values, const unit_scalar *probs, int steps, const vfloat *alpha,
               float *out, const int rows, const int vectors)
{
    vfloat sum[16];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            sum[r * vectors + v] = *as_vectors(out + (r * vectors + v) * WIDTH) * alpha[v];
        }
    }
    for (int j = 0; j < steps; j++) {
        unit_vector b[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            b[v] = *(const unit_vector *)(probs + v * WIDTH);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                sum[r * vectors + v] = multiply_add(sum[r * vectors + v], values[r], b[v]);
            }
        }
        values += VALUE_STEP;
        probs += vectors * WIDTH;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            *(vfloat *)(out + (r * vectors + v) * WIDTH) = sum[r * vectors + v];
        }
    }
}
