/* check_indexer_lightning.c: the argument rules of lightning_indexer, and its cut of tokens into
 * chunks.
 */
#include "core/params_indexer.h"
#include "ops/check.h"

#include <assert.h>

enum { ROW_ALIGNMENT = 128 }; /* bytes: rows of logits begin at a cache line of a GPU */

static int64_t
smaller_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- Sizes --------------------------------------------------------------------------------- */

/* The matrix of a chunk: its row stride, and the most bytes that it may have. */
typedef struct matrix_sizes {
    int64_t row_bytes;
    int64_t most_bytes;
} matrix_sizes;

/* The dtype of the logits, of which a clear one is fp32. */
static smla_status
read_dtype(const char *op, DLDataType given, unsigned *dtype, smla_error *error)
{
    const bool is_clear = given.code == 0 && given.bits == 0 && given.lanes == 0;
    *dtype = is_clear ? SMLA_DTYPE_FP32 : smla_dtype(&(DLTensor){.dtype = given});
    return *dtype == SMLA_DTYPE_FP32 || *dtype == SMLA_DTYPE_BF16
               ? SMLA_OK
               : smla_fail_value(error, op,
                                 "`dtype` must be float32 or bfloat16, got type %d of %d bits",
                                 given.code, given.bits);
}

static smla_status
find_sizes(const char *op, int64_t num_columns, unsigned dtype, int64_t max_logits_bytes,
           const smla_backend *backend, matrix_sizes *sizes, smla_error *error)
{
    const int64_t bytes = num_columns * (dtype == SMLA_DTYPE_BF16 ? 2 : 4);
    const int64_t row_bytes = (bytes + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT;
    const int64_t unit_bytes = backend->chunk_tokens * row_bytes;
    const int64_t wanted =
        backend->chunk_logits_bytes > unit_bytes ? backend->chunk_logits_bytes : unit_bytes;
    if (max_logits_bytes < row_bytes) {
        return smla_fail_value(
            error, op,
            "`max_logits_bytes` must be at least %lld, for the logits of a token, got %lld",
            (long long)row_bytes, (long long)max_logits_bytes);
    }
    *sizes =
        (matrix_sizes){.row_bytes = row_bytes, .most_bytes = smaller_of(max_logits_bytes, wanted)};
    return SMLA_OK;
}

smla_status
smla_check_lightning_workspace(const smla_lightning_workspace_args *args, int64_t *bytes,
                               smla_error *error)
{
    static const char op[] = "lightning_indexer_workspace_size";
    const smla_backend *backend = NULL;
    unsigned dtype = 0;
    matrix_sizes sizes = {.row_bytes = 0};
    SMLA_TRY(smla_require_count(op, "num_tokens", args->num_tokens, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(op, "max_context", args->max_context, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(op, "k", args->k, 1, INT32_MAX, error));
    SMLA_TRY(read_dtype(op, args->dtype, &dtype, error));
    SMLA_TRY(smla_find_backend(op, smla_normal_device(args->device), &backend, error));
    if (args->max_context <= args->k || args->num_tokens == 0) {
        *bytes = 0;
        return SMLA_OK;
    }
    SMLA_TRY(
        find_sizes(op, args->max_context, dtype, args->max_logits_bytes, backend, &sizes, error));
    assert(sizes.row_bytes > 0);
    const bool fits = args->num_tokens <= sizes.most_bytes / sizes.row_bytes;
    *bytes = ROW_ALIGNMENT + (fits ? args->num_tokens * sizes.row_bytes : sizes.most_bytes);
    return SMLA_OK;
}

/* ---- Chunks -------------------------------------------------------------------------------- */

/* Puts the matrix into the workspace. */
static smla_status
place_matrix(const smla_checker *c, const smla_lightning_indexer_args *args, unsigned dtype,
             const smla_backend *backend, smla_lightning_params *params)
{
    matrix_sizes sizes = {.row_bytes = 0};
    const int64_t num_tokens = params->logits.num_tokens;
    SMLA_TRY(find_sizes(c->op, params->logits.num_columns, dtype, args->max_logits_bytes, backend,
                        &sizes, c->error));
    uint8_t *const workspace = smla_data(args->workspace);
    const int64_t given = args->workspace == NULL ? 0 : smla_size(args->workspace, 0);
    const int64_t padding = (int64_t)(-(uintptr_t)workspace % ROW_ALIGNMENT);
    const int64_t room = smaller_of(given - padding, sizes.most_bytes);
    if (room < sizes.row_bytes) {
        return smla_refuse(
            c, "`workspace` must have at least %lld bytes, for the logits of a token, got %lld",
            (long long)(padding + sizes.row_bytes), (long long)given);
    }
    assert(sizes.row_bytes > 0); /* there are columns, more than k */
    const int64_t stride = sizes.row_bytes / (dtype == SMLA_DTYPE_BF16 ? 2 : 4);
    params->chunk_tokens =
        smla_lightning_chunk_tokens(num_tokens, room / sizes.row_bytes, backend->chunk_tokens);
    params->logits.out = workspace + padding;
    params->logits.out_stride_token = stride;
    params->top_k.logits = workspace + padding;
    params->top_k.logits_stride_token = stride;
    return SMLA_OK;
}

/* The call whose tokens have at most k keys. Where `values` are wanted, they are the logits of k
 * columns, which end in -inf. */
static void
take_all_keys(smla_lightning_params *params)
{
    smla_top_k_params *const top_k = &params->top_k;
    params->logits.out = top_k->values;
    params->logits.out_stride_token = top_k->values_stride_token;
    params->logits.num_columns = top_k->k;
    top_k->values = NULL;
    params->chunk_tokens = params->logits.num_tokens;
}

/* ---- The operator -------------------------------------------------------------------------- */

/* The columns of the logits. */
static smla_status
count_columns(const smla_checker *c, const smla_logits_params *logits, int64_t *num_columns)
{
    const int64_t pages = logits->has_pages ? logits->pages.num_blocks : 1;
    if (pages > 0 && logits->kv.block_size > INT32_MAX / pages) {
        return smla_refuse(c, "`%s` must have at most %d keys%s, got %lld times %lld",
                           logits->has_pages ? "block_table" : "k_cache", INT32_MAX,
                           logits->has_pages ? " per request" : "", (long long)pages,
                           (long long)logits->kv.block_size);
    }
    *num_columns = pages * logits->kv.block_size;
    return SMLA_OK;
}

smla_status
smla_check_lightning_indexer(const smla_lightning_indexer_args *args, smla_lightning_params *params,
                             const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "lightning_indexer", error);
    const bool has_slots = args->slots_block_table != NULL;
    const bool is_flat = args->k_scale != NULL;
    smla_logits_params *const logits = &params->logits;
    smla_top_k_params *const top_k = &params->top_k;
    unsigned dtype = 0;
    SMLA_TRY(read_dtype(c.op, args->dtype, &dtype, error));
    const smla_indexer_logits_args scored = {
        .q = args->q,
        .weights = args->weights,
        .k_cache = args->k_cache,
        .k_scale = args->k_scale,
        .context_lens = args->context_lens,
        .block_table = args->block_table,
        .req_id_per_token = is_flat ? NULL : args->req_id_per_token,
        .starts = args->starts,
        .q_scale = args->q_scale,
        .kv_format = args->kv_format,
        .block_size = args->block_size,
        .stream = args->stream,
    };
    const smla_top_k_args chosen = {
        .ends = args->context_lens,
        .k = args->k,
        .slots_block_table = args->slots_block_table,
        .slots_block_size = args->slots_block_size,
        .req_id_per_token = is_flat || has_slots ? args->req_id_per_token : NULL,
        .is_valid = args->is_valid,
        .out = args->out,
        .slots = args->slots,
        .lens = args->lens,
        .values = args->values,
        .stream = args->stream,
    };
    SMLA_TRY(smla_require_scored(&c, &scored, logits));
    SMLA_TRY(smla_require_choice(&c, &chosen, logits->num_tokens, dtype, top_k));
    params->call = logits->call;
    SMLA_TRY(smla_require_workspace(&c, "workspace", args->workspace, SMLA_RULE_OPTIONAL));
    SMLA_TRY(count_columns(&c, logits, &logits->num_columns));
    SMLA_TRY(smla_finish_check(&c, backend));
    top_k->num_columns = logits->num_columns;
    logits->out_type = dtype == SMLA_DTYPE_BF16 ? SMLA_FLOAT_BF16 : SMLA_FLOAT_FP32;
    if (logits->num_tokens == 0) {
        params->chunk_tokens = 1;
        return SMLA_OK;
    }
    if (logits->num_columns <= top_k->k) {
        take_all_keys(params);
        return SMLA_OK;
    }
    logits->leaves_rest = true;
    logits->least_context = top_k->values == NULL ? top_k->k + 1 : 1;
    return place_matrix(&c, args, dtype, *backend, params);
}
