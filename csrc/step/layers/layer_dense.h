/* layer_dense.h: what the two parts of a dense layer share. layer_dense.c has the whole layer and
 * its absorbed part, layer_dense_prefill.c the prefills of path "separate".
 */
#pragma once

#include "core/params_attention.h"
#include "core/params_cache.h"
#include "core/params_projection.h"
#include "core/params_rope.h"
#include "core/params_varlen.h"
#include "step/layers/layer.h"
#include "step/plans/plan_dense.h"

/* A layer whose arrays are checked: its operators, ready to run. Rows of queries, keys and latents
 * are those of the step's tokens; the RoPE parts are turned already once `rope` has run. */
typedef struct dense_layer {
    smla_layer layer;
    const smla_dense_forward_args *args;
    const smla_dense_builder *builder;
    int64_t num_absorbed; /* tokens of the absorbed part, which comes first; T on path "mixed" */

    bool has_rope;
    bool has_pages;
    smla_apply_rope_params rope;
    smla_cache_write_params write;

    /* The absorbed part, unless num_absorbed is 0. */
    smla_projection_params absorb;
    smla_attention_params attention;
    smla_attention_plan plan;
    smla_projection_params values;

    /* The rest: prefills, and their new tokens alone. */
    smla_projection_params up;
    smla_varlen_params new_tokens;

    smla_view q_nope; /* [T, H, Pn] */
    smla_view q_pe;   /* [T, H, R]; not set where R is 0 */
    smla_view kv_c;   /* [T, 512] */
    smla_view k_pe;   /* [T, R] */
    smla_view out;    /* [T, H, Pv] */
} dense_layer;

/* Checks the arrays that only prefills need, and all that can be wrong with their operators. */
smla_status smla_dense_check_prefills(dense_layer *d);

/* Computes the prefills: rows num_absorbed and later of `out`. */
smla_status smla_dense_run_prefills(const dense_layer *d);
