/* ops_topk.c: the choice of keys by their logits. */
#include "python/call/operator.h"

static const DLDataType int32 = {kDLInt, 32, 1};

/* ---- The largest logits -------------------------------------------------------------------- */

SMLA_PY_COMPUTE(top_k_per_row)

enum { TOP_K_LOGITS, TOP_K_OUT = 6, TOP_K_SLOTS, TOP_K_LENS };

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
    {"k", SMLA_PY_INT, offsetof(smla_top_k_args, k)},
    {"slots_block_size", SMLA_PY_SIZE, offsetof(smla_top_k_args, slots_block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_top_k_args, stream)},
};

/* Allocates nothing for a number that the core refuses. */
static int
allocate_top_k(smla_py_call *call, const void *args)
{
    const smla_top_k_args *const a = args;
    const int64_t shape[2] = {smla_py_call_dim(call, TOP_K_LOGITS, 0), a->k};
    if (!smla_py_has_rank(call, TOP_K_LOGITS, 2) || a->k < 1 || a->k > INT32_MAX) {
        return 0;
    }
    if (smla_py_allocate_result(call, TOP_K_OUT, int32, 2, shape) < 0) {
        return -1;
    }
    return !call->asks ? 0
           : smla_py_allocate_result(call, TOP_K_SLOTS, int32, 2, shape) < 0
               ? -1
               : smla_py_allocate_result(call, TOP_K_LENS, int32, 1, shape);
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_topk_operators[] = {
    {.name = "top_k_per_row",
     SMLA_PY_TABLE(top_k_params, smla_top_k_args, smla_top_k_args),
     .compute = compute_top_k_per_row,
     .allocate = allocate_top_k},
    {.name = NULL},
};
