/* check_masks.c: what the operators of dense attention share: masks, softcaps, requests and where
 * they start, and the rows behind the last one.
 */
#include <float.h>

#include "ops/check_attention.h"

static smla_status
require_window(const smla_checker *c, const char *side, int64_t keys)
{
    return keys >= -1 && keys <= INT32_MAX
               ? SMLA_OK
               : smla_refuse(
                     c, "`window_size` must have -1 (open) or a number of keys on its %s, got %lld",
                     side, (long long)keys);
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
        return smla_refuse(c, "`softcap` must be 0 (none) or a positive normal float32, got %g",
                           args->softcap);
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
        return smla_refuse(c,
                           "`cp` must be (rank, ranks, interleave) with 0 <= rank < ranks and "
                           "interleave >= 1, got (%lld, %lld, %lld)",
                           (long long)rank, (long long)size, (long long)interleave);
    }
    *share = (smla_rank_share){0}; /* one rank has all, so its results are those without `cp` */
    if (size > 1) {
        *share = (smla_rank_share){(int32_t)rank, (int32_t)size, (int32_t)interleave};
    }
    return SMLA_OK;
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
            return smla_refuse(c, "`%s` must begin with 0 and never fall, got %lld at %lld", name,
                               (long long)start, (long long)i);
        }
        before = start;
    }
    return before <= most ? SMLA_OK
                          : smla_refuse(c, "`%s` must end at most at the %lld %s, got %lld", name,
                                        (long long)most, rows, (long long)before);
}

static smla_status
require_query_starts(smla_checker *c, const DLTensor *starts, const DLTensor *q,
                     smla_requests *reqs)
{
    if (q->ndim == 4) {
        return smla_refuse(
            c, "`cu_seqlens_q` must be left out for a query [B, n, H, D], got an array");
    }
    SMLA_TRY(smla_require_vector(c, "cu_seqlens_q", starts, reqs->num_reqs + 1, 0,
                                 "one entry more than `cache_seqlens`"));
    reqs->query_starts = smla_data(starts);
    reqs->query_starts_stride = smla_stride(starts, 0);
    return smla_require_starts(c, "cu_seqlens_q", starts, reqs->num_tokens, "tokens of `q`");
}

smla_status
smla_require_requests(smla_checker *c, const smla_table_args *args, const DLTensor *q,
                      int64_t num_tokens, smla_requests *reqs, const DLTensor **table)
{
    const DLTensor *const lens = args->cache_seqlens;
    const DLTensor *const starts = args->cu_seqlens_q;
    const bool has_slots = args->slot_table != NULL;
    const bool has_rows = q->ndim == 4; /* a row of tokens per request */
    if ((args->block_table == NULL) != has_slots) {
        return smla_refuse(c, "`block_table` must be given, or `slot_table` in its place, got %s",
                           args->block_table == NULL ? "neither" : "both");
    }
    SMLA_TRY(smla_require_vector(c, "cache_seqlens", lens,
                                 starts != NULL && !has_rows ? SMLA_ANY : smla_size(q, 0), 0,
                                 "a length per request of the query"));
    *reqs = (smla_requests){
        .num_tokens = num_tokens,
        .num_reqs = smla_size(lens, 0),
        .query_len = has_rows ? smla_size(q, 1) : 1,
        SMLA_SET_VECTOR(seq_lens, lens),
    };
    SMLA_TRY(starts == NULL ? SMLA_OK : require_query_starts(c, starts, q, reqs));
    *table = has_slots ? args->slot_table : args->block_table;
    return smla_require_table(c, has_slots ? "slot_table" : "block_table", *table, reqs->num_reqs,
                              0);
}

smla_status
smla_require_padding(const char *op, int32_t fills_padding, const DLTensor *out,
                     const DLTensor *lse, float empty_lse, smla_padding_rows *rows,
                     smla_error *error)
{
    const int32_t all = SMLA_FILLS_OUT | SMLA_FILLS_LSE;
    if ((fills_padding & ~all) != 0) {
        return smla_fail_value(
            error, op, "`fills_padding` must be a sum of SMLA_FILLS_OUT and SMLA_FILLS_LSE, got %d",
            (int)fills_padding);
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
