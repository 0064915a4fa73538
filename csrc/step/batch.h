/* batch.h: the batch of a step as a scheduler gives it, and the rules that every builder has for it
 * and for the counts of a config. Defined in batch.c. */
#pragma once

#include "core/backend.h"

/* The largest batch that a builder has buffers for. */
typedef struct smla_batch_limits {
    int64_t max_num_seqs;
    int64_t max_num_batched_tokens;
    int64_t max_model_len;
    int64_t decode_threshold;
} smla_batch_limits;

/* The host's view of a batch. */
typedef struct smla_batch {
    const int32_t *query_start_loc; /* [num_reqs + 1] */
    const int32_t *seq_lens;        /* [num_reqs] */
    int64_t num_reqs;
    int64_t num_actual_tokens; /* padding behind the last query included */
} smla_batch;

/* A count of a builder's config, which must be 1 to `most`. */
typedef struct smla_config_count {
    const char *name;
    int64_t value;
    int64_t most;
} smla_config_count;

smla_status smla_check_config_counts(const char *op, const smla_config_count *counts,
                                     size_t num_counts, smla_error *error);

/* Checks the counts, query_start_loc and seq_lens of a batch. */
smla_status smla_check_batch(const char *op, const smla_batch_limits *limits,
                             const smla_batch *batch, smla_error *error);

/* The scheduler must put decodes first, so no query that is short enough for a decode may follow a
 * longer one. */
smla_status smla_check_batch_order(const char *op, const smla_batch_limits *limits,
                                   const smla_batch *batch, smla_error *error);

/* Writes the request of each token, and 0 for the other entries up to max_num_batched_tokens. */
void smla_fill_req_ids(const smla_batch_limits *limits, const smla_batch *batch,
                       int32_t *req_id_per_token);
