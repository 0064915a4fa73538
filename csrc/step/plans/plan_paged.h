/* plan_paged.h: the step of attention to pages. plan_paged.c has its config, its arrays and its
 * metadata, plan_paged_build.c reads a batch and starts the one kernel that fills the arrays.
 */
#pragma once

#include "core/params_paged_step.h"
#include "sparse_mla/paged_step.h"
#include "step/engine.h"

/* The rows of a tree's part. */
typedef struct smla_paged_row_state {
    int32_t *seqlens; /* [steps, max_bs * rows] */
    int32_t *starts;  /* [steps, max_bs * rows + 1] */
    int32_t *slots;   /* [max_bs * rows, slots per row] */
} smla_paged_row_state;

/* The arrays of a mode. NULL: the config needs none. */
typedef struct smla_paged_state {
    int32_t *cache_seqlens; /* [steps, max_bs] */
    int32_t *cu_seqlens_k;  /* [steps, max_bs + 1] */
    int32_t *cu_seqlens_q;  /* [max_bs + 1] */
    int32_t *page_table;    /* [max_bs, W] */
    int32_t *swa_page_table;
    int32_t *swa_cache_loc; /* [most slots of a call] */
    int32_t *leftpad;       /* [max_bs] */
    int32_t *encoder_seqlens;
    int32_t *encoder_starts; /* [max_bs + 1] */
    int32_t *encoder_table;  /* [max_bs, W] */
    int32_t *rest_seqlens;   /* [max_bs] */
    smla_paged_row_state expand;
    smla_paged_row_state swa;
    int32_t *local_starts;  /* [most virtual requests + 1] */
    int32_t *local_seqlens; /* [steps, most virtual requests] */
    int32_t *local_table;   /* [steps, most virtual requests, chunk / page_size] */
    int32_t *prefix;        /* [SMLA_PREFIX_SIZE] */
} smla_paged_state;

/* What the kernel writes, for each row of smla_paged_modes. */
typedef struct smla_paged_made {
    smla_paged_state modes[SMLA_NUM_PAGED_MODES];
    int32_t *token_ids; /* [most query tokens of a mode + 1]: 0, 1, 2, ..., for all modes */
} smla_paged_made;

struct smla_paged_builder {
    smla_step step;
    smla_paged_config config; /* defaults filled in */
    smla_paged_metadata metadata;
    smla_paged_made made;
    int64_t table_width; /* W: pages of the longest request, with drafts */
};

/* A number of a mode that the config decides; `step` is the number of the draft's step. 0 for
 * SMLA_NUMBER_GIVEN. */
static inline int64_t
smla_paged_number(const smla_paged_config *config, smla_mode_number number, int64_t step)
{
    switch (number) {
    case SMLA_NUMBER_ONE: return 1;
    case SMLA_NUMBER_BRANCHES: return config->topk;
    case SMLA_NUMBER_DRAFTS: return config->num_draft_tokens;
    case SMLA_NUMBER_STEP: return step + 1;
    case SMLA_NUMBER_ZERO:
    case SMLA_NUMBER_GIVEN: break;
    }
    return 0;
}

/* ---- Sizes --------------------------------------------------------------------------------- */

/* Whether a config has the arrays of a mode. */
static inline bool
smla_paged_has_mode(const smla_paged_config *config, int mode)
{
    const smla_paged_mode *const row = &smla_paged_modes[mode];
    const bool is_tree = row->rows != SMLA_NUMBER_ZERO;
    const bool is_speculative = mode == SMLA_PAGED_DRAFT_EXTEND || mode == SMLA_PAGED_VERIFY ||
                                mode == SMLA_PAGED_VERIFY_TREE;
    if ((row->is_draft && config->speculative_num_steps == 0) ||
        (!row->is_draft && config->drafts_only) ||
        (is_speculative && config->num_draft_tokens == 0)) {
        return false;
    }
    const bool may_be_tree = row->is_draft || row->query_len == SMLA_NUMBER_DRAFTS;
    return !may_be_tree || is_tree == (config->topk > 1);
}

/* Entries of out_cache_loc that a call may have. */
static inline int64_t
smla_paged_most_loc(const smla_paged_config *config)
{
    const int64_t numbers[] = {config->topk * config->speculative_num_steps,
                               config->num_draft_tokens, 1};
    int64_t most = config->max_num_tokens;
    for (int i = 0; i < 3; i++) {
        most = numbers[i] * config->max_bs > most ? numbers[i] * config->max_bs : most;
    }
    return most;
}

/* Slots of a row: of `expand`, */
static inline int64_t
smla_paged_expand_columns(const smla_paged_config *config, int mode)
{
    return smla_paged_modes[mode].is_draft ? config->speculative_num_steps
                                           : config->num_draft_tokens;
}

/* and of `swa`. */
static inline int64_t
smla_paged_swa_columns(const smla_paged_config *config, int mode)
{
    return config->sliding_window_size + 1 + smla_paged_expand_columns(config, mode);
}

/* Query tokens that a mode has at most. */
static inline int64_t
smla_paged_most_tokens(const smla_paged_config *config, int mode)
{
    const int64_t query_len = smla_paged_number(config, smla_paged_modes[mode].query_len, 0);
    return query_len == 0 ? config->max_num_tokens : config->max_bs * query_len;
}

/* Virtual requests that a mode has at most: a request's queries are in at most two blocks of chunks
 * more than fill them. */
static inline int64_t
smla_paged_most_local(const smla_paged_config *config, int mode)
{
    const int64_t chunk = config->attention_chunk;
    return chunk == 0 ? 0
           : smla_paged_modes[mode].query_len == SMLA_NUMBER_ONE
               ? config->max_bs
               : 2 * config->max_bs + smla_paged_most_tokens(config, mode) / chunk;
}

/* ---- plan_paged_build.c -------------------------------------------------------------------- */

/* A batch as the host knows it. */
typedef struct smla_paged_batch {
    int mode; /* a row of smla_paged_modes */
    int64_t num_steps;
    int64_t query_len; /* tokens per request; 0: they differ */
    int64_t added;     /* in the first step */
    int64_t rows_per_req;
    int64_t max_query_len;
    int64_t max_keys;      /* in the first step */
    int64_t table_columns; /* pages of a request in the last step */
    int64_t max_encoder_len;
    int64_t num_tokens; /* query tokens; an upper bound where only the device knows it */
} smla_paged_batch;

/* Functions of the plan. */
smla_batch smla_paged_read_batch(const void *args);
smla_status smla_paged_check_args(const smla_step *s, const smla_batch *unused, const void *given,
                                  smla_error *error);
smla_status smla_paged_fill_lists(const smla_step *s, const void *given, smla_stream stream,
                                  smla_error *error);

/* Reads a batch that has been checked. */
smla_paged_batch smla_paged_find_batch(const smla_paged_builder *b,
                                       const smla_paged_build_args *args);
