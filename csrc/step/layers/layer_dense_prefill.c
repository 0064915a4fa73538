/* layer_dense_prefill.c: the prefills of a dense layer on path "separate", as multi-head attention
 * to keys and values that kv_b_proj makes of latents:
 *
 *   new tokens   kv_c -> kv_b_proj -> k_nope, v;  causal attention -> out
 *   a chunk      cache -> gather -> workspace -> kv_b_proj -> k_nope, v;
 *                attention to all of its keys -> partial, merged with that of the chunks before
 *   at last      partial, merged with out -> out
 *
 * Requests without context take no part in merges, or the context's side of theirs is empty. Either
 * way their rows are those of the new tokens, bit for bit. Of several ranks, each has its own part
 * of the context, and the first one has the new tokens.
 */
#include "ops/check.h"
#include "step/layers/layer_dense.h"

/* ---- Rows ---------------------------------------------------------------------------------- */

/* `count` rows of results from row `start` on, with their lse. */
typedef struct result_rows {
    smla_head_rows out;
    smla_head_rows lse;
    int64_t count;
} result_rows;

/* The rows of the layer's own results. */
static result_rows
final_rows(const dense_layer *d, int64_t start, int64_t count)
{
    return (result_rows){smla_take_rows(d->out, start, count, sizeof(uint16_t)),
                         smla_take_rows(d->lse, start, count, sizeof(float)), count};
}

/* Those of a partial result. */
static result_rows
partial_rows(const dense_layer *d, int which, int64_t start, int64_t count)
{
    const int64_t heads = d->builder->config.num_heads;
    const smla_dense_made *const made = &d->builder->made;
    const smla_head_rows out =
        smla_made_rows(made->partial[which], heads, d->builder->config.v_head_dim);
    const smla_head_rows lse = smla_made_rows(made->partial_lse[which], heads, 1);
    return (result_rows){smla_take_rows(out, start, count, sizeof(uint16_t)),
                         smla_take_rows(lse, start, count, sizeof(float)), count};
}

/* Merges the first rows of `a` with those of `b`, which also has the rest of them, to `to`. */
static smla_status
merge(const dense_layer *d, const result_rows *a, const result_rows *b, int64_t merged_tokens,
      const result_rows *to)
{
    const result_rows *const parts[2] = {a, b};
    smla_merge_params params = {
        .call = smla_call_of_layer(&d->layer, "merge_attn_states", NULL),
        .rows = {.num_tokens = to->count,
                 .num_heads = d->builder->config.num_heads,
                 .value_dim = d->builder->config.v_head_dim,
                 .type = SMLA_FLOAT_BF16,
                 .out_type = SMLA_FLOAT_BF16,
                 .out = (void *)(uintptr_t)to->out.data,
                 .out_stride_token = to->out.stride_token,
                 .out_stride_head = to->out.stride_head,
                 .lse = (float *)(uintptr_t)to->lse.data,
                 .lse_stride_token = to->lse.stride_token,
                 .lse_stride_head = to->lse.stride_head},
        .merged_tokens = merged_tokens,
    };
    for (int i = 0; i < 2; i++) {
        params.parts[i] = (smla_merge_part){parts[i]->out.data,         parts[i]->out.stride_token,
                                            parts[i]->out.stride_head,  parts[i]->lse.data,
                                            parts[i]->lse.stride_token, parts[i]->lse.stride_head};
    }
    return smla_run_merge_attn_states(&d->layer, &params);
}

/* ---- Attention ----------------------------------------------------------------------------- */

/* Latents that keys and values are made of. */
typedef struct latent_rows {
    smla_head_rows kv_c;
    smla_head_rows k_pe;
    int64_t count;
    const int32_t *starts; /* where each request's begin */
    bool are_hidden;       /* no request has any: nothing is made of them */
} latent_rows;

/* Makes keys and values of latents, and attends to them with the query tokens from `start` on. The
 * requests of queries begin at `starts`. */
static smla_status
attend(const dense_layer *d, const latent_rows *latents, const int32_t *starts, int64_t num_reqs,
       int64_t start, const result_rows *to, bool is_causal)
{
    const int64_t count = latents->count;
    const smla_dense_config *const config = &d->builder->config;
    const DLTensor *const memory = &d->layer.step->workspaces[SMLA_DENSE_UP_PROJECTED].tensor;
    const int64_t heads = config->num_heads, values = config->v_head_dim;
    const int64_t nope = config->qk_nope_head_dim, rope = config->qk_rope_head_dim;
    const int64_t stride = count > 1 ? smla_stride(memory, 0) : 0;
    const uint16_t *const up = smla_data(memory);
    const smla_projection_params project =
        smla_dense_product(d, "kv_up_proj", latents->kv_c, d->args->kv_b_proj,
                           (smla_head_rows){up, stride, 0}, count);
    SMLA_TRY(latents->are_hidden ? SMLA_OK : smla_run_projection(&d->layer, &project));
    const int64_t stride_head = heads > 1 ? nope + values : 0;
    const smla_attention_params params = {
        .call = smla_call_of_layer(&d->layer, "varlen_attention", NULL),
        .queries = {.num_tokens = to->count,
                    .num_heads = heads,
                    .type = SMLA_FLOAT_BF16,
                    .dims = {(int16_t)nope, (int16_t)rope},
                    .parts = {smla_take_rows(d->q_nope, start, to->count, sizeof *up),
                              smla_take_rows(d->q_pe, start, to->count, sizeof *up)}},
        .source = SMLA_KEYS_RAGGED,
        .kv = {.num_keys = count,
               .num_kv_heads = heads,
               .rows = {{up, stride, stride_head},
                        rope == 0 ? (smla_head_rows){.data = NULL} : latents->k_pe,
                        {up + nope, stride, stride_head}},
               .type = SMLA_FLOAT_BF16,
               .value_dim = (int16_t)values,
               .starts = latents->starts,
               /* Every request of hidden latents begins and ends at the first start, which is 0. */
               .starts_stride = latents->are_hidden ? 0 : 1},
        .results = smla_results_of_layer(to->out, to->lse),
        .logits = {.softmax_scale = d->args->softmax_scale,
                   .q_descale.value = 1.0f,
                   .k_descale.value = 1.0f,
                   .v_descale.value = 1.0f},
        .visible = {.reqs = {.num_tokens = to->count,
                             .num_reqs = num_reqs,
                             .query_starts = starts,
                             .query_starts_stride = 1},
                    .rule = {.left = -1, .right = is_causal ? 0 : -1}},
        .workspace = smla_layer_workspace(&d->layer),
    };
    return smla_run_attention(&d->layer, &params);
}

/* Padding behind the last query is a request of its own, which has no keys. Of several ranks, the
 * first one attends to new tokens: every rank has them in its inputs, whoever caches them. */
static smla_status
attend_new_tokens(const dense_layer *d)
{
    const smla_dense_sent *const sent = &d->builder->sent;
    const smla_step_facts *const facts = &d->layer.step->facts;
    const int64_t start = d->num_absorbed, count = facts->num_actual_tokens - start;
    const result_rows to = final_rows(d, start, count);
    const latent_rows latents = {.kv_c = smla_take_rows(d->kv_c, start, count, sizeof(uint16_t)),
                                 .k_pe = smla_take_rows(d->k_pe, start, count, sizeof(uint16_t)),
                                 .count = count,
                                 .starts = sent->prefill_query_start_loc,
                                 .are_hidden = d->builder->share.rank != 0};
    return attend(d, &latents, sent->padded_query_start_loc, facts->split.num_prefills + 1, start,
                  &to, true);
}

/* ---- Chunks -------------------------------------------------------------------------------- */

static smla_gather_params
gather_of(const dense_layer *d, int64_t i)
{
    const smla_dense_builder *const b = d->builder;
    const int64_t first = b->metadata.context_chunks[i].first;
    smla_gather_params gather = smla_gather_of_chunk(&d->layer, &d->layer.step->chunks[i],
                                                     &d->cache, &b->block_table.tensor);
    gather.kv_scale = d->kv_scale;
    gather.seq_lens = b->sent.context_lens + first;
    gather.seq_starts = b->sent.context_starts + first;
    gather.workspace_starts = b->sent.context_key_starts + first + i;
    return gather;
}

/* Gathers a chunk, and attends to its keys. */
static smla_status
attend_chunk(const dense_layer *d, int64_t i, const result_rows *to)
{
    const smla_dense_builder *const b = d->builder;
    const smla_prefill_chunk *const chunk = &d->layer.step->chunks[i];
    const int64_t first = b->metadata.context_chunks[i].first + i;
    const smla_gather_params gather = gather_of(d, i);
    const int64_t stride = gather.out_stride_token;
    const latent_rows latents = {.kv_c = {gather.out, stride, 0},
                                 .k_pe = {gather.out + SMLA_KV_LORA_RANK, stride, 0},
                                 .count = chunk->tot_seqlen,
                                 .starts = b->sent.context_key_starts + first};
    SMLA_TRY(smla_run_gather_kv_cache(&d->layer, &gather));
    return attend(d, &latents, b->sent.context_query_starts + first,
                  chunk->req_end - chunk->req_start, chunk->token_start, to, false);
}

/* Attends to chunk `i`. Chunks whose tokens overlap or are neighbours are a run, which begins at
 * token `run_start`. The first chunk of a run writes partial result 0. Others write partial result
 * 1, which is merged with it for the tokens that the chunk before had, too. Behind the last one the
 * results of the run's context are complete. */
static smla_status
run_chunk(const dense_layer *d, int64_t i, int64_t *run_start)
{
    const smla_prefill_chunk *const chunk = &d->layer.step->chunks[i];
    const int64_t start = chunk->token_start, end = chunk->token_end;
    const bool goes_on = i > 0 && start <= chunk[-1].token_end;
    const int64_t merged_tokens = goes_on ? chunk[-1].token_end - start : 0;
    const result_rows sum = partial_rows(d, 0, start, end - start);
    const result_rows own = partial_rows(d, 1, start, end - start);
    *run_start = goes_on ? *run_start : start;
    SMLA_TRY(attend_chunk(d, i, merged_tokens > 0 ? &own : &sum));
    SMLA_TRY(merged_tokens > 0 ? merge(d, &sum, &own, merged_tokens, &sum) : SMLA_OK);
    if (i + 1 < d->layer.step->facts.num_chunks && chunk[1].token_start <= end) {
        return SMLA_OK;
    }
    const result_rows context = partial_rows(d, 0, *run_start, end - *run_start);
    const result_rows out = final_rows(d, *run_start, end - *run_start);
    return merge(d, &context, &out, out.count, &out);
}

/* ---- Prefills ------------------------------------------------------------------------------ */

smla_status
smla_dense_check_context(const dense_layer *d)
{
    for (int64_t i = 0; i < d->layer.step->facts.num_chunks; i++) {
        const smla_gather_params gather = gather_of(d, i);
        SMLA_TRY(d->layer.step->backend->check_gather(&gather, d->layer.error));
    }
    return SMLA_OK;
}

smla_status
smla_dense_run_prefills(const dense_layer *d)
{
    int64_t run_start = 0;
    SMLA_TRY(smla_dense_run_queries(d));
    SMLA_TRY(attend_new_tokens(d));
    for (int64_t i = 0; i < d->layer.step->facts.num_chunks; i++) {
        SMLA_TRY(run_chunk(d, i, &run_start));
    }
    return smla_dense_run_outputs(d);
}
