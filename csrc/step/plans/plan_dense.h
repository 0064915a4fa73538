/* plan_dense.h: the step of dense MLA. plan_dense.c and plan_dense_context.c fill it, and the files
 * of layer_dense.h read it. */
#pragma once

#include "core/attention/params_attention.h"
#include "sparse_mla/dense_step.h"
#include "step/engine.h"

/* What a build sends. */
typedef struct smla_dense_sent {
    int32_t *query_start_loc; /* [max_num_seqs + 1] */
    /* [max_num_seqs + 2]: of the prefills, among their tokens; the end is repeated */
    int32_t *prefill_query_start_loc;
    /* [max_num_seqs + 2]: the same with one more request, of the padding behind the last query. It
     * has no keys, so that its results are zeros. */
    int32_t *padded_query_start_loc;
    int32_t *context_starts; /* see smla_dense_metadata */
    int32_t *context_lens;
    int32_t *context_key_starts;
    int32_t *context_query_starts;
} smla_dense_sent;

/* The workspace of keys and values of all heads. */
enum { SMLA_DENSE_UP_PROJECTED = SMLA_GATHERED + 1 };

/* What only the host reads. */
typedef struct smla_dense_kept {
    int32_t *context_chunks; /* smla_context_chunk[]: the parts of the step's chunks */
    int32_t *context_lens;   /* [max_num_seqs]: the rank's, of prefills of the planned batch */
} smla_dense_kept;

/* Bytes of a query's latent as e4m3 values: those of a tile with its scale, and of a row's end. */
enum { SMLA_QUANTIZED_TILE = SMLA_SCALE_TILE + 4, SMLA_QUANTIZED_PADDING = 16 };

/* Values of 16 bits that a token's results take. They are at least as many as a latent of a query
 * needs as e4m3 values with scales, for 8192 of these, because it is quantised to their memory. */
static inline int64_t
smla_dense_result_values(int64_t num_heads)
{
    enum { LATENT_TILES = 8192 / SMLA_SCALE_TILE };
    const int64_t latent = (LATENT_TILES * SMLA_QUANTIZED_TILE + SMLA_QUANTIZED_PADDING) / 2;
    const int64_t values = num_heads * SMLA_KV_LORA_RANK;
    return values > latent ? values : latent;
}

/* Values of a query's latent that can be quantised to that memory, in whole tiles. */
static inline int64_t
smla_dense_most_quantized(int64_t num_heads)
{
    const int64_t bytes = 2 * smla_dense_result_values(num_heads) - SMLA_QUANTIZED_PADDING;
    return bytes / SMLA_QUANTIZED_TILE * SMLA_SCALE_TILE;
}

/* What kernels write: the ranges of the step's tokens, and the scratch of its layers. */
typedef struct smla_dense_made {
    int32_t *positions; /* [max_num_batched_tokens] int64 */
    int32_t *req_ids;   /* [max_num_batched_tokens], like the next two */
    int32_t *begin;
    int32_t *end;
    int32_t *q_pe; /* [max_num_batched_tokens, H, R] bf16: turned queries */
    int32_t *k_pe; /* [max_num_batched_tokens, R] bf16: turned keys */
    /* bf16: absorbed queries [max_num_batched_tokens, H, 512], and results, as many or
     * [max_num_batched_tokens, smla_dense_result_values] */
    int32_t *latent;
    int32_t *lse; /* [max_num_batched_tokens, H] fp32 */
    /* Of prefills with context: results over the chunks so far, and over one chunk. */
    int32_t *partial[2];     /* [max_num_batched_tokens, H, Pv] bf16 */
    int32_t *partial_lse[2]; /* [max_num_batched_tokens, H] fp32 */
} smla_dense_made;

struct smla_dense_builder {
    smla_step step;
    smla_dense_config config; /* defaults filled in */
    smla_dense_metadata metadata;
    smla_dense_sent sent;
    smla_dense_made made;
    smla_dense_kept kept;
    smla_rank_share share;         /* what the builder's rank has of every request */
    int64_t workspace_tokens;      /* rows of a chunk at most; 0 on path "mixed" */
    smla_key_ranges_params ranges; /* those of the last build */
    smla_view seq_lens;            /* the caller's, of the last build, like the next two */
    smla_view block_table;
    smla_view slot_mapping;
};

/* ---- plan_dense_context.c ------------------------------------------------------------------ */

/* Lists the arrays of chunks. On path "mixed" they are empty. */
void smla_dense_list_chunks(smla_step *step);

/* The plan's cut_chunks. It also chooses the path of a step whose config leaves it open. */
smla_status smla_dense_cut_chunks(const smla_step *step, const smla_batch *batch,
                                  smla_step_facts *facts, smla_error *error);

/* Fills the arrays of the chunks' parts in `kept`, and in what the host is going to send. */
void smla_dense_fill_chunks(const smla_step *step, const smla_batch *batch,
                            const smla_dense_sent *host);

/* Lists what a binding shows of the chunks; returns how many views. */
int smla_dense_show_chunks(const smla_step *step, smla_step_view *views);
