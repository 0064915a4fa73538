/* check_attention_values.c: the values that every attention is made of (core/attention/), from the
 * arguments that have the same name in all of them. Arrays are checked before they are viewed.
 */
#include "core/rule_parts.h"
#include "ops/check_attention.h"

/* ---- Queries ------------------------------------------------------------------------------- */

smla_head_rows
smla_view_part(const DLTensor *tensor, int64_t first)
{
    return (smla_head_rows){
        .data = smla_data_at(tensor, first * smla_element_bytes(tensor)),
        .stride_token = smla_stride(tensor, 0),
        .stride_head = tensor->ndim == 3 ? smla_stride(tensor, 1) : 0,
    };
}

void
smla_view_parts(const DLTensor *first, const DLTensor *second, const int16_t dims[2],
                smla_head_rows parts[2])
{
    const smla_head_rows none = {.data = NULL};
    parts[0] = smla_view_part(first, 0);
    parts[1] = dims[1] == 0     ? none
               : second != NULL ? smla_view_part(second, 0)
                                : smla_view_part(first, dims[0]);
}

/* ---- Logits -------------------------------------------------------------------------------- */

smla_status
smla_require_sinks(smla_checker *c, const char *name, const DLTensor *tensor, const char *hint,
                   int64_t num_heads, smla_sinks *sinks)
{
    SMLA_TRY(smla_require(c, &(smla_rule){.name = name,
                                          .tensor = tensor,
                                          .dtypes = SMLA_DTYPE_FP32,
                                          .flags = SMLA_RULE_OPTIONAL | SMLA_RULE_ANY_LAST_STRIDE |
                                                   SMLA_RULE_MORE_ROWS,
                                          .ndim = 1,
                                          .shape = {num_heads},
                                          .hint = hint}));
    *sinks = (smla_sinks){smla_data(tensor), smla_stride(tensor, 0)};
    return SMLA_OK;
}

smla_status
smla_require_softmax_scale(const smla_checker *c, const char *name, double scale,
                           smla_logits *logits)
{
    logits->softmax_scale = scale;
    return smla_require_logit_factor(c->op, name, scale, c->error);
}

/* Checks that the CPU can use the scales of every request and KV head. */
static smla_status
require_positive_scales(const smla_checker *c, const char *name, const DLTensor *tensor,
                        const smla_descale *scale)
{
    const bool has_rows = tensor->ndim == 2;
    for (int64_t req = 0; req < (has_rows ? smla_size(tensor, 0) : 1); req++) {
        for (int64_t head = 0; head < (has_rows ? smla_size(tensor, 1) : 1); head++) {
            SMLA_TRY(smla_require_positive(
                c->op, name, scale->pointer[req * scale->stride_req + head * scale->stride_head],
                c->error));
        }
    }
    return SMLA_OK;
}

smla_status
smla_require_descale(smla_checker *c, const char *name, const smla_scale_arg *given, const char *of,
                     const DLTensor *values, int64_t num_reqs, int64_t num_kv_heads,
                     smla_descale *scale)
{
    const DLTensor *const tensor = given->tensor;
    *scale = (smla_descale){.value = 1.0f};
    if (!(smla_dtype(values) & SMLA_DTYPE_E4M3_OR_BYTES)) {
        return tensor == NULL && (given->value == 0 || given->value == 1)
                   ? SMLA_OK
                   : smla_fail(c->error, SMLA_ERROR_VALUE,
                               "%s: `%s` must be left out unless `%s` is e4m3, got %s", c->op, name,
                               of, smla_describe_dtype(values).text);
    }
    SMLA_TRY(smla_read_scale_number(c, name, given, &scale->value));
    if (tensor == NULL) {
        return SMLA_OK;
    }
    const bool has_rows =
        tensor->ndim == 2 && tensor->shape[0] == num_reqs && tensor->shape[1] == num_kv_heads;
    if (!has_rows && !smla_has_one_value(tensor)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have one value or shape [%lld, %lld], or be a float, got "
                         "shape %s",
                         c->op, name, (long long)num_reqs, (long long)num_kv_heads,
                         smla_describe_shape(tensor).text);
    }
    scale->pointer = smla_data(tensor);
    scale->stride_req = has_rows ? smla_stride(tensor, 0) : 0;
    scale->stride_head = has_rows ? smla_stride(tensor, 1) : 0;
    return c->device.device_type == kDLCPU ? require_positive_scales(c, name, tensor, scale)
                                           : SMLA_OK;
}

/* ---- Results ------------------------------------------------------------------------------- */

smla_results
smla_results_of(const DLTensor *out, const DLTensor *lse, const DLTensor *max_logits)
{
    return (smla_results){
        .out = smla_data(out),
        .out_stride_token = smla_stride(out, 0),
        .out_stride_head = smla_stride(out, 1),
        .lse = smla_data(lse),
        .lse_stride_token = smla_stride(lse, 0),
        .lse_stride_head = smla_stride(lse, 1),
        .max_logits = smla_data(max_logits),
        .max_logits_stride_token = smla_stride(max_logits, 0),
        .max_logits_stride_head = smla_stride(max_logits, 1),
        .out_type = smla_float_type_of(out),
        .num_splits = 1,
    };
}

smla_workspace
smla_workspace_of(const char *name, const DLTensor *workspace)
{
    return (smla_workspace){.memory = smla_data(workspace),
                            .bytes = workspace == NULL ? 0 : smla_size(workspace, 0),
                            .name = name};
}
