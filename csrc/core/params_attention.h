/* params_attention.h: the params of attention, and its plan. */
#pragma once

#include "core/key_range.h"
#include "core/padding_rows.h"
#include "core/params.h"

/* With this map, attention itself turns positions inside a request into slots, by the rules of
 * convert_req_index_to_global_index. This saves a call of that operator and the memory of its
 * output. R and W are as in smla_convert_params. */
typedef struct smla_index_map {
    const int32_t *block_table; /* [R, W]; NULL: indices are slots already */
    int64_t block_table_stride_req;
    int64_t block_table_stride_block;
    int64_t num_reqs;                /* R */
    int64_t num_blocks;              /* W */
    const int32_t *req_id_per_token; /* [T], contiguous */
} smla_index_map;

/* A list of keys. Attention takes a main list and an optional extra list. The keys of token t are
 * in columns begin[t] to end[t] - 1 of its row of `indices`. A negative index is no key. */
typedef struct smla_key_list {
    smla_kv_view kv;
    const int32_t *indices; /* [T, K]; NULL: column j has index j (dense attention) */
    int64_t indices_stride_token;
    int64_t topk;       /* K */
    const int32_t *end; /* topk_length: [T], clamped to 0...K; NULL: K */
    int64_t end_stride;
    smla_index_map map;   /* turns positions into slots; the page size is kv.block_size */
    const int32_t *begin; /* [T], clamped to 0...K; NULL: 0 */
    int64_t begin_stride;
    /* Columns of the main list, if end[t] counts them too (sparse_mla_dsv4); 0 in a main list. They
     * are subtracted before end[t] is clamped. */
    int64_t end_offset;
} smla_key_list;

/* Whether a list needs a kernel that serves dense columns and `begin`. */
static inline bool
smla_has_ranges(const smla_key_list *list)
{
    return list->indices == NULL || list->begin != NULL;
}

/* The requests of a dense call. */
typedef struct smla_requests {
    int64_t num_tokens;          /* T */
    int64_t num_reqs;            /* R */
    const int32_t *query_starts; /* [R + 1]; NULL: each request has query_len tokens */
    int64_t query_starts_stride;
    int64_t query_len;
    const int32_t *seq_lens; /* [R] */
    int64_t seq_lens_stride;
} smla_requests;

/* The number of the first query token of a request. Numbers on a device are unchecked, so they are
 * clamped. */
SMLA_HOST_DEVICE static inline int64_t
smla_query_start(const smla_requests *reqs, int64_t req)
{
    const int64_t start = reqs->query_starts == NULL
                              ? req * reqs->query_len
                              : reqs->query_starts[req * reqs->query_starts_stride];
    return smla_clamp_int64(start, 0, reqs->num_tokens);
}

/* The keys of a request. */
SMLA_HOST_DEVICE static inline int64_t
smla_seq_len(const smla_requests *reqs, int64_t req)
{
    const int64_t length = reqs->seq_lens[req * reqs->seq_lens_stride];
    return length < 0 ? 0 : length;
}

/* What a main list of positions has if attention is dense (mla_attention): a token sees a range of
 * its request's keys, and splits are cut from the request's own length. begin, end and the map's
 * request ids are written by the call itself (smla_key_ranges_params). A token with a negative
 * request id belongs to no request, and its rows of the outputs stay as they are. */
typedef struct smla_dense_keys {
    smla_requests reqs;
    smla_range_rule rule;
    int32_t least_split_columns; /* a split has at least so many */
    /* Tokens per entry of the block table: of a page, or 1 in a slot table. 0: not dense */
    int64_t entry_tokens;
    bool fills_padding; /* tokens of no request get the results of no keys */
    float softcap;      /* logits become softcap * tanh(logit / softcap); 0: they stay */
} smla_dense_keys;

/* `call` and `dense` stand last, because launches copy this struct, and Hopper's kernels fetch all
 * that they read of it in 64-byte lines. */
typedef struct smla_attention_params {
    int64_t num_tokens;
    int64_t num_heads;
    int num_splits;         /* 1...64 */
    int num_lists;          /* 1 or 2 */
    const uint16_t *q_nope; /* [T, H, 512] bf16 */
    int64_t q_nope_stride_token;
    int64_t q_nope_stride_head;
    const uint16_t *q_pe; /* [T, H, 64] bf16 */
    int64_t q_pe_stride_token;
    int64_t q_pe_stride_head;
    smla_key_list lists[2]; /* main, extra */
    const float *attn_sink; /* [H] or NULL */
    int64_t attn_sink_stride;
    float softmax_scale;
    uint16_t *out; /* [T, H, 512] bf16 */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse; /* [T, H] or NULL */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    float *max_logits; /* [T, H] or NULL */
    int64_t max_logits_stride_token;
    int64_t max_logits_stride_head;
    bool empty_lse_is_plus_inf; /* lse of a row without keys: +inf, not -inf */
    /* Hopper's kernels for FP8 rows read nothing from here on but `dense`, in dense calls.
     * attention_fp8_sm90.cu fetches the rest of their arguments early. */
    /* main, extra: of formats with a scale of the cache, else 1; equal if there is no extra list */
    smla_given_scale kv_scale[2];
    smla_given_scale q_scale; /* multiplies logits; 1 for a bf16 query, but in sparse_mla_dsv4 */
    smla_given_scale logit_divisor; /* divides logits; 1 but in sparse_mla_dsv4 */
    const uint8_t *q_e4m3;          /* [T, H, 512] e4m3 with the strides of q_nope; NULL: bf16 */
    void *workspace;
    int64_t workspace_bytes;
    const char *workspace_name; /* the workspace argument's name, for errors */
    smla_call call;
    smla_dense_keys dense; /* read by kernels that serve ranges (smla_has_ranges) */
} smla_attention_params;

/* What q . k is multiplied with, besides the kv_scale of the key's cache, where the scales' memory
 * can be read. CUDA's find_scale_log2 computes the same. */
static inline float
smla_read_logit_scale(const smla_attention_params *params)
{
    return params->softmax_scale * smla_read_scale(&params->q_scale) /
           smla_read_scale(&params->logit_divisor);
}

/* The power of two that kernels divide all scales of keys by, given those of the caches. The factor
 * of logits is multiplied with it, and so are results. So no score and no sum of values leaves
 * fp32, however large or small the scales of caches are. It is near the largest of them, but not so
 * large that another one becomes 0. Within 2^+-96 it leaves room for factors beside it. It is 1 if
 * no format has a scale of the cache. */
SMLA_HOST_DEVICE static inline float
smla_choose_key_unit(float main_scale, float extra_scale)
{
    enum { BIAS = 127, ROOM = 96 };
    const int main_exponent = (int)(smla_float_bits(main_scale) >> 23); /* biased */
    const int extra_exponent = (int)(smla_float_bits(extra_scale) >> 23);
    const int most = main_exponent > extra_exponent ? main_exponent : extra_exponent;
    const int least = main_exponent < extra_exponent ? main_exponent : extra_exponent;
    int unit = most < least + ROOM ? most : least + ROOM;
    unit = unit > most - BIAS ? unit : most - BIAS;
    unit = unit > BIAS - ROOM ? unit : BIAS - ROOM;
    unit = unit < BIAS + ROOM ? unit : BIAS + ROOM;
    return smla_bits_float((uint32_t)unit << 23);
}

/* 1 / unit */
SMLA_HOST_DEVICE static inline float
smla_inverse_unit(float unit)
{
    return smla_bits_float((254u << 23) - smla_float_bits(unit));
}

/* Whether the unit may be another number than 1. */
static inline bool
smla_has_key_unit(const smla_attention_params *params)
{
    bool has_unit = false;
    for (int i = 0; i < params->num_lists; i++) {
        has_unit |= params->lists[i].kv.format->scale_type == SMLA_SCALE_CACHE;
    }
    return has_unit;
}

/* The shape of attention: all that the workspace size and the number of splits depend on. */
typedef struct smla_attention_shape {
    int64_t num_tokens;
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
    int num_splits; /* 0 = the plan chooses */
    int32_t device_id;
    /* The formats of the main and the extra list. The main format is NULL while it is not known:
     * the choice of a split count does not need it, and the workspace size covers all formats. */
    const smla_kv_format_info *formats[2];
    bool has_ranges;      /* smla_has_ranges of at least one list */
    bool is_dense;        /* lengths are on the device: no plan depends on topk */
    bool covers_dense;    /* the workspace size is enough for dense calls of this shape, too */
    bool fits_tiles;      /* dense, without softcap, and all rows are aligned to 16 bytes */
    bool has_query_scale; /* an e4m3 query, or a scale of logits on the device */
} smla_attention_shape;

/* A launch of attention for all tokens of a call, or for some of them. */
typedef struct smla_attention_run {
    const struct smla_attention_kernel *kernel; /* NULL on the CPU, and if no kernel fits */
    int64_t num_tokens;
    int num_splits;
    /* Bytes of workspace for the partial rows of a launch that cuts long works by itself. Every
     * caller that asked for the workspace size has them. 0: the launch cuts no works. */
    int64_t cut_bytes;
    /* Splits take chunks of columns in turn, so a short list gives all of them as much. Where the
     * caller says how many splits there are, each has a range of columns. */
    bool interleaves;
} smla_attention_run;

/* How a backend runs attention of a shape. The check asks the backend for the plan once per call,
 * and sparse_attention of the backend takes it as an argument. */
typedef struct smla_attention_plan {
    int64_t workspace_bytes; /* what attention_workspace_size returns */
    int num_runs;            /* 1, or 2: the first tokens and the rest */
    bool reads_lengths;      /* a dense call needs no ranges per token (smla_key_ranges_params) */
    smla_attention_run runs[2];
} smla_attention_plan;

/* Columns per split range: ceil(ceil(K / n) / 64) * 64, as the batch-invariance contract says. */
SMLA_HOST_DEVICE static inline int64_t
smla_split_columns(int64_t topk, int num_splits)
{
    const int64_t columns = (topk + num_splits - 1) / num_splits;
    return (columns + SMLA_SPLIT_ALIGN - 1) / SMLA_SPLIT_ALIGN * SMLA_SPLIT_ALIGN;
}

SMLA_HOST_DEVICE static inline bool
smla_is_dense(const smla_attention_params *params)
{
    return params->dense.entry_tokens != 0;
}

/* Whether the call leaves the token's rows of the outputs as they are. */
SMLA_HOST_DEVICE static inline bool
smla_is_left_alone(const smla_attention_params *params, int64_t token)
{
    return smla_is_dense(params) && params->lists[0].map.req_id_per_token[token] < 0;
}

/* smla_split_columns of a token's main list in a dense call: of its request's keys. */
SMLA_HOST_DEVICE static inline int64_t
smla_dense_split_columns(const smla_attention_params *params, int64_t token)
{
    const smla_dense_keys *const dense = &params->dense;
    const smla_index_map *const map = &params->lists[0].map;
    const int64_t req = map->req_id_per_token[token];
    const bool is_known = req >= 0 && req < map->num_reqs;
    const int64_t length = is_known ? smla_seq_len(&dense->reqs, req) : 0;
    const int64_t keys = smla_count_own(&dense->rule.share, length);
    const int64_t columns = smla_split_columns(keys, params->num_splits);
    return columns > dense->least_split_columns ? columns : dense->least_split_columns;
}

/* What writes the ranges of a dense call: for each token its request, and the keys that it sees. */
typedef struct smla_key_ranges_params {
    smla_call call;
    smla_requests reqs;
    smla_range_rule rule;
    int32_t absent_req; /* what req_ids has for tokens of no request, which see no key */
    int32_t *req_ids;   /* [T] */
    int32_t *begin;     /* [T] */
    int32_t *end;       /* [T] */
    int64_t *positions; /* [T]: where each token is in its request, else 0; NULL: not wanted */
    smla_padding_rows padding; /* results of attention that are filled meanwhile */
} smla_key_ranges_params;

enum { SMLA_RANGES_ALIGN = 64 };

/* Bytes of workspace for the ranges of so many tokens, wherever the workspace begins. */
static inline int64_t
smla_key_ranges_bytes(int64_t num_tokens)
{
    const int64_t bytes = num_tokens * 3 * (int64_t)sizeof(int32_t);
    return num_tokens == 0
               ? 0
               : (bytes + 2 * SMLA_RANGES_ALIGN - 1) / SMLA_RANGES_ALIGN * SMLA_RANGES_ALIGN;
}

/* Writes what belongs to one token. */
SMLA_HOST_DEVICE static inline void
smla_write_key_range(const smla_key_ranges_params *params, int64_t token)
{
    const smla_requests *const reqs = &params->reqs;
    int64_t req = 0; /* the first request that ends behind the token */
    for (int64_t past = reqs->num_reqs; req < past;) {
        const int64_t middle = (req + past) / 2;
        if (smla_query_start(reqs, middle + 1) > token) {
            past = middle;
        } else {
            req = middle + 1;
        }
    }
    smla_key_range range = {0, 0};
    int64_t position = 0;
    const bool is_query = req < reqs->num_reqs;
    if (is_query) {
        const int64_t start = smla_query_start(reqs, req);
        const int64_t num_queries = smla_query_start(reqs, req + 1) - start;
        const int64_t num_keys = smla_seq_len(reqs, req);
        position = num_keys - num_queries + (token - start);
        range = smla_find_key_range(&params->rule, position, num_keys);
    }
    if (params->positions != NULL) {
        params->positions[token] = position < 0 ? 0 : position;
    }
    params->req_ids[token] = is_query ? (int32_t)req : params->absent_req;
    params->begin[token] = (int32_t)range.begin;
    params->end[token] = (int32_t)range.end;
}
