/* chunks.h: prefills in chunks. What the prefills of a chunk need lies in a workspace that all
 * chunks share: their cache rows, or a part of their context. Defined in chunks.c. */
#pragma once

#include "step/batch.h"

/* Prefills, and how they may be cut. Prefill 0 is request `first_req` of the batch. */
typedef struct smla_prefills {
    const int32_t *lens; /* [num_prefills]: rows of each */
    /* [num_prefills + 1]: where their queries start in the batch. NULL: unknown, each has some. */
    const int32_t *query_start_loc;
    int64_t first_req;
    int64_t num_prefills;
    int64_t workspace_tokens;
    int64_t block_size;   /* a prefill may be cut at a multiple of it; 0: it stays whole */
    bool are_cut_equally; /* chunks have the same rows of every prefill; else they are filled */
    bool counts_requests; /* the workspace has room for so many prefills with rows, not for rows */
} smla_prefills;

/* The prefills of a batch, which are its requests from `first_req` on, with all their tokens. */
static inline smla_prefills
smla_prefills_of(const smla_batch *batch, int64_t first_req, int64_t workspace_tokens)
{
    return (smla_prefills){.lens = batch->seq_lens + first_req,
                           .query_start_loc = batch->query_start_loc + first_req,
                           .first_req = first_req,
                           .num_prefills = batch->num_reqs - first_req,
                           .workspace_tokens = workspace_tokens};
}

/* Where chunks go. NULL: nowhere. */
typedef struct smla_chunk_list {
    int64_t *ends;              /* the end of each chunk, where prefills stay whole */
    smla_prefill_chunk *chunks; /* needs query_start_loc */
    smla_context_chunk *parts;  /* the parts of each chunk, whose rows are in the next two */
    int32_t *starts;
    int32_t *lens;
    int64_t num_chunks;
    int64_t num_parts; /* a prefill without rows is none where requests are counted */
} smla_chunk_list;

/* Adds the chunks of prefills, which are checked but for their room in the workspace, to an empty
 * list. `op` is the caller's. */
smla_status smla_cut_prefills(const char *op, const smla_prefills *prefills, smla_chunk_list *list,
                              smla_error *error);
