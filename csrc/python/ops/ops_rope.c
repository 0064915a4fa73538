/* ops_rope.c: RoPE of queries and keys, of keys on their way into a cache, and of what attention
 * returns. */
#include "core/params_rope.h"
#include "python/call/operator.h"

/* ---- apply_rope ---------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(apply_rope)

enum { APPLY_Q = 1, APPLY_K, APPLY_Q_OUT = 4, APPLY_K_OUT };

static const smla_py_param apply_params[] = {
    {"positions", SMLA_PY_INPUT, offsetof(smla_apply_rope_args, positions)},
    [APPLY_Q] = {"q_pe", SMLA_PY_INPUT, offsetof(smla_apply_rope_args, q_pe)},
    [APPLY_K] = {"k_pe", SMLA_PY_NULLABLE, offsetof(smla_apply_rope_args, k_pe)},
    {"rope_table", SMLA_PY_INPUT, offsetof(smla_apply_rope_args, rope_table)},
    [APPLY_Q_OUT] = {"q_out", SMLA_PY_OUTPUT, offsetof(smla_apply_rope_args, q_out)},
    [APPLY_K_OUT] = {"k_out", SMLA_PY_OUTPUT_OR_NONE, offsetof(smla_apply_rope_args, k_out)},
    {"interleaved", SMLA_PY_UNLESS, offsetof(smla_apply_rope_args, is_neox)},
    {"inverse", SMLA_PY_FLAG, offsetof(smla_apply_rope_args, inverse)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_apply_rope_args, stream)},
};

static const smla_py_result_row apply_results[] = {
    {.result = APPLY_Q_OUT,
     .dtype = {.source = SMLA_PY_FLOATS_OF_ARRAY, .row = APPLY_Q},
     .dims = {SMLA_PY_ALL_SIZES(APPLY_Q)}},
    {.result = APPLY_K_OUT,
     .when = {SMLA_PY_IF_GIVEN, APPLY_K, 0},
     .dtype = {.source = SMLA_PY_FLOATS_OF_ARRAY, .row = APPLY_K},
     .dims = {SMLA_PY_ALL_SIZES(APPLY_K)}},
};

/* ---- rope_and_cache_mla -------------------------------------------------------------------- */

SMLA_PY_COMPUTE(rope_and_cache_mla)

enum { CACHED_Q = 1, CACHED_Q_OUT = 8 };

static const smla_py_param cached_params[] = {
    {"positions", SMLA_PY_INPUT, offsetof(smla_rope_and_cache_mla_args, positions)},
    [CACHED_Q] = {"q_pe", SMLA_PY_INPUT, offsetof(smla_rope_and_cache_mla_args, q_pe)},
    {"k_pe", SMLA_PY_INPUT, offsetof(smla_rope_and_cache_mla_args, k_pe)},
    {"rope_table", SMLA_PY_INPUT, offsetof(smla_rope_and_cache_mla_args, rope_table)},
    {"kv_c", SMLA_PY_INPUT, offsetof(smla_rope_and_cache_mla_args, kv_c)},
    {"kv_cache", SMLA_PY_INOUT, offsetof(smla_rope_and_cache_mla_args, kv_cache)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_rope_and_cache_mla_args, slot_mapping)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_rope_and_cache_mla_args, kv_scale)},
    [CACHED_Q_OUT] = {"q_out", SMLA_PY_OUTPUT, offsetof(smla_rope_and_cache_mla_args, q_out)},
    {"interleaved", SMLA_PY_UNLESS, offsetof(smla_rope_and_cache_mla_args, is_neox)},
    {"kv_cache_dtype", SMLA_PY_KV_FORMAT, offsetof(smla_rope_and_cache_mla_args, kv_format)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_rope_and_cache_mla_args, stream)},
};

static const smla_py_result_row cached_results[] = {
    {.result = CACHED_Q_OUT,
     .dtype = {.source = SMLA_PY_FLOATS_OF_ARRAY, .row = CACHED_Q},
     .dims = {SMLA_PY_ALL_SIZES(CACHED_Q)}},
};

/* ---- Inverse RoPE -------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(fused_inv_rope_fp8_quant)

enum { INVERSE_O, INVERSE_OUT = 3, INVERSE_SCALE, INVERSE_GROUPS, INVERSE_LAYOUT };

static const smla_py_param inverse_params[] = {
    [INVERSE_O] = {"o", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, o)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, positions)},
    {"rope_table", SMLA_PY_INPUT, offsetof(smla_fused_inv_rope_fp8_quant_args, rope_table)},
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
    {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_SIZE_OF, INVERSE_O, 1),          \
     SMLA_PY_TERM(SMLA_PY_DIVIDE, SMLA_PY_VALUE_OF, INVERSE_GROUPS, 0), \
     SMLA_PY_TERM(SMLA_PY_MULTIPLY, SMLA_PY_CONSTANT, 0, per_head)}

static const smla_py_result_row inverse_results[] = {
    {SMLA_PY_MAKES(INVERSE_OUT, E4M3, SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS),
                   INVERSE_GROUP(SMLA_V4_HEAD_DIM)),
     .when = {.kind = SMLA_PY_IF_ASKED}, .storage = INVERSE_STORAGE},
    {SMLA_PY_MAKES(INVERSE_OUT, BF16, SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS),
                   INVERSE_GROUP(SMLA_V4_HEAD_DIM)),
     .storage = INVERSE_STORAGE},
    {SMLA_PY_MAKES(INVERSE_SCALE, INT32, SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS),
                   INVERSE_GROUP(1)),
     .when = {SMLA_PY_IF_SCALES, INVERSE_LAYOUT, SMLA_SCALES_UE8M0X4},
     .storage = INVERSE_SCALE_STORAGE},
    {SMLA_PY_MAKES(INVERSE_SCALE, FP32, SMLA_PY_SIZE(INVERSE_O, 0), SMLA_PY_VALUE(INVERSE_GROUPS),
                   INVERSE_GROUP(SMLA_OUTPUT_SCALES)),
     .when = {SMLA_PY_IF_SCALES, INVERSE_LAYOUT, SMLA_SCALES_FP32},
     .storage = INVERSE_SCALE_STORAGE},
};

static const smla_py_limit inverse_limits[] = {
    {SMLA_PY_LIMIT_NDIM, INVERSE_O, 3, 3},
    {SMLA_PY_LIMIT_HEADS, INVERSE_O, 1, SMLA_MAX_HEADS},
    {SMLA_PY_LIMIT_VALUE, INVERSE_GROUPS, 1, SMLA_MAX_HEADS},
};

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_rope_operators[] = {
    {SMLA_PY_MAKING_OPERATOR(apply_rope, apply, smla_apply_rope_args)},
    {SMLA_PY_MAKING_OPERATOR(rope_and_cache_mla, cached, smla_rope_and_cache_mla_args)},
    {SMLA_PY_OPERATOR(fused_inv_rope_fp8_quant, inverse, smla_fused_inv_rope_fp8_quant_args)},
    {.name = NULL},
};
