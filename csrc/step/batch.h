/* batch.h: the batch of a step as a scheduler gives it: its order, its split, and the rules that
 * every builder has for it. Defined in batch.c. */
#pragma once

#include <stdbool.h>

#include "core/backend.h"
#include "sparse_mla/step.h"

/* The largest batch that a builder has buffers for. */
typedef struct smla_batch_limits {
    int64_t max_num_seqs;
    int64_t max_num_batched_tokens;
    int64_t max_model_len;
    int64_t decode_threshold;
    bool has_uniform_decodes; /* all decodes of a step have the length of the first */
} smla_batch_limits;

/* The host's view of a batch. */
typedef struct smla_batch {
    const int32_t *query_start_loc; /* [num_reqs + 1] */
    const int32_t *seq_lens;        /* [num_reqs] */
    int64_t num_reqs;
    int64_t num_actual_tokens; /* padding behind the last query included */
    void *stream;
} smla_batch;

/* The batch in a plan's args of a build. The args of all plans have these fields. */
#define SMLA_BATCH_OF(args)                                       \
    ((smla_batch){.query_start_loc = (args)->query_start_loc_cpu, \
                  .seq_lens = (args)->seq_lens_cpu,               \
                  .num_reqs = (args)->num_reqs,                   \
                  .num_actual_tokens = (args)->num_actual_tokens, \
                  .stream = (args)->stream})

static inline int32_t
smla_query_len(const int32_t *query_start_loc, int64_t req)
{
    return query_start_loc[req + 1] - query_start_loc[req];
}

/* Checks that it starts with 0, never falls, and ends with at most num_actual_tokens. */
smla_status smla_check_query_start_loc(const char *op, const int32_t *query_start_loc,
                                       int64_t num_reqs, int64_t num_actual_tokens,
                                       smla_error *error);

/* smla_split_decodes_and_prefills of arguments that are checked. */
smla_batch_split smla_split_batch(const smla_batch_limits *limits, const smla_batch *batch);

/* Checks the counts, query_start_loc and seq_lens of a batch. */
smla_status smla_check_batch(const char *op, const smla_batch_limits *limits,
                             const smla_batch *batch, smla_error *error);

/* Gives a checked batch lengths of its own, in `seq_lens` [num_reqs]: a request without query
 * tokens attends to nothing in this step, so that it has 0 tokens, whatever it has cached. */
void smla_hide_idle_tokens(smla_batch *batch, int32_t *seq_lens);

/* The scheduler must put decodes first, so no query that is short enough for a decode may follow a
 * longer one. Requests without query tokens may stand anywhere. */
smla_status smla_check_batch_order(const char *op, const smla_batch_limits *limits,
                                   const smla_batch *batch, smla_error *error);

/* A block table must have a page for each of the `seq_len` tokens of request `req`. */
smla_status smla_check_table_width(const char *op, const DLTensor *block_table, int64_t block_size,
                                   int64_t req, int64_t seq_len, smla_error *error);

/* Writes the request of each token, and 0 for the other entries up to max_num_batched_tokens. */
void smla_fill_req_ids(const smla_batch_limits *limits, const smla_batch *batch,
                       int32_t *req_id_per_token);
