/* layer_dense_prefill.c: the prefills of a dense layer on path "separate", as multi-head attention
 * to keys and values that kv_b_proj makes of latents:
 *
 *   new tokens   kv_c -> kv_b_proj -> k_nope, v;  causal attention -> out
 *   a chunk      cache -> gather -> workspace -> kv_b_proj -> k_nope, v;
 *                attention to all of its keys -> partial, merged with that of the chunks before
 *   at last      partial, merged with out -> out
 *
 * Requests without context take no part in merges, or the context's side of theirs is empty. Either
 * way their rows are those of the new tokens, bit for bit.
 */
#include "ops/check.h"
#include "ops/dispatch.h"
#include "step/layers/layer_dense.h"

/* ---- Views --------------------------------------------------------------------------------- */

/* The first `num_rows` rows of up-projected latents: keys and values beside each other, per head.
 */
typedef struct up_rows {
    smla_view all;    /* [rows, H * (Pn + Pv)] */
    smla_view k_nope; /* [rows, H, Pn] */
    smla_view v;      /* [rows, H, Pv] */
} up_rows;

static void
view_up_rows(const dense_layer *d, int64_t num_rows, up_rows *up)
{
    const smla_dense_config *const config = &d->builder->config;
    const DLTensor *const memory = &d->layer.step->workspaces[SMLA_UP_PROJECTED].tensor;
    const int64_t nope = config->qk_nope_head_dim, values = config->v_head_dim;
    const int64_t shapes[2][3] = {{num_rows, config->num_heads, nope},
                                  {num_rows, config->num_heads, values}};
    const uint16_t *const first = smla_data(smla_slice_rows(&up->all, memory, 0, num_rows));
    smla_view_memory(&d->layer, &up->k_nope, first, 16, 3, shapes[0]);
    smla_view_memory(&d->layer, &up->v, first + nope, 16, 3, shapes[1]);
    up->k_nope.strides[0] = up->v.strides[0] = smla_stride(memory, 0);
    up->k_nope.strides[1] = up->v.strides[1] = nope + values;
}

/* Rows [start, end) of partial results, and of their lse. */
static void
view_partial(const dense_layer *d, int which, int64_t start, int64_t end, smla_view *out,
             smla_view *lse)
{
    const int64_t heads = d->builder->config.num_heads, values = d->builder->config.v_head_dim;
    const int64_t shape[3] = {end - start, heads, values};
    const smla_dense_made *const made = &d->builder->made;
    smla_view_memory(&d->layer, out,
                     (uint16_t *)(void *)made->partial[which] + start * heads * values, 16, 3,
                     shape);
    smla_view_memory(&d->layer, lse, made->partial_lse[which] + start * heads, 32, 2, shape);
}

/* ---- New tokens ---------------------------------------------------------------------------- */

/* Padding behind the last query is a request of its own, which has no keys. */
static smla_status
check_new_keys(dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_builder *const b = d->builder;
    const smla_step_facts *const facts = &d->layer.step->facts;
    const int64_t start = d->num_absorbed, end = facts->num_actual_tokens;
    const int64_t num_starts = facts->split.num_prefills + 2;
    const bool has_rope = b->config.qk_rope_head_dim > 0;
    up_rows up;
    smla_view kv_c, q, q_pe, k_pe, out, lse, queries, keys, scratch;
    const smla_backend *backend;
    view_up_rows(d, end - start, &up);
    const smla_kv_up_proj_args project = {
        .struct_size = sizeof project,
        .kv_c = smla_slice_rows(&kv_c, &d->kv_c.tensor, start, end),
        .kv_b_proj = a->kv_b_proj,
        .out = &up.all.tensor,
        .stream = a->stream,
    };
    SMLA_TRY(smla_check_kv_up_proj(&project, &d->up, &backend, d->layer.error));
    const smla_varlen_attention_args attend = {
        .struct_size = sizeof attend,
        .q = smla_slice_rows(&q, &d->q_nope.tensor, start, end),
        .q_pe = has_rope ? smla_slice_rows(&q_pe, &d->q_pe.tensor, start, end) : NULL,
        .k = &up.k_nope.tensor,
        .k_pe = has_rope ? smla_slice_rows(&k_pe, &d->k_pe.tensor, start, end) : NULL,
        .v = &up.v.tensor,
        .cu_seqlens_q =
            smla_view_vector(&d->layer, &queries, b->sent.padded_query_start_loc, num_starts),
        .cu_seqlens_k =
            smla_view_vector(&d->layer, &keys, b->sent.prefill_query_start_loc, num_starts),
        .out = smla_slice_rows(&out, &d->out.tensor, start, end),
        .lse = smla_slice_rows(&lse, &d->lse.tensor, start, end),
        .workspace = smla_view_scratch(&d->layer, &scratch),
        .softmax_scale = a->softmax_scale,
        .max_seqlen_q = b->max_prefill_query_len,
        .max_seqlen_k = b->max_prefill_query_len,
        .is_causal = true,
        .stream = a->stream,
    };
    return smla_check_varlen_attention(&attend, &d->new_tokens, &backend, d->layer.error);
}

/* ---- Chunks -------------------------------------------------------------------------------- */

static smla_gather_kv_cache_args
gather_of(const dense_layer *d, int64_t i, smla_view views[5])
{
    const smla_dense_builder *const b = d->builder;
    const smla_context_chunk *const chunk = &b->metadata.context_chunks[i];
    const smla_chunk_rows rows = {
        .kv_cache = d->args->kv_cache,
        .block_table = &b->block_table.tensor,
        .kv_format = b->config.kv_format,
        .kv_scale = d->args->kv_scale,
        .first_req = b->metadata.split.num_decodes + chunk->req_start,
        .num_reqs = chunk->req_end - chunk->req_start,
        .num_rows = chunk->num_tokens,
        .lens = b->sent.context_lens + chunk->first,
        .starts = b->sent.context_starts + chunk->first,
        .workspace_starts = b->sent.context_key_starts + chunk->first + i,
    };
    return smla_chunk_gather(&d->layer, &rows, views);
}

/* Gathers a chunk, and makes its keys and values. `k_pe` becomes the RoPE parts of the keys. */
static smla_status
make_keys(const dense_layer *d, int64_t i, up_rows *up, smla_view *k_pe)
{
    smla_view views[5], kv_c;
    const smla_gather_kv_cache_args gather = gather_of(d, i, views);
    SMLA_TRY(smla_gather_kv_cache(&gather, d->layer.error));
    view_up_rows(d, smla_size(gather.out, 0), up);
    const smla_kv_up_proj_args project = {
        .struct_size = sizeof project,
        .kv_c = smla_slice_columns(&kv_c, gather.out, 0, SMLA_KV_LORA_RANK),
        .kv_b_proj = d->args->kv_b_proj,
        .out = &up->all.tensor,
        .stream = d->layer.stream,
    };
    smla_slice_columns(k_pe, gather.out, SMLA_KV_LORA_RANK,
                       SMLA_KV_LORA_RANK + d->builder->config.qk_rope_head_dim);
    return smla_kv_up_proj(&project, d->layer.error);
}

/* Attends to one chunk, and writes the rows of its requests in partial result `which`. */
static smla_status
attend_chunk(const dense_layer *d, int64_t i, int which)
{
    const smla_dense_builder *const b = d->builder;
    const smla_context_chunk *const chunk = &b->metadata.context_chunks[i];
    const smla_dense_chunk *const tokens = (const smla_dense_chunk *)(void *)b->kept.chunks + i;
    const int64_t start = tokens->token_start, end = tokens->token_end;
    const int64_t first = chunk->first + i, num_starts = chunk->req_end - chunk->req_start + 1;
    const bool has_rope = b->config.qk_rope_head_dim > 0;
    up_rows up;
    smla_view q, q_pe, k_pe, out, lse, queries, keys, scratch;
    SMLA_TRY(make_keys(d, i, &up, &k_pe));
    view_partial(d, which, start, end, &out, &lse);
    const smla_varlen_attention_args attend = {
        .struct_size = sizeof attend,
        .q = smla_slice_rows(&q, &d->q_nope.tensor, start, end),
        .q_pe = has_rope ? smla_slice_rows(&q_pe, &d->q_pe.tensor, start, end) : NULL,
        .k = &up.k_nope.tensor,
        .k_pe = has_rope ? &k_pe.tensor : NULL,
        .v = &up.v.tensor,
        .cu_seqlens_q =
            smla_view_vector(&d->layer, &queries, b->sent.context_query_starts + first, num_starts),
        .cu_seqlens_k =
            smla_view_vector(&d->layer, &keys, b->sent.context_key_starts + first, num_starts),
        .out = &out.tensor,
        .lse = &lse.tensor,
        .workspace = smla_view_scratch(&d->layer, &scratch),
        .softmax_scale = d->args->softmax_scale,
        .max_seqlen_q = b->max_prefill_query_len,
        .max_seqlen_k = chunk->max_len,
        .stream = d->layer.stream,
    };
    return smla_varlen_attention(&attend, d->layer.error);
}

/* Merges the second partial result, of one chunk, with the first, of the chunks before it. */
static smla_status
merge_chunk(const dense_layer *d, const smla_dense_chunk *tokens)
{
    smla_view outs[2], lses[2];
    for (int k = 0; k < 2; k++) {
        view_partial(d, k, tokens->token_start, tokens->token_end, &outs[k], &lses[k]);
    }
    const smla_merge_attn_states_args merge = {
        .struct_size = sizeof merge,
        .out_a = &outs[0].tensor,
        .lse_a = &lses[0].tensor,
        .out_b = &outs[1].tensor,
        .lse_b = &lses[1].tensor,
        .out = &outs[0].tensor,
        .lse = &lses[0].tensor,
        .stream = d->layer.stream,
        .tokens_without_context = tokens->token_end - tokens->token_start - tokens->merged_tokens,
    };
    return smla_merge_attn_states(&merge, d->layer.error);
}

/* Merges the context of a run of chunks with the new tokens. */
static smla_status
merge_run(const dense_layer *d, int64_t start, int64_t end)
{
    smla_view context, context_lse, out, lse;
    view_partial(d, 0, start, end, &context, &context_lse);
    smla_slice_rows(&out, &d->out.tensor, start, end);
    smla_slice_rows(&lse, &d->lse.tensor, start, end);
    const smla_merge_attn_states_args merge = {
        .struct_size = sizeof merge,
        .out_a = &context.tensor,
        .lse_a = &context_lse.tensor,
        .out_b = &out.tensor,
        .lse_b = &lse.tensor,
        .out = &out.tensor,
        .lse = &lse.tensor,
        .stream = d->layer.stream,
    };
    return smla_merge_attn_states(&merge, d->layer.error);
}

/* ---- Prefills ------------------------------------------------------------------------------ */

smla_status
smla_dense_check_prefills(dense_layer *d)
{
    SMLA_TRY(check_new_keys(d));
    for (int64_t i = 0; i < d->builder->metadata.num_context_chunks; i++) {
        smla_view views[5];
        const smla_gather_kv_cache_args gather = gather_of(d, i, views);
        SMLA_TRY(smla_check_gather_values(&gather, d->layer.error));
    }
    return d->absorbed != NULL ? smla_dense_check_prefill_products(d) : SMLA_OK;
}

smla_status
smla_dense_run_prefills(const dense_layer *d)
{
    const smla_backend *const backend = d->layer.step->backend;
    const smla_dense_chunk *const chunks = (const void *)d->builder->kept.chunks;
    SMLA_TRY(d->absorbed != NULL ? backend->projection(&d->queries, d->layer.error) : SMLA_OK);
    SMLA_TRY(backend->projection(&d->up, d->layer.error));
    SMLA_TRY(backend->attend(&d->new_tokens, d->layer.error));
    for (int64_t i = 0; i < d->builder->metadata.num_context_chunks; i++) {
        const smla_dense_chunk *const tokens = &chunks[i];
        const bool merges = tokens->merged_tokens > 0;
        SMLA_TRY(attend_chunk(d, i, merges ? 1 : 0));
        SMLA_TRY(merges ? merge_chunk(d, tokens) : SMLA_OK);
        SMLA_TRY(tokens->ends_run ? merge_run(d, tokens->run_start, tokens->token_end) : SMLA_OK);
    }
    return d->absorbed != NULL ? backend->projection(&d->outputs, d->layer.error) : SMLA_OK;
}
