/* layer_v32.c: one DeepSeek-V3.2 layer of the step that the builder planned, composed of the public
 * operators.
 *
 *   mixed, bf16   indices -> one attention call over all tokens
 *   direct        indices -> attention over decodes, attention over prefills, both on the cache
 *   separate      indices -> attention over decodes; per chunk: gather to the workspace ->
 *                 attention
 *
 * Everything is checked before the first byte is written. Padding tokens after the last query
 * attend to the cache, like decodes, even if they follow prefills.
 */
#include "core/entry.h"
#include "ops/check_attention.h"
#include "ops/dispatch.h"
#include "step/layers/layer.h"
#include "step/plans/plan_v32.h"

static const char op[] = "forward";

typedef struct forward_call {
    smla_layer layer;
    const smla_forward_args *args;
    const smla_builder *builder;
    const smla_metadata *metadata;
    smla_kv_view cache;
    smla_index_map map;      /* no block table: `indices` are slots */
    const DLTensor *indices; /* [>= T, K]: slots, or positions if `map` has a block table */
    smla_view slots;         /* what `indices` is after a conversion */
    smla_view scratch;       /* attention workspace */
} forward_call;

/* ---- Checks -------------------------------------------------------------------------------- */

static smla_status
check_cache(smla_checker *c, const smla_forward_args *args, const smla_builder *b, smla_kv_view *kv)
{
    SMLA_TRY(smla_require_kv(c,
                             &(smla_cache_rule){.name = "kv_cache",
                                                .tensor = args->kv_cache,
                                                .kv_format = b->config.kv_format,
                                                .formats = SMLA_KV_ALL},
                             kv));
    const smla_kv_format_info *const format = smla_find_kv_format(b->config.kv_format);
    if (kv->format->number != format->number) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `kv_cache` must have a last dimension of %d, got %d", op,
                         format->row_elements, kv->format->row_elements);
    }
    if (kv->block_size != b->config.block_size) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `kv_cache` must have pages of block_size = %lld tokens, got %lld", op,
                         (long long)b->config.block_size, (long long)kv->block_size);
    }
    return SMLA_OK;
}

static smla_status
check_forward(forward_call *f)
{
    const smla_forward_args *const args = f->args;
    SMLA_TRY(smla_require_step(&f->layer));
    smla_checker c;
    smla_open_checker(&c, op, f->layer.error);
    const smla_builder *const b = f->builder;
    SMLA_TRY(smla_require_query(&c, "q", smla_find_kv_format(b->config.kv_format), args->q,
                                args->q_pe, b->metadata.num_actual_tokens, b->config.num_heads,
                                SMLA_RULE_MORE_ROWS));
    SMLA_TRY(check_cache(&c, args, b, &f->cache));
    SMLA_TRY(smla_require_topk(&f->layer, &c, "topk_indices", args->topk_indices,
                               b->config.topk_tokens));
    SMLA_TRY(smla_require_logit_factor(op, "softmax_scale", args->softmax_scale, f->layer.error));
    return smla_require_results(&f->layer, &c,
                                &(smla_layer_results){.attn_sink = args->attn_sink,
                                                      .out = args->out,
                                                      .lse = args->lse,
                                                      .block_table = &b->block_table.tensor});
}

/* ---- Steps --------------------------------------------------------------------------------- */

static smla_status
convert_indices(forward_call *f)
{
    const smla_metadata *m = f->metadata;
    const int64_t num_tokens = m->num_actual_tokens;
    const int64_t columns = smla_size(f->args->topk_indices, 1);
    smla_view req_ids, topk_indices, prefill_ids, starts;
    f->indices = smla_view_rows(&f->layer, &f->slots, f->builder->made.indices, num_tokens, columns,
                                columns);
    const smla_convert_req_index_args args = {
        .struct_size = sizeof args,
        .req_id_per_token = smla_view_vector(&f->layer, &req_ids, m->req_id_per_token, num_tokens),
        .block_table = &f->builder->block_table.tensor,
        .topk_indices = smla_slice_rows(&topk_indices, f->args->topk_indices, 0, num_tokens),
        .prefill_request_ids =
            smla_view_vector(&f->layer, &prefill_ids, m->prefill_request_ids, num_tokens),
        .prefill_workspace_starts =
            smla_view_vector(&f->layer, &starts, m->prefill_workspace_starts,
                             m->split.num_prefills),
        .out = f->indices,
        .block_size = f->builder->config.block_size,
        .stream = f->args->stream,
    };
    return smla_convert_req_index_to_global_index(&args, f->layer.error);
}

/* If all tokens read the cache, attention itself maps positions to slots. Tokens that read the
 * workspace need row numbers of it instead, so one call converts the indices of all tokens. */
static smla_status
prepare_indices(forward_call *f)
{
    if (f->metadata->num_chunks > 0) {
        return convert_indices(f);
    }
    const DLTensor *block_table = &f->builder->block_table.tensor;
    const int32_t *table = smla_data(block_table);
    f->map = (smla_index_map){
        /* A table without columns may be NULL. The map must not be, but its memory is not read. */
        .block_table = table != NULL ? table : f->metadata->req_id_per_token,
        .block_table_stride_req = smla_stride(block_table, 0),
        .block_table_stride_block = smla_stride(block_table, 1),
        .num_reqs = smla_size(block_table, 0),
        .num_blocks = smla_size(block_table, 1),
        .req_id_per_token = f->metadata->req_id_per_token,
    };
    f->indices = f->args->topk_indices;
    return SMLA_OK;
}

/* Rows [start, end) of a tensor: `view`, or the tensor itself if that is all it has. */
static const DLTensor *
take_rows(smla_view *view, const DLTensor *tensor, int64_t start, int64_t end)
{
    return start == 0 && end == smla_size(tensor, 0) ? tensor
                                                     : smla_slice_rows(view, tensor, start, end);
}

/* Runs attention of tokens from `start` on. The cache is checked before, but the line of a log
 * lists the arrays that a check has seen. */
static smla_status
attend_rows(const forward_call *f, const smla_sparse_attention_args *args, int64_t start)
{
    smla_attention_params params;
    const smla_backend *backend = f->layer.step->backend;
    if (args->kv_cache == f->args->kv_cache && !smla_is_logging) {
        const smla_stream stream = {f->layer.step->device.device_id, args->stream};
        smla_fill_attention(args, &f->cache, stream, backend, &params);
    } else {
        SMLA_TRY(smla_check_sparse_attention(args, &params, &backend, f->layer.error));
    }
    smla_index_map *const map = &params.keys.lists[0].map;
    *map = f->map;
    if (map->block_table != NULL) {
        map->req_id_per_token += start;
    }
    return smla_attend(&params, backend, f->layer.error);
}

/* Runs attention of tokens [start, end) over `kv`: the cache, which is checked, or the workspace
 * rows in use. The backend plans the call; the plan of the decodes has decode_num_splits of the
 * metadata. */
static smla_status
attend(const forward_call *f, const DLTensor *kv, int64_t start, int64_t end)
{
    smla_view q, q_pe, indices, out, lse;
    if (start == end) {
        return SMLA_OK;
    }
    const smla_forward_args *a = f->args;
    const smla_sparse_attention_args args = {
        .struct_size = sizeof args,
        .q = take_rows(&q, a->q, start, end),
        .q_pe = a->q_pe == NULL ? NULL : take_rows(&q_pe, a->q_pe, start, end),
        .kv_cache = kv,
        .indices = take_rows(&indices, f->indices, start, end),
        .attn_sink = a->attn_sink,
        .out = take_rows(&out, a->out, start, end),
        .lse = take_rows(&lse, a->lse, start, end),
        .workspace = &f->scratch.tensor,
        .softmax_scale = a->softmax_scale,
        .stream = a->stream,
    };
    smla_entry entry;
    smla_enter(&entry, "sparse_attention");
    return smla_leave(&entry, attend_rows(f, &args, start));
}

/* The arguments of one chunk's gather. They point to arrays in `views`. */
static smla_gather_kv_cache_args
chunk_gather(const forward_call *f, const smla_prefill_chunk *chunk, smla_view views[5])
{
    const smla_builder *const b = f->builder;
    const smla_chunk_rows rows = {
        .kv_cache = f->args->kv_cache,
        .block_table = &b->block_table.tensor,
        .kv_format = b->config.kv_format,
        .first_req = f->metadata->split.num_decodes + chunk->req_start,
        .num_reqs = chunk->req_end - chunk->req_start,
        .num_rows = chunk->tot_seqlen,
        .lens = b->sent.prefill_seq_lens + chunk->req_start,
        .workspace_starts = b->sent.prefill_workspace_starts + chunk->req_start,
    };
    return smla_chunk_gather(&f->layer, &rows, views);
}

static smla_status
check_chunks(const forward_call *f)
{
    for (int64_t i = 0; i < f->metadata->num_chunks; i++) {
        smla_view views[5];
        const smla_gather_kv_cache_args args = chunk_gather(f, &f->metadata->chunks[i], views);
        SMLA_TRY(smla_check_gather_values(&args, f->layer.error));
    }
    return SMLA_OK;
}

static smla_status
attend_chunks(const forward_call *f)
{
    for (int64_t i = 0; i < f->metadata->num_chunks; i++) {
        const smla_prefill_chunk *chunk = &f->metadata->chunks[i];
        smla_view views[5];
        const smla_gather_kv_cache_args gather = chunk_gather(f, chunk, views);
        SMLA_TRY(smla_gather_kv_cache(&gather, f->layer.error));
        SMLA_TRY(attend(f, gather.out, chunk->token_start, chunk->token_end));
    }
    return SMLA_OK;
}

static smla_status
run(void *call)
{
    forward_call *const f = call;
    const smla_metadata *m = f->metadata;
    const DLTensor *cache = f->args->kv_cache;
    smla_view_scratch(&f->layer, &f->scratch);
    if (smla_is_logging) {
        smla_log_text(" path %s, chunks %lld,", smla_path_name(m->path), (long long)m->num_chunks);
    }
    SMLA_TRY(check_chunks(f));
    SMLA_TRY(prepare_indices(f));
    if (m->path == SMLA_PATH_MIXED || m->path == SMLA_PATH_BF16) {
        return attend(f, cache, 0, m->num_actual_tokens);
    }
    const int64_t num_decode_tokens = m->split.num_decode_tokens;
    const int64_t end_of_chunks =
        m->num_chunks > 0 ? m->chunks[m->num_chunks - 1].token_end : num_decode_tokens;
    SMLA_TRY(attend(f, cache, 0, num_decode_tokens));
    SMLA_TRY(attend_chunks(f));
    /* The tokens left are prefills on path "direct", which has no chunks, else padding tokens. */
    return attend(f, cache, end_of_chunks, m->num_actual_tokens);
}

static smla_status
run_forward(const void *given, smla_error *error)
{
    const smla_forward_args *const args = given;
    forward_call f = {.args = args, .builder = args->builder};
    f.layer = (smla_layer){op, (const smla_step *)args->builder, args->stream, error};
    SMLA_TRY(check_forward(&f));
    f.metadata = &args->builder->metadata;
    return smla_run_layer(&f.layer, run, &f);
}

smla_status
smla_forward(const smla_forward_args *args, smla_error *error)
{
    smla_forward_args known;
    return smla_enter_layer(op, args, &known, sizeof known, run_forward, error);
}
