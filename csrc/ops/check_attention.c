/* check_attention.c: the argument rules of attention. Args (arrays as the caller gave them) become
 * params (flat sizes, strides, typed pointers). The layers below validate nothing again.
 *
 * Only values inside arrays (slots, page numbers, request ids) are left to the backends. The CPU
 * reports bad values, a GPU kernel masks them.
 */
#include "ops/check_attention.h"

#include <math.h>

#include "core/log.h"
#include "core/rule.h"

/* The arguments of the main or the extra list. */
typedef struct list_args {
    const smla_list_rules *rules;
    smla_cache_rule cache;
    const DLTensor *indices;
    const DLTensor *topk_length;
    const smla_scale_arg *kv_scale;
} list_args;

static list_args
main_list_of(const smla_attention_rules *rules, const smla_sparse_attention_args *args)
{
    return (list_args){.rules = &rules->lists[0],
                       .cache = {.name = rules->lists[0].kv,
                                 .tensor = args->kv_cache,
                                 .kv_format = args->kv_format,
                                 .block_size = args->block_size,
                                 .formats = rules->lists[0].formats},
                       .indices = args->indices,
                       .topk_length = args->topk_length,
                       .kv_scale = &args->kv_scale};
}

static list_args
extra_list_of(const smla_attention_rules *rules, const smla_sparse_attention_args *args)
{
    return (list_args){.rules = &rules->lists[1],
                       .cache = {.name = rules->lists[1].kv,
                                 .tensor = args->extra_kv_cache,
                                 .kv_format = args->extra_kv_format,
                                 .block_size = args->extra_block_size,
                                 .formats = rules->lists[1].formats,
                                 .is_extra = true},
                       .indices = args->extra_indices,
                       .topk_length = args->extra_topk_length,
                       .kv_scale = &args->extra_kv_scale};
}

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

/* Checks a cache with its index list. */
static smla_status
require_key_list(smla_checker *c, const list_args *args, int64_t num_tokens, smla_key_list *list,
                 smla_given_scale *kv_scale)
{
    SMLA_TRY(smla_require_kv(c, &args->cache, &list->kv));
    if (args->rules->indices == NULL) {
        return smla_require_kv_scale(c, args->rules->kv_scale, args->kv_scale, list->kv.format,
                                     kv_scale);
    }
    SMLA_TRY(smla_require(c, &(smla_rule){.name = args->rules->indices,
                                          .tensor = args->indices,
                                          .dtypes = SMLA_DTYPE_INT32,
                                          .ndim = 2,
                                          .shape = {num_tokens, SMLA_ANY},
                                          .hint = "a row per token of the query"}));
    SMLA_TRY(smla_require_vector(c, args->rules->topk_length, args->topk_length, num_tokens,
                                 SMLA_RULE_OPTIONAL, "a length per token of the query"));
    fill_list(args->indices, args->topk_length, list);
    return smla_require_kv_scale(c, args->rules->kv_scale, args->kv_scale, list->kv.format,
                                 kv_scale);
}

smla_status
smla_require_query(smla_checker *c, const char *name, const smla_kv_format_info *format,
                   const DLTensor *q, const DLTensor *q_pe, int64_t num_tokens, int64_t num_heads,
                   unsigned flags)
{
    const bool is_pair = q_pe != NULL;
    const int32_t rope_dim = format->head_dim - SMLA_KV_LORA_RANK;
    if (is_pair && rope_dim == 0) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `q` must be one array [tokens, heads, %d] for keys of %d values, got "
                         "a pair",
                         c->op, format->head_dim, format->head_dim);
    }
    smla_rule rule = {.name = is_pair ? "q[0]" : name,
                      .tensor = q,
                      .dtypes = SMLA_DTYPE_BF16 | (rope_dim == 0 ? SMLA_DTYPE_E4M3_OR_BYTES : 0),
                      .flags = flags,
                      .ndim = 3,
                      .shape = {num_tokens, num_heads,
                                is_pair ? SMLA_KV_LORA_RANK : format->head_dim},
                      .hint = is_pair         ? "a pair has 512 latent values, then 64 of RoPE"
                              : rope_dim != 0 ? "tokens, heads, 512 latent and 64 RoPE values"
                                              : "tokens, heads, and as many values as a cache row"};
    SMLA_TRY(smla_require(c, &rule));
    SMLA_TRY(smla_require_num_heads(c, rule.name, smla_size(q, 1)));
    rule.name = "q[1]";
    rule.tensor = q_pe;
    rule.flags |= SMLA_RULE_OPTIONAL;
    rule.shape[0] = num_tokens != SMLA_ANY ? num_tokens : smla_size(q, 0);
    rule.shape[1] = smla_size(q, 1);
    rule.shape[2] = rope_dim;
    return smla_require(c, &rule);
}

/* A query is multiplied with keys of both lists. */
static smla_status
require_same_head_size(const smla_checker *c, const smla_attention_rules *rules,
                       const smla_attention_params *params)
{
    const int32_t wanted = params->keys.lists[0].kv.format->head_dim;
    const int32_t got = params->keys.lists[1].kv.format->head_dim;
    return wanted == got ? SMLA_OK
                         : smla_fail(c->error, SMLA_ERROR_VALUE,
                                     "%s: `%s` must have keys of %d values, as `%s` has, got %d",
                                     c->op, rules->lists[1].kv, wanted, rules->lists[0].kv, got);
}

/* Checks the scale of a query. Usually only an e4m3 query has one. */
static smla_status
require_query_scale(smla_checker *c, const smla_attention_rules *rules, const DLTensor *q,
                    const smla_scale_arg *given, smla_given_scale *scale)
{
    *scale = (smla_given_scale){.value = 1.0f};
    if (smla_is_e4m3_query(q) || rules->any_query_has_scale) {
        return smla_require_scale(c, rules->q_scale, given, scale);
    }
    if (given->tensor != NULL) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must be left out for a bfloat16 query, got an array", c->op,
                         rules->q_scale);
    }
    if (given->value != 0 && given->value != 1) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must be 1 for a bfloat16 query, got %g", c->op, rules->q_scale,
                         given->value);
    }
    return SMLA_OK;
}

/* Whether the first and all other rows of a tensor [T, H, D], and of a cache, begin at multiples of
 * 16 bytes. */
static bool
are_rows_aligned(const DLTensor *tensor)
{
    const int64_t bytes = tensor->dtype.bits / 8;
    return (uintptr_t)smla_data(tensor) % 16 == 0 && smla_stride(tensor, 0) * bytes % 16 == 0 &&
           smla_stride(tensor, 1) * bytes % 16 == 0;
}

static bool
are_cache_rows_aligned(const smla_kv_view *kv)
{
    return (uintptr_t)kv->base % 16 == 0 && kv->page_stride_bytes % 16 == 0 &&
           kv->token_stride_bytes % 16 == 0;
}

/* What a call needs of a kernel. Kernels for lists take rows at any address. */
static unsigned
find_needs(const smla_sparse_attention_args *args, const smla_attention_params *params)
{
    const smla_key_list *const main = &params->keys.lists[0];
    const bool is_table = params->source == SMLA_KEYS_TABLE;
    const bool is_aligned = are_rows_aligned(args->q) &&
                            (args->q_pe == NULL || are_rows_aligned(args->q_pe)) &&
                            are_rows_aligned(args->out) && are_cache_rows_aligned(&main->kv);
    const bool has_scale = smla_is_e4m3_query(args->q) || args->q_scale.tensor != NULL;
    return (has_scale ? SMLA_NEEDS_QUERY_SCALE : 0) |
           (!is_table && smla_has_ranges(main) ? SMLA_NEEDS_RANGES : 0) |
           (params->logits.softcap != 0.0f ? SMLA_NEEDS_SOFTCAP : 0) |
           (is_table && !is_aligned ? SMLA_NEEDS_UNALIGNED : 0);
}

static smla_status
require_workspace(smla_checker *c, const char *name, const DLTensor *workspace,
                  int64_t bytes_needed)
{
    if (workspace == NULL && bytes_needed == 0) {
        return SMLA_OK;
    }
    if (workspace == NULL) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have at least %lld bytes, got none", c->op, name,
                         (long long)bytes_needed);
    }
    return smla_require_workspace(c, name, workspace, 0);
}

static const smla_attention_rules attention_rules = {
    .op = "sparse_attention",
    .q = "q",
    .q_scale = "q_scale",
    .lists = {{"kv_cache", "indices", "topk_length", "kv_scale", SMLA_KV_ATTENTION},
              {"extra_kv_cache", "extra_indices", "extra_topk_length", "extra_kv_scale",
               SMLA_KV_EXTRA}},
    .softmax_scale = "softmax_scale",
    .attn_sink = "attn_sink",
    .workspace = "workspace",
};

/* Plans a call whose lists are in `params`. */
static void
plan_attention(const smla_sparse_attention_args *args, const smla_backend *backend,
               int32_t device_id, smla_attention_params *params)
{
    const smla_key_lists *const keys = &params->keys;
    const bool has_extra = keys->num_lists == 2;
    const smla_attention_shape shape = {
        .num_tokens = smla_size(args->q, 0),
        .num_heads = smla_size(args->q, 1),
        .topk = keys->lists[0].topk,
        .extra_topk = has_extra ? keys->lists[1].topk : 0,
        .num_splits = args->num_splits,
        .device_id = device_id,
        .formats = {keys->lists[0].kv.format, has_extra ? keys->lists[1].kv.format : NULL},
        .source = params->source,
        .needs = find_needs(args, params),
        .explains = smla_is_logging,
    };
    backend->plan_attention(&shape, &params->plan);
}

/* Fills all of `params` but the keys, what is visible of them, and the scales. */
static void
fill_attention(const smla_attention_rules *rules, const smla_sparse_attention_args *args,
               smla_call call, smla_attention_params *params)
{
    const bool is_e4m3 = smla_is_e4m3_query(args->q);
    const int32_t head_dim = params->keys.lists[0].kv.format->head_dim;
    params->call = call;
    params->queries = (smla_queries){
        .num_tokens = smla_size(args->q, 0),
        .num_heads = smla_size(args->q, 1),
        .type = is_e4m3 ? SMLA_FLOAT_E4M3 : SMLA_FLOAT_BF16,
        .dims = {SMLA_KV_LORA_RANK, (int16_t)(head_dim - SMLA_KV_LORA_RANK)},
    };
    smla_view_parts(args->q, args->q_pe, params->queries.dims, params->queries.parts);
    params->logits.divisor = (smla_given_scale){.value = 1.0f};
    params->logits.kv_scale[1] = params->logits.kv_scale[params->keys.num_lists - 1];
    params->results = smla_results_of(args->out, args->lse, args->max_logits);
    params->results.num_splits = params->plan.runs[0].num_splits;
    params->results.empty_lse_is_plus_inf = args->lse_empty_is_plus_inf != 0;
    params->workspace = smla_workspace_of(rules->workspace, args->workspace);
}

smla_status
smla_check_sparse_attention(const smla_sparse_attention_args *args, smla_attention_params *params,
                            const smla_backend **backend, smla_error *error)
{
    SMLA_TRY(smla_check_attention_by(&attention_rules, args, NULL, params, backend, error));
    return smla_require_logit_scale(&attention_rules, smla_normal_device(args->q->device), params,
                                    error);
}

smla_status
smla_check_attention_by(const smla_attention_rules *rules, const smla_sparse_attention_args *args,
                        const void *more, smla_attention_params *params,
                        const smla_backend **backend, smla_error *error)
{
    const list_args main = main_list_of(rules, args);
    const list_args extra = extra_list_of(rules, args);
    smla_checker c;
    smla_open_checker(&c, rules->op, error);
    *params = (smla_attention_params){.keys.num_lists = 1};
    smla_key_list *const lists = params->keys.lists;
    smla_logits *const logits = &params->logits;
    const smla_kv_format_info *format = NULL;
    if (args->kv_cache != NULL && !smla_has_kv_format(args->kv_cache, args->kv_format)) {
        return smla_require_kv(&c, &main.cache, &lists[0].kv); /* the query depends on it */
    }
    SMLA_TRY(smla_find_format(&c, &main.cache, &format));
    SMLA_TRY(smla_require_query(&c, rules->q, format, args->q, args->q_pe, SMLA_ANY, SMLA_ANY, 0));
    const int64_t num_tokens = smla_size(args->q, 0);
    const int64_t num_heads = smla_size(args->q, 1);
    SMLA_TRY(require_query_scale(&c, rules, args->q, &args->q_scale, &logits->q_scale));
    SMLA_TRY(require_key_list(&c, &main, num_tokens, &lists[0], &logits->kv_scale[0]));
    SMLA_TRY(smla_require_sinks(&c, rules->attn_sink, args->attn_sink, SMLA_SINKS_HINT, num_heads,
                                &logits->sinks));
    if (has_extra_args(args)) {
        SMLA_TRY(require_key_list(&c, &extra, num_tokens, &lists[1], &logits->kv_scale[1]));
        SMLA_TRY(require_same_head_size(&c, rules, params));
        params->keys.num_lists = lists[1].topk == 0 ? 1 : 2; /* no columns: no list */
    }
    SMLA_TRY(rules->require_more == NULL ? SMLA_OK : rules->require_more(&c, more, params));
    SMLA_TRY(smla_require_softmax_scale(&c, rules->softmax_scale, args->softmax_scale, logits));
    SMLA_TRY(smla_require_num_splits(&c, args->num_splits));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "out",
                                           .tensor = args->out,
                                           .dtypes = SMLA_DTYPE_BF16,
                                           .flags = SMLA_RULE_OUTPUT | SMLA_RULE_MORE_HEADS,
                                           .ndim = 3,
                                           .shape = {num_tokens, num_heads, format->value_dim}}));
    SMLA_TRY(smla_require_state(&c, "lse", args->lse, num_tokens, num_heads,
                                SMLA_RULE_OUTPUT | (rules->has_no_lse ? SMLA_RULE_OPTIONAL : 0)));
    SMLA_TRY(smla_require_state(&c, "max_logits", args->max_logits, num_tokens, num_heads,
                                SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL));
    SMLA_TRY(smla_find_backend(c.op, c.device, backend, error));
    plan_attention(args, *backend, c.device.device_id, params);
    if (params->source == SMLA_KEYS_TABLE) {
        params->plan.workspace_bytes += smla_key_ranges_bytes(num_tokens);
    }
    SMLA_TRY(
        require_workspace(&c, rules->workspace, args->workspace, params->plan.workspace_bytes));
    SMLA_TRY(smla_require_disjoint(&c));
    fill_attention(rules, args, smla_call_of(&c, args->stream, lists[0].kv.format), params);
    return SMLA_OK;
}

void
smla_fill_attention(const smla_sparse_attention_args *args, const smla_kv_view *kv,
                    smla_stream stream, const smla_backend *backend, smla_attention_params *params)
{
    *params = (smla_attention_params){.keys = {.lists[0].kv = *kv, .num_lists = 1},
                                      .logits = {.sinks = {smla_data(args->attn_sink),
                                                           smla_stride(args->attn_sink, 0)},
                                                 .softmax_scale = args->softmax_scale,
                                                 .kv_scale[0].value = 1.0f,
                                                 .q_scale.value = 1.0f}};
    fill_list(args->indices, args->topk_length, &params->keys.lists[0]);
    plan_attention(args, backend, stream.device_id, params);
    const smla_call call = {.op = attention_rules.op, .stream = stream, .kv_format = kv->format};
    fill_attention(&attention_rules, args, call, params);
}

smla_status
smla_check_attention_workspace(const smla_attention_workspace_args *args,
                               smla_attention_shape *shape, const smla_backend **backend,
                               smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "attention_workspace_size", error);
    SMLA_TRY(smla_require_count(c.op, "num_tokens", args->num_tokens, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(c.op, "topk", args->topk, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(c.op, "extra_topk", args->extra_topk, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(c.op, "num_heads", args->num_heads, 1, SMLA_MAX_HEADS, error));
    SMLA_TRY(smla_require_num_splits(&c, args->num_splits));
    const DLDevice device = smla_normal_device(args->device);
    SMLA_TRY(smla_find_backend(c.op, device, backend, error));
    *shape = (smla_attention_shape){.num_tokens = args->num_tokens,
                                    .num_heads = args->num_heads,
                                    .topk = args->topk,
                                    .extra_topk = args->extra_topk,
                                    .num_splits = args->num_splits,
                                    .device_id = device.device_id};
    return SMLA_OK;
}
