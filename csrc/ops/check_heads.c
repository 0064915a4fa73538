/* check_heads.c: the argument rules that attentions over keys and values of KV heads share. */
#include <math.h>

#include "ops/check_attention.h"

enum { DIM_MULTIPLE = 8 };

smla_status
smla_require_head_dim(const smla_checker *c, const char *name, int64_t dim, int64_t most)
{
    return dim >= DIM_MULTIPLE && dim <= most && dim % DIM_MULTIPLE == 0
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `%s` must have a multiple of %d values per head, at most %lld, got "
                           "%lld",
                           c->op, name, DIM_MULTIPLE, (long long)most, (long long)dim);
}

smla_status
smla_require_num_kv_heads(const smla_checker *c, const char *name, int64_t num_kv_heads,
                          int64_t num_heads)
{
    return num_kv_heads >= 1 && num_heads % num_kv_heads == 0
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `%s` must have a number of heads that divides the %lld of `q`, got "
                           "%lld",
                           c->op, name, (long long)num_heads, (long long)num_kv_heads);
}

unsigned
smla_same_dtypes(const DLTensor *first)
{
    const unsigned dtype = smla_dtype(first);
    return dtype & SMLA_DTYPE_E4M3_OR_BYTES ? SMLA_DTYPE_E4M3_OR_BYTES : dtype;
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
smla_require_head_query(smla_checker *c, const char *name, const DLTensor *q)
{
    SMLA_TRY(smla_require(c, &(smla_rule){.name = name,
                                          .tensor = q,
                                          .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP16 |
                                                    SMLA_DTYPE_E4M3_OR_BYTES,
                                          .ndim = 3,
                                          .shape = {SMLA_ANY, SMLA_ANY, SMLA_ANY},
                                          .hint = "tokens, heads, values"}));
    SMLA_TRY(smla_require_num_heads(c, name, smla_size(q, 1)));
    return smla_require_head_dim(c, name, smla_size(q, 2), SMLA_HEAD_DIM);
}

static smla_status
require_logits(smla_checker *c, const smla_heads_args *args, smla_attention_params *params)
{
    const int64_t num_reqs = params->visible.reqs.num_reqs;
    const int64_t num_kv_heads = params->kv.num_kv_heads;
    smla_logits *const logits = &params->logits;
    SMLA_TRY(smla_require_sinks(c, "attn_sink", args->attn_sink, SMLA_SINKS_HINT,
                                params->queries.num_heads, &logits->sinks));
    SMLA_TRY(smla_require_descale(c, "q_descale", args->q_descale, "q", args->q, num_reqs,
                                  num_kv_heads, &logits->q_descale));
    SMLA_TRY(smla_require_descale(c, "k_descale", args->k_descale, args->k_name, args->k, num_reqs,
                                  num_kv_heads, &logits->k_descale));
    SMLA_TRY(smla_require_descale(c, "v_descale", args->v_descale, args->v_name, args->v, num_reqs,
                                  num_kv_heads, &logits->v_descale));
    SMLA_TRY(smla_require_mask(c, &args->mask, params));
    return smla_require_softmax_scale(c, "softmax_scale", args->softmax_scale, logits);
}

static smla_status
require_results(smla_checker *c, const smla_heads_args *args, smla_attention_params *params)
{
    const unsigned dtype = smla_dtype(args->q);
    const unsigned half = dtype & SMLA_DTYPE_E4M3_OR_BYTES ? SMLA_DTYPE_BF16 : dtype;
    const int64_t num_tokens = params->queries.num_tokens, num_heads = params->queries.num_heads;
    SMLA_TRY(smla_require_num_splits(c, args->num_splits));
    if (params->source == SMLA_KEYS_PAGED && args->num_splits > 1) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `num_splits` must be 0 or 1, because keys are not split, got %lld",
                         c->op, (long long)args->num_splits);
    }
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "out",
                                          .tensor = args->out,
                                          .dtypes = half | SMLA_DTYPE_FP32,
                                          .flags = SMLA_RULE_OUTPUT,
                                          .ndim = 3,
                                          .shape = {num_tokens, num_heads, params->kv.value_dim},
                                          .hint = "the tokens and heads of `q`, the values of "
                                                  "`v`"}));
    SMLA_TRY(smla_require_state(c, "lse", args->lse, num_tokens, num_heads, SMLA_RULE_OUTPUT));
    SMLA_TRY(smla_require_workspace(c, "workspace", args->workspace, SMLA_RULE_OPTIONAL));
    params->results = smla_results_of(args->out, args->lse, NULL);
    params->workspace = smla_workspace_of("workspace", args->workspace);
    return SMLA_OK;
}

smla_status
smla_check_heads(smla_checker *c, const smla_heads_args *args, smla_attention_params *params,
                 const smla_backend **backend)
{
    SMLA_TRY(require_logits(c, args, params));
    SMLA_TRY(require_results(c, args, params));
    SMLA_TRY(smla_finish_check(c, backend));
    params->call = smla_call_of(c, args->stream, NULL);
    return smla_require_padding(c->op, args->fills_padding, args->out, args->lse, -INFINITY,
                                &params->padding, c->error);
}
