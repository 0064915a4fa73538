/* plan_dense.h: the step of dense MLA. plan_dense.c fills it, and layer_dense.c reads it. */
#pragma once

#include "core/params_attention.h"
#include "sparse_mla/dense_step.h"
#include "step/engine.h"

/* What a build sends. */
typedef struct smla_dense_sent {
    int32_t *query_start_loc;         /* [max_num_seqs + 1] */
    int32_t *prefill_query_start_loc; /* [max_num_seqs + 1]: of the prefills, among their tokens */
} smla_dense_sent;

/* What kernels write: the ranges of the step's tokens, and the scratch of its layers. */
typedef struct smla_dense_made {
    int32_t *positions; /* [max_num_batched_tokens] int64 */
    int32_t *req_ids;   /* [max_num_batched_tokens], like the next two */
    int32_t *begin;
    int32_t *end;
    int32_t *q_pe;   /* [max_num_batched_tokens, H, R] bf16: turned queries */
    int32_t *k_pe;   /* [max_num_batched_tokens, R] bf16: turned keys */
    int32_t *latent; /* [max_num_batched_tokens, H, 512] bf16: absorbed queries, later results */
    int32_t *lse;    /* [max_num_batched_tokens, H] fp32 */
} smla_dense_made;

struct smla_dense_builder {
    smla_step step;
    smla_dense_config config; /* defaults filled in */
    smla_dense_metadata metadata;
    smla_dense_sent sent;
    smla_dense_made made;
    smla_key_ranges_params ranges; /* those of the last build */
    smla_view seq_lens;            /* the caller's, of the last build, like the next two */
    smla_view block_table;
    smla_view slot_mapping;
};
