/* ops_topk.c: the choice of keys by their logits. */
#include "python/call/operator.h"

/* ---- The largest logits -------------------------------------------------------------------- */

SMLA_PY_COMPUTE(top_k_per_row)

enum { TOP_K_LOGITS, TOP_K_OUT = 6, TOP_K_SLOTS, TOP_K_LENS, TOP_K_K = 10 };

static const smla_py_param top_k_params[] = {
    [TOP_K_LOGITS] = {"logits", SMLA_PY_INPUT, offsetof(smla_top_k_args, logits)},
    {"starts", SMLA_PY_INPUT, offsetof(smla_top_k_args, starts)},
    {"ends", SMLA_PY_INPUT, offsetof(smla_top_k_args, ends)},
    {"slots_block_table", SMLA_PY_ASKING, offsetof(smla_top_k_args, slots_block_table)},
    {"req_id_per_token", SMLA_PY_OPTIONAL, offsetof(smla_top_k_args, req_id_per_token)},
    {"is_valid", SMLA_PY_OPTIONAL, offsetof(smla_top_k_args, is_valid)},
    [TOP_K_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_top_k_args, out)},
    [TOP_K_SLOTS] = {"slots", SMLA_PY_ASKED_OUTPUT, offsetof(smla_top_k_args, slots)},
    [TOP_K_LENS] = {"lens", SMLA_PY_ASKED_OUTPUT, offsetof(smla_top_k_args, lens)},
    {"values", SMLA_PY_WORKSPACE, offsetof(smla_top_k_args, values)},
    [TOP_K_K] = {"k", SMLA_PY_INT, offsetof(smla_top_k_args, k)},
    {"slots_block_size", SMLA_PY_SIZE, offsetof(smla_top_k_args, slots_block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_top_k_args, stream)},
};

static const smla_py_result_row top_k_results[] = {
    {SMLA_PY_MAKES(TOP_K_OUT, INT32, SMLA_PY_SIZE(TOP_K_LOGITS, 0), SMLA_PY_VALUE(TOP_K_K))},
    {SMLA_PY_MAKES(TOP_K_SLOTS, INT32, SMLA_PY_SIZE(TOP_K_LOGITS, 0), SMLA_PY_VALUE(TOP_K_K))},
    {SMLA_PY_MAKES(TOP_K_LENS, INT32, SMLA_PY_SIZE(TOP_K_LOGITS, 0))},
};

static const smla_py_limit top_k_limits[] = {
    {SMLA_PY_LIMIT_NDIM, TOP_K_LOGITS, 2, 2},
    {SMLA_PY_LIMIT_VALUE, TOP_K_K, 1, INT32_MAX},
};

/* ---- Lists of several devices -------------------------------------------------------------- */

SMLA_PY_COMPUTE(top_k_merge)

enum { MERGE_INDICES, MERGE_OUT = 2, MERGE_K };

static const smla_py_param merge_params[] = {
    [MERGE_INDICES] = {"indices", SMLA_PY_INPUT, offsetof(smla_top_k_merge_args, indices)},
    {"values", SMLA_PY_INPUT, offsetof(smla_top_k_merge_args, values)},
    [MERGE_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_top_k_merge_args, out)},
    [MERGE_K] = {"k", SMLA_PY_INT, offsetof(smla_top_k_merge_args, k)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_top_k_merge_args, stream)},
};

static const smla_py_result_row merge_results[] = {
    {SMLA_PY_MAKES(MERGE_OUT, INT32, SMLA_PY_SIZE(MERGE_INDICES, 1), SMLA_PY_VALUE(MERGE_K))},
};

static const smla_py_limit merge_limits[] = {
    {SMLA_PY_LIMIT_NDIM, MERGE_INDICES, 3, 3},
    {SMLA_PY_LIMIT_VALUE, MERGE_K, 1, INT32_MAX},
};

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_topk_operators[] = {
    {SMLA_PY_OPERATOR(top_k_per_row, top_k, smla_top_k_args)},
    {SMLA_PY_OPERATOR(top_k_merge, merge, smla_top_k_merge_args)},
    {.name = NULL},
};
