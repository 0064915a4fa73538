/* batch.c: how a batch is ordered and split, what a builder demands of it, and the arrays that
 * follow from it alone. It computes with host integers only. */
#include "step/batch.h"

#include <string.h>

#include "core/rule.h"

/* ---- Splitting a batch --------------------------------------------------------------------- */

smla_status
smla_check_query_start_loc(const char *op, const int32_t *query_start_loc, int64_t num_reqs,
                           int64_t num_actual_tokens, smla_error *error)
{
    SMLA_TRY(smla_require_least(op, "num_reqs", num_reqs, 0, error));
    if (query_start_loc == NULL || query_start_loc[0] != 0) {
        return smla_fail_value(error, op, "`query_start_loc` must start with 0, got %d",
                               query_start_loc == NULL ? -1 : query_start_loc[0]);
    }
    for (int64_t req = 0; req < num_reqs; req++) {
        if (query_start_loc[req + 1] < query_start_loc[req]) {
            return smla_fail_value(
                error, op, "`query_start_loc` must not decrease, got %d after %d at request %lld",
                query_start_loc[req + 1], query_start_loc[req], (long long)req);
        }
    }
    if (num_actual_tokens < query_start_loc[num_reqs]) {
        return smla_fail_value(
            error, op, "`num_actual_tokens` must be at least query_start_loc[-1] = %d, got %lld",
            query_start_loc[num_reqs], (long long)num_actual_tokens);
    }
    return SMLA_OK;
}

smla_batch_split
smla_split_batch(const smla_batch_limits *limits, const smla_batch *batch)
{
    const int64_t num_reqs = batch->num_reqs;
    int64_t num_decodes = 0;
    int32_t first_len = 0; /* query tokens of the first request that has any */
    for (; num_decodes < num_reqs; num_decodes++) {
        const int32_t len = smla_query_len(batch->query_start_loc, num_decodes);
        first_len = first_len == 0 ? len : first_len;
        if (len > limits->decode_threshold ||
            (limits->has_uniform_decodes && len != 0 && len != first_len)) {
            break;
        }
    }
    /* Padding tokens after the last query belong to the part that ends the batch. */
    const int64_t num_decode_tokens =
        num_decodes == num_reqs ? batch->num_actual_tokens : batch->query_start_loc[num_decodes];
    return (smla_batch_split){
        .num_decodes = num_decodes,
        .num_prefills = num_reqs - num_decodes,
        .num_decode_tokens = num_decode_tokens,
        .num_prefill_tokens = batch->num_actual_tokens - num_decode_tokens,
    };
}

smla_status
smla_split_decodes_and_prefills(const int32_t *query_start_loc, int64_t num_reqs,
                                int64_t num_actual_tokens, int64_t decode_threshold,
                                int require_uniform, smla_batch_split *split, smla_error *error)
{
    static const char op[] = "split_decodes_and_prefills";
    SMLA_TRY(smla_require_least(op, "decode_threshold", decode_threshold, 1, error));
    SMLA_TRY(smla_check_query_start_loc(op, query_start_loc, num_reqs, num_actual_tokens, error));
    SMLA_TRY(smla_require_pointer(op, "split", split, error));
    *split =
        smla_split_batch(&(smla_batch_limits){.decode_threshold = decode_threshold,
                                              .has_uniform_decodes = require_uniform != 0},
                         &(smla_batch){query_start_loc, NULL, num_reqs, num_actual_tokens, NULL});
    return SMLA_OK;
}

/* ---- Order --------------------------------------------------------------------------------- */

/* Counts decodes and prefills, and their tokens, wherever they stand. */
static smla_status
count_requests(const char *op, const int32_t *num_tokens, int64_t num_reqs,
               int64_t decode_threshold, smla_batch_split *split, smla_error *error)
{
    *split = (smla_batch_split){.num_decodes = 0};
    for (int64_t req = 0; req < num_reqs; req++) {
        const int32_t count = num_tokens[req];
        const bool is_decode = count <= decode_threshold;
        if (count < 0) {
            return smla_fail_value(error, op,
                                   "`num_scheduled_tokens` must be >= 0, got %d at request %lld",
                                   count, (long long)req);
        }
        *(is_decode ? &split->num_decodes : &split->num_prefills) += 1;
        *(is_decode ? &split->num_decode_tokens : &split->num_prefill_tokens) += count;
    }
    return SMLA_OK;
}

/* The i-th swap puts the i-th prefill in the place of the i-th last decode, as long as that decode
 * stands behind the places that decodes will have. */
smla_status
smla_reorder_batch(const int32_t *num_scheduled_tokens, int64_t num_reqs, int64_t decode_threshold,
                   int64_t *swaps, int64_t *num_swaps, smla_batch_split *split, smla_error *error)
{
    static const char op[] = "reorder_batch";
    int64_t count = 0;
    int64_t prefill = 0;
    SMLA_TRY(smla_require_least(op, "decode_threshold", decode_threshold, 1, error));
    if (num_reqs > 0) {
        SMLA_TRY(smla_require_pointer(op, "num_scheduled_tokens", num_scheduled_tokens, error));
        SMLA_TRY(smla_require_pointer(op, "swaps", swaps, error));
    }
    SMLA_TRY(smla_require_pointer(op, "num_swaps", num_swaps, error));
    SMLA_TRY(smla_require_pointer(op, "split", split, error));
    SMLA_TRY(count_requests(op, num_scheduled_tokens, num_reqs, decode_threshold, split, error));
    for (int64_t decode = num_reqs - 1; decode >= split->num_decodes; decode--) {
        if (num_scheduled_tokens[decode] > decode_threshold) {
            continue;
        }
        while (num_scheduled_tokens[prefill] <= decode_threshold) {
            prefill++;
        }
        swaps[count++] = prefill++;
        swaps[count++] = decode;
    }
    *num_swaps = count / 2;
    return SMLA_OK;
}

/* ---- A builder's batch ---------------------------------------------------------------------- */

static smla_status
check_counts(const char *op, const smla_batch_limits *limits, const smla_batch *batch,
             smla_error *error)
{
    if (batch->num_reqs < 0 || batch->num_reqs > limits->max_num_seqs) {
        return smla_fail_value(error, op, "`num_reqs` must be 0 to max_num_seqs = %lld, got %lld",
                               (long long)limits->max_num_seqs, (long long)batch->num_reqs);
    }
    if (batch->num_actual_tokens < 0 || batch->num_actual_tokens > limits->max_num_batched_tokens) {
        return smla_fail_value(
            error, op, "`num_actual_tokens` must be 0 to max_num_batched_tokens = %lld, got %lld",
            (long long)limits->max_num_batched_tokens, (long long)batch->num_actual_tokens);
    }
    if (batch->num_reqs == 0 && batch->num_actual_tokens > 0) {
        return smla_fail_value(error, op,
                               "`num_actual_tokens` must be 0 without requests, got %lld",
                               (long long)batch->num_actual_tokens);
    }
    return SMLA_OK;
}

static smla_status
check_seq_lens(const char *op, const smla_batch_limits *limits, const smla_batch *batch,
               smla_error *error)
{
    if (batch->num_reqs > 0) {
        SMLA_TRY(smla_require_pointer(op, "seq_lens", batch->seq_lens, error));
    }
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        const int64_t seq_len = batch->seq_lens[req];
        const int64_t len = smla_query_len(batch->query_start_loc, req);
        if (seq_len < len || seq_len > limits->max_model_len) {
            return smla_fail_value(error, op,
                                   "`seq_lens` must be query length to max_model_len (%lld to "
                                   "%lld) at request %lld, got %lld: context and query together",
                                   (long long)len, (long long)limits->max_model_len, (long long)req,
                                   (long long)seq_len);
        }
    }
    return SMLA_OK;
}

smla_status
smla_check_batch(const char *op, const smla_batch_limits *limits, const smla_batch *batch,
                 smla_error *error)
{
    SMLA_TRY(check_counts(op, limits, batch, error));
    SMLA_TRY(smla_check_query_start_loc(op, batch->query_start_loc, batch->num_reqs,
                                        batch->num_actual_tokens, error));
    return check_seq_lens(op, limits, batch, error);
}

void
smla_hide_idle_tokens(smla_batch *batch, int32_t *seq_lens)
{
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        const bool is_idle = smla_query_len(batch->query_start_loc, req) == 0;
        seq_lens[req] = is_idle ? 0 : batch->seq_lens[req];
    }
    batch->seq_lens = seq_lens;
}

smla_status
smla_check_batch_order(const char *op, const smla_batch_limits *limits, const smla_batch *batch,
                       smla_error *error)
{
    bool seen_prefill = false;
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        const int32_t len = smla_query_len(batch->query_start_loc, req);
        if (seen_prefill && len > 0 && len <= limits->decode_threshold) {
            return smla_fail_value(
                error, op,
                "`query_start_loc` must have decodes (at most %lld tokens) before prefills, got %d "
                "tokens at request %lld behind a prefill: sort the batch by query length",
                (long long)limits->decode_threshold, len, (long long)req);
        }
        seen_prefill = seen_prefill || len > limits->decode_threshold;
    }
    return SMLA_OK;
}

smla_status
smla_check_table_width(const char *op, const DLTensor *block_table, int64_t block_size, int64_t req,
                       int64_t seq_len, smla_error *error)
{
    const int64_t blocks = (seq_len + block_size - 1) / block_size;
    const int64_t num_blocks = smla_size(block_table, 1);
    if (blocks <= num_blocks) {
        return SMLA_OK;
    }
    return smla_fail_value(error, op,
                           "`block_table` must have at least %lld columns for the %lld tokens of "
                           "request %lld, got %lld",
                           (long long)blocks, (long long)seq_len, (long long)req,
                           (long long)num_blocks);
}

void
smla_fill_req_ids(const smla_batch_limits *limits, const smla_batch *batch,
                  int32_t *req_id_per_token)
{
    for (int64_t req = 0; req < batch->num_reqs; req++) {
        for (int32_t t = batch->query_start_loc[req]; t < batch->query_start_loc[req + 1]; t++) {
            req_id_per_token[t] = (int32_t)req;
        }
    }
    const int64_t used = batch->query_start_loc[batch->num_reqs];
    memset(req_id_per_token + used, 0,
           (size_t)(limits->max_num_batched_tokens - used) * sizeof *req_id_per_token);
}
