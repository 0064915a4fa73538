/* ops_cache.c: write tokens to a cache, gather them from it, dequantize a cache. */
#include "python/call/operator.h"

SMLA_PY_COMPUTE(concat_and_cache_mla)

static const smla_py_param write_params[] = {
    {"kv_c", SMLA_PY_INPUT, offsetof(smla_concat_and_cache_mla_args, kv_c)},
    {"k_pe", SMLA_PY_NULLABLE, offsetof(smla_concat_and_cache_mla_args, k_pe)},
    {"kv_cache", SMLA_PY_INOUT, offsetof(smla_concat_and_cache_mla_args, kv_cache)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_concat_and_cache_mla_args, slot_mapping)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(smla_concat_and_cache_mla_args, kv_scale)},
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

enum {
    DEQUANTIZE_CACHE,
    DEQUANTIZE_OUT = 2,
    DEQUANTIZE_FORMAT,
    DEQUANTIZE_BLOCK,
    DEQUANTIZE_DTYPE
};

static const smla_py_param dequantize_params[] = {
    [DEQUANTIZE_CACHE] = {"kv_cache", SMLA_PY_INPUT, offsetof(dequantize_args, core.kv_cache)},
    {"kv_scale", SMLA_PY_SCALE, offsetof(dequantize_args, core.kv_scale)},
    [DEQUANTIZE_OUT] = {"out", SMLA_PY_RESULT, offsetof(dequantize_args, core.out)},
    [DEQUANTIZE_FORMAT] = {"kv_format", SMLA_PY_KV_FORMAT,
                           offsetof(dequantize_args, core.kv_format)},
    [DEQUANTIZE_BLOCK] = {"block_size", SMLA_PY_SIZE, offsetof(dequantize_args, core.block_size)},
    [DEQUANTIZE_DTYPE] = {"dtype", SMLA_PY_FLOATS, offsetof(dequantize_args, dtype)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(dequantize_args, core.stream)},
};

#define DEQUANTIZED_DTYPE {.source = SMLA_PY_DTYPE_OF_OPTION, .row = DEQUANTIZE_DTYPE}
#define DEQUANTIZED_KEY \
    {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_KEY_VALUES, DEQUANTIZE_CACHE, DEQUANTIZE_FORMAT)}

/* Of split pages [pages, bytes], of a flat cache, and of pages whose shape tells their size. */
static const smla_py_result_row dequantize_results[] = {
    {.result = DEQUANTIZE_OUT,
     .when = {SMLA_PY_IF_SPLIT_PAGES, DEQUANTIZE_CACHE, DEQUANTIZE_FORMAT},
     .dtype = DEQUANTIZED_DTYPE,
     .dims = {SMLA_PY_SIZE(DEQUANTIZE_CACHE, 0),
              {{SMLA_PY_ADD, SMLA_PY_PAGE_KEYS, DEQUANTIZE_BLOCK, DEQUANTIZE_CACHE}},
              DEQUANTIZED_KEY}},
    {.result = DEQUANTIZE_OUT,
     .when = {SMLA_PY_IF_NDIM, DEQUANTIZE_CACHE, 2},
     .dtype = DEQUANTIZED_DTYPE,
     .dims = {SMLA_PY_SIZE(DEQUANTIZE_CACHE, 0), DEQUANTIZED_KEY}},
    {.result = DEQUANTIZE_OUT,
     .dtype = DEQUANTIZED_DTYPE,
     .dims = {SMLA_PY_SIZE(DEQUANTIZE_CACHE, 0), SMLA_PY_SIZE(DEQUANTIZE_CACHE, 1),
              DEQUANTIZED_KEY}},
};

static const smla_py_limit dequantize_limits[] = {{SMLA_PY_LIMIT_NDIM, DEQUANTIZE_CACHE, 2, 4}};

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

SMLA_PY_COMPUTE(reshape_and_cache)

static const smla_py_param reshape_params[] = {
    {"k", SMLA_PY_INPUT, offsetof(smla_reshape_and_cache_args, k)},
    {"v", SMLA_PY_INPUT, offsetof(smla_reshape_and_cache_args, v)},
    {"k_cache", SMLA_PY_INOUT, offsetof(smla_reshape_and_cache_args, k_cache)},
    {"v_cache", SMLA_PY_INOUT, offsetof(smla_reshape_and_cache_args, v_cache)},
    {"slot_mapping", SMLA_PY_INPUT, offsetof(smla_reshape_and_cache_args, slot_mapping)},
    {"k_scale", SMLA_PY_SCALE, offsetof(smla_reshape_and_cache_args, k_scale)},
    {"v_scale", SMLA_PY_SCALE, offsetof(smla_reshape_and_cache_args, v_scale)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_reshape_and_cache_args, stream)},
};

SMLA_PY_COMPUTE(transfer_kv_cache)

enum { TRANSFER_SRC, TRANSFER_DST, TRANSFER_CACHES };

static const smla_py_param transfer_params[] = {
    [TRANSFER_SRC] = {"src", SMLA_PY_INPUT, offsetof(smla_transfer_kv_cache_args, src)},
    [TRANSFER_DST] = {"dst", SMLA_PY_INOUT, offsetof(smla_transfer_kv_cache_args, dst)},
    {"src_slots", SMLA_PY_INPUT, offsetof(smla_transfer_kv_cache_args, src_slots)},
    {"dst_slots", SMLA_PY_INPUT, offsetof(smla_transfer_kv_cache_args, dst_slots)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_transfer_kv_cache_args, kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_transfer_kv_cache_args, block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_transfer_kv_cache_args, stream)},
};

/* There are no results to allocate. But nobody frees host memory in the order of a CUDA stream, so
 * caches in host memory are kept until the work is over. */
static int
keep_host_caches(smla_py_call *call, const void *Py_UNUSED(args))
{
    for (int i = TRANSFER_SRC; i < TRANSFER_CACHES; i++) {
        smla_py_array *const cache = &call->arrays[i];
        cache->is_foreign |= call->stream.is_cuda && cache->view.device.device_type != kDLCUDA;
    }
    return 0;
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_cache_operators[] = {
    {SMLA_PY_PLAIN_OPERATOR(concat_and_cache_mla, write, smla_concat_and_cache_mla_args)},
    {SMLA_PY_PLAIN_OPERATOR(gather_kv_cache, gather, smla_gather_kv_cache_args)},
    {.name = "dequantize_kv_cache",
     SMLA_PY_TABLE(dequantize_params, smla_dequantize_kv_cache_args, dequantize_args),
     .compute = compute_dequantize_kv_cache,
     SMLA_PY_RESULTS(dequantize_results),
     SMLA_PY_LIMITS(dequantize_limits)},
    {SMLA_PY_PLAIN_OPERATOR(quantize_and_insert_k_cache, insert, smla_insert_k_cache_args)},
    {SMLA_PY_PLAIN_OPERATOR(indexer_k_quant_and_cache, index, smla_indexer_k_cache_args)},
    {SMLA_PY_PLAIN_OPERATOR(dequantize_and_gather_k_cache, gather_k, smla_gather_k_cache_args)},
    {SMLA_PY_PLAIN_OPERATOR(reshape_and_cache, reshape, smla_reshape_and_cache_args)},
    {SMLA_PY_PLAIN_OPERATOR(transfer_kv_cache, transfer, smla_transfer_kv_cache_args),
     .allocate = keep_host_caches},
    {.name = NULL},
};
