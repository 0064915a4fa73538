/* check_heads.c: the argument rules that attentions over keys and values of KV heads share. */
#include <math.h>

#include "core/rule_parts.h"
#include "ops/check_attention.h"

smla_status
smla_require_num_kv_heads(const smla_checker *c, const char *name, int64_t num_kv_heads,
                          int64_t num_heads)
{
    return num_kv_heads >= 1 && num_heads % num_kv_heads == 0
               ? SMLA_OK
               : smla_refuse(
                     c, "`%s` must have a number of heads that divides the %lld of `q`, got %lld",
                     name, (long long)num_heads, (long long)num_kv_heads);
}

/* Checks the pages of both caches. */
static smla_status
require_pages(const smla_checker *c, const DLTensor *k_cache)
{
    const int64_t num_pages = smla_size(k_cache, 0), page_size = smla_size(k_cache, 1);
    if (page_size < 1 || page_size > INT32_MAX) {
        return smla_refuse(c, "`k_cache` must have 1 or more tokens per page, got %lld",
                           (long long)page_size);
    }
    return num_pages <= INT32_MAX / page_size
               ? SMLA_OK
               : smla_refuse(c, "`k_cache` must have at most %d tokens, got %lld pages of %lld",
                             INT32_MAX, (long long)num_pages, (long long)page_size);
}

smla_status
smla_require_k_cache(smla_checker *c, const DLTensor *k_cache, unsigned dtypes, int64_t num_heads,
                     int64_t dim, unsigned flags, const char *hint)
{
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "k_cache",
                                          .tensor = k_cache,
                                          .dtypes = dtypes,
                                          .flags = flags,
                                          .ndim = 4,
                                          .shape = {SMLA_ANY, SMLA_ANY, num_heads, dim},
                                          .hint = hint}));
    return require_pages(c, k_cache);
}

smla_status
smla_require_v_cache(smla_checker *c, const DLTensor *v_cache, const DLTensor *k_cache, int64_t dim,
                     unsigned flags, const char *hint)
{
    return smla_require(c, &(smla_rule){.name = "v_cache",
                                        .tensor = v_cache,
                                        .dtypes = smla_same_dtypes(k_cache),
                                        .flags = flags,
                                        .ndim = 4,
                                        .shape = {smla_size(k_cache, 0), smla_size(k_cache, 1),
                                                  smla_size(k_cache, 2), dim},
                                        .hint = hint});
}

/* Keys are of the query's type or e4m3. An e4m3 query takes keys of any type. */
unsigned
smla_key_dtypes(const DLTensor *q)
{
    const unsigned dtype = smla_dtype(q);
    return dtype & SMLA_DTYPE_E4M3_OR_BYTES
               ? SMLA_DTYPE_BF16 | SMLA_DTYPE_FP16 | SMLA_DTYPE_E4M3_OR_BYTES
               : dtype | SMLA_DTYPE_E4M3_OR_BYTES;
}

smla_status
smla_require_head_query(smla_checker *c, const char *name, const DLTensor *q, const DLTensor *q_pe)
{
    smla_rule rule = {
        .name = name,
        .tensor = q,
        .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP16 | SMLA_DTYPE_E4M3_OR_BYTES,
        .shape = {SMLA_ANY, SMLA_ANY, SMLA_ANY},
        .hint = "tokens, heads, values",
    };
    return smla_require_query_rows(c, &rule, q_pe, SMLA_ANY, "the tokens and heads of `q[0]`");
}

/* Checks that the CPU can use the scales of every request and KV head. */
static smla_status
require_positive_scales(const smla_checker *c, const char *name, const DLTensor *tensor,
                        const smla_descale *scale)
{
    const bool has_rows = tensor->ndim == 2;
    for (int64_t row = 0; row < (has_rows ? smla_size(tensor, 0) : 1); row++) {
        for (int64_t head = 0; head < (has_rows ? smla_size(tensor, 1) : 1); head++) {
            SMLA_TRY(smla_require_positive(
                c->op, name, scale->pointer[row * scale->stride_row + head * scale->stride_head],
                c->error));
        }
    }
    return SMLA_OK;
}

smla_status
smla_require_no_scale(const smla_checker *c, const smla_named_scale *arg,
                      const smla_named_array *of)
{
    return arg->given.tensor == NULL && (arg->given.value == 0 || arg->given.value == 1)
               ? SMLA_OK
               : smla_refuse(c, "`%s` must be left out unless `%s` is e4m3, got %s", arg->name,
                             of->name, smla_describe_dtype(of->tensor).text);
}

/* Checks a scale of e4m3 values, or that values of another type have none. */
static smla_status
require_descale(smla_checker *c, const smla_named_scale *arg, const smla_named_array *of,
                int64_t num_reqs, int64_t num_kv_heads, smla_descale *scale)
{
    const char *const name = arg->name;
    const smla_scale_arg *const given = &arg->given;
    const DLTensor *const tensor = given->tensor;
    *scale = (smla_descale){.reqs_per_row = 1, .value = 1.0f};
    if (!(smla_dtype(of->tensor) & SMLA_DTYPE_E4M3_OR_BYTES)) {
        return smla_require_no_scale(c, arg, of);
    }
    SMLA_TRY(smla_read_scale_number(c, name, given, &scale->value));
    if (tensor == NULL) {
        return SMLA_OK;
    }
    const int64_t num_rows = tensor->ndim == 2 ? tensor->shape[0] : 0;
    const bool has_rows = tensor->ndim == 2 && tensor->shape[1] == num_kv_heads &&
                          (num_rows == 0 ? num_reqs == 0 : num_reqs % num_rows == 0);
    if (!has_rows && !smla_has_one_value(tensor)) {
        return smla_refuse(c,
                           "`%s` must have one value or shape [n, %lld], where n divides the %lld "
                           "requests, or be a float, got shape %s",
                           name, (long long)num_kv_heads, (long long)num_reqs,
                           smla_describe_shape(tensor).text);
    }
    scale->pointer = smla_data(tensor);
    scale->reqs_per_row = num_reqs > num_rows && has_rows ? (int32_t)(num_reqs / num_rows) : 1;
    scale->stride_row = has_rows ? smla_stride(tensor, 0) : 0;
    scale->stride_head = has_rows ? smla_stride(tensor, 1) : 0;
    return c->device.device_type == kDLCPU ? require_positive_scales(c, name, tensor, scale)
                                           : SMLA_OK;
}

static smla_status
require_logits(smla_checker *c, const smla_heads_args *args, smla_attention_params *params)
{
    smla_logits *const logits = &params->logits;
    smla_descale *const scales[] = {&logits->q_descale, &logits->k_descale, &logits->v_descale};
    const smla_named_array *const values[] = {&args->in.q, &args->k, &args->v};
    SMLA_TRY(smla_require_sinks(c, &args->in.sinks, SMLA_SINKS_HINT, params->queries.num_heads,
                                &logits->sinks));
    for (int i = 0; i < 3; i++) {
        SMLA_TRY(require_descale(c, &args->descales[i], values[i], params->visible.reqs.num_reqs,
                                 params->kv.num_kv_heads, scales[i]));
    }
    return smla_require_mask(c, &args->mask, params);
}

smla_status
smla_check_heads(smla_checker *c, const smla_heads_args *args, smla_attention_params *params,
                 const smla_backend **backend)
{
    const smla_attention_inputs *const in = &args->in;
    const unsigned half = smla_dtype(in->q.tensor) & ~(unsigned)SMLA_DTYPE_E4M3_OR_BYTES;
    smla_rule out = {
        .dtypes = SMLA_DTYPE_FP32 | (half == 0 ? SMLA_DTYPE_BF16 : half),
        .shape[2] = params->kv.value_dim,
        .hint = "the tokens and heads of `q`, the values of `v`",
    };
    SMLA_TRY(require_logits(c, args, params));
    SMLA_TRY(smla_finish_attention(c, in, &out, params, backend));
    return smla_require_padding(c->op, args->fills_padding, in->out, in->lse, -INFINITY,
                                &params->padding, c->error);
}
