/* check_attention_dense.c: the argument rules of mla_attention. Its main list is one of positions,
 * which the block table turns into slots, and whose limits per token the call writes to its
 * workspace.
 */
#include <math.h>

#include "ops/check_attention.h"

/* ---- Arrays -------------------------------------------------------------------------------- */

/* Whether no size is negative, and int64 holds every product of sizes. */
static bool
has_countable_sizes(const DLTensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++) {
        const int64_t size = tensor->shape[i];
        if (size < 0 || __builtin_mul_overflow(count, size > 0 ? size : 1, &count)) {
            return false;
        }
    }
    return true;
}

/* Views an array [B, n, ...] as [B * n, ...]. Others stay as they are, and so do arrays whose sizes
 * mean nothing: the rules that follow report both. */
static smla_status
flatten_tokens(const char *name, const DLTensor *tensor, smla_view *view, const DLTensor **flat,
               smla_error *error)
{
    smla_byte_range range;
    *flat = tensor;
    if (tensor == NULL || tensor->ndim < 2 || tensor->ndim > 4 || tensor->shape == NULL ||
        !has_countable_sizes(tensor) || !smla_find_byte_range(tensor, &range)) {
        return SMLA_OK;
    }
    const int64_t num_reqs = smla_size(tensor, 0), query_len = smla_size(tensor, 1);
    const bool joins = num_reqs <= 1 || query_len <= 1 || smla_is_empty(tensor) ||
                       smla_stride(tensor, 0) == query_len * smla_stride(tensor, 1);
    if (!joins) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "mla_attention: `%s` must have the tokens of one request behind those of "
                         "the one before, in equal steps, got strides %lld and %lld of %lld tokens",
                         name, (long long)smla_stride(tensor, 0), (long long)smla_stride(tensor, 1),
                         (long long)query_len);
    }
    view->tensor = *tensor;
    view->tensor.ndim = tensor->ndim - 1;
    view->tensor.shape = view->shape;
    view->tensor.strides = view->strides;
    view->shape[0] = num_reqs * query_len;
    view->strides[0] = query_len > 1 ? smla_stride(tensor, 1) : smla_stride(tensor, 0);
    for (int i = 1; i < view->tensor.ndim; i++) {
        view->shape[i] = smla_size(tensor, i + 1);
        view->strides[i] = smla_stride(tensor, i + 1);
    }
    *flat = &view->tensor;
    return SMLA_OK;
}

/* The arrays that have a row per token, with one dimension of tokens each. */
typedef struct flat_arrays {
    smla_view views[4];
    const DLTensor *q;
    const DLTensor *q_pe;
    const DLTensor *out;
    const DLTensor *lse;
} flat_arrays;

static smla_status
require_rank(const char *name, const DLTensor *tensor, int ndim, smla_error *error)
{
    return tensor == NULL || tensor->ndim == ndim
               ? SMLA_OK
               : smla_fail(error, SMLA_ERROR_VALUE,
                           "mla_attention: `%s` must have %d dimensions beside a query of that "
                           "shape, got %d",
                           name, ndim, (int)tensor->ndim);
}

static smla_status
flatten(const smla_mla_attention_args *args, flat_arrays *flat, smla_error *error)
{
    *flat = (flat_arrays){.q = args->q, .q_pe = args->q_pe, .out = args->out, .lse = args->lse};
    if (args->q == NULL || args->q->ndim != 4) {
        return SMLA_OK;
    }
    SMLA_TRY(require_rank("q[1]", args->q_pe, 4, error));
    SMLA_TRY(require_rank("out", args->out, 4, error));
    SMLA_TRY(require_rank("lse", args->lse, 3, error));
    SMLA_TRY(flatten_tokens("q", args->q, &flat->views[0], &flat->q, error));
    SMLA_TRY(flatten_tokens("q[1]", args->q_pe, &flat->views[1], &flat->q_pe, error));
    SMLA_TRY(flatten_tokens("out", args->out, &flat->views[2], &flat->out, error));
    return flatten_tokens("lse", args->lse, &flat->views[3], &flat->lse, error);
}

/* The most keys of a request, so that the CPU's plan follows lengths, not the table's width. */
static int64_t
find_longest(const smla_requests *reqs, const smla_rank_share *share)
{
    int64_t longest = 0;
    for (int64_t req = 0; req < reqs->num_reqs; req++) {
        const int64_t keys = smla_count_own(share, smla_seq_len(reqs, req));
        longest = keys > longest ? keys : longest;
    }
    return longest;
}

void
smla_fill_table(const smla_page_table *table, DLDeviceType device, smla_attention_params *params)
{
    const smla_requests *const reqs = &params->visible.reqs;
    smla_key_list *const list = &params->keys.lists[0];
    const int64_t most = INT32_MAX - SMLA_SPLIT_ALIGN; /* columns that a launch can have */
    const bool overflows =
        __builtin_mul_overflow(table->num_blocks, table->block_size, &list->topk);
    params->source = SMLA_KEYS_TABLE;
    params->keys.entry_tokens = (int32_t)table->block_size;
    list->map = (smla_index_map){
        .block_table = table->block_table,
        .block_table_stride_req = table->stride_req,
        .block_table_stride_block = table->stride_block,
        .num_reqs = reqs->num_reqs,
        .num_blocks = table->num_blocks,
    };
    list->begin_stride = list->end_stride = 1;
    list->topk = overflows || list->topk > most ? most : list->topk;
    if (device == kDLCPU) {
        list->topk =
            smla_clamp_int64(find_longest(reqs, &params->visible.rule.share), 0, list->topk);
    }
}

/* Fills the main list's keys, and what finds their ranges. */
static smla_status
require_keys(smla_checker *c, const smla_mla_attention_args *args, smla_attention_params *params)
{
    const smla_table_args tables = SMLA_TABLE_OF(args);
    const smla_mask_args mask = SMLA_MASK_OF(args);
    smla_requests *const reqs = &params->visible.reqs;
    const smla_key_list *const list = &params->keys.lists[0];
    const DLTensor *table = NULL;
    SMLA_TRY(smla_require_requests(c, &tables, args->q, params->queries.num_tokens, reqs, &table));
    SMLA_TRY(smla_require_mask(c, &mask, params));
    SMLA_TRY(smla_require_share(c, args->cp_rank, args->cp_size, args->cp_interleave,
                                &params->visible.rule.share));
    const bool has_pages = table == args->block_table && list->kv.block_size > 0;
    const smla_page_table rows = smla_page_table_of(table, has_pages ? list->kv.block_size : 1);
    smla_fill_table(&rows, c->device.device_type, params);
    return SMLA_OK;
}

/* ---- mla_attention ------------------------------------------------------------------------- */

/* Puts the ranges in front of attention's own workspace. */
static smla_status
carve_ranges(smla_attention_params *params, smla_error *error)
{
    const int64_t count = params->queries.num_tokens;
    const int64_t least = params->plan.workspace_bytes;
    smla_workspace *const workspace = &params->workspace;
    smla_token_ranges *const ranges = &params->ranges;
    smla_key_list *const list = &params->keys.lists[0];
    if (count == 0) {
        return SMLA_OK;
    }
    if (workspace->bytes < least) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "mla_attention: `workspace` must have at least %lld bytes, got %lld",
                         (long long)least, (long long)workspace->bytes);
    }
    const int64_t padding = (int64_t)(-(uintptr_t)workspace->memory % SMLA_RANGES_ALIGN);
    ranges->req_ids = (int32_t *)((uint8_t *)workspace->memory + padding);
    ranges->begin = ranges->req_ids + count;
    ranges->end = ranges->begin + count;
    smla_take_ranges(ranges, list);
    workspace->memory = (uint8_t *)workspace->memory + smla_key_ranges_bytes(count);
    workspace->bytes -= smla_key_ranges_bytes(count);
    return SMLA_OK;
}

/* Decides who fills the rows of no request. A kernel that reads lengths takes them for a request
 * without keys, whose out and lse it writes. Everywhere else the pass that finds ranges fills them,
 * so ranges are found, too, if only one of the two is asked for. */
static smla_status
plan_padding(const smla_mla_attention_args *args, const flat_arrays *flat,
             smla_attention_params *params, smla_error *error)
{
    smla_padding_rows *const padding = &params->padding;
    const float empty_lse = params->results.empty_lse_is_plus_inf ? INFINITY : -INFINITY;
    SMLA_TRY(smla_require_padding(params->call.op, args->fills_padding, flat->out, flat->lse,
                                  empty_lse, padding, error));
    params->plan.reads_lengths =
        params->plan.reads_lengths && (padding->out == NULL) == (padding->lse == NULL);
    params->results.fills_padding = params->plan.reads_lengths && padding->out != NULL;
    return SMLA_OK;
}

smla_status
smla_check_mla_attention(const smla_mla_attention_args *args, smla_attention_params *params,
                         const smla_backend **backend, smla_error *error)
{
    flat_arrays flat;
    smla_attention_inputs in = SMLA_INPUTS_OF(args, args->q_pe);
    const smla_list_args list = {.cache = {.name = "kv_cache",
                                           .tensor = args->kv_cache,
                                           .kv_format = args->kv_format,
                                           .formats = SMLA_KV_DENSE},
                                 .kv_scale = SMLA_NAMED(args, kv_scale)};
    smla_checker c;
    smla_open_checker(&c, "mla_attention", error);
    SMLA_TRY(flatten(args, &flat, error));
    in.q.tensor = flat.q;
    in.q_pe = flat.q_pe;
    in.out = flat.out;
    in.lse = flat.lse;
    in.q_scale = (smla_named_scale)SMLA_NAMED(args, q_scale);
    in.empty_lse_is_plus_inf = args->lse_empty_is_plus_inf != 0;
    SMLA_TRY(smla_require_lists(&c, &in, &list, 1, params));
    SMLA_TRY(require_keys(&c, args, params));
    smla_rule out = smla_latent_out(params);
    SMLA_TRY(smla_finish_attention(&c, &in, &out, params, backend));
    SMLA_TRY(smla_require_logit_scale(&c, &in, &list, params));
    SMLA_TRY(plan_padding(args, &flat, params, error));
    return carve_ranges(params, error);
}
