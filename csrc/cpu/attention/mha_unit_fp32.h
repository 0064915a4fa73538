/* mha_unit_fp32.h: how the fp32 unit lays out the operands of multi-head attention: all are
 * rows of floats. mha_unit_bf16.h is the other unit.
 */
#pragma once

#include "cpu/attention/mha.h"
#include "cpu/attention/widen_floats.h"
#include "cpu/cpu.h"
#include "cpu/machine/fp32_values.h"

enum {
    BLOCK_KEYS = 64,
    KEY_STRIDE = SMLA_HEAD_DIM + 16, /* 37 cache lines: an odd number uses every set */
    /* Element d of value row j is values[d / 16 * VALUE_CHUNK + d % 16 + j * VALUE_STEP]. */
    VALUE_CHUNK = 16,
    VALUE_STEP = SMLA_KV_LORA_RANK + 16,
    VALUE_ELEMENTS = BLOCK_KEYS * VALUE_STEP,
    PROB_ELEMENTS = 0, /* the weights serve as factors of values */
};

/* Whether the unit can compute with these operands. */
static bool
serves(const smla_attention_params *params, const smla_mha_tile *tile)
{
    (void)params;
    (void)tile;
    return true;
}

static void
apply_part_factors(const smla_attention_params *params, const smla_mha_tile *tile, unit_scalar *row)
{
    smla_apply_part_factors(params, tile, row);
}

/* Widens `count` values, from element `at` of an array on. */
static void
widen_values(const void *array, smla_float_type type, int64_t at, int64_t count, unit_scalar *to)
{
    widen_floats(array, type, at, count, to);
}

/* Whether one of `count` elements is above 2^50, infinite or NaN. */
static bool
has_huge_value(const unit_scalar *row, int count)
{
    return has_huge_float(row, count);
}

/* Adds value row j of a block to its other rows. */
SMLA_INLINE void
place_values(const unit_scalar *row, int j, int num_dims, unit_scalar *values)
{
    memcpy(values + j * VALUE_STEP, row, (size_t)num_dims * sizeof *row);
}

/* Nothing to do: there are no pairs of rows. */
SMLA_INLINE void
finish_values(int count, int num_dims, unit_scalar *values)
{
    (void)count;
    (void)num_dims;
    (void)values;
}

/* The factors of values. */
SMLA_INLINE unit_scalar *
pack_weights(float *weights, int count, int depth, const int vectors, unit_scalar *probs)
{
    (void)count;
    (void)depth;
    (void)vectors;
    (void)probs;
    return weights;
}
