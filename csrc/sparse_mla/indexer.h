/* indexer.h: the indexer's queries, its scores and its choice of keys. The conventions are in
 * sparse_mla.h. */
#ifndef SPARSE_MLA_INDEXER_H
#define SPARSE_MLA_INDEXER_H

#include "sparse_mla/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The indexer's queries, quantised: RoPE of the last 64 values, rounded to bf16, then the bytes of
 * fp8_index, or with out_scale those of mxfp4_index (kv_format.h). out_weights = weights *
 * fp32(softmax_scale * head_scale), times the scale of fp8_index. A bad position is an error on the
 * CPU; CUDA does not turn that token. */
typedef struct smla_index_query_args {
    size_t struct_size;
    const DLTensor *q;           /* [T, any heads, 128] bf16 */
    const DLTensor *weights;     /* [T, heads] bf16 | fp32 */
    const DLTensor *positions;   /* [>= T] int64 | int32 */
    const DLTensor *rope_table;  /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    const DLTensor *out;         /* out [T, heads, 128] e4m3 | uint8; [T, heads, 64] uint8 if FP4 */
    const DLTensor *out_weights; /* out [T, heads] fp32 */
    const DLTensor *out_scale;   /* out [T, heads, 4] uint8, optional: asks for FP4 */
    double softmax_scale;        /* finite; usually 128^-0.5 */
    double head_scale; /* finite; usually heads^-0.5; the product is 0 or normal in fp32 */
    void *stream;
} smla_index_query_args;

SMLA_API smla_status smla_fused_indexer_q_rope_quant(const smla_index_query_args *args,
                                                     smla_error *error);

/* The indexer's scores: out[t,n] = sum_h weights[t,h] * relu(q[t,h] . key n of token t), for n
 * below context_lens[t], which is clamped to 0...N. Keys are rows of a cache in pages, or k_cache
 * and k_scale are flat arrays in which starts[t] is the token's key 0. Columns from the context on,
 * and of keys that do not exist, become -inf. A bad request of a token with keys is an error on the
 * CPU; on CUDA its row is -inf. */
typedef struct smla_indexer_logits_args {
    size_t struct_size;
    const DLTensor *q;       /* [T, heads, 128] e4m3 | uint8; with q_scale [T, heads, 64] uint8 */
    const DLTensor *weights; /* [T, heads] fp32 */
    const DLTensor *k_cache; /* an fp8_index or mxfp4_index cache; flat [S, 128] e4m3 | uint8 or
                               * [S, 64] uint8 with k_scale */
    const DLTensor *k_scale; /* [S] fp32, or [S, 4] uint8 for [S, 64]; optional: no flat keys */
    const DLTensor *context_lens;     /* [>= T] int32 */
    const DLTensor *block_table;      /* [R, W] int32, for pages */
    const DLTensor *req_id_per_token; /* [>= T] int32, for pages */
    const DLTensor *starts;           /* [>= T] int32, optional: 0; for flat keys only */
    const DLTensor *q_scale;          /* [T, heads, 4] uint8, optional: q is e4m3 */
    const DLTensor *out;              /* out [T, N] fp32 | bf16 */
    int32_t leaves_rest;              /* 1: columns from the context on are not written */
    int32_t kv_format;
    int64_t block_size; /* a cache [pages, page bytes] needs it; else 0 or the cache's */
    void *stream;
} smla_indexer_logits_args;

SMLA_API smla_status smla_indexer_logits(const smla_indexer_logits_args *args, smla_error *error);

/* The k best keys of each token: smla_top_k_per_row of the logits of smla_indexer_logits, which are
 * kept in `workspace` for a chunk of tokens at a time. The result does not depend on the chunks. A
 * token with at most k keys takes all of them, and its logits are not computed unless `values` are
 * wanted. The arguments are those of the two operators. */
typedef struct smla_lightning_indexer_args {
    size_t struct_size;
    const DLTensor *q;
    const DLTensor *weights;
    const DLTensor *k_cache;
    const DLTensor *k_scale;      /* optional: keys are in pages */
    const DLTensor *context_lens; /* [>= T] int32 */
    int64_t k;
    const DLTensor *block_table;      /* pages only */
    const DLTensor *req_id_per_token; /* pages and slots */
    const DLTensor *starts;           /* optional: 0; flat keys only */
    const DLTensor *q_scale;          /* optional: q is e4m3 */
    DLDataType dtype; /* fp32 | bf16, the logits' and that of `values`; {0} = fp32 */
    int32_t kv_format;
    int64_t block_size;
    const DLTensor *slots_block_table; /* optional: no slots */
    int64_t slots_block_size;
    const DLTensor *is_valid; /* optional: all are */
    const DLTensor *out;      /* out [T, k] int32 */
    const DLTensor *slots;    /* out [T, k] int32, with slots_block_table */
    const DLTensor *lens;     /* out [T] int32, with slots_block_table */
    const DLTensor *values;   /* out [T, k] of `dtype`, optional */
    int64_t max_logits_bytes; /* at least the logits of a token; 2^29 is usual */
    /* uint8 with any contents, smla_lightning_indexer_workspace_size bytes. Fewer bytes make
     * smaller chunks; they must suffice for one token. */
    const DLTensor *workspace;
    void *stream;
} smla_lightning_indexer_args;

SMLA_API smla_status smla_lightning_indexer(const smla_lightning_indexer_args *args,
                                            smla_error *error);

/* The bytes of workspace of smla_lightning_indexer: at most max_logits_bytes and 128. They never
 * fall if T or the context grows. */
typedef struct smla_lightning_workspace_args {
    size_t struct_size;
    int64_t num_tokens;
    int64_t max_context; /* N: the keys of a row of block_table, or the number of flat keys */
    int64_t k;
    DLDataType dtype; /* as in the call, like max_logits_bytes */
    int64_t max_logits_bytes;
    DLDevice device;
} smla_lightning_workspace_args;

SMLA_API smla_status smla_lightning_indexer_workspace_size(
    const smla_lightning_workspace_args *args, int64_t *bytes, smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_INDEXER_H */
