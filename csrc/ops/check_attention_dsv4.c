/* check_attention_dsv4.c: the argument rules of sparse_mla_dsv4. Its args become those of
 * sparse_attention, whose check does the rest.
 */
#include <float.h>

#include "ops/check_attention.h"

/* The formats whose dtype and last dimension no other format has. */
enum {
    FORMATS = SMLA_KV_SET(SMLA_ROW_BFLOAT16_512) | SMLA_KV_SET(SMLA_ROW_FP8_V4) |
        SMLA_KV_SET(SMLA_ROW_FP8_E4M3),
};

/* No kernel reads these vectors. */
static smla_status
require_unread(smla_checker *c, const void *more, smla_attention_params *params)
{
    const smla_sparse_mla_dsv4_args *const args = more;
    (void)params;
    SMLA_TRY(
        smla_require_vector(c, "seq_lens", args->seq_lens, SMLA_ANY, SMLA_RULE_OPTIONAL, NULL));
    return smla_require_vector(c, "cum_seq_lens_q", args->cum_seq_lens_q, SMLA_ANY,
                               SMLA_RULE_OPTIONAL, NULL);
}

static const smla_attention_rules attention_rules = {
    .op = "sparse_mla_dsv4",
    .q = "query",
    .q_scale = "bmm1_scale",
    .lists = {{"swa_kv_cache", "sparse_indices", "sparse_topk_lens", "bmm2_scale", FORMATS},
              {"compressed_kv_cache", "sparse_indices", "sparse_topk_lens", "bmm2_scale", FORMATS}},
    .softmax_scale = "bmm1_scale",
    .attn_sink = "sinks",
    .workspace = "workspace_buffer",
    .require_more = require_unread,
    .any_query_has_scale = true,
    .has_no_lse = true,
};

/* Checks what sparse_attention's check cannot word: the table whose columns become its lists. */
static smla_status
require_lists(const smla_sparse_mla_dsv4_args *args, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, attention_rules.op, error);
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "query",
                                           .tensor = args->query,
                                           .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_E4M3_OR_BYTES,
                                           .ndim = 3,
                                           .shape = {SMLA_ANY, SMLA_ANY, SMLA_V4_HEAD_DIM},
                                           .hint = "tokens, heads, values of a key"}));
    const int64_t num_tokens = smla_size(args->query, 0);
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "sparse_indices",
                                           .tensor = args->sparse_indices,
                                           .dtypes = SMLA_DTYPE_INT32,
                                           .ndim = 2,
                                           .shape = {num_tokens, SMLA_ANY},
                                           .hint = "a row per token of the query"}));
    SMLA_TRY(smla_require_vector(&c, "sparse_topk_lens", args->sparse_topk_lens, num_tokens, 0,
                                 "a length per token of the query"));
    SMLA_TRY(smla_require_pointer(c.op, "swa_kv_cache", args->swa_kv_cache, error));
    SMLA_TRY(smla_require_pointer(c.op, "compressed_kv_cache", args->compressed_kv_cache, error));
    SMLA_TRY(smla_require_count(c.op, "window", args->window, 1, INT32_MAX, error));
    if (smla_size(args->sparse_indices, 1) < args->window) {
        return smla_fail(
            error, SMLA_ERROR_VALUE,
            "%s: `sparse_indices` must have at least %lld columns (`window`), got %lld", c.op,
            (long long)args->window, (long long)smla_size(args->sparse_indices, 1));
    }
    return SMLA_OK;
}

/* Whether the caller's memory holds a scale. */
static bool
is_here(const smla_scale_arg *scale)
{
    return scale->tensor == NULL || smla_normal_device(scale->tensor->device).device_type == kDLCPU;
}

/* Checks the two numbers that scale logits and values, and their quotient, which multiplies logits.
 * A number of 0 is left out. A quotient of scales on a device cannot be checked. */
static smla_status
require_scales(const smla_sparse_mla_dsv4_args *args, smla_error *error)
{
    smla_checker c;
    smla_given_scale logits;
    smla_given_scale values;
    smla_open_checker(&c, attention_rules.op, error);
    if (args->bmm1_scale.tensor == NULL && args->bmm1_scale.value == 0) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `bmm1_scale` must be a positive normal float32, got none", c.op);
    }
    SMLA_TRY(smla_require_scale(&c, "bmm1_scale", &args->bmm1_scale, &logits));
    SMLA_TRY(smla_require_scale(&c, "bmm2_scale", &args->bmm2_scale, &values));
    if (!is_here(&args->bmm1_scale) || !is_here(&args->bmm2_scale)) {
        return SMLA_OK;
    }
    const float logit_scale = smla_read_scale(&logits);
    const float value_scale = smla_read_scale(&values);
    SMLA_TRY(smla_require_logit_factor(c.op, "bmm1_scale", (double)logit_scale, error));
    const float quotient = logit_scale / value_scale;
    if (!(quotient >= FLT_MIN && quotient <= SMLA_LOGIT_FACTOR_MAX)) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `bmm1_scale` must make %g to %g of bmm1_scale / bmm2_scale, got %g / "
                         "%g",
                         c.op, (double)FLT_MIN, (double)SMLA_LOGIT_FACTOR_MAX, (double)logit_scale,
                         (double)value_scale);
    }
    return SMLA_OK;
}

smla_status
smla_check_sparse_mla_dsv4(const smla_sparse_mla_dsv4_args *args, smla_attention_params *params,
                           const smla_backend **backend, smla_error *error)
{
    SMLA_TRY(require_lists(args, error));
    SMLA_TRY(require_scales(args, error));
    const bool has_numbers = args->bmm1_scale.tensor == NULL && args->bmm2_scale.tensor == NULL;
    const float kv_scale = args->bmm2_scale.value == 0 ? 1.0f : (float)args->bmm2_scale.value;
    smla_view columns[2];
    smla_sparse_attention_args attention = {
        .struct_size = sizeof attention,
        .q = args->query,
        .kv_cache = args->swa_kv_cache,
        .indices = smla_slice_columns(&columns[0], args->sparse_indices, 0, args->window),
        .topk_length = args->sparse_topk_lens,
        .attn_sink = args->sinks,
        .extra_kv_cache = args->compressed_kv_cache,
        .extra_indices = smla_slice_columns(&columns[1], args->sparse_indices, args->window,
                                            smla_size(args->sparse_indices, 1)),
        .extra_topk_length = args->sparse_topk_lens,
        .out = args->out,
        .workspace = args->workspace_buffer,
        .stream = args->stream,
        .kv_scale = args->bmm2_scale,
        .extra_kv_scale = args->bmm2_scale,
    };
    /* Attention multiplies logits with softmax_scale * q_scale * kv_scale, and values with
     * kv_scale, which is bmm2_scale. bmm1_scale is all of the former product already, so bmm2_scale
     * has to be divided out of it: here, or on the device if one of the two is there. */
    if (has_numbers) {
        attention.softmax_scale = (double)((float)args->bmm1_scale.value / kv_scale);
    } else {
        attention.softmax_scale = 1.0;
        attention.q_scale = args->bmm1_scale;
    }
    SMLA_TRY(smla_check_attention_by(&attention_rules, &attention, args, params, backend, error));
    if (!has_numbers) {
        params->logits.divisor = params->logits.kv_scale[0];
    }
    params->keys.lists[1].end_offset = args->window;
    return SMLA_OK;
}
