/* ops_norm.c: norms around DeepSeek V4's attention. */
#include "core/params_norm.h"
#include "python/call/operator.h"

/* ---- RMSNorm ------------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(fused_q_kv_rmsnorm)

enum { NORM_Q, NORM_KV, NORM_Q_OUT = 4, NORM_KV_OUT };

static const smla_py_param norm_params[] = {
    [NORM_Q] = {"q", SMLA_PY_INPUT, offsetof(smla_fused_q_kv_rmsnorm_args, q)},
    [NORM_KV] = {"kv", SMLA_PY_INPUT, offsetof(smla_fused_q_kv_rmsnorm_args, kv)},
    {"q_weight", SMLA_PY_INPUT, offsetof(smla_fused_q_kv_rmsnorm_args, q_weight)},
    {"kv_weight", SMLA_PY_INPUT, offsetof(smla_fused_q_kv_rmsnorm_args, kv_weight)},
    [NORM_Q_OUT] = {"q_out", SMLA_PY_OUTPUT, offsetof(smla_fused_q_kv_rmsnorm_args, q_out)},
    [NORM_KV_OUT] = {"kv_out", SMLA_PY_OUTPUT, offsetof(smla_fused_q_kv_rmsnorm_args, kv_out)},
    {"eps", SMLA_PY_FLOAT, offsetof(smla_fused_q_kv_rmsnorm_args, eps)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_fused_q_kv_rmsnorm_args, stream)},
};

static const smla_py_result_row norm_results[] = {
    {SMLA_PY_MAKES(NORM_Q_OUT, BF16, SMLA_PY_ALL_SIZES(NORM_Q))},
    {SMLA_PY_MAKES(NORM_KV_OUT, BF16, SMLA_PY_ALL_SIZES(NORM_KV))},
};

static const smla_py_limit norm_limits[] = {
    {SMLA_PY_LIMIT_NDIM, NORM_Q, 2, 2},
    {SMLA_PY_LIMIT_NDIM, NORM_KV, 2, 2},
};

/* ---- Queries and keys ---------------------------------------------------------------------- */

SMLA_PY_COMPUTE(fused_qnorm_rope_kv_insert)

enum { QNORM_Q, QNORM_SCALE_INV = 6, QNORM_Q_OUT = 8 };

static const smla_py_param qnorm_params[] = {
    [QNORM_Q] = {"q", SMLA_PY_INPUT, offsetof(smla_qnorm_insert_args, q)},
    {"kv", SMLA_PY_INPUT, offsetof(smla_qnorm_insert_args, kv)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_qnorm_insert_args, positions)},
    {"rope_table", SMLA_PY_INPUT, offsetof(smla_qnorm_insert_args, rope_table)},
    {"kv_cache", SMLA_PY_INOUT, offsetof(smla_qnorm_insert_args, kv_cache)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_qnorm_insert_args, slot_mapping)},
    [QNORM_SCALE_INV] = {"q_scale_inv", SMLA_PY_SCALE_OR_NONE,
                         offsetof(smla_qnorm_insert_args, q_scale_inv)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_qnorm_insert_args, kv_scale)},
    [QNORM_Q_OUT] = {"q_out", SMLA_PY_OVER_FIRST, offsetof(smla_qnorm_insert_args, q_out)},
    {"eps", SMLA_PY_FLOAT, offsetof(smla_qnorm_insert_args, eps)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_qnorm_insert_args, kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_qnorm_insert_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_qnorm_insert_args, stream)},
};

static bool
writes_queries(PyObject *const *values)
{
    return values[QNORM_Q_OUT] == Py_None && values[QNORM_SCALE_INV] == Py_None;
}

/* q_out is new where it is quantised. */
static const smla_py_result_row qnorm_results[] = {
    {SMLA_PY_MAKES(QNORM_Q_OUT, E4M3, SMLA_PY_ALL_SIZES(QNORM_Q)),
     .when = {SMLA_PY_IF_GIVEN, QNORM_SCALE_INV, 0}},
    {SMLA_PY_MAKES(QNORM_Q_OUT, BF16, SMLA_PY_ALL_SIZES(QNORM_Q))},
};

static const smla_py_limit qnorm_limits[] = {{SMLA_PY_LIMIT_NDIM, QNORM_Q, 3, 3}};

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_norm_operators[] = {
    {SMLA_PY_OPERATOR(fused_q_kv_rmsnorm, norm, smla_fused_q_kv_rmsnorm_args)},
    {SMLA_PY_PLAIN_OPERATOR(fused_qnorm_rope_kv_insert, qnorm, smla_qnorm_insert_args),
     .writes_first = writes_queries, SMLA_PY_RESULTS(qnorm_results), SMLA_PY_LIMITS(qnorm_limits)},
    {.name = NULL},
};
