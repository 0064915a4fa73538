/* rope.h: RoPE of queries, of keys and of what attention returns. The conventions are in
 * sparse_mla.h. */
#ifndef SPARSE_MLA_ROPE_H
#define SPARSE_MLA_ROPE_H

#include "sparse_mla/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Turns q_pe and k_pe to their tokens' positions. A pair is two neighbouring values, or with
 * is_neox values i and i + R / 2: (a, b) -> (a cos - b sin, b cos + a sin), each product rounded to
 * fp32, then the sum, then once to the arrays' dtype. An output may be its input itself. A position
 * outside the table is an error on the CPU; CUDA copies that token as it is. */
typedef struct smla_apply_rope_args {
    size_t struct_size;
    const DLTensor *positions;  /* [>= T] int64 | int32 */
    const DLTensor *q_pe;       /* [T, H, R] bf16 | fp32, R even */
    const DLTensor *k_pe;       /* [T, R], the dtype of q_pe; optional */
    const DLTensor *rope_table; /* [rows, R] fp32 | bf16: R / 2 cosines, then R / 2 sines */
    const DLTensor *q_out;      /* out, shape and dtype of q_pe */
    const DLTensor *k_out;      /* out, shape and dtype of k_pe; with k_pe */
    int32_t is_neox;            /* 1: halves instead of neighbours */
    int32_t inverse;            /* 1: by the negative angles */
    void *stream;
} smla_apply_rope_args;

SMLA_API smla_status smla_apply_rope(const smla_apply_rope_args *args, smla_error *error);

/* apply_rope of q_pe and k_pe, then concat_and_cache_mla of kv_c and the rounded result of k_pe,
 * byte for byte, in one launch. k_pe itself is not written. The first tokens go to the slots of
 * slot_mapping, which may be fewer than T; a negative slot skips its token. */
typedef struct smla_rope_and_cache_mla_args {
    size_t struct_size;
    const DLTensor *positions;    /* [>= T] int64 | int32 */
    const DLTensor *q_pe;         /* [T, H, 64] bf16 | fp32 */
    const DLTensor *k_pe;         /* [T, 64], the dtype of q_pe */
    const DLTensor *rope_table;   /* [rows, 64] fp32 | bf16: 32 cosines, then 32 sines */
    const DLTensor *kv_c;         /* [>= slots, 512], the dtype of q_pe */
    const DLTensor *kv_cache;     /* [B, block, 576] bf16 | [B, block, 656] bytes, written */
    const DLTensor *slot_mapping; /* [<= T] int64 | int32 */
    const DLTensor *q_out;        /* out, shape and dtype of q_pe, or q_pe itself */
    int32_t is_neox;              /* 1: halves instead of neighbours */
    int32_t kv_format;            /* smla_kv_format */
    void *stream;
    smla_scale_arg kv_scale; /* 1: rows of neither format have a scale of the whole cache */
} smla_rope_and_cache_mla_args;

SMLA_API smla_status smla_rope_and_cache_mla(const smla_rope_and_cache_mla_args *args,
                                             smla_error *error);

/* How the scales of 128 values each are stored. They are powers of two. */
typedef enum smla_scale_layout {
    SMLA_SCALES_INFER = 0,   /* the dtype of the array decides */
    SMLA_SCALES_FP32 = 1,    /* one fp32 per scale */
    SMLA_SCALES_UE8M0X4 = 2, /* four exponents (2^(e - 127)) per int32, the first in its low byte */
} smla_scale_layout;

/* Turns the last 64 values of every head back to position 0, then quantises all 512: per 128 values
 * the scale is the smallest power of two with 448 scale >= max(amax, 1e-10), and a byte is
 * e4m3(x / scale). A bad position is an error on the CPU; CUDA does not turn that token. Rows of
 * out_scale from T on, up to the next multiple of 4, become 0. */
typedef struct smla_fused_inv_rope_fp8_quant_args {
    size_t struct_size;
    const DLTensor *o;          /* [T, H, 512] bf16 */
    const DLTensor *positions;  /* [>= T] int64 | int32 */
    const DLTensor *rope_table; /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    const DLTensor *out;        /* out [T, G, H / G * 512] e4m3 | uint8; bf16 without out_scale */
    const DLTensor *out_scale;  /* out [>= T, G, H / G * 4] fp32 | [>= T, G, H / G] int32; optional:
                                * without it the turned values are rounded to bf16 */
    int64_t groups;             /* G, which divides H */
    int32_t scale_layout;       /* smla_scale_layout */
    void *stream;
} smla_fused_inv_rope_fp8_quant_args;

SMLA_API smla_status smla_fused_inv_rope_fp8_quant(const smla_fused_inv_rope_fp8_quant_args *args,
                                                   smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_ROPE_H */
