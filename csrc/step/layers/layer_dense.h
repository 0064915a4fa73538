/* layer_dense.h: what the parts of a dense layer share. layer_dense.c has the whole layer and its
 * absorbed part, layer_dense_prefill.c the prefills of path "separate", and layer_dense_weights.c
 * what differs between layers: the arrays, and the products with weights.
 */
#pragma once

#include "core/params_projection.h"
#include "step/layers/layer.h"
#include "step/plans/plan_dense.h"

/* A layer whose arrays are checked. Rows are those of the step's tokens, in bf16. */
typedef struct dense_layer {
    smla_layer layer;
    const smla_dense_forward_args *args;
    /* NULL unless weights have absorbed others. Then args has what both kinds of layers have, and
     * NULL for queries, results and W_UK, W_UV. */
    const smla_dense_absorbed_forward_args *absorbed;
    const smla_dense_builder *builder;
    int64_t num_absorbed; /* tokens of the absorbed part, which comes first; T on path "mixed" */
    smla_kv_view cache;   /* as it is read */
    const smla_kv_format_info *written; /* the format of new rows */
    smla_given_scale kv_scale;

    /* Queries in their two parts. With absorbed weights q_nope and out are scratch of prefills. */
    smla_head_rows q_nope;      /* [T, H, Pn] */
    smla_head_rows q_pe;        /* [T, H, R]: behind RoPE, as the next one */
    smla_head_rows k_pe;        /* [T, R] */
    smla_head_rows unturned[2]; /* the same in front of it */
    smla_head_rows kv_c;        /* [T, 512] */
    smla_head_rows out;         /* [T, H, Pv] */
    smla_head_rows lse;         /* [T, H] fp32: the caller's, or scratch */

    /* The absorbed part. */
    smla_head_rows queries; /* [T, H, 512], scratch, as the next one */
    smla_head_rows results;
    smla_attention_params attention;
} dense_layer;

/* ---- layer_dense_prefill.c ----------------------------------------------------------------- */

/* Finds the errors in array values of gathers, which have to come before any byte is written. */
smla_status smla_dense_check_context(const dense_layer *d);

/* Computes the prefills: rows num_absorbed and later of `out`. */
smla_status smla_dense_run_prefills(const dense_layer *d);

/* ---- layer_dense_weights.c ----------------------------------------------------------------- */

/* Checks queries, weights and results of the layer's kind. */
smla_status smla_dense_require_plain(smla_checker *checker, const dense_layer *d);
smla_status smla_dense_require_absorbed(smla_checker *checker, const dense_layer *d);

/* Sets the rows of queries, in front of RoPE, and of results. */
void smla_dense_place_queries(dense_layer *d);

/* Run the products before and behind the attention of the absorbed part: q_nope or q_c to queries,
 * and results to out. */
smla_status smla_dense_run_absorb(const dense_layer *d);
smla_status smla_dense_run_values(const dense_layer *d);

/* A product of bf16: rows of `x` from token `start` on times `weight` [inputs, outputs] to those of
 * `out`. */
smla_projection_params smla_dense_product(const dense_layer *d, const char *name, smla_head_rows x,
                                          const DLTensor *weight, smla_head_rows out,
                                          int64_t num_tokens);

/* Runs the product of tokens' latents that makes RoPE's queries of all tokens, or the first or the
 * last product of prefills. */
smla_status smla_dense_run_rope_queries(const dense_layer *d);
smla_status smla_dense_run_queries(const dense_layer *d);
smla_status smla_dense_run_outputs(const dense_layer *d);
