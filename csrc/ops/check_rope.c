/* check_rope.c: the argument rules of RoPE. check_parts.c has the shared ones. */
#include "core/params_rope.h"
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
