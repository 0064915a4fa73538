/* compressor.h: the compressor of DeepSeek V4. The conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_COMPRESSOR_H
#define SPARSE_MLA_COMPRESSOR_H

#include "sparse_mla/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* DeepSeek V4's compressor keeps a state row per token in fp32: kv, then score + ape[position % r].
 * Both have c D values: D is 512 or 128, and c is 2 where r is 4, else 1. A bad position or slot is
 * an error on the CPU; CUDA skips that token. Tokens must have different slots. */
typedef struct smla_partial_states_args {
    size_t struct_size;
    const DLTensor *kv;           /* [>= T, c D] fp32 | bf16 */
    const DLTensor *score;        /* [>= T, c D], the dtype of kv */
    const DLTensor *ape;          /* [r, c D] fp32 */
    const DLTensor *positions;    /* [>= T] int64 | int32 */
    const DLTensor *state;        /* out [pages, block_size, 2 c D] fp32 */
    const DLTensor *slot_mapping; /* [T] int64 | int32; negative slots are skipped */
    void *stream;
} smla_partial_states_args;

SMLA_API smla_status smla_save_partial_states(const smla_partial_states_args *args,
                                              smla_error *error);

/* Turns each group of r positions whose last token is in the step into a row of a compressed cache.
 * Token t closes a group if its slot and its kv slot are not negative and (position + 1) % r is 0.
 * Its row pools the states of the last c r positions of its request, channel by channel: the sum of
 * kv weighted by the softmax of the scores; where c is 2, the first r of them with their first D
 * channels, the others with their last. Then RMSNorm with weights, RoPE at the group's first
 * position, and one rounding to bf16. A position without a page takes no part. With kv, score and
 * ape the call does smla_save_partial_states, too: the tokens of a request must then be neighbours
 * in the order of their positions. A bad position, slot, page or request is an error on the CPU;
 * CUDA skips that token or page, and does not turn a key past the end of rope_table. */
typedef struct smla_compress_args {
    size_t struct_size;
    const DLTensor *state;            /* [pages, block_size, 2 c D] fp32; out, if kv is given */
    const DLTensor *block_table;      /* [R, W] int32: pages of state; negative = none */
    const DLTensor *req_id_per_token; /* [>= T] int32 */
    const DLTensor *positions;        /* [>= T] int64 | int32 */
    const DLTensor *slot_mapping;     /* [T] int64 | int32: rows of state */
    const DLTensor *kv_cache;         /* out: a cache of D values per row */
    const DLTensor *kv_slot_mapping;  /* [>= T] int64 | int32: rows of kv_cache */
    const DLTensor *norm_weight;      /* [D] bf16 | fp32 */
    const DLTensor *rope_table;       /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    double eps;                       /* 0, or FLT_MIN and more */
    int64_t ratio;                    /* r */
    const DLTensor *kv;               /* [>= T, c D] fp32 | bf16, optional */
    const DLTensor *score;            /* [>= T, c D], the dtype of kv; given where kv is */
    const DLTensor *ape;              /* [r, c D] fp32; given where kv is */
    smla_scale_arg kv_scale;          /* fp8_e4m3 only */
    int64_t block_size;               /* rows per page of a cache [pages, page bytes], else 0 */
    int32_t kv_format;                /* smla_kv_format */
    void *stream;
} smla_compress_args;

SMLA_API smla_status smla_compress_norm_rope_store(const smla_compress_args *args,
                                                   smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_COMPRESSOR_H */
