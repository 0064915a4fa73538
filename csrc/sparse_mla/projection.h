/* projection.h: kv_b_proj as two matrices, the projections by them, quantisation to e4m3, and
 * linear layers of it. The conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_PROJECTION_H
#define SPARSE_MLA_PROJECTION_H

#include "sparse_mla/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a weight [rows, columns] lies in memory. */
typedef enum smla_storage {
    SMLA_STORED_EITHER = 0, /* its shape says so; [rows, columns] where both fit */
    SMLA_STORED_PLAIN = 1,
    SMLA_STORED_TRANSPOSED = 2 /* [columns, rows] */
} smla_storage;

/* kv_b_proj [512, H * (Pn + Pv)] or else its transpose -> W_UK [512, H, Pn], W_UV [512, H, Pv]; or
 * any other weight of so many rows as its parts have. An e4m3 weight has fp32 scales, where columns
 * are outputs: one value, of any rank; or one per output, [out] or like the weight with 1 for its
 * rows; or one per block of 128 x 128, with dimensions as the weight is stored. */
typedef struct smla_split_kv_b_proj_args {
    size_t struct_size;
    const DLTensor *weight;           /* bf16 | fp32 | fp16; e4m3 | uint8 with weight_scale_inv */
    const DLTensor *weight_scale_inv; /* optional */
    const DLTensor *w_uk;             /* out [512, H, Pn] bf16 | fp32 */
    const DLTensor *w_uv;             /* out [512, H, Pv], as w_uk */
    void *stream;
    int32_t storage;          /* smla_storage */
    int32_t rows_are_outputs; /* scales of outputs belong to rows, not to columns */
} smla_split_kv_b_proj_args;

SMLA_API smla_status smla_split_kv_b_proj(const smla_split_kv_b_proj_args *args, smla_error *error);

/* W_UK absorbed into the projection of queries: out[h L + l, q] = sum_n q_proj[q, h (Pn + R) + n] *
 * w_uk[l,h,n], over n < Pn. The result is stored as layers store weights: [outputs, inputs]. e4m3
 * values are multiplied by their scales in fp32 first; products are summed in fp32. Scales are as
 * those of smla_split_kv_b_proj. */
typedef struct smla_absorb_q_proj_args {
    size_t struct_size;
    const DLTensor
        *q_proj; /* [Lq, H * (Pn + R)] or else its transpose; bf16 | fp16 | fp32 | e4m3 */
    const DLTensor *q_scale; /* e4m3 values have one, else NULL */
    const DLTensor *w_uk;    /* [L, H, Pn] bf16 | fp16 | fp32, any strides */
    const DLTensor *out;     /* out [H * L, Lq] bf16 | fp32 */
    int32_t storage;         /* smla_storage of q_proj */
    void *stream;
} smla_absorb_q_proj_args;

SMLA_API smla_status smla_absorb_q_proj(const smla_absorb_q_proj_args *args, smla_error *error);

/* W_UV absorbed into the output projection: out[o, h L + l] = sum_v o_proj[o, h Pv + v] *
 * w_uv[l,h,v], in the same way. */
typedef struct smla_absorb_o_proj_args {
    size_t struct_size;
    const DLTensor *o_proj;  /* [hidden, H * Pv] or else its transpose; bf16 | fp16 | fp32 | e4m3 */
    const DLTensor *o_scale; /* e4m3 values have one, else NULL */
    const DLTensor *w_uv;    /* [L, H, Pv] bf16 | fp16 | fp32, any strides */
    const DLTensor *out;     /* out [hidden, H * L] bf16 | fp32 */
    int32_t storage;         /* smla_storage of o_proj */
    void *stream;
} smla_absorb_o_proj_args;

SMLA_API smla_status smla_absorb_o_proj(const smla_absorb_o_proj_args *args, smla_error *error);

/* out[t,h,l] = sum_p q_nope[t,h,p] * w_uk[l,h,p], summed in fp32 */
typedef struct smla_k_up_proj_args {
    size_t struct_size;
    const DLTensor *q_nope; /* [T, H, Pn] bf16 */
    const DLTensor *w_uk;   /* [512, H, Pn] bf16 */
    const DLTensor *out;    /* out [T, H, 512] bf16 */
    void *stream;
} smla_k_up_proj_args;

SMLA_API smla_status smla_k_up_proj(const smla_k_up_proj_args *args, smla_error *error);

/* out[t,h,v] = sum_l x[t,h,l] * w_uv[l,h,v], summed in fp32 */
typedef struct smla_v_up_proj_args {
    size_t struct_size;
    const DLTensor *x;    /* [T, H, 512] bf16 */
    const DLTensor *w_uv; /* [512, H, Pv] bf16 */
    const DLTensor *out;  /* out [T, H, Pv] bf16 */
    void *stream;
} smla_v_up_proj_args;

SMLA_API smla_status smla_v_up_proj(const smla_v_up_proj_args *args, smla_error *error);

/* out[t,n] = sum_l kv_c[t,l] * kv_b_proj[l,n], summed in fp32: the keys' NoPE parts and the values
 * of all heads, side by side. kv_b_proj may have any strides: a layer's weight [N, 512] is given as
 * its transpose, a view. */
typedef struct smla_kv_up_proj_args {
    size_t struct_size;
    const DLTensor *kv_c;      /* [T, 512] bf16 */
    const DLTensor *kv_b_proj; /* [512, N = H * (Pn + Pv)] bf16 */
    const DLTensor *out;       /* out [T, N] bf16 */
    void *stream;
} smla_kv_up_proj_args;

SMLA_API smla_status smla_kv_up_proj(const smla_kv_up_proj_args *args, smla_error *error);

/* out[t,g,n] = sum_r o[t,g,r] * weight[g,n,r], rounded once. Either o and weight are bf16 and there
 * are no scales, or both are e4m3 with scales, R is a multiple of 128 (512 for int32 scales), and
 * every 128 values of r are summed before they are scaled, in fp32. */
typedef struct smla_grouped_output_projection_args {
    size_t struct_size;
    const DLTensor *o;            /* [T, G, R] bf16 | e4m3 | uint8 */
    const DLTensor *o_scale;      /* [>= T, G, R / 128] fp32 | [>= T, G, R / 512] int32 of four
                                   * exponents, as fused_inv_rope_fp8_quant writes them; or NULL */
    const DLTensor *weight;       /* [G, N, R], bf16 or e4m3 as o */
    const DLTensor *weight_scale; /* [G, ceil(N / 128), R / 128] fp32; or NULL */
    const DLTensor *out;          /* out [T, G, N] bf16 */
    void *stream;
} smla_grouped_output_projection_args;

SMLA_API smla_status smla_grouped_output_projection(const smla_grouped_output_projection_args *args,
                                                    smla_error *error);

/* One scale for the whole array: max(amax, 1e-10) / 448. out = e4m3(x / scale), saturating. */
typedef struct smla_dynamic_per_tensor_quant_args {
    size_t struct_size;
    const DLTensor *x;     /* any rank up to 8, bf16 | fp16 | fp32; amax leaves out NaN */
    const DLTensor *out;   /* out, the shape of x, e4m3 | uint8 */
    const DLTensor *scale; /* out, one fp32 of any rank */
    void *stream;
} smla_dynamic_per_tensor_quant_args;

SMLA_API smla_status smla_dynamic_per_tensor_quant(const smla_dynamic_per_tensor_quant_args *args,
                                                   smla_error *error);

/* A scale per group of group_rows x group_columns values: amax = max(max |x|, 1e-12), out =
 * e4m3(x * (448 / amax)), saturating, and descale = amax / 448, each step rounded to fp32. */
typedef struct smla_scaled_quantize_args {
    size_t struct_size;
    const DLTensor *x;   /* [M, N] bf16 | fp16 | fp32; amax leaves out NaN, infinity is FLT_MAX */
    const DLTensor *out; /* out [M, N] e4m3 | uint8 */
    const DLTensor *descale; /* out [M / group_rows, N / group_columns] fp32, any strides */
    int64_t group_rows;      /* a divisor of M, or -1 = all rows, one group */
    int64_t group_columns;   /* a divisor of N, or -1 = all columns */
    void *stream;
} smla_scaled_quantize_args;

SMLA_API smla_status smla_scaled_quantize(const smla_scaled_quantize_args *args, smla_error *error);

/* out[t,n] = sum_k x[t,k] * weight[n,k], where x is quantised by scaled_quantize first. Every 128
 * products are summed before they are scaled. The input group and the shape of descale name one of
 * four schemes:
 *   tensor         (-1, -1)   descale is one value, of any rank
 *   block          (1, 128)   [ceil(out / 128), in / 128]
 *   token_tensor   (1, -1)    one value
 *   token_channel  (1, -1)    [out] | [out, 1]
 */
typedef struct smla_fp8_linear_args {
    size_t struct_size;
    const DLTensor *x;         /* [T, in] bf16, in a multiple of 128 */
    const DLTensor *weight;    /* [out, in] e4m3 | uint8 */
    const DLTensor *descale;   /* fp32, any strides */
    const DLTensor *out;       /* out [T, out] bf16 */
    const DLTensor *workspace; /* uint8 [T * in + 4 * number of input groups + 15], or as many less
                                * as it is aligned to 16 bytes; its contents are overwritten */
    int64_t input_group_rows;
    int64_t input_group_columns;
    void *stream;
} smla_fp8_linear_args;

SMLA_API smla_status smla_fp8_linear(const smla_fp8_linear_args *args, smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_PROJECTION_H */
