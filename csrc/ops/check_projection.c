/* check_projection.c: the argument rules of the projections, and of per-tensor quantisation.
 * check_projection_weights.c has those of weights, check_parts.c the shared ones.
 */
#include "core/params_projection.h"
#include "ops/check.h"

/* Checks either up projection: x [T, H, k], w [512, H, n or k] and out [T, H, n]. */
static smla_status
check_up_proj(smla_checker *c, const char *x_name, const DLTensor *x, const char *w_name,
              const DLTensor *w, const DLTensor *out, void *stream, bool latent_is_inner,
              smla_projection_params *params, const smla_backend **backend)
{
    smla_rule rule = {.name = x_name,
                      .tensor = x,
                      .dtypes = SMLA_DTYPE_BF16,
                      .ndim = 3,
                      .shape = {SMLA_ANY, SMLA_ANY,
                                latent_is_inner ? SMLA_KV_LORA_RANK : SMLA_ANY}};
    SMLA_TRY(smla_require(c, &rule));
    const int64_t num_tokens = smla_size(x, 0);
    const int64_t num_heads = smla_size(x, 1);
    SMLA_TRY(smla_require_num_heads(c, x_name, num_heads));
    rule = (smla_rule){.name = w_name,
                       .tensor = w,
                       .dtypes = SMLA_DTYPE_BF16,
                       .ndim = 3,
                       .shape = {SMLA_KV_LORA_RANK, num_heads,
                                 latent_is_inner ? SMLA_ANY : smla_size(x, 2)}};
    SMLA_TRY(smla_require(c, &rule));
    const int64_t outer_dim = latent_is_inner ? smla_size(w, 2) : SMLA_KV_LORA_RANK;
    SMLA_TRY(smla_require_3d(c, "out", out, SMLA_DTYPE_BF16, num_tokens, num_heads, outer_dim,
                             SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(c, backend));
    *params = (smla_projection_params){
        .call = smla_call_of(c, stream, NULL),
        .num_tokens = num_tokens,
        .num_heads = num_heads,
        .inner_dim = smla_size(x, 2),
        .outer_dim = outer_dim,
        SMLA_SET_HEADS(x, x),
        .w = smla_data(w),
        .w_stride_inner = smla_stride(w, latent_is_inner ? 0 : 2),
        .w_stride_head = smla_stride(w, 1),
        .w_stride_outer = smla_stride(w, latent_is_inner ? 2 : 0),
        SMLA_SET_HEADS(out, out),
    };
    return SMLA_OK;
}

smla_status
smla_check_k_up_proj(const smla_k_up_proj_args *args, smla_projection_params *params,
                     const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "k_up_proj", error);
    SMLA_TRY(check_up_proj(&c, "q_nope", args->q_nope, "W_UK", args->w_uk, args->out, args->stream,
                           false, params, backend));
    return SMLA_OK;
}

smla_status
smla_check_v_up_proj(const smla_v_up_proj_args *args, smla_projection_params *params,
                     const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "v_up_proj", error);
    SMLA_TRY(check_up_proj(&c, "x", args->x, "W_UV", args->w_uv, args->out, args->stream, true,
                           params, backend));
    return SMLA_OK;
}

smla_status
smla_check_linear(const smla_linear_args *args, smla_projection_params *params,
                  const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, args->op, error);
    SMLA_TRY(smla_require_2d(&c, args->x_name, args->x, SMLA_DTYPE_BF16, SMLA_ANY, args->inner_dim,
                             0, NULL));
    SMLA_TRY(smla_require_2d(&c, args->w_name, args->w, SMLA_DTYPE_BF16, args->inner_dim, SMLA_ANY,
                             SMLA_RULE_ANY_LAST_STRIDE,
                             "a layer's weight is given as its transpose"));
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_BF16, smla_size(args->x, 0),
                             smla_size(args->w, 1), SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_projection_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = smla_size(args->x, 0),
        .num_heads = 1,
        .inner_dim = args->inner_dim,
        .outer_dim = smla_size(args->w, 1),
        SMLA_SET_ROWS(x, args->x),
        .w = smla_data(args->w),
        .w_stride_inner = smla_stride(args->w, 0),
        .w_stride_outer = smla_stride(args->w, 1),
        SMLA_SET_ROWS(out, args->out),
    };
    return SMLA_OK;
}

smla_status
smla_check_kv_up_proj(const smla_kv_up_proj_args *args, smla_projection_params *params,
                      const smla_backend **backend, smla_error *error)
{
    const smla_linear_args linear = {.op = "kv_up_proj",
                                     .x_name = "kv_c",
                                     .x = args->kv_c,
                                     .w_name = "kv_b_proj",
                                     .w = args->kv_b_proj,
                                     .inner_dim = SMLA_KV_LORA_RANK,
                                     .out = args->out,
                                     .stream = args->stream};
    return smla_check_linear(&linear, params, backend, error);
}

/* Checks that scales are given for e4m3 values, and only for these. */
static smla_status
check_scale_is_given(const smla_checker *c, const char *name, const DLTensor *scale, bool is_e4m3)
{
    if ((scale != NULL) == is_e4m3) {
        return SMLA_OK;
    }
    return smla_refuse(c, "`%s` must be %s: %s", name,
                       is_e4m3 ? "given, got none" : "None, got an array",
                       is_e4m3 ? "an e4m3 `o` has scales" : "a bf16 `o` has no scales");
}

/* Checks the scales of `o`, which are given for e4m3 values only. */
static smla_status
check_o_scale(smla_checker *c, const DLTensor *o, const DLTensor *scale, bool is_e4m3)
{
    SMLA_TRY(check_scale_is_given(c, "o_scale", scale, is_e4m3));
    if (!is_e4m3) {
        return SMLA_OK;
    }
    const int64_t tile = SMLA_SCALE_TILE * (smla_dtype(scale) == SMLA_DTYPE_INT32 ? 4 : 1);
    if (smla_size(o, 2) % tile != 0) {
        return smla_refuse(c, "`o` must have a multiple of %lld values per group, got %lld",
                           (long long)tile, (long long)smla_size(o, 2));
    }
    return smla_require_3d(c, "o_scale", scale, SMLA_DTYPE_FP32 | SMLA_DTYPE_INT32, smla_size(o, 0),
                           smla_size(o, 1), smla_size(o, 2) / tile,
                           SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                           "a scale per 128 values of `o`, or four of them per int32");
}

static smla_status
check_grouped_weight_scale(smla_checker *c, const DLTensor *weight, const DLTensor *scale,
                           bool is_e4m3)
{
    SMLA_TRY(check_scale_is_given(c, "weight_scale", scale, is_e4m3));
    return smla_require_3d(c, "weight_scale", scale, SMLA_DTYPE_FP32, smla_size(weight, 0),
                           (smla_size(weight, 1) + SMLA_SCALE_TILE - 1) / SMLA_SCALE_TILE,
                           smla_size(weight, 2) / SMLA_SCALE_TILE,
                           SMLA_RULE_OPTIONAL | SMLA_RULE_ANY_LAST_STRIDE,
                           "a scale per block of 128 x 128 weights");
}

smla_status
smla_check_grouped_output_projection(const smla_grouped_output_projection_args *args,
                                     smla_projection_params *params, const smla_backend **backend,
                                     smla_error *error)
{
    const unsigned e4m3 = SMLA_DTYPE_E4M3_OR_BYTES;
    smla_checker c;
    smla_open_checker(&c, "grouped_output_projection", error);
    SMLA_TRY(smla_require_3d(&c, "o", args->o, SMLA_DTYPE_BF16 | e4m3, SMLA_ANY, SMLA_ANY, SMLA_ANY,
                             0, "tokens, groups, and the values of a group"));
    const int64_t num_tokens = smla_size(args->o, 0);
    const int64_t num_groups = smla_size(args->o, 1);
    if (num_groups < 1 || num_groups > SMLA_MAX_HEADS) {
        return smla_refuse(&c, "`o` must have 1 to %d groups, got %lld", SMLA_MAX_HEADS,
                           (long long)num_groups);
    }
    const bool is_e4m3 = (smla_dtype(args->o) & e4m3) != 0;
    SMLA_TRY(check_o_scale(&c, args->o, args->o_scale, is_e4m3));
    SMLA_TRY(smla_require_3d(&c, "weight", args->weight, is_e4m3 ? e4m3 : SMLA_DTYPE_BF16,
                             num_groups, SMLA_ANY, smla_size(args->o, 2), 0,
                             "groups, outputs, and the values of a group"));
    SMLA_TRY(check_grouped_weight_scale(&c, args->weight, args->weight_scale, is_e4m3));
    const int64_t outer_dim = smla_size(args->weight, 1);
    SMLA_TRY(smla_require_3d(&c, "out", args->out, SMLA_DTYPE_BF16, num_tokens, num_groups,
                             outer_dim, SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_projection_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .num_heads = num_groups,
        .inner_dim = smla_size(args->o, 2),
        .outer_dim = outer_dim,
        .is_e4m3 = is_e4m3,
        SMLA_SET_HEADS(x, args->o),
        .w = smla_data(args->weight),
        .w_stride_inner = 1,
        .w_stride_head = smla_stride(args->weight, 0),
        .w_stride_outer = smla_stride(args->weight, 1),
        .scales = {.x = smla_data(args->o_scale),
                   .x_is_packed = is_e4m3 && smla_dtype(args->o_scale) == SMLA_DTYPE_INT32,
                   .x_stride_token = smla_stride(args->o_scale, 0),
                   .x_stride_head = smla_stride(args->o_scale, 1),
                   .x_stride_column = smla_stride(args->o_scale, 2),
                   .w = smla_data(args->weight_scale),
                   .w_stride_head = smla_stride(args->weight_scale, 0),
                   .w_stride_outer = smla_stride(args->weight_scale, 1),
                   .w_stride_inner = smla_stride(args->weight_scale, 2)},
        SMLA_SET_HEADS(out, args->out),
    };
    return SMLA_OK;
}

smla_status
smla_check_dynamic_per_tensor_quant(const smla_dynamic_per_tensor_quant_args *args,
                                    smla_quant_params *params, const smla_backend **backend,
                                    smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "dynamic_per_tensor_quant", error);
    SMLA_TRY(smla_require_any(&c, "x", args->x, SMLA_DTYPE_FLOATS, SMLA_RULE_ANY_LAST_STRIDE));
    SMLA_TRY(smla_require_any(&c, "out", args->out, SMLA_DTYPE_E4M3_OR_BYTES,
                              SMLA_RULE_OUTPUT | SMLA_RULE_ANY_LAST_STRIDE));
    smla_quant_params p = {.ndim = args->x->ndim};
    if (args->out->ndim != p.ndim) {
        return smla_refuse(&c, "`out` must have the %d dimensions of `x`, got %d", p.ndim,
                           args->out->ndim);
    }
    for (int i = 0; i < p.ndim; i++) {
        p.shape[i] = args->x->shape[i];
        p.x_strides[i] = smla_stride(args->x, i);
        p.out_strides[i] = smla_stride(args->out, i);
        if (args->out->shape[i] != p.shape[i]) {
            return smla_refuse(&c,
                               "`out` must have the shape of `x`, %lld in dimension %d, got %lld",
                               (long long)p.shape[i], i, (long long)args->out->shape[i]);
        }
    }
    /* A scale is one value, of any rank, because frameworks differ in the rank of a scalar. */
    SMLA_TRY(smla_require_any(&c, "scale", args->scale, SMLA_DTYPE_FP32,
                              SMLA_RULE_OUTPUT | SMLA_RULE_ANY_LAST_STRIDE));
    for (int i = 0; i < args->scale->ndim; i++) {
        if (args->scale->shape[i] != 1) {
            return smla_refuse(&c, "`scale` must hold one value, got a dimension of %lld",
                               (long long)args->scale->shape[i]);
        }
    }
    SMLA_TRY(smla_finish_check(&c, backend));
    p.x = smla_data(args->x);
    p.type = smla_float_type_of(args->x);
    p.out = smla_data(args->out);
    p.scale = smla_data(args->scale);
    p.call = smla_call_of(&c, args->stream, NULL);
    *params = p;
    return SMLA_OK;
}
