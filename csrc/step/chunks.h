/* chunks.h: what the engine shares with the public planning functions. Defined in chunks.c. */
#pragma once

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

/* Cuts requests into chunks of `size`. The last chunk may be smaller. `ends` is as in
 * smla_split_prefill_chunks. Returns how many chunks there are. */
int64_t smla_split_by_count(int64_t num_reqs, int64_t size, int64_t *ends);
