/* ops_compressor.c: DeepSeek V4's compressor. */
#include "python/call/operator.h"

/* ---- States -------------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(save_partial_states)

static const smla_py_param save_params[] = {
    {"kv", SMLA_PY_INPUT, offsetof(smla_partial_states_args, kv)},
    {"score", SMLA_PY_INPUT, offsetof(smla_partial_states_args, score)},
    {"ape", SMLA_PY_INPUT, offsetof(smla_partial_states_args, ape)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_partial_states_args, positions)},
    {"state", SMLA_PY_INOUT, offsetof(smla_partial_states_args, state)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_partial_states_args, slot_mapping)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_partial_states_args, stream)},
};

/* ---- Groups -------------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(compress_norm_rope_store)

enum { COMPRESS_KV = 9 };

static const smla_py_param compress_params[] = {
    {"state", SMLA_PY_MAYBE_INOUT, offsetof(smla_compress_args, state)},
    {"block_table", SMLA_PY_INPUT, offsetof(smla_compress_args, block_table)},
    {"req_id_per_token", SMLA_PY_INPUT, offsetof(smla_compress_args, req_id_per_token)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_compress_args, positions)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_compress_args, slot_mapping)},
    {"kv_cache", SMLA_PY_INOUT, offsetof(smla_compress_args, kv_cache)},
    {"kv_slot_mapping", SMLA_PY_INPUT, offsetof(smla_compress_args, kv_slot_mapping)},
    {"norm_weight", SMLA_PY_INPUT, offsetof(smla_compress_args, norm_weight)},
    {"rope_table", SMLA_PY_INPUT, offsetof(smla_compress_args, rope_table)},
    [COMPRESS_KV] = {"kv", SMLA_PY_OPTIONAL, offsetof(smla_compress_args, kv)},
    {"score", SMLA_PY_OPTIONAL, offsetof(smla_compress_args, score)},
    {"ape", SMLA_PY_OPTIONAL, offsetof(smla_compress_args, ape)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_compress_args, kv_scale)},
    {"eps", SMLA_PY_FLOAT, offsetof(smla_compress_args, eps)},
    {"ratio", SMLA_PY_INT, offsetof(smla_compress_args, ratio)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_compress_args, kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_compress_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_compress_args, stream)},
};

static bool
saves_states(PyObject *const *values)
{
    return values[COMPRESS_KV] != Py_None;
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_compressor_operators[] = {
    {SMLA_PY_PLAIN_OPERATOR(save_partial_states, save, smla_partial_states_args)},
    {SMLA_PY_PLAIN_OPERATOR(compress_norm_rope_store, compress, smla_compress_args),
     .maybe_writes = saves_states},
    {.name = NULL},
};
