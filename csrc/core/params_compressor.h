/* params_compressor.h: the params of DeepSeek V4's compressor.
 *
 * A group of r positions becomes one compressed row. Every backend pools the states of a group in
 * the same order, in fp32, each operation rounded, so that all give the same bytes. For each
 * channel, state j belongs to slice j % 4. A slice takes two of its states at a time, which with
 * those of the other slices are eight neighbours. It keeps the largest score so far, the sum of the
 * weights exp(score - largest) and the sum of weight * value. When the largest score grows, both
 * sums are multiplied with the exp of the difference first. A score of -inf, and a state that is
 * not there, has weight 0 and value 0. At the end the sums of the four slices, relative to the
 * largest score of all, are added as (0 + 1) + (2 + 3), and divided; no weight at all gives 0.
 * exp(x) is 2^(x * log2 e) by the polynomial of simd.h, without FMA.
 */
#pragma once

#include "core/params_cache.h"
#include "core/params_rope.h"

enum {
    SMLA_POOL_SLICES = 4,
    SMLA_POOL_ROWS = 8,     /* states that are pooled at a time, two per slice */
    SMLA_OVERLAP_RATIO = 4, /* the ratio where a row pools the group before, too */
};

#define SMLA_LOG2_E 0x1.715476p0f

/* save_partial_states, and what compress_norm_rope_store saves. A state row is `width` values, then
 * `width` scores. With groups that overlap, the first half of the width is what the state is to the
 * group after its own, the second half what it is to its own. */
typedef struct smla_partial_states_params {
    smla_call call;
    /* kv_c: kv, k_pe: score, kv: the pages of the state, which have no format */
    smla_cache_write_params rows;
    int64_t width;    /* c D: 128, 256, 512 or 1024 */
    int64_t ratio;    /* r */
    const float *ape; /* [r, width], added to scores; NULL: nothing is saved */
    int64_t ape_stride;
    const void *positions; /* [>= T] */
    int64_t positions_stride;
    bool positions_are_int64;
} smla_partial_states_params;

typedef struct smla_compress_params {
    smla_call call;
    smla_partial_states_params states;
    smla_page_table table; /* the pages of the state */
    int64_t num_reqs;
    const int32_t *req_id_per_token; /* [>= T] */
    int64_t req_id_stride;
    int64_t dim;             /* D, the values of a key of the cache */
    const void *norm_weight; /* [D] */
    smla_float_type weight_type;
    float eps;
    smla_rope rope;                 /* its positions are those of `states` */
    smla_cache_write_params insert; /* where the keys go; its kv_c and k_pe are not read */
} smla_compress_params;
