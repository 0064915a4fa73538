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

/* ---- Checks -------------------------------------------------------------------------------- */

/* Checks the cache that the new tokens are written to. */
static smla_status
require_cache(smla_checker *c, dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t rope = config->qk_rope_head_dim;
    const bool is_pair = a->q_pe != NULL;
    smla_kv_view *const kv = &d->cache;
    SMLA_TRY(smla_require_kv(c,
                             &(smla_cache_rule){.name = "kv_cache",
                                                .tensor = a->kv_cache,
                                                .kv_format = config->kv_format,
                                                .formats = SMLA_KV_DENSE,
                                                .flags = SMLA_RULE_OUTPUT},
                             kv));
    d->written = kv->format;
    kv->format = smla_row_as_read(kv->format);
    if (kv->format->head_dim != SMLA_KV_LORA_RANK + rope) {
        return smla_fail_value(c->error, op, "`kv_cache` must have keys of %lld values, got %d",
                               (long long)(SMLA_KV_LORA_RANK + rope), (int)kv->format->head_dim);
    }
    if (rope == 0 && (is_pair || a->rope_table != NULL)) {
        return smla_fail_value(c->error, op, "`%s` must be %s where qk_rope_head_dim is 0, got %s",
                               is_pair ? "q" : "rope_table", is_pair ? "one array" : "left out",
                               is_pair ? "a pair" : "one");
    }
    return kv->block_size == config->block_size
               ? SMLA_OK
               : smla_fail_value(c->error, op,
                                 "`kv_cache` must have pages of block_size = %lld tokens, got %lld",
                                 (long long)config->block_size, (long long)kv->block_size);
}

/* Checks latents, keys, and what else both kinds of layers have. */
static smla_status
require_shared(smla_checker *c, dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_config *const config = &d->builder->config;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens;
    const int64_t rope = config->qk_rope_head_dim;
    const smla_rule rules[] = {
        SMLA_ARRAY("kv_c", a->kv_c, SMLA_DTYPE_BF16, SMLA_RULE_MORE_ROWS,
                   "a row per token of the step", 2, tokens, SMLA_KV_LORA_RANK),
        SMLA_ARRAY("k_pe", a->k_pe, SMLA_DTYPE_BF16,
                   SMLA_RULE_MORE_ROWS | (rope == 0 ? SMLA_RULE_OPTIONAL : 0),
                   "a row per token of the step", 2, tokens, rope),
        SMLA_ARRAY("rope_table", rope == 0 ? NULL : a->rope_table,
                   SMLA_DTYPE_FP32 | SMLA_DTYPE_BF16, SMLA_RULE_OPTIONAL,
                   "cosines, then sines, per position", 2, SMLA_ANY, rope),
        SMLA_ARRAY("lse", a->lse, SMLA_DTYPE_FP32,
                   SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE |
                       SMLA_RULE_OPTIONAL,
                   NULL, 2, tokens, config->num_heads),
    };
    SMLA_TRY(smla_require_arrays(c, rules, sizeof rules / sizeof rules[0]));
    SMLA_TRY(require_cache(c, d));
    return smla_require_logit_factor(op, "softmax_scale", a->softmax_scale, c->error);
}

/* Checks the weight of prefills, and that nothing which is written is an array of the step. */
static smla_status
require_kept(smla_checker *c, const dense_layer *d, bool has_prefills)
{
    const smla_dense_builder *const b = d->builder;
    const smla_dense_config *const config = &b->config;
    const DLTensor *const slots = &b->slot_mapping.tensor;
    const int64_t columns = config->num_heads * (config->qk_nope_head_dim + config->v_head_dim);
    const smla_rule rules[] = {
        SMLA_ARRAY("block_table", &b->block_table.tensor, SMLA_DTYPE_INT32,
                   SMLA_RULE_ANY_LAST_STRIDE, NULL, 2, SMLA_ANY, SMLA_ANY),
        SMLA_ARRAY("slot_mapping", slots, SMLA_DTYPE_INT64 | SMLA_DTYPE_INT32,
                   SMLA_RULE_ANY_LAST_STRIDE, NULL, 1, SMLA_ANY),
        SMLA_ARRAY("kv_b_proj", d->args->kv_b_proj, SMLA_DTYPE_BF16, SMLA_RULE_ANY_LAST_STRIDE,
                   "the weight that W_UK and W_UV are parts of", 2, SMLA_KV_LORA_RANK, columns),
    };
    return smla_require_arrays(c, rules, has_prefills ? 3 : 2);
}

/* Lets the workspaces of prefills be disjoint from all other arrays. */
static smla_status
require_workspaces(smla_checker *c, const dense_layer *d)
{
    smla_rule rules[SMLA_MAX_WORKSPACES] = {{.name = "workspace"}, {.name = "up_workspace"}};
    for (int i = 0; i < SMLA_MAX_WORKSPACES; i++) {
        rules[i].tensor = &d->layer.step->workspaces[i].tensor;
        rules[i].dtypes = SMLA_DTYPE_BF16;
        rules[i].flags = SMLA_RULE_OUTPUT;
        rules[i].ndim = 2;
        rules[i].shape[0] = rules[i].shape[1] = SMLA_ANY;
    }
    return smla_require_arrays(c, rules, SMLA_MAX_WORKSPACES);
}

/* Makes room in a checker, which has no place for all arrays of a layer with absorbed weights and
 * prefills. Those that follow must be disjoint from the outputs alone. */
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
check_arrays(dense_layer *d)
{
    const char *const first = d->absorbed != NULL ? "q_c" : d->args->q_pe != NULL ? "q[0]" : "q";
    const bool has_prefills = d->num_absorbed < d->layer.step->facts.num_actual_tokens;
    smla_checker c;
    smla_open_checker(&c, op, d->layer.error);
    SMLA_TRY(d->absorbed != NULL ? smla_dense_require_absorbed(&c, d)
                                 : smla_dense_require_plain(&c, d));
    SMLA_TRY(require_shared(&c, d));
    SMLA_TRY(has_prefills ? require_workspaces(&c, d) : SMLA_OK);
    SMLA_TRY(d->absorbed != NULL && has_prefills ? forget_inputs(&c) : SMLA_OK);
    SMLA_TRY(
        smla_require_kv_scale(&c, "kv_scale", &d->args->kv_scale, d->cache.format, &d->kv_scale));
    SMLA_TRY(require_kept(&c, d, has_prefills));
    SMLA_TRY(smla_require_step_device(d->layer.step, op, first, c.device, c.error));
    return smla_require_disjoint(&c);
}

/* ---- Values -------------------------------------------------------------------------------- */

/* Sets the rows of the step's tokens. */
static void
place_rows(dense_layer *d)
{
    const smla_dense_forward_args *const a = d->args;
    const smla_dense_builder *const b = d->builder;
    const int64_t heads = b->config.num_heads, rope = b->config.qk_rope_head_dim;
    smla_dense_place_queries(d);
    d->kv_c = smla_view_part(a->kv_c, 0);
    d->k_pe = rope > 0 ? smla_view_part(a->k_pe, 0) : d->k_pe;
    d->unturned[0] = d->q_pe;
    d->unturned[1] = d->k_pe;
    if (a->rope_table != NULL) {
        d->q_pe = smla_made_rows(b->made.q_pe, heads, rope);
        d->k_pe = smla_made_rows(b->made.k_pe, 1, rope);
    }
    d->lse = a->lse == NULL ? smla_made_rows(b->made.lse, heads, 1)
                            : (smla_head_rows){smla_data(a->lse), smla_stride(a->lse, 0),
                                               smla_stride(a->lse, 1)};
}

/* The keys of the absorbed part: those of the first requests, whose ranges the build has found. */
static void
fill_keys(const dense_layer *d, smla_attention_params *params)
{
    const smla_dense_builder *const b = d->builder;
    const smla_step_facts *const facts = &d->layer.step->facts;
    const smla_page_table pages = smla_page_table_of(&b->block_table.tensor, d->cache.block_size);
    smla_requests *const reqs = &params->visible.reqs;
    *reqs = b->ranges.reqs;
    reqs->num_tokens = d->num_absorbed;
    reqs->num_reqs =
        d->num_absorbed == facts->num_actual_tokens ? facts->num_reqs : facts->split.num_decodes;
    reqs->query_len = 1;
    params->keys.num_lists = 1;
    params->keys.lists[0].kv = d->cache;
    smla_fill_table(&pages, d->layer.step->device.device_type, params);
    smla_take_ranges(&b->ranges.to, &params->keys.lists[0]);
}

/* Plans the attention of the absorbed tokens, which come first, to the keys of their requests. */
static smla_status
plan_attention(dense_layer *d)
{
    const smla_dense_builder *const b = d->builder;
    const int64_t tokens = d->num_absorbed;
    const smla_given_scale one = {.value = 1.0f};
    d->attention = (smla_attention_params){
        .call = smla_call_of_layer(&d->layer, "mla_attention", NULL),
        .queries = {.num_tokens = tokens,
                    .num_heads = b->config.num_heads,
                    .type = SMLA_FLOAT_BF16,
                    .dims = {SMLA_KV_LORA_RANK, (int16_t)b->config.qk_rope_head_dim},
                    .parts = {smla_take_rows(d->queries, 0, tokens, sizeof(uint16_t)),
                              smla_take_rows(d->q_pe, 0, tokens, sizeof(uint16_t))}},
        .results = smla_results_of_layer(smla_take_rows(d->results, 0, tokens, sizeof(uint16_t)),
                                         smla_take_rows(d->lse, 0, tokens, sizeof(float))),
        .logits = {.softmax_scale = d->args->softmax_scale,
                   .q_scale = one,
                   .divisor = one,
                   .kv_scale = {d->kv_scale, d->kv_scale}},
        .visible.rule = b->ranges.rule,
    };
    fill_keys(d, &d->attention);
    d->attention.results.fills_padding = b->ranges.absent_req >= 0;
    return smla_plan_layer(&d->layer, &d->attention);
}

/* ---- New tokens ---------------------------------------------------------------------------- */

/* Heads that RoPE turns. */
static smla_rope_heads
rope_heads(smla_head_rows from, smla_head_rows to, int64_t num_heads, int64_t num_tokens)
{
    const smla_head_rows x = smla_take_rows(from, 0, num_tokens, sizeof(uint16_t));
    const smla_head_rows out = smla_take_rows(to, 0, num_tokens, sizeof(uint16_t));
    return (smla_rope_heads){.x = x.data,
                             .out = (void *)(uintptr_t)out.data,
                             .num_heads = num_heads,
                             .stride_token = x.stride_token,
                             .stride_head = x.stride_head,
                             .out_stride_token = out.stride_token,
                             .out_stride_head = out.stride_head};
}

/* Turns RoPE's values of queries and keys to their positions. */
static smla_status
turn_rows(const dense_layer *d)
{
    const smla_dense_builder *const b = d->builder;
    const DLTensor *const table = d->args->rope_table;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens;
    const smla_apply_rope_params params = {
        .call = smla_call_of_layer(&d->layer, "apply_rope", NULL),
        .num_tokens = tokens,
        .num_pairs = b->config.qk_rope_head_dim / 2,
        .q = rope_heads(d->unturned[0], d->q_pe, b->config.num_heads, tokens),
        .k = rope_heads(d->unturned[1], d->k_pe, 1, tokens),
        .type = SMLA_FLOAT_BF16,
        .rope = {.positions = b->ranges.positions,
                 .positions_stride = 1,
                 .positions_are_int64 = true,
                 .max_pos = smla_size(table, 0),
                 .cos_sin = smla_data(table),
                 .cos_sin_stride_pos = smla_stride(table, 0)},
        .table_type = smla_float_type_of(table),
        .is_neox = d->args->is_neox != 0,
    };
    return smla_run_apply_rope(&d->layer, &params);
}

static smla_status
write_cache(const dense_layer *d)
{
    const DLTensor *const slots = &d->builder->slot_mapping.tensor;
    const int64_t tokens = d->layer.step->facts.num_actual_tokens;
    smla_cache_write_params params = {
        .call = smla_call_of_layer(&d->layer, "concat_and_cache_mla", d->written),
        .cache_name = "kv_cache",
        .slots_name = "slot_mapping",
        .num_tokens = tokens,
        .kv_c = d->kv_c.data,
        .k_pe = d->k_pe.data,
        .kv_c_stride_token = tokens > 1 ? d->kv_c.stride_token : 0,
        .k_pe_stride_token = tokens > 1 ? d->k_pe.stride_token : 0,
        .input_type = SMLA_FLOAT_BF16,
        .slot_mapping = smla_data(slots),
        .slot_stride = smla_stride(slots, 0),
        .slots_are_int64 = smla_dtype(slots) == SMLA_DTYPE_INT64,
        .kv = d->cache,
        .kv_scale = d->kv_scale,
    };
    params.kv.format = d->written;
    return smla_run_concat_and_cache_mla(&d->layer, &params);
}

/* ---- A layer ------------------------------------------------------------------------------- */

static smla_status
run_absorbed(const dense_layer *d)
{
    SMLA_TRY(smla_dense_run_absorb(d));
    SMLA_TRY(smla_run_attention(&d->layer, &d->attention));
    return smla_dense_run_values(d);
}

static smla_status
run(void *call)
{
    dense_layer *const d = call;
    SMLA_TRY(smla_dense_check_context(d));
    place_rows(d);
    SMLA_TRY(d->num_absorbed > 0 ? plan_attention(d) : SMLA_OK);
    SMLA_TRY(smla_dense_run_rope_queries(d));
    SMLA_TRY(d->args->rope_table != NULL ? turn_rows(d) : SMLA_OK);
    SMLA_TRY(d->cache.num_pages > 0 ? write_cache(d) : SMLA_OK);
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
    if (d->absorbed != NULL && d->builder->share.size > 0) {
        return smla_fail_value(error, op,
                               "`builder` must be of one rank for absorbed weights, because W_UV_O "
                               "adds up heads before ranks are merged, got `cp` of %d ranks",
                               (int)d->builder->share.size);
    }
    d->num_absorbed = d->layer.step->facts.num_first_tokens;
    SMLA_TRY(check_arrays(d));
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
