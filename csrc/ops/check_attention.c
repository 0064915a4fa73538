/* check_attention.c: the argument rules of sparse_attention, and of lists of keys. Args (arrays as
 * the caller gave them) become params (flat sizes, strides, typed pointers). The layers below
 * validate nothing again.
 *
 * Only values inside arrays (slots, page numbers, request ids) are left to the backends. The CPU
 * reports bad values, a GPU kernel masks them.
 */
#include "ops/check_attention.h"

/* ---- Lists ---------------------------------------------------------------------------------- */

/* Fills all of a list but its cache. */
static void
fill_list(const DLTensor *indices, const DLTensor *topk_length, smla_key_list *list)
{
    list->indices = smla_data(indices);
    list->indices_stride_token = smla_stride(indices, 0);
    list->topk = smla_size(indices, 1);
    list->end = smla_data(topk_length);
    list->end_stride = smla_stride(topk_length, 0);
}

static smla_status
require_indices(smla_checker *c, const smla_list_args *args, int64_t num_tokens,
                smla_key_list *list)
{
    SMLA_TRY(smla_require_2d(c, args->indices.name, args->indices.tensor, SMLA_DTYPE_INT32,
                             num_tokens, SMLA_ANY, 0, "a row per token of the query"));
    SMLA_TRY(smla_require_vector(c, args->topk_length.name, args->topk_length.tensor, num_tokens,
                                 SMLA_RULE_OPTIONAL, "a length per token of the query"));
    fill_list(args->indices.tensor, args->topk_length.tensor, list);
    return SMLA_OK;
}

/* Checks a cache with its index list. */
static smla_status
require_list(smla_checker *c, const smla_list_args *args, int64_t num_tokens, smla_key_list *list,
             smla_given_scale *kv_scale)
{
    SMLA_TRY(smla_require_kv(c, &args->cache, &list->kv));
    SMLA_TRY(args->indices.name == NULL ? SMLA_OK : require_indices(c, args, num_tokens, list));
    return smla_require_kv_scale(c, args->kv_scale.name, &args->kv_scale.given, list->kv.format,
                                 kv_scale);
}

/* A query is multiplied with keys of both lists. */
static smla_status
require_same_head_size(const smla_checker *c, const smla_list_args *lists,
                       const smla_attention_params *params)
{
    const int32_t wanted = params->keys.lists[0].kv.format->head_dim;
    const int32_t got = params->keys.lists[1].kv.format->head_dim;
    return wanted == got ? SMLA_OK
                         : smla_refuse(c, "`%s` must have keys of %d values, as `%s` has, got %d",
                                       lists[1].cache.name, wanted, lists[0].cache.name, got);
}

/* Checks the scale of a query. Usually only an e4m3 query has one. */
static smla_status
require_query_scale(smla_checker *c, const smla_attention_inputs *in, smla_given_scale *scale)
{
    const smla_scale_arg *const given = &in->q_scale.given;
    const bool is_e4m3 = (smla_dtype(in->q.tensor) & SMLA_DTYPE_E4M3_OR_BYTES) != 0;
    *scale = (smla_given_scale){.value = 1.0f};
    if (is_e4m3 || in->any_query_has_scale) {
        return smla_require_scale(c, in->q_scale.name, given, scale);
    }
    if (given->tensor != NULL) {
        return smla_refuse(c, "`%s` must be left out for a bfloat16 query, got an array",
                           in->q_scale.name);
    }
    if (given->value != 0 && given->value != 1) {
        return smla_refuse(c, "`%s` must be 1 for a bfloat16 query, got %g", in->q_scale.name,
                           given->value);
    }
    return SMLA_OK;
}

smla_status
smla_require_lists(smla_checker *c, const smla_attention_inputs *in, const smla_list_args *args,
                   int num_lists, smla_attention_params *params)
{
    *params = (smla_attention_params){.keys.num_lists = num_lists, .logits.divisor.value = 1.0f};
    const smla_cache_rule *const cache = &args[0].cache;
    smla_key_list *const lists = params->keys.lists;
    smla_logits *const logits = &params->logits;
    const smla_kv_format_info *format = NULL;
    if (cache->tensor != NULL && !smla_has_kv_format(cache->tensor, cache->kv_format)) {
        return smla_require_kv(c, cache, &lists[0].kv); /* the query depends on it */
    }
    SMLA_TRY(smla_find_format(c, cache, &format));
    SMLA_TRY(
        smla_require_query(c, in->q.name, format, in->q.tensor, in->q_pe, SMLA_ANY, SMLA_ANY, 0));
    smla_fill_queries(in, SMLA_KV_LORA_RANK, format->head_dim - SMLA_KV_LORA_RANK,
                      &params->queries);
    const int64_t num_tokens = params->queries.num_tokens;
    SMLA_TRY(require_query_scale(c, in, &logits->q_scale));
    SMLA_TRY(require_list(c, &args[0], num_tokens, &lists[0], &logits->kv_scale[0]));
    SMLA_TRY(smla_require_sinks(c, &in->sinks, SMLA_SINKS_HINT, params->queries.num_heads,
                                &logits->sinks));
    if (num_lists == 2) {
        SMLA_TRY(require_list(c, &args[1], num_tokens, &lists[1], &logits->kv_scale[1]));
        SMLA_TRY(require_same_head_size(c, args, params));
        params->keys.num_lists = lists[1].topk == 0 ? 1 : 2; /* no columns: no list */
    }
    logits->kv_scale[1] = logits->kv_scale[params->keys.num_lists - 1];
    return SMLA_OK;
}

/* ---- sparse_attention ----------------------------------------------------------------------- */

/* Whether an argument of the extra list is given: then its cache and indices must be, too. */
static bool
has_extra_args(const smla_sparse_attention_args *args)
{
    const smla_scale_arg *const scale = &args->extra_kv_scale;
    return args->extra_kv_cache != NULL || args->extra_indices != NULL ||
           args->extra_topk_length != NULL || args->extra_kv_format != SMLA_KV_INFER ||
           args->extra_block_size != 0 || scale->tensor != NULL ||
           (scale->value != 0 && scale->value != 1);
}

smla_status
smla_check_sparse_attention(const smla_sparse_attention_args *args, smla_attention_params *params,
                            const smla_backend **backend, smla_error *error)
{
    smla_attention_inputs in = SMLA_INPUTS_OF(args, args->q_pe);
    in.max_logits = args->max_logits;
    in.q_scale = (smla_named_scale)SMLA_NAMED(args, q_scale);
    in.empty_lse_is_plus_inf = args->lse_empty_is_plus_inf != 0;
    const smla_list_args lists[] = {
        {.cache = {.name = "kv_cache",
                   .tensor = args->kv_cache,
                   .kv_format = args->kv_format,
                   .block_size = args->block_size,
                   .formats = SMLA_KV_ATTENTION},
         .indices = SMLA_NAMED(args, indices),
         .topk_length = SMLA_NAMED(args, topk_length),
         .kv_scale = SMLA_NAMED(args, kv_scale)},
        {.cache = {.name = "extra_kv_cache",
                   .tensor = args->extra_kv_cache,
                   .kv_format = args->extra_kv_format,
                   .block_size = args->extra_block_size,
                   .formats = SMLA_KV_EXTRA,
                   .is_extra = true},
         .indices = SMLA_NAMED(args, extra_indices),
         .topk_length = SMLA_NAMED(args, extra_topk_length),
         .kv_scale = SMLA_NAMED(args, extra_kv_scale)},
    };
    smla_checker c;
    smla_open_checker(&c, "sparse_attention", error);
    SMLA_TRY(smla_require_lists(&c, &in, lists, has_extra_args(args) ? 2 : 1, params));
    smla_rule out = smla_latent_out(params);
    SMLA_TRY(smla_finish_attention(&c, &in, &out, params, backend));
    return smla_require_logit_scale(&c, &in, lists, params);
}
