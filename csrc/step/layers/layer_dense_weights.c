/* layer_dense_weights.c: the products of a dense layer whose weights have absorbed W_UK and W_UV:
 *
 *   all tokens   q_c -> W_QR -> q_pe
 *   absorbed     q_c -> W_Q_UK -> scratch;  attention over the cache -> scratch;  W_UV_O -> out
 *   prefills     q_c -> W_Q -> scratch;  attention -> scratch;  o_proj -> out
 *
 * The scratch of prefills lies in the rows of the absorbed queries and results that belong to their
 * tokens: those have 512 values per head, which is at least Pn, and Pv. Products of e4m3 quantise
 * their input to the one of the two that is not in use.
 */
#include "ops/check.h"
#include "step/layers/layer_dense.h"

static const char op[] = "dense.forward";

/* ---- Arrays -------------------------------------------------------------------------------- */

/* Checks a weight of bf16, [inputs, outputs] in any storage. */
static smla_status
require_bf16(smla_checker *c, const char *name, const DLTensor *tensor, int64_t inputs,
             int64_t outputs, unsigned flags)
{
    return smla_require(c, &(smla_rule){.name = name,
                                        .tensor = tensor,
                                        .dtypes = SMLA_DTYPE_BF16,
                                        .flags = SMLA_RULE_ANY_LAST_STRIDE | flags,
                                        .ndim = 2,
                                        .shape = {inputs, outputs},
                                        .hint = "inputs, and outputs"});
}

/* Checks a weight of bf16, or one of e4m3, which lies transposed and has a descale. */
static smla_status
require_absorbed(smla_checker *c, const char *name, const DLTensor *tensor, const char *scale_name,
                 const DLTensor *descale, int64_t inputs, int64_t outputs)
{
    if (descale == NULL) {
        return require_bf16(c, name, tensor, inputs, outputs, 0);
    }
    SMLA_TRY(smla_require(c, &(smla_rule){.name = name,
                                          .tensor = tensor,
                                          .dtypes = SMLA_DTYPE_E4M3_OR_BYTES,
                                          .ndim = 2,
                                          .shape = {outputs, inputs},
                                          .hint = "outputs, and inputs"}));
    return smla_require(c, &(smla_rule){.name = scale_name,
                                        .tensor = descale,
                                        .dtypes = SMLA_DTYPE_FP32,
                                        .flags = SMLA_RULE_ANY_LAST_STRIDE,
                                        .ndim = SMLA_ANY});
}

/* Checks that the memory of results has room for the latents as e4m3 values, however many tokens a
 * step has. */
static smla_status
require_short_latent(const smla_checker *c, int64_t inputs, int64_t heads)
{
    const int64_t most = smla_dense_most_quantized(heads);
    return inputs <= most
               ? SMLA_OK
               : smla_fail(c->error, SMLA_ERROR_VALUE,
                           "%s: `q_c` must have at most %lld values per token if W_Q_UK is e4m3 "
                           "(with %lld heads), got %lld",
                           op, (long long)most, (long long)heads, (long long)inputs);
}

smla_status
smla_dense_require_weights(smla_checker *c, const dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens, heads = config->num_heads;
    const bool has_prefills = d->num_absorbed < tokens;
    smla_rule rows = {.name = "q_c",
                      .tensor = a->q_c,
                      .dtypes = SMLA_DTYPE_BF16,
                      .flags = SMLA_RULE_MORE_ROWS,
                      .ndim = 2,
                      .shape = {tokens, SMLA_ANY},
                      .hint = "a row per token of the step"};
    SMLA_TRY(smla_require(c, &rows));
    rows.name = "out";
    rows.tensor = a->out;
    rows.flags |= SMLA_RULE_OUTPUT;
    SMLA_TRY(smla_require(c, &rows));
    const int64_t inputs = smla_size(a->q_c, 1), outputs = smla_size(a->out, 1);
    SMLA_TRY(require_absorbed(c, "W_Q_UK", a->W_Q_UK, "W_Q_UK_descale", a->W_Q_UK_descale, inputs,
                              heads * SMLA_KV_LORA_RANK));
    SMLA_TRY(a->W_Q_UK_descale != NULL ? require_short_latent(c, inputs, heads) : SMLA_OK);
    SMLA_TRY(require_bf16(c, "W_QR", a->W_QR, inputs, heads * config->qk_rope_head_dim,
                          config->qk_rope_head_dim == 0 ? SMLA_RULE_OPTIONAL : 0));
    SMLA_TRY(require_absorbed(c, "W_UV_O", a->W_UV_O, "W_UV_O_descale", a->W_UV_O_descale,
                              heads * SMLA_KV_LORA_RANK, outputs));
    if (!has_prefills) {
        return SMLA_OK;
    }
    SMLA_TRY(require_bf16(c, "W_Q", a->W_Q, inputs, heads * config->qk_nope_head_dim, 0));
    return require_bf16(c, "o_proj", a->o_proj, heads * config->v_head_dim, outputs, 0);
}

/* ---- Products ------------------------------------------------------------------------------ */

/* A product of bf16: x [tokens, inputs] @ w. */
static smla_status
check_bf16(const dense_layer *d, const char *name, const DLTensor *x, const DLTensor *w,
           const DLTensor *out, smla_projection_params *params)
{
    const smla_linear_args args = {.op = op,
                                   .x_name = "q_c",
                                   .x = x,
                                   .w_name = name,
                                   .w = w,
                                   .inner_dim = smla_size(x, 1),
                                   .out = out,
                                   .stream = d->layer.stream};
    const smla_backend *backend;
    return smla_check_linear(&args, params, &backend, d->layer.error);
}

/* A product with an absorbed weight. `scratch` takes a quantised input. */
static smla_status
check_product(const dense_layer *d, const char *name, const DLTensor *x, const DLTensor *w,
              const DLTensor *descale, const DLTensor *out, const DLTensor *scratch,
              dense_product *product)
{
    product->is_fp8 = descale != NULL;
    if (!product->is_fp8) {
        return check_bf16(d, name, x, w, out, &product->bf16);
    }
    const smla_fp8_linear_args args = {.struct_size = sizeof args,
                                       .x = x,
                                       .weight = w,
                                       .descale = descale,
                                       .out = out,
                                       .workspace = scratch,
                                       .input_group_rows = d->absorbed->input_group_rows,
                                       .input_group_columns = d->absorbed->input_group_columns,
                                       .stream = d->layer.stream};
    const smla_backend *backend;
    return smla_check_fp8_linear(&args, &product->fp8, &backend, d->layer.error);
}

/* The memory of the absorbed queries, or with 1 of the results, as bytes. The second is longer if
 * there are few heads, because queries' latents have as many values for one head as for many. */
static const DLTensor *
view_bytes(const dense_layer *d, smla_view *view, int which)
{
    const DLDataType bytes = {.code = kDLUInt, .bits = 8, .lanes = 1};
    const smla_step *const step = d->layer.step;
    const int64_t size = (int64_t)sizeof(uint16_t) * step->limits.max_num_batched_tokens *
                         (which == 0 ? step->num_heads * SMLA_KV_LORA_RANK
                                     : smla_dense_result_values(step->num_heads));
    smla_make_view(view, dense_latents(d, which), bytes, step->device, 1, &size);
    return &view->tensor;
}

/* [tokens, H, values] as [tokens, H * values]. */
static const DLTensor *
join_heads(const dense_layer *d, smla_view *view, const DLTensor *tensor)
{
    const int64_t shape[2] = {smla_size(tensor, 0), smla_size(tensor, 1) * smla_size(tensor, 2)};
    return smla_view_memory(&d->layer, view, smla_data(tensor), 16, 2, shape);
}

smla_status
smla_dense_check_products(dense_layer *d, const DLTensor *queries, const DLTensor *results)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    smla_view q_c, latents, attended, out, scratch;
    SMLA_TRY(check_product(d, "W_Q_UK", smla_slice_rows(&q_c, a->q_c, 0, d->num_absorbed),
                           a->W_Q_UK, a->W_Q_UK_descale, join_heads(d, &latents, queries),
                           view_bytes(d, &scratch, 1), &d->absorb));
    return check_product(d, "W_UV_O", join_heads(d, &attended, results), a->W_UV_O,
                         a->W_UV_O_descale, smla_slice_rows(&out, a->out, 0, d->num_absorbed),
                         view_bytes(d, &scratch, 0), &d->values);
}

smla_status
smla_dense_check_prefill_products(dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    const int64_t start = d->num_absorbed, end = d->layer.step->facts.num_actual_tokens;
    smla_view q_c, queries, q_nope, values, attended, out;
    SMLA_TRY(
        check_bf16(d, "W_Q", smla_slice_rows(&q_c, a->q_c, start, end), a->W_Q,
                   join_heads(d, &queries, smla_slice_rows(&q_nope, &d->q_nope.tensor, start, end)),
                   &d->queries));
    return check_bf16(d, "o_proj",
                      join_heads(d, &attended,
                                 smla_slice_rows(&values, &d->out.tensor, start, end)),
                      a->o_proj, smla_slice_rows(&out, a->out, start, end), &d->outputs);
}

/* A view [T, H, values] of scratch of which prefills use their rows alone. They begin where the
 * absorbed tokens' 512 values per head end; the rows before them are never touched. */
static void
view_prefill_rows(const dense_layer *d, smla_view *view, int which, int64_t values)
{
    const int64_t heads = d->builder->config.num_heads;
    const int64_t shape[3] = {d->layer.step->facts.num_actual_tokens, heads, values};
    const int64_t first = d->num_absorbed * heads * (SMLA_KV_LORA_RANK - values);
    smla_view_memory(&d->layer, view, dense_latents(d, which) + first, 16, 3, shape);
}

smla_status
smla_dense_place_queries(dense_layer *d)
{
    const smla_dense_config *const config = &d->builder->config;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t shape[3] = {tokens, config->num_heads, config->qk_rope_head_dim};
    if (d->num_absorbed < tokens) {
        view_prefill_rows(d, &d->q_nope, 0, config->qk_nope_head_dim);
        view_prefill_rows(d, &d->out, 1, config->v_head_dim);
    }
    if (config->qk_rope_head_dim == 0) {
        return SMLA_OK;
    }
    smla_view q_c, joined;
    smla_view_memory(&d->layer, &d->q_pe, d->builder->made.q_pe, 16, 3, shape);
    return check_bf16(d, "W_QR", smla_slice_rows(&q_c, d->absorbed->q_c, 0, tokens),
                      d->absorbed->W_QR, join_heads(d, &joined, &d->q_pe.tensor), &d->rope_queries);
}

smla_status
smla_dense_run_product(const dense_layer *d, const dense_product *product)
{
    const smla_backend *const backend = d->layer.step->backend;
    return product->is_fp8 ? backend->fp8_linear(&product->fp8, d->layer.error)
                           : backend->projection(&product->bf16, d->layer.error);
}
