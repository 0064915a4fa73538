/* params_projection.h: the params of projections, and of what prepares their operands. */
#pragma once

#include "core/params.h"

/* A weight as it is stored, in either order of its dimensions. The scale of an element is that of
 * its block of 1 or 2^7 rows by 1 or 2^7 columns; a stride of 0 makes it the same for all. */
typedef struct smla_weight {
    const void *values;
    smla_float_type type;
    int64_t stride_row;
    int64_t stride_column;
    const float *scale; /* the scales of e4m3 values; NULL: 1 */
    int64_t scale_stride_row;
    int64_t scale_stride_column;
    int32_t scale_row_bits; /* log2 of the rows of a block: 0 or 7 */
    int32_t scale_column_bits;
} smla_weight;

/* A weight in two parts: columns h * (Pn + Pv) and on are head h's, Pn of them for `first`. */
typedef struct smla_split_kv_b_proj_params {
    smla_call call;
    int64_t num_rows; /* L */
    int64_t num_heads;
    int64_t nope_dim;   /* Pn */
    int64_t value_dim;  /* Pv */
    smla_weight weight; /* [L, H * (Pn + Pv)] */
    bool is_fp32;       /* the parts are fp32, else bf16 */
    void *w_uk;         /* [L, H, Pn] */
    int64_t w_uk_stride_in;
    int64_t w_uk_stride_head;
    void *w_uv; /* [L, H, Pv] */
    int64_t w_uv_stride_in;
    int64_t w_uv_stride_head;
} smla_split_kv_b_proj_params;

/* out(r,h,l) = sum_n x(r, h * head_columns + n) * w[l,h,n], over n < num_values: the product of two
 * weights, per head. One of the result's strides, along r or l, is 1. */
typedef struct smla_absorb_params {
    smla_call call;
    int64_t num_rows; /* x has so many rows: Lq, or hidden */
    int64_t num_heads;
    int64_t num_latents; /* L */
    int64_t num_values;  /* Pn, or Pv */
    smla_weight x;       /* [rows, H * head_columns] */
    int64_t head_columns;
    const void *w; /* [L, H, n] bf16 | fp16 | fp32 */
    smla_float_type w_type;
    int64_t w_stride_latent;
    int64_t w_stride_head;
    int64_t w_stride_value;
    bool is_fp32; /* out is, else bf16 */
    void *out;    /* [rows, H * L] for outputs, [H * L, rows] for queries */
    int64_t out_stride_row;
    int64_t out_stride_head;
    int64_t out_stride_latent;
} smla_absorb_params;

/* The scales of two e4m3 operands. A sum over 128 values of k is multiplied in fp32 by
 * x_scale * w_scale, a product that is rounded first; in fp64 where fp32 does not hold it. */
typedef struct smla_projection_scales {
    const void *x;    /* [T, H, k / 128] fp32, or [T, H, k / 512] int32 */
    bool x_is_packed; /* four exponents per int32, the first in its low byte */
    /* One scale per output, which multiplies the whole sum, instead of one per 128 x 128 values. */
    bool w_is_per_output;
    int64_t x_stride_token;
    int64_t x_stride_head;
    int64_t x_stride_column;
    const float *w; /* [H, n / 128, k / 128], or [H, n] */
    int64_t w_stride_head;
    int64_t w_stride_outer; /* along n or n / 128 */
    int64_t w_stride_inner;
} smla_projection_scales;

/* out[t,h,n] = sum_k x[t,h,k] * w(k,h,n): the up projections, which differ in the strides of w
 * (kv_up_proj has one head for all, and strides of w as the caller likes), and the output
 * projection, whose heads are groups and whose rows of w are contiguous. */
typedef struct smla_projection_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t inner_dim; /* k */
    int64_t outer_dim; /* n */
    bool is_e4m3;  /* x and w are e4m3 with `scales`, k is a multiple of 128, w_stride_inner 1 */
    const void *x; /* [T, H, k] bf16 | e4m3 */
    int64_t x_stride_token;
    int64_t x_stride_head;
    const void *w; /* bf16 | e4m3 */
    int64_t w_stride_inner;
    int64_t w_stride_head;
    int64_t w_stride_outer;
    smla_projection_scales scales;
    uint16_t *out; /* [T, H, n] bf16 */
    int64_t out_stride_token;
    int64_t out_stride_head;
} smla_projection_params;

typedef struct smla_quant_params {
    smla_call call;
    int ndim;
    int64_t shape[SMLA_MAX_RANK];
    int64_t x_strides[SMLA_MAX_RANK];
    int64_t out_strides[SMLA_MAX_RANK];
    const void *x;
    smla_float_type type;
    uint8_t *out;
    float *scale;
} smla_quant_params;

/* x in groups of group_rows x group_columns values, each with a scale: q = e4m3(x * (448 / amax)),
 * descale = amax / 448. A group is at least 1 x 1; one of an axis without values has none. */
typedef struct smla_scaled_quantize_params {
    smla_call call;
    int64_t num_rows;    /* M */
    int64_t num_columns; /* Nc */
    int64_t group_rows;
    int64_t group_columns;
    int64_t num_row_groups;
    int64_t num_column_groups;
    const void *x; /* [M, Nc], rows contiguous */
    smla_float_type type;
    int64_t x_stride_row;
    uint8_t *out; /* [M, Nc] e4m3, rows contiguous */
    int64_t out_stride_row;
    float *descale; /* [num_row_groups, num_column_groups] */
    int64_t descale_stride_row;
    int64_t descale_stride_column;
} smla_scaled_quantize_params;

/* The least that an amax counts as, so that a group of zeros has a scale. */
#define SMLA_SCALED_QUANTIZE_FLOOR 1e-12f

/* fp8_linear: x is quantised into the workspace, and then multiplied. */
typedef struct smla_fp8_linear_params {
    smla_call call;
    smla_scaled_quantize_params quantize;
    smla_projection_params project; /* one head */
} smla_fp8_linear_params;
