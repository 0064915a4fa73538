/* indexer_params.h: the params of the operators that choose keys, which continue params.h. Compiles
 * as C and as CUDA.
 */
#pragma once

#include "core/params.h"

/* fused_indexer_q_rope_quant. The bytes of a head are those of a cache row: of fp8_index, or of
 * mxfp4_index. The scale of fp8_index goes into the weight. */
typedef struct smla_index_query_params {
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
    smla_stream stream;
} smla_index_query_params;
