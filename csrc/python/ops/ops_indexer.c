/* ops_indexer.c: the operators that choose keys: the indexer's queries, its logits, and logits and
 * top-k in one call.
 */
#include "python/call/operator.h"

/* ---- Queries ------------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(fused_indexer_q_rope_quant)

enum { QUERY_Q, QUERY_OUT = 4, QUERY_WEIGHTS, QUERY_SCALE };

static const smla_py_param query_params[] = {
    [QUERY_Q] = {"q", SMLA_PY_INPUT, offsetof(smla_index_query_args, q)},
    {"weights", SMLA_PY_INPUT, offsetof(smla_index_query_args, weights)},
    {"positions", SMLA_PY_INPUT, offsetof(smla_index_query_args, positions)},
    {"rope_table", SMLA_PY_INPUT, offsetof(smla_index_query_args, rope_table)},
    [QUERY_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_index_query_args, out)},
    [QUERY_WEIGHTS] = {"out_weights", SMLA_PY_OUTPUT, offsetof(smla_index_query_args, out_weights)},
    [QUERY_SCALE] = {"out_scale", SMLA_PY_ASKED_OUTPUT, offsetof(smla_index_query_args, out_scale)},
    {"softmax_scale", SMLA_PY_FLOAT, offsetof(smla_index_query_args, softmax_scale)},
    {"head_scale", SMLA_PY_FLOAT, offsetof(smla_index_query_args, head_scale)},
    {"use_fp4", SMLA_PY_ASK, 0},
    {"stream", SMLA_PY_STREAM, offsetof(smla_index_query_args, stream)},
};

/* FP4, two values per byte, for a call that asks for the scales of its blocks. */
static const smla_py_result_row query_results[] = {
    {SMLA_PY_MAKES(QUERY_OUT, UINT8, SMLA_PY_SIZE(QUERY_Q, 0), SMLA_PY_SIZE(QUERY_Q, 1),
                   SMLA_PY_NUMBER(SMLA_INDEX_HEAD_DIM / 2)),
     .when = {.kind = SMLA_PY_IF_ASKED}},
    {SMLA_PY_MAKES(QUERY_OUT, E4M3, SMLA_PY_SIZE(QUERY_Q, 0), SMLA_PY_SIZE(QUERY_Q, 1),
                   SMLA_PY_NUMBER(SMLA_INDEX_HEAD_DIM))},
    {SMLA_PY_MAKES(QUERY_WEIGHTS, FP32, SMLA_PY_SIZE(QUERY_Q, 0), SMLA_PY_SIZE(QUERY_Q, 1))},
    {SMLA_PY_MAKES(QUERY_SCALE, UINT8, SMLA_PY_SIZE(QUERY_Q, 0), SMLA_PY_SIZE(QUERY_Q, 1),
                   SMLA_PY_NUMBER(4))},
};

static const smla_py_limit query_limits[] = {{SMLA_PY_LIMIT_NDIM, QUERY_Q, 3, 3}};

/* ---- Logits -------------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(indexer_logits)

typedef struct logits_args {
    smla_indexer_logits_args core;
    DLDataType dtype;
} logits_args;

enum {
    LOGITS_Q,
    LOGITS_K = 2,
    LOGITS_K_SCALE,
    LOGITS_TABLE = 5,
    LOGITS_OUT = 9,
    LOGITS_DTYPE = 11,
    LOGITS_BLOCK = 13
};

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
    [LOGITS_DTYPE] = {"dtype", SMLA_PY_FLOATS, offsetof(logits_args, dtype)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(logits_args, core.kv_format)},
    [LOGITS_BLOCK] = {"block_size", SMLA_PY_SIZE, offsetof(logits_args, core.block_size)},
    {"stream", SMLA_PY_STREAM, offsetof(logits_args, core.stream)},
};

#define LOGITS_MADE_DTYPE {.source = SMLA_PY_DTYPE_OF_OPTION, .row = LOGITS_DTYPE}

/* A column for each flat key, or for each key that the pages of a request have room for: pages
 * [pages, bytes], or pages whose shape tells their size. */
static const smla_py_result_row logits_results[] = {
    {.result = LOGITS_OUT,
     .when = {SMLA_PY_IF_GIVEN, LOGITS_K_SCALE, 0},
     .dtype = LOGITS_MADE_DTYPE,
     .dims = {SMLA_PY_SIZE(LOGITS_Q, 0), SMLA_PY_SIZE(LOGITS_K, 0)}},
    {.result = LOGITS_OUT,
     .when = {SMLA_PY_IF_NDIM, LOGITS_K, 2},
     .dtype = LOGITS_MADE_DTYPE,
     .dims = {SMLA_PY_SIZE(LOGITS_Q, 0),
              {{SMLA_PY_ADD, SMLA_PY_SIZE_OF, LOGITS_TABLE, 1},
               {SMLA_PY_MULTIPLY, SMLA_PY_PAGE_KEYS, LOGITS_BLOCK, LOGITS_K}}}},
    {.result = LOGITS_OUT,
     .dtype = LOGITS_MADE_DTYPE,
     .dims = {SMLA_PY_SIZE(LOGITS_Q, 0),
              {{SMLA_PY_ADD, SMLA_PY_SIZE_OF, LOGITS_TABLE, 1},
               {SMLA_PY_MULTIPLY, SMLA_PY_SIZE_OF, LOGITS_K, 1}}}},
};

static const smla_py_limit logits_limits[] = {
    {SMLA_PY_LIMIT_NDIM, LOGITS_Q, 3, 3},
    {SMLA_PY_LIMIT_NDIM, LOGITS_TABLE, 2, 2},
};

/* ---- Logits and top-k ---------------------------------------------------------------------- */

SMLA_PY_COMPUTE(lightning_indexer)

enum {
    LIGHTNING_Q,
    LIGHTNING_K = 2,
    LIGHTNING_K_SCALE,
    LIGHTNING_OUT = 11,
    LIGHTNING_SLOTS,
    LIGHTNING_LENS,
    LIGHTNING_TOP_K = 16
};

/* `values` is a second array of the workspace's kind, so it stands behind the workspace. */
static const smla_py_param lightning_params[] = {
    [LIGHTNING_Q] = {"q", SMLA_PY_INPUT, offsetof(smla_lightning_indexer_args, q)},
    {"weights", SMLA_PY_INPUT, offsetof(smla_lightning_indexer_args, weights)},
    [LIGHTNING_K] = {"k_cache", SMLA_PY_PAIR, offsetof(smla_lightning_indexer_args, k_cache)},
    [LIGHTNING_K_SCALE] = {"k_scale", SMLA_PY_SECOND,
                           offsetof(smla_lightning_indexer_args, k_scale)},
    {"context_lens", SMLA_PY_INPUT, offsetof(smla_lightning_indexer_args, context_lens)},
    {"block_table", SMLA_PY_OPTIONAL, offsetof(smla_lightning_indexer_args, block_table)},
    {"req_id_per_token", SMLA_PY_OPTIONAL, offsetof(smla_lightning_indexer_args, req_id_per_token)},
    {"starts", SMLA_PY_OPTIONAL, offsetof(smla_lightning_indexer_args, starts)},
    {"q_scale", SMLA_PY_OPTIONAL, offsetof(smla_lightning_indexer_args, q_scale)},
    {"slots_block_table", SMLA_PY_ASKING, offsetof(smla_lightning_indexer_args, slots_block_table)},
    {"is_valid", SMLA_PY_OPTIONAL, offsetof(smla_lightning_indexer_args, is_valid)},
    [LIGHTNING_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_lightning_indexer_args, out)},
    [LIGHTNING_SLOTS] = {"slots", SMLA_PY_ASKED_OUTPUT,
                         offsetof(smla_lightning_indexer_args, slots)},
    [LIGHTNING_LENS] = {"lens", SMLA_PY_ASKED_OUTPUT, offsetof(smla_lightning_indexer_args, lens)},
    {"workspace", SMLA_PY_WORKSPACE, offsetof(smla_lightning_indexer_args, workspace)},
    {"values", SMLA_PY_WORKSPACE, offsetof(smla_lightning_indexer_args, values)},
    [LIGHTNING_TOP_K] = {"k", SMLA_PY_INT, offsetof(smla_lightning_indexer_args, k)},
    {"dtype", SMLA_PY_FLOATS, offsetof(smla_lightning_indexer_args, dtype)},
    {"kv_format", SMLA_PY_KV_FORMAT, offsetof(smla_lightning_indexer_args, kv_format)},
    {"block_size", SMLA_PY_SIZE, offsetof(smla_lightning_indexer_args, block_size)},
    {"slots_block_size", SMLA_PY_SIZE, offsetof(smla_lightning_indexer_args, slots_block_size)},
    {"max_logits_bytes", SMLA_PY_INT, offsetof(smla_lightning_indexer_args, max_logits_bytes)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_lightning_indexer_args, stream)},
};

static const smla_py_result_row lightning_results[] = {
    {SMLA_PY_MAKES(LIGHTNING_OUT, INT32, SMLA_PY_SIZE(LIGHTNING_Q, 0),
                   SMLA_PY_VALUE(LIGHTNING_TOP_K))},
    {SMLA_PY_MAKES(LIGHTNING_SLOTS, INT32, SMLA_PY_SIZE(LIGHTNING_Q, 0),
                   SMLA_PY_VALUE(LIGHTNING_TOP_K))},
    {SMLA_PY_MAKES(LIGHTNING_LENS, INT32, SMLA_PY_SIZE(LIGHTNING_Q, 0))},
};

static const smla_py_limit lightning_limits[] = {
    {SMLA_PY_LIMIT_NDIM, LIGHTNING_Q, 3, 3},
    {SMLA_PY_LIMIT_VALUE, LIGHTNING_TOP_K, 1, INT32_MAX},
};

/* The columns of the logits, as in the rows above. -1: the arrays are malformed. */
static int64_t
count_columns(const DLTensor *k_cache, const DLTensor *k_scale, const DLTensor *block_table,
              int64_t block_size)
{
    int64_t num_columns = -1;
    if (k_cache == NULL || k_cache->ndim < 2) {
        return -1;
    }
    if (k_scale != NULL) {
        return k_cache->ndim == 2 ? k_cache->shape[0] : -1;
    }
    const int64_t page_keys = k_cache->ndim == 2 ? block_size : k_cache->shape[1];
    const bool is_known = block_table != NULL && block_table->ndim == 2 && page_keys <= INT32_MAX;
    return is_known && !__builtin_mul_overflow(block_table->shape[1], page_keys, &num_columns)
               ? num_columns
               : -1;
}

/* 0 for malformed arguments: the call itself words that error better. */
static int64_t
lightning_workspace_bytes(const void *args)
{
    const smla_lightning_indexer_args *const a = args;
    const int64_t max_context =
        count_columns(a->k_cache, a->k_scale, a->block_table, a->block_size);
    int64_t bytes = 0;
    if (a->workspace != NULL || a->out == NULL) {
        return 0;
    }
    const smla_lightning_workspace_args needs = {
        .struct_size = sizeof needs,
        .num_tokens = smla_size(a->q, 0),
        .max_context = max_context,
        .k = a->k,
        .dtype = a->dtype,
        .max_logits_bytes = a->max_logits_bytes,
        .device = a->out->device,
    };
    return smla_lightning_indexer_workspace_size(&needs, &bytes, NULL) == SMLA_OK ? bytes : 0;
}

static const smla_py_param lightning_size_params[] = {
    {"num_tokens", SMLA_PY_INT, offsetof(smla_lightning_workspace_args, num_tokens)},
    {"max_context", SMLA_PY_INT, offsetof(smla_lightning_workspace_args, max_context)},
    {"k", SMLA_PY_INT, offsetof(smla_lightning_workspace_args, k)},
    {"dtype", SMLA_PY_FLOATS, offsetof(smla_lightning_workspace_args, dtype)},
    {"max_logits_bytes", SMLA_PY_INT, offsetof(smla_lightning_workspace_args, max_logits_bytes)},
    {"device", SMLA_PY_DEVICE, offsetof(smla_lightning_workspace_args, device)},
};

static PyObject *
answer_lightning_size(const void *args)
{
    smla_error error;
    int64_t bytes = 0;
    if (smla_lightning_indexer_workspace_size(args, &bytes, &error) != SMLA_OK) {
        return smla_py_raise(&error);
    }
    return PyLong_FromLongLong(bytes);
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_indexer_operators[] = {
    {SMLA_PY_OPERATOR(fused_indexer_q_rope_quant, query, smla_index_query_args)},
    {.name = "indexer_logits",
     SMLA_PY_TABLE(logits_params, smla_indexer_logits_args, logits_args),
     .compute = compute_indexer_logits,
     SMLA_PY_RESULTS(logits_results),
     SMLA_PY_LIMITS(logits_limits)},
    {SMLA_PY_OPERATOR(lightning_indexer, lightning, smla_lightning_indexer_args),
     .workspace_bytes = lightning_workspace_bytes},
    {.name = "lightning_indexer_workspace_size",
     SMLA_PY_TABLE(lightning_size_params, smla_lightning_workspace_args,
                   smla_lightning_workspace_args),
     .answer = answer_lightning_size},
    {.name = NULL},
};
