/* layer_dense_weights.c: what the two kinds of dense layers do not share: arrays, where queries and
 * results lie, and products. A plain layer has W_UK and W_UV. The weights of the other kind have
 * absorbed these:
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

#define COUNT(rules) ((int)(sizeof(rules) / sizeof(rules)[0]))

/* An array of bf16 with a row per token. */
#define ROWS(name, tensor, flags, values)                                    \
    SMLA_ARRAY(name, tensor, SMLA_DTYPE_BF16, SMLA_RULE_MORE_ROWS | (flags), \
               "a row per token of the step", 3, num_tokens, heads, values)

smla_status
smla_dense_require_plain(smla_checker *c, const dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t num_tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t heads = config->num_heads, rope = config->qk_rope_head_dim;
    const int64_t nope = config->qk_nope_head_dim, values = config->v_head_dim;
    const bool is_pair = a->q_pe != NULL;
    const smla_rule rules[] = {
        ROWS(is_pair ? "q[0]" : "q", a->q, 0, is_pair ? nope : nope + rope),
        ROWS("q[1]", a->q_pe, SMLA_RULE_OPTIONAL, rope),
        SMLA_ARRAY("W_UK", a->W_UK, SMLA_DTYPE_BF16, 0, NULL, 3, SMLA_KV_LORA_RANK, heads, nope),
        SMLA_ARRAY("W_UV", a->W_UV, SMLA_DTYPE_BF16, 0, NULL, 3, SMLA_KV_LORA_RANK, heads, values),
        ROWS("out", a->out, SMLA_RULE_OUTPUT, values),
    };
    return smla_require_arrays(c, rules, COUNT(rules));
}

/* Checks that the memory of results has room for the latents as e4m3 values, however many tokens a
 * step has. */
static smla_status
require_short_latent(const smla_checker *c, int64_t inputs, int64_t heads)
{
    const int64_t most = smla_dense_most_quantized(heads);
    return inputs <= most ? SMLA_OK
                          : smla_fail_value(c->error, op,
                                            "`q_c` must have at most %lld values per token if "
                                            "W_Q_UK is e4m3 (with %lld heads), got %lld",
                                            (long long)most, (long long)heads, (long long)inputs);
}

/* The rule of a weight of bf16, [inputs, outputs] in any storage. */
static smla_rule
bf16_weight(const char *name, const DLTensor *tensor, int64_t inputs, int64_t outputs,
            bool is_optional)
{
    return (smla_rule)SMLA_ARRAY(name, tensor, SMLA_DTYPE_BF16,
                                 SMLA_RULE_ANY_LAST_STRIDE | (is_optional ? SMLA_RULE_OPTIONAL : 0),
                                 "inputs, and outputs", 2, inputs, outputs);
}

/* That of one of either kind. An e4m3 weight lies transposed, and has a descale. */
static smla_rule
absorbed_weight(const char *name, const DLTensor *tensor, const DLTensor *descale, int64_t inputs,
                int64_t outputs)
{
    return descale == NULL ? bf16_weight(name, tensor, inputs, outputs, false)
                           : (smla_rule)SMLA_ARRAY(name, tensor, SMLA_DTYPE_E4M3_OR_BYTES, 0,
                                                   "outputs, and inputs", 2, outputs, inputs);
}

static smla_rule
weight_scale(const char *name, const DLTensor *descale)
{
    return (smla_rule){.name = name,
                       .tensor = descale,
                       .dtypes = SMLA_DTYPE_FP32,
                       .flags = SMLA_RULE_ANY_LAST_STRIDE | SMLA_RULE_OPTIONAL,
                       .ndim = SMLA_ANY};
}

/* An e4m3 weight with its scales, and the groups of its input. */
static smla_fp8_linear_args
fp8_weight(const dense_layer *d, const DLTensor *weight, const DLTensor *descale)
{
    return (smla_fp8_linear_args){.weight = weight,
                                  .descale = descale,
                                  .input_group_rows = d->absorbed->input_group_rows,
                                  .input_group_columns = d->absorbed->input_group_columns};
}

/* What fp8_linear says of the scales of a weight. */
static smla_status
require_scheme(const dense_layer *d, const DLTensor *weight, const DLTensor *descale)
{
    const smla_fp8_linear_args args = fp8_weight(d, weight, descale);
    smla_checker linear;
    smla_open_part(&linear, &d->layer, "fp8_linear");
    return descale == NULL || d->num_absorbed == 0 ? SMLA_OK
                                                   : smla_require_fp8_scheme(&linear, &args);
}

smla_status
smla_dense_require_absorbed(smla_checker *c, const dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens, heads = config->num_heads;
    const int64_t latents = heads * SMLA_KV_LORA_RANK, rope = config->qk_rope_head_dim;
    smla_rule rows[] = {
        SMLA_ARRAY("q_c", a->q_c, SMLA_DTYPE_BF16, SMLA_RULE_MORE_ROWS,
                   "a row per token of the step", 2, tokens, SMLA_ANY),
        SMLA_ARRAY("out", a->out, SMLA_DTYPE_BF16, SMLA_RULE_MORE_ROWS | SMLA_RULE_OUTPUT,
                   "a row per token of the step", 2, tokens, SMLA_ANY),
    };
    SMLA_TRY(smla_require_arrays(c, rows, COUNT(rows)));
    const int64_t inputs = smla_size(a->q_c, 1), outputs = smla_size(a->out, 1);
    const smla_rule weights[] = {
        absorbed_weight("W_Q_UK", a->W_Q_UK, a->W_Q_UK_descale, inputs, latents),
        weight_scale("W_Q_UK_descale", a->W_Q_UK_descale),
        bf16_weight("W_QR", a->W_QR, inputs, heads * rope, rope == 0),
        absorbed_weight("W_UV_O", a->W_UV_O, a->W_UV_O_descale, latents, outputs),
        weight_scale("W_UV_O_descale", a->W_UV_O_descale),
        bf16_weight("W_Q", a->W_Q, inputs, heads * config->qk_nope_head_dim, false),
        bf16_weight("o_proj", a->o_proj, heads * config->v_head_dim, outputs, false),
    };
    const int count = d->num_absorbed < tokens ? COUNT(weights) : COUNT(weights) - 2;
    SMLA_TRY(smla_require_arrays(c, weights, count));
    SMLA_TRY(a->W_Q_UK_descale != NULL ? require_short_latent(c, inputs, heads) : SMLA_OK);
    SMLA_TRY(require_scheme(d, a->W_Q_UK, a->W_Q_UK_descale));
    return require_scheme(d, a->W_UV_O, a->W_UV_O_descale);
}

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Rows of scratch of which prefills use their own alone. They begin where the absorbed tokens' 512
 * values per head end; the rows before them are never touched. */
static smla_head_rows
prefill_rows(const dense_layer *d, smla_head_rows latents, int64_t values)
{
    const int64_t heads = d->builder->config.num_heads;
    const int64_t first = d->num_absorbed * heads * (SMLA_KV_LORA_RANK - values);
    return smla_made_rows((const uint16_t *)latents.data + first, heads, values);
}

void
smla_dense_place_queries(dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const smla_dense_made *const made = &d->builder->made;
    const int64_t heads = config->num_heads, rope = config->qk_rope_head_dim;
    const int64_t rows = d->layer.step->limits.max_num_batched_tokens * heads;
    d->queries = smla_made_rows(made->latent, heads, SMLA_KV_LORA_RANK);
    d->results =
        smla_made_rows((const uint16_t *)(const void *)made->latent + rows * SMLA_KV_LORA_RANK,
                       heads, SMLA_KV_LORA_RANK);
    if (d->absorbed != NULL) {
        d->q_nope = prefill_rows(d, d->queries, config->qk_nope_head_dim);
        d->out = prefill_rows(d, d->results, config->v_head_dim);
        d->q_pe = smla_made_rows(made->q_pe, heads, rope);
        return;
    }
    const int16_t dims[2] = {(int16_t)config->qk_nope_head_dim, (int16_t)rope};
    smla_head_rows parts[2];
    smla_view_parts(a->q, a->q_pe, dims, parts);
    d->q_nope = parts[SMLA_NOPE];
    d->q_pe = parts[SMLA_PE];
    d->out = smla_view_part(a->out, 0);
}

/* ---- Products ------------------------------------------------------------------------------ */

smla_projection_params
smla_dense_product(const dense_layer *d, const char *name, smla_head_rows x, const DLTensor *weight,
                   smla_head_rows out, int64_t num_tokens)
{
    return (smla_projection_params){
        .call = smla_call_of_layer(&d->layer, name, NULL),
        .num_tokens = num_tokens,
        .num_heads = 1,
        .inner_dim = smla_size(weight, 0),
        .outer_dim = smla_size(weight, 1),
        .x = x.data,
        .x_stride_token = x.stride_token,
        .w = smla_data(weight),
        .w_stride_inner = smla_stride(weight, 0),
        .w_stride_outer = smla_stride(weight, 1),
        .out = (uint16_t *)(uintptr_t)out.data,
        .out_stride_token = out.stride_token,
    };
}

/* An up projection of the absorbed tokens, head by head: `inner` is the dimension of the weight
 * [512, H, values] that is summed. */
static smla_status
run_up_projection(const dense_layer *d, const char *name, smla_head_rows x, const DLTensor *weight,
                  int inner, smla_head_rows out)
{
    const int64_t tokens = d->num_absorbed;
    smla_projection_params p =
        smla_dense_product(d, name, smla_take_rows(x, 0, tokens, sizeof(uint16_t)), weight,
                           smla_take_rows(out, 0, tokens, sizeof(uint16_t)), tokens);
    p.num_heads = d->builder->config.num_heads;
    p.inner_dim = smla_size(weight, inner);
    p.outer_dim = smla_size(weight, 2 - inner);
    p.x_stride_head = x.stride_head;
    p.w_stride_inner = smla_stride(weight, inner);
    p.w_stride_head = smla_stride(weight, 1);
    p.w_stride_outer = smla_stride(weight, 2 - inner);
    p.out_stride_head = out.stride_head;
    return smla_run_projection(&d->layer, &p);
}

/* Multiplies the absorbed tokens by an absorbed weight. An input of e4m3 is quantised to `scratch`.
 */
static smla_status
run_product(const dense_layer *d, smla_head_rows x, const DLTensor *weight, const DLTensor *descale,
            smla_head_rows out, smla_head_rows scratch)
{
    const int64_t tokens = d->num_absorbed;
    const smla_head_rows from = smla_take_rows(x, 0, tokens, sizeof(uint16_t));
    const smla_head_rows to = smla_take_rows(out, 0, tokens, sizeof(uint16_t));
    if (descale == NULL) {
        const smla_projection_params params = smla_dense_product(d, op, from, weight, to, tokens);
        return smla_run_projection(&d->layer, &params);
    }
    const smla_fp8_linear_args args = fp8_weight(d, weight, descale);
    smla_fp8_linear_params params;
    smla_fill_fp8_linear(smla_call_of_layer(&d->layer, "fp8_linear", NULL), &args, tokens,
                         (void *)(uintptr_t)scratch.data, &params);
    params.quantize.x = from.data;
    params.quantize.x_stride_row = from.stride_token;
    params.project.out = (uint16_t *)(uintptr_t)to.data;
    params.project.out_stride_token = to.stride_token;
    return smla_run_fp8_linear(&d->layer, &params);
}

smla_status
smla_dense_run_absorb(const dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    return a == NULL ? run_up_projection(d, "k_up_proj", d->q_nope, d->args->W_UK, 2, d->queries)
                     : run_product(d, smla_view_part(a->q_c, 0), a->W_Q_UK, a->W_Q_UK_descale,
                                   d->queries, d->results);
}

smla_status
smla_dense_run_values(const dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    return a == NULL ? run_up_projection(d, "v_up_proj", d->results, d->args->W_UV, 0, d->out)
                     : run_product(d, d->results, a->W_UV_O, a->W_UV_O_descale,
                                   smla_view_part(a->out, 0), d->queries);
}

/* ---- Products of bf16 alone ---------------------------------------------------------------- */

/* Multiplies rows of `x` from token `start` on. A plain layer has no such products. */
static smla_status
run_bf16(const dense_layer *d, smla_head_rows x, const DLTensor *weight, smla_head_rows out,
         int64_t start)
{
    const int64_t count = d->layer.step->facts.num_actual_tokens - start;
    const smla_projection_params params =
        smla_dense_product(d, op, smla_take_rows(x, start, count, sizeof(uint16_t)), weight,
                           smla_take_rows(out, start, count, sizeof(uint16_t)), count);
    return smla_run_projection(&d->layer, &params);
}

smla_status
smla_dense_run_rope_queries(const dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    return a == NULL || d->builder->config.qk_rope_head_dim == 0
               ? SMLA_OK
               : run_bf16(d, smla_view_part(a->q_c, 0), a->W_QR, d->q_pe, 0);
}

smla_status
smla_dense_run_queries(const dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    return a == NULL ? SMLA_OK
                     : run_bf16(d, smla_view_part(a->q_c, 0), a->W_Q, d->q_nope, d->num_absorbed);
}

smla_status
smla_dense_run_outputs(const dense_layer *d)
{
    const smla_dense_absorbed_forward_args *const a = d->absorbed;
    return a == NULL ? SMLA_OK
                     : run_bf16(d, d->out, a->o_proj, smla_view_part(a->out, 0), d->num_absorbed);
}
