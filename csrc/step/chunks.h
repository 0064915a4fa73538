/* chunks.h: what the engine shares with the public planning functions. Defined in chunks.c. */
#pragma once

#include <stdbool.h>

#include "core/backend.h"
#include "sparse_mla/step.h"

/* Checks that it starts with 0, never falls, and ends with at most num_actual_tokens. */
smla_status smla_check_query_start_loc(const char *op, const int32_t *query_start_loc,
                                       int64_t num_reqs, int64_t num_actual_tokens,
                                       smla_error *error);

static inline int32_t
smla_query_len(const int32_t *query_start_loc, int64_t req)
{
    return query_start_loc[req + 1] - query_start_loc[req];
}

/* smla_split_decodes_and_prefills of arguments that are checked. */
smla_batch_split smla_split_batch(const int32_t *query_start_loc, int64_t num_reqs,
                                  int64_t num_actual_tokens, int64_t decode_threshold,
                                  bool require_uniform);

/* smla_split_prefill_chunks for the caller `op`, whose request `first_req` is entry 0. A request
 * counts as `most_each` tokens at most: with 1, chunks have so many requests with tokens. */
smla_status smla_pack_prefills(const char *op, const int32_t *seq_lens, int64_t first_req,
                               int64_t num_reqs, int64_t most_each, int64_t workspace_tokens,
                               int64_t *ends, int64_t *num_chunks, smla_error *error);

/* smla_split_context_chunks of checked args, for the caller `op`. `query_start_loc`
 * [num_prefills + 1] says which prefills have no query tokens, and thus no context to gather: they
 * do not change how the others are cut. NULL: all have some. */
smla_status smla_cut_context(const char *op, const smla_context_args *args,
                             const int32_t *query_start_loc, smla_context_chunk *chunks,
                             int32_t *starts, int32_t *lens, int64_t *num_chunks,
                             int64_t *num_entries, smla_error *error);
