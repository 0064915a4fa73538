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
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_gather_kv_cache_args, kv_scale)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_gather_kv_cache_args, kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_gather_kv_cache_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_gather_kv_cache_args, stream)},
};

typedef struct dequantize_args {
    smla_dequantize_kv_cache_args core;
    DLDataType dtype;
} dequantize_args;

SMLA_PY_COMPUTE(dequantize_kv_cache)

static const smla_py_param dequantize_params[] = {
    {"kv_cache", SMLA_PY_INPUT, offsetof(dequantize_args, core.kv_cache)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(dequantize_args, core.kv_scale)},
    {"out", SMLA_PY_RESULT, offsetof(dequantize_args, core.out)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(dequantize_args, core.kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(dequantize_args, core.block_size)},
    {"dtype", SMLA_PY_FLOATS, offsetof(dequantize_args, dtype)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(dequantize_args, core.stream)},
};

static int
allocate_dequantized(smla_py_call *call, const void *args)
{
    enum { KV_CACHE, KV_SCALE, OUT };
    const dequantize_args *const a = args;
    const DLTensor *const cache = &call->arrays[KV_CACHE].view;
    const int ndim = cache->ndim;
    if (ndim < 2 || ndim > 4) {
        return 0;
    }
    const smla_kv_format_info *const format = smla_format_of_cache(cache, a->core.kv_format);
    const bool is_flat = ndim == 2 && format->layout == SMLA_PAGE_ROWS;
    const int64_t tokens = ndim == 2 ? a->core.block_size : smla_py_call_dim(call, KV_CACHE, 1);
    const int64_t page_bytes = smla_py_call_dim(call, KV_CACHE, 1);
    if (ndim == 2 && !is_flat && (tokens < 1 || tokens > page_bytes / format->row_bytes)) {
        return 0; /* the core reports it */
    }
    int64_t shape[3] = {smla_py_call_dim(call, KV_CACHE, 0), tokens, format->head_dim};
    shape[1] = is_flat ? format->head_dim : shape[1];
    return smla_py_allocate_result(call, OUT, a->dtype, is_flat ? 2 : 3, shape);
}

SMLA_PY_COMPUTE(quantize_and_insert_k_cache)

static const smla_py_param insert_params[] = {
    {"k", SMLA_PY_INPUT, offsetof(smla_insert_k_cache_args, k)},
    {"k_cache", SMLA_PY_INOUT, offsetof(smla_insert_k_cache_args, k_cache)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_insert_k_cache_args, slot_mapping)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_insert_k_cache_args, kv_scale)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_insert_k_cache_args, kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_insert_k_cache_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_insert_k_cache_args, stream)},
};

SMLA_PY_COMPUTE(indexer_k_quant_and_cache)

static const smla_py_param index_params[] = {
    {"k", SMLA_PY_INPUT, offsetof(smla_indexer_k_cache_args, k)},
    {"k_cache", SMLA_PY_INOUT, offsetof(smla_indexer_k_cache_args, k_cache)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_indexer_k_cache_args, slot_mapping)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_indexer_k_cache_args, kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_indexer_k_cache_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_indexer_k_cache_args, stream)},
};

SMLA_PY_COMPUTE(dequantize_and_gather_k_cache)

static const smla_py_param gather_k_params[] = {
    {"out", SMLA_PY_INOUT, offsetof(smla_gather_k_cache_args, out)},
    {"k_cache", SMLA_PY_INPUT, offsetof(smla_gather_k_cache_args, k_cache)},
    {"seq_lens", SMLA_PY_INPUT, offsetof(smla_gather_k_cache_args, seq_lens)},
    {"gather_lens", SMLA_PY_NULLABLE, offsetof(smla_gather_k_cache_args, gather_lens)},
    {"block_table", SMLA_PY_INPUT, offsetof(smla_gather_k_cache_args, block_table)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_gather_k_cache_args, kv_scale)},
    {"block_size", SMLA_PY_INT, offsetof(smla_gather_k_cache_args, block_size)},
    {"offset", SMLA_PY_INT, offsetof(smla_gather_k_cache_args, offset)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_gather_k_cache_args, kv_format)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_gather_k_cache_args, stream)},
};

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
    {.name = "quantize_and_insert_k_cache",
     SMLA_PY_TABLE(insert_params, smla_insert_k_cache_args, smla_insert_k_cache_args),
     .compute = compute_quantize_and_insert_k_cache},
    {.name = "indexer_k_quant_and_cache",
     SMLA_PY_TABLE(index_params, smla_indexer_k_cache_args, smla_indexer_k_cache_args),
     .compute = compute_indexer_k_quant_and_cache},
    {.name = "dequantize_and_gather_k_cache",
     SMLA_PY_TABLE(gather_k_params, smla_gather_k_cache_args, smla_gather_k_cache_args),
     .compute = compute_dequantize_and_gather_k_cache},
    {.name = NULL},
};
