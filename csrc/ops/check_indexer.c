/* check_indexer.c: the argument rules of the operators that choose keys: the indexer's queries
 * and its logits.
 */
#include <float.h>
#include <math.h>

#include "core/params_indexer.h"
#include "ops/check.h"

/* The number of heads has no upper limit, because nothing here is sized by it. */
static smla_status
require_index_heads(const smla_checker *c, int64_t num_heads)
{
    if (num_heads < 1) {
        return smla_refuse(c, "`q` must have at least one head, got %lld", (long long)num_heads);
    }
    return SMLA_OK;
}

/* ---- fused_indexer_q_rope_quant ------------------------------------------------------------ */

/* Checks the two numbers whose product multiplies weights as one float. Each of them may leave the
 * range of a float. */
static smla_status
require_weight_scale(const smla_checker *c, const smla_index_query_args *args)
{
    const double product = args->softmax_scale * args->head_scale;
    const float scale = (float)product;
    const bool is_zero = args->softmax_scale == 0 || args->head_scale == 0;
    if (!isfinite(args->softmax_scale) || !isfinite(args->head_scale)) {
        const bool is_first = !isfinite(args->softmax_scale);
        return smla_refuse(c, "`%s` must be finite, got %g",
                           is_first ? "softmax_scale" : "head_scale",
                           is_first ? args->softmax_scale : args->head_scale);
    }
    if (!is_zero && (!isfinite(scale) || fabsf(scale) < FLT_MIN)) {
        return smla_refuse(c,
                           "`head_scale` must make 0 or a normal float32 of softmax_scale * "
                           "head_scale, got %g * %g",
                           args->softmax_scale, args->head_scale);
    }
    return SMLA_OK;
}

smla_status
smla_check_fused_indexer_q_rope_quant(const smla_index_query_args *args,
                                      smla_index_query_params *params, const smla_backend **backend,
                                      smla_error *error)
{
    smla_checker c;
    smla_rope rope;
    smla_open_checker(&c, "fused_indexer_q_rope_quant", error);
    SMLA_TRY(smla_require_3d(&c, "q", args->q, SMLA_DTYPE_BF16, SMLA_ANY, SMLA_ANY,
                             SMLA_INDEX_HEAD_DIM, 0, "tokens, heads, and the values of a head"));
    const int64_t num_tokens = smla_size(args->q, 0);
    const int64_t num_heads = smla_size(args->q, 1);
    SMLA_TRY(require_index_heads(&c, num_heads));
    SMLA_TRY(smla_require_2d(&c, "weights", args->weights, SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32,
                             num_tokens, num_heads, 0, "a weight per head of `q`"));
    SMLA_TRY(smla_require_rope(&c, args->positions, args->rope_table, num_tokens, &rope));
    const bool is_fp4 = args->out_scale != NULL;
    const int64_t num_bytes = is_fp4 ? SMLA_INDEX_HEAD_DIM / 2 : SMLA_INDEX_HEAD_DIM;
    SMLA_TRY(smla_require_3d(&c, "out", args->out,
                             is_fp4 ? SMLA_DTYPE_UINT8 : SMLA_DTYPE_E4M3_OR_BYTES, num_tokens,
                             num_heads, num_bytes, SMLA_RULE_OUTPUT,
                             is_fp4 ? "two FP4 values per byte" : "tokens, heads, bytes"));
    SMLA_TRY(smla_require_2d(&c, "out_weights", args->out_weights, SMLA_DTYPE_FP32, num_tokens,
                             num_heads, SMLA_RULE_OUTPUT, "a weight per head of `q`"));
    SMLA_TRY(smla_require_3d(&c, "out_scale", args->out_scale, SMLA_DTYPE_UINT8, num_tokens,
                             num_heads, 4, SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL,
                             "a scale per 32 values of a head"));
    SMLA_TRY(require_weight_scale(&c, args));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_index_query_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .num_heads = num_heads,
        SMLA_SET_HEADS(q, args->q),
        .weights = smla_data(args->weights),
        .weights_type = smla_float_type_of(args->weights),
        .weights_stride_token = smla_stride(args->weights, 0),
        .rope = rope,
        .weight_scale = (float)(args->softmax_scale * args->head_scale),
        SMLA_SET_HEADS(out, args->out),
        SMLA_SET_ROWS(out_weights, args->out_weights),
        SMLA_SET_HEADS(out_scale, args->out_scale),
    };
    return SMLA_OK;
}

/* ---- indexer_logits ------------------------------------------------------------------------ */

/* Checks q, its scales and the weights. */
static smla_status
require_queries(smla_checker *c, const smla_indexer_logits_args *args)
{
    const bool is_fp4 = args->q_scale != NULL;
    SMLA_TRY(smla_require_3d(c, "q", args->q, is_fp4 ? SMLA_DTYPE_UINT8 : SMLA_DTYPE_E4M3_OR_BYTES,
                             SMLA_ANY, SMLA_ANY,
                             is_fp4 ? SMLA_INDEX_HEAD_DIM / 2 : SMLA_INDEX_HEAD_DIM, 0,
                             is_fp4 ? "`q_scale` is given, so a byte has two FP4 values"
                                    : "without `q_scale` a byte is an e4m3 value"));
    const int64_t num_tokens = smla_size(args->q, 0);
    const int64_t num_heads = smla_size(args->q, 1);
    SMLA_TRY(require_index_heads(c, num_heads));
    SMLA_TRY(smla_require_2d(c, "weights", args->weights, SMLA_DTYPE_FP32, num_tokens, num_heads, 0,
                             "a weight per head of `q`"));
    return smla_require_3d(c, "q_scale", args->q_scale, SMLA_DTYPE_UINT8, num_tokens, num_heads, 4,
                           SMLA_RULE_OPTIONAL, "a scale per 32 values of a head");
}

/* An argument that belongs to the other kind of keys. */
static smla_status
require_none(const smla_checker *c, const char *name, bool is_given, const char *keys)
{
    return !is_given ? SMLA_OK
                     : smla_refuse(c, "`%s` must be None for %s, got another value", name, keys);
}

/* Checks flat keys and their scales, and makes them one page. */
static smla_status
require_flat_keys(smla_checker *c, const smla_indexer_logits_args *args, smla_kv_view *view)
{
    const DLTensor *const keys = args->k_cache;
    SMLA_TRY(smla_require_2d(c, "k_cache[0]", keys, SMLA_DTYPE_E4M3_OR_BYTES, SMLA_ANY, SMLA_ANY, 0,
                             NULL));
    const bool is_fp4 = smla_size(keys, 1) == SMLA_INDEX_HEAD_DIM / 2;
    const smla_kv_format_info *const format =
        &smla_kv_formats[is_fp4 ? SMLA_ROW_MXFP4_INDEX : SMLA_ROW_FP8_INDEX];
    if (smla_size(keys, 1) != format->data_bytes) {
        return smla_refuse(c,
                           "`k_cache[0]` must have 128 bytes (FP8) or 64 (FP4) per key, got %lld",
                           (long long)smla_size(keys, 1));
    }
    const int64_t num_keys = smla_size(keys, 0);
    SMLA_TRY(
        smla_require(c, &(smla_rule){.name = "k_cache[1]",
                                     .tensor = args->k_scale,
                                     .dtypes = is_fp4 ? SMLA_DTYPE_UINT8 : SMLA_DTYPE_FP32,
                                     .flags = is_fp4 ? 0 : SMLA_RULE_ANY_LAST_STRIDE,
                                     .ndim = is_fp4 ? 2 : 1,
                                     .shape = {num_keys, 4},
                                     .hint = is_fp4 ? "four scales per key" : "a scale per key"}));
    if (args->kv_format != SMLA_KV_INFER && args->kv_format != (int32_t)format->format) {
        return smla_refuse(c, "`kv_format` must be \"%s\" for keys of %d bytes, got another format",
                           format->name, (int)format->data_bytes);
    }
    *view = (smla_kv_view){
        .base = smla_data(keys),
        .num_pages = 1,
        .block_size = num_keys,
        .token_stride_bytes = smla_stride(keys, 0),
        .format = format,
        .scales = smla_data(args->k_scale),
        .scale_token_stride_bytes = smla_stride(args->k_scale, 0) * (is_fp4 ? 1 : 4),
    };
    return SMLA_OK;
}

/* Checks the keys and what says where a token's keys are. */
static smla_status
require_keys(smla_checker *c, const smla_indexer_logits_args *args, int64_t num_tokens,
             smla_kv_view *view)
{
    const char *const hint = "an entry per token of `q`";
    const bool is_flat = args->k_scale != NULL;
    if (is_flat) {
        static const char keys[] = "a pair of keys and scales";
        SMLA_TRY(require_flat_keys(c, args, view));
        SMLA_TRY(require_none(c, "block_table", args->block_table != NULL, keys));
        SMLA_TRY(require_none(c, "req_id_per_token", args->req_id_per_token != NULL, keys));
        SMLA_TRY(require_none(c, "block_size", args->block_size != 0, keys));
    } else {
        const smla_cache_rule cache =
            SMLA_CACHE_OF(args, k_cache, smla_formats_of_size(SMLA_INDEX_HEAD_DIM), 0);
        SMLA_TRY(smla_require_kv(c, &cache, view));
        SMLA_TRY(require_none(c, "starts", args->starts != NULL, "keys in pages"));
    }
    SMLA_TRY(smla_require_vector(c, "context_lens", args->context_lens, num_tokens,
                                 SMLA_RULE_MORE_ROWS, hint));
    if (is_flat) {
        return smla_require_vector(c, "starts", args->starts, num_tokens,
                                   SMLA_RULE_OPTIONAL | SMLA_RULE_MORE_ROWS, hint);
    }
    SMLA_TRY(smla_require_block_table(c, args->block_table));
    return smla_require_vector(c, "req_id_per_token", args->req_id_per_token, num_tokens,
                               SMLA_RULE_MORE_ROWS, hint);
}

smla_status
smla_require_scored(smla_checker *c, const smla_indexer_logits_args *args,
                    smla_logits_params *params)
{
    smla_kv_view kv = {.block_size = 0};
    SMLA_TRY(require_queries(c, args));
    const int64_t num_tokens = smla_size(args->q, 0);
    SMLA_TRY(require_keys(c, args, num_tokens, &kv));
    *params = (smla_logits_params){
        .call = smla_call_of(c, args->stream, kv.format),
        .num_tokens = num_tokens,
        .num_heads = smla_size(args->q, 1),
        SMLA_SET_HEADS(q, args->q),
        SMLA_SET_HEADS(q_scale, args->q_scale),
        SMLA_SET_ROWS(weights, args->weights),
        .kv = kv,
        .has_pages = args->block_table != NULL,
        .num_reqs = args->block_table == NULL ? 0 : smla_size(args->block_table, 0),
        .pages = smla_page_table_of(args->block_table, kv.block_size),
        .req_id_per_token = smla_data(args->req_id_per_token),
        .req_id_stride = smla_stride(args->req_id_per_token, 0),
        SMLA_SET_VECTOR(context_lens, args->context_lens),
        .least_context = 1,
        SMLA_SET_VECTOR(starts, args->starts),
    };
    return SMLA_OK;
}

smla_status
smla_check_indexer_logits(const smla_indexer_logits_args *args, smla_logits_params *params,
                          const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "indexer_logits", error);
    SMLA_TRY(smla_require_scored(&c, args, params));
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                             params->num_tokens, SMLA_ANY, SMLA_RULE_OUTPUT,
                             "a row of logits per token"));
    SMLA_TRY(smla_finish_check(&c, backend));
    params->num_columns = smla_size(args->out, 1);
    params->out = smla_data(args->out);
    params->out_type = smla_float_type_of(args->out);
    params->out_stride_token = smla_stride(args->out, 0);
    params->leaves_rest = args->leaves_rest != 0;
    return SMLA_OK;
}
