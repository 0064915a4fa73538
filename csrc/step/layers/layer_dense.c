/* layer_dense.c: one layer of dense MLA, composed of the operators:
 *
 *   all tokens   q_pe, k_pe -> RoPE -> scratch;  kv_c, k_pe -> cache
 *   absorbed     q_nope -> W_UK -> scratch;  attention over the cache -> scratch;  W_UV -> out
 *   prefills     see layer_dense_prefill.c
 *
 * With weights that have absorbed W_UK and W_UV other products take the place of those; see
 * layer_dense_weights.c.
 *
 * On path "mixed" all tokens are absorbed, on path "separate" the decodes, which come first. All
 * operators are checked before the first one runs.
 */
#include "step/layers/layer_dense.h"

#include "ops/check.h"

static const char op[] = "dense.forward";

/* ---- Views --------------------------------------------------------------------------------- */

/* Values [first, first + count) of every head of a tensor [>= T, H, values]. */
static const DLTensor *
take_values(const dense_layer *d, smla_view *view, const DLTensor *tensor, int64_t first,
            int64_t count)
{
    smla_slice_rows(view, tensor, 0, d->layer.step->facts.num_actual_tokens);
    view->shape[2] = count;
    if (view->tensor.data != NULL) {
        view->tensor.byte_offset += (uint64_t)first * sizeof(uint16_t);
    }
    return &view->tensor;
}

/* ---- Checks -------------------------------------------------------------------------------- */

/* Checks an array of bf16 with a row per token. */
static smla_status
require_tokens(smla_checker *c, const char *name, const DLTensor *tensor, int64_t num_tokens,
               int64_t heads, int64_t values, unsigned flags)
{
    const int ndim = heads == 0 ? 2 : 3;
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_BF16,
                                        .flags = flags | SMLA_RULE_MORE_ROWS,
                                        .ndim = ndim,
                                        .shape = {num_tokens, heads == 0 ? values : heads, values},
                                        .hint = "a row per token of the step"});
}

static smla_status
require_weight(smla_checker *c, const char *name, const DLTensor *tensor, int64_t heads,
               int64_t values)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_BF16,
                                        .ndim = 3,
                                        .shape = {SMLA_KV_LORA_RANK, heads, values}});
}

/* Lets the workspaces be disjoint from all other arrays. */
static smla_status
require_workspaces(smla_checker *c, const dense_layer *d)
{
    static const char *const names[] = {"workspace", "up_workspace"};
    for (int i = 0; i < SMLA_NUM_WORKSPACES; i++) {
        SMLA_TRY(smla_require(c, &(smla_rule){.name = names[i],
                                              .tensor = &d->layer.step->workspaces[i].tensor,
                                              .dtypes = SMLA_DTYPE_BF16,
                                              .flags = SMLA_RULE_OUTPUT,
                                              .ndim = 2,
                                              .shape = {SMLA_ANY, SMLA_ANY}}));
    }
    return SMLA_OK;
}

/* Checks the queries of a layer, W_UK and W_UV. */
static smla_status
require_queries(smla_checker *c, const dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t num_tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t heads = config->num_heads, rope = config->qk_rope_head_dim;
    const int64_t nope = config->qk_nope_head_dim;
    const bool is_pair = a->q_pe != NULL;
    SMLA_TRY(require_tokens(c, is_pair ? "q[0]" : "q", a->q, num_tokens, heads,
                            is_pair ? nope : nope + rope, 0));
    return require_tokens(c, "q[1]", a->q_pe, num_tokens, heads, rope, SMLA_RULE_OPTIONAL);
}

/* Checks latents, keys, and the cache they are written to. */
static smla_status
require_keys(smla_checker *c, const dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t num_tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t rope = config->qk_rope_head_dim;
    const bool is_pair = a->q_pe != NULL;
    smla_kv_view kv;
    SMLA_TRY(require_tokens(c, "kv_c", a->kv_c, num_tokens, 0, SMLA_KV_LORA_RANK, 0));
    SMLA_TRY(require_tokens(c, "k_pe", a->k_pe, num_tokens, 0, rope,
                            rope == 0 ? SMLA_RULE_OPTIONAL : 0));
    SMLA_TRY(smla_require_kv(c,
                             &(smla_cache_rule){.name = "kv_cache",
                                                .tensor = a->kv_cache,
                                                .kv_format = config->kv_format,
                                                .formats = SMLA_KV_ATTENTION,
                                                .flags = SMLA_RULE_OUTPUT},
                             &kv));
    if (kv.format->head_dim != SMLA_KV_LORA_RANK + rope) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `kv_cache` must have keys of %lld values, got %d", op,
                         (long long)(SMLA_KV_LORA_RANK + rope), (int)kv.format->head_dim);
    }
    if (rope == 0 && (is_pair || a->rope_table != NULL)) {
        return smla_fail(c->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must be %s where qk_rope_head_dim is 0, got %s", op,
                         is_pair ? "q" : "rope_table", is_pair ? "one array" : "left out",
                         is_pair ? "a pair" : "one");
    }
    return kv.block_size == config->block_size
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `kv_cache` must have pages of block_size = %lld tokens, got %lld",
                           op, (long long)config->block_size, (long long)kv.block_size);
}

static smla_status
require_table(smla_checker *c, const dense_layer *d)
{
    return smla_require(c, &(smla_rule){.name = "rope_table",
                                        .tensor = d->args->rope_table,
                                        .dtypes = SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                                        .flags = SMLA_RULE_OPTIONAL,
                                        .ndim = 2,
                                        .shape = {SMLA_ANY, d->builder->config.qk_rope_head_dim},
                                        .hint = "cosines, then sines, per position"});
}

/* Checks the weight of prefills. */
static smla_status
require_kv_b_proj(smla_checker *c, const dense_layer *d)
{
    const smla_dense_config *const config = &d->builder->config;
    const int64_t columns = config->num_heads * (config->qk_nope_head_dim + config->v_head_dim);
    return smla_require(c, &(smla_rule){.name = "kv_b_proj",
                                        .tensor = d->args->kv_b_proj,
                                        .dtypes = SMLA_DTYPE_BF16,
                                        .flags = SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = 2,
                                        .shape = {SMLA_KV_LORA_RANK, columns},
                                        .hint = "the weight that W_UK and W_UV are parts of"});
}

/* Makes room in a checker that has no place for all arrays of a layer with absorbed weights. Those
 * that follow must be disjoint from the outputs alone. */
static smla_status
forget_inputs(smla_checker *c)
{
    const int count = c->num_arrays;
    SMLA_TRY(smla_require_disjoint(c));
    c->num_arrays = 0;
    for (int i = 0; i < count; i++) {
        if (c->arrays[i].is_output) {
            c->arrays[c->num_arrays++] = c->arrays[i];
        }
    }
    return SMLA_OK;
}

static smla_status
check_arrays(const dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t num_tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t heads = config->num_heads;
    const char *const first = d->absorbed != NULL ? "q_c" : a->q_pe != NULL ? "q[0]" : "q";
    smla_checker c;
    smla_open_checker(&c, op, d->layer.error);
    SMLA_TRY(d->absorbed != NULL ? smla_dense_require_weights(&c, d) : require_queries(&c, d));
    SMLA_TRY(require_keys(&c, d));
    if (d->absorbed == NULL) {
        SMLA_TRY(require_weight(&c, "W_UK", a->W_UK, heads, config->qk_nope_head_dim));
        SMLA_TRY(require_weight(&c, "W_UV", a->W_UV, heads, config->v_head_dim));
    }
    SMLA_TRY(require_table(&c, d));
    if (d->absorbed == NULL) {
        SMLA_TRY(require_tokens(&c, "out", a->out, num_tokens, heads, config->v_head_dim,
                                SMLA_RULE_OUTPUT));
    }
    SMLA_TRY(smla_require_state(&c, "lse", a->lse, num_tokens, heads,
                                SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS | SMLA_RULE_OPTIONAL));
    SMLA_TRY(smla_require_logit_factor(op, "softmax_scale", a->softmax_scale, c.error));
    if (d->num_absorbed < num_tokens) {
        SMLA_TRY(require_workspaces(&c, d));
        SMLA_TRY(forget_inputs(&c));
        SMLA_TRY(require_kv_b_proj(&c, d));
    }
    SMLA_TRY(smla_require_step_device(d->layer.step, op, first, c.device, c.error));
    return smla_require_disjoint(&c);
}

/* Sets the views of queries and values, as they are before RoPE. */
static smla_status
place_queries(dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t nope = config->qk_nope_head_dim, rope = config->qk_rope_head_dim;
    const bool is_pair = a->q_pe != NULL;
    if (d->absorbed != NULL) {
        return smla_dense_place_queries(d);
    }
    take_values(d, &d->q_nope, a->q, 0, nope);
    take_values(d, &d->out, a->out, 0, config->v_head_dim);
    if (rope > 0) {
        take_values(d, &d->q_pe, is_pair ? a->q_pe : a->q, is_pair ? 0 : nope, rope);
    }
    return SMLA_OK;
}

/* Checks RoPE and the write of the new tokens to the cache. Sets the views of the layer's rows. */
static smla_status
check_new_tokens(dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_builder *const b = d->builder;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t heads = b->config.num_heads, rope = b->config.qk_rope_head_dim;
    const int64_t query_shape[3] = {tokens, heads, rope}, key_shape[2] = {tokens, rope};
    const int64_t lse_shape[2] = {tokens, heads};
    const DLDataType int64_type = {.code = kDLInt, .bits = 64, .lanes = 1};
    const smla_backend *backend;
    SMLA_TRY(place_queries(d));
    smla_slice_rows(&d->kv_c, a->kv_c, 0, tokens);
    smla_view_memory(&d->layer, &d->lse, b->made.lse, 32, 2, lse_shape);
    if (a->lse != NULL) {
        smla_slice_rows(&d->lse, a->lse, 0, tokens);
    }
    d->has_rope = a->rope_table != NULL;
    d->has_pages = smla_size(a->kv_cache, 0) > 0;
    if (d->has_rope) {
        smla_view positions, q_pe, k_pe;
        smla_slice_rows(&q_pe, &d->q_pe.tensor, 0, tokens); /* in place with absorbed weights */
        smla_make_view(&positions, b->ranges.positions, int64_type, d->layer.step->device, 1,
                       &tokens);
        const smla_apply_rope_args args = {
            .struct_size = sizeof args,
            .positions = &positions.tensor,
            .q_pe = &q_pe.tensor,
            .k_pe = smla_slice_rows(&k_pe, a->k_pe, 0, tokens),
            .rope_table = a->rope_table,
            .q_out = smla_view_memory(&d->layer, &d->q_pe, b->made.q_pe, 16, 3, query_shape),
            .k_out = smla_view_memory(&d->layer, &d->k_pe, b->made.k_pe, 16, 2, key_shape),
            .is_neox = a->is_neox,
            .stream = a->stream,
        };
        SMLA_TRY(smla_check_apply_rope(&args, &d->rope, &backend, d->layer.error));
    } else if (rope > 0) {
        smla_slice_rows(&d->k_pe, a->k_pe, 0, tokens);
    }
    const smla_concat_and_cache_mla_args write = {
        .struct_size = sizeof write,
        .kv_c = &d->kv_c.tensor,
        .k_pe = rope > 0 ? &d->k_pe.tensor : NULL,
        .kv_cache = a->kv_cache,
        .slot_mapping = &b->slot_mapping.tensor,
        .kv_format = b->config.kv_format,
        .stream = a->stream,
        .kv_scale = a->kv_scale,
    };
    return smla_check_concat_and_cache_mla(&write, &d->write, &backend, d->layer.error);
}

/* Checks the products with W_UK and W_UV; `queries` and `results` are [tokens, H, 512]. */
static smla_status
check_up_projections(dense_layer *d, const DLTensor *queries, const DLTensor *results)
{
    smla_view q_nope, out;
    const smla_backend *backend;
    const smla_k_up_proj_args absorb = {
        .struct_size = sizeof absorb,
        .q_nope = smla_slice_rows(&q_nope, &d->q_nope.tensor, 0, d->num_absorbed),
        .w_uk = d->args->W_UK,
        .out = queries,
        .stream = d->args->stream,
    };
    SMLA_TRY(smla_check_k_up_proj(&absorb, &d->absorb.bf16, &backend, d->layer.error));
    const smla_v_up_proj_args up = {
        .struct_size = sizeof up,
        .x = results,
        .w_uv = d->args->W_UV,
        .out = smla_slice_rows(&out, &d->out.tensor, 0, d->num_absorbed),
        .stream = d->args->stream,
    };
    d->absorb.is_fp8 = d->values.is_fp8 = false;
    return smla_check_v_up_proj(&up, &d->values.bf16, &backend, d->layer.error);
}

/* Checks the absorbed part: the first num_absorbed tokens, and the first requests. */
static smla_status
check_absorbed(dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_builder *const b = d->builder;
    const smla_step_facts *const facts = &d->layer.step->facts;
    smla_error *const error = d->layer.error;
    const int64_t tokens = d->num_absorbed, heads = b->config.num_heads;
    const int64_t num_reqs =
        tokens == facts->num_actual_tokens ? facts->num_reqs : facts->split.num_decodes;
    const int64_t latent_shape[3] = {tokens, heads, SMLA_KV_LORA_RANK};
    smla_view q_pe, ql, z, lse, starts, lens, table, scratch;
    const smla_backend *backend;
    smla_view_memory(&d->layer, &ql, dense_latents(d, 0), 16, 3, latent_shape);
    smla_view_memory(&d->layer, &z, dense_latents(d, 1), 16, 3, latent_shape);
    SMLA_TRY(d->absorbed != NULL ? smla_dense_check_products(d, &ql.tensor, &z.tensor)
                                 : check_up_projections(d, &ql.tensor, &z.tensor));
    const smla_mla_attention_args attention = {
        .struct_size = sizeof attention,
        .q = &ql.tensor,
        .q_pe = b->config.qk_rope_head_dim == 0
                    ? NULL
                    : smla_slice_rows(&q_pe, &d->q_pe.tensor, 0, tokens),
        .kv_cache = a->kv_cache,
        .block_table = smla_slice_rows(&table, &b->block_table.tensor, 0, num_reqs),
        .cache_seqlens = smla_slice_rows(&lens, &b->seq_lens.tensor, 0, num_reqs),
        .cu_seqlens_q = smla_view_vector(&d->layer, &starts, b->sent.query_start_loc, num_reqs + 1),
        .out = &z.tensor,
        .lse = smla_slice_rows(&lse, &d->lse.tensor, 0, tokens),
        .workspace = smla_view_scratch(&d->layer, &scratch),
        .kv_scale = a->kv_scale,
        .softmax_scale = a->softmax_scale,
        .is_causal = true,
        .kv_format = b->config.kv_format,
        .stream = a->stream,
    };
    SMLA_TRY(smla_check_mla_attention(&attention, &d->attention, &backend, error));
    d->attention.results.fills_padding = b->ranges.absent_req >= 0;
    d->attention.ranges = (smla_token_ranges){.req_ids = NULL};
    smla_take_ranges(&b->ranges.to, &d->attention.keys.lists[0]);
    return SMLA_OK;
}

static smla_status
check_operators(dense_layer *d)
{
    SMLA_TRY(check_new_tokens(d));
    SMLA_TRY(d->num_absorbed > 0 ? check_absorbed(d) : SMLA_OK);
    return d->num_absorbed < d->layer.step->facts.num_actual_tokens ? smla_dense_check_prefills(d)
                                                                    : SMLA_OK;
}

/* ---- A layer ------------------------------------------------------------------------------- */

static smla_status
run_absorbed(const dense_layer *d)
{
    const smla_backend *const backend = d->layer.step->backend;
    smla_error *const error = d->layer.error;
    SMLA_TRY(smla_dense_run_product(d, &d->absorb));
    SMLA_TRY(backend->attend(&d->attention, error));
    return smla_dense_run_product(d, &d->values);
}

static smla_status
run(void *call)
{
    const dense_layer *const d = call;
    const smla_backend *const backend = d->layer.step->backend;
    smla_error *const error = d->layer.error;
    if (d->absorbed != NULL && d->builder->config.qk_rope_head_dim > 0) {
        SMLA_TRY(backend->projection(&d->rope_queries, error));
    }
    SMLA_TRY(d->has_rope ? backend->apply_rope(&d->rope, error) : SMLA_OK);
    SMLA_TRY(d->has_pages ? backend->concat_and_cache_mla(&d->write, error) : SMLA_OK);
    SMLA_TRY(d->num_absorbed > 0 ? run_absorbed(d) : SMLA_OK);
    return d->num_absorbed < d->layer.step->facts.num_actual_tokens ? smla_dense_run_prefills(d)
                                                                    : SMLA_OK;
}

/* Checks a layer, of which args, builder and absorbed are set, and runs it. */
static smla_status
forward(dense_layer *d, smla_error *error)
{
    d->layer = (smla_layer){op, (const smla_step *)d->builder, d->args->stream, error};
    SMLA_TRY(smla_require_step(&d->layer));
    const smla_step_facts *const facts = &d->layer.step->facts;
    d->num_absorbed = facts->path == SMLA_PATH_SEPARATE && facts->split.num_prefills > 0
                          ? facts->split.num_decode_tokens
                          : facts->num_actual_tokens;
    SMLA_TRY(check_arrays(d));
    SMLA_TRY(check_operators(d));
    return smla_run_layer(&d->layer, run, d);
}

static smla_status
run_forward(const void *given, smla_error *error)
{
    const smla_dense_forward_args *const args = given;
    dense_layer d = {.args = args, .builder = args->builder};
    return forward(&d, error);
}

smla_status
smla_dense_forward(const smla_dense_forward_args *args, smla_error *error)
{
    smla_dense_forward_args known;
    return smla_enter_layer(op, args, &known, sizeof known, run_forward, error);
}

static smla_status
run_absorbed_forward(const void *given, smla_error *error)
{
    const smla_dense_absorbed_forward_args *const args = given;
    const smla_dense_forward_args shared = {.struct_size = sizeof shared,
                                            .builder = args->builder,
                                            .kv_c = args->kv_c,
                                            .k_pe = args->k_pe,
                                            .kv_cache = args->kv_cache,
                                            .rope_table = args->rope_table,
                                            .kv_scale = args->kv_scale,
                                            .softmax_scale = args->softmax_scale,
                                            .is_neox = args->is_neox,
                                            .stream = args->stream,
                                            .kv_b_proj = args->kv_b_proj,
                                            .lse = args->lse};
    dense_layer d = {.args = &shared, .absorbed = args, .builder = args->builder};
    return forward(&d, error);
}

smla_status
smla_dense_absorbed_forward(const smla_dense_absorbed_forward_args *args, smla_error *error)
{
    smla_dense_absorbed_forward_args known;
    return smla_enter_layer(op, args, &known, sizeof known, run_absorbed_forward, error);
}
