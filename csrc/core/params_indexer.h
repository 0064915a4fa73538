/* params_indexer.h: the params of the operators that choose keys. */
#pragma once

#include "core/params_rope.h"
#include "core/params_topk.h"

/* fused_indexer_q_rope_quant. The bytes of a head are those of a cache row: of fp8_index, or of
 * mxfp4_index. The scale of fp8_index goes into the weight. */
typedef struct smla_index_query_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_heads;
    const uint16_t *q; /* [T, heads, 128] bf16 */
    int64_t q_stride_token;
    int64_t q_stride_head;
    const void *weights; /* [T, heads] */
    smla_float_type weights_type;
    int64_t weights_stride_token;
    smla_rope rope;
    float weight_scale; /* multiplies weights */
    uint8_t *out;       /* [T, heads, 128] e4m3, or [T, heads, 64] e2m1 */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *out_weights; /* [T, heads] */
    int64_t out_weights_stride_token;
    uint8_t *out_scale; /* [T, heads, 4] UE8M0 of e2m1; NULL: e4m3 */
    int64_t out_scale_stride_token;
    int64_t out_scale_stride_head;
} smla_index_query_params;

/* indexer_logits. Flat keys are one page of S rows. */
typedef struct smla_logits_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t num_columns; /* N */
    const uint8_t *q;    /* [T, heads, 128] e4m3, or [T, heads, 64] e2m1 */
    int64_t q_stride_token;
    int64_t q_stride_head;
    const uint8_t *q_scale; /* [T, heads, 4] UE8M0 of e2m1; NULL: e4m3 */
    int64_t q_scale_stride_token;
    int64_t q_scale_stride_head;
    const float *weights; /* [T, heads] */
    int64_t weights_stride_token;
    smla_kv_view kv;       /* fp8_index or mxfp4_index rows */
    bool has_pages;        /* false: flat keys */
    smla_page_table pages; /* where keys are in pages */
    int64_t num_reqs;
    const int32_t *req_id_per_token; /* [T]; not of flat keys */
    int64_t req_id_stride;
    const int32_t *context_lens; /* [T], clamped to 0...N */
    int64_t context_lens_stride;
    int64_t least_context; /* a token with a shorter context has no logits; at least 1 */
    const int32_t *starts; /* [T]: the key of column 0, or NULL: 0; of flat keys */
    int64_t starts_stride;
    void *out; /* [T, N] */
    smla_float_type out_type;
    int64_t out_stride_token;
    bool leaves_rest; /* columns from the context on are not written */
} smla_logits_params;

#ifdef __cplusplus
extern "C" {
#endif

/* The calls of all tokens. Logits lie in a matrix of chunk_tokens rows, which each chunk of tokens
 * overwrites. If N <= k, there is no matrix and one chunk: top-k needs no logits, and logits are
 * only made where the caller wants `values`. */
typedef struct smla_lightning_params {
    smla_call call;
    smla_logits_params logits; /* its `out` is the matrix, or `values`; NULL: no logits are made */
    smla_top_k_params top_k;
    int64_t chunk_tokens; /* at least 1 */
} smla_lightning_params;

/* Tokens per chunk where the matrix has room for `most` rows: chunks of about the same size, in
 * multiples of `unit` where there is room for one. */
int64_t smla_lightning_chunk_tokens(int64_t num_tokens, int64_t most, int64_t unit);

/* The calls of the chunk that begins at a token. */
smla_lightning_params smla_lightning_chunk(const smla_lightning_params *params, int64_t token);

#ifdef __cplusplus
}
#endif
