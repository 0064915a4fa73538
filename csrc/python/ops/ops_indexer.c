/* ops_indexer.c: the operators that choose keys: the indexer's queries, its logits. */
#include "python/call/operator.h"

static const DLDataType uint8 = {kDLUInt, 8, 1};
static const DLDataType e4m3 = {kDLFloat8_e4m3fn, 8, 1};

/* ---- Queries ------------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(fused_indexer_q_rope_quant)

enum { QUERY_Q, QUERY_OUT = 4, QUERY_WEIGHTS, QUERY_SCALE };

static const smla_py_param query_params[] = {
    [QUERY_Q] = {"q", SMLA_PY_INPUT, offsetof(smla_index_query_args, q)},
    {"weights", SMLA_PY_INPUT, offsetof(smla_index_query_args, weights)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_index_query_args, positions)},
    {"cos_sin", SMLA_PY_INPUT, offsetof(smla_index_query_args, cos_sin)},
    [QUERY_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_index_query_args, out)},
    [QUERY_WEIGHTS] = {"out_weights", SMLA_PY_OUTPUT, offsetof(smla_index_query_args, out_weights)},
    [QUERY_SCALE] = {"out_scale", SMLA_PY_ASKED_OUTPUT, offsetof(smla_index_query_args, out_scale)},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_index_query_args, softmax_scale)},
    {"head_scale", SMLA_PY_FLOAT, offsetof(smla_index_query_args, head_scale)},
    {"use_fp4", SMLA_PY_ASK, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_index_query_args, stream)},
};

static int
allocate_query(smla_py_call *call, const void *Py_UNUSED(args))
{
    const int64_t num_heads = smla_py_call_dim(call, QUERY_Q, 1);
    const bool is_fp4 = call->asks || call->arrays[QUERY_SCALE].object != NULL;
    const int64_t values[3] = {smla_py_call_dim(call, QUERY_Q, 0), num_heads,
                               is_fp4 ? SMLA_INDEX_HEAD_DIM / 2 : SMLA_INDEX_HEAD_DIM};
    const int64_t scales[3] = {values[0], num_heads, 4};
    if (!smla_py_has_rank(call, QUERY_Q, 3)) {
        return 0;
    }
    if (smla_py_allocate_result(call, QUERY_OUT, is_fp4 ? uint8 : e4m3, 3, values) < 0 ||
        smla_py_allocate_result(call, QUERY_WEIGHTS, smla_py_fp32, 2, values) < 0) {
        return -1;
    }
    return is_fp4 ? smla_py_allocate_result(call, QUERY_SCALE, uint8, 3, scales) : 0;
}

/* ---- Logits -------------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(indexer_logits)

typedef struct logits_args {
    smla_indexer_logits_args core;
    DLDataType dtype;
} logits_args;

enum { LOGITS_Q, LOGITS_K = 2, LOGITS_K_SCALE, LOGITS_TABLE = 5, LOGITS_OUT = 9 };

static const smla_py_param logits_params[] = {
    [LOGITS_Q] = {"q", SMLA_PY_INPUT, offsetof(logits_args, core.q)},
    {"weights", SMLA_PY_INPUT, offsetof(logits_args, core.weights)},
    [LOGITS_K] = {"k_cache", SMLA_PY_PAIR, offsetof(logits_args, core.k_cache)},
    [LOGITS_K_SCALE] = {"k_scale", SMLA_PY_SECOND, offsetof(logits_args, core.k_scale)},
    {"context_lens", SMLA_PY_INPUT, offsetof(logits_args, core.context_lens)},
    [LOGITS_TABLE] = {"block_table", SMLA_PY_OPTIONAL, offsetof(logits_args, core.block_table)},
    {"req_id_per_token", SMLA_PY_OPTIONAL, offsetof(logits_args, core.req_id_per_token)},
    {"starts", SMLA_PY_OPTIONAL, offsetof(logits_args, core.starts)},
    {"q_scale", SMLA_PY_OPTIONAL, offsetof(logits_args, core.q_scale)},
    [LOGITS_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(logits_args, core.out)},
    {"clean", SMLA_PY_UNLESS, offsetof(logits_args, core.leaves_rest)},
    {"dtype", SMLA_PY_FLOATS, offsetof(logits_args, dtype)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(logits_args, core.kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(logits_args, core.block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(logits_args, core.stream)},
};

/* As many columns as a request's pages have keys, or as there are flat keys. */
static int
allocate_logits(smla_py_call *call, const void *args)
{
    const logits_args *const a = args;
    const bool is_flat = call->arrays[LOGITS_K_SCALE].object != NULL;
    const int ndim = call->arrays[LOGITS_K].view.ndim;
    const int64_t block_size = ndim == 2 ? a->core.block_size : smla_py_call_dim(call, LOGITS_K, 1);
    int64_t shape[2] = {smla_py_call_dim(call, LOGITS_Q, 0), smla_py_call_dim(call, LOGITS_K, 0)};
    const bool is_known =
        is_flat ? ndim == 2
                : ndim >= 2 && smla_py_has_rank(call, LOGITS_TABLE, 2) && block_size <= INT32_MAX;
    if (!smla_py_has_rank(call, LOGITS_Q, 3) || !is_known) {
        return 0;
    }
    if (!is_flat &&
        __builtin_mul_overflow(smla_py_call_dim(call, LOGITS_TABLE, 1), block_size, &shape[1])) {
        return 0;
    }
    return smla_py_allocate_result(call, LOGITS_OUT, a->dtype, 2, shape);
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_indexer_operators[] = {
    {.name = "fused_indexer_q_rope_quant",
     SMLA_PY_TABLE(query_params, smla_index_query_args, smla_index_query_args),
     .compute = compute_fused_indexer_q_rope_quant,
     .allocate = allocate_query},
    {.name = "indexer_logits",
     SMLA_PY_TABLE(logits_params, smla_indexer_logits_args, logits_args),
     .compute = compute_indexer_logits,
     .allocate = allocate_logits},
    {.name = NULL},
};
