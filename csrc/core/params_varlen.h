/* params_varlen.h: the params of varlen_attention: multi-head attention over ragged, contiguous
 * keys and values, the compute-friendly way to prefill. */
#pragma once

#include "core/key_range.h"
#include "core/padding_rows.h"
#include "core/params.h"

/* Bytes of workspace with which a GPU's CTAs can divide the work among themselves as it goes. */
enum { SMLA_VARLEN_WORKSPACE_BYTES = 16 };

/* Rows [tokens, heads, dim] of queries, keys or values. The dims of a row are contiguous. */
typedef struct smla_varlen_rows {
    const void *data; /* NULL where dim is 0 or there is no row */
    int64_t dim;
    int64_t stride_token;
    int64_t stride_head; /* 0: all heads share a row, as those of k_pe do */
} smla_varlen_rows;

/* What e4m3 values are multiplied with: [B, Hk] fp32 in memory of the device, or a number. */
typedef struct smla_varlen_scale {
    const float *pointer; /* NULL: the scale is `value` */
    int64_t stride_req;
    int64_t stride_head;
    float value;
} smla_varlen_scale;

/* Query and key rows have two parts of equal dims: (nope, pe). Their scores are the sum of both
 * products. A query and a key that are not pairs have all of their dims in part 0, and part 1 has
 * dim 0. Where only one of them is a pair, the other is cut into two views at the same dim. */
typedef struct smla_varlen_params {
    smla_call call;
    int64_t num_tokens;          /* Tq */
    int64_t num_keys;            /* Tk */
    int64_t num_reqs;            /* B */
    int64_t num_heads;           /* H */
    int64_t num_kv_heads;        /* Hk; query head h reads KV head h / (H / Hk) */
    int64_t value_dim;           /* Dv */
    const int32_t *query_starts; /* cu_seqlens_q [B + 1] */
    int64_t query_starts_stride;
    const int32_t *key_starts; /* cu_seqlens_k [B + 1] */
    int64_t key_starts_stride;
    smla_range_rule rule;
    smla_float_type q_type;   /* bf16, fp16 or e4m3 */
    smla_float_type kv_type;  /* bf16, fp16 or e4m3 */
    smla_float_type out_type; /* bf16, fp16 or fp32 */
    smla_varlen_rows q[2];
    smla_varlen_rows k[2];
    smla_varlen_rows v; /* dim is value_dim */
    smla_varlen_scale q_descale;
    smla_varlen_scale k_descale;
    smla_varlen_scale v_descale;
    const float *attn_sink; /* [H] or NULL */
    int64_t attn_sink_stride;
    /* As given, because its product with descales may be ordinary where it is no normal float. */
    double softmax_scale;
    float softcap; /* logits become softcap * tanh(logit / softcap); 0: they stay */
    void *out;     /* [Tq, H, Dv] */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse; /* [Tq, H] */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    void *workspace; /* NULL: none; its contents are undefined, and no result depends on it */
    int64_t workspace_bytes;
    smla_padding_rows padding; /* what is filled of `out` and `lse` */
} smla_varlen_params;

/* The query tokens and keys of one request: numbers in the arrays of all requests. */
typedef struct smla_varlen_request {
    int64_t first_query;
    int64_t num_queries;
    int64_t first_key;
    int64_t num_keys;
} smla_varlen_request;

/* Numbers on a device are unchecked, so they are clamped. */
SMLA_HOST_DEVICE static inline smla_varlen_request
smla_find_varlen_request(const smla_varlen_params *params, int64_t req)
{
    const int32_t *const queries = params->query_starts + req * params->query_starts_stride;
    const int32_t *const keys = params->key_starts + req * params->key_starts_stride;
    const int64_t query = smla_clamp_int64(queries[0], 0, params->num_tokens);
    const int64_t past_queries =
        smla_clamp_int64(queries[params->query_starts_stride], query, params->num_tokens);
    const int64_t key = smla_clamp_int64(keys[0], 0, params->num_keys);
    const int64_t past_keys =
        smla_clamp_int64(keys[params->key_starts_stride], key, params->num_keys);
    return (smla_varlen_request){query, past_queries - query, key, past_keys - key};
}

/* Fills the rows behind the last request. `threads` of `teams` teams share the work, and this is
 * thread `thread` of team `team`. */
SMLA_HOST_DEVICE static inline void
smla_fill_varlen_padding(const smla_varlen_params *params, int64_t team, int64_t teams, int thread,
                         int threads)
{
    if (smla_has_padding(&params->padding)) {
        const int64_t past = params->query_starts[params->num_reqs * params->query_starts_stride];
        const int64_t first = smla_clamp_int64(past, 0, params->num_tokens);
        smla_fill_padding(&params->padding, first + team, teams, params->num_tokens, thread,
                          threads);
    }
}

/* The keys that query `query` of a request sees, as numbers in the request. */
SMLA_HOST_DEVICE static inline smla_key_range
smla_find_varlen_range(const smla_varlen_params *params, const smla_varlen_request *req,
                       int64_t query)
{
    return smla_find_key_range(&params->rule, req->num_keys - req->num_queries + query,
                               req->num_keys);
}
