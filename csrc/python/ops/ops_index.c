/* ops_index.c: positions become slots, and the index lists of DeepSeek V4. */
#include "python/call/operator.h"

static const DLDataType int32 = {kDLInt, 32, 1};

/* Allocates index lists [tokens, width] and their lengths, unless the caller gave them. */
static int
allocate_lists(smla_py_call *call, int out, int lens, int64_t num_tokens, int64_t width)
{
    const int64_t shape[2] = {num_tokens, width};
    return smla_py_allocate_result(call, out, int32, 2, shape) < 0
               ? -1
               : smla_py_allocate_result(call, lens, int32, 1, shape);
}

/* Whether sizes are so small that an array of them can exist. */
static bool
is_size(int64_t value)
{
    return value >= 0 && value <= INT32_MAX;
}

static int64_t
round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* ---- Positions to slots -------------------------------------------------------------------- */

SMLA_PY_COMPUTE(convert_req_index_to_global_index)

enum { CONVERT_TOPK = 2, CONVERT_OUT = 5, CONVERT_COUNTS };

static const smla_py_param convert_params[] = {
    {"req_id_per_token", SMLA_PY_INPUT, offsetof(smla_convert_req_index_args, req_id_per_token)},
    {"block_table", SMLA_PY_INPUT, offsetof(smla_convert_req_index_args, block_table)},
    [CONVERT_TOPK] = {"topk_indices", SMLA_PY_INPUT,
                      offsetof(smla_convert_req_index_args, topk_indices)},
    {"prefill_request_ids", SMLA_PY_OPTIONAL,
     offsetof(smla_convert_req_index_args, prefill_request_ids)},
    {"prefill_workspace_starts", SMLA_PY_OPTIONAL,
     offsetof(smla_convert_req_index_args, prefill_workspace_starts)},
    [CONVERT_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_convert_req_index_args, out)},
    [CONVERT_COUNTS] = {"counts", SMLA_PY_ASKED_RESULT,
                        offsetof(smla_convert_req_index_args, counts)},
    {"block_size", SMLA_PY_INT, offsetof(smla_convert_req_index_args, block_size)},
    {"valid_counts", SMLA_PY_ASK, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_convert_req_index_args, stream)},
};

static int
allocate_converted(smla_py_call *call, const void *Py_UNUSED(args))
{
    if (!smla_py_has_rank(call, CONVERT_TOPK, 2)) {
        return 0;
    }
    const int64_t *const shape = call->arrays[CONVERT_TOPK].shape;
    if (smla_py_allocate_result(call, CONVERT_OUT, int32, 2, shape) < 0) {
        return -1;
    }
    return call->asks ? smla_py_allocate_result(call, CONVERT_COUNTS, int32, 1, shape) : 0;
}

/* ---- Top-k positions to slots -------------------------------------------------------------- */

SMLA_PY_COMPUTE(compute_global_topk_indices_and_lens)

enum { GLOBAL_TOPK, GLOBAL_OUT = 4, GLOBAL_LENS };

static const smla_py_param global_topk_params[] = {
    [GLOBAL_TOPK] = {"topk_indices", SMLA_PY_INPUT, offsetof(smla_topk_slots_args, topk_indices)},
    {"req_id_per_token", SMLA_PY_INPUT, offsetof(smla_topk_slots_args, req_id_per_token)},
    {"block_table", SMLA_PY_INPUT, offsetof(smla_topk_slots_args, block_table)},
    {"is_valid", SMLA_PY_OPTIONAL, offsetof(smla_topk_slots_args, is_valid)},
    [GLOBAL_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_topk_slots_args, out)},
    [GLOBAL_LENS] = {"lens", SMLA_PY_OUTPUT, offsetof(smla_topk_slots_args, lens)},
    {"block_size", SMLA_PY_INT, offsetof(smla_topk_slots_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_topk_slots_args, stream)},
};

static int
allocate_global_topk(smla_py_call *call, const void *Py_UNUSED(args))
{
    return !smla_py_has_rank(call, GLOBAL_TOPK, 2)
               ? 0
               : allocate_lists(call, GLOBAL_OUT, GLOBAL_LENS,
                                smla_py_call_dim(call, GLOBAL_TOPK, 0),
                                smla_py_call_dim(call, GLOBAL_TOPK, 1));
}

/* ---- Workspace rows of a prefill chunk ----------------------------------------------------- */

SMLA_PY_COMPUTE(combine_topk_swa_indices)

enum { COMBINE_TOPK, COMBINE_OUT = 4, COMBINE_LENS };

static const smla_py_param combine_params[] = {
    [COMBINE_TOPK] = {"topk_indices", SMLA_PY_INPUT,
                      offsetof(smla_combine_topk_swa_args, topk_indices)},
    {"query_start_loc", SMLA_PY_INPUT, offsetof(smla_combine_topk_swa_args, query_start_loc)},
    {"seq_lens", SMLA_PY_INPUT, offsetof(smla_combine_topk_swa_args, seq_lens)},
    {"gather_lens", SMLA_PY_INPUT, offsetof(smla_combine_topk_swa_args, gather_lens)},
    [COMBINE_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_combine_topk_swa_args, out)},
    [COMBINE_LENS] = {"lens", SMLA_PY_OUTPUT, offsetof(smla_combine_topk_swa_args, lens)},
    {"window", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, window)},
    {"ratio", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, ratio)},
    {"topk", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, topk)},
    {"M", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, M)},
    {"N", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, N)},
    {"align", SMLA_PY_INT, offsetof(smla_combine_topk_swa_args, align)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_combine_topk_swa_args, stream)},
};

/* Allocates nothing for numbers that the core refuses. */
static int
allocate_combined(smla_py_call *call, const void *args)
{
    const smla_combine_topk_swa_args *const a = args;
    const bool is_good = smla_py_has_rank(call, COMBINE_TOPK, 2) && is_size(a->window) &&
                         is_size(a->align - 1) && is_size(a->align) && a->topk >= 0 &&
                         a->topk <= smla_py_call_dim(call, COMBINE_TOPK, 1);
    return !is_good ? 0
                    : allocate_lists(call, COMBINE_OUT, COMBINE_LENS,
                                     smla_py_call_dim(call, COMBINE_TOPK, 0),
                                     round_up(a->topk + a->window, a->align));
}

/* ---- Slots of a mixed batch ---------------------------------------------------------------- */

SMLA_PY_COMPUTE(build_mixed_sparse_indices)

enum {
    MIXED_SWA,
    MIXED_COMPRESSED,
    MIXED_PREFILL = 3,
    MIXED_REQ_IDS = 6,
    MIXED_OUT = 10,
    MIXED_LENS
};

static const smla_py_param mixed_params[] = {
    [MIXED_SWA] = {"decode_swa_indices", SMLA_PY_OPTIONAL,
                   offsetof(smla_mixed_indices_args, decode_swa_indices)},
    [MIXED_COMPRESSED] = {"decode_compressed_indices", SMLA_PY_OPTIONAL,
                          offsetof(smla_mixed_indices_args, decode_compressed_indices)},
    {"decode_compressed_lens", SMLA_PY_OPTIONAL,
     offsetof(smla_mixed_indices_args, decode_compressed_lens)},
    [MIXED_PREFILL] = {"prefill_topk_indices", SMLA_PY_OPTIONAL,
                       offsetof(smla_mixed_indices_args, prefill_topk_indices)},
    {"query_start_loc", SMLA_PY_INPUT, offsetof(smla_mixed_indices_args, query_start_loc)},
    {"seq_lens", SMLA_PY_INPUT, offsetof(smla_mixed_indices_args, seq_lens)},
    [MIXED_REQ_IDS] = {"req_id_per_token", SMLA_PY_INPUT,
                       offsetof(smla_mixed_indices_args, req_id_per_token)},
    {"swa_block_table", SMLA_PY_INPUT, offsetof(smla_mixed_indices_args, swa_block_table)},
    {"compressed_block_table", SMLA_PY_OPTIONAL,
     offsetof(smla_mixed_indices_args, compressed_block_table)},
    {"is_valid", SMLA_PY_OPTIONAL, offsetof(smla_mixed_indices_args, is_valid)},
    [MIXED_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_mixed_indices_args, out)},
    [MIXED_LENS] = {"lens", SMLA_PY_OUTPUT, offsetof(smla_mixed_indices_args, lens)},
    {"swa_block_size", SMLA_PY_INT, offsetof(smla_mixed_indices_args, swa_block_size)},
    {"compressed_block_size", SMLA_PY_INT,
     offsetof(smla_mixed_indices_args, compressed_block_size)},
    {"window", SMLA_PY_INT, offsetof(smla_mixed_indices_args, window)},
    {"ratio", SMLA_PY_INT, offsetof(smla_mixed_indices_args, ratio)},
    {"topk", SMLA_PY_INT, offsetof(smla_mixed_indices_args, topk)},
    {"decode_indices_are_local", SMLA_PY_FLAG,
     offsetof(smla_mixed_indices_args, decode_indices_are_local)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_mixed_indices_args, stream)},
};

/* Allocates nothing for numbers that the core refuses. */
static int
allocate_mixed(smla_py_call *call, const void *args)
{
    const smla_mixed_indices_args *const a = args;
    const int64_t num_decode_tokens = smla_py_call_dim(call, MIXED_SWA, 0);
    const int64_t num_tokens = call->arrays[MIXED_PREFILL].object == NULL
                                   ? smla_py_call_dim(call, MIXED_REQ_IDS, 0)
                                   : num_decode_tokens + smla_py_call_dim(call, MIXED_PREFILL, 0);
    const int64_t decode_topk = smla_py_call_dim(call, MIXED_COMPRESSED, 1);
    const bool is_good = is_size(a->window) && is_size(a->topk) && is_size(decode_topk) &&
                         num_tokens <= smla_py_call_dim(call, MIXED_REQ_IDS, 0);
    const int64_t topk = a->topk > decode_topk ? a->topk : decode_topk;
    return !is_good ? 0
                    : allocate_lists(call, MIXED_OUT, MIXED_LENS, num_tokens,
                                     a->window + round_up(topk, 4));
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_index_operators[] = {
    {.name = "convert_req_index_to_global_index",
     SMLA_PY_TABLE(convert_params, smla_convert_req_index_args, smla_convert_req_index_args),
     .compute = compute_convert_req_index_to_global_index,
     .allocate = allocate_converted},
    {.name = "compute_global_topk_indices_and_lens",
     SMLA_PY_TABLE(global_topk_params, smla_topk_slots_args, smla_topk_slots_args),
     .compute = compute_compute_global_topk_indices_and_lens,
     .allocate = allocate_global_topk},
    {.name = "combine_topk_swa_indices",
     SMLA_PY_TABLE(combine_params, smla_combine_topk_swa_args, smla_combine_topk_swa_args),
     .compute = compute_combine_topk_swa_indices,
     .allocate = allocate_combined},
    {.name = "build_mixed_sparse_indices",
     SMLA_PY_TABLE(mixed_params, smla_mixed_indices_args, smla_mixed_indices_args),
     .compute = compute_build_mixed_sparse_indices,
     .allocate = allocate_mixed},
    {.name = NULL},
};
