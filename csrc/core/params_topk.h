/* params_topk.h: what kernels read that choose keys by their logits. */
#pragma once

#include "core/params_index.h"

typedef struct smla_top_k_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_columns; /* N, below 2^31 */
    int64_t k;
    const void *logits; /* [T, N] fp32 or bf16; NULL only if N <= k and there are no values */
    bool is_bf16;
    int64_t logits_stride_token;
    const int32_t *starts; /* [T] or NULL: 0 */
    int64_t starts_stride;
    const int32_t *ends; /* [T] */
    int64_t ends_stride;
    int32_t *out; /* [T, k] */
    int64_t out_stride_token;
    void *values; /* [T, k] of the logits' type, or NULL */
    int64_t values_stride_token;
    /* What `out` becomes as slots; its own `out` is NULL where none are made. */
    smla_topk_slots_params slots;
} smla_top_k_params;

typedef struct smla_top_k_merge_params {
    smla_call call;
    int64_t num_lists;   /* N */
    int64_t num_tokens;  /* T */
    int64_t num_columns; /* K; N * K is below 2^31 */
    int64_t k;
    bool is_bf16;           /* the values, which else are fp32 */
    const int32_t *indices; /* [N, T, K] */
    int64_t indices_stride_list;
    int64_t indices_stride_token;
    const void *values; /* [N, T, K] */
    int64_t values_stride_list;
    int64_t values_stride_token;
    int32_t *out; /* [T, k] */
    int64_t out_stride_token;
} smla_top_k_merge_params;
