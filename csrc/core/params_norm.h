/* params_norm.h: the params of the operators that normalize. */
#pragma once

#include "core/params_cache.h"
#include "core/params_rope.h"

enum {
    SMLA_NORM_SUMS = 256, /* partial sums of a row's squares: value i goes to sum i % 256 */
};

/* Rows for RMSNorm. x and out may be one array. */
typedef struct smla_norm_rows {
    int64_t size;
    const uint16_t *x; /* [T, size] bf16 */
    int64_t x_stride_token;
    const void *weight; /* [size] */
    smla_float_type weight_type;
    uint16_t *out; /* [T, size] bf16 */
    int64_t out_stride_token;
} smla_norm_rows;

/* Every backend adds the squares of a row in the same order. First value i is added to partial sum
 * i % 256. Then eight neighbouring partial sums become one, as ((0 + 1) + (2 + 3)) +
 * ((4 + 5) + (6 + 7)). Of these 32 sums, sum l is added to sum l + 16 of the upper half, then the
 * halves of 16, 8, 4 and 2 sums are. */
typedef struct smla_q_kv_norm_params {
    smla_call call;
    int64_t num_tokens;
    smla_norm_rows rows[2]; /* q, kv */
    float eps;
} smla_q_kv_norm_params;

/* fused_qnorm_rope_kv_insert. A row's squares are added in the order above. */
typedef struct smla_qnorm_insert_params {
    smla_call call;
    int64_t num_tokens; /* T: those of q. `insert` has as many tokens or fewer */
    int64_t num_heads;  /* H */
    int64_t out_heads;  /* heads of q_out, H or more: those from H on become 0 */
    const uint16_t *q;  /* [T, H, 512] bf16 */
    int64_t q_stride_token;
    int64_t q_stride_head;
    void *q_out;                /* [T, out_heads, 512]; may be q */
    smla_float_type q_out_type; /* bf16 or e4m3 */
    int64_t q_out_stride_token;
    int64_t q_out_stride_head;
    smla_given_scale q_scale_inv; /* 1 for bf16 */
    float eps;
    smla_rope rope;
    smla_cache_write_params insert; /* kv: keys of bf16 that are not turned yet */
} smla_qnorm_insert_params;
