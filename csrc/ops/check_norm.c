/* check_norm.c: the argument rules of the operators around DeepSeek V4's attention: norms and RoPE.
 * check_parts.c has the shared ones.
 */
#include <float.h>
#include <math.h>

#include "core/params_norm.h"
#include "ops/check.h"

/* ---- Parts --------------------------------------------------------------------------------- */

smla_status
smla_require_rope(smla_checker *c, const DLTensor *positions, const DLTensor *cos_sin,
                  int64_t num_tokens, smla_rope *rope)
{
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "positions",
                                          .tensor = positions,
                                          .dtypes = SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                                          .flags = SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                                          .ndim = 1,
                                          .shape = {num_tokens},
                                          .hint = "at least a position per token"}));
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "cos_sin",
                                          .tensor = cos_sin,
                                          .dtypes = SMLA_DTYPE_FP32,
                                          .ndim = 2,
                                          .shape = {SMLA_ANY, SMLA_QK_ROPE_HEAD_DIM},
                                          .hint = "32 cosines, then 32 sines per position"}));
    *rope = (smla_rope){
        .positions = smla_data(positions),
        .positions_stride = smla_stride(positions, 0),
        .positions_are_int64 = smla_dtype(positions) == SMLA_DTYPE_INT64,
        .max_pos = smla_size(cos_sin, 0),
        .cos_sin = smla_data(cos_sin),
        .cos_sin_stride_pos = smla_stride(cos_sin, 0),
    };
    return SMLA_OK;
}

smla_status
smla_require_eps(const smla_checker *c, double eps)
{
    if (!(eps >= 0.0) || !isfinite((float)eps)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `eps` must be finite and at least 0, got %g", c->op, eps);
    }
    if (eps > 0 && (float)eps < FLT_MIN) { /* it would be 0, or count as 0 */
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `eps` must be 0 or a normal float32 (at least %g), got %g", c->op,
                         (double)FLT_MIN, eps);
    }
    return SMLA_OK;
}

/* ---- fused_q_kv_rmsnorm -------------------------------------------------------------------- */

static smla_status
require_weight(smla_checker *c, const char *name, const DLTensor *weight, int64_t size)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = weight,
                                        .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32,
                                        .ndim = 1,
                                        .shape = {size},
                                        .hint = "a weight per value of a row"});
}

static smla_norm_rows
make_rows(const DLTensor *x, const DLTensor *weight, const DLTensor *out)
{
    return (smla_norm_rows){
        .size = smla_size(x, 1),
        .x = smla_data(x),
        .x_stride_token = smla_stride(x, 0),
        .weight = smla_data(weight),
        .weight_type = smla_float_type_of(weight),
        .out = smla_data(out),
        .out_stride_token = smla_stride(out, 0),
    };
}

smla_status
smla_check_fused_q_kv_rmsnorm(const smla_fused_q_kv_rmsnorm_args *args,
                              smla_q_kv_norm_params *params, const smla_backend **backend,
                              smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "fused_q_kv_rmsnorm", error);
    smla_rule rows = {.name = "q",
                      .tensor = args->q,
                      .dtypes = SMLA_DTYPE_BF16,
                      .ndim = 2,
                      .shape = {SMLA_ANY, SMLA_ANY}};
    SMLA_TRY(smla_require(&c, &rows));
    const int64_t num_tokens = smla_size(args->q, 0);
    const int64_t q_size = smla_size(args->q, 1);
    rows.name = "kv";
    rows.tensor = args->kv;
    rows.shape[0] = num_tokens;
    rows.shape[1] = SMLA_V4_HEAD_DIM;
    rows.hint = "a row per token of `q`";
    SMLA_TRY(smla_require(&c, &rows));
    SMLA_TRY(require_weight(&c, "q_weight", args->q_weight, q_size));
    SMLA_TRY(require_weight(&c, "kv_weight", args->kv_weight, SMLA_V4_HEAD_DIM));
    rows.name = "q_out";
    rows.tensor = args->q_out;
    rows.shape[1] = q_size;
    rows.flags = SMLA_RULE_OUTPUT;
    rows.may_be = args->q;
    SMLA_TRY(smla_require(&c, &rows));
    rows.name = "kv_out";
    rows.tensor = args->kv_out;
    rows.shape[1] = SMLA_V4_HEAD_DIM;
    rows.may_be = args->kv;
    SMLA_TRY(smla_require(&c, &rows));
    SMLA_TRY(smla_require_eps(&c, args->eps));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_q_kv_norm_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .rows = {make_rows(args->q, args->q_weight, args->q_out),
                 make_rows(args->kv, args->kv_weight, args->kv_out)},
        .eps = (float)args->eps,
    };
    return SMLA_OK;
}

/* ---- fused_inv_rope_fp8_quant -------------------------------------------------------------- */

static smla_status
check_groups(const smla_checker *c, int64_t num_heads, int64_t groups)
{
    SMLA_TRY(smla_require_count(c->op, "groups", groups, 1, SMLA_MAX_HEADS, c->error));
    if (num_heads % groups != 0) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `o` must have a multiple of %lld heads (`groups`), got %lld", c->op,
                         (long long)groups, (long long)num_heads);
    }
    return SMLA_OK;
}

/* The dtypes of out_scale; 0 for a number that is no layout. */
static unsigned
dtypes_of_layout(int32_t scale_layout)
{
    switch (scale_layout) {
    case SMLA_SCALES_INFER: return SMLA_DTYPE_FP32 | SMLA_DTYPE_INT32;
    case SMLA_SCALES_FP32: return SMLA_DTYPE_FP32;
    case SMLA_SCALES_UE8M0X4: return SMLA_DTYPE_INT32;
    default: return 0;
    }
}

smla_status
smla_check_fused_inv_rope_fp8_quant(const smla_fused_inv_rope_fp8_quant_args *args,
                                    smla_inverse_rope_params *params, const smla_backend **backend,
                                    smla_error *error)
{
    smla_checker c;
    smla_rope rope;
    smla_open_checker(&c, "fused_inv_rope_fp8_quant", error);
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "o",
                                           .tensor = args->o,
                                           .dtypes = SMLA_DTYPE_BF16,
                                           .ndim = 3,
                                           .shape = {SMLA_ANY, SMLA_ANY, SMLA_V4_HEAD_DIM},
                                           .hint = "tokens, heads, and the values of a head"}));
    const int64_t num_tokens = smla_size(args->o, 0);
    const int64_t num_heads = smla_size(args->o, 1);
    SMLA_TRY(smla_require_num_heads(&c, "o", num_heads));
    SMLA_TRY(check_groups(&c, num_heads, args->groups));
    SMLA_TRY(smla_require_rope(&c, args->positions, args->cos_sin, num_tokens, &rope));
    const int64_t group_heads = num_heads / args->groups;
    const bool quantizes = args->out_scale != NULL;
    SMLA_TRY(smla_require(
        &c, &(smla_rule){.name = "out",
                         .tensor = args->out,
                         .dtypes = quantizes ? SMLA_DTYPE_E4M3_OR_BYTES : SMLA_DTYPE_BF16,
                         .flags = SMLA_RULE_OUTPUT,
                         .ndim = 3,
                         .shape = {num_tokens, args->groups, group_heads * SMLA_V4_HEAD_DIM},
                         .hint = "tokens, groups, and the values of a group's heads"}));
    const unsigned scale_dtypes = dtypes_of_layout(args->scale_layout);
    if (scale_dtypes == 0) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `scale_layout` must be \"fp32\" (1) or \"ue8m0x4\" (2), or 0, got %d",
                         c.op, (int)args->scale_layout);
    }
    const bool is_packed = quantizes && smla_dtype(args->out_scale) == SMLA_DTYPE_INT32;
    SMLA_TRY(smla_require(
        &c, &(smla_rule){.name = "out_scale",
                         .tensor = args->out_scale,
                         .dtypes = scale_dtypes,
                         .flags = SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL | SMLA_RULE_MORE_ROWS |
                                  SMLA_RULE_ANY_LAST_STRIDE,
                         .ndim = 3,
                         .shape = {num_tokens, args->groups,
                                   is_packed ? group_heads : group_heads * SMLA_OUTPUT_SCALES},
                         .hint = "tokens, groups, and the scales of a group's heads"}));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_inverse_rope_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .num_heads = num_heads,
        .group_heads = group_heads,
        .o = smla_data(args->o),
        .o_stride_token = smla_stride(args->o, 0),
        .o_stride_head = smla_stride(args->o, 1),
        .rope = rope,
        .out = smla_data(args->out),
        .out_stride_token = smla_stride(args->out, 0),
        .out_stride_group = smla_stride(args->out, 1),
        .out_scale = smla_data(args->out_scale),
        .scales_are_packed = is_packed,
        .scale_rows = quantizes ? smla_size(args->out_scale, 0) : 0,
        .scale_stride_token = smla_stride(args->out_scale, 0),
        .scale_stride_group = smla_stride(args->out_scale, 1),
        .scale_stride_column = smla_stride(args->out_scale, 2),
    };
    return SMLA_OK;
}
