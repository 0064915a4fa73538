/* layer_v4.c: the attention of one DeepSeek V4 layer in the step that the builder planned, composed
 * of the public operators.
 *
 *   decodes    attention over the sliding window's cache, and over the compressed cache: the rows
 *              that the indexer chose, or all complete groups. Where the caller has numbers only,
 *              they are turned into slots first
 *   direct     the same for prefills
 *   separate   chunks of prefills: both caches to the workspace -> rows of the workspace ->
 *              attention over it as one page
 *
 * Everything is checked before the first byte is written. Padding tokens behind the last query have
 * empty lists.
 */
#include "ops/check_attention.h"
#include "ops/dispatch.h"
#include "step/layers/layer.h"
#include "step/plans/plan_v4.h"

static const char op[] = "attend";

typedef struct attend_call {
    smla_layer layer;
    const smla_v4_attend_args *args;
    const smla_v4_builder *b;
    int group;         /* the layer's ratio in the config; -1: the sliding window only */
    bool is_indexed;   /* topk_indices choose the compressed rows */
    smla_view indices; /* [T, K] slots of compressed rows; not used without a group */
    smla_view lens;    /* [T] */
    smla_view scratch; /* attention workspace */
} attend_call;

/* ---- Checks -------------------------------------------------------------------------------- */

static int64_t
layer_block_size(const attend_call *call)
{
    return call->b->config.block_size / call->args->compress_ratio;
}

static smla_status
check_layer(attend_call *call)
{
    const smla_v4_attend_args *const args = call->args;
    const smla_v4_builder *const b = call->b;
    SMLA_TRY(smla_require_step(&call->layer));
    call->group =
        args->compress_ratio == 1 ? -1 : smla_v4_find_ratio(&b->config, args->compress_ratio);
    if (args->compress_ratio != 1 && call->group < 0) {
        return smla_fail(call->layer.error, SMLA_ERROR_VALUE,
                         "%s: `compress_ratio` must be 1 or one of the config, got %lld", op,
                         (long long)args->compress_ratio);
    }
    if (call->group >= 0 && b->metadata.groups[call->group].ratio == 0) {
        return smla_fail(call->layer.error, SMLA_ERROR_VALUE,
                         "%s: `metadata` must have a compressed block table of ratio %lld, got "
                         "none: give it to MetadataBuilder.build",
                         op, (long long)args->compress_ratio);
    }
    call->is_indexed = args->compress_ratio == SMLA_V4_INDEXED_RATIO;
    return SMLA_OK;
}

static smla_status
check_cache(smla_checker *c, const smla_cache_rule *rule)
{
    smla_kv_view kv;
    SMLA_TRY(smla_require_kv(c, rule, &kv));
    return kv.format->head_dim == SMLA_V4_HEAD_DIM
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `%s` must have keys of %d values, got %d", op, rule->name,
                           SMLA_V4_HEAD_DIM, kv.format->head_dim);
}

static smla_status
check_caches(smla_checker *c, const attend_call *call)
{
    const smla_v4_config *const config = &call->b->config;
    SMLA_TRY(check_cache(c, &(smla_cache_rule){.name = "caches.swa",
                                               .tensor = call->args->swa_kv_cache,
                                               .kv_format = config->kv_format,
                                               .block_size = config->swa_block_size,
                                               .formats = SMLA_KV_ATTENTION}));
    return call->group < 0
               ? SMLA_OK
               : check_cache(c, &(smla_cache_rule){.name = "caches.compressed",
                                                   .tensor = call->args->compressed_kv_cache,
                                                   .kv_format = config->compressed_kv_format,
                                                   .block_size = layer_block_size(call),
                                                   .formats = SMLA_KV_EXTRA});
}

/* Whether prefills attend to a workspace, whose rows are found by the numbers of the choice. */
static bool
has_chunks(const attend_call *call)
{
    const smla_v4_metadata *const m = &call->b->metadata;
    return m->path == SMLA_PATH_SEPARATE && m->num_chunks > 0;
}

/* A layer without an indexer takes no choice. */
static smla_status
refuse_choice(const attend_call *call, const char *name, const DLTensor *given)
{
    return given == NULL ? SMLA_OK
                         : smla_fail(call->layer.error, SMLA_ERROR_VALUE,
                                     "%s: `%s` must be None for a layer without an indexer "
                                     "(compress ratio %lld), got an array",
                                     op, name, (long long)call->args->compress_ratio);
}

static smla_status
check_slots(smla_checker *c, const attend_call *call)
{
    const int64_t num_tokens = call->b->metadata.num_actual_tokens;
    SMLA_TRY(smla_require_topk(&call->layer, c, "slots", call->args->slots,
                               call->b->config.topk_tokens));
    return smla_require(c, &(smla_rule){.name = "lens",
                                        .tensor = call->args->lens,
                                        .dtypes = SMLA_DTYPE_INT32,
                                        .flags = SMLA_RULE_MORE_ROWS,
                                        .ndim = 1,
                                        .shape = {num_tokens},
                                        .hint = "the number of each token's slots"});
}

static smla_status
check_choice(smla_checker *c, const attend_call *call)
{
    const smla_v4_attend_args *const args = call->args;
    if (!call->is_indexed) {
        SMLA_TRY(refuse_choice(call, "topk_indices", args->topk_indices));
        SMLA_TRY(refuse_choice(call, "slots", args->slots));
        return refuse_choice(call, "lens", args->lens);
    }
    if (args->slots != NULL || args->lens != NULL) {
        SMLA_TRY(check_slots(c, call));
    }
    if (args->topk_indices == NULL && args->slots != NULL && has_chunks(call)) {
        return smla_fail(call->layer.error, SMLA_ERROR_VALUE,
                         "%s: `topk_indices` must be given beside slots for the prefills of path "
                         "\"separate\", got none",
                         op);
    }
    return args->topk_indices == NULL && args->slots != NULL
               ? SMLA_OK
               : smla_require_topk(&call->layer, c, "topk_indices", args->topk_indices,
                                   call->b->config.topk_tokens);
}

static smla_status
check_attend(attend_call *call)
{
    smla_checker c;
    smla_open_checker(&c, op, call->layer.error);
    SMLA_TRY(check_layer(call));
    const smla_v4_config *const config = &call->b->config;
    const DLTensor *const q = call->args->q;
    SMLA_TRY(smla_require_query(&c, "q", smla_find_kv_format(SMLA_KV_FP8_V4), q, NULL,
                                call->b->metadata.num_actual_tokens, config->num_heads,
                                SMLA_RULE_MORE_ROWS));
    if (smla_dtype(q) == SMLA_DTYPE_BF16 && config->q_scale != 1) {
        return smla_fail(call->layer.error, SMLA_ERROR_VALUE,
                         "%s: `q` must be float8_e4m3fn for a config with q_scale = %g, got "
                         "bfloat16",
                         op, config->q_scale);
    }
    SMLA_TRY(check_caches(&c, call));
    SMLA_TRY(check_choice(&c, call));
    return smla_require_results(&call->layer, &c,
                                &(smla_layer_results){.attn_sink = call->args->attn_sink,
                                                      .out = call->args->out,
                                                      .lse = call->args->lse,
                                                      .block_table = &call->b->swa_table.tensor,
                                                      .may_have_more_heads = true});
}

/* The scale of a cache, if its format has one. */
static smla_scale_arg
scale_of(const attend_call *call, int32_t kv_format)
{
    const bool has_scale = kv_format == SMLA_KV_FP8_E4M3;
    return (smla_scale_arg){.value = has_scale ? call->b->config.kv_scale : 1};
}

/* ---- Attention ----------------------------------------------------------------------------- */

/* What all calls of attention for tokens [start, end) share. `views` holds their arrays. */
static smla_sparse_attention_args
attention_of(const attend_call *call, int64_t start, int64_t end, smla_view views[3])
{
    const smla_v4_attend_args *const args = call->args;
    return (smla_sparse_attention_args){
        .struct_size = sizeof(smla_sparse_attention_args),
        .q = smla_slice_rows(&views[0], args->q, start, end),
        .attn_sink = args->attn_sink,
        .out = smla_slice_rows(&views[1], args->out, start, end),
        .lse = smla_slice_rows(&views[2], args->lse, start, end),
        .workspace = &call->scratch.tensor,
        .softmax_scale = call->b->config.softmax_scale,
        .q_scale = {.value = call->b->config.q_scale},
        .stream = args->stream,
    };
}

/* Attends of tokens [start, end) over the caches. */
static smla_status
attend_caches(const attend_call *call, int64_t start, int64_t end)
{
    smla_view views[3];
    smla_view swa_indices;
    smla_view swa_lens;
    smla_view indices;
    smla_view lens;
    if (start == end) {
        return SMLA_OK;
    }
    const smla_v4_builder *const b = call->b;
    const int64_t window = b->config.window;
    smla_sparse_attention_args args = attention_of(call, start, end, views);
    args.kv_cache = call->args->swa_kv_cache;
    args.kv_format = b->config.kv_format;
    args.block_size = b->config.swa_block_size;
    args.kv_scale = scale_of(call, b->config.kv_format);
    args.indices = smla_view_rows(&call->layer, &swa_indices, b->made.swa_indices + start * window,
                                  end - start, window, window);
    args.topk_length =
        smla_view_vector(&call->layer, &swa_lens, b->made.swa_lens + start, end - start);
    if (call->group >= 0) {
        args.extra_kv_cache = call->args->compressed_kv_cache;
        args.extra_kv_format = b->config.compressed_kv_format;
        args.extra_block_size = layer_block_size(call);
        args.extra_kv_scale = scale_of(call, b->config.compressed_kv_format);
        args.extra_indices = smla_slice_rows(&indices, &call->indices.tensor, start, end);
        args.extra_topk_length = smla_slice_rows(&lens, &call->lens.tensor, start, end);
    }
    return smla_sparse_attention(&args, call->layer.error);
}

/* ---- Lists of compressed rows -------------------------------------------------------------- */

/* Turns row numbers of tokens [start, end) into slots, in the builder's buffer. */
static smla_status
find_slots(const attend_call *call, const DLTensor *rows, int64_t start, int64_t end)
{
    smla_view req_ids, is_valid, in, out, lens;
    const smla_v4_builder *const b = call->b;
    const int64_t count = end - start;
    const smla_topk_slots_args args = {
        .struct_size = sizeof args,
        .topk_indices = smla_slice_rows(&in, rows, start, end),
        .req_id_per_token =
            smla_view_vector(&call->layer, &req_ids, b->sent.req_id_per_token + start, count),
        .block_table = &b->compressed_tables[call->group].tensor,
        .block_size = layer_block_size(call),
        .is_valid = &is_valid.tensor,
        .out = smla_slice_rows(&out, &call->indices.tensor, start, end),
        .lens = smla_slice_rows(&lens, &call->lens.tensor, start, end),
        .stream = call->args->stream,
    };
    const DLDataType bytes = {.code = kDLUInt, .bits = 8, .lanes = 1};
    smla_make_view(&is_valid, (uint8_t *)b->made.is_valid + start, bytes, b->config.device, 1,
                   &count);
    return count == 0 ? SMLA_OK
                      : smla_compute_global_topk_indices_and_lens(&args, call->layer.error);
}

/* The rows that tokens attend to by their numbers: [T, K]. Those of decodes are slots already if
 * the layer has no indexer. */
static const DLTensor *
view_rows(const attend_call *call, smla_view *view)
{
    const smla_v4_builder *const b = call->b;
    const int64_t num_tokens = b->metadata.num_actual_tokens;
    if (call->group < 0) {
        return smla_view_rows(&call->layer, view, b->made.swa_indices, num_tokens, 0, 1);
    }
    if (call->is_indexed) {
        return smla_slice_rows(view, call->args->topk_indices, 0, num_tokens);
    }
    return smla_view_rows(&call->layer, view, b->made.groups[call->group].indices, num_tokens,
                          b->metadata.groups[call->group].width, b->columns[call->group]);
}

/* Finds the lists of slots for tokens [start, end), all decodes or none. */
static smla_status
find_lists(attend_call *call, int64_t start, int64_t end)
{
    const smla_v4_builder *const b = call->b;
    const bool are_slots = !call->is_indexed && end <= b->metadata.split.num_decode_tokens;
    const int64_t num_tokens = b->metadata.num_actual_tokens;
    smla_view rows;
    if (call->is_indexed && call->args->slots != NULL) {
        smla_slice_rows(&call->indices, call->args->slots, 0, num_tokens);
        smla_slice_rows(&call->lens, call->args->lens, 0, num_tokens);
        return SMLA_OK;
    }
    const DLTensor *const numbers = view_rows(call, &rows);
    if (are_slots) {
        smla_slice_rows(&call->indices, numbers, 0, num_tokens);
        smla_view_vector(&call->layer, &call->lens, b->made.groups[call->group].lens, num_tokens);
        return SMLA_OK;
    }
    const int64_t columns = smla_size(numbers, 1);
    smla_view_rows(&call->layer, &call->indices, b->made.indices, num_tokens, columns, columns);
    smla_view_vector(&call->layer, &call->lens, b->made.index_lens, num_tokens);
    return find_slots(call, numbers, start, end);
}

/* Attends of tokens [start, end), all decodes or none, over the caches. */
static smla_status
attend_tokens(attend_call *call, int64_t start, int64_t end)
{
    if (call->group >= 0) {
        SMLA_TRY(find_lists(call, start, end));
    }
    return attend_caches(call, start, end);
}

/* ---- Path "separate" ----------------------------------------------------------------------- */

typedef struct chunk_views {
    smla_view workspace;
    smla_view table;
    smla_view lens;
    smla_view gather_lens;
} chunk_views;

/* Requests of a chunk that are neighbours in the batch: entries [start, end) of the arrays of
 * prefills. The first of them has place `place` in the chunk's workspace. */
typedef struct chunk_part {
    int64_t start;
    int64_t end;
    int64_t place;
} chunk_part;

/* Their rows of a block table. */
static const DLTensor *
take_pages(const attend_call *call, smla_view *view, const DLTensor *table, const chunk_part *part)
{
    const smla_v4_builder *const b = call->b;
    const int64_t first = b->metadata.split.num_decodes + b->kept.prefills[part->start];
    return smla_slice_rows(view, table, first, first + part->end - part->start);
}

/* Their workspace: [requests, M, 512]. */
static const DLTensor *
view_workspace(const attend_call *call, smla_view *view, const chunk_part *part,
               const smla_v4_rows *rows)
{
    const DLTensor *const memory = &call->b->step.workspaces[SMLA_GATHERED].tensor;
    const int64_t shape[3] = {part->end - part->start, rows->request_rows, SMLA_V4_HEAD_DIM};
    uint16_t *const data = smla_data(memory);
    smla_make_view(view, data + part->place * rows->request_rows * memory->strides[0],
                   memory->dtype, call->b->config.device, 3, shape);
    view->strides[1] = memory->strides[0];
    view->strides[0] = memory->strides[0] * rows->request_rows;
    return &view->tensor;
}

/* The gather of their rows of the sliding window. */
static smla_gather_k_cache_args
window_gather(const attend_call *call, const chunk_part *part, chunk_views *views)
{
    const smla_v4_builder *const b = call->b;
    const smla_v4_rows rows = smla_v4_workspace_rows(&b->config, call->args->compress_ratio);
    const int64_t count = part->end - part->start;
    return (smla_gather_k_cache_args){
        .struct_size = sizeof(smla_gather_k_cache_args),
        .out = view_workspace(call, &views->workspace, part, &rows),
        .k_cache = call->args->swa_kv_cache,
        .seq_lens = smla_view_vector(&call->layer, &views->lens,
                                     b->sent.chunk_seq_lens + part->start, count),
        .gather_lens = smla_view_vector(&call->layer, &views->gather_lens,
                                        b->sent.chunk_gather_lens + part->start, count),
        .block_table = take_pages(call, &views->table, &b->swa_table.tensor, part),
        .block_size = b->config.swa_block_size,
        .offset = rows.window_start,
        .kv_scale = scale_of(call, b->config.kv_format),
        .kv_format = b->config.kv_format,
        .stream = call->args->stream,
    };
}

/* The gather of their compressed rows. */
static smla_gather_k_cache_args
compressed_gather(const attend_call *call, const chunk_part *part, chunk_views *views)
{
    const smla_v4_builder *const b = call->b;
    const smla_v4_rows rows = smla_v4_workspace_rows(&b->config, call->args->compress_ratio);
    const int32_t *const lens = b->sent.compressed_lens[call->group] + part->start;
    return (smla_gather_k_cache_args){
        .struct_size = sizeof(smla_gather_k_cache_args),
        .out = view_workspace(call, &views->workspace, part, &rows),
        .k_cache = call->args->compressed_kv_cache,
        .seq_lens = smla_view_vector(&call->layer, &views->lens, lens, part->end - part->start),
        .block_table =
            take_pages(call, &views->table, &b->compressed_tables[call->group].tensor, part),
        .block_size = layer_block_size(call),
        .kv_scale = scale_of(call, b->config.compressed_kv_format),
        .kv_format = b->config.compressed_kv_format,
        .stream = call->args->stream,
    };
}

/* Gathers a chunk part by part. Requests without query tokens are between the parts. */
static smla_status
gather_chunk(const attend_call *call, int64_t chunk_idx,
             smla_status (*gather)(const smla_gather_k_cache_args *args, smla_error *error))
{
    const smla_v4_entries entries = smla_v4_chunk_entries(call->b, chunk_idx);
    const int32_t *const prefills = call->b->kept.prefills;
    chunk_part part = {.end = entries.start};
    while (part.end < entries.end) {
        chunk_views views;
        part.start = part.end++;
        part.place = part.start - entries.start;
        while (part.end < entries.end && prefills[part.end] == prefills[part.end - 1] + 1) {
            part.end++;
        }
        const smla_gather_k_cache_args window = window_gather(call, &part, &views);
        SMLA_TRY(gather(&window, call->layer.error));
        if (call->group >= 0) {
            const smla_gather_k_cache_args compressed = compressed_gather(call, &part, &views);
            SMLA_TRY(gather(&compressed, call->layer.error));
        }
    }
    return SMLA_OK;
}

/* Names the workspace rows of a chunk's tokens, in the builder's buffer. */
static smla_status
combine_rows(const attend_call *call, int64_t chunk_idx, const DLTensor *out, const DLTensor *lens)
{
    smla_view rows, topk, starts, seq_lens, gather_lens;
    const smla_v4_builder *const b = call->b;
    const smla_prefill_chunk *const chunk = &b->metadata.chunks[chunk_idx];
    const smla_v4_rows sizes = smla_v4_workspace_rows(&b->config, call->args->compress_ratio);
    const smla_v4_entries entries = smla_v4_chunk_entries(b, chunk_idx);
    const int64_t first = entries.start, count = entries.end - first;
    const DLTensor *const numbers = view_rows(call, &rows);
    const smla_combine_topk_swa_args args = {
        .struct_size = sizeof args,
        .topk_indices = smla_slice_rows(&topk, numbers, chunk->token_start, chunk->token_end),
        .query_start_loc = smla_view_vector(&call->layer, &starts,
                                            b->sent.chunk_query_start_loc + first, count + 1),
        .seq_lens =
            smla_view_vector(&call->layer, &seq_lens, b->sent.chunk_seq_lens + first, count),
        .gather_lens =
            smla_view_vector(&call->layer, &gather_lens, b->sent.chunk_gather_lens + first, count),
        .window = b->config.window,
        .ratio = call->args->compress_ratio,
        .topk = smla_size(numbers, 1),
        .M = sizes.request_rows,
        .N = sizes.window_start,
        .align = SMLA_V4_LIST_ALIGN,
        .out = out,
        .lens = lens,
        .stream = call->args->stream,
    };
    return smla_combine_topk_swa_indices(&args, call->layer.error);
}

static smla_status
attend_chunk(const attend_call *call, int64_t chunk_idx)
{
    smla_view views[3];
    smla_view page, out, lens, rows;
    const smla_v4_builder *const b = call->b;
    const smla_prefill_chunk *const chunk = &b->metadata.chunks[chunk_idx];
    const smla_v4_entries entries = smla_v4_chunk_entries(b, chunk_idx);
    const int64_t num_tokens = chunk->token_end - chunk->token_start;
    const smla_v4_rows sizes = smla_v4_workspace_rows(&b->config, call->args->compress_ratio);
    const int64_t columns = smla_size(view_rows(call, &rows), 1) + b->config.window;
    const int64_t width =
        (columns + SMLA_V4_LIST_ALIGN - 1) / SMLA_V4_LIST_ALIGN * SMLA_V4_LIST_ALIGN;
    smla_view_rows(&call->layer, &out, b->made.indices, num_tokens, width, width);
    smla_view_vector(&call->layer, &lens, b->made.index_lens, num_tokens);
    SMLA_TRY(gather_chunk(call, chunk_idx, smla_dequantize_and_gather_k_cache));
    SMLA_TRY(combine_rows(call, chunk_idx, &out.tensor, &lens.tensor));
    smla_sparse_attention_args args =
        attention_of(call, chunk->token_start, chunk->token_end, views);
    args.kv_cache = smla_slice_rows(&page, &b->step.workspaces[SMLA_GATHERED].tensor, 0,
                                    (entries.end - entries.start) * sizes.request_rows);
    args.kv_format = SMLA_KV_BFLOAT16;
    args.indices = &out.tensor;
    args.topk_length = &lens.tensor;
    return smla_sparse_attention(&args, call->layer.error);
}

/* ---- A layer ------------------------------------------------------------------------------- */

static smla_status
run(void *given)
{
    attend_call *const call = given;
    const smla_v4_metadata *const m = &call->b->metadata;
    const int64_t num_chunks = has_chunks(call) ? m->num_chunks : 0;
    smla_view_scratch(&call->layer, &call->scratch);
    for (int64_t i = 0; i < num_chunks; i++) {
        SMLA_TRY(gather_chunk(call, i, smla_check_gather_k_values));
    }
    SMLA_TRY(attend_tokens(call, 0, m->split.num_decode_tokens));
    for (int64_t i = 0; i < num_chunks; i++) {
        SMLA_TRY(attend_chunk(call, i));
    }
    /* The tokens left are the prefills of path "direct", or else padding. */
    const int64_t done =
        num_chunks > 0 ? m->chunks[num_chunks - 1].token_end : m->split.num_decode_tokens;
    return attend_tokens(call, done, m->num_actual_tokens);
}

static smla_status
run_attend(const void *given, smla_error *error)
{
    const smla_v4_attend_args *const args = given;
    const smla_step *const step = (const smla_step *)args->builder;
    attend_call call = {.layer = {.op = op, .step = step, .stream = args->stream, .error = error},
                        .args = args,
                        .b = args->builder};
    SMLA_TRY(check_attend(&call));
    return smla_run_layer(&call.layer, run, &call);
}

smla_status
smla_v4_attend(const smla_v4_attend_args *args, smla_error *error)
{
    smla_v4_attend_args known;
    return smla_enter_layer(op, args, &known, sizeof known, run_attend, error);
}
