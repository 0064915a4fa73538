/* check_norm_insert.c: the argument rules of fused_qnorm_rope_kv_insert. check_norm.c and
 * check_cache.c have those of its two halves.
 */
#include "core/params_norm.h"
#include "ops/check_cache.h"

/* Checks q and q_out, of which one is written. T is the number of rows of the written one. */
static smla_status
require_queries(smla_checker *c, const smla_qnorm_insert_args *args, bool quantizes)
{
    const bool is_in_place = args->q_out == NULL && !quantizes;
    SMLA_TRY(smla_require_3d(c, "q", args->q, SMLA_DTYPE_BF16, SMLA_ANY, SMLA_ANY, SMLA_V4_HEAD_DIM,
                             is_in_place ? SMLA_RULE_OUTPUT : 0,
                             "tokens, heads, and the values of a head"));
    const int64_t num_heads = smla_size(args->q, 1);
    SMLA_TRY(smla_require_num_heads(c, "q", num_heads));
    if (is_in_place) {
        return SMLA_OK;
    }
    SMLA_TRY(
        smla_require(c,
                     &(smla_rule){.name = "q_out",
                                  .tensor = args->q_out,
                                  .dtypes = quantizes ? SMLA_DTYPE_E4M3_OR_BYTES : SMLA_DTYPE_BF16,
                                  .flags = SMLA_RULE_OUTPUT | SMLA_RULE_MORE_HEADS,
                                  .ndim = 3,
                                  .shape = {SMLA_ANY, num_heads, SMLA_V4_HEAD_DIM},
                                  .hint = "tokens, the heads of `q` or more, values of a head",
                                  .may_be = {args->q}}));
    if (smla_size(args->q_out, 0) > smla_size(args->q, 0)) {
        return smla_refuse(c, "`q_out` must have at most as many tokens as `q` (%lld), got %lld",
                           (long long)smla_size(args->q, 0), (long long)smla_size(args->q_out, 0));
    }
    return SMLA_OK;
}

/* Checks the rows of kv, where they go, and fills `insert`. */
static smla_status
require_insert(smla_checker *c, const smla_qnorm_insert_args *args, int64_t num_tokens,
               smla_cache_write_params *insert)
{
    smla_kv_view kv;
    const smla_cache_rule cache =
        SMLA_CACHE_OF(args, kv_cache, smla_formats_of_size(SMLA_V4_HEAD_DIM), SMLA_RULE_OUTPUT);
    SMLA_TRY(smla_require_kv(c, &cache, &kv));
    SMLA_TRY(smla_require_slot_mapping(c, args->slot_mapping));
    if (smla_size(args->slot_mapping, 0) > num_tokens) {
        return smla_refuse(c,
                           "`slot_mapping` must have at most an entry per token (%lld), got %lld",
                           (long long)num_tokens, (long long)smla_size(args->slot_mapping, 0));
    }
    const smla_call call = smla_call_of(c, args->stream, kv.format);
    smla_fill_cache_write(&call, cache.name, &kv, "slot_mapping", args->slot_mapping, insert);
    insert->kv_c = smla_data(args->kv);
    insert->kv_c_stride_token = smla_stride(args->kv, 0);
    return smla_require_kv_scale(c, "kv_scale", &args->kv_scale, kv.format, &insert->kv_scale);
}

smla_status
smla_check_fused_qnorm_rope_kv_insert(const smla_qnorm_insert_args *args,
                                      smla_qnorm_insert_params *params,
                                      const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_rope rope;
    smla_given_scale q_scale_inv;
    smla_open_checker(&c, "fused_qnorm_rope_kv_insert", error);
    const bool quantizes = args->q_scale_inv.tensor != NULL || args->q_scale_inv.value != 0;
    SMLA_TRY(require_queries(&c, args, quantizes));
    const DLTensor *const q_out = args->q_out == NULL ? args->q : args->q_out;
    const int64_t num_tokens = smla_size(q_out, 0);
    SMLA_TRY(smla_require_2d(&c, "kv", args->kv, SMLA_DTYPE_BF16, num_tokens, SMLA_V4_HEAD_DIM,
                             SMLA_RULE_MORE_ROWS, "at least a row per token"));
    SMLA_TRY(smla_require_rope(&c, args->positions, args->rope_table, num_tokens, &rope));
    smla_cache_write_params insert;
    SMLA_TRY(require_insert(&c, args, num_tokens, &insert));
    SMLA_TRY(smla_require_scale(&c, "q_scale_inv", &args->q_scale_inv, &q_scale_inv));
    SMLA_TRY(smla_require_eps(&c, args->eps));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_qnorm_insert_params){
        .call = insert.call,
        .num_tokens = num_tokens,
        .num_heads = smla_size(args->q, 1),
        .out_heads = smla_size(q_out, 1),
        SMLA_SET_HEADS(q, args->q),
        .q_out = smla_data(q_out),
        .q_out_type = quantizes ? SMLA_FLOAT_E4M3 : SMLA_FLOAT_BF16,
        .q_out_stride_token = smla_stride(q_out, 0),
        .q_out_stride_head = smla_stride(q_out, 1),
        .q_scale_inv = q_scale_inv,
        .eps = (float)args->eps,
        .rope = rope,
        .insert = insert,
    };
    return SMLA_OK;
}
