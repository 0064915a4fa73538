/* ops_norm.c: norms and RoPE around DeepSeek V4's attention. */
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
    {.result = NORM_Q_OUT, .dtype = SMLA_PY_MAKES_BF16, .dims = {SMLA_PY_ALL_SIZES(NORM_Q)}},
    {.result = NORM_KV_OUT, .dtype = SMLA_PY_MAKES_BF16, .dims = {SMLA_PY_ALL_SIZES(NORM_KV)}},
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
    {"cos_sin", SMLA_PY_INPUT, offsetof(smla_qnorm_insert_args, cos_sin)},
    {"cache", SMLA_PY_INOUT, offsetof(smla_qnorm_insert_args, cache)},
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
    {.result = QNORM_Q_OUT,
     .when = {SMLA_PY_IF_GIVEN, QNORM_SCALE_INV, 0},
     .dtype = SMLA_PY_MAKES_E4M3,
     .dims = {SMLA_PY_ALL_SIZES(QNORM_Q)}},
    {.result = QNORM_Q_OUT, .dtype = SMLA_PY_MAKES_BF16, .dims = {SMLA_PY_ALL_SIZES(QNORM_Q)}},
};

static const smla_py_limit qnorm_limits[] = {{SMLA_PY_LIMIT_NDIM, QNORM_Q, 3, 3}};

/* ---- Inverse RoPE -------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(fused_inv_rope_fp8_quant)

enum { INVERSE_O, INVERSE_OUT = 3, INVERSE_SCALE, INVERSE_GROUPS, INVERSE_LAYOUT };

static const smla_py_param inverse_params[] = {
    [INVERSE_O] = {"o", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, o)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, positions)},
    {"cos_sin", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, cos_sin)},
    [INVERSE_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, out)},
    [INVERSE_SCALE] = {"out_scale", SMLA_PY_ASKED_OUTPUT,
                       offsetof(smla_fused_inv_rope_fp8_quant_args, out_scale)},
    [INVERSE_GROUPS] = {"groups", SMLA_PY_INT,
                        offsetof(smla_fused_inv_rope_fp8_quant_args, groups)},
    [INVERSE_LAYOUT] = {"scale_layout", SMLA_PY_SCALES,
                        offsetof(smla_fused_inv_rope_fp8_quant_args, scale_layout)},
    {"quantize", SMLA_PY_ASK, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_fused_inv_rope_fp8_quant_args, stream)},
};

/* The storage of out is [G, T, values], that of the scales [G, columns, T rounded up]: a group is
 * an operand of a matrix product, and its scales are read by columns. */
#define INVERSE_STORAGE       {.order = {1, 0, 2}, .multiple = 1}
#define INVERSE_SCALE_STORAGE {.order = {2, 0, 1}, .multiple = SMLA_SCALE_ROW_ALIGN}
/* A group's dimension, with so many values or scales per head. */
#define INVERSE_GROUP(per_head)                                         \
    {SMLA_PY_STEP(SMLA_PY_ADD, SMLA_PY_SIZE_OF, INVERSE_O, 1),          \
     SMLA_PY_STEP(SMLA_PY_DIVIDE, SMLA_PY_VALUE_OF, INVERSE_GROUPS, 0), \
     SMLA_PY_STEP(SMLA_PY_MULTIPLY, SMLA_PY_CONSTANT, 0, per_head)}

static const smla_py_result_row inverse_results[] = {
    {.result = INVERSE_OUT,
     .when = {.kind = SMLA_PY_IF_ASKED},
     .dtype = SMLA_PY_MAKES_E4M3,
     .dims = {SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS),
              INVERSE_GROUP(SMLA_V4_HEAD_DIM)},
     .storage = INVERSE_STORAGE},
    {.result = INVERSE_OUT,
     .dtype = SMLA_PY_MAKES_BF16,
     .dims = {SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS),
              INVERSE_GROUP(SMLA_V4_HEAD_DIM)},
     .storage = INVERSE_STORAGE},
    {.result = INVERSE_SCALE,
     .when = {SMLA_PY_IF_SCALES, INVERSE_LAYOUT, SMLA_SCALES_UE8M0X4},
     .dtype = SMLA_PY_MAKES_INT32,
     .dims = {SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS), INVERSE_GROUP(1)},
     .storage = INVERSE_SCALE_STORAGE},
    {.result = INVERSE_SCALE,
     .when = {SMLA_PY_IF_SCALES, INVERSE_LAYOUT, SMLA_SCALES_FP32},
     .dtype = SMLA_PY_MAKES_FP32,
     .dims = {SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS),
              INVERSE_GROUP(SMLA_OUTPUT_SCALES)},
     .storage = INVERSE_SCALE_STORAGE},
};

static const smla_py_limit inverse_limits[] = {
    {SMLA_PY_LIMIT_NDIM, INVERSE_O, 3, 3},
    {SMLA_PY_LIMIT_HEADS, INVERSE_O, 1, SMLA_MAX_HEADS},
    {SMLA_PY_LIMIT_VALUE, INVERSE_GROUPS, 1, SMLA_MAX_HEADS},
};

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_norm_operators[] = {
    {.name = "fused_q_kv_rmsnorm",
     SMLA_PY_TABLE(norm_params, smla_fused_q_kv_rmsnorm_args, smla_fused_q_kv_rmsnorm_args),
     .compute = compute_fused_q_kv_rmsnorm,
     SMLA_PY_RESULTS(norm_results),
     SMLA_PY_LIMITS(norm_limits)},
    {.name = "fused_qnorm_rope_kv_insert",
     SMLA_PY_TABLE(qnorm_params, smla_qnorm_insert_args, smla_qnorm_insert_args),
     .compute = compute_fused_qnorm_rope_kv_insert,
     .writes_first = writes_queries,
     SMLA_PY_RESULTS(qnorm_results),
     SMLA_PY_LIMITS(qnorm_limits)},
    {.name = "fused_inv_rope_fp8_quant",
     SMLA_PY_TABLE(inverse_params, smla_fused_inv_rope_fp8_quant_args,
                   smla_fused_inv_rope_fp8_quant_args),
     .compute = compute_fused_inv_rope_fp8_quant,
     SMLA_PY_RESULTS(inverse_results),
     SMLA_PY_LIMITS(inverse_limits)},
    {.name = NULL},
};
