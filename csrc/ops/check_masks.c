/* check_masks.c: what the operators of dense attention share: masks, softcaps, the number of
 * splits, the numbers at which requests start, and the rows behind the last one.
 */
#include <float.h>

#include "ops/check_attention.h"

static smla_status
require_window(const smla_checker *c, const char *side, int64_t keys)
{
    return keys >= -1 && keys <= INT32_MAX
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `window_size` must have -1 (open) or a number of keys on its %s, "
                           "got %lld",
                           c->op, side, (long long)keys);
}

smla_status
smla_require_mask(const smla_checker *c, const smla_mask_args *args, smla_attention_params *params)
{
    if (args->has_window) {
        SMLA_TRY(require_window(c, "left", args->window_left));
        SMLA_TRY(require_window(c, "right", args->window_right));
    }
    SMLA_TRY(smla_require_number(c, "attention_chunk", args->attention_chunk, 0));
    SMLA_TRY(smla_require_number(c, "max_seqlen_q", args->max_seqlen_q, 0));
    SMLA_TRY(smla_require_number(c, "max_seqlen_k", args->max_seqlen_k, 0));
    SMLA_TRY(smla_require_logit_factor(c->op, "softcap", args->softcap, c->error));
    /* Kernels take a subnormal number as 0, and a softcap of 0 is none. */
    if (args->softcap != 0 && !((float)args->softcap >= FLT_MIN)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `softcap` must be 0 (none) or a positive normal float32, got %g",
                         c->op, args->softcap);
    }
    params->logits.softcap = (float)args->softcap;
    smla_range_rule *const rule = &params->visible.rule;
    const int64_t right = args->has_window ? args->window_right : -1;
    rule->left = args->has_window ? args->window_left : -1;
    rule->right = args->is_causal ? 0 : right;
    rule->chunk = args->attention_chunk;
    return SMLA_OK;
}

smla_status
smla_require_share(const smla_checker *c, int64_t rank, int64_t size, int64_t interleave,
                   smla_rank_share *share)
{
    const bool has_none = size == 0 && rank == 0 && interleave == 0;
    const bool is_right = size >= 1 && size <= INT32_MAX && rank >= 0 && rank < size &&
                          interleave >= 1 && interleave <= INT32_MAX;
    if (!has_none && !is_right) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and "
                         "interleave >= 1, got (%lld, %lld, %lld)",
                         c->op, (long long)rank, (long long)size, (long long)interleave);
    }
    *share = (smla_rank_share){(int32_t)rank, (int32_t)size, (int32_t)interleave};
    return SMLA_OK;
}

smla_status
smla_require_one_table(const smla_checker *c, const DLTensor *block_table,
                       const DLTensor *slot_table)
{
    return (block_table == NULL) != (slot_table == NULL)
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `block_table` must be given, or `slot_table` in its place, got %s",
                           c->op, block_table == NULL ? "neither" : "both");
}

smla_status
smla_require_num_splits(const smla_checker *c, int64_t num_splits)
{
    return num_splits >= 0 && num_splits <= SMLA_MAX_SPLITS
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `num_splits` must be 0 (the plan chooses) or 1 to %d, got %lld",
                           c->op, SMLA_MAX_SPLITS, (long long)num_splits);
}

smla_status
smla_require_starts(const smla_checker *c, const char *name, const DLTensor *tensor, int64_t most,
                    const char *rows)
{
    const int32_t *const starts = smla_data(tensor);
    const int64_t stride = smla_stride(tensor, 0);
    int64_t before = 0;
    if (c->device.device_type != kDLCPU) {
        return SMLA_OK;
    }
    for (int64_t i = 0; i < smla_size(tensor, 0); i++) {
        const int64_t start = starts[i * stride];
        if (i == 0 ? start != 0 : start < before) {
            return smla_fail(c->error, SMLA_ERROR_VALUE,
                             "%s: `%s` must begin with 0 and never fall, got %lld at %lld", c->op,
                             name, (long long)start, (long long)i);
        }
        before = start;
    }
    return before <= most ? SMLA_OK
                          : smla_fail(c->error, SMLA_ERROR_VALUE,
                                      "%s: `%s` must end at most at the %lld %s, got %lld", c->op,
                                      name, (long long)most, rows, (long long)before);
}

smla_status
smla_require_query_starts(smla_checker *c, const DLTensor *starts, smla_requests *reqs)
{
    SMLA_TRY(smla_require_vector(c, "cu_seqlens_q", starts, reqs->num_reqs + 1, 0,
                                 "one entry more than `cache_seqlens`"));
    reqs->query_starts = smla_data(starts);
    reqs->query_starts_stride = smla_stride(starts, 0);
    return smla_require_starts(c, "cu_seqlens_q", starts, reqs->num_tokens, "tokens of `q`");
}

smla_status
smla_require_padding(const char *op, int32_t fills_padding, const DLTensor *out,
                     const DLTensor *lse, float empty_lse, smla_padding_rows *rows,
                     smla_error *error)
{
    const int32_t all = SMLA_FILLS_OUT | SMLA_FILLS_LSE;
    if ((fills_padding & ~all) != 0) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `fills_padding` must be a sum of SMLA_FILLS_OUT and SMLA_FILLS_LSE, "
                         "got %d",
                         op, (int)fills_padding);
    }
    const int64_t value_bytes = smla_element_bytes(out);
    *rows = (smla_padding_rows){
        .out = fills_padding & SMLA_FILLS_OUT ? smla_data(out) : NULL,
        .out_stride_token_bytes = smla_stride(out, 0) * value_bytes,
        .out_stride_head_bytes = smla_stride(out, 1) * value_bytes,
        .row_bytes = smla_size(out, 2) * value_bytes,
        .lse = fills_padding & SMLA_FILLS_LSE ? smla_data(lse) : NULL,
        .lse_stride_token = smla_stride(lse, 0),
        .lse_stride_head = smla_stride(lse, 1),
        .empty_lse = empty_lse,
        .num_heads = (int32_t)smla_size(lse, 1),
    };
    return SMLA_OK;
}
