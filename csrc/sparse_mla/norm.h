/* norm.h: norms around the attention of DeepSeek V4, one of them with RoPE and the insert of keys.
 * The conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_NORM_H
#define SPARSE_MLA_NORM_H

#include "sparse_mla/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y = bf16(x * rsqrt(mean(x^2) + eps) * weight) for the rows of q and of kv, in fp32. The rows are
 * usually columns of one buffer. q_out may be q itself, and kv_out kv. */
typedef struct smla_fused_q_kv_rmsnorm_args {
    size_t struct_size;
    const DLTensor *q;         /* [T, any size] bf16 */
    const DLTensor *kv;        /* [T, 512] bf16 */
    const DLTensor *q_weight;  /* [size of a row of q] bf16 | fp32 */
    const DLTensor *kv_weight; /* [512] bf16 | fp32 */
    const DLTensor *q_out;     /* out, the shape of q, bf16 */
    const DLTensor *kv_out;    /* out, the shape of kv, bf16 */
    double eps;                /* 0, or FLT_MIN and more */
    void *stream;
} smla_fused_q_kv_rmsnorm_args;

SMLA_API smla_status smla_fused_q_kv_rmsnorm(const smla_fused_q_kv_rmsnorm_args *args,
                                             smla_error *error);

/* Before attention, in one launch. Every head of q becomes RMSNorm(q) without a weight, turned by
 * RoPE of its token's position: in place, or in q_out. The first slots of slot_mapping get the rows
 * of kv, turned and rounded to bf16, in the cache's format, as quantize_and_insert_k_cache writes
 * them. T is the number of rows of q_out, or else of q. A bad position or slot is an error on the
 * CPU; CUDA does not turn that token, or skips that row. */
typedef struct smla_qnorm_insert_args {
    size_t struct_size;
    const DLTensor *q;            /* [>= T, H, 512] bf16; out, if q_out is absent */
    const DLTensor *q_out;        /* out [T, >= H, 512] bf16, optional, may be q; e4m3 | uint8 and
                                   * required with q_scale_inv. Heads from H on become 0. */
    const DLTensor *kv;           /* [>= T, 512] bf16 */
    const DLTensor *positions;    /* [>= T] int64 | int32 */
    const DLTensor *rope_table;   /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    const DLTensor *kv_cache;     /* out: a cache of 512 values per token */
    const DLTensor *slot_mapping; /* [<= T] int64 | int32; negative slots are skipped */
    double eps;                   /* 0, or FLT_MIN and more */
    smla_scale_arg q_scale_inv;   /* if given, q_out = e4m3(value * q_scale_inv) */
    smla_scale_arg kv_scale;      /* fp8_e4m3 only */
    int64_t block_size;           /* tokens per page of a cache [pages, page bytes], else 0 */
    int32_t kv_format;            /* smla_kv_format */
    void *stream;
} smla_qnorm_insert_args;

SMLA_API smla_status smla_fused_qnorm_rope_kv_insert(const smla_qnorm_insert_args *args,
                                                     smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_NORM_H */
