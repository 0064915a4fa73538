/* check_index_ranks.c: the argument rules of the operators that find what of a request a rank of
 * context parallelism has: cp_local_positions, cp_local_topk, cp_local_lengths.
 */
#include "core/params_index.h"
#include "core/rule_parts.h"
#include "ops/check.h"

/* Checks `cp`. Without it, and alone, a rank has all positions, which is a share like any other. */
static smla_status
require_share(const smla_checker *c, int64_t rank, int64_t size, int64_t interleave,
              smla_rank_share *share)
{
    SMLA_TRY(smla_require_share(c, rank, size, interleave, share));
    if (share->size == 0) {
        *share = (smla_rank_share){.rank = 0, .size = 1, .interleave = 1};
    }
    return SMLA_OK;
}

/* The params of rows whose arrays have been checked. An array [N] is one row. */
static smla_rank_lists_params
make_params(const smla_checker *c, void *stream, const smla_rank_share *share, const DLTensor *in,
            const DLTensor *out, const DLTensor *lens)
{
    const int column = in->ndim - 1;
    return (smla_rank_lists_params){
        .call = smla_call_of(c, stream, NULL),
        .share = *share,
        .num_rows = column == 0 ? 1 : smla_size(in, 0),
        .num_columns = smla_size(in, column),
        .are_int64 = smla_dtype(in) == SMLA_DTYPE_INT64,
        .in = smla_data(in),
        .in_stride_row = column == 0 ? 0 : smla_stride(in, 0),
        .in_stride_column = smla_stride(in, column),
        .out = smla_data(out),
        .out_stride_row = column == 0 ? 0 : smla_stride(out, 0),
        SMLA_SET_VECTOR(lens, lens),
    };
}

smla_status
smla_check_cp_local_positions(const smla_cp_positions_args *args, smla_rank_lists_params *params,
                              const smla_backend **backend, smla_error *error)
{
    const DLTensor *const positions = args->positions;
    smla_rank_share share;
    smla_checker c;
    smla_open_checker(&c, "cp_local_positions", error);
    SMLA_TRY(smla_require_any(&c, "positions", positions, SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                              SMLA_RULE_ANY_LAST_STRIDE));
    if (positions->ndim < 1 || positions->ndim > 2) {
        return smla_refuse(&c, "`positions` must have 1 or 2 dimensions, got shape %s",
                           smla_describe_shape(positions).text);
    }
    SMLA_TRY(require_share(&c, args->cp_rank, args->cp_size, args->cp_interleave, &share));
    SMLA_TRY(
        smla_require(&c, &(smla_rule){.name = "out",
                                      .tensor = args->out,
                                      .dtypes = smla_dtype(positions),
                                      .flags = SMLA_RULE_OUTPUT,
                                      .ndim = positions->ndim,
                                      .shape = {smla_size(positions, 0),
                                                positions->ndim == 2 ? smla_size(positions, 1) : 0},
                                      .hint = "the shape of `positions`"}));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = make_params(&c, args->stream, &share, positions, args->out, NULL);
    return SMLA_OK;
}

smla_status
smla_check_cp_local_topk(const smla_cp_topk_args *args, smla_rank_lists_params *params,
                         const smla_backend **backend, smla_error *error)
{
    const DLTensor *const lists = args->topk_indices;
    smla_rank_share share;
    smla_checker c;
    smla_open_checker(&c, "cp_local_topk", error);
    SMLA_TRY(
        smla_require_2d(&c, "topk_indices", lists, SMLA_DTYPE_INT32, SMLA_ANY, SMLA_ANY, 0, NULL));
    SMLA_TRY(require_share(&c, args->cp_rank, args->cp_size, args->cp_interleave, &share));
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_INT32, smla_size(lists, 0),
                             smla_size(lists, 1), SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(
        smla_require_vector(&c, "lens", args->lens, smla_size(lists, 0), SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = make_params(&c, args->stream, &share, lists, args->out, args->lens);
    return SMLA_OK;
}

smla_status
smla_check_cp_local_lengths(const smla_cp_lengths_args *args, smla_rank_lists_params *params,
                            const smla_backend **backend, smla_error *error)
{
    smla_rank_share share;
    smla_checker c;
    smla_open_checker(&c, "cp_local_lengths", error);
    SMLA_TRY(smla_require_vector(&c, "seq_lens", args->seq_lens, SMLA_ANY, 0, NULL));
    SMLA_TRY(require_share(&c, args->cp_rank, args->cp_size, args->cp_interleave, &share));
    SMLA_TRY(smla_require_1d(&c, "out", args->out, SMLA_DTYPE_INT32, smla_size(args->seq_lens, 0),
                             SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = make_params(&c, args->stream, &share, args->seq_lens, args->out, NULL);
    return SMLA_OK;
}
