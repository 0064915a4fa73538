/* ops_indexer.c: the operators that choose keys: the indexer's queries. */
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

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_indexer_operators[] = {
    {.name = "fused_indexer_q_rope_quant",
     SMLA_PY_TABLE(query_params, smla_index_query_args, smla_index_query_args),
     .compute = compute_fused_indexer_q_rope_quant,
     .allocate = allocate_query},
    {.name = NULL},
};
