/* check_attention_dsv4.c: the argument rules of sparse_mla_dsv4, whose lists are columns of one
 * table.
 */
#include <float.h>

#include "ops/check_attention.h"

/* The formats whose dtype and last dimension no other format has. */
enum {
    FORMATS = SMLA_KV_SET(SMLA_ROW_BFLOAT16_512) | SMLA_KV_SET(SMLA_ROW_FP8_V4) |
        SMLA_KV_SET(SMLA_ROW_FP8_E4M3),
};

static const char op_name[] = "sparse_mla_dsv4";

/* Checks the table whose columns become the lists. */
static smla_status
require_lists(const smla_sparse_mla_dsv4_args *args, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, op_name, error);
    SMLA_TRY(smla_require_3d(&c, "query", args->query, SMLA_DTYPE_BF16 | SMLA_DTYPE_E4M3_OR_BYTES,
                             SMLA_ANY, SMLA_ANY, SMLA_V4_HEAD_DIM, 0,
                             "tokens, heads, values of a key"));
    const int64_t num_tokens = smla_size(args->query, 0);
    SMLA_TRY(smla_require_2d(&c, "sparse_indices", args->sparse_indices, SMLA_DTYPE_INT32,
                             num_tokens, SMLA_ANY, 0, "a row per token of the query"));
    SMLA_TRY(smla_require_vector(&c, "sparse_topk_lens", args->sparse_topk_lens, num_tokens, 0,
                                 "a length per token of the query"));
    SMLA_TRY(smla_require_pointer(c.op, "swa_kv_cache", args->swa_kv_cache, error));
    SMLA_TRY(smla_require_pointer(c.op, "compressed_kv_cache", args->compressed_kv_cache, error));
    SMLA_TRY(smla_require_count(c.op, "window", args->window, 1, INT32_MAX, error));
    if (smla_size(args->sparse_indices, 1) < args->window) {
        return smla_refuse(&c,
                           "`sparse_indices` must have at least %lld columns (`window`), got %lld",
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
    smla_open_checker(&c, op_name, error);
    if (args->bmm1_scale.tensor == NULL && args->bmm1_scale.value == 0) {
        return smla_refuse(&c, "`bmm1_scale` must be a positive normal float32, got none");
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
        return smla_refuse(
            &c, "`bmm1_scale` must make %g to %g of bmm1_scale / bmm2_scale, got %g / %g",
            (double)FLT_MIN, (double)SMLA_LOGIT_FACTOR_MAX, (double)logit_scale,
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
    const DLTensor *const table = args->sparse_indices;
    smla_view columns[2];
    smla_list_args lists[2] = {
        {.cache = {.name = "swa_kv_cache", .tensor = args->swa_kv_cache, .formats = FORMATS},
         .indices = {"sparse_indices", smla_slice_columns(&columns[0], table, 0, args->window)},
         .topk_length = SMLA_NAMED(args, sparse_topk_lens),
         .kv_scale = SMLA_NAMED(args, bmm2_scale)},
    };
    lists[1] = lists[0];
    lists[1].cache.name = "compressed_kv_cache";
    lists[1].cache.tensor = args->compressed_kv_cache;
    lists[1].cache.is_extra = true;
    lists[1].indices.tensor =
        smla_slice_columns(&columns[1], table, args->window, smla_size(table, 1));
    smla_attention_inputs in = {
        .q = SMLA_NAMED(args, query),
        .sinks = SMLA_NAMED(args, sinks),
        .out = args->out,
        .workspace = SMLA_NAMED(args, workspace_buffer),
        .softmax_scale = {.name = "bmm1_scale", .value = 1.0},
        .q_scale = {.name = "bmm1_scale"},
        .any_query_has_scale = true,
        .has_no_lse = true,
        .stream = args->stream,
    };
    /* Attention multiplies logits with softmax_scale * q_scale * kv_scale, and values with
     * kv_scale, which is bmm2_scale. bmm1_scale is all of the former product already, so bmm2_scale
     * has to be divided out of it: here, or on the device if one of the two is there. */
    if (has_numbers) {
        in.softmax_scale.value = (double)((float)args->bmm1_scale.value / kv_scale);
    } else {
        in.q_scale.given = args->bmm1_scale;
    }
    smla_checker c;
    smla_open_checker(&c, op_name, error);
    SMLA_TRY(smla_require_lists(&c, &in, lists, 2, params));
    params->keys.lists[1].end_offset = args->window;
    if (!has_numbers) {
        params->logits.divisor = params->logits.kv_scale[0];
    }
    /* No kernel reads these vectors. */
    SMLA_TRY(
        smla_require_vector(&c, "seq_lens", args->seq_lens, SMLA_ANY, SMLA_RULE_OPTIONAL, NULL));
    SMLA_TRY(smla_require_vector(&c, "cum_seq_lens_q", args->cum_seq_lens_q, SMLA_ANY,
                                 SMLA_RULE_OPTIONAL, NULL));
    smla_rule out = smla_latent_out(params);
    return smla_finish_attention(&c, &in, &out, params, backend);
}
