/* layer_v4.c: the attention of one DeepSeek V4 layer in the step that the builder planned, composed
 * of operators.
 *
 *   decodes    attention over the sliding window's cache, and over the compressed cache: the rows
 *              that the indexer chose, or all complete groups. Where the caller has numbers only,
 *              they are turned into slots first
 *   direct     the same for prefills
 *   separate   chunks of prefills: both caches to the workspace -> rows of the workspace ->
 *              attention over it as one page
 *
 * Of several ranks, each attends to its own compressed rows, and the first one to the window, whose
 * cache all of them have.
 *
 * Everything is checked before the first byte is written. Padding tokens behind the last query have
 * empty lists.
 */
#include "ops/check.h"
#include "step/layers/layer.h"
#include "step/plans/plan_v4.h"

static const char op[] = "attend";

typedef struct attend_call {
    smla_layer layer;
    const smla_v4_attend_args *args;
    const smla_v4_builder *b;
    int group;         /* the layer's ratio in the config; -1: the sliding window only */
    bool is_indexed;   /* topk_indices choose the compressed rows */
    smla_v4_rows rows; /* a request's in the workspace */
    smla_kv_view swa;
    smla_kv_view compressed;         /* a layer with a group has it */
    smla_attention_params attention; /* every token, without keys */
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
        return smla_fail_value(call->layer.error, op,
                               "`compress_ratio` must be 1 or one of the config, got %lld",
                               (long long)args->compress_ratio);
    }
    if (call->group >= 0 && b->metadata.groups[call->group].ratio == 0) {
        return smla_fail_value(call->layer.error, op,
                               "`metadata` must have a compressed block table of ratio %lld, got "
                               "none: give it to MetadataBuilder.build",
                               (long long)args->compress_ratio);
    }
    call->is_indexed = args->compress_ratio == SMLA_V4_INDEXED_RATIO;
    call->rows = smla_v4_workspace_rows(&b->config, args->compress_ratio);
    return SMLA_OK;
}

static smla_status
check_cache(smla_checker *c, const smla_cache_rule *rule, smla_kv_view *kv)
{
    SMLA_TRY(smla_require_kv(c, rule, kv));
    return kv->format->head_dim == SMLA_V4_HEAD_DIM
               ? SMLA_OK
               : smla_fail_value(c->error, op, "`%s` must have keys of %d values, got %d",
                                 rule->name, SMLA_V4_HEAD_DIM, kv->format->head_dim);
}

static smla_status
check_caches(smla_checker *c, attend_call *call)
{
    const smla_v4_config *const config = &call->b->config;
    SMLA_TRY(check_cache(c,
                         &(smla_cache_rule){.name = "caches.swa",
                                            .tensor = call->args->swa_kv_cache,
                                            .kv_format = config->kv_format,
                                            .block_size = config->swa_block_size,
                                            .formats = SMLA_KV_ATTENTION},
                         &call->swa));
    return call->group < 0
               ? SMLA_OK
               : check_cache(c,
                             &(smla_cache_rule){.name = "caches.compressed",
                                                .tensor = call->args->compressed_kv_cache,
                                                .kv_format = config->compressed_kv_format,
                                                .block_size = layer_block_size(call),
                                                .formats = SMLA_KV_EXTRA},
                             &call->compressed);
}

/* A layer without an indexer takes no choice. */
static smla_status
refuse_choice(const attend_call *call, const char *name, const DLTensor *given)
{
    return given == NULL ? SMLA_OK
                         : smla_fail_value(call->layer.error, op,
                                           "`%s` must be None for a layer without an indexer "
                                           "(compress ratio %lld), got an array",
                                           name, (long long)call->args->compress_ratio);
}

static smla_status
check_slots(smla_checker *c, const attend_call *call)
{
    const int64_t num_tokens = call->b->metadata.num_actual_tokens;
    SMLA_TRY(smla_require_topk(&call->layer, c, "slots", call->args->slots,
                               call->b->config.topk_tokens));
    return smla_require_1d(c, "lens", call->args->lens, SMLA_DTYPE_INT32, num_tokens,
                           SMLA_RULE_MORE_ROWS, "the number of each token's slots");
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
    if (args->topk_indices == NULL && args->slots != NULL &&
        smla_num_gathers(call->layer.step) > 0) {
        return smla_fail_value(call->layer.error, op,
                               "`topk_indices` must be given beside slots for the prefills of "
                               "path \"separate\", got none");
    }
    return args->topk_indices == NULL && args->slots != NULL
               ? SMLA_OK
               : smla_require_topk(&call->layer, c, "topk_indices", args->topk_indices,
                                   call->b->config.topk_tokens);
}

/* Checks what a rank does not take: sinks, and slots, because no rank chooses rows alone. */
static smla_status
check_share(const attend_call *call)
{
    const bool is_alone = call->b->share.size == 0;
    if (!is_alone && call->args->attn_sink != NULL) {
        return smla_fail_value(call->layer.error, op, SMLA_SINK_OF_RANKS);
    }
    return is_alone || call->args->slots == NULL
               ? SMLA_OK
               : smla_fail_value(call->layer.error, op,
                                 "`slots` must be left out with `cp` of several ranks: give the "
                                 "`topk_indices` of all rows (top_k_merge), got an array");
}

static smla_status
check_attend(attend_call *call)
{
    smla_checker c;
    smla_open_checker(&c, op, call->layer.error);
    SMLA_TRY(check_layer(call));
    SMLA_TRY(check_share(call));
    const smla_v4_config *const config = &call->b->config;
    const DLTensor *const q = call->args->q;
    SMLA_TRY(smla_require_query(&c, "q", smla_find_kv_format(SMLA_KV_FP8_V4), q, NULL,
                                call->b->metadata.num_actual_tokens, config->num_heads,
                                SMLA_RULE_MORE_ROWS));
    if (smla_dtype(q) == SMLA_DTYPE_BF16 && config->q_scale != 1) {
        return smla_fail_value(
            call->layer.error, op,
            "`q` must be float8_e4m3fn for a config with q_scale = %g, got bfloat16",
            config->q_scale);
    }
    SMLA_TRY(check_caches(&c, call));
    SMLA_TRY(check_choice(&c, call));
    const smla_layer_arrays arrays = {SMLA_LAYER_ARRAYS_OF(call->args),
                                      .block_table = &call->b->swa_table.tensor,
                                      .may_have_more_heads = true};
    SMLA_TRY(smla_require_results(&call->layer, &c, &arrays));
    smla_fill_layer(&call->layer, &arrays, SMLA_V4_HEAD_DIM, config->softmax_scale,
                    &call->attention);
    if (call->attention.queries.type == SMLA_FLOAT_E4M3) {
        call->attention.logits.q_scale.value = (float)config->q_scale;
    }
    return SMLA_OK;
}

/* ---- Attention ----------------------------------------------------------------------------- */

/* The scale of a cache, if its format has one. */
static smla_given_scale
scale_of(const attend_call *call, const smla_kv_view *kv)
{
    const bool has_scale = kv->format->scale_type == SMLA_SCALE_CACHE;
    return (smla_given_scale){.value = has_scale ? (float)call->b->config.kv_scale : 1.0f};
}

/* Attends of `count` tokens from token `start` on to the keys of one list or two. */
static smla_status
attend(attend_call *call, int64_t start, int64_t count, const smla_key_list *lists, int num_lists)
{
    smla_key_lists *const keys = &call->attention.keys;
    *keys = (smla_key_lists){.lists = {lists[0], lists[num_lists - 1]}, .num_lists = num_lists};
    for (int i = 0; i < 2; i++) {
        call->attention.logits.kv_scale[i] = scale_of(call, &keys->lists[i].kv);
    }
    smla_attention_params part = smla_take_tokens(&call->attention, start, count);
    SMLA_TRY(smla_plan_layer(&call->layer, &part));
    return smla_run_attention(&call->layer, &part);
}

/* ---- Lists of compressed rows -------------------------------------------------------------- */

/* An indexer's choice, or other numbers that the caller gives. */
static smla_key_list
given_lists(const DLTensor *indices, const DLTensor *lens)
{
    return (smla_key_list){SMLA_SET_ROWS(indices, indices), .topk = smla_size(indices, 1),
                           SMLA_SET_VECTOR(end, lens)};
}

/* The rows that tokens attend to, by their numbers. Those of decodes are slots already if the layer
 * has no indexer. */
static smla_key_list
find_numbers(const attend_call *call)
{
    const smla_v4_builder *const b = call->b;
    if (call->group < 0) {
        return (smla_key_list){.indices = b->made.swa_indices, .indices_stride_token = 1};
    }
    return call->is_indexed ? given_lists(call->args->topk_indices, NULL)
                            : (smla_key_list){.indices = b->made.groups[call->group].indices,
                                              .indices_stride_token = b->columns[call->group],
                                              .topk = b->metadata.groups[call->group].width,
                                              .end = b->made.groups[call->group].lens,
                                              .end_stride = 1};
}

/* Lists in memory of the builder. */
static smla_key_list
made_lists(const int32_t *indices, int64_t columns, const int32_t *lens)
{
    return (smla_key_list){.indices = indices,
                           .indices_stride_token = columns,
                           .topk = columns,
                           .end = lens,
                           .end_stride = 1};
}

/* Turns row numbers of `count` tokens from token `start` on into slots. */
static smla_status
find_slots(const attend_call *call, const smla_key_list *numbers, const smla_key_list *to,
           int64_t start, int64_t count)
{
    const smla_v4_builder *const b = call->b;
    const DLTensor *const table = &b->compressed_tables[call->group].tensor;
    const smla_topk_slots_params params = {
        .call = smla_call_of_layer(&call->layer, "compute_global_topk_indices_and_lens", NULL),
        .table = "block_table",
        .num_tokens = count,
        .topk = numbers->topk,
        .num_reqs = smla_size(table, 0),
        .topk_indices = numbers->indices + start * numbers->indices_stride_token,
        .topk_indices_stride_token = numbers->indices_stride_token,
        .req_id_per_token = b->sent.req_id_per_token + start,
        .req_id_stride = 1,
        .pages = smla_page_table_of(table, layer_block_size(call)),
        .is_valid = (const uint8_t *)b->made.is_valid + start,
        .is_valid_stride = 1,
        .out = b->made.indices + start * to->indices_stride_token,
        .out_stride_token = to->indices_stride_token,
        .lens = b->made.index_lens + start,
        .lens_stride = 1,
    };
    return smla_run_compute_global_topk_indices_and_lens(&call->layer, &params);
}

/* Finds the lists of slots for `count` tokens from token `start` on, all decodes or none. */
static smla_status
find_lists(const attend_call *call, int64_t start, int64_t count, smla_key_list *lists)
{
    const bool are_decodes = start + count <= call->b->metadata.split.num_decode_tokens;
    if (call->is_indexed && call->args->slots != NULL) {
        *lists = given_lists(call->args->slots, call->args->lens);
        return SMLA_OK;
    }
    smla_key_list numbers = find_numbers(call);
    if (!call->is_indexed && are_decodes) {
        *lists = numbers;
        return SMLA_OK;
    }
    if (call->is_indexed && call->b->share.size > 0) {
        /* find_slots writes the lengths once more. */
        const smla_v4_made *const made = &call->b->made;
        SMLA_TRY(smla_take_own(&call->layer, &call->b->share, start, count, made->own_topk,
                               made->index_lens, &numbers));
    }
    *lists = made_lists(call->b->made.indices, numbers.topk, call->b->made.index_lens);
    return find_slots(call, &numbers, lists, start, count);
}

/* Attends of `count` tokens from token `start` on, all decodes or none, over the caches. */
static smla_status
attend_tokens(attend_call *call, int64_t start, int64_t count)
{
    const smla_v4_made *const made = &call->b->made;
    const int32_t *const window_lens = call->b->share.rank == 0 ? made->swa_lens : made->no_lens;
    smla_key_list lists[2] = {made_lists(made->swa_indices, call->b->config.window, window_lens),
                              {.topk = 0}};
    if (count == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(call->group < 0 ? SMLA_OK : find_lists(call, start, count, &lists[1]));
    lists[0].kv = call->swa;
    lists[1].kv = call->compressed;
    return attend(call, start, count, lists, lists[1].topk == 0 ? 1 : 2);
}

/* ---- Path "separate" ----------------------------------------------------------------------- */

/* Requests of a chunk that are neighbours in the batch: entries [start, end) of the arrays of
 * prefills. The first of them has place `place` in the chunk's workspace. */
typedef struct chunk_part {
    int64_t start;
    int64_t end;
    int64_t place;
} chunk_part;

/* The gather of their rows of a cache, from row `offset` of each request's place on. */
static smla_gather_params
gather_of(const attend_call *call, const chunk_part *part, const smla_kv_view *kv,
          const DLTensor *table, int64_t offset)
{
    const smla_v4_builder *const b = call->b;
    const DLTensor *const memory = &b->step.workspaces[SMLA_GATHERED].tensor;
    smla_gather_params gather =
        smla_gather_of_requests(&call->layer, "dequantize_and_gather_k_cache", kv, table,
                                b->metadata.split.num_decodes + b->kept.prefills[part->start],
                                part->end - part->start);
    gather.offset = offset;
    gather.kv_scale = scale_of(call, kv);
    gather.out_tokens = call->rows.request_rows;
    gather.out_stride_token = memory->strides[0];
    gather.out_stride_req = memory->strides[0] * call->rows.request_rows;
    gather.out += part->place * gather.out_stride_req;
    return gather;
}

/* Gathers a chunk part by part. Requests without query tokens are between the parts. */
static smla_status
gather_chunk(const attend_call *call, int64_t chunk_idx,
             smla_status (*gather)(const smla_layer *layer, const smla_gather_params *params))
{
    const smla_v4_builder *const b = call->b;
    const smla_v4_entries entries = smla_v4_chunk_entries(b, chunk_idx);
    const int32_t *const prefills = b->kept.prefills;
    chunk_part part = {.end = entries.start};
    while (part.end < entries.end) {
        part.start = part.end++;
        part.place = part.start - entries.start;
        while (part.end < entries.end && prefills[part.end] == prefills[part.end - 1] + 1) {
            part.end++;
        }
        smla_gather_params params =
            gather_of(call, &part, &call->swa, &b->swa_table.tensor, call->rows.window_start);
        params.seq_lens = b->sent.chunk_seq_lens + part.start;
        params.gather_lens = b->sent.chunk_gather_lens + part.start;
        params.gather_lens_stride = 1;
        SMLA_TRY(gather(&call->layer, &params));
        if (call->group >= 0) {
            params = gather_of(call, &part, &call->compressed,
                               &b->compressed_tables[call->group].tensor, 0);
            params.seq_lens = b->sent.compressed_lens[call->group] + part.start;
            SMLA_TRY(gather(&call->layer, &params));
        }
    }
    return SMLA_OK;
}

static smla_status
check_gather(const smla_layer *layer, const smla_gather_params *params)
{
    return layer->step->backend->check_gather(params, layer->error);
}

/* Names the workspace rows of a chunk's tokens, in the builder's buffer. */
static smla_status
combine_rows(const attend_call *call, int64_t chunk_idx, const smla_key_list *numbers,
             const smla_key_list *to)
{
    const smla_v4_builder *const b = call->b;
    const smla_prefill_chunk *const chunk = &b->metadata.chunks[chunk_idx];
    const smla_v4_entries entries = smla_v4_chunk_entries(b, chunk_idx);
    const int64_t first =
        numbers->indices == NULL ? 0 : chunk->token_start * numbers->indices_stride_token;
    const smla_combine_topk_swa_params params = {
        .call = smla_call_of_layer(&call->layer, "combine_topk_swa_indices", NULL),
        .num_tokens = chunk->token_end - chunk->token_start,
        .window = b->config.window,
        .ratio = call->args->compress_ratio,
        .topk = numbers->topk,
        .request_rows = call->rows.request_rows,
        .window_start = call->rows.window_start,
        .width = to->topk,
        .batch = {.num_reqs = entries.end - entries.start,
                  .query_start_loc = b->sent.chunk_query_start_loc + entries.start,
                  .query_start_loc_stride = 1,
                  .seq_lens = b->sent.chunk_seq_lens + entries.start,
                  .seq_lens_stride = 1},
        .gather_lens = b->sent.chunk_gather_lens + entries.start,
        .gather_lens_stride = 1,
        .topk_indices = numbers->indices + first,
        .topk_indices_stride_token = numbers->indices_stride_token,
        .out = b->made.indices + chunk->token_start * to->indices_stride_token,
        .out_stride_token = to->indices_stride_token,
        .lens = b->made.index_lens + chunk->token_start,
        .lens_stride = 1,
    };
    return smla_run_combine_topk_swa_indices(&call->layer, &params);
}

static smla_status
attend_chunk(attend_call *call, int64_t chunk_idx)
{
    const smla_v4_builder *const b = call->b;
    const smla_prefill_chunk *const chunk = &b->metadata.chunks[chunk_idx];
    const smla_v4_entries entries = smla_v4_chunk_entries(b, chunk_idx);
    const smla_key_list numbers = find_numbers(call);
    const int64_t columns = numbers.topk + b->config.window + SMLA_V4_LIST_ALIGN - 1;
    smla_key_list list =
        made_lists(b->made.indices, columns / SMLA_V4_LIST_ALIGN * SMLA_V4_LIST_ALIGN,
                   b->made.index_lens);
    list.kv =
        smla_gathered_rows(&call->layer, (entries.end - entries.start) * call->rows.request_rows);
    SMLA_TRY(gather_chunk(call, chunk_idx, smla_run_dequantize_and_gather_k_cache));
    SMLA_TRY(combine_rows(call, chunk_idx, &numbers, &list));
    return attend(call, chunk->token_start, chunk->token_end - chunk->token_start, &list, 1);
}

/* ---- A layer ------------------------------------------------------------------------------- */

static smla_status
run(void *given)
{
    attend_call *const call = given;
    const smla_v4_metadata *const m = &call->b->metadata;
    const int64_t num_chunks = smla_num_gathers(call->layer.step);
    for (int64_t i = 0; i < num_chunks; i++) {
        SMLA_TRY(gather_chunk(call, i, check_gather));
    }
    SMLA_TRY(attend_tokens(call, 0, m->split.num_decode_tokens));
    for (int64_t i = 0; i < num_chunks; i++) {
        SMLA_TRY(attend_chunk(call, i));
    }
    /* The tokens left are the prefills of path "direct", or else padding. */
    const int64_t done =
        num_chunks > 0 ? m->chunks[num_chunks - 1].token_end : m->split.num_decode_tokens;
    return attend_tokens(call, done, m->num_actual_tokens - done);
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
