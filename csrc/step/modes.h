/* modes.h: the modes of a step. A path is a mode: a row that says which attention calls a layer
 * makes, and where they find their keys. A paged step has its forward mode instead: a row of
 * numbers of tokens. Plans and layers read the row; they do not ask for paths. Defined in modes.c.
 */
#pragma once

#include <stdbool.h>

#include "sparse_mla/paged_step.h"
#include "sparse_mla/step.h"

typedef struct smla_step_mode {
    const char *name;
    bool is_split; /* decodes, which come first, have a call of their own; else tokens share one */
    bool gathers;  /* prefills attend to a workspace, chunk by chunk; else to the cache */
} smla_step_mode;

/* By smla_path. What a config may leave open has all memory that its steps may need. */
extern const smla_step_mode smla_step_modes[];

/* Where a paged mode takes a number from. */
typedef enum smla_mode_number {
    SMLA_NUMBER_ZERO = 0,
    SMLA_NUMBER_ONE,
    SMLA_NUMBER_BRANCHES, /* topk of the config */
    SMLA_NUMBER_DRAFTS,   /* num_draft_tokens of the config */
    SMLA_NUMBER_STEP,     /* the number of the draft's step, and 1 */
    SMLA_NUMBER_GIVEN,    /* extend_seq_lens, a number for each request */
} smla_mode_number;

typedef struct smla_paged_mode {
    const char *name;
    smla_mode_number query_len; /* query tokens per request */
    smla_mode_number added;     /* tokens of this step, which seq_lens leaves out, per request */
    smla_mode_number rows;      /* rows of the tree's part per request; ZERO: there is no tree */
    bool is_draft;              /* a step of a draft, which the call numbers */
    bool shares_prefix;         /* common_prefix_len may be given */
    bool may_be_fixed;          /* the number of query tokens does not depend on the batch */
} smla_paged_mode;

/* The rows of smla_paged_modes: the modes, those that may be trees twice. */
enum {
    SMLA_PAGED_DECODE,
    SMLA_PAGED_DRAFT,
    SMLA_PAGED_DRAFT_TREE,
    SMLA_PAGED_VERIFY,
    SMLA_PAGED_VERIFY_TREE,
    SMLA_PAGED_EXTEND,
    SMLA_PAGED_DRAFT_EXTEND,
    SMLA_NUM_PAGED_MODES,
};

extern const smla_paged_mode smla_paged_modes[SMLA_NUM_PAGED_MODES];

/* The number of the row of a mode; -1: there is no such mode. */
int smla_find_paged_mode(int32_t mode, bool is_tree);
