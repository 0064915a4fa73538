/* norm.h: the kernels of norms and of RoPE. norm_kernel.h is compiled once per instruction set into
 * a smla_norm_isa, and rotate_kernel.h into a smla_rotate_isa.
 */
#pragma once

#include "core/backend.h"
#include "core/params_compressor.h"
#include "core/params_norm.h"

/* What the slices of a pool have so far, by channel; params_compressor.h says what that is. */
typedef struct smla_pool {
    float largest[SMLA_POOL_SLICES][SMLA_V4_HEAD_DIM];
    float weights[SMLA_POOL_SLICES][SMLA_V4_HEAD_DIM];
    float totals[SMLA_POOL_SLICES][SMLA_V4_HEAD_DIM];
} smla_pool;

/* Values and scores of `dim` channels of the states that are pooled at a time. */
typedef struct smla_pool_rows {
    const float *values[SMLA_POOL_ROWS];
    const float *scores[SMLA_POOL_ROWS];
} smla_pool_rows;

/* The weight of a norm, and its epsilon. */
typedef struct smla_pool_norm {
    const void *weight; /* [dim] */
    smla_float_type weight_type;
    float eps;
} smla_pool_norm;

typedef struct smla_norm_isa {
    /* out = bf16(x * rsqrt(mean(x^2) + eps) * weight) for one row. out may be x. */
    void (*normalize)(const uint16_t *x, const void *weight, smla_float_type weight_type,
                      int64_t size, float eps, uint16_t *out);
    /* A head that is normalised without a weight, then rotated to its position. out may be x. */
    void (*normalize_head)(const uint16_t *x, const float *cos_sin, float eps, uint16_t *out);
    /* The same head, times `scale`, as bytes. */
    void (*normalize_head_to_e4m3)(const uint16_t *x, const float *cos_sin, float eps, float scale,
                                   uint8_t *out);
    /* A state row: values of kv, then score + ape, `width` of each. */
    void (*save_state)(const void *kv, const void *score, smla_float_type type, const float *ape,
                       int64_t width, float *row);
    /* Begins a pool with its first states, or adds states to it. */
    void (*pool_states)(smla_pool *pool, const smla_pool_rows *rows, int64_t dim, bool is_first);
    /* The pooled values, normalised with a weight, their last 64 rotated, as bf16. */
    void (*finish_pool)(const smla_pool *pool, int64_t dim, const smla_pool_norm *norm,
                        const float *cos_sin, uint16_t *key);
    /* out = weights[0] * a + weights[1] * b for a row of bf16 or fp32; a alone if b is NULL. */
    void (*add_weighted)(const void *a, const void *b, const float weights[2], smla_float_type type,
                         int64_t count, void *out);
} smla_norm_isa;

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

extern const smla_norm_isa smla_norm_base;
extern const smla_rotate_isa smla_rotate_base;
#if defined(SMLA_HAVE_X86_ISA)
extern const smla_norm_isa smla_norm_avx2;
extern const smla_norm_isa smla_norm_avx512;
extern const smla_rotate_isa smla_rotate_avx2;
#endif
