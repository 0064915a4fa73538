/* check_index.c: the argument rules of the operators that build lists of keys: positions to slots
 * or rows, the rows of a prefill chunk of DeepSeek V4, the mixed lists of its batch.
 * check_index_ranks.c has those of context parallelism.
 */
#include "core/params_index.h"
#include "ops/check.h"

/* ---- Arrays -------------------------------------------------------------------------------- */

/* Checks query_start_loc [R + 1] and seq_lens [R]. */
static smla_status
require_batch(smla_checker *c, const DLTensor *query_start_loc, const DLTensor *seq_lens,
              smla_query_batch *batch)
{
    SMLA_TRY(smla_require_vector(c, "query_start_loc", query_start_loc, SMLA_ANY, 0, NULL));
    SMLA_TRY(smla_require_vector(c, "seq_lens", seq_lens, SMLA_ANY, 0, NULL));
    const int64_t num_reqs = smla_size(seq_lens, 0);
    if (smla_size(query_start_loc, 0) != num_reqs + 1) {
        return smla_refuse(
            c, "`query_start_loc` must have one entry more than `seq_lens` (%lld), got %lld",
            (long long)num_reqs, (long long)smla_size(query_start_loc, 0));
    }
    *batch = (smla_query_batch){
        .num_reqs = num_reqs,
        SMLA_SET_VECTOR(query_start_loc, query_start_loc),
        SMLA_SET_VECTOR(seq_lens, seq_lens),
    };
    return SMLA_OK;
}

/* Checks that an index list has the `topk` columns that are read. */
static smla_status
require_columns(const smla_checker *c, const char *name, const DLTensor *tensor, int64_t topk)
{
    const int64_t columns = tensor == NULL ? 0 : smla_size(tensor, 1);
    if (columns < topk) {
        return smla_refuse(c, "`%s` must have at least `topk` (%lld) columns, got %lld", name,
                           (long long)topk, (long long)columns);
    }
    return SMLA_OK;
}

/* ---- Numbers ------------------------------------------------------------------------------- */

static int64_t
round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* ---- Operators ----------------------------------------------------------------------------- */

smla_status
smla_check_compute_global_topk_indices_and_lens(const smla_topk_slots_args *args,
                                                smla_topk_slots_params *params,
                                                const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "compute_global_topk_indices_and_lens", error);
    SMLA_TRY(smla_require_2d(&c, "topk_indices", args->topk_indices, SMLA_DTYPE_INT32, SMLA_ANY,
                             SMLA_ANY, 0, NULL));
    const int64_t num_tokens = smla_size(args->topk_indices, 0);
    const int64_t topk = smla_size(args->topk_indices, 1);
    SMLA_TRY(smla_require_vector(&c, "req_id_per_token", args->req_id_per_token, num_tokens,
                                 SMLA_RULE_MORE_ROWS, "an entry per row of `topk_indices`"));
    SMLA_TRY(smla_require_block_table(&c, args->block_table));
    SMLA_TRY(smla_require_number(&c, "block_size", args->block_size, 1));
    SMLA_TRY(smla_require_is_valid(&c, args->is_valid, num_tokens));
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_INT32, num_tokens, topk,
                             SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_require_vector(&c, "lens", args->lens, num_tokens, SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_topk_slots_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .table = "block_table",
        .num_tokens = num_tokens,
        .topk = topk,
        .num_reqs = smla_size(args->block_table, 0),
        SMLA_SET_ROWS(topk_indices, args->topk_indices),
        .req_id_per_token = smla_data(args->req_id_per_token),
        .req_id_stride = smla_stride(args->req_id_per_token, 0),
        .pages = smla_page_table_of(args->block_table, args->block_size),
        SMLA_SET_VECTOR(is_valid, args->is_valid),
        SMLA_SET_ROWS(out, args->out),
        SMLA_SET_VECTOR(lens, args->lens),
    };
    return SMLA_OK;
}

smla_status
smla_check_convert_req_index_to_global_index(const smla_convert_req_index_args *args,
                                             smla_convert_params *params,
                                             const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "convert_req_index_to_global_index", error);
    SMLA_TRY(
        smla_require_vector(&c, "req_id_per_token", args->req_id_per_token, SMLA_ANY, 0, NULL));
    const int64_t num_tokens = smla_size(args->req_id_per_token, 0);
    SMLA_TRY(smla_require_block_table(&c, args->block_table));
    SMLA_TRY(smla_require_2d(&c, "topk_indices", args->topk_indices, SMLA_DTYPE_INT32, num_tokens,
                             SMLA_ANY, 0, "a row per entry of `req_id_per_token`"));
    const int64_t topk = smla_size(args->topk_indices, 1);
    SMLA_TRY(smla_require_vector(&c, "prefill_request_ids", args->prefill_request_ids, num_tokens,
                                 SMLA_RULE_OPTIONAL, NULL));
    SMLA_TRY(smla_require_vector(&c, "prefill_workspace_starts", args->prefill_workspace_starts,
                                 SMLA_ANY,
                                 args->prefill_request_ids == NULL ? SMLA_RULE_OPTIONAL : 0, NULL));
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_INT32, num_tokens, topk,
                             SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_require_vector(&c, "counts", args->counts, num_tokens,
                                 SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL, NULL));
    SMLA_TRY(smla_require_count(c.op, "block_size", args->block_size, 1, INT32_MAX, error));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_convert_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .topk = topk,
        .num_reqs = smla_size(args->block_table, 0),
        .num_blocks = smla_size(args->block_table, 1),
        .num_prefills = args->prefill_workspace_starts == NULL
                            ? 0
                            : smla_size(args->prefill_workspace_starts, 0),
        .block_size = args->block_size,
        .req_id_per_token = smla_data(args->req_id_per_token),
        .req_id_stride = smla_stride(args->req_id_per_token, 0),
        .block_table = smla_data(args->block_table),
        .block_table_stride_req = smla_stride(args->block_table, 0),
        .block_table_stride_block = smla_stride(args->block_table, 1),
        SMLA_SET_ROWS(topk_indices, args->topk_indices),
        SMLA_SET_VECTOR(prefill_request_ids, args->prefill_request_ids),
        SMLA_SET_VECTOR(prefill_workspace_starts, args->prefill_workspace_starts),
        SMLA_SET_ROWS(out, args->out),
        SMLA_SET_VECTOR(counts, args->counts),
    };
    return SMLA_OK;
}

smla_status
smla_check_combine_topk_swa_indices(const smla_combine_topk_swa_args *args,
                                    smla_combine_topk_swa_params *params,
                                    const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_query_batch batch = {.num_reqs = 0};
    smla_open_checker(&c, "combine_topk_swa_indices", error);
    SMLA_TRY(smla_require_2d(&c, "topk_indices", args->topk_indices, SMLA_DTYPE_INT32, SMLA_ANY,
                             SMLA_ANY, 0, NULL));
    const int64_t num_tokens = smla_size(args->topk_indices, 0);
    SMLA_TRY(require_batch(&c, args->query_start_loc, args->seq_lens, &batch));
    SMLA_TRY(smla_require_vector(&c, "gather_lens", args->gather_lens, batch.num_reqs, 0, NULL));
    SMLA_TRY(smla_require_number(&c, "window", args->window, 1));
    SMLA_TRY(smla_require_number(&c, "ratio", args->ratio, 1));
    SMLA_TRY(smla_require_number(&c, "topk", args->topk, 0));
    SMLA_TRY(smla_require_number(&c, "M", args->M, 0));
    SMLA_TRY(smla_require_number(&c, "N", args->N, 0));
    SMLA_TRY(smla_require_number(&c, "align", args->align, 1));
    SMLA_TRY(require_columns(&c, "topk_indices", args->topk_indices, args->topk));
    const int64_t width = round_up(args->topk + args->window, args->align);
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_INT32, num_tokens, width,
                             SMLA_RULE_OUTPUT, "`topk` + `window` columns, rounded up to `align`"));
    SMLA_TRY(smla_require_vector(&c, "lens", args->lens, num_tokens, SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_combine_topk_swa_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = num_tokens,
        .window = args->window,
        .ratio = args->ratio,
        .topk = args->topk,
        .request_rows = args->M,
        .window_start = args->N,
        .width = width,
        .batch = batch,
        SMLA_SET_VECTOR(gather_lens, args->gather_lens),
        SMLA_SET_ROWS(topk_indices, args->topk_indices),
        SMLA_SET_ROWS(out, args->out),
        SMLA_SET_VECTOR(lens, args->lens),
    };
    return SMLA_OK;
}

/* The sizes of the mixed lists. An absent array has no rows and no columns. */
typedef struct mixed_sizes {
    int64_t num_tokens;
    int64_t num_decode_tokens;
    int64_t decode_topk;
} mixed_sizes;

static smla_status
require_decode_lists(smla_checker *c, const smla_mixed_indices_args *args, mixed_sizes *sizes)
{
    const DLTensor *const swa = args->decode_swa_indices;
    const DLTensor *const compressed = args->decode_compressed_indices;
    SMLA_TRY(smla_require_2d(c, "decode_swa_indices", swa, SMLA_DTYPE_INT32, SMLA_ANY, SMLA_ANY,
                             SMLA_RULE_OPTIONAL, "`window` slots per decode token"));
    sizes->num_decode_tokens = swa == NULL ? 0 : smla_size(swa, 0);
    SMLA_TRY(smla_require_2d(c, "decode_compressed_indices", compressed, SMLA_DTYPE_INT32,
                             sizes->num_decode_tokens, SMLA_ANY, SMLA_RULE_OPTIONAL,
                             "a row per row of `decode_swa_indices`"));
    sizes->decode_topk = compressed == NULL ? 0 : smla_size(compressed, 1);
    return smla_require_vector(c, "decode_compressed_lens", args->decode_compressed_lens,
                               sizes->num_decode_tokens, SMLA_RULE_OPTIONAL | SMLA_RULE_MORE_ROWS,
                               "a length per row of `decode_swa_indices`");
}

/* Checks req_id_per_token. Without prefill_topk_indices it tells the number of tokens. */
static smla_status
require_request_ids(smla_checker *c, const smla_mixed_indices_args *args, mixed_sizes *sizes)
{
    SMLA_TRY(smla_require_vector(c, "req_id_per_token", args->req_id_per_token, SMLA_ANY, 0, NULL));
    const int64_t num_ids = smla_size(args->req_id_per_token, 0);
    const bool has_prefills = args->prefill_topk_indices != NULL;
    const int64_t num_prefills = has_prefills ? smla_size(args->prefill_topk_indices, 0) : 0;
    const int64_t least = sizes->num_decode_tokens + num_prefills;
    if (num_ids < least) {
        return smla_refuse(c,
                           "`req_id_per_token` must have an entry for each of %lld decode tokens "
                           "and %lld prefill tokens, got %lld",
                           (long long)sizes->num_decode_tokens, (long long)num_prefills,
                           (long long)num_ids);
    }
    sizes->num_tokens = has_prefills ? least : num_ids;
    return SMLA_OK;
}

smla_status
smla_check_build_mixed_sparse_indices(const smla_mixed_indices_args *args,
                                      smla_mixed_indices_params *params,
                                      const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    mixed_sizes sizes = {.num_tokens = 0};
    smla_query_batch batch = {.num_reqs = 0};
    smla_open_checker(&c, "build_mixed_sparse_indices", error);
    SMLA_TRY(require_decode_lists(&c, args, &sizes));
    SMLA_TRY(smla_require_2d(&c, "prefill_topk_indices", args->prefill_topk_indices,
                             SMLA_DTYPE_INT32, SMLA_ANY, SMLA_ANY, SMLA_RULE_OPTIONAL, NULL));
    SMLA_TRY(require_batch(&c, args->query_start_loc, args->seq_lens, &batch));
    SMLA_TRY(require_request_ids(&c, args, &sizes));
    SMLA_TRY(smla_require_table(&c, "swa_block_table", args->swa_block_table, batch.num_reqs, 0));
    SMLA_TRY(smla_require_number(&c, "swa_block_size", args->swa_block_size, 1));
    const bool has_prefills = sizes.num_tokens > sizes.num_decode_tokens;
    const bool has_positions =
        (has_prefills && args->topk > 0) || (args->decode_indices_are_local != 0 &&
                                             sizes.decode_topk > 0 && sizes.num_decode_tokens > 0);
    SMLA_TRY(smla_require_table(&c, "compressed_block_table", args->compressed_block_table,
                                batch.num_reqs, has_positions ? 0 : SMLA_RULE_OPTIONAL));
    SMLA_TRY(smla_require_number(&c, "compressed_block_size", args->compressed_block_size, 1));
    SMLA_TRY(smla_require_number(&c, "window", args->window, 1));
    SMLA_TRY(smla_require_number(&c, "ratio", args->ratio, 1));
    SMLA_TRY(smla_require_number(&c, "topk", args->topk, 0));
    if (sizes.num_decode_tokens > 0 && smla_size(args->decode_swa_indices, 1) != args->window) {
        return smla_refuse(&c, "`decode_swa_indices` must have `window` (%lld) columns, got %lld",
                           (long long)args->window,
                           (long long)smla_size(args->decode_swa_indices, 1));
    }
    if (has_prefills) {
        SMLA_TRY(
            require_columns(&c, "prefill_topk_indices", args->prefill_topk_indices, args->topk));
    }
    SMLA_TRY(smla_require_is_valid(&c, args->is_valid, sizes.num_decode_tokens));
    const int64_t topk = args->topk > sizes.decode_topk ? args->topk : sizes.decode_topk;
    const int64_t width = args->window + round_up(topk, 4);
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_INT32, sizes.num_tokens, width,
                             SMLA_RULE_OUTPUT,
                             "`window` columns, and compressed ones rounded up to 4"));
    SMLA_TRY(smla_require_vector(&c, "lens", args->lens, sizes.num_tokens, SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_mixed_indices_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_tokens = sizes.num_tokens,
        .num_decode_tokens = sizes.num_decode_tokens,
        .window = args->window,
        .ratio = args->ratio,
        .topk = args->topk,
        .decode_topk = sizes.decode_topk,
        .width = width,
        .decode_indices_are_local = args->decode_indices_are_local != 0,
        .batch = batch,
        .req_id_per_token = smla_data(args->req_id_per_token),
        .req_id_stride = smla_stride(args->req_id_per_token, 0),
        .swa_pages = smla_page_table_of(args->swa_block_table, args->swa_block_size),
        .compressed_pages =
            smla_page_table_of(args->compressed_block_table, args->compressed_block_size),
        .decode_swa_indices = smla_data(args->decode_swa_indices),
        .decode_swa_stride_token = smla_stride(args->decode_swa_indices, 0),
        SMLA_SET_ROWS(decode_indices, args->decode_compressed_indices),
        SMLA_SET_VECTOR(decode_lens, args->decode_compressed_lens),
        SMLA_SET_ROWS(prefill_indices, args->prefill_topk_indices),
        SMLA_SET_VECTOR(is_valid, args->is_valid),
        SMLA_SET_ROWS(out, args->out),
        SMLA_SET_VECTOR(lens, args->lens),
    };
    return SMLA_OK;
}
