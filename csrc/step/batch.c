/* batch.c: what a builder demands of a batch, and the arrays that follow from it alone. */
#include "step/batch.h"

#include <string.h>

#include "core/rule.h"
#include "step/chunks.h"

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

void
smla_fill_chunks(const smla_batch *batch, int64_t first_req, const int64_t *ends,
                 int64_t num_chunks, smla_prefill_chunk *chunks)
{
    int64_t req = 0;
    for (int64_t i = 0; i < num_chunks; i++) {
        smla_prefill_chunk *const chunk = &chunks[i];
        *chunk = (smla_prefill_chunk){.req_start = req,
                                      .req_end = ends[i],
                                      .token_start = batch->query_start_loc[first_req + req],
                                      .token_end = batch->query_start_loc[first_req + ends[i]]};
        for (; req < ends[i]; req++) {
            chunk->tot_seqlen += batch->seq_lens[first_req + req];
        }
    }
}
