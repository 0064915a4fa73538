/* chunks.c: the arithmetic of a step. It orders a batch, splits decodes from prefills, and cuts
 * prefills into chunks that share the workspace. It computes with host integers only; engine.c
 * keeps the results.
 */
#include "step/chunks.h"

#include "core/rule.h"

enum { PREFILL_WORKSPACE_FACTOR = 5 };

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
smla_split_batch(const int32_t *query_start_loc, int64_t num_reqs, int64_t num_actual_tokens,
                 int64_t decode_threshold, bool require_uniform)
{
    int64_t num_decodes = 0;
    int32_t first_len = 0; /* query tokens of the first request that has any */
    for (; num_decodes < num_reqs; num_decodes++) {
        const int32_t len = smla_query_len(query_start_loc, num_decodes);
        first_len = first_len == 0 ? len : first_len;
        if (len > decode_threshold || (require_uniform && len != 0 && len != first_len)) {
            break;
        }
    }
    /* Padding tokens after the last query belong to the part that ends the batch. */
    const int64_t num_decode_tokens =
        num_decodes == num_reqs ? num_actual_tokens : query_start_loc[num_decodes];
    return (smla_batch_split){
        .num_decodes = num_decodes,
        .num_prefills = num_reqs - num_decodes,
        .num_decode_tokens = num_decode_tokens,
        .num_prefill_tokens = num_actual_tokens - num_decode_tokens,
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
    *split = smla_split_batch(query_start_loc, num_reqs, num_actual_tokens, decode_threshold,
                              require_uniform != 0);
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

/* ---- Chunks -------------------------------------------------------------------------------- */

smla_status
smla_pack_prefills(const char *op, const int32_t *seq_lens, int64_t first_req, int64_t num_reqs,
                   int64_t most_each, int64_t workspace_tokens, int64_t *ends, int64_t *num_chunks,
                   smla_error *error)
{
    int64_t count = 0;
    int64_t used = 0;
    for (int64_t req = 0; req < num_reqs; req++) {
        const int64_t len = seq_lens[req] < most_each ? seq_lens[req] : most_each;
        if (len < 0) {
            return smla_fail_value(error, op, "`seq_lens` must be >= 0, got %lld at request %lld",
                                   (long long)len, (long long)(first_req + req));
        }
        if (len > workspace_tokens) {
            return smla_fail_value(error, op,
                                   "`seq_lens` must fit the workspace of %lld tokens one by one, "
                                   "got %lld at request %lld (raise prefill_workspace_tokens)",
                                   (long long)workspace_tokens, (long long)len,
                                   (long long)(first_req + req));
        }
        if (req > 0 && used + len > workspace_tokens) {
            ends[count++] = req;
            used = 0;
        }
        used += len;
    }
    if (num_reqs > 0) {
        ends[count++] = num_reqs;
    }
    *num_chunks = count;
    return SMLA_OK;
}

smla_status
smla_split_prefill_chunks(const int32_t *seq_lens, int64_t num_reqs, int64_t workspace_tokens,
                          int64_t *ends, int64_t *num_chunks, smla_error *error)
{
    static const char op[] = "split_prefill_chunks";
    if (num_reqs > 0) {
        SMLA_TRY(smla_require_pointer(op, "seq_lens", seq_lens, error));
        SMLA_TRY(smla_require_pointer(op, "ends", ends, error));
    }
    SMLA_TRY(smla_require_pointer(op, "num_chunks", num_chunks, error));
    SMLA_TRY(smla_require_least(op, "workspace_tokens", workspace_tokens, 0, error));
    return smla_pack_prefills(op, seq_lens, 0, num_reqs, INT32_MAX, workspace_tokens, ends,
                              num_chunks, error);
}

int64_t
smla_prefill_workspace_size(int64_t max_model_len)
{
    int64_t tokens;
    return __builtin_mul_overflow(PREFILL_WORKSPACE_FACTOR, max_model_len, &tokens) ? INT64_MAX
                                                                                    : tokens;
}

const char *
smla_path_name(smla_path path)
{
    switch (path) {
    case SMLA_PATH_AUTO: return "auto";
    case SMLA_PATH_MIXED: return "mixed";
    case SMLA_PATH_SEPARATE: return "separate";
    case SMLA_PATH_BF16: return "bf16";
    case SMLA_PATH_DIRECT: return "direct";
    }
    return NULL;
}
