/* params_merge.h: the params of merges of partial attention results. */
#pragma once

#include "core/attention/logits.h"

enum { SMLA_MAX_PARTS = 64 }; /* parts per merge: as many as a launch's args have room for */

/* The result over one part of the keys. */
typedef struct smla_merge_part {
    const void *out; /* [T, H, V] */
    int64_t out_stride_token;
    int64_t out_stride_head;
    const float *lse; /* [T, H] */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
} smla_merge_part;

/* The rows of a merge, whatever the number of parts. */
typedef struct smla_merge_rows {
    int64_t num_tokens;
    int64_t num_heads;
    int64_t value_dim;
    smla_float_type type;     /* element type of all parts: bf16, fp16 or fp32 */
    smla_float_type out_type; /* the same; bf16 or fp16, too, where parts are fp32 */
    smla_sinks sinks;
    void *out; /* [T, H, V] */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse; /* [T, H] */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
} smla_merge_rows;

/* merge_attn_states. out may be that of a part, and lse, too. */
typedef struct smla_merge_params {
    smla_call call;
    smla_merge_rows rows;
    int64_t merged_tokens; /* tokens behind these have no part a, and what it holds is not read */
    smla_merge_part parts[2];
} smla_merge_params;

typedef struct smla_merge_partials_params {
    smla_call call;
    smla_merge_rows rows;
    int64_t num_parts; /* 1...SMLA_MAX_PARTS */
    /* Bit i: part i has its out, or its lse, in memory of another GPU, which the backend refuses if
     * the call's device cannot read it. */
    uint64_t remote_outs;
    uint64_t remote_lses;
    smla_merge_part parts[SMLA_MAX_PARTS];
} smla_merge_partials_params;
