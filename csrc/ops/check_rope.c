/* check_rope.c: the argument rules of RoPE. check_parts.c has the shared ones. */
#include "core/params_rope.h"
#include "ops/check.h"

/* ---- Parts --------------------------------------------------------------------------------- */

static smla_status
require_positions(smla_checker *c, const DLTensor *positions, int64_t num_tokens)
{
    return smla_require_1d(c, "positions", positions, SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                           num_tokens, SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                           "at least a position per token");
}

/* Positions and a table that have been checked. */
static smla_rope
rope_of(const DLTensor *positions, const DLTensor *table)
{
    return (smla_rope){
        SMLA_SET_VECTOR(positions, positions),
        .positions_are_int64 = smla_dtype(positions) == SMLA_DTYPE_INT64,
        .max_pos = smla_size(table, 0),
        .cos_sin = smla_data(table),
        .cos_sin_stride_pos = smla_stride(table, 0),
    };
}

smla_status
smla_require_rope(smla_checker *c, const DLTensor *positions, const DLTensor *rope_table,
                  int64_t num_tokens, smla_rope *rope)
{
    SMLA_TRY(require_positions(c, positions, num_tokens));
    SMLA_TRY(smla_require_2d(c, "rope_table", rope_table, SMLA_DTYPE_FP32, SMLA_ANY,
                             SMLA_QK_ROPE_HEAD_DIM, 0, "32 cosines, then 32 sines per position"));
    *rope = rope_of(positions, rope_table);
    return SMLA_OK;
}

/* ---- apply_rope ---------------------------------------------------------------------------- */

static smla_status
require_pairs(const smla_checker *c, const DLTensor *q_pe)
{
    const int64_t size = smla_size(q_pe, 2);
    if (size < 2 || size % 2 != 0) {
        return smla_refuse(
            c, "`q_pe` must have an even number of values per head, at least 2, got %lld",
            (long long)size);
    }
    return SMLA_OK;
}

/* Checks an output by the rule of its input, which it may be. */
static smla_status
require_rotated(smla_checker *c, const char *name, const DLTensor *tensor, const smla_rule *input)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = smla_dtype(input->tensor),
                                        .flags = SMLA_RULE_OUTPUT,
                                        .ndim = input->ndim,
                                        .shape = {smla_size(input->tensor, 0),
                                                  smla_size(input->tensor, 1),
                                                  smla_size(input->tensor, 2)},
                                        .hint = "the shape of what is turned",
                                        .may_be = {input->tensor}});
}

static smla_status
require_no_k_out(const smla_checker *c, const DLTensor *k_out)
{
    return k_out == NULL ? SMLA_OK
                         : smla_refuse(c, "`k_out` must be absent without `k_pe`, got an array");
}

/* Arrays [T, H, R], or [T, R] of one head, that have been checked; no heads for NULL. */
static smla_rope_heads
heads_of(const DLTensor *x, const DLTensor *out)
{
    const bool has_heads = x != NULL && x->ndim == 3;
    return (smla_rope_heads){
        .x = smla_data(x),
        .out = smla_data(out),
        .num_heads = x == NULL   ? 0
                     : has_heads ? smla_size(x, 1)
                                 : 1,
        .stride_token = smla_stride(x, 0),
        .stride_head = has_heads ? smla_stride(x, 1) : 0,
        .out_stride_token = smla_stride(out, 0),
        .out_stride_head = has_heads ? smla_stride(out, 1) : 0,
    };
}

/* Checks the args of apply_rope, and fills `params`. If the key goes into a cache, it is needed,
 * has no array k_out, and is left out of `params`. */
static smla_status
require_rotation(smla_checker *c, const smla_apply_rope_args *args, bool caches_key,
                 smla_apply_rope_params *params)
{
    const smla_rule q = {.name = "q_pe",
                         .tensor = args->q_pe,
                         .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32,
                         .ndim = 3,
                         .shape = {SMLA_ANY, SMLA_ANY, SMLA_ANY},
                         .hint = "tokens, heads, and the values of a head"};
    SMLA_TRY(smla_require(c, &q));
    SMLA_TRY(require_pairs(c, args->q_pe));
    const int64_t num_tokens = smla_size(args->q_pe, 0);
    const int64_t num_values = smla_size(args->q_pe, 2);
    const smla_rule k = {.name = "k_pe",
                         .tensor = args->k_pe,
                         .dtypes = smla_dtype(args->q_pe),
                         .flags = caches_key ? 0 : SMLA_RULE_OPTIONAL,
                         .ndim = 2,
                         .shape = {num_tokens, num_values},
                         .hint = "the tokens and the values of `q_pe`"};
    SMLA_TRY(require_positions(c, args->positions, num_tokens));
    SMLA_TRY(smla_require(c, &k));
    SMLA_TRY(smla_require_2d(c, "rope_table", args->rope_table, SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                             SMLA_ANY, num_values, 0, "cosines, then sines, per position"));
    SMLA_TRY(require_rotated(c, "q_out", args->q_out, &q));
    if (!caches_key) {
        SMLA_TRY(args->k_pe == NULL ? require_no_k_out(c, args->k_out)
                                    : require_rotated(c, "k_out", args->k_out, &k));
    }
    *params = (smla_apply_rope_params){
        .call = smla_call_of(c, args->stream, NULL),
        .num_tokens = num_tokens,
        .num_pairs = num_values / 2,
        .q = heads_of(args->q_pe, args->q_out),
        .k = heads_of(caches_key ? NULL : args->k_pe, args->k_out),
        .type = smla_float_type_of(args->q_pe),
        .rope = rope_of(args->positions, args->rope_table),
        .table_type = smla_float_type_of(args->rope_table),
        .is_neox = args->is_neox != 0,
        .is_inverse = args->inverse != 0,
    };
    return SMLA_OK;
}

smla_status
smla_check_apply_rope(const smla_apply_rope_args *args, smla_apply_rope_params *params,
                      const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "apply_rope", error);
    SMLA_TRY(require_rotation(&c, args, false, params));
    return smla_finish_check(&c, backend);
}

smla_status
smla_check_rope_and_cache_mla(const smla_rope_and_cache_mla_args *args,
                              smla_rope_and_cache_params *params, const smla_backend **backend,
                              smla_error *error)
{
    const smla_apply_rope_args rotate = {.positions = args->positions,
                                         .q_pe = args->q_pe,
                                         .k_pe = args->k_pe,
                                         .rope_table = args->rope_table,
                                         .q_out = args->q_out,
                                         .is_neox = args->is_neox,
                                         .stream = args->stream};
    const smla_concat_and_cache_mla_args write = {.kv_c = args->kv_c,
                                                  .k_pe = args->k_pe,
                                                  .kv_cache = args->kv_cache,
                                                  .slot_mapping = args->slot_mapping,
                                                  .kv_format = args->kv_format,
                                                  .stream = args->stream,
                                                  .kv_scale = args->kv_scale};
    const smla_kv_set formats = SMLA_KV_SET(SMLA_ROW_BFLOAT16) | SMLA_KV_SET(SMLA_ROW_FP8_DS_MLA);
    smla_checker c;
    smla_open_checker(&c, "rope_and_cache_mla", error);
    SMLA_TRY(require_rotation(&c, &rotate, true, &params->queries));
    SMLA_TRY(smla_require_concat(&c, &write, formats, smla_dtype(args->q_pe), &params->insert));
    params->call = params->insert.call;
    return smla_finish_check(&c, backend);
}

/* ---- fused_inv_rope_fp8_quant -------------------------------------------------------------- */

static smla_status
check_groups(const smla_checker *c, int64_t num_heads, int64_t groups)
{
    SMLA_TRY(smla_require_count(c->op, "groups", groups, 1, SMLA_MAX_HEADS, c->error));
    if (num_heads % groups != 0) {
        return smla_refuse(c, "`o` must have a multiple of %lld heads (`groups`), got %lld",
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
    SMLA_TRY(smla_require_3d(&c, "o", args->o, SMLA_DTYPE_BF16, SMLA_ANY, SMLA_ANY,
                             SMLA_V4_HEAD_DIM, 0, "tokens, heads, and the values of a head"));
    const int64_t num_tokens = smla_size(args->o, 0);
    const int64_t num_heads = smla_size(args->o, 1);
    SMLA_TRY(smla_require_num_heads(&c, "o", num_heads));
    SMLA_TRY(check_groups(&c, num_heads, args->groups));
    SMLA_TRY(smla_require_rope(&c, args->positions, args->rope_table, num_tokens, &rope));
    const int64_t group_heads = num_heads / args->groups;
    const bool quantizes = args->out_scale != NULL;
    SMLA_TRY(smla_require_3d(&c, "out", args->out,
                             quantizes ? SMLA_DTYPE_E4M3_OR_BYTES : SMLA_DTYPE_BF16, num_tokens,
                             args->groups, group_heads * SMLA_V4_HEAD_DIM, SMLA_RULE_OUTPUT,
                             "tokens, groups, and the values of a group's heads"));
    const unsigned scale_dtypes = dtypes_of_layout(args->scale_layout);
    if (scale_dtypes == 0) {
        return smla_refuse(&c,
                           "`scale_layout` must be \"fp32\" (1) or \"ue8m0x4\" (2), or 0, got %d",
                           (int)args->scale_layout);
    }
    const bool is_packed = quantizes && smla_dtype(args->out_scale) == SMLA_DTYPE_INT32;
    SMLA_TRY(smla_require_3d(&c, "out_scale", args->out_scale, scale_dtypes, num_tokens,
                             args->groups,
                             is_packed ? group_heads : group_heads * SMLA_OUTPUT_SCALES,
                             SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL | SMLA_RULE_MORE_ROWS |
                                 SMLA_RULE_ANY_LAST_STRIDE,
                             "tokens, groups, and the scales of a group's heads"));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_inverse_rope_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .num_heads = num_heads,
        .group_heads = group_heads,
        SMLA_SET_HEADS(o, args->o),
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
