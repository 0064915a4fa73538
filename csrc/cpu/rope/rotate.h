/* rotate.h: the kernels of RoPE, and where a token's angles are. rotate_kernel.c is compiled once
 * per instruction set into a smla_rotate_isa.
 */
#pragma once

#include "core/backend.h"
#include "core/params_rope.h"

/* RoPE of heads. */
typedef struct smla_rotate_isa {
    /* A head [512] whose last 64 values are rotated back to position 0 -> bytes, one scale per 128.
     * `cos_sin` is the table's row [64] of the head's position. */
    void (*rotate_back_to_e4m3)(const uint16_t *x, const float *cos_sin, uint8_t *out,
                                float scales[SMLA_OUTPUT_SCALES]);
    /* A head whose last 64 values are rotated to its position, or back from it, as bf16. */
    void (*rotate_to_bf16)(const uint16_t *x, const float *cos_sin, bool is_inverse, uint16_t *out);
    /* A head [128] of the indexer whose last 64 values are rotated to its position, as bf16. */
    void (*rotate_index_head)(const uint16_t *x, const float *cos_sin, uint16_t *out);
} smla_rotate_isa;

static inline int64_t
read_position(const smla_rope *rope, int64_t token)
{
    const int64_t at = token * rope->positions_stride;
    return rope->positions_are_int64 ? ((const int64_t *)rope->positions)[at]
                                     : ((const int32_t *)rope->positions)[at];
}

/* The table's row of a token's position. */
static inline const float *
find_angles(const smla_rope *rope, int64_t token)
{
    return rope->cos_sin + read_position(rope, token) * rope->cos_sin_stride_pos;
}
