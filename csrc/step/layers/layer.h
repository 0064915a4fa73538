/* layer.h: what the layers of all plans share: the checks of a step and of results, the values that
 * its operators are made of, and the order of a call. Defined in layer.c.
 *
 * A layer checks its arrays once. From them, and from the step's own memory, which nothing has to
 * check, it fills the params of its operators, and calls their slots of the backend.
 */
#pragma once

#include "core/attention/params_attention.h"
#include "core/entry.h"
#include "core/params_cache.h"
#include "core/params_index.h"
#include "core/params_merge.h"
#include "core/params_projection.h"
#include "core/params_rope.h"
#include "core/rule.h"
#include "ops/check_attention.h"
#include "ops/dispatch.h"
#include "step/engine.h"

/* A call of a layer. */
typedef struct smla_layer {
    const char *op;
    const smla_step *step;
    void *stream;
    smla_error *error;
} smla_layer;

/* Enters the public function of a layer: reads its args into `known`, and runs it on them. */
smla_status smla_enter_layer(const char *op, const void *args, void *known, size_t known_size,
                             smla_status (*run)(const void *known, smla_error *error),
                             smla_error *error);

/* Checks that the layer has a step. */
smla_status smla_require_step(const smla_layer *layer);

/* Checks an indexer's choice [>= T, up to topk_tokens]. */
smla_status smla_require_topk(const smla_layer *layer, smla_checker *checker, const char *name,
                              const DLTensor *topk, int64_t topk_tokens);

/* The arrays of attention over latents that the args of layers with lists have. */
typedef struct smla_layer_arrays {
    const DLTensor *q;
    const DLTensor *q_pe;
    smla_named_array sinks;      /* [H], optional */
    const DLTensor *out;         /* [>= T, H, 512] */
    const DLTensor *lse;         /* [>= T, H] */
    const DLTensor *block_table; /* the step's, which its layers read */
    bool may_have_more_heads;    /* in sinks and out */
} smla_layer_arrays;

/* Those that args call by their usual names. */
#define SMLA_LAYER_ARRAYS_OF(args) \
    .q = (args)->q, .sinks = SMLA_SINKS_OF(args), .out = (args)->out, .lse = (args)->lse

/* The end of a layer's check: sinks, results, the step's own arrays, the device, and that nothing
 * which is written shares memory with another array. */
smla_status smla_require_results(const smla_layer *layer, smla_checker *checker,
                                 const smla_layer_arrays *arrays);

/* Why a layer of several ranks refuses sinks. */
#define SMLA_SINK_OF_RANKS                                                                      \
    "`attn_sink` must be given to the merge of ranks (merge_attn_partials) with `cp`, because " \
    "each rank would count it, got an array"

/* The rule of an array as a row of a table: the last arguments are its shape. */
#define SMLA_ARRAY(name_, tensor_, dtypes_, flags_, hint_, ndim_, ...) \
    {.name = (name_),                                                  \
     .tensor = (tensor_),                                              \
     .dtypes = (dtypes_),                                              \
     .flags = (flags_),                                                \
     .ndim = (ndim_),                                                  \
     .shape = {__VA_ARGS__},                                           \
     .hint = (hint_)}

/* Checks arrays one behind the other. */
smla_status smla_require_arrays(smla_checker *checker, const smla_rule *rules, int count);

/* ---- Values -------------------------------------------------------------------------------- */

/* Rows of heads in the step's memory: [T, heads, values], one behind the other. */
static inline smla_head_rows
smla_made_rows(const void *data, int64_t heads, int64_t values)
{
    return (smla_head_rows){data, heads * values, heads > 1 ? values : 0};
}

/* `count` rows from row `start` on, whose values have so many bytes. One row has no stride, as in
 * smla_stride. */
static inline smla_head_rows
smla_take_rows(smla_head_rows rows, int64_t start, int64_t count, int64_t bytes)
{
    const uint8_t *const data = rows.data;
    return (smla_head_rows){data == NULL ? NULL : data + start * rows.stride_token * bytes,
                            count > 1 ? rows.stride_token : 0, rows.stride_head};
}

/* Opens a checker for rules of the layer's operator `op` that are not about arrays. */
static inline void
smla_open_part(smla_checker *checker, const smla_layer *layer, const char *op)
{
    smla_open_checker(checker, op, layer->error);
    checker->device = layer->step->device;
}

/* The call of an operator of the layer, whose cache has `format`; NULL: it has none. */
static inline smla_call
smla_call_of_layer(const smla_layer *layer, const char *op, const smla_kv_format_info *format)
{
    return (smla_call){op, {layer->step->device.device_id, layer->stream}, format};
}

/* Fills the attention of all tokens over keys of head_dim values, but its keys and its plan. */
void smla_fill_layer(const smla_layer *layer, const smla_layer_arrays *arrays, int64_t head_dim,
                     double softmax_scale, smla_attention_params *params);

/* The part of a call for `count` tokens from token `start` on. */
smla_attention_params smla_take_tokens(const smla_attention_params *all, int64_t start,
                                       int64_t count);

/* The results of attention in bf16. */
smla_results smla_results_of_layer(smla_head_rows out, smla_head_rows lse);

/* The step's memory for attention. */
smla_workspace smla_layer_workspace(const smla_layer *layer);

/* The first rows of the workspace of gathered rows, as a cache of bf16 that is one page. */
smla_kv_view smla_gathered_rows(const smla_layer *layer, int64_t num_rows);

/* Plans a call over lists or a table, all else of which is filled, and checks that its scales make
 * finite logits. */
smla_status smla_plan_layer(const smla_layer *layer, smla_attention_params *params);

/* A gather to the workspace from the rows that `num_reqs` requests of a step, from `first_req` on,
 * have in a cache. Which rows these are, and where they go, is the caller's. */
smla_gather_params smla_gather_of_requests(const smla_layer *layer, const char *op,
                                           const smla_kv_view *cache, const DLTensor *block_table,
                                           int64_t first_req, int64_t num_reqs);

/* The gather of a chunk's prefills, one behind another. */
smla_gather_params smla_gather_of_chunk(const smla_layer *layer, const smla_prefill_chunk *chunk,
                                        const smla_kv_view *cache, const DLTensor *block_table);

/* The chunks that a layer of the step walks. */
static inline int64_t
smla_num_gathers(const smla_step *step)
{
    return smla_step_modes[step->facts.path].gathers ? step->facts.num_chunks : 0;
}

/* ---- Calls --------------------------------------------------------------------------------- */

/* Runs an operator whose params are filled. It has a line of its own in the log. */
#define SMLA_LAYER_CALL(name, params_type, slot)                                                  \
    static inline smla_status smla_run_##name(const smla_layer *layer, const params_type *params) \
    {                                                                                             \
        smla_log_call line;                                                                       \
        smla_begin_call(layer, &line, params->call.op);                                           \
        return smla_end_log(&line, slot);                                                         \
    }

static inline void
smla_begin_call(const smla_layer *layer, smla_log_call *line, const char *op)
{
    smla_begin_log(line, op);
    if (smla_is_logging) {
        smla_log_device(layer->step->device);
    }
}

#define SMLA_LAYER_SLOT(name, params_type) \
    SMLA_LAYER_CALL(name, params_type, layer->step->backend->name(params, layer->error))

SMLA_LAYER_SLOT(apply_rope, smla_apply_rope_params)
SMLA_LAYER_SLOT(concat_and_cache_mla, smla_cache_write_params)
SMLA_LAYER_SLOT(gather_kv_cache, smla_gather_params)
SMLA_LAYER_SLOT(dequantize_and_gather_k_cache, smla_gather_params)
SMLA_LAYER_SLOT(convert_req_index_to_global_index, smla_convert_params)
SMLA_LAYER_SLOT(cp_local_topk, smla_rank_lists_params)
SMLA_LAYER_SLOT(compute_global_topk_indices_and_lens, smla_topk_slots_params)
SMLA_LAYER_SLOT(combine_topk_swa_indices, smla_combine_topk_swa_params)
SMLA_LAYER_SLOT(merge_attn_states, smla_merge_params)
SMLA_LAYER_SLOT(projection, smla_projection_params)
SMLA_LAYER_SLOT(fp8_linear, smla_fp8_linear_params)
SMLA_LAYER_CALL(attention, smla_attention_params,
                smla_attend(params, layer->step->backend, layer->error))

/* Leaves a rank's own entries in the lists of `count` tokens from token `start` on, without holes:
 * the list's indices become `own`, which has rows for all tokens, and `lens` their numbers. */
smla_status smla_take_own(const smla_layer *layer, const smla_rank_share *share, int64_t start,
                          int64_t count, int32_t *own, int32_t *lens, smla_key_list *list);

/* Computes a layer whose args are checked: `run(call)`, unless the step has no tokens. */
smla_status smla_run_layer(const smla_layer *layer, smla_status (*run)(void *call), void *call);
