/* check_compressor.c: the argument rules of save_partial_states and compress_norm_rope_store. */
#include "core/params_compressor.h"
#include "core/params_rope.h"
#include "ops/check_cache.h"

/* ---- Parts --------------------------------------------------------------------------------- */

/* The widths of a state: the groups of ratio 4 overlap. */
static int64_t
width_of(int64_t dim, int64_t ratio)
{
    return ratio == SMLA_OVERLAP_RATIO ? 2 * dim : dim;
}

static smla_status
require_ape(smla_checker *c, const DLTensor *ape, int64_t ratio, int64_t width)
{
    return smla_require_2d(c, "ape", ape, SMLA_DTYPE_FP32, ratio, width, 0,
                           "a row per position of a group");
}

/* Checks kv and score. */
static smla_status
require_given(smla_checker *c, const DLTensor *kv, const DLTensor *score, int64_t num_tokens,
              int64_t width)
{
    smla_rule rows = {.name = "kv",
                      .tensor = kv,
                      .dtypes = SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                      .flags = SMLA_RULE_MORE_ROWS,
                      .ndim = 2,
                      .shape = {num_tokens, width},
                      .hint = "at least a row per slot, and the values of a state"};
    SMLA_TRY(smla_require(c, &rows));
    rows.name = "score";
    rows.tensor = score;
    rows.dtypes = smla_dtype(kv);
    return smla_require(c, &rows);
}

static smla_status
require_state(smla_checker *c, const DLTensor *state, int64_t width, unsigned flags)
{
    SMLA_TRY(smla_require_3d(c, "state", state, SMLA_DTYPE_FP32, SMLA_ANY, SMLA_ANY, 2 * width,
                             flags, "pages, their rows, values and scores"));
    if (smla_size(state, 1) < 1) {
        return smla_refuse(c, "`state` must have pages of at least 1 row, got 0");
    }
    return SMLA_OK;
}

static void
fill_rows(const smla_call *call, const DLTensor *kv, const DLTensor *score, const DLTensor *state,
          const DLTensor *slot_mapping, smla_cache_write_params *rows)
{
    const smla_kv_view pages = {
        .base = smla_data(state),
        .num_pages = smla_size(state, 0),
        .block_size = smla_size(state, 1),
        .page_stride_bytes = smla_stride(state, 0) * (int64_t)sizeof(float),
        .token_stride_bytes = smla_stride(state, 1) * (int64_t)sizeof(float),
    };
    smla_fill_cache_write(call, "state", &pages, "slot_mapping", slot_mapping, rows);
    rows->kv_c = smla_data(kv);
    rows->k_pe = smla_data(score);
    rows->kv_c_stride_token = smla_stride(kv, 0);
    rows->k_pe_stride_token = smla_stride(score, 0);
    rows->input_type = kv == NULL ? SMLA_FLOAT_FP32 : smla_float_type_of(kv);
}

/* ---- save_partial_states ------------------------------------------------------------------- */

/* Checks that ape has the rows and columns of a compressor. */
static smla_status
require_sizes(const smla_checker *c, int64_t ratio, int64_t width)
{
    if (ratio < 1 || ratio > INT32_MAX) {
        return smla_refuse(c, "`ape` must have 1 to %d rows, one per position of a group, got %lld",
                           INT32_MAX, (long long)ratio);
    }
    const int64_t small = width_of(SMLA_INDEX_HEAD_DIM, ratio);
    const int64_t large = width_of(SMLA_V4_HEAD_DIM, ratio);
    if (width != small && width != large) {
        return smla_refuse(
            c, "`ape` must have %lld or %lld columns for a ratio of %lld (its rows), got %lld",
            (long long)small, (long long)large, (long long)ratio, (long long)width);
    }
    return SMLA_OK;
}

smla_status
smla_check_save_partial_states(const smla_partial_states_args *args,
                               smla_partial_states_params *params, const smla_backend **backend,
                               smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "save_partial_states", error);
    SMLA_TRY(smla_require_slots(&c, "slot_mapping", args->slot_mapping, SMLA_ANY, 0));
    const int64_t num_tokens = smla_size(args->slot_mapping, 0);
    SMLA_TRY(require_ape(&c, args->ape, SMLA_ANY, SMLA_ANY));
    const int64_t ratio = smla_size(args->ape, 0);
    const int64_t width = smla_size(args->ape, 1);
    SMLA_TRY(require_sizes(&c, ratio, width));
    SMLA_TRY(require_given(&c, args->kv, args->score, num_tokens, width));
    SMLA_TRY(smla_require_slots(&c, "positions", args->positions, num_tokens, SMLA_RULE_MORE_ROWS));
    SMLA_TRY(require_state(&c, args->state, width, SMLA_RULE_OUTPUT));
    SMLA_TRY(smla_finish_check(&c, backend));
    const smla_call call = smla_call_of(&c, args->stream, NULL);
    *params = (smla_partial_states_params){
        .call = call,
        .width = width,
        .ratio = ratio,
        SMLA_SET_VECTOR(ape, args->ape),
        SMLA_SET_VECTOR(positions, args->positions),
        .positions_are_int64 = smla_dtype(args->positions) == SMLA_DTYPE_INT64,
    };
    fill_rows(&call, args->kv, args->score, args->state, args->slot_mapping, &params->rows);
    return SMLA_OK;
}

/* ---- compress_norm_rope_store -------------------------------------------------------------- */

/* The number of weights is that of the values of a compressed row. */
static smla_status
require_norm_weight(smla_checker *c, const DLTensor *weight)
{
    SMLA_TRY(smla_require_1d(c, "norm_weight", weight, SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32, SMLA_ANY,
                             0, NULL));
    const int64_t dim = smla_size(weight, 0);
    if (dim != SMLA_V4_HEAD_DIM && dim != SMLA_INDEX_HEAD_DIM) {
        return smla_refuse(
            c, "`norm_weight` must have 512 weights, or 128 for rows of an indexer, got %lld",
            (long long)dim);
    }
    return SMLA_OK;
}

/* Checks kv, score and ape, if one of them is given. */
static smla_status
require_step(smla_checker *c, const smla_compress_args *args, int64_t num_tokens, int64_t width)
{
    if (args->kv == NULL && args->score == NULL && args->ape == NULL) {
        return SMLA_OK;
    }
    SMLA_TRY(require_ape(c, args->ape, args->ratio, width));
    return require_given(c, args->kv, args->score, num_tokens, width);
}

smla_status
smla_check_compress_norm_rope_store(const smla_compress_args *args, smla_compress_params *params,
                                    const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_rope rope;
    smla_kv_view kv;
    smla_given_scale kv_scale;
    smla_open_checker(&c, "compress_norm_rope_store", error);
    SMLA_TRY(require_norm_weight(&c, args->norm_weight));
    SMLA_TRY(smla_require_count(c.op, "ratio", args->ratio, 1, INT32_MAX, error));
    const int64_t dim = smla_size(args->norm_weight, 0);
    const int64_t width = width_of(dim, args->ratio);
    const smla_cache_rule cache =
        SMLA_CACHE_OF(args, kv_cache, smla_formats_of_size((int32_t)dim), SMLA_RULE_OUTPUT);
    SMLA_TRY(require_state(&c, args->state, width, args->kv == NULL ? 0 : SMLA_RULE_OUTPUT));
    SMLA_TRY(smla_require_block_table(&c, args->block_table));
    SMLA_TRY(smla_require_slots(&c, "slot_mapping", args->slot_mapping, SMLA_ANY, 0));
    const int64_t num_tokens = smla_size(args->slot_mapping, 0);
    SMLA_TRY(smla_require_vector(&c, "req_id_per_token", args->req_id_per_token, num_tokens,
                                 SMLA_RULE_MORE_ROWS, "an entry per token"));
    SMLA_TRY(smla_require_rope(&c, args->positions, args->rope_table, num_tokens, &rope));
    SMLA_TRY(smla_require_kv(&c, &cache, &kv));
    SMLA_TRY(smla_require_slots(&c, "kv_slot_mapping", args->kv_slot_mapping, num_tokens,
                                SMLA_RULE_MORE_ROWS));
    SMLA_TRY(require_step(&c, args, num_tokens, width));
    SMLA_TRY(smla_require_kv_scale(&c, "kv_scale", &args->kv_scale, kv.format, &kv_scale));
    SMLA_TRY(smla_require_eps(&c, args->eps));
    SMLA_TRY(smla_finish_check(&c, backend));
    const smla_call call = smla_call_of(&c, args->stream, kv.format);
    *params = (smla_compress_params){
        .call = call,
        .states = {.call = call,
                   .width = width,
                   .ratio = args->ratio,
                   SMLA_SET_VECTOR(ape, args->ape),
                   .positions = rope.positions,
                   .positions_stride = rope.positions_stride,
                   .positions_are_int64 = rope.positions_are_int64},
        .table = {.block_table = smla_data(args->block_table),
                  .stride_req = smla_stride(args->block_table, 0),
                  .stride_block = smla_stride(args->block_table, 1),
                  .num_blocks = smla_size(args->block_table, 1),
                  .block_size = smla_size(args->state, 1)},
        .num_reqs = smla_size(args->block_table, 0),
        .req_id_per_token = smla_data(args->req_id_per_token),
        .req_id_stride = smla_stride(args->req_id_per_token, 0),
        .dim = dim,
        .norm_weight = smla_data(args->norm_weight),
        .weight_type = smla_float_type_of(args->norm_weight),
        .eps = (float)args->eps,
        .rope = rope,
    };
    fill_rows(&call, args->kv, args->score, args->state, args->slot_mapping, &params->states.rows);
    smla_fill_cache_write(&call, cache.name, &kv, "kv_slot_mapping", args->kv_slot_mapping,
                          &params->insert);
    params->insert.num_tokens = num_tokens;
    params->insert.kv_scale = kv_scale;
    return SMLA_OK;
}
