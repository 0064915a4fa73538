/* forward.c: one layer of the step that the builder planned, composed of the public operators.
 *
 *   mixed, bf16   indices -> one attention call over all tokens
 *   direct        indices -> attention over decodes, attention over prefills, both on the cache
 *   separate      indices -> attention over decodes; per chunk: gather to the workspace ->
 *                 attention
 *
 * Everything is checked before the first byte is written. Padding tokens after the last query
 * attend to the cache, like decodes, even if they follow prefills.
 */
#include "core/args.h"
#include "core/entry.h"
#include "core/params_attention.h"
#include "ops/check.h"
#include "ops/dispatch.h"
#include "step/builder.h"

static const char op[] = "forward";

static const DLDataType int32_type = {.code = kDLInt, .bits = 32, .lanes = 1};

typedef struct forward_call {
    const smla_forward_args *args;
    const smla_builder *builder;
    const smla_metadata *metadata;
    smla_kv_view cache;
    smla_index_map map;      /* no block table: `indices` are slots */
    const DLTensor *indices; /* [>= T, K]: slots, or positions if `map` has a block table */
    smla_view slots;         /* what `indices` is after a conversion */
    smla_view workspace;     /* attention scratch */
    smla_error *error;
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
check_forward(const smla_forward_args *args, smla_kv_view *cache, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, op, error);
    const smla_builder *b = args->builder;
    if (b == NULL || !b->is_built) {
        return smla_fail(error, SMLA_ERROR_VALUE, "%s: `builder` must have built a step, got none",
                         op);
    }
    const int64_t num_tokens = b->metadata.num_actual_tokens;
    const int64_t num_heads = b->config.num_heads;
    const smla_kv_format_info *const format = smla_find_kv_format(b->config.kv_format);
    SMLA_TRY(smla_require_query(&c, "q", format, args->q, args->q_pe, num_tokens, num_heads,
                                SMLA_RULE_MORE_ROWS));
    SMLA_TRY(check_cache(&c, args, b, cache));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "topk_indices",
                                           .tensor = args->topk_indices,
                                           .dtypes = SMLA_DTYPE_INT32,
                                           .flags = SMLA_RULE_MORE_ROWS,
                                           .ndim = 2,
                                           .shape = {num_tokens, SMLA_ANY}}));
    if (smla_size(args->topk_indices, 1) > b->config.topk_tokens) {
        return smla_fail(
            error, SMLA_ERROR_VALUE,
            "%s: `topk_indices` must have at most topk_tokens = %lld columns, got %lld", op,
            (long long)b->config.topk_tokens, (long long)smla_size(args->topk_indices, 1));
    }
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "attn_sink",
                                           .tensor = args->attn_sink,
                                           .dtypes = SMLA_DTYPE_FP32,
                                           .flags = SMLA_RULE_OPTIONAL | SMLA_RULE_ANY_LAST_STRIDE,
                                           .ndim = 1,
                                           .shape = {num_heads}}));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "out",
                                           .tensor = args->out,
                                           .dtypes = SMLA_DTYPE_BF16,
                                           .flags = SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS,
                                           .ndim = 3,
                                           .shape = {num_tokens, num_heads, format->value_dim}}));
    SMLA_TRY(smla_require_state(&c, "lse", args->lse, num_tokens, num_heads,
                                SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS));
    SMLA_TRY(smla_require_finite(op, "softmax_scale", args->softmax_scale, error));
    SMLA_TRY(smla_require_block_table(&c, &b->block_table.tensor));
    SMLA_TRY(smla_require(
        &c, &(smla_rule){.name = "workspace",
                         .tensor = b->metadata.num_chunks > 0 ? &b->prefill_workspace.tensor : NULL,
                         .dtypes = SMLA_DTYPE_BF16,
                         .flags = SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL,
                         .ndim = 2,
                         .shape = {SMLA_ANY, SMLA_HEAD_DIM}}));
    const smla_backend *backend;
    SMLA_TRY(smla_find_backend(op, c.device, &backend, error));
    if (backend != b->backend || c.device.device_id != b->config.device.device_id) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `q` must be on the device of the config, got another one", op);
    }
    return smla_require_disjoint(&c);
}

/* ---- Steps --------------------------------------------------------------------------------- */

/* Makes a view [count] of int32 in the builder's memory. */
static const DLTensor *
view_int32(const forward_call *f, smla_view *view, const int32_t *data, int64_t count)
{
    smla_make_view(view, (void *)(uintptr_t)data, int32_type, f->builder->config.device, 1, &count);
    return &view->tensor;
}

static smla_status
convert_indices(forward_call *f)
{
    const smla_metadata *m = f->metadata;
    const int64_t num_tokens = m->num_actual_tokens;
    const int64_t shape[2] = {num_tokens, smla_size(f->args->topk_indices, 1)};
    smla_view req_ids, topk_indices, prefill_ids, starts;
    smla_make_view(&f->slots, f->builder->indices, int32_type, f->builder->config.device, 2, shape);
    f->indices = &f->slots.tensor;
    const smla_convert_req_index_args args = {
        .struct_size = sizeof args,
        .req_id_per_token = view_int32(f, &req_ids, m->req_id_per_token, num_tokens),
        .block_table = &f->builder->block_table.tensor,
        .topk_indices = smla_slice_rows(&topk_indices, f->args->topk_indices, 0, num_tokens),
        .prefill_request_ids = view_int32(f, &prefill_ids, m->prefill_request_ids, num_tokens),
        .prefill_workspace_starts =
            view_int32(f, &starts, m->prefill_workspace_starts, m->split.num_prefills),
        .out = f->indices,
        .block_size = f->builder->config.block_size,
        .stream = f->args->stream,
    };
    return smla_convert_req_index_to_global_index(&args, f->error);
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
        .kv = kv,
        .indices = take_rows(&indices, f->indices, start, end),
        .attn_sink = a->attn_sink,
        .out = take_rows(&out, a->out, start, end),
        .lse = take_rows(&lse, a->lse, start, end),
        .workspace = &f->workspace.tensor,
        .softmax_scale = a->softmax_scale,
        .stream = a->stream,
    };
    smla_index_map map = f->map;
    if (map.block_table != NULL) {
        map.req_id_per_token += start;
    }
    return kv == a->kv_cache
               ? smla_attend_checked(&args, &f->cache, &map, f->builder->config.device.device_id,
                                     f->builder->backend, f->error)
               : smla_attend_positions(&args, &map, f->error);
}

/* The arguments of one chunk's gather. They point to arrays in `views`. */
static smla_gather_kv_cache_args
chunk_gather(const forward_call *f, const smla_prefill_chunk *chunk, smla_view views[4])
{
    const smla_builder *b = f->builder;
    const int64_t first_req = f->metadata->split.num_decodes + chunk->req_start;
    const int64_t num_reqs = chunk->req_end - chunk->req_start;
    return (smla_gather_kv_cache_args){
        .struct_size = sizeof(smla_gather_kv_cache_args),
        .kv_cache = f->args->kv_cache,
        .block_table =
            smla_slice_rows(&views[0], &b->block_table.tensor, first_req, first_req + num_reqs),
        .seq_lens =
            view_int32(f, &views[1], b->arrays.prefill_seq_lens + chunk->req_start, num_reqs),
        .workspace_starts =
            view_int32(f, &views[2], b->arrays.prefill_workspace_starts + chunk->req_start,
                       num_reqs),
        .out = smla_slice_rows(&views[3], &b->prefill_workspace.tensor, 0, chunk->tot_seqlen),
        .kv_format = b->config.kv_format,
        .stream = f->args->stream,
    };
}

static smla_status
check_chunks(const forward_call *f)
{
    for (int64_t i = 0; i < f->metadata->num_chunks; i++) {
        smla_view views[4];
        const smla_gather_kv_cache_args args = chunk_gather(f, &f->metadata->chunks[i], views);
        SMLA_TRY(smla_check_gather_values(&args, f->error));
    }
    return SMLA_OK;
}

static smla_status
attend_chunks(const forward_call *f)
{
    for (int64_t i = 0; i < f->metadata->num_chunks; i++) {
        const smla_prefill_chunk *chunk = &f->metadata->chunks[i];
        smla_view views[4];
        const smla_gather_kv_cache_args gather = chunk_gather(f, chunk, views);
        SMLA_TRY(smla_gather_kv_cache(&gather, f->error));
        SMLA_TRY(attend(f, gather.out, chunk->token_start, chunk->token_end));
    }
    return SMLA_OK;
}

static smla_status
run(forward_call *f)
{
    const smla_metadata *m = f->metadata;
    const DLTensor *cache = f->args->kv_cache;
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
run_forward(const smla_forward_args *args, smla_error *error)
{
    smla_forward_args known;
    SMLA_TRY(smla_read_args(op, &known, sizeof known, args, error));
    forward_call f = {.args = &known, .builder = known.builder, .error = error};
    SMLA_TRY(check_forward(&known, &f.cache, error));
    f.metadata = &known.builder->metadata;
    const DLDataType bytes = {.code = kDLUInt, .bits = 8, .lanes = 1};
    smla_make_view(&f.workspace, f.builder->scratch, bytes, f.builder->config.device, 1,
                   &f.builder->scratch_bytes);
    if (f.metadata->num_actual_tokens == 0) {
        return SMLA_OK;
    }
    if (smla_is_logging) {
        smla_log_text(" path %s, chunks %lld,", smla_path_name(f.metadata->path),
                      (long long)f.metadata->num_chunks);
    }
    const smla_backend *backend = f.builder->backend;
    const smla_stream stream = {.device_id = f.builder->config.device.device_id,
                                .handle = known.stream};
    SMLA_TRY(backend->begin_use(op, f.builder->mirror, stream, error));
    const smla_status status = run(&f);
    /* Also after an error, because calls that were started before it read the metadata. */
    const smla_status ended =
        backend->end_use(op, f.builder->mirror, stream, status == SMLA_OK ? error : NULL);
    return status == SMLA_OK ? ended : status;
}

smla_status
smla_forward(const smla_forward_args *args, smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, op);
    return smla_leave(&entry, run_forward(args, error));
}
