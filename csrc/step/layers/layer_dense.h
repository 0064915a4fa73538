/* layer_dense.h: what the parts of a dense layer share. layer_dense.c has the whole layer and its
 * absorbed part, layer_dense_prefill.c the prefills of path "separate", and layer_dense_weights.c
 * the products of a layer whose weights have absorbed W_UK and W_UV.
 */
#pragma once

#include "core/attention/params_attention.h"
#include "core/params_cache.h"
#include "core/params_projection.h"
#include "core/params_rope.h"
#include "step/layers/layer.h"
#include "step/plans/plan_dense.h"

/* A product of tokens and a weight. */
typedef struct dense_product {
    bool is_fp8;
    smla_projection_params bf16;
    smla_fp8_linear_params fp8;
} dense_product;

/* A layer whose arrays are checked: its operators, ready to run. Rows of queries, keys and latents
 * are those of the step's tokens; the RoPE parts are turned already once `rope` has run. */
typedef struct dense_layer {
    smla_layer layer;
    const smla_dense_forward_args *args;
    /* NULL unless weights have absorbed others. Then args has what both kinds of layers have, and
     * NULL for queries, results and W_UK, W_UV. */
    const smla_dense_absorbed_forward_args *absorbed;
    const smla_dense_builder *builder;
    int64_t num_absorbed; /* tokens of the absorbed part, which comes first; T on path "mixed" */

    bool has_rope;
    bool has_pages;
    smla_apply_rope_params rope;
    smla_cache_write_params write;

    /* The absorbed part, unless num_absorbed is 0. */
    dense_product absorb;
    smla_attention_params attention;
    dense_product values;

    /* The rest: prefills, and their new tokens alone. */
    smla_projection_params up;
    smla_attention_params new_tokens;

    /* Absorbed weights: RoPE's queries of all tokens, and the first and last products of prefills.
     */
    smla_projection_params rope_queries;
    smla_projection_params queries;
    smla_projection_params outputs;

    smla_view q_nope; /* [T, H, Pn]; with absorbed weights scratch, of prefills alone, like out */
    smla_view q_pe;   /* [T, H, R]; not set where R is 0 */
    smla_view kv_c;   /* [T, 512] */
    smla_view k_pe;   /* [T, R] */
    smla_view out;    /* [T, H, Pv] */
    smla_view lse;    /* [T, H]: the caller's, or scratch */
} dense_layer;

/* Where the absorbed queries of the step's tokens lie, or with 1 the attention's results. */
static inline uint16_t *
dense_latents(const dense_layer *d, int which)
{
    const int64_t rows = d->layer.step->limits.max_num_batched_tokens * d->layer.step->num_heads;
    return (uint16_t *)(void *)d->builder->made.latent + which * rows * SMLA_KV_LORA_RANK;
}

/* Checks the arrays that only prefills need, and all that can be wrong with their operators. */
smla_status smla_dense_check_prefills(dense_layer *d);

/* Computes the prefills: rows num_absorbed and later of `out`. */
smla_status smla_dense_run_prefills(const dense_layer *d);

/* ---- layer_dense_weights.c ----------------------------------------------------------------- */

/* Checks q_c, the weights and the result of a layer with absorbed weights. */
smla_status smla_dense_require_weights(smla_checker *checker, const dense_layer *d);

/* Checks the product that makes RoPE's queries, and sets the views of prefills' queries and values.
 */
smla_status smla_dense_place_queries(dense_layer *d);

/* Checks the products before and behind the attention of the absorbed part; `queries` and `results`
 * are [tokens, H, 512]. */
smla_status smla_dense_check_products(dense_layer *d, const DLTensor *queries,
                                      const DLTensor *results);

/* Checks the first and the last product of prefills. */
smla_status smla_dense_check_prefill_products(dense_layer *d);

smla_status smla_dense_run_product(const dense_layer *d, const dense_product *product);
