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
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_INT32,
                                        .flags = flags | SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = 1,
                                        .shape = {count},
                                        .hint = hint});
}

smla_status
smla_require_block_table(smla_checker *c, const DLTensor *tensor)
{
    return smla_require(c, &(smla_rule){.name = "block_table",
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_INT32,
                                        .flags = SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = 2,
                                        .shape = {SMLA_ANY, SMLA_ANY},
                                        .hint = "a row of page numbers per request"});
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
        return smla_fail(c->error, SMLA_ERROR_VALUE, "%s: `%s` must have 1 to %d heads, got %lld",
                         c->op, name, SMLA_MAX_HEADS, (long long)num_heads);
    }
    return SMLA_OK;
}

smla_status
smla_require_state(smla_checker *c, const char *name, const DLTensor *tensor, int64_t num_tokens,
                   int64_t num_heads, unsigned flags)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_FP32,
                                        .flags = flags | SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = 2,
                                        .shape = {num_tokens, num_heads}});
}

smla_status
smla_require_workspace(smla_checker *c, const char *name, const DLTensor *tensor, unsigned flags)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_UINT8 | SMLA_DTYPE_INT8,
                                        .flags = flags | SMLA_RULE_OUTPUT,
                                        .ndim = 1,
                                        .shape = {SMLA_ANY}});
}

smla_status
smla_require_table(smla_checker *c, const char *name, const DLTensor *tensor, int64_t num_reqs,
                   unsigned flags)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_INT32,
                                        .flags =
                                            flags | SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = 2,
                                        .shape = {num_reqs, SMLA_ANY},
                                        .hint = "a row of page numbers per request"});
}

smla_status
smla_require_slots(smla_checker *c, const char *name, const DLTensor *slots, int64_t num_tokens,
                   unsigned flags)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = slots,
                                        .dtypes = SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                                        .flags = flags | SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = 1,
                                        .shape = {num_tokens},
                                        .hint = "a slot per token"});
}

smla_status
smla_require_is_valid(smla_checker *c, const DLTensor *tensor, int64_t num_tokens)
{
    return smla_require(c, &(smla_rule){.name = "is_valid",
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_UINT8 | SMLA_DTYPE_BOOL,
                                        .flags = SMLA_RULE_OPTIONAL | SMLA_RULE_MORE_ROWS |
                                                 SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = 1,
                                        .shape = {num_tokens}});
}

smla_status
smla_require_number(const smla_checker *c, const char *name, int64_t value, int64_t least)
{
    return smla_require_count(c->op, name, value, least, INT32_MAX, c->error);
}
