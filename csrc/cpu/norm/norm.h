/* norm.h: the kernels of norms. norm_kernel.c is compiled once per instruction set into a
 * smla_norm_isa.
 */
#pragma once

#include "core/backend.h"
#include "core/params_compressor.h"
#include "core/params_merge.h"
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

/* Rows of bf16, fp16 or fp32, contiguous, of any alignment, and their weights. */
typedef struct smla_weighted_rows {
    int64_t num_rows; /* at least 1 */
    smla_float_type type;
    const uint8_t *rows[SMLA_MAX_PARTS];
    float weights[SMLA_MAX_PARTS];
} smla_weighted_rows;

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
    /* out = the sum of the rows, each times its weight; out may be one of the rows. */
    void (*add_weighted)(const smla_weighted_rows *rows, int64_t count, smla_float_type out_type,
                         void *out);
} smla_norm_isa;
