/* plan_v4.h: the step of DeepSeek V4. plan_v4.c and plan_v4_chunks.c fill it, and layer_v4.c reads
 * it. v4_step.h says what a ratio is. Group i is the compressed cache of ratio i, the last group
 * the indexer's.
 */
#pragma once

#include "core/params_step.h"
#include "sparse_mla/v4_step.h"
#include "step/engine.h"

enum { SMLA_V4_LIST_ALIGN = 128 }; /* the columns of index lists are rounded up to it */

_Static_assert((int)SMLA_MAX_STEP_GROUPS == SMLA_V4_MAX_RATIOS + 1, "the ratios and the indexer");

/* What a build sends from the host, one array behind another in the mirror. */
typedef struct smla_v4_sent {
    int32_t *req_id_per_token; /* [max_num_batched_tokens], 0 for padding */
    int32_t *positions;        /* [max_num_batched_tokens], 0 for padding */
    int32_t *query_start_loc;  /* [max_num_seqs + 1] */
    int32_t *seq_lens;         /* [max_num_seqs] */
    int32_t *gather_lens;      /* [max_num_seqs]: a query and the window before it */
    /* Path "separate": the same of the prefills that have query tokens, one behind another, because
     * only these have a place in the workspace. */
    int32_t *chunk_query_start_loc; /* [max_num_seqs + 1] */
    int32_t *chunk_seq_lens;        /* [max_num_seqs], as the next two */
    int32_t *chunk_gather_lens;
    int32_t *compressed_lens[SMLA_V4_MAX_RATIOS]; /* seq_lens / ratio */
} smla_v4_sent;

/* What only the host reads. */
typedef struct smla_v4_kept {
    int32_t *prefills; /* [max_num_seqs]: the numbers of the prefills with query tokens */
} smla_v4_kept;

/* The lists of a compressed cache, see smla_step_group. */
typedef struct smla_v4_lists {
    int32_t *slot_mapping; /* [max_num_batched_tokens], as the next three */
    int32_t *state_slot_mapping;
    int32_t *context_lens;
    int32_t *lens;
    int32_t *indices; /* [max_num_batched_tokens, columns]; empty with an indexer */
} smla_v4_lists;

/* What kernels write on the device. */
typedef struct smla_v4_made {
    int32_t *indices;    /* [max_num_batched_tokens, index_columns]: the lists of one call */
    int32_t *index_lens; /* [max_num_batched_tokens] */
    int32_t *is_valid;   /* [max_num_batched_tokens] bytes */
    int32_t *swa_indices;
    int32_t *swa_lens;
    /* With several ranks: zeros [max_num_batched_tokens], the windows of ranks that do not attend
     * to them, and an indexer's choice without the rows of other ranks. */
    int32_t *no_lens;
    int32_t *own_topk; /* [max_num_batched_tokens, topk_tokens] */
    smla_v4_lists groups[SMLA_MAX_STEP_GROUPS];
} smla_v4_made;

/* What errors of a build call the tables of a ratio: "compressed[4]". */
typedef struct smla_v4_names {
    char compressed[32];
    char states[32];
} smla_v4_names;

struct smla_v4_builder {
    smla_step step;
    smla_v4_config config; /* defaults filled in; `workspace` is not used after create */
    bool plans_path;       /* a workspace and no path: a step on "separate" may be "direct" */
    smla_rank_share share; /* the rows of every compressed cache that the builder's rank has */
    smla_v4_metadata metadata;
    smla_v4_sent sent; /* on the device */
    smla_v4_made made; /* on the device */
    smla_v4_kept kept;
    int64_t columns[SMLA_MAX_STEP_GROUPS]; /* row stride of each group's `indices` */
    int64_t index_columns;
    smla_v4_names names[SMLA_V4_MAX_RATIOS];

    /* Block tables of the last build, the caller's memory. */
    smla_view swa_table;
    smla_view compressed_tables[SMLA_V4_MAX_RATIOS];
};

/* Workspace rows of a request: first its compressed rows, from `window_start` on its tokens. */
typedef struct smla_v4_rows {
    int64_t window_start; /* N; 0 for a layer without compressed rows */
    int64_t request_rows; /* M */
} smla_v4_rows;

smla_v4_rows smla_v4_workspace_rows(const smla_v4_config *config, int64_t ratio);

/* The tokens that a request's queries see in the sliding window: the query, and the part of the
 * window before it. */
static inline int64_t
smla_v4_gather_len(const smla_v4_config *config, const smla_batch *batch, int64_t req)
{
    const int64_t query_len = smla_query_len(batch->query_start_loc, req);
    const int64_t context = batch->seq_lens[req] - query_len;
    const int64_t before = config->window - 1;
    return query_len + (context < before ? context : before);
}

/* The place of a ratio in the config, or -1. */
int smla_v4_find_ratio(const smla_v4_config *config, int64_t ratio);

/* ---- plan_v4_chunks.c ---------------------------------------------------------------------- */

/* Lists the arrays of path "separate". */
void smla_v4_list_chunks(smla_step *step);

/* The plan's cut_chunks. A chunk has prefill_chunk_size prefills with query tokens, the last one
 * maybe fewer. Prefills without belong to the chunk in front of them. Also chooses the step's path
 * where the config and the workspace leave it open. */
smla_status smla_v4_cut_chunks(const smla_step *step, const smla_batch *batch,
                               smla_step_facts *facts, smla_error *error);

/* Fills the arrays of path "separate", after those of all requests. */
void smla_v4_fill_chunks(const smla_step *step, const smla_batch *batch, const smla_v4_sent *host);

/* The entries of a chunk in those arrays. */
typedef struct smla_v4_entries {
    int64_t start;
    int64_t end;
} smla_v4_entries;

smla_v4_entries smla_v4_chunk_entries(const smla_v4_builder *builder, int64_t chunk_idx);
