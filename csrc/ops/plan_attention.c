/* plan_attention.c: the plan of a call of attention: how many splits its keys are cut into, which
 * kernels run, and how much workspace they need. A plan is made here, logged, and run. Plans and
 * sizes are estimated with floating-point numbers, so asking for one sets the default mode as a
 * call does.
 */
#include "core/args.h"
#include "core/attention/needs.h"
#include "core/entry.h"
#include "core/log.h"
#include "ops/check_attention.h"
#include "ops/dispatch.h"

/* Splits of a table that the plan chooses have at least so many keys, because each packs the whole
 * query. */
enum { LEAST_PLANNED_COLUMNS = 256 };

/* ---- Plans of calls ------------------------------------------------------------------------- */

smla_status
smla_require_num_splits(const char *op, int64_t num_splits, smla_error *error)
{
    return num_splits >= 0 && num_splits <= SMLA_MAX_SPLITS
               ? SMLA_OK
               : smla_fail_value(error, op,
                                 "`num_splits` must be 0 (the plan chooses) or 1 to %d, got %lld",
                                 SMLA_MAX_SPLITS, (long long)num_splits);
}

/* The requests of a table, as smla_attention_shape counts them. */
static int64_t
count_table_reqs(const smla_attention_params *params)
{
    const smla_visible *const visible = &params->visible;
    const bool is_usual = params->source == SMLA_KEYS_TABLE && visible->rule.chunk == 0 &&
                          visible->rule.share.size == 0;
    return is_usual ? visible->reqs.num_reqs : 0;
}

/* Whether the rows of all heads of all tokens are equally far apart. */
static bool
are_rows_even(int64_t stride_token, int64_t stride_head, int64_t num_heads)
{
    return num_heads == 1 || stride_token == num_heads * stride_head;
}

/* Query tokens of each request, as smla_attention_shape counts them. Tokens of a request may share
 * a tile where all of them see its first key. */
static int64_t
find_tile_queries(const smla_attention_params *params)
{
    const smla_visible *const visible = &params->visible;
    const int64_t num_heads = params->queries.num_heads;
    const int64_t query_len = visible->reqs.query_starts == NULL ? visible->reqs.query_len : 0;
    bool may_share =
        count_table_reqs(params) > 0 && visible->rule.left < 0 &&
        visible->reqs.num_reqs * query_len == params->queries.num_tokens &&
        are_rows_even(params->results.out_stride_token, params->results.out_stride_head, num_heads);
    for (int i = 0; i < 2; i++) {
        const smla_head_rows *const rows = &params->queries.parts[i];
        may_share = may_share && are_rows_even(rows->stride_token, rows->stride_head, num_heads);
    }
    return may_share ? query_len : 0;
}

void
smla_plan_lists(int num_splits, const smla_backend *backend, smla_attention_params *params)
{
    const smla_key_lists *const keys = &params->keys;
    const bool has_extra = keys->num_lists == 2;
    const smla_attention_shape shape = {
        .num_tokens = params->queries.num_tokens,
        .num_heads = params->queries.num_heads,
        .topk = keys->lists[0].topk,
        .extra_topk = has_extra ? keys->lists[1].topk : 0,
        .num_splits = num_splits,
        .num_keys = smla_kv_num_slots(&keys->lists[0].kv) +
                    (has_extra ? smla_kv_num_slots(&keys->lists[1].kv) : 0),
        .room = params->workspace.bytes,
        .device_id = params->call.stream.device_id,
        .formats = {keys->lists[0].kv.format, has_extra ? keys->lists[1].kv.format : NULL},
        .source = params->source,
        .needs = smla_find_needs(params),
        .table_reqs = count_table_reqs(params),
        .has_starts = params->visible.reqs.query_starts != NULL,
        .tile_queries = find_tile_queries(params),
        .explains = smla_is_logging,
    };
    backend->plan_attention(&shape, &params->plan);
    params->results.num_splits = params->plan.runs[0].num_splits;
    if (params->source == SMLA_KEYS_TABLE) {
        params->plan.workspace_bytes += smla_key_ranges_bytes(shape.num_tokens);
        params->visible.least_split_columns =
            num_splits == 0 ? LEAST_PLANNED_COLUMNS : SMLA_SPLIT_ALIGN;
    }
}

void
smla_plan_attention(const smla_attention_inputs *in, smla_call call, const smla_backend *backend,
                    smla_attention_params *params)
{
    params->call = call;
    params->results = (smla_results){
        SMLA_SET_HEADS(out, in->out),
        SMLA_SET_HEADS(lse, in->lse),
        SMLA_SET_HEADS(max_logits, in->max_logits),
        .out_type = smla_float_type_of(in->out),
        .empty_lse_is_plus_inf = in->empty_lse_is_plus_inf,
        .num_splits = params->source == SMLA_KEYS_PAGED ? in->num_splits : 1,
    };
    if (smla_has_lists(params)) {
        smla_plan_lists(in->num_splits, backend, params);
    }
}

/* ---- Runs ----------------------------------------------------------------------------------- */

/* Adds to the call's line which kernels run, and over how many tokens and splits. */
static void
log_plan(const smla_backend *backend, const smla_attention_plan *plan)
{
    for (int i = 0; i < plan->num_runs; i++) {
        const char *const kernel = backend->kernel_name(&plan->runs[i]);
        smla_log_text(" kernel %s (tokens %lld, splits %d%s%s),", kernel == NULL ? "none" : kernel,
                      (long long)plan->runs[i].num_tokens, plan->runs[i].num_splits,
                      plan->lack == NULL ? "" : "; ", plan->lack == NULL ? "" : plan->lack);
    }
}

smla_status
smla_attend(const smla_attention_params *params, const smla_backend *backend, smla_error *error)
{
    const bool finds_ranges = params->source == SMLA_KEYS_TABLE && params->ranges.req_ids != NULL;
    if (finds_ranges && !params->plan.reads_lengths) {
        const smla_key_ranges_params ranges = {.call = params->call,
                                               .reqs = params->visible.reqs,
                                               .rule = params->visible.rule,
                                               .absent_req = -1,
                                               .to = params->ranges,
                                               .padding = params->padding};
        SMLA_TRY(backend->find_key_ranges(&ranges, error));
    }
    if (smla_is_logging) {
        log_plan(backend, &params->plan);
    }
    return backend->attend(params, error);
}

/* ---- Sizes ---------------------------------------------------------------------------------- */

static smla_status
check_shape(const smla_attention_workspace_args *given, smla_attention_shape *shape,
            const smla_backend **backend, smla_error *error)
{
    static const char op[] = "attention_workspace_size";
    smla_attention_workspace_args args;
    SMLA_TRY(smla_read_args(op, &args, sizeof args, given, error));
    const int64_t value_dim = args.head_dim_v == 0 ? SMLA_KV_LORA_RANK : args.head_dim_v;
    SMLA_TRY(smla_require_count(op, "head_dim_v", value_dim, 1, SMLA_KV_LORA_RANK, error));
    SMLA_TRY(smla_require_count(op, "num_tokens", args.num_tokens, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(op, "topk", args.topk, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(op, "extra_topk", args.extra_topk, 0, INT32_MAX, error));
    SMLA_TRY(smla_require_count(op, "num_heads", args.num_heads, 1, SMLA_MAX_HEADS, error));
    SMLA_TRY(smla_require_num_splits(op, args.num_splits, error));
    SMLA_TRY(smla_require_count(op, "num_keys", args.num_keys, 0, INT32_MAX, error));
    const DLDevice device = smla_normal_device(args.device);
    SMLA_TRY(smla_find_backend(op, device, backend, error));
    *shape = (smla_attention_shape){.num_tokens = args.num_tokens,
                                    .num_heads = args.num_heads,
                                    .topk = args.topk,
                                    .extra_topk = args.extra_topk,
                                    .num_splits = args.num_splits,
                                    .num_keys = args.num_keys,
                                    .device_id = device.device_id,
                                    .value_dim = (int32_t)value_dim};
    return SMLA_OK;
}

/* The workspace of sparse_attention, and with covers_tables of mla_attention, too. */
static smla_status
find_workspace_size(const smla_attention_workspace_args *args, bool covers_tables, int64_t *bytes,
                    smla_error *error)
{
    smla_attention_shape shape;
    const smla_backend *backend;
    SMLA_TRY(check_shape(args, &shape, &backend, error));
    SMLA_TRY(smla_require_pointer("attention_workspace_size", "bytes", bytes, error));
    shape.covers_tables = covers_tables;
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    *bytes = backend->attention_workspace_size(&shape) +
             (covers_tables ? smla_key_ranges_bytes(shape.num_tokens) : 0);
    smla_fp_change(callers);
    return SMLA_OK;
}

smla_status
smla_attention_workspace_size(const smla_attention_workspace_args *args, int64_t *bytes,
                              smla_error *error)
{
    return find_workspace_size(args, true, bytes, error);
}

smla_status
smla_sparse_workspace_size(const smla_attention_workspace_args *args, int64_t *bytes,
                           smla_error *error)
{
    return find_workspace_size(args, false, bytes, error);
}

smla_status
smla_find_attention_plan(const smla_attention_workspace_args *args,
                         const smla_kv_format_info *format, smla_attention_plan *plan,
                         const smla_backend **backend, smla_error *error)
{
    smla_attention_shape shape;
    SMLA_TRY(check_shape(args, &shape, backend, error));
    shape.formats[0] = format;
    shape.explains = true;
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    (*backend)->plan_attention(&shape, plan);
    smla_fp_change(callers);
    return SMLA_OK;
}
