/* layer.c: what the layers of all plans share. */
#include "step/layers/layer.h"

#include "core/args.h"
#include "core/entry.h"
#include "ops/check.h"
#include "ops/check_attention.h"

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
               : smla_fail_value(layer->error, layer->op,
                                 "`builder` must have built a step, got none");
}

smla_status
smla_require_topk(const smla_layer *layer, smla_checker *c, const char *name, const DLTensor *topk,
                  int64_t topk_tokens)
{
    SMLA_TRY(
        smla_require(c,
                     &(smla_rule)SMLA_ARRAY(name, topk, SMLA_DTYPE_INT32, SMLA_RULE_MORE_ROWS, NULL,
                                            2, layer->step->facts.num_actual_tokens, SMLA_ANY)));
    return smla_size(topk, 1) <= topk_tokens
               ? SMLA_OK
               : smla_fail_value(layer->error, layer->op,
                                 "`%s` must have at most topk_tokens = %lld columns, got %lld",
                                 name, (long long)topk_tokens, (long long)smla_size(topk, 1));
}

smla_status
smla_require_results(const smla_layer *layer, smla_checker *c, const smla_layer_arrays *arrays)
{
    const smla_step *const s = layer->step;
    const int64_t num_tokens = s->facts.num_actual_tokens;
    const bool more = arrays->may_have_more_heads;
    const smla_rule rules[] = {
        SMLA_ARRAY("out", arrays->out, SMLA_DTYPE_BF16,
                   SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS | (more ? SMLA_RULE_MORE_HEADS : 0), NULL,
                   3, num_tokens, s->num_heads, SMLA_KV_LORA_RANK),
        SMLA_ARRAY("lse", arrays->lse, SMLA_DTYPE_FP32,
                   SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE, NULL, 2,
                   num_tokens, s->num_heads),
        SMLA_ARRAY("workspace",
                   smla_num_gathers(s) > 0 ? &s->workspaces[SMLA_GATHERED].tensor : NULL,
                   SMLA_DTYPE_BF16, SMLA_RULE_OUTPUT | SMLA_RULE_OPTIONAL, NULL, 2, SMLA_ANY,
                   SMLA_ANY),
    };
    smla_sinks sinks;
    SMLA_TRY(smla_require_sinks(c, &arrays->sinks, more ? "at least a sink per head" : NULL,
                                s->num_heads, &sinks));
    SMLA_TRY(smla_require_arrays(c, rules, sizeof rules / sizeof rules[0]));
    SMLA_TRY(smla_require_block_table(c, arrays->block_table));
    SMLA_TRY(smla_require_step_device(s, layer->op, "q", c->device, layer->error));
    return smla_require_disjoint(c);
}

smla_status
smla_require_arrays(smla_checker *c, const smla_rule *rules, int count)
{
    for (int i = 0; i < count; i++) {
        SMLA_TRY(smla_require(c, &rules[i]));
    }
    return SMLA_OK;
}

void
smla_fill_layer(const smla_layer *layer, const smla_layer_arrays *arrays, int64_t head_dim,
                double softmax_scale, smla_attention_params *params)
{
    const smla_given_scale one = {.value = 1.0f};
    *params = (smla_attention_params){
        .call = smla_call_of_layer(layer, "sparse_attention", NULL),
        .queries = {.num_tokens = layer->step->facts.num_actual_tokens,
                    .num_heads = layer->step->num_heads,
                    .type = smla_float_type_of(arrays->q),
                    .dims = {SMLA_KV_LORA_RANK, (int16_t)(head_dim - SMLA_KV_LORA_RANK)}},
        .results = smla_results_of_layer(smla_view_part(arrays->out, 0),
                                         (smla_head_rows){smla_data(arrays->lse),
                                                          smla_stride(arrays->lse, 0),
                                                          smla_stride(arrays->lse, 1)}),
        .logits = {.sinks = smla_sinks_of(arrays->sinks.tensor),
                   .softmax_scale = softmax_scale,
                   .q_scale = one,
                   .divisor = one,
                   .kv_scale = {one, one}},
    };
    smla_view_parts(arrays->q, arrays->q_pe, params->queries.dims, params->queries.parts);
}

smla_attention_params
smla_take_tokens(const smla_attention_params *all, int64_t start, int64_t count)
{
    smla_attention_params part = smla_params_of_tokens(all, start, count);
    if (count <= 1) { /* one row has no stride */
        part.queries.parts[SMLA_NOPE].stride_token = part.queries.parts[SMLA_PE].stride_token = 0;
        for (int i = 0; i < 2; i++) {
            part.keys.lists[i].indices_stride_token = part.keys.lists[i].end_stride = 0;
        }
        part.results.out_stride_token = part.results.lse_stride_token = 0;
    }
    return part;
}

smla_results
smla_results_of_layer(smla_head_rows out, smla_head_rows lse)
{
    return (smla_results){
        .num_splits = 1,
        .out_type = SMLA_FLOAT_BF16,
        .out = (void *)(uintptr_t)out.data,
        .out_stride_token = out.stride_token,
        .out_stride_head = out.stride_head,
        .lse = (float *)(uintptr_t)lse.data,
        .lse_stride_token = lse.stride_token,
        .lse_stride_head = lse.stride_head,
    };
}

smla_workspace
smla_layer_workspace(const smla_layer *layer)
{
    return (smla_workspace){layer->step->scratch, layer->step->scratch_bytes, "workspace"};
}

smla_kv_view
smla_gathered_rows(const smla_layer *layer, int64_t num_rows)
{
    const DLTensor *const rows = &layer->step->workspaces[SMLA_GATHERED].tensor;
    const int64_t stride = num_rows > 1 ? smla_stride(rows, 0) * (int64_t)sizeof(uint16_t) : 0;
    return (smla_kv_view){.base = smla_data(rows),
                          .num_pages = num_rows == 0 ? 0 : 1,
                          .block_size = num_rows == 0 ? 1 : num_rows,
                          .token_stride_bytes = stride,
                          .format =
                              smla_find_kv_row(SMLA_KV_BFLOAT16, smla_size(rows, 1), SMLA_KV_ALL),
                          .scales = smla_data(rows),
                          .scale_token_stride_bytes = stride};
}

smla_status
smla_plan_layer(const smla_layer *layer, smla_attention_params *params)
{
    static const smla_attention_inputs in = {.q_scale.name = "q_scale"};
    static const smla_list_args lists[] = {{.kv_scale.name = "kv_scale"},
                                           {.kv_scale.name = "extra_kv_scale"}};
    smla_checker c;
    smla_open_part(&c, layer, params->call.op);
    params->call.kv_format = params->keys.lists[0].kv.format;
    params->workspace = smla_layer_workspace(layer);
    smla_plan_lists(0, layer->step->backend, params);
    return smla_require_logit_scale(&c, &in, lists, params);
}

smla_gather_params
smla_gather_of_requests(const smla_layer *layer, const char *op, const smla_kv_view *cache,
                        const DLTensor *block_table, int64_t first_req, int64_t num_reqs)
{
    const smla_page_table pages = smla_page_table_of(block_table, 0);
    return (smla_gather_params){
        .call = smla_call_of_layer(layer, op, cache->format),
        .num_reqs = num_reqs,
        .num_blocks = pages.num_blocks,
        .block_table = pages.block_table + first_req * pages.stride_req,
        .block_table_stride_req = pages.stride_req,
        .block_table_stride_block = pages.stride_block,
        .seq_lens_stride = 1,
        .kv = *cache,
        .kv_scale = {.value = 1.0f},
        .out = smla_data(&layer->step->workspaces[SMLA_GATHERED].tensor),
    };
}

smla_gather_params
smla_gather_of_chunk(const smla_layer *layer, const smla_prefill_chunk *chunk,
                     const smla_kv_view *cache, const DLTensor *block_table)
{
    const DLTensor *const out = &layer->step->workspaces[SMLA_GATHERED].tensor;
    smla_gather_params params =
        smla_gather_of_requests(layer, "gather_kv_cache", cache, block_table,
                                layer->step->facts.split.num_decodes + chunk->req_start,
                                chunk->req_end - chunk->req_start);
    params.workspace_starts_stride = params.seq_starts_stride = 1;
    params.out_tokens = chunk->tot_seqlen;
    params.out_stride_token = chunk->tot_seqlen > 1 ? smla_stride(out, 0) : 0;
    return params;
}

smla_status
smla_take_own(const smla_layer *layer, const smla_rank_share *share, int64_t start, int64_t count,
              int32_t *own, int32_t *lens, smla_key_list *list)
{
    const smla_rank_lists_params params = {
        .call = smla_call_of_layer(layer, "cp_local_topk", NULL),
        .share = *share,
        .num_rows = count,
        .num_columns = list->topk,
        .in = list->indices + start * list->indices_stride_token,
        .in_stride_row = list->indices_stride_token,
        .in_stride_column = 1,
        .out = own + start * list->topk,
        .out_stride_row = list->topk,
        .lens = lens + start,
        .lens_stride = 1,
    };
    list->indices = own;
    list->indices_stride_token = list->topk;
    return smla_run_cp_local_topk(layer, &params);
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
