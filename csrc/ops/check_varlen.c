/* check_varlen.c: the argument rules of varlen_attention. */
#include "ops/check_attention.h"

/* ---- Rows ---------------------------------------------------------------------------------- */

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
        return smla_refuse(c, "`k` must have %lld values per head, as `q` has, got %lld",
                           (long long)wanted, (long long)got);
    }
    return !has_parts || q_pe_dim == k_pe_dim
               ? SMLA_OK
               : smla_refuse(c, "`k[1]` must have %lld values, as `q[1]` has, got %lld",
                             (long long)q_pe_dim, (long long)k_pe_dim);
}

static smla_status
require_keys(smla_checker *c, const smla_varlen_attention_args *args)
{
    const bool is_pair = args->k_pe != NULL;
    const char *const name = is_pair ? "k[0]" : "k";
    SMLA_TRY(smla_require_3d(c, name, args->k, smla_key_dtypes(args->q), SMLA_ANY, SMLA_ANY,
                             SMLA_ANY, 0, "tokens, KV heads, values"));
    const int64_t num_keys = smla_size(args->k, 0);
    const int64_t num_kv_heads = smla_size(args->k, 1);
    SMLA_TRY(smla_require_num_kv_heads(c, name, num_kv_heads, smla_size(args->q, 1)));
    SMLA_TRY(smla_require_head_dim(c, name, smla_size(args->k, 2), SMLA_HEAD_DIM));
    if (is_pair) {
        SMLA_TRY(smla_require_2d(c, "k[1]", args->k_pe, smla_same_dtypes(args->k), num_keys,
                                 SMLA_ANY, 0, "a row per key, which all heads share"));
        SMLA_TRY(smla_require_head_dim(c, "k[1]", smla_size(args->k_pe, 1),
                                       SMLA_HEAD_DIM - smla_size(args->k, 2)));
    }
    SMLA_TRY(require_equal_dims(c, args));
    SMLA_TRY(smla_require_3d(c, "v", args->v, smla_same_dtypes(args->k), num_keys, num_kv_heads,
                             SMLA_ANY, 0, "the keys and heads of `k`"));
    return smla_require_head_dim(c, "v", smla_size(args->v, 2), SMLA_KV_LORA_RANK);
}

/* ---- varlen_attention ---------------------------------------------------------------------- */

static smla_status
require_requests(smla_checker *c, const smla_varlen_attention_args *args)
{
    const DLTensor *const starts = args->cu_seqlens_q;
    SMLA_TRY(smla_require_vector(c, "cu_seqlens_q", starts, SMLA_ANY, 0, NULL));
    if (smla_size(starts, 0) < 1) {
        return smla_refuse(
            c, "`cu_seqlens_q` must have an entry more than there are requests, got none");
    }
    SMLA_TRY(smla_require_vector(c, "cu_seqlens_k", args->cu_seqlens_k, smla_size(starts, 0), 0,
                                 "as many entries as `cu_seqlens_q`"));
    SMLA_TRY(
        smla_require_starts(c, "cu_seqlens_q", starts, smla_size(args->q, 0), "tokens of `q`"));
    return smla_require_starts(c, "cu_seqlens_k", args->cu_seqlens_k, smla_size(args->k, 0),
                               "keys of `k`");
}

static void
fill_arrays(const smla_varlen_attention_args *args, const smla_attention_inputs *in,
            smla_attention_params *params)
{
    const bool is_cut = args->q_pe != NULL || args->k_pe != NULL;
    const int64_t cut = smla_size(!is_cut || args->q_pe != NULL ? args->q : args->k, 2);
    const int64_t dim = smla_size(args->q, 2) + (args->q_pe == NULL ? 0 : smla_size(args->q_pe, 2));
    smla_requests *const reqs = &params->visible.reqs;
    smla_kv_heads *const keys = &params->kv;
    smla_fill_queries(in, cut, dim - cut, &params->queries);
    smla_view_parts(args->k, args->k_pe, params->queries.dims, keys->rows);
    keys->rows[SMLA_VALUES] = smla_view_part(args->v, 0);
    keys->value_dim = (int16_t)smla_size(args->v, 2);
    keys->num_keys = smla_size(args->k, 0);
    keys->num_kv_heads = smla_size(args->k, 1);
    keys->type = smla_float_type_of(args->k);
    keys->starts = smla_data(args->cu_seqlens_k);
    keys->starts_stride = smla_stride(args->cu_seqlens_k, 0);
    reqs->num_tokens = params->queries.num_tokens;
    reqs->num_reqs = smla_size(args->cu_seqlens_q, 0) - 1;
    reqs->query_starts = smla_data(args->cu_seqlens_q);
    reqs->query_starts_stride = smla_stride(args->cu_seqlens_q, 0);
}

smla_status
smla_check_varlen_attention(const smla_varlen_attention_args *args, smla_attention_params *params,
                            const smla_backend **backend, smla_error *error)
{
    const smla_heads_args heads = SMLA_HEADS_OF(args, args->q_pe, "k", args->k, "v", args->v);
    smla_checker c;
    smla_open_checker(&c, "varlen_attention", error);
    *params = (smla_attention_params){.source = SMLA_KEYS_RAGGED};
    SMLA_TRY(smla_require_head_query(&c, "q", args->q, args->q_pe));
    SMLA_TRY(require_keys(&c, args));
    SMLA_TRY(require_requests(&c, args));
    fill_arrays(args, &heads.in, params);
    return smla_check_heads(&c, &heads, params, backend);
}
