/* check_varlen.c: the argument rules of varlen_attention. */
#include <float.h>

#include "core/params_varlen.h"
#include "core/rule_parts.h"
#include "ops/check.h"

enum {
    MAX_HEAD_DIM = SMLA_HEAD_DIM,
    MAX_VALUE_DIM = SMLA_KV_LORA_RANK,
    DIM_MULTIPLE = 8,
};

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Checks values per row, of which there are 8 or more, in multiples of 8. */
static smla_status
require_dim(const smla_checker *c, const char *name, int64_t dim, int64_t most)
{
    return dim >= DIM_MULTIPLE && dim <= most && dim % DIM_MULTIPLE == 0
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `%s` must have a multiple of %d values per head, at most %lld, got "
                           "%lld",
                           c->op, name, DIM_MULTIPLE, (long long)most, (long long)dim);
}

/* The element types that the second array of a pair may have. */
static unsigned
same_dtypes(const DLTensor *first)
{
    const unsigned dtype = smla_dtype(first);
    return dtype & SMLA_DTYPE_E4M3_OR_BYTES ? SMLA_DTYPE_E4M3_OR_BYTES : dtype;
}

static smla_status
require_query(smla_checker *c, const smla_varlen_attention_args *args)
{
    const bool is_pair = args->q_pe != NULL;
    const char *const name = is_pair ? "q[0]" : "q";
    SMLA_TRY(smla_require(c, &(smla_rule){.name = name,
                                          .tensor = args->q,
                                          .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP16 |
                                                    SMLA_DTYPE_E4M3_OR_BYTES,
                                          .ndim = 3,
                                          .shape = {SMLA_ANY, SMLA_ANY, SMLA_ANY},
                                          .hint = "tokens, heads, values"}));
    SMLA_TRY(smla_require_num_heads(c, name, smla_size(args->q, 1)));
    SMLA_TRY(require_dim(c, name, smla_size(args->q, 2), MAX_HEAD_DIM));
    if (!is_pair) {
        return SMLA_OK;
    }
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "q[1]",
                                          .tensor = args->q_pe,
                                          .dtypes = same_dtypes(args->q),
                                          .ndim = 3,
                                          .shape = {smla_size(args->q, 0), smla_size(args->q, 1),
                                                    SMLA_ANY},
                                          .hint = "the tokens and heads of `q[0]`"}));
    return require_dim(c, "q[1]", smla_size(args->q_pe, 2), MAX_HEAD_DIM - smla_size(args->q, 2));
}

/* Keys are of the query's type or e4m3. An e4m3 query takes keys of any type. */
static unsigned
key_dtypes(const DLTensor *q)
{
    const unsigned dtype = smla_dtype(q);
    return dtype & SMLA_DTYPE_E4M3_OR_BYTES
               ? SMLA_DTYPE_BF16 | SMLA_DTYPE_FP16 | SMLA_DTYPE_E4M3_OR_BYTES
               : dtype | SMLA_DTYPE_E4M3_OR_BYTES;
}

/* Checks that keys have as many values as queries, and where both are pairs, in the same parts. */
static smla_status
require_equal_dims(const smla_checker *c, const smla_varlen_attention_args *args)
{
    const bool has_parts = args->q_pe != NULL && args->k_pe != NULL;
    const int64_t q_pe_dim = args->q_pe == NULL ? 0 : smla_size(args->q_pe, 2);
    const int64_t k_pe_dim = args->k_pe == NULL ? 0 : smla_size(args->k_pe, 1);
    const int64_t wanted = smla_size(args->q, 2) + q_pe_dim;
    const int64_t got = smla_size(args->k, 2) + k_pe_dim;
    if (wanted != got) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `k` must have %lld values per head, as `q` has, got %lld", c->op,
                         (long long)wanted, (long long)got);
    }
    return !has_parts || q_pe_dim == k_pe_dim
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `k[1]` must have %lld values, as `q[1]` has, got %lld", c->op,
                           (long long)q_pe_dim, (long long)k_pe_dim);
}

static smla_status
require_keys(smla_checker *c, const smla_varlen_attention_args *args)
{
    const bool is_pair = args->k_pe != NULL;
    const char *const name = is_pair ? "k[0]" : "k";
    const int64_t num_heads = smla_size(args->q, 1);
    SMLA_TRY(smla_require(c, &(smla_rule){.name = name,
                                          .tensor = args->k,
                                          .dtypes = key_dtypes(args->q),
                                          .ndim = 3,
                                          .shape = {SMLA_ANY, SMLA_ANY, SMLA_ANY},
                                          .hint = "tokens, KV heads, values"}));
    const int64_t num_keys = smla_size(args->k, 0);
    const int64_t num_kv_heads = smla_size(args->k, 1);
    if (num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have a number of heads that divides the %lld of `q`, got "
                         "%lld",
                         c->op, name, (long long)num_heads, (long long)num_kv_heads);
    }
    SMLA_TRY(require_dim(c, name, smla_size(args->k, 2), MAX_HEAD_DIM));
    if (is_pair) {
        SMLA_TRY(smla_require(c, &(smla_rule){.name = "k[1]",
                                              .tensor = args->k_pe,
                                              .dtypes = same_dtypes(args->k),
                                              .ndim = 2,
                                              .shape = {num_keys, SMLA_ANY},
                                              .hint = "a row per key, which all heads share"}));
        SMLA_TRY(
            require_dim(c, "k[1]", smla_size(args->k_pe, 1), MAX_HEAD_DIM - smla_size(args->k, 2)));
    }
    SMLA_TRY(require_equal_dims(c, args));
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "v",
                                          .tensor = args->v,
                                          .dtypes = same_dtypes(args->k),
                                          .ndim = 3,
                                          .shape = {num_keys, num_kv_heads, SMLA_ANY},
                                          .hint = "the keys and heads of `k`"}));
    return require_dim(c, "v", smla_size(args->v, 2), MAX_VALUE_DIM);
}

/* Values `first`...`first + dim - 1` of an array's rows. */
static smla_varlen_rows
view_rows(const DLTensor *tensor, int64_t first, int64_t dim)
{
    if (dim == 0) {
        return (smla_varlen_rows){.data = NULL};
    }
    return (smla_varlen_rows){
        .data = smla_data_at(tensor, first * smla_element_bytes(tensor)),
        .dim = dim,
        .stride_token = smla_stride(tensor, 0),
        .stride_head = tensor->ndim == 3 ? smla_stride(tensor, 1) : 0,
    };
}

/* Two parts of `rows`: the arrays of a pair, or one array that is cut at `cut`. */
static void
view_parts(const DLTensor *first, const DLTensor *second, int64_t cut, smla_varlen_rows rows[2])
{
    rows[0] = view_rows(first, 0, cut);
    rows[1] = second != NULL ? view_rows(second, 0, smla_size(second, second->ndim - 1))
                             : view_rows(first, cut, smla_size(first, 2) - cut);
}

/* ---- Scales -------------------------------------------------------------------------------- */

/* Checks that the CPU can use the scales of every request and KV head. */
static smla_status
require_positive_scales(const smla_checker *c, const char *name, const DLTensor *tensor,
                        const smla_varlen_scale *scale)
{
    const bool has_rows = tensor->ndim == 2;
    for (int64_t req = 0; req < (has_rows ? smla_size(tensor, 0) : 1); req++) {
        for (int64_t head = 0; head < (has_rows ? smla_size(tensor, 1) : 1); head++) {
            SMLA_TRY(smla_require_positive(
                c->op, name, scale->pointer[req * scale->stride_req + head * scale->stride_head],
                c->error));
        }
    }
    return SMLA_OK;
}

/* Checks a scale of e4m3 values, or that values of another type `of` have none. */
static smla_status
require_descale(smla_checker *c, const char *name, const smla_scale_arg *given, const char *of,
                const DLTensor *values, int64_t num_reqs, int64_t num_kv_heads,
                smla_varlen_scale *scale)
{
    const DLTensor *const tensor = given->tensor;
    *scale = (smla_varlen_scale){.value = 1.0f};
    if (!(smla_dtype(values) & SMLA_DTYPE_E4M3_OR_BYTES)) {
        return tensor == NULL && (given->value == 0 || given->value == 1)
                   ? SMLA_OK
                   : smla_fail(c->error, SMLA_ERROR_VALUE,
                               "%s: `%s` must be left out unless `%s` is e4m3, got %s", c->op, name,
                               of, smla_describe_dtype(values).text);
    }
    SMLA_TRY(smla_read_scale_number(c, name, given, &scale->value));
    if (tensor == NULL) {
        return SMLA_OK;
    }
    const bool has_rows =
        tensor->ndim == 2 && tensor->shape[0] == num_reqs && tensor->shape[1] == num_kv_heads;
    if (!has_rows && !smla_has_one_value(tensor)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have one value or shape [%lld, %lld], or be a float, got "
                         "shape %s",
                         c->op, name, (long long)num_reqs, (long long)num_kv_heads,
                         smla_describe_shape(tensor).text);
    }
    scale->pointer = smla_data(tensor);
    scale->stride_req = has_rows ? smla_stride(tensor, 0) : 0;
    scale->stride_head = has_rows ? smla_stride(tensor, 1) : 0;
    return c->device.device_type == kDLCPU ? require_positive_scales(c, name, tensor, scale)
                                           : SMLA_OK;
}

/* ---- varlen_attention ---------------------------------------------------------------------- */

static smla_status
require_requests(smla_checker *c, const smla_varlen_attention_args *args)
{
    const DLTensor *const starts = args->cu_seqlens_q;
    SMLA_TRY(smla_require_vector(c, "cu_seqlens_q", starts, SMLA_ANY, 0, NULL));
    if (smla_size(starts, 0) < 1) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `cu_seqlens_q` must have an entry more than there are requests, got "
                         "none",
                         c->op);
    }
    SMLA_TRY(smla_require_vector(c, "cu_seqlens_k", args->cu_seqlens_k, smla_size(starts, 0), 0,
                                 "as many entries as `cu_seqlens_q`"));
    SMLA_TRY(
        smla_require_starts(c, "cu_seqlens_q", starts, smla_size(args->q, 0), "tokens of `q`"));
    return smla_require_starts(c, "cu_seqlens_k", args->cu_seqlens_k, smla_size(args->k, 0),
                               "keys of `k`");
}

static smla_status
require_results(smla_checker *c, const smla_varlen_attention_args *args)
{
    const unsigned dtype = smla_dtype(args->q);
    const unsigned half = dtype & SMLA_DTYPE_E4M3_OR_BYTES ? SMLA_DTYPE_BF16 : dtype;
    const int64_t num_tokens = smla_size(args->q, 0), num_heads = smla_size(args->q, 1);
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "out",
                                          .tensor = args->out,
                                          .dtypes = half | SMLA_DTYPE_FP32,
                                          .flags = SMLA_RULE_OUTPUT,
                                          .ndim = 3,
                                          .shape = {num_tokens, num_heads, smla_size(args->v, 2)},
                                          .hint = "the tokens and heads of `q`, the values of "
                                                  "`v`"}));
    SMLA_TRY(smla_require_state(c, "lse", args->lse, num_tokens, num_heads, SMLA_RULE_OUTPUT));
    return smla_require_workspace(c, "workspace", args->workspace, SMLA_RULE_OPTIONAL);
}

static void
fill_arrays(const smla_varlen_attention_args *args, smla_varlen_params *params)
{
    const bool is_cut = args->q_pe != NULL || args->k_pe != NULL;
    const int64_t cut = smla_size(!is_cut || args->q_pe != NULL ? args->q : args->k, 2);
    view_parts(args->q, args->q_pe, cut, params->q);
    view_parts(args->k, args->k_pe, cut, params->k);
    params->v = view_rows(args->v, 0, smla_size(args->v, 2));
    params->q_type = smla_float_type_of(args->q);
    params->kv_type = smla_float_type_of(args->k);
    params->out_type = smla_float_type_of(args->out);
    params->query_starts = smla_data(args->cu_seqlens_q);
    params->query_starts_stride = smla_stride(args->cu_seqlens_q, 0);
    params->key_starts = smla_data(args->cu_seqlens_k);
    params->key_starts_stride = smla_stride(args->cu_seqlens_k, 0);
    params->attn_sink = smla_data(args->attn_sink);
    params->attn_sink_stride = smla_stride(args->attn_sink, 0);
    params->out = smla_data(args->out);
    params->out_stride_token = smla_stride(args->out, 0);
    params->out_stride_head = smla_stride(args->out, 1);
    params->lse = smla_data(args->lse);
    params->lse_stride_token = smla_stride(args->lse, 0);
    params->lse_stride_head = smla_stride(args->lse, 1);
    params->workspace = smla_data(args->workspace);
    params->workspace_bytes = smla_size(args->workspace, 0);
}

static smla_status
require_scales(smla_checker *c, const smla_varlen_attention_args *args, smla_varlen_params *p)
{
    SMLA_TRY(require_descale(c, "q_descale", &args->q_descale, "q", args->q, p->num_reqs,
                             p->num_kv_heads, &p->q_descale));
    SMLA_TRY(require_descale(c, "k_descale", &args->k_descale, "k", args->k, p->num_reqs,
                             p->num_kv_heads, &p->k_descale));
    return require_descale(c, "v_descale", &args->v_descale, "v", args->v, p->num_reqs,
                           p->num_kv_heads, &p->v_descale);
}

static smla_mask_args
mask_of(const smla_varlen_attention_args *args)
{
    return (smla_mask_args){
        .has_window = args->has_window != 0,
        .is_causal = args->is_causal != 0,
        .window_left = args->window_left,
        .window_right = args->window_right,
        .attention_chunk = args->attention_chunk,
        .softcap = args->softcap,
        .max_seqlen_q = args->max_seqlen_q,
        .max_seqlen_k = args->max_seqlen_k,
    };
}

smla_status
smla_check_varlen_attention(const smla_varlen_attention_args *args, smla_varlen_params *params,
                            const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "varlen_attention", error);
    SMLA_TRY(require_query(&c, args));
    SMLA_TRY(require_keys(&c, args));
    SMLA_TRY(require_requests(&c, args));
    *params = (smla_varlen_params){
        .num_tokens = smla_size(args->q, 0),
        .num_keys = smla_size(args->k, 0),
        .num_reqs = smla_size(args->cu_seqlens_q, 0) - 1,
        .num_heads = smla_size(args->q, 1),
        .num_kv_heads = smla_size(args->k, 1),
        .value_dim = smla_size(args->v, 2),
        .softmax_scale = args->softmax_scale,
        .softcap = (float)args->softcap,
    };
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "attn_sink",
                                           .tensor = args->attn_sink,
                                           .dtypes = SMLA_DTYPE_FP32,
                                           .flags = SMLA_RULE_OPTIONAL | SMLA_RULE_MORE_ROWS |
                                                    SMLA_RULE_ANY_LAST_STRIDE,
                                           .ndim = 1,
                                           .shape = {params->num_heads},
                                           .hint = "a value per head of the query"}));
    SMLA_TRY(require_scales(&c, args, params));
    const smla_mask_args mask = mask_of(args);
    SMLA_TRY(smla_require_mask(&c, &mask, &params->rule));
    SMLA_TRY(smla_require_logit_factor(c.op, "softmax_scale", args->softmax_scale, error));
    SMLA_TRY(smla_require_num_splits(&c, args->num_splits));
    SMLA_TRY(require_results(&c, args));
    SMLA_TRY(smla_finish_check(&c, backend));
    SMLA_TRY(smla_require_padding(c.op, args->fills_padding, args->out, args->lse, -INFINITY,
                                  &params->padding, error));
    fill_arrays(args, params);
    params->call = smla_call_of(&c, args->stream, NULL);
    return SMLA_OK;
}
