/* layer_v32.c: one DeepSeek-V3.2 layer of the step that the builder planned, composed of operators.
 *
 *   mixed, bf16   indices -> one attention call over all tokens
 *   direct        indices -> attention over decodes, attention over prefills, both on the cache
 *   separate      indices -> attention over decodes; per chunk: gather to the workspace ->
 *                 attention
 *
 * Of several ranks, each first takes its own positions out of the indices, by cp_local_topk, and
 * gathers its own rows.
 *
 * Everything is checked before the first byte is written. Padding tokens after the last query
 * attend to the cache, like decodes, even if they follow prefills.
 */
#include "ops/check.h"
#include "step/layers/layer.h"
#include "step/plans/plan_v32.h"

static const char op[] = "forward";

typedef struct forward_call {
    smla_layer layer;
    const smla_forward_args *args;
    const smla_builder *builder;
    const smla_metadata *metadata;
    smla_kv_view cache;
    smla_attention_params attention; /* every token, over the cache */
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
        return smla_fail_value(c->error, op, "`kv_cache` must have a last dimension of %d, got %d",
                               format->row_elements, kv->format->row_elements);
    }
    if (kv->block_size != b->config.block_size) {
        return smla_fail_value(c->error, op,
                               "`kv_cache` must have pages of block_size = %lld tokens, got %lld",
                               (long long)b->config.block_size, (long long)kv->block_size);
    }
    return SMLA_OK;
}

/* The list of all tokens: positions, which attention itself maps to slots. */
static void
fill_list(forward_call *f)
{
    const smla_page_table pages = smla_page_table_of(&f->builder->block_table.tensor, 0);
    const int32_t *const req_ids = f->builder->sent.req_id_per_token;
    const DLTensor *const topk = f->args->topk_indices;
    f->attention.keys.num_lists = 1;
    f->attention.keys.lists[0] = (smla_key_list){
        .kv = f->cache,
        SMLA_SET_ROWS(indices, topk),
        .topk = smla_size(topk, 1),
        /* A table without columns may be NULL. The map's must not be, but its memory is not read.
         */
        .map = {.block_table = pages.block_table != NULL ? pages.block_table : req_ids,
                .block_table_stride_req = pages.stride_req,
                .block_table_stride_block = pages.stride_block,
                .num_reqs = smla_size(&f->builder->block_table.tensor, 0),
                .num_blocks = pages.num_blocks,
                .req_id_per_token = req_ids},
    };
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
    if (b->share.size > 0 && args->attn_sink != NULL) {
        return smla_fail_value(f->layer.error, op, SMLA_SINK_OF_RANKS);
    }
    const smla_layer_arrays arrays = {SMLA_LAYER_ARRAYS_OF(args), .q_pe = args->q_pe,
                                      .block_table = &b->block_table.tensor};
    SMLA_TRY(smla_require_results(&f->layer, &c, &arrays));
    smla_fill_layer(&f->layer, &arrays, f->cache.format->head_dim, args->softmax_scale,
                    &f->attention);
    fill_list(f);
    return SMLA_OK;
}

/* ---- Steps --------------------------------------------------------------------------------- */

/* Leaves the rank's own positions in the lists, without holes. */
static smla_status
take_own(forward_call *f)
{
    const smla_v32_made *const made = &f->builder->made;
    smla_key_list *const list = &f->attention.keys.lists[0];
    list->end = made->own_lens;
    list->end_stride = 1;
    return smla_take_own(&f->layer, &f->builder->share, 0, f->metadata->num_actual_tokens,
                         made->own_topk, made->own_lens, list);
}

/* Turns all positions into slots. Tokens that read the workspace need row numbers of it instead, so
 * one call converts the indices of all tokens. */
static smla_status
convert_indices(forward_call *f)
{
    const smla_metadata *const m = f->metadata;
    smla_key_list *const list = &f->attention.keys.lists[0];
    const smla_convert_params params = {
        .call = smla_call_of_layer(&f->layer, "convert_req_index_to_global_index", NULL),
        .num_tokens = m->num_actual_tokens,
        .topk = list->topk,
        .num_reqs = list->map.num_reqs,
        .num_blocks = list->map.num_blocks,
        .num_prefills = m->split.num_prefills,
        .block_size = f->builder->config.block_size,
        .req_id_per_token = m->req_id_per_token,
        .req_id_stride = 1,
        .block_table = list->map.block_table,
        .block_table_stride_req = list->map.block_table_stride_req,
        .block_table_stride_block = list->map.block_table_stride_block,
        .topk_indices = list->indices,
        .topk_indices_stride_token = list->indices_stride_token,
        .prefill_request_ids = m->prefill_request_ids,
        .prefill_request_ids_stride = 1,
        .prefill_workspace_starts = m->prefill_workspace_starts,
        .prefill_workspace_starts_stride = 1,
        .out = f->builder->made.indices,
        .out_stride_token = list->topk,
    };
    list->map = (smla_index_map){.block_table = NULL};
    list->indices = params.out;
    list->indices_stride_token = params.out_stride_token;
    return smla_run_convert_req_index_to_global_index(&f->layer, &params);
}

/* Runs attention of tokens [start, end) over `kv`: the cache, or the workspace rows in use. The
 * backend plans the call; the plan of the decodes has decode_num_splits of the metadata. */
static smla_status
attend(const forward_call *f, const smla_kv_view *kv, int64_t start, int64_t end)
{
    if (start == end) {
        return SMLA_OK;
    }
    smla_attention_params part = smla_take_tokens(&f->attention, start, end - start);
    part.keys.lists[0].kv = *kv;
    SMLA_TRY(smla_plan_layer(&f->layer, &part));
    return smla_run_attention(&f->layer, &part);
}

static smla_gather_params
gather_of(const forward_call *f, const smla_prefill_chunk *chunk)
{
    const smla_builder *const b = f->builder;
    smla_gather_params gather =
        smla_gather_of_chunk(&f->layer, chunk, &f->cache, &b->block_table.tensor);
    gather.seq_lens = b->sent.prefill_seq_lens + chunk->req_start;
    gather.workspace_starts = b->sent.prefill_workspace_starts + chunk->req_start;
    return gather;
}

static smla_status
check_chunks(const forward_call *f)
{
    for (int64_t i = 0; i < f->metadata->num_chunks; i++) {
        const smla_gather_params gather = gather_of(f, &f->metadata->chunks[i]);
        SMLA_TRY(f->layer.step->backend->check_gather(&gather, f->layer.error));
    }
    return SMLA_OK;
}

static smla_status
attend_chunks(const forward_call *f)
{
    for (int64_t i = 0; i < f->metadata->num_chunks; i++) {
        const smla_prefill_chunk *const chunk = &f->metadata->chunks[i];
        const smla_gather_params gather = gather_of(f, chunk);
        const smla_kv_view rows = smla_gathered_rows(&f->layer, chunk->tot_seqlen);
        /* A rank may have no row of any of the chunk's requests. */
        SMLA_TRY(gather.out_tokens > 0 ? smla_run_gather_kv_cache(&f->layer, &gather) : SMLA_OK);
        SMLA_TRY(attend(f, &rows, chunk->token_start, chunk->token_end));
    }
    return SMLA_OK;
}

static smla_status
run(void *call)
{
    forward_call *const f = call;
    const smla_metadata *m = f->metadata;
    if (smla_is_logging) {
        smla_log_text(" path %s, chunks %lld,", smla_path_name(m->path), (long long)m->num_chunks);
    }
    SMLA_TRY(check_chunks(f));
    SMLA_TRY(f->builder->share.size > 0 ? take_own(f) : SMLA_OK);
    SMLA_TRY(m->num_chunks > 0 ? convert_indices(f) : SMLA_OK);
    const int64_t num_first = f->layer.step->facts.num_first_tokens;
    const int64_t end_of_chunks =
        m->num_chunks > 0 ? m->chunks[m->num_chunks - 1].token_end : num_first;
    SMLA_TRY(attend(f, &f->cache, 0, num_first));
    SMLA_TRY(attend_chunks(f));
    /* The tokens left are prefills on path "direct", which has no chunks, else padding tokens. */
    return attend(f, &f->cache, end_of_chunks, m->num_actual_tokens);
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
