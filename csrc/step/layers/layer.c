/* layer.c: what the layers of all plans share. */
#include "step/layers/layer.h"

#include "core/args.h"
#include "core/entry.h"
#include "ops/check.h"

smla_status
smla_enter_layer(const char *op, const void *args, void *known, size_t known_size,
                 smla_status (*run)(const void *known, smla_error *error), smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, op);
    const smla_status status = smla_read_args(op, known, known_size, args, error);
    return smla_leave(&entry, status == SMLA_OK ? run(known, error) : status);
}

smla_status
smla_require_step(const smla_layer *layer)
{
    return layer->step != NULL && layer->step->is_built
               ? SMLA_OK
               : smla_fail(layer->error, SMLA_ERROR_VALUE,
                           "%s: `builder` must have built a step, got none", layer->op);
}

smla_status
smla_require_topk(const smla_layer *layer, smla_checker *c, const char *name, const DLTensor *topk,
                  int64_t topk_tokens)
{
    SMLA_TRY(
        smla_require(c, &(smla_rule){.name = name,
                                     .tensor = topk,
                                     .dtypes = SMLA_DTYPE_INT32,
                                     .flags = SMLA_RULE_MORE_ROWS,
                                     .ndim = 2,
                                     .shape = {layer->step->facts.num_actual_tokens, SMLA_ANY}}));
    return smla_size(topk, 1) <= topk_tokens
               ? SMLA_OK
               : smla_fail(layer->error, SMLA_ERROR_VALUE,
                           "%s: `%s` must have at most topk_tokens = %lld columns, got %lld",
                           layer->op, name, (long long)topk_tokens, (long long)smla_size(topk, 1));
}

smla_status
smla_require_results(const smla_layer *layer, smla_checker *c, const smla_layer_results *results)
{
    const smla_step *const s = layer->step;
    const int64_t num_tokens = s->facts.num_actual_tokens;
    const bool more = results->may_have_more_heads;
    const bool has_workspace = s->facts.path == SMLA_PATH_SEPARATE && s->facts.num_chunks > 0;
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "attn_sink",
                                          .tensor = results->attn_sink,
                                          .dtypes = SMLA_DTYPE_FP32,
                                          .flags = SMLA_RULE_OPTIONAL | SMLA_RULE_ANY_LAST_STRIDE |
                                                   (more ? SMLA_RULE_MORE_ROWS : 0),
                                          .ndim = 1,
                                          .shape = {s->num_heads},
                                          .hint = more ? "at least a sink per head" : NULL}));
    SMLA_TRY(smla_require(c, &(smla_rule){.name = "out",
                                          .tensor = results->out,
                                          .dtypes = SMLA_DTYPE_BF16,
                                          .flags = SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS |
                                                   (more ? SMLA_RULE_MORE_HEADS : 0),
                                          .ndim = 3,
                                          .shape = {num_tokens, s->num_heads, SMLA_KV_LORA_RANK}}));
    SMLA_TRY(smla_require_state(c, "lse", results->lse, num_tokens, s->num_heads,
                                SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS));
    SMLA_TRY(smla_require_block_table(c, results->block_table));
    SMLA_TRY(
        smla_require(c, &(smla_rule){.name = "workspace",
                                     .tensor = has_workspace ? &s->workspaces[SMLA_GATHERED].tensor
                                                             : NULL,
                                     .dtypes = SMLA_DTYPE_BF16,
                                     .flags = SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL,
                                     .ndim = 2,
                                     .shape = {SMLA_ANY, SMLA_ANY}}));
    SMLA_TRY(smla_require_step_device(s, layer->op, "q", c->device, layer->error));
    return smla_require_disjoint(c);
}

const DLTensor *
smla_view_rows(const smla_layer *layer, smla_view *view, const int32_t *data, int64_t rows,
               int64_t columns, int64_t stride)
{
    const int64_t shape[2] = {rows, columns};
    const DLDataType int32_type = {.code = kDLInt, .bits = 32, .lanes = 1};
    smla_make_view(view, (void *)(uintptr_t)data, int32_type, layer->step->device, 2, shape);
    view->strides[0] = stride;
    return &view->tensor;
}

const DLTensor *
smla_view_vector(const smla_layer *layer, smla_view *view, const int32_t *data, int64_t count)
{
    const DLDataType int32_type = {.code = kDLInt, .bits = 32, .lanes = 1};
    smla_make_view(view, (void *)(uintptr_t)data, int32_type, layer->step->device, 1, &count);
    return &view->tensor;
}

const DLTensor *
smla_view_memory(const smla_layer *layer, smla_view *view, const void *data, int bits, int ndim,
                 const int64_t *shape)
{
    const DLDataType dtype = {.code = bits == 32 ? kDLFloat : kDLBfloat,
                              .bits = (uint8_t)bits,
                              .lanes = 1};
    smla_make_view(view, (void *)(uintptr_t)data, dtype, layer->step->device, ndim, shape);
    return &view->tensor;
}

smla_gather_kv_cache_args
smla_chunk_gather(const smla_layer *layer, const smla_chunk_rows *rows, smla_view views[5])
{
    return (smla_gather_kv_cache_args){
        .struct_size = sizeof(smla_gather_kv_cache_args),
        .kv_cache = rows->kv_cache,
        .block_table = smla_slice_rows(&views[0], rows->block_table, rows->first_req,
                                       rows->first_req + rows->num_reqs),
        .seq_lens = smla_view_vector(layer, &views[1], rows->lens, rows->num_reqs),
        .workspace_starts =
            smla_view_vector(layer, &views[2], rows->workspace_starts, rows->num_reqs),
        .seq_starts = rows->starts == NULL
                          ? NULL
                          : smla_view_vector(layer, &views[3], rows->starts, rows->num_reqs),
        .out = smla_slice_rows(&views[4], &layer->step->workspaces[SMLA_GATHERED].tensor, 0,
                               rows->num_rows),
        .kv_format = rows->kv_format,
        .stream = layer->stream,
        .kv_scale = rows->kv_scale,
    };
}

const DLTensor *
smla_view_scratch(const smla_layer *layer, smla_view *view)
{
    const smla_step *const s = layer->step;
    const DLDataType bytes = {.code = kDLUInt, .bits = 8, .lanes = 1};
    smla_make_view(view, s->scratch, bytes, s->device, 1, &s->scratch_bytes);
    return &view->tensor;
}

smla_status
smla_run_layer(const smla_layer *layer, smla_status (*run)(void *call), void *call)
{
    const smla_step *const s = layer->step;
    const smla_stream stream = {.device_id = s->device.device_id, .handle = layer->stream};
    if (s->facts.num_actual_tokens == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(s->backend->begin_use(layer->op, s->mirror, stream, layer->error));
    const smla_status status = run(call);
    /* Also after an error, because calls that were started before it read the metadata. */
    const smla_status ended =
        s->backend->end_use(layer->op, s->mirror, stream, status == SMLA_OK ? layer->error : NULL);
    return status == SMLA_OK ? ended : status;
}
