/* ops_norm.c: norms and RoPE around DeepSeek V4's attention. */
#include "core/params_norm.h"
#include "python/call/operator.h"

static const DLDataType e4m3 = {kDLFloat8_e4m3fn, 8, 1};
static const DLDataType int32 = {kDLInt, 32, 1};

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

static int
allocate_normalized(smla_py_call *call, const void *Py_UNUSED(args))
{
    if (!smla_py_has_rank(call, NORM_Q, 2) || !smla_py_has_rank(call, NORM_KV, 2)) {
        return 0;
    }
    const int64_t *const q = call->arrays[NORM_Q].shape;
    const int64_t *const kv = call->arrays[NORM_KV].shape;
    return smla_py_allocate_result(call, NORM_Q_OUT, smla_py_bf16, 2, q) < 0
               ? -1
               : smla_py_allocate_result(call, NORM_KV_OUT, smla_py_bf16, 2, kv);
}

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
static int
allocate_queries(smla_py_call *call, const void *args)
{
    const smla_qnorm_insert_args *const a = args;
    const bool quantizes =
        call->arrays[QNORM_SCALE_INV].object != NULL || a->q_scale_inv.value != 0;
    if (!quantizes || !smla_py_has_rank(call, QNORM_Q, 3)) {
        return 0;
    }
    return smla_py_allocate_result(call, QNORM_Q_OUT, e4m3, 3, call->arrays[QNORM_Q].shape);
}

/* ---- Inverse RoPE -------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(fused_inv_rope_fp8_quant)

enum { INVERSE_O, INVERSE_OUT = 3, INVERSE_SCALE };

static const smla_py_param inverse_params[] = {
    [INVERSE_O] = {"o", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, o)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, positions)},
    {"cos_sin", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, cos_sin)},
    [INVERSE_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, out)},
    [INVERSE_SCALE] = {"out_scale", SMLA_PY_ASKED_OUTPUT,
                       offsetof(smla_fused_inv_rope_fp8_quant_args, out_scale)},
    {"groups", SMLA_PY_INT, offsetof(smla_fused_inv_rope_fp8_quant_args, groups)},
    {"scale_layout", SMLA_PY_SCALES, offsetof(smla_fused_inv_rope_fp8_quant_args, scale_layout)},
    {"quantize", SMLA_PY_ASK, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_fused_inv_rope_fp8_quant_args, stream)},
};

/* The storage of out is [G, T, values], that of the scales [G, columns, T rounded up]: a group is
 * an operand of a matrix product, and its scales are read by columns. */
static int
allocate_rotated(smla_py_call *call, const void *args)
{
    static const int groups_first[3] = {1, 0, 2};
    static const int columns_before_tokens[3] = {2, 0, 1};
    const smla_fused_inv_rope_fp8_quant_args *const a = args;
    const int64_t num_tokens = smla_py_call_dim(call, INVERSE_O, 0);
    const int64_t num_heads = smla_py_call_dim(call, INVERSE_O, 1);
    if (!smla_py_has_rank(call, INVERSE_O, 3) || !smla_py_is_head_count(num_heads) ||
        a->groups < 1 || num_heads % a->groups != 0) {
        return 0;
    }
    const int64_t heads = num_heads / a->groups;
    const bool quantizes = call->asks || call->arrays[INVERSE_SCALE].object != NULL;
    const int64_t values[3] = {a->groups, num_tokens, heads * SMLA_V4_HEAD_DIM};
    if (smla_py_allocate_ordered(call, INVERSE_OUT, quantizes ? e4m3 : smla_py_bf16, values,
                                 groups_first, num_tokens) < 0) {
        return -1;
    }
    if (!quantizes) {
        return 0;
    }
    const bool is_packed = a->scale_layout == SMLA_SCALES_UE8M0X4;
    const int64_t rows =
        (num_tokens + SMLA_SCALE_ROW_ALIGN - 1) / SMLA_SCALE_ROW_ALIGN * SMLA_SCALE_ROW_ALIGN;
    const int64_t scales[3] = {a->groups, heads * (is_packed ? 1 : SMLA_OUTPUT_SCALES), rows};
    return smla_py_allocate_ordered(call, INVERSE_SCALE, is_packed ? int32 : smla_py_fp32, scales,
                                    columns_before_tokens, num_tokens);
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_norm_operators[] = {
    {.name = "fused_q_kv_rmsnorm",
     SMLA_PY_TABLE(norm_params, smla_fused_q_kv_rmsnorm_args, smla_fused_q_kv_rmsnorm_args),
     .compute = compute_fused_q_kv_rmsnorm,
     .allocate = allocate_normalized},
    {.name = "fused_qnorm_rope_kv_insert",
     SMLA_PY_TABLE(qnorm_params, smla_qnorm_insert_args, smla_qnorm_insert_args),
     .compute = compute_fused_qnorm_rope_kv_insert,
     .writes_first = writes_queries,
     .allocate = allocate_queries},
    {.name = "fused_inv_rope_fp8_quant",
     SMLA_PY_TABLE(inverse_params, smla_fused_inv_rope_fp8_quant_args,
                   smla_fused_inv_rope_fp8_quant_args),
     .compute = compute_fused_inv_rope_fp8_quant,
     .allocate = allocate_rotated},
    {.name = NULL},
};
