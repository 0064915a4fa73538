/* check_topk.c: the argument rules of top_k_per_row, which lightning_indexer shares, and of
 * top_k_merge.
 */
#include "core/params_topk.h"
#include "ops/check.h"

/* What belongs to slots_block_table must come with it, and not without it. */
static smla_status
require_slot_arguments(const smla_checker *c, const smla_top_k_args *args)
{
    const struct {
        const char *name;
        bool is_given;
        bool is_needed;
    } parts[] = {{"slots_block_size", args->slots_block_size != 0, true},
                 {"req_id_per_token", args->req_id_per_token != NULL, true},
                 {"is_valid", args->is_valid != NULL, false},
                 {"slots", args->slots != NULL, true},
                 {"lens", args->lens != NULL, true}};
    const bool has_table = args->slots_block_table != NULL;
    for (int i = 0; i < 5; i++) {
        if (has_table ? parts[i].is_needed && !parts[i].is_given : parts[i].is_given) {
            return smla_refuse(c, "`%s` must %s `slots_block_table`, %s", parts[i].name,
                               has_table ? "come with" : "be left out without",
                               has_table ? "got none" : "got one");
        }
    }
    return SMLA_OK;
}

/* Checks the arrays of the slots, all of which are absent without slots_block_table. */
static smla_status
require_slots(smla_checker *c, const smla_top_k_args *args, int64_t num_tokens)
{
    const unsigned flags = SMLA_RULE_OPTIONAL;
    SMLA_TRY(require_slot_arguments(c, args));
    SMLA_TRY(smla_require_table(c, "slots_block_table", args->slots_block_table, 0, flags));
    if (args->slots_block_table != NULL) {
        SMLA_TRY(smla_require_number(c, "slots_block_size", args->slots_block_size, 1));
    }
    SMLA_TRY(smla_require_vector(c, "req_id_per_token", args->req_id_per_token, num_tokens,
                                 flags | SMLA_RULE_MORE_ROWS, "an entry per token"));
    return smla_require_is_valid(c, args->is_valid, num_tokens);
}

/* Checks an array [num_tokens, k] that is written. */
static smla_status
require_chosen(smla_checker *c, const char *name, const DLTensor *tensor, unsigned dtype,
               int64_t num_tokens, int64_t k, unsigned flags)
{
    return smla_require_2d(c, name, tensor, dtype, num_tokens, k, flags | SMLA_RULE_OUTPUT,
                           "`k` columns per token");
}

smla_status
smla_require_choice(smla_checker *c, const smla_top_k_args *args, int64_t num_tokens,
                    unsigned dtype, smla_top_k_params *params)
{
    const unsigned optional = SMLA_RULE_OPTIONAL;
    SMLA_TRY(smla_require_number(c, "k", args->k, 1));
    SMLA_TRY(require_slots(c, args, num_tokens));
    SMLA_TRY(require_chosen(c, "out", args->out, SMLA_DTYPE_INT32, num_tokens, args->k, 0));
    SMLA_TRY(
        require_chosen(c, "slots", args->slots, SMLA_DTYPE_INT32, num_tokens, args->k, optional));
    SMLA_TRY(
        smla_require_vector(c, "lens", args->lens, num_tokens, SMLA_RULE_OUTPUT | optional, NULL));
    SMLA_TRY(require_chosen(c, "values", args->values, dtype, num_tokens, args->k, optional));
    const smla_call call = smla_call_of(c, args->stream, NULL);
    *params = (smla_top_k_params){
        .call = call,
        .num_tokens = num_tokens,
        .k = args->k,
        .is_bf16 = dtype == SMLA_DTYPE_BF16,
        SMLA_SET_VECTOR(starts, args->starts),
        SMLA_SET_VECTOR(ends, args->ends),
        SMLA_SET_ROWS(out, args->out),
        SMLA_SET_ROWS(values, args->values),
        .slots = {.call = call,
                  .table = "slots_block_table",
                  .num_tokens = num_tokens,
                  .topk = args->k,
                  .num_reqs =
                      args->slots_block_table == NULL ? 0 : smla_size(args->slots_block_table, 0),
                  SMLA_SET_ROWS(topk_indices, args->out),
                  .req_id_per_token = smla_data(args->req_id_per_token),
                  .req_id_stride = smla_stride(args->req_id_per_token, 0),
                  .pages = smla_page_table_of(args->slots_block_table, args->slots_block_size),
                  SMLA_SET_VECTOR(is_valid, args->is_valid),
                  SMLA_SET_ROWS(out, args->slots),
                  .lens = smla_data(args->lens),
                  .lens_stride = smla_stride(args->lens, 0)},
    };
    return SMLA_OK;
}

smla_status
smla_check_top_k_per_row(const smla_top_k_args *args, smla_top_k_params *params,
                         const smla_backend **backend, smla_error *error)
{
    static const char hint[] = "an entry per row of `logits`";
    smla_checker c;
    smla_open_checker(&c, "top_k_per_row", error);
    SMLA_TRY(smla_require_2d(&c, "logits", args->logits, SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                             SMLA_ANY, SMLA_ANY, 0, NULL));
    const int64_t num_tokens = smla_size(args->logits, 0);
    const int64_t num_columns = smla_size(args->logits, 1);
    if (num_columns > INT32_MAX) {
        return smla_refuse(&c, "`logits` must have at most %d columns, got %lld", INT32_MAX,
                           (long long)num_columns);
    }
    SMLA_TRY(
        smla_require_vector(&c, "starts", args->starts, num_tokens, SMLA_RULE_MORE_ROWS, hint));
    SMLA_TRY(smla_require_vector(&c, "ends", args->ends, num_tokens, SMLA_RULE_MORE_ROWS, hint));
    SMLA_TRY(smla_require_choice(&c, args, num_tokens, smla_dtype(args->logits), params));
    SMLA_TRY(smla_finish_check(&c, backend));
    params->num_columns = num_columns;
    params->logits = smla_data(args->logits);
    params->logits_stride_token = smla_stride(args->logits, 0);
    return SMLA_OK;
}

smla_status
smla_check_top_k_merge(const smla_top_k_merge_args *args, smla_top_k_merge_params *params,
                       const smla_backend **backend, smla_error *error)
{
    const DLTensor *const lists = args->indices;
    smla_checker c;
    smla_open_checker(&c, "top_k_merge", error);
    SMLA_TRY(smla_require_3d(&c, "indices", lists, SMLA_DTYPE_INT32, SMLA_ANY, SMLA_ANY, SMLA_ANY,
                             0, "N lists [T, K]"));
    const int64_t num_lists = smla_size(lists, 0);
    const int64_t num_tokens = smla_size(lists, 1);
    const int64_t num_columns = smla_size(lists, 2);
    if (num_lists < 1 || num_lists > SMLA_MAX_MERGED_LISTS) {
        return smla_refuse(&c, "`indices` must have 1 to %d lists, got %lld", SMLA_MAX_MERGED_LISTS,
                           (long long)num_lists);
    }
    if (num_columns > INT32_MAX / num_lists) {
        return smla_refuse(&c, "`indices` must have at most %d entries per token, got %lld x %lld",
                           INT32_MAX, (long long)num_lists, (long long)num_columns);
    }
    SMLA_TRY(smla_require_3d(&c, "values", args->values, SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                             num_lists, num_tokens, num_columns, 0, "a score per index"));
    SMLA_TRY(smla_require_number(&c, "k", args->k, 1));
    SMLA_TRY(require_chosen(&c, "out", args->out, SMLA_DTYPE_INT32, num_tokens, args->k, 0));
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_top_k_merge_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_lists = num_lists,
        .num_tokens = num_tokens,
        .num_columns = num_columns,
        .k = args->k,
        .is_bf16 = smla_dtype(args->values) == SMLA_DTYPE_BF16,
        .indices = smla_data(lists),
        .indices_stride_list = smla_stride(lists, 0),
        .indices_stride_token = smla_stride(lists, 1),
        .values = smla_data(args->values),
        .values_stride_list = smla_stride(args->values, 0),
        .values_stride_token = smla_stride(args->values, 1),
        SMLA_SET_ROWS(out, args->out),
    };
    return SMLA_OK;
}
