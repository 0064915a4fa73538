/* params_step.h: the params of what fills the lists of a DeepSeek V4 step. */
#pragma once

#include "core/attention/visible.h"
#include "core/params.h"

enum { SMLA_MAX_STEP_GROUPS = 5 }; /* four ratios, and the indexer's cache */

/* A compressed cache of a step: one row per `ratio` tokens. Vectors have num_rows entries. */
typedef struct smla_step_group {
    int64_t ratio;
    smla_page_table pages;       /* block_size: compressed rows per page */
    smla_page_table state_pages; /* read if there is state_slot_mapping */
    int64_t width;               /* columns of `indices` in use */
    int32_t *slot_mapping;       /* where a token that ends a group has its row, else -1: rows of
                                  * the rank, as in the next ones but the states */
    int32_t *state_slot_mapping; /* where a token has its state, or NULL */
    int32_t *context_lens;       /* complete groups that a token sees */
    int32_t *lens;               /* those of them that `indices` has room for */
    int32_t *indices;            /* [T, width] or NULL: slots of a decode, numbers of a prefill */
    int64_t indices_stride_token;
} smla_step_group;

/* What a step's lists need of block tables and of slot_mapping, which the host cannot read. */
typedef struct smla_step_lists_params {
    smla_call call;
    int64_t num_rows;                /* entries of the vectors; those from T on become -1 or 0 */
    int64_t num_tokens;              /* T, with padding */
    int64_t num_query_tokens;        /* tokens of requests; all others are padding */
    int64_t num_decode_tokens;       /* they come first */
    const int32_t *req_id_per_token; /* [T] */
    const int32_t *positions;        /* [T] */
    const void *slot_mapping;        /* [T]; a token without slot is not valid */
    int64_t slot_stride;
    bool slots_are_int64;
    int64_t window;
    smla_rank_share share; /* the rows of every compressed cache that the rank has, by number */
    smla_page_table swa_pages;
    uint8_t *is_valid;    /* [num_rows] */
    int32_t *swa_indices; /* [T, window] */
    int32_t *swa_lens;    /* [num_rows] */
    int num_groups;
    smla_step_group groups[SMLA_MAX_STEP_GROUPS];
} smla_step_lists_params;

/* The number of a compressed row among the rank's own; -1 if another rank has it. */
SMLA_HOST_DEVICE static inline int64_t
smla_find_own_row(const smla_rank_share *share, int64_t row)
{
    if (share->size == 0) {
        return row;
    }
    const int64_t block = row / share->interleave;
    return smla_own_position(share, row, block, block / share->size);
}
