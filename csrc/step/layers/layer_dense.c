/* layer_dense.c: one layer of dense MLA on path "mixed", composed of the operators:
 *
 *   q_pe, k_pe -> RoPE -> scratch;  kv_c, k_pe -> cache;  q_nope -> W_UK -> scratch;
 *   attention of all tokens over the cache -> scratch;  W_UV -> out
 *
 * All of them are checked before the first one runs.
 */
#include "core/params_attention.h"
#include "core/params_cache.h"
#include "core/params_projection.h"
#include "core/params_rope.h"
#include "ops/check.h"
#include "step/layers/layer.h"
#include "step/plans/plan_dense.h"

static const char op[] = "dense.forward";

/* The operators of a layer, ready to run. */
typedef struct dense_layer {
    smla_layer layer;
    const smla_dense_forward_args *args;
    const smla_dense_builder *builder;
    bool has_rope;
    bool has_pages;
    smla_apply_rope_params rope;
    smla_cache_write_params write;
    smla_projection_params absorb;
    smla_attention_params attention;
    smla_attention_plan plan;
    smla_projection_params values;
} dense_layer;

/* ---- Views --------------------------------------------------------------------------------- */

static const DLTensor *
view_scratch(const dense_layer *d, smla_view *view, void *data, int bits, int ndim,
             const int64_t *shape)
{
    const DLDataType dtype = {.code = bits == 32 ? kDLFloat : kDLBfloat,
                              .bits = (uint8_t)bits,
                              .lanes = 1};
    smla_make_view(view, data, dtype, d->layer.step->device, ndim, shape);
    return &view->tensor;
}

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

static smla_status
check_arrays(const dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t num_tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t heads = config->num_heads, rope = config->qk_rope_head_dim;
    const int64_t nope = config->qk_nope_head_dim;
    const bool is_pair = a->q_pe != NULL;
    smla_kv_view kv;
    smla_checker c;
    smla_open_checker(&c, op, d->layer.error);
    SMLA_TRY(require_tokens(&c, is_pair ? "q[0]" : "q", a->q, num_tokens, heads,
                            is_pair ? nope : nope + rope, 0));
    SMLA_TRY(require_tokens(&c, "q[1]", a->q_pe, num_tokens, heads, rope, SMLA_RULE_OPTIONAL));
    SMLA_TRY(require_tokens(&c, "kv_c", a->kv_c, num_tokens, 0, SMLA_KV_LORA_RANK, 0));
    SMLA_TRY(require_tokens(&c, "k_pe", a->k_pe, num_tokens, 0, rope, 0));
    SMLA_TRY(smla_require_kv(&c,
                             &(smla_cache_rule){.name = "kv_cache",
                                                .tensor = a->kv_cache,
                                                .kv_format = config->kv_format,
                                                .formats = SMLA_KV_ATTENTION,
                                                .flags = SMLA_RULE_OUTPUT},
                             &kv));
    if (kv.block_size != config->block_size) {
        return smla_fail(c.error, SMLA_ERROR_VALUE,
                         "%s: `kv_cache` must have pages of block_size = %lld tokens, got %lld", op,
                         (long long)config->block_size, (long long)kv.block_size);
    }
    SMLA_TRY(require_weight(&c, "W_UK", a->W_UK, heads, nope));
    SMLA_TRY(require_weight(&c, "W_UV", a->W_UV, heads, config->v_head_dim));
    SMLA_TRY(smla_require(&c, &(smla_rule){.name = "rope_table",
                                           .tensor = a->rope_table,
                                           .dtypes = SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16,
                                           .flags = SMLA_RULE_OPTIONAL,
                                           .ndim = 2,
                                           .shape = {SMLA_ANY, rope},
                                           .hint = "cosines, then sines, per position"}));
    SMLA_TRY(
        require_tokens(&c, "out", a->out, num_tokens, heads, config->v_head_dim, SMLA_RULE_OUTPUT));
    SMLA_TRY(smla_require_finite(op, "softmax_scale", a->softmax_scale, c.error));
    SMLA_TRY(
        smla_require_step_device(d->layer.step, op, is_pair ? "q[0]" : "q", c.device, c.error));
    return smla_require_disjoint(&c);
}

static smla_status
check_operators(dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_builder *const b = d->builder;
    smla_error *const error = d->layer.error;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t heads = b->config.num_heads, rope = b->config.qk_rope_head_dim;
    const int64_t nope = b->config.qk_nope_head_dim, values = b->config.v_head_dim;
    const int64_t latent_shape[3] = {tokens, heads, SMLA_KV_LORA_RANK};
    const int64_t rope_shape[3] = {tokens, heads, rope}, key_shape[2] = {tokens, rope};
    const int64_t lse_shape[2] = {tokens, heads};
    uint16_t *const absorbed = (uint16_t *)(void *)b->made.latent;
    uint16_t *const attended =
        absorbed + d->layer.step->limits.max_num_batched_tokens * heads * SMLA_KV_LORA_RANK;
    smla_view q_nope, q_pe, k_pe, turned_q, turned_k, kv_c, ql, z, lse, out, starts, scratch,
        positions;
    const smla_backend *backend;
    take_values(d, &q_nope, a->q, 0, nope);
    take_values(d, &q_pe, a->q_pe != NULL ? a->q_pe : a->q, a->q_pe != NULL ? 0 : nope, rope);
    const DLTensor *key_rope = smla_slice_rows(&k_pe, a->k_pe, 0, tokens);
    const DLTensor *query_rope = &q_pe.tensor;
    d->has_rope = a->rope_table != NULL;
    d->has_pages = smla_size(a->kv_cache, 0) > 0;
    if (d->has_rope) {
        const DLDataType int64_type = {.code = kDLInt, .bits = 64, .lanes = 1};
        smla_make_view(&positions, b->ranges.positions, int64_type, d->layer.step->device, 1,
                       &tokens);
        const smla_apply_rope_args args = {
            .struct_size = sizeof args,
            .positions = &positions.tensor,
            .q_pe = query_rope,
            .k_pe = key_rope,
            .table = a->rope_table,
            .q_out = view_scratch(d, &turned_q, b->made.q_pe, 16, 3, rope_shape),
            .k_out = view_scratch(d, &turned_k, b->made.k_pe, 16, 2, key_shape),
            .is_neox = a->is_neox,
            .stream = a->stream,
        };
        SMLA_TRY(smla_check_apply_rope(&args, &d->rope, &backend, error));
        query_rope = args.q_out;
        key_rope = args.k_out;
    }
    const smla_concat_and_cache_mla_args write = {
        .struct_size = sizeof write,
        .kv_c = smla_slice_rows(&kv_c, a->kv_c, 0, tokens),
        .k_pe = key_rope,
        .kv_cache = a->kv_cache,
        .slot_mapping = &b->slot_mapping.tensor,
        .kv_format = b->config.kv_format,
        .stream = a->stream,
    };
    SMLA_TRY(smla_check_concat_and_cache_mla(&write, &d->write, &backend, error));
    const smla_k_up_proj_args absorb = {
        .struct_size = sizeof absorb,
        .q_nope = &q_nope.tensor,
        .w_uk = a->W_UK,
        .out = view_scratch(d, &ql, absorbed, 16, 3, latent_shape),
        .stream = a->stream,
    };
    SMLA_TRY(smla_check_k_up_proj(&absorb, &d->absorb, &backend, error));
    const smla_mla_attention_args attention = {
        .struct_size = sizeof attention,
        .q = &ql.tensor,
        .q_pe = query_rope,
        .kv_cache = a->kv_cache,
        .block_table = &b->block_table.tensor,
        .cache_seqlens = &b->seq_lens.tensor,
        .cu_seqlens_q = smla_view_vector(&d->layer, &starts, b->sent.query_start_loc,
                                         d->layer.step->facts.num_reqs + 1),
        .out = view_scratch(d, &z, attended, 16, 3, latent_shape),
        .lse = view_scratch(d, &lse, b->made.lse, 32, 2, lse_shape),
        .workspace = smla_view_scratch(&d->layer, &scratch),
        .kv_scale = a->kv_scale,
        .softmax_scale = a->softmax_scale,
        .is_causal = true,
        .kv_format = b->config.kv_format,
        .stream = a->stream,
    };
    SMLA_TRY(smla_check_mla_step(&attention, &b->ranges, &d->attention, &d->plan, &backend, error));
    const smla_v_up_proj_args up = {
        .struct_size = sizeof up,
        .x = &z.tensor,
        .w_uv = a->W_UV,
        .out = take_values(d, &out, a->out, 0, values),
        .stream = a->stream,
    };
    return smla_check_v_up_proj(&up, &d->values, &backend, error);
}

/* ---- A layer ------------------------------------------------------------------------------- */

static smla_status
run(void *call)
{
    const dense_layer *const d = call;
    const smla_backend *const backend = d->layer.step->backend;
    smla_error *const error = d->layer.error;
    SMLA_TRY(d->has_rope ? backend->apply_rope(&d->rope, error) : SMLA_OK);
    SMLA_TRY(d->has_pages ? backend->concat_and_cache_mla(&d->write, error) : SMLA_OK);
    SMLA_TRY(backend->projection(&d->absorb, error));
    SMLA_TRY(backend->sparse_attention(&d->attention, &d->plan, error));
    return backend->projection(&d->values, error);
}

static smla_status
run_forward(const void *given, smla_error *error)
{
    const smla_dense_forward_args *const args = given;
    dense_layer d = {.args = args, .builder = args->builder};
    d.layer = (smla_layer){op, (const smla_step *)args->builder, args->stream, error};
    SMLA_TRY(smla_require_step(&d.layer));
    SMLA_TRY(check_arrays(&d));
    SMLA_TRY(check_operators(&d));
    return smla_run_layer(&d.layer, run, &d);
}

smla_status
smla_dense_forward(const smla_dense_forward_args *args, smla_error *error)
{
    smla_dense_forward_args known;
    return smla_enter_layer(op, args, &known, sizeof known, run_forward, error);
}
