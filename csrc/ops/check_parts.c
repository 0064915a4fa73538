/* check_parts.c: rules that several families share. check.h says what each of them checks. */
#include "ops/check.h"

smla_float_type
smla_float_type_of(const DLTensor *tensor)
{
    switch (smla_dtype(tensor)) {
    case SMLA_DTYPE_BF16: return SMLA_FLOAT_BF16;
    case SMLA_DTYPE_FP16: return SMLA_FLOAT_FP16;
    case SMLA_DTYPE_FP32: return SMLA_FLOAT_FP32;
    default: return SMLA_FLOAT_E4M3;
    }
}

smla_call
smla_call_of(const smla_checker *c, void *stream, const smla_kv_format_info *kv_format)
{
    return (smla_call){.op = c->op,
                       .stream = {.device_id = c->device.device_id, .handle = stream},
                       .kv_format = kv_format};
}

smla_status
smla_finish_check(const smla_checker *c, const smla_backend **backend)
{
    SMLA_TRY(smla_find_backend(c->op, c->device, backend, c->error));
    return smla_require_disjoint(c);
}

smla_status
smla_require_vector(smla_checker *c, const char *name, const DLTensor *tensor, int64_t count,
                    unsigned flags, const char *hint)
{
    return smla_require_1d(c, name, tensor, SMLA_DTYPE_INT32, count,
                           flags | SMLA_RULE_ANY_LAST_STRIDE, hint);
}

smla_status
smla_require_block_table(smla_checker *c, const DLTensor *tensor)
{
    return smla_require_2d(c, "block_table", tensor, SMLA_DTYPE_INT32, SMLA_ANY, SMLA_ANY,
                           SMLA_RULE_ANY_LAST_STRIDE, "a row of page numbers per request");
}

smla_page_table
smla_page_table_of(const DLTensor *tensor, int64_t block_size)
{
    return (smla_page_table){
        .block_table = smla_data(tensor),
        .stride_req = smla_stride(tensor, 0),
        .stride_block = smla_stride(tensor, 1),
        .num_blocks = tensor == NULL ? 0 : smla_size(tensor, 1),
        .block_size = block_size,
    };
}

smla_status
smla_require_num_heads(const smla_checker *c, const char *name, int64_t num_heads)
{
    if (num_heads < 1 || num_heads > SMLA_MAX_HEADS) {
        return smla_refuse(c, "`%s` must have 1 to %d heads, got %lld", name, SMLA_MAX_HEADS,
                           (long long)num_heads);
    }
    return SMLA_OK;
}

smla_status
smla_require_state(smla_checker *c, const char *name, const DLTensor *tensor, int64_t num_tokens,
                   int64_t num_heads, unsigned flags)
{
    return smla_require_2d(c, name, tensor, SMLA_DTYPE_FP32, num_tokens, num_heads,
                           flags | SMLA_RULE_ANY_LAST_STRIDE, NULL);
}

smla_status
smla_require_workspace(smla_checker *c, const char *name, const DLTensor *tensor, unsigned flags)
{
    return smla_require_1d(c, name, tensor, SMLA_DTYPE_UINT8 | SMLA_DTYPE_INT8, SMLA_ANY,
                           flags | SMLA_RULE_OUTPUT, NULL);
}

smla_status
smla_require_table(smla_checker *c, const char *name, const DLTensor *tensor, int64_t num_reqs,
                   unsigned flags)
{
    return smla_require_2d(c, name, tensor, SMLA_DTYPE_INT32, num_reqs, SMLA_ANY,
                           flags | SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                           "a row of page numbers per request");
}

smla_status
smla_require_slots(smla_checker *c, const char *name, const DLTensor *slots, int64_t num_tokens,
                   unsigned flags)
{
    return smla_require_1d(c, name, slots, SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32, num_tokens,
                           flags | SMLA_RULE_ANY_LAST_STRIDE, "a slot per token");
}

smla_status
smla_require_is_valid(smla_checker *c, const DLTensor *tensor, int64_t num_tokens)
{
    return smla_require_1d(c, "is_valid", tensor, SMLA_DTYPE_UINT8 | SMLA_DTYPE_BOOL, num_tokens,
                           SMLA_RULE_OPTIONAL | SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                           NULL);
}

smla_status
smla_require_number(const smla_checker *c, const char *name, int64_t value, int64_t least)
{
    return smla_require_count(c->op, name, value, least, INT32_MAX, c->error);
}
