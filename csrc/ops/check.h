/* check.h: Args -> Params, one function per operator. Defined in check_<family>.c. */
#pragma once

#include "core/attention/visible.h"
#include "core/backend.h"
#include "core/rule.h"
#include "sparse_mla.h"

/* Each checks the args of its operator, fills `params`, and finds the backend for the call. */
#define SMLA_DECLARE_CHECK(name, args_type, params_type, family)              \
    smla_status smla_check_##name(const args_type *args, params_type *params, \
                                  const smla_backend **backend, smla_error *error);

SMLA_OPERATORS(SMLA_DECLARE_CHECK)
SMLA_PROJECTIONS(SMLA_DECLARE_CHECK)
#define SMLA_DECLARE_ATTENTION_CHECK(name, args_type) \
    SMLA_DECLARE_CHECK(name, args_type, smla_attention_params, attention)

SMLA_ATTENTIONS(SMLA_DECLARE_ATTENTION_CHECK)

/* Blocks of scales along a dimension of a weight. */
static inline int64_t
smla_count_scale_tiles(int64_t size)
{
    return (size + SMLA_SCALE_TILE - 1) / SMLA_SCALE_TILE;
}

/* out = x [T, inner_dim] @ w [inner_dim, n], bf16: kv_up_proj, and the layers' products of other
 * sizes. */
typedef struct smla_linear_args {
    const char *op;
    const char *x_name;
    const DLTensor *x;
    const char *w_name;
    const DLTensor *w; /* any strides */
    int64_t inner_dim;
    const DLTensor *out; /* rows any stride apart */
    void *stream;
} smla_linear_args;

smla_status smla_check_linear(const smla_linear_args *args, smla_projection_params *params,
                              const smla_backend **backend, smla_error *error);

/* Checks that the scales of fp8_linear's weight and the groups of its input make a scheme. */
smla_status smla_require_fp8_scheme(const smla_checker *checker, const smla_fp8_linear_args *args);

/* Fills the params of fp8_linear that follow from a checked weight and its scheme: all but where
 * the rows of x and of the result lie. The input is quantised to `memory`. */
void smla_fill_fp8_linear(smla_call call, const smla_fp8_linear_args *args, int64_t num_tokens,
                          void *memory, smla_fp8_linear_params *params);

/* Checks the args, and finds the bytes that the workspace needs. */
smla_status smla_check_lightning_workspace(const smla_lightning_workspace_args *args,
                                           int64_t *bytes, smla_error *error);

/* ---- Parts that several operators share ---------------------------------------------------- */

/* Initializers of params: the memory and the strides of a checked array [n], [tokens, values] or
 * [tokens, heads, values]. */
#define SMLA_SET_VECTOR(field, tensor) \
    .field = smla_data(tensor), .field##_stride = smla_stride(tensor, 0)
#define SMLA_SET_ROWS(field, tensor) \
    .field = smla_data(tensor), .field##_stride_token = smla_stride(tensor, 0)
#define SMLA_SET_HEADS(field, tensor) \
    SMLA_SET_ROWS(field, tensor), .field##_stride_head = smla_stride(tensor, 1)

/* The element type of an array whose dtype has been checked. */
smla_float_type smla_float_type_of(const DLTensor *tensor);

/* A call on the arrays' device and the caller's stream. `kv_format` is its cache's, or NULL. */
smla_call smla_call_of(const smla_checker *checker, void *stream,
                       const smla_kv_format_info *kv_format);

smla_status smla_require_num_heads(const smla_checker *checker, const char *name,
                                   int64_t num_heads);

/* Checks the args of concat_and_cache_mla for a cache of one of `formats`, and fills `params`. kv_c
 * may have `dtypes`. */
smla_status smla_require_concat(smla_checker *checker, const smla_concat_and_cache_mla_args *args,
                                smla_kv_set formats, unsigned dtypes,
                                smla_cache_write_params *params);

/* Checks an int32 vector of `count` entries. */
smla_status smla_require_vector(smla_checker *checker, const char *name, const DLTensor *tensor,
                                int64_t count, unsigned flags, const char *hint);

smla_status smla_require_block_table(smla_checker *checker, const DLTensor *tensor);

/* A block table that has been checked, or no table for NULL. */
smla_page_table smla_page_table_of(const DLTensor *tensor, int64_t block_size);

/* Checks an int32 table of page numbers [>= num_reqs, any]. */
smla_status smla_require_table(smla_checker *checker, const char *name, const DLTensor *tensor,
                               int64_t num_reqs, unsigned flags);

/* Checks slots of the cache, int64 or int32 [num_tokens]. */
smla_status smla_require_slots(smla_checker *checker, const char *name, const DLTensor *slots,
                               int64_t num_tokens, unsigned flags);

/* Checks is_valid [>= num_tokens], which may be absent. */
smla_status smla_require_is_valid(smla_checker *checker, const DLTensor *tensor,
                                  int64_t num_tokens);

/* Checks `cp`, which may be absent. */
smla_status smla_require_share(const smla_checker *checker, int64_t rank, int64_t size,
                               int64_t interleave, smla_rank_share *share);

/* Checks a number of `least` to INT32_MAX. */
smla_status smla_require_number(const smla_checker *checker, const char *name, int64_t value,
                                int64_t least);

/* Checks lse or max_logits: fp32 [tokens, heads]. */
smla_status smla_require_state(smla_checker *checker, const char *name, const DLTensor *tensor,
                               int64_t num_tokens, int64_t num_heads, unsigned flags);

/* Checks a workspace of bytes, which the call writes. Its size is for the caller to check. */
smla_status smla_require_workspace(smla_checker *checker, const char *name, const DLTensor *tensor,
                                   unsigned flags);

/* The rule of a cache that the args call `field`. */
#define SMLA_CACHE_OF(args, field, served, flag) \
    {.name = #field,                             \
     .tensor = (args)->field,                    \
     .kv_format = (args)->kv_format,             \
     .block_size = (args)->block_size,           \
     .formats = (served),                        \
     .flags = (flag)}

/* Checks slot_mapping [any] of int64 or int32. */
smla_status smla_require_slot_mapping(smla_checker *checker, const DLTensor *slot_mapping);

/* The table entries with keys of `head_dim` values. */
smla_kv_set smla_formats_of_size(int32_t head_dim);

/* Checks that a norm's epsilon is finite and not negative. */
smla_status smla_require_eps(const smla_checker *checker, double eps);

/* Checks positions [>= num_tokens] and rope_table [max_pos, 64], and fills `rope`. */
smla_status smla_require_rope(smla_checker *checker, const DLTensor *positions,
                              const DLTensor *rope_table, int64_t num_tokens, smla_rope *rope);

/* Checks the arguments of indexer_logits but for `out`, and fills the rest of `params`. */
smla_status smla_require_scored(smla_checker *checker, const smla_indexer_logits_args *args,
                                smla_logits_params *params);

/* Checks the arguments of top_k_per_row from `k` on, and fills all of `params` but the logits.
 * `values` are of `dtype`. */
smla_status smla_require_choice(smla_checker *checker, const smla_top_k_args *args,
                                int64_t num_tokens, unsigned dtype, smla_top_k_params *params);

/* The last step: finds the backend of the device, and refuses outputs that overlap an array. */
smla_status smla_finish_check(const smla_checker *checker, const smla_backend **backend);
