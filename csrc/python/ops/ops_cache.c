/* ops_cache.c: write tokens to a cache, gather them from it, dequantize a cache. */
#include "python/call/operator.h"

SMLA_PY_COMPUTE(concat_and_cache_mla)

static const smla_py_param write_params[] = {
    {"kv_c", SMLA_PY_INPUT, offsetof(smla_concat_and_cache_mla_args, kv_c)},
    {"k_pe", SMLA_PY_INPUT, offsetof(smla_concat_and_cache_mla_args, k_pe)},
    {"kv_cache", SMLA_PY_INOUT, offsetof(smla_concat_and_cache_mla_args, kv_cache)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_concat_and_cache_mla_args, slot_mapping)},
    {"kv_cache_dtype", SMLA_PY_KV_FORMAT, offsetof(smla_concat_and_cache_mla_args, kv_format)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_concat_and_cache_mla_args, stream)},
};

SMLA_PY_COMPUTE(gather_kv_cache)

static const smla_py_param gather_params[] = {
    {"kv_cache", SMLA_PY_INPUT, offsetof(smla_gather_kv_cache_args, kv_cache)},
    {"block_table", SMLA_PY_INPUT, offsetof(smla_gather_kv_cache_args, block_table)},
    {"seq_lens", SMLA_PY_INPUT, offsetof(smla_gather_kv_cache_args, seq_lens)},
    {"workspace_starts", SMLA_PY_INPUT, offsetof(smla_gather_kv_cache_args, workspace_starts)},
    {"seq_starts", SMLA_PY_OPTIONAL, offsetof(smla_gather_kv_cache_args, seq_starts)},
    {"out", SMLA_PY_INOUT, offsetof(smla_gather_kv_cache_args, out)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_gather_kv_cache_args, stream)},
};

typedef struct dequantize_args {
    smla_dequantize_kv_cache_args core;
    DLDataType dtype;
} dequantize_args;

SMLA_PY_COMPUTE(dequantize_kv_cache)

static const smla_py_param dequantize_params[] = {
    {"kv_cache", SMLA_PY_INPUT, offsetof(dequantize_args, core.kv_cache)},
    {"out", SMLA_PY_RESULT, offsetof(dequantize_args, core.out)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(dequantize_args, core.kv_format)},
    {"dtype", SMLA_PY_FLOATS, offsetof(dequantize_args, dtype)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(dequantize_args, core.stream)},
};

static int
allocate_dequantized(smla_py_call *call, const void *args)
{
    enum { KV_CACHE, OUT };
    const dequantize_args *const a = args;
    const int ndim = call->arrays[KV_CACHE].view.ndim;
    const bool is_flat = ndim == 2;
    if (!is_flat && ndim != 3 && ndim != 4) {
        return 0;
    }
    const int64_t width =
        smla_format_of_cache(&call->arrays[KV_CACHE].view, a->core.kv_format)->head_dim;
    int64_t shape[3] = {smla_py_call_dim(call, KV_CACHE, 0), smla_py_call_dim(call, KV_CACHE, 1),
                        width};
    shape[1] = is_flat ? width : shape[1];
    return smla_py_allocate_result(call, OUT, a->dtype, is_flat ? 2 : 3, shape);
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_cache_operators[] = {
    {.name = "concat_and_cache_mla",
     SMLA_PY_TABLE(write_params, smla_concat_and_cache_mla_args, smla_concat_and_cache_mla_args),
     .compute = compute_concat_and_cache_mla},
    {.name = "gather_kv_cache",
     SMLA_PY_TABLE(gather_params, smla_gather_kv_cache_args, smla_gather_kv_cache_args),
     .compute = compute_gather_kv_cache},
    {.name = "dequantize_kv_cache",
     SMLA_PY_TABLE(dequantize_params, smla_dequantize_kv_cache_args, dequantize_args),
     .compute = compute_dequantize_kv_cache,
     .allocate = allocate_dequantized},
    {.name = NULL},
};
