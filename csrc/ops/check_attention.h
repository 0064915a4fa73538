/* check_attention.h: what the checks of attentions share. A check names the arguments of its
 * operator, and fills the values that every attention is made of (core/attention/).
 */
#pragma once

#include "core/attention/params_attention.h"
#include "ops/check.h"

/* ---- Values -------------------------------------------------------------------------------- */

/* The rows of an array [T, H, D], or [T, D] for all heads, from value `first` on. */
smla_head_rows smla_view_part(const DLTensor *tensor, int64_t first);

/* Two parts of rows: the arrays of a pair, or one array that is cut behind dims[0] values. */
void smla_view_parts(const DLTensor *first, const DLTensor *second, const int16_t dims[2],
                     smla_head_rows parts[2]);

/* Whether a query of 512 values is e4m3, not bf16. */
static inline bool
smla_is_e4m3_query(const DLTensor *q)
{
    return (smla_dtype(q) & SMLA_DTYPE_E4M3_OR_BYTES) != 0;
}

/* Checks q [T, H, 576], or the pair [T, H, 512] and [T, H, 64], by the sizes of the cache's format.
 * Attention and forward share this rule. A pair is named q[0] and q[1]. */
smla_status smla_require_query(smla_checker *checker, const char *name,
                               const smla_kv_format_info *format, const DLTensor *q,
                               const DLTensor *q_pe, int64_t num_tokens, int64_t num_heads,
                               unsigned flags);

smla_status smla_require_softmax_scale(const smla_checker *checker, const char *name, double scale,
                                       smla_logits *logits);

#define SMLA_SINKS_HINT "a value per head of the query"

/* Checks sinks [>= H], which may be absent. `hint` says what H is. */
smla_status smla_require_sinks(smla_checker *checker, const char *name, const DLTensor *tensor,
                               const char *hint, int64_t num_heads, smla_sinks *sinks);

/* Checks a scale of e4m3 values, or that values of another type `of` have none. */
smla_status smla_require_descale(smla_checker *checker, const char *name,
                                 const smla_scale_arg *given, const char *of,
                                 const DLTensor *values, int64_t num_reqs, int64_t num_kv_heads,
                                 smla_descale *scale);

/* One split, which the caller may change. */
smla_results smla_results_of(const DLTensor *out, const DLTensor *lse, const DLTensor *max_logits);
smla_workspace smla_workspace_of(const char *name, const DLTensor *workspace);

/* What the operators of dense attention have in common. */
typedef struct smla_mask_args {
    bool has_window;
    bool is_causal;
    int64_t window_left; /* -1: open */
    int64_t window_right;
    int64_t attention_chunk;
    double softcap;
    int64_t max_seqlen_q;
    int64_t max_seqlen_k;
} smla_mask_args;

/* The arguments of a mask, which every attention with requests has. */
#define SMLA_MASK_OF(args)                       \
    {.has_window = (args)->has_window != 0,      \
     .is_causal = (args)->is_causal != 0,        \
     .window_left = (args)->window_left,         \
     .window_right = (args)->window_right,       \
     .attention_chunk = (args)->attention_chunk, \
     .softcap = (args)->softcap,                 \
     .max_seqlen_q = (args)->max_seqlen_q,       \
     .max_seqlen_k = (args)->max_seqlen_k}

/* Checks the arguments of a mask. Fills the rule of what is visible, a rank's share excepted, and
 * the softcap. */
smla_status smla_require_mask(const smla_checker *checker, const smla_mask_args *args,
                              smla_attention_params *params);

/* Checks `cp`, which may be absent. */
smla_status smla_require_share(const smla_checker *checker, int64_t rank, int64_t size,
                               int64_t interleave, smla_rank_share *share);

/* Checks that there is one table, of pages or of slots. */
smla_status smla_require_one_table(const smla_checker *checker, const DLTensor *block_table,
                                   const DLTensor *slot_table);

smla_status smla_require_num_splits(const smla_checker *checker, int64_t num_splits);

/* Checks that the numbers at which requests start begin with 0, never fall, and end at most at
 * `most` of what `rows` names. Numbers on a device are not read. */
smla_status smla_require_starts(const smla_checker *checker, const char *name,
                                const DLTensor *tensor, int64_t most, const char *rows);

/* Checks the first query tokens of the requests of a cache, whose numbers are in `reqs`. */
smla_status smla_require_query_starts(smla_checker *checker, const DLTensor *starts,
                                      smla_requests *reqs);

/* Checks fills_padding, and finds what it asks to fill: rows of out [T, >= H, ...] and lse [T, H],
 * which were checked. */
smla_status smla_require_padding(const char *op, int32_t fills_padding, const DLTensor *out,
                                 const DLTensor *lse, float empty_lse, smla_padding_rows *rows,
                                 smla_error *error);

/* ---- Keys and values of KV heads ------------------------------------------------------------ */

/* Checks q [T, H, D], or the first array of a pair. */
smla_status smla_require_head_query(smla_checker *checker, const char *name, const DLTensor *q);

/* Checks values per row, of which there are 8 or more, in multiples of 8. */
smla_status smla_require_head_dim(const smla_checker *checker, const char *name, int64_t dim,
                                  int64_t most);

smla_status smla_require_num_kv_heads(const smla_checker *checker, const char *name,
                                      int64_t num_kv_heads, int64_t num_heads);

/* The element types of keys beside a query, and of another array beside the first. */
unsigned smla_key_dtypes(const DLTensor *q);
unsigned smla_same_dtypes(const DLTensor *first);

/* The arguments that have the same name in every attention over keys and values of heads. */
typedef struct smla_heads_args {
    const DLTensor *q;
    const char *k_name;
    const DLTensor *k;
    const char *v_name;
    const DLTensor *v;
    const DLTensor *attn_sink;
    const smla_scale_arg *q_descale;
    const smla_scale_arg *k_descale;
    const smla_scale_arg *v_descale;
    smla_mask_args mask;
    double softmax_scale;
    int64_t num_splits;
    const DLTensor *out;
    const DLTensor *lse;
    const DLTensor *workspace;
    int32_t fills_padding;
    void *stream;
} smla_heads_args;

#define SMLA_HEADS_OF(args, k_name_, k_, v_name_, v_) \
    {.q = (args)->q,                                  \
     .k_name = (k_name_),                             \
     .k = (k_),                                       \
     .v_name = (v_name_),                             \
     .v = (v_),                                       \
     .attn_sink = (args)->attn_sink,                  \
     .q_descale = &(args)->q_descale,                 \
     .k_descale = &(args)->k_descale,                 \
     .v_descale = &(args)->v_descale,                 \
     .mask = SMLA_MASK_OF(args),                      \
     .softmax_scale = (args)->softmax_scale,          \
     .num_splits = (args)->num_splits,                \
     .out = (args)->out,                              \
     .lse = (args)->lse,                              \
     .workspace = (args)->workspace,                  \
     .fills_padding = (args)->fills_padding,          \
     .stream = (args)->stream}

/* Checks them, once queries, keys and requests are checked and in `params`, and ends the check. */
smla_status smla_check_heads(smla_checker *checker, const smla_heads_args *args,
                             smla_attention_params *params, const smla_backend **backend);

/* ---- Lists ---------------------------------------------------------------------------------- */

/* The names of a list's arguments in error texts, and the cache formats that it may have. */
typedef struct smla_list_rules {
    const char *kv;
    const char *indices; /* NULL: the list is dense, and require_more checks and fills it */
    const char *topk_length;
    const char *kv_scale;
    smla_kv_set formats;
} smla_list_rules;

/* What differs between the checks of sparse_attention and of operators that are calls of it: the
 * names of arguments in error texts, and a few rules. */
typedef struct smla_attention_rules {
    const char *op;
    const char *q;
    const char *q_scale;
    smla_list_rules lists[2]; /* main, extra */
    const char *softmax_scale;
    const char *attn_sink;
    const char *workspace;
    /* Checks what only this operator has, `more`, once q, the caches and the sinks are checked.
     * NULL: it has nothing more. */
    smla_status (*require_more)(smla_checker *checker, const void *more,
                                smla_attention_params *params);
    bool any_query_has_scale; /* q_scale may belong to a bf16 query, too */
    bool has_no_lse;          /* lse may be absent */
} smla_attention_rules;

/* Checks attention's args by these rules. */
smla_status smla_check_attention_by(const smla_attention_rules *rules,
                                    const smla_sparse_attention_args *args, const void *more,
                                    smla_attention_params *params, const smla_backend **backend,
                                    smla_error *error);

/* Checks the products of the scales of logits, those on a device excepted:
 * check_attention_scales.c. */
smla_status smla_require_logit_scale(const smla_attention_rules *rules, DLDevice device,
                                     const smla_attention_params *params, smla_error *error);

/* Plans a call with one list whose arrays and numbers are checked already, and fills `params`. `kv`
 * is the cache, whose format has no scale of the whole cache. The caller's scales are not read. */
void smla_fill_attention(const smla_sparse_attention_args *args, const smla_kv_view *kv,
                         smla_stream stream, const smla_backend *backend,
                         smla_attention_params *params);
