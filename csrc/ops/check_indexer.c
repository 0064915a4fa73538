/* check_indexer.c: the argument rules of the operators that choose keys: the indexer's queries.
 */
#include <math.h>

#include "ops/check.h"

/* The number of heads has no upper limit, because nothing here is sized by it. */
static smla_status
require_index_heads(const smla_checker *c, int64_t num_heads)
{
    if (num_heads < 1) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `q` must have at least one head, got %lld", c->op,
                         (long long)num_heads);
    }
    return SMLA_OK;
}

/* ---- fused_indexer_q_rope_quant ------------------------------------------------------------ */

static smla_status
require_finite(const smla_checker *c, const char *name, double value)
{
    if (!isfinite(value)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE, "%s: `%s` must be finite, got %g", c->op, name,
                         value);
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
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "q",
                                           .tensor = args->q,
                                           .dtypes = SMLA_DTYPE_BF16,
                                           .ndim = 3,
                                           .shape = {SMLA_ANY, SMLA_ANY, SMLA_INDEX_HEAD_DIM},
                                           .hint = "tokens, heads, and the values of a head"}));
    const int64_t num_tokens = smla_size(args->q, 0);
    const int64_t num_heads = smla_size(args->q, 1);
    SMLA_TRY(require_index_heads(&c, num_heads));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "weights",
                                           .tensor = args->weights,
                                           .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32,
                                           .ndim = 2,
                                           .shape = {num_tokens, num_heads},
                                           .hint = "a weight per head of `q`"}));
    SMLA_TRY(smla_require_rope(&c, args->positions, args->cos_sin, num_tokens, &rope));
    const bool is_fp4 = args->out_scale != NULL;
    const int64_t num_bytes = is_fp4 ? SMLA_INDEX_HEAD_DIM / 2 : SMLA_INDEX_HEAD_DIM;
    SMLA_TRY(smla_require(
        &c, &(smla_rule){.name = "out",
                         .tensor = args->out,
                         .dtypes = is_fp4 ? SMLA_DTYPE_UINT8 : SMLA_DTYPE_E4M3 | SMLA_DTYPE_UINT8,
                         .flags = SMLA_RULE_OUTPUT,
                         .ndim = 3,
                         .shape = {num_tokens, num_heads, num_bytes},
                         .hint = is_fp4 ? "two FP4 values per byte" : "tokens, heads, bytes"}));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "out_weights",
                                           .tensor = args->out_weights,
                                           .dtypes = SMLA_DTYPE_FP32,
                                           .flags = SMLA_RULE_OUTPUT,
                                           .ndim = 2,
                                           .shape = {num_tokens, num_heads},
                                           .hint = "a weight per head of `q`"}));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "out_scale",
                                           .tensor = args->out_scale,
                                           .dtypes = SMLA_DTYPE_UINT8,
                                           .flags = SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL,
                                           .ndim = 3,
                                           .shape = {num_tokens, num_heads, 4},
                                           .hint = "a scale per 32 values of a head"}));
    SMLA_TRY(require_finite(&c, "softmax_scale", args->softmax_scale));
    SMLA_TRY(require_finite(&c, "head_scale", args->head_scale));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_index_query_params){
        .num_tokens = num_tokens,
        .num_heads = num_heads,
        .q = smla_data(args->q),
        .q_stride_token = smla_stride(args->q, 0),
        .q_stride_head = smla_stride(args->q, 1),
        .weights = smla_data(args->weights),
        .weights_type = smla_float_type_of(args->weights),
        .weights_stride_token = smla_stride(args->weights, 0),
        .rope = rope,
        .weight_scale = (float)(args->softmax_scale * args->head_scale),
        .out = smla_data(args->out),
        .out_stride_token = smla_stride(args->out, 0),
        .out_stride_head = smla_stride(args->out, 1),
        .out_weights = smla_data(args->out_weights),
        .out_weights_stride_token = smla_stride(args->out_weights, 0),
        .out_scale = smla_data(args->out_scale),
        .out_scale_stride_token = smla_stride(args->out_scale, 0),
        .out_scale_stride_head = smla_stride(args->out_scale, 1),
        .stream = smla_stream_of(&c, args->stream),
    };
    return SMLA_OK;
}
