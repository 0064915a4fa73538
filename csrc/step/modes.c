/* modes.c: the tables of modes. */
#include "step/modes.h"

const smla_step_mode smla_step_modes[] = {
    [SMLA_PATH_AUTO] = {.name = "auto", .gathers = true},
    [SMLA_PATH_MIXED] = {.name = "mixed"},
    [SMLA_PATH_SEPARATE] = {.name = "separate", .is_split = true, .gathers = true},
    [SMLA_PATH_BF16] = {.name = "bf16"},
    [SMLA_PATH_DIRECT] = {.name = "direct", .is_split = true},
};

const char *
smla_path_name(smla_path path)
{
    const unsigned num_modes = sizeof smla_step_modes / sizeof smla_step_modes[0];
    return (unsigned)path < num_modes ? smla_step_modes[path].name : NULL;
}

/* ---- Paged steps --------------------------------------------------------------------------- */

const smla_paged_mode smla_paged_modes[SMLA_NUM_PAGED_MODES] = {
    [SMLA_PAGED_DECODE] = {"decode", .query_len = SMLA_NUMBER_ONE, .shares_prefix = true,
                           .may_be_fixed = true},
    [SMLA_PAGED_DRAFT] = {"decode", .query_len = SMLA_NUMBER_ONE, .added = SMLA_NUMBER_STEP,
                          .is_draft = true, .may_be_fixed = true},
    [SMLA_PAGED_DRAFT_TREE] = {"decode", .query_len = SMLA_NUMBER_BRANCHES,
                               .rows = SMLA_NUMBER_BRANCHES, .is_draft = true,
                               .may_be_fixed = true},
    [SMLA_PAGED_VERIFY] = {"target_verify", .query_len = SMLA_NUMBER_DRAFTS,
                           .added = SMLA_NUMBER_DRAFTS, .shares_prefix = true,
                           .may_be_fixed = true},
    [SMLA_PAGED_VERIFY_TREE] = {"target_verify", .query_len = SMLA_NUMBER_DRAFTS,
                                .rows = SMLA_NUMBER_DRAFTS, .may_be_fixed = true},
    [SMLA_PAGED_EXTEND] = {"extend", .query_len = SMLA_NUMBER_GIVEN, .shares_prefix = true},
    [SMLA_PAGED_DRAFT_EXTEND] = {"draft_extend", .query_len = SMLA_NUMBER_GIVEN,
                                 .may_be_fixed = true},
};

int
smla_find_paged_mode(int32_t mode, bool is_tree)
{
    switch (mode) {
    case SMLA_MODE_DECODE: return SMLA_PAGED_DECODE;
    case SMLA_MODE_DRAFT: return is_tree ? SMLA_PAGED_DRAFT_TREE : SMLA_PAGED_DRAFT;
    case SMLA_MODE_TARGET_VERIFY: return is_tree ? SMLA_PAGED_VERIFY_TREE : SMLA_PAGED_VERIFY;
    case SMLA_MODE_EXTEND: return SMLA_PAGED_EXTEND;
    case SMLA_MODE_DRAFT_EXTEND: return SMLA_PAGED_DRAFT_EXTEND;
    default: return -1;
    }
}
