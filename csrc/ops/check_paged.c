/* check_paged.c: the argument rules of paged_attention. */
#include "ops/check_attention.h"

/* ---- Rows ---------------------------------------------------------------------------------- */

static smla_status
require_query(smla_checker *c, const smla_paged_attention_args *args)
{
    SMLA_TRY(smla_require_head_query(c, "q", args->q, NULL));
    return smla_require_3d(c, "qv", args->qv, smla_same_dtypes(args->q), smla_size(args->q, 0),
                           smla_size(args->q, 1), SMLA_ANY, SMLA_RULE_OPTIONAL,
                           "the tokens and heads of `q`, the values of `v_cache`");
}

/* Checks the caches beside the query. */
static smla_status
require_caches(smla_checker *c, const smla_paged_attention_args *args)
{
    const DLTensor *const k = args->k_cache, *const v = args->v_cache;
    const int64_t dim = smla_size(args->q, 2);
    SMLA_TRY(smla_require_k_cache(c, k, smla_key_dtypes(args->q), SMLA_ANY, dim, 0,
                                  "pages, tokens, KV heads, the values of `q`"));
    SMLA_TRY(smla_require_num_kv_heads(c, "k_cache", smla_size(k, 2), smla_size(args->q, 1)));
    SMLA_TRY(
        smla_require_v_cache(c, v, k, SMLA_ANY, 0, "the pages, tokens and heads of `k_cache`"));
    const int64_t value_dim = smla_size(v, 3);
    SMLA_TRY(smla_require_head_dim(c, "v_cache", value_dim, SMLA_KV_LORA_RANK));
    if (args->qv == NULL) {
        return SMLA_OK;
    }
    if (smla_size(args->qv, 2) != value_dim) {
        return smla_refuse(c, "`qv` must have %lld values per head, as `v_cache` has, got %lld",
                           (long long)value_dim, (long long)smla_size(args->qv, 2));
    }
    return smla_require_head_dim(c, "qv", value_dim, SMLA_HEAD_DIM - dim);
}

static void
fill_rows(const smla_paged_attention_args *args, smla_attention_params *params)
{
    /* q . k + qv . v: a query in two parts, whose keys are rows of both caches */
    const bool is_pair = args->qv != NULL;
    const smla_attention_inputs in = {.q.tensor = is_pair ? args->qv : args->q,
                                      .q_pe = is_pair ? args->q : NULL};
    const DLTensor *const keys[] = {is_pair ? args->v_cache : args->k_cache, args->k_cache,
                                    args->v_cache};
    smla_fill_queries(&in, smla_size(in.q.tensor, 2), is_pair ? smla_size(args->q, 2) : 0,
                      &params->queries);
    params->kv = (smla_kv_heads){
        .num_keys = smla_size(args->k_cache, 0) * smla_size(args->k_cache, 1),
        .num_kv_heads = smla_size(args->k_cache, 2),
        .type = smla_float_type_of(args->k_cache),
        .value_dim = (int16_t)smla_size(args->v_cache, 3),
        .has_value_part = is_pair,
    };
    for (int i = 0; i < SMLA_KV_ARRAYS; i++) {
        params->kv.rows[i] = (smla_head_rows){
            .data = smla_data(keys[i]),
            .stride_token = smla_stride(keys[i], 1),
            .stride_head = smla_stride(keys[i], 2),
        };
        params->pages.strides_page[i] = smla_stride(keys[i], 0);
    }
}

/* ---- Requests ------------------------------------------------------------------------------ */

/* Checks padding in front of keys. Numbers on a device are not read. */
static smla_status
require_leftpad(smla_checker *c, const smla_paged_attention_args *args, const smla_requests *reqs,
                smla_kv_pages *pages)
{
    const DLTensor *const leftpad = args->cache_leftpad;
    if (leftpad == NULL) {
        return SMLA_OK;
    }
    if (args->cp_size != 0) {
        return smla_refuse(c, "`cache_leftpad` must be left out beside `cp`, got an array");
    }
    SMLA_TRY(smla_require_vector(c, "cache_leftpad", leftpad, reqs->num_reqs, 0,
                                 "an entry per request"));
    pages->leftpad = smla_data(leftpad);
    pages->leftpad_stride = smla_stride(leftpad, 0);
    for (int64_t req = 0; c->device.device_type == kDLCPU && req < reqs->num_reqs; req++) {
        const int64_t pad = pages->leftpad[req * pages->leftpad_stride];
        if (pad < 0 || pad > smla_seq_len(reqs, req)) {
            return smla_refuse(c,
                               "`cache_leftpad` must be between 0 and the %lld of `cache_seqlens`, "
                               "got %lld at %lld",
                               (long long)smla_seq_len(reqs, req), (long long)pad, (long long)req);
        }
    }
    return SMLA_OK;
}

static smla_status
require_requests(smla_checker *c, const smla_paged_attention_args *args,
                 smla_attention_params *params)
{
    const smla_table_args tables = SMLA_TABLE_OF(args);
    const DLTensor *table = NULL;
    smla_requests *const reqs = &params->visible.reqs;
    smla_kv_pages *const pages = &params->pages;
    SMLA_TRY(smla_require_requests(c, &tables, args->q, params->queries.num_tokens, reqs, &table));
    pages->num_pages = smla_size(args->k_cache, 0);
    pages->page_size = (int32_t)smla_size(args->k_cache, 1);
    pages->table = smla_page_table_of(table, table == args->slot_table ? 1 : pages->page_size);
    return require_leftpad(c, args, reqs, pages);
}

/* ---- paged_attention ----------------------------------------------------------------------- */

smla_status
smla_check_paged_attention(const smla_paged_attention_args *args, smla_attention_params *params,
                           const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "paged_attention", error);
    *params = (smla_attention_params){.source = SMLA_KEYS_PAGED};
    SMLA_TRY(require_query(&c, args));
    SMLA_TRY(require_caches(&c, args));
    fill_rows(args, params);
    SMLA_TRY(require_requests(&c, args, params));
    SMLA_TRY(smla_require_share(&c, args->cp_rank, args->cp_size, args->cp_interleave,
                                &params->visible.rule.share));
    const smla_heads_args heads =
        SMLA_HEADS_OF(args, NULL, "k_cache", args->k_cache, "v_cache", args->v_cache);
    return smla_check_heads(&c, &heads, params, backend);
}
