/* check_attention.h: what the checks of attentions share. A check says which arguments its operator
 * has and what they are called, and fills the values that every attention is made of
 * (core/attention/). What several operators have is read from their args by the macros below alone.
 */
#pragma once

#include "core/attention/params_attention.h"
#include "ops/check.h"

/* ---- Arguments ------------------------------------------------------------------------------ */

/* An argument with the name that errors give it. */
typedef struct smla_named_array {
    const char *name;
    const DLTensor *tensor;
} smla_named_array;

typedef struct smla_named_scale {
    const char *name;
    smla_scale_arg given;
} smla_named_scale;

typedef struct smla_named_number {
    const char *name;
    double value;
} smla_named_number;

/* An argument that is called as its field is. */
#define SMLA_NAMED(args, field) {#field, (args)->field}

/* What every attention has. What an operator does not have is zero. */
typedef struct smla_attention_inputs {
    smla_named_array q;
    const DLTensor *q_pe;
    smla_named_array sinks;
    const DLTensor *out;
    const DLTensor *lse;
    const DLTensor *max_logits;
    smla_named_array workspace;
    smla_named_number softmax_scale;
    smla_named_scale q_scale; /* a query over latents has it */
    int num_splits;
    bool any_query_has_scale; /* q_scale may belong to a bf16 query, too */
    bool has_no_lse;          /* lse may be absent */
    bool empty_lse_is_plus_inf;
    void *stream;
} smla_attention_inputs;

#define SMLA_SINKS_OF(args) SMLA_NAMED(args, attn_sink)

/* The inputs of any attention that calls them by their usual names. `pe` is the second array of a
 * query that is a pair. */
#define SMLA_INPUTS_OF(args, pe)                       \
    {.q = SMLA_NAMED(args, q),                         \
     .q_pe = (pe),                                     \
     .sinks = SMLA_SINKS_OF(args),                     \
     .out = (args)->out,                               \
     .lse = (args)->lse,                               \
     .workspace = SMLA_NAMED(args, workspace),         \
     .softmax_scale = SMLA_NAMED(args, softmax_scale), \
     .num_splits = (args)->num_splits,                 \
     .stream = (args)->stream}

/* The arguments of a mask, which every attention with requests has. */
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

#define SMLA_MASK_OF(args)                       \
    {.has_window = (args)->has_window != 0,      \
     .is_causal = (args)->is_causal != 0,        \
     .window_left = (args)->window_left,         \
     .window_right = (args)->window_right,       \
     .attention_chunk = (args)->attention_chunk, \
     .softcap = (args)->softcap,                 \
     .max_seqlen_q = (args)->max_seqlen_q,       \
     .max_seqlen_k = (args)->max_seqlen_k}

/* The arguments that say which keys the requests of a cache have. */
typedef struct smla_table_args {
    const DLTensor *block_table;
    const DLTensor *slot_table; /* in its place */
    const DLTensor *cache_seqlens;
    const DLTensor *cu_seqlens_q;
} smla_table_args;

#define SMLA_TABLE_OF(args) \
    {(args)->block_table, (args)->slot_table, (args)->cache_seqlens, (args)->cu_seqlens_q}

/* What every attention over keys and values of KV heads has. */
typedef struct smla_heads_args {
    smla_attention_inputs in;
    smla_named_array k;
    smla_named_array v;
    smla_named_scale descales[3]; /* q, k, v */
    smla_mask_args mask;
    int32_t fills_padding;
} smla_heads_args;

#define SMLA_HEADS_OF(args, pe, k_name, k_array, v_name, v_array)           \
    {.in = SMLA_INPUTS_OF(args, pe),                                        \
     .k = {(k_name), (k_array)},                                            \
     .v = {(v_name), (v_array)},                                            \
     .descales = {SMLA_NAMED(args, q_descale), SMLA_NAMED(args, k_descale), \
                  SMLA_NAMED(args, v_descale)},                             \
     .mask = SMLA_MASK_OF(args),                                            \
     .fills_padding = (args)->fills_padding}

/* ---- Queries -------------------------------------------------------------------------------- */

/* The rows of an array [T, H, D], or [T, D] for all heads, from value `first` on. */
smla_head_rows smla_view_part(const DLTensor *tensor, int64_t first);

/* Two parts of rows: the arrays of a pair, or one array that is cut behind dims[0] values. */
void smla_view_parts(const DLTensor *first, const DLTensor *second, const int16_t dims[2],
                     smla_head_rows parts[2]);

/* Fills the queries of arrays that were checked. */
void smla_fill_queries(const smla_attention_inputs *in, int64_t first_dim, int64_t second_dim,
                       smla_queries *queries);

/* The element types of another array beside the first. */
unsigned smla_same_dtypes(const DLTensor *first);

/* Checks values per row, of which there are 8 or more, in multiples of 8. */
smla_status smla_require_head_dim(const smla_checker *checker, const char *name, int64_t dim,
                                  int64_t most);

/* Checks a query [T, H, D] by `rule`, or the pair of D's parts, which is named q[0] and q[1] and
 * has pe_dim values in its second array. A rule for any D takes those of smla_require_head_dim. The
 * rule is completed, and becomes that of q[1]. */
smla_status smla_require_query_rows(smla_checker *checker, smla_rule *rule, const DLTensor *q_pe,
                                    int64_t pe_dim, const char *pe_hint);

/* Checks q [T, H, 576], or the pair [T, H, 512] and [T, H, 64], by the sizes of the cache's format.
 * Attention and forward share this rule. */
smla_status smla_require_query(smla_checker *checker, const char *name,
                               const smla_kv_format_info *format, const DLTensor *q,
                               const DLTensor *q_pe, int64_t num_tokens, int64_t num_heads,
                               unsigned flags);

/* ---- Logits and what is visible ------------------------------------------------------------- */

#define SMLA_SINKS_HINT "a value per head of the query"

static inline smla_sinks
smla_sinks_of(const DLTensor *tensor)
{
    return (smla_sinks){smla_data(tensor), smla_stride(tensor, 0)};
}

/* Checks sinks, which may be absent: [>= H], where `hint` says what H is; without a hint [H]. */
smla_status smla_require_sinks(smla_checker *checker, const smla_named_array *given,
                               const char *hint, int64_t num_heads, smla_sinks *sinks);

/* Checks the arguments of a mask. Fills the rule of what is visible, a rank's share excepted, and
 * the softcap. */
smla_status smla_require_mask(const smla_checker *checker, const smla_mask_args *args,
                              smla_attention_params *params);

/* Checks the table and the lengths of requests, whose tokens are q [T, ...] or [B, n, ...], and
 * fills the requests of num_tokens tokens. `table` becomes the one that was given. */
smla_status smla_require_requests(smla_checker *checker, const smla_table_args *args,
                                  const DLTensor *q, int64_t num_tokens, smla_requests *reqs,
                                  const DLTensor **table);

/* Checks that the numbers at which requests start begin with 0, never fall, and end at most at
 * `most` of what `rows` names. Numbers on a device are not read. */
smla_status smla_require_starts(const smla_checker *checker, const char *name,
                                const DLTensor *tensor, int64_t most, const char *rows);

/* ---- Keys and values of KV heads: check_heads.c --------------------------------------------- */

/* Checks q [T, H, D], or the pair [T, H, Pn] and [T, H, D - Pn]. */
smla_status smla_require_head_query(smla_checker *checker, const char *name, const DLTensor *q,
                                    const DLTensor *q_pe);

smla_status smla_require_num_kv_heads(const smla_checker *checker, const char *name,
                                      int64_t num_kv_heads, int64_t num_heads);

/* Checks a cache of keys in pages: [P, ps, num_heads, dim], where SMLA_ANY is any size. */
smla_status smla_require_k_cache(smla_checker *checker, const DLTensor *k_cache, unsigned dtypes,
                                 int64_t num_heads, int64_t dim, unsigned flags, const char *hint);

/* Checks the cache of values beside a cache of keys that was checked. */
smla_status smla_require_v_cache(smla_checker *checker, const DLTensor *v_cache,
                                 const DLTensor *k_cache, int64_t dim, unsigned flags,
                                 const char *hint);

/* Checks that values which are not e4m3 have no scale. */
smla_status smla_require_no_scale(const smla_checker *checker, const smla_named_scale *arg,
                                  const smla_named_array *of);

/* The element types of keys beside a query. */
unsigned smla_key_dtypes(const DLTensor *q);

/* Checks what these attentions have in common, once queries, keys and requests are checked and in
 * `params`, and ends the check. */
smla_status smla_check_heads(smla_checker *checker, const smla_heads_args *args,
                             smla_attention_params *params, const smla_backend **backend);

/* ---- Lists ---------------------------------------------------------------------------------- */

/* Makes the main list, whose cache is filled, a table of what the requests see: theirs are the rows
 * of `table`, whose block_size is the tokens per entry. */
void smla_fill_table(const smla_page_table *table, DLDeviceType device,
                     smla_attention_params *params);

/* A cache, with the list of its keys. */
typedef struct smla_list_args {
    smla_cache_rule cache;
    smla_named_array indices; /* without a name: the cache has a table, which this is no part of */
    smla_named_array topk_length;
    smla_named_scale kv_scale;
} smla_list_args;

/* Checks the queries, one or two lists with their caches, scales and sinks. Fills them, and clears
 * all other values. A second list without columns is none. */
smla_status smla_require_lists(smla_checker *checker, const smla_attention_inputs *in,
                               const smla_list_args *args, int num_lists,
                               smla_attention_params *params);

/* Checks the products of the scales of logits, those on a device excepted:
 * check_attention_scales.c. */
smla_status smla_require_logit_scale(const smla_checker *checker, const smla_attention_inputs *in,
                                     const smla_list_args *lists,
                                     const smla_attention_params *params);

/* ---- Results and plans ---------------------------------------------------------------------- */

/* What `out` has in attention over latents, beside the tokens and heads of the query. */
smla_rule smla_latent_out(const smla_attention_params *params);

/* The end of an attention's check, when all but the results are filled: the softmax scale, the
 * splits, the results, the plan and the workspace. `out` is the rule of out, which is completed
 * with what every attention has. */
smla_status smla_finish_attention(smla_checker *checker, const smla_attention_inputs *in,
                                  smla_rule *out, smla_attention_params *params,
                                  const smla_backend **backend);

/* Checks a number of splits: plan_attention.c. */
smla_status smla_require_num_splits(const char *op, int64_t num_splits, smla_error *error);

/* A workspace that was checked. */
smla_workspace smla_workspace_of(const smla_named_array *given);

/* Plans a call over lists or a table whose other values are filled, the workspace, too:
 * plan_attention.c. */
void smla_plan_lists(int num_splits, const smla_backend *backend, smla_attention_params *params);

/* Fills the call, its results and its plan, when all other values are filled: plan_attention.c. */
void smla_plan_attention(const smla_attention_inputs *in, smla_call call,
                         const smla_backend *backend, smla_attention_params *params);

/* Checks fills_padding, and finds what it asks to fill: rows of out [T, >= H, ...] and lse [T, H],
 * which were checked. */
smla_status smla_require_padding(const char *op, int32_t fills_padding, const DLTensor *out,
                                 const DLTensor *lse, float empty_lse, smla_padding_rows *rows,
                                 smla_error *error);
