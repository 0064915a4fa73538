/* mha_unit_bf16.h: how the units of AVX-512 BF16, AMX-BF16 and NEON with BF16 lay out the operands
 * of multi-head attention: as pairs of bf16. A pair of a query or key is two neighbouring
 * dimensions; a pair of values or weights is two neighbouring keys. mha_unit_fp32.h is the other
 * unit.
 *
 * bf16 holds every e4m3 value exactly. fp16 goes to the fp32 unit.
 */
#pragma once

#include "cpu/attention/mha.h"
#include "cpu/cpu.h"
#include "cpu/machine/bf16_pairs.h"
#include "cpu/machine/narrow.h"

enum {
    BLOCK_KEYS = 128,
    KEY_STRIDE = SMLA_HEAD_DIM / 2 + 16, /* 19 cache lines: an odd number uses every set */
    /* Element d of value pair j is values[d / 16 * VALUE_CHUNK + d % 16 + j * VALUE_STEP]. */
    VALUE_CHUNK = (BLOCK_KEYS / 2 + 1) * 16,
    VALUE_STEP = 16,
    VALUE_ELEMENTS = SMLA_KV_LORA_RANK / 16 * VALUE_CHUNK,
    PROB_ELEMENTS = BLOCK_KEYS / 2 * 2 * WIDTH,
};

/* Whether the unit can compute with these operands. */
static bool
serves(const smla_attention_params *params, const smla_mha_tile *tile)
{
    return params->queries.type != SMLA_FLOAT_FP16 && params->kv.type != SMLA_FLOAT_FP16 &&
           !smla_has_part_factors(params, tile);
}

/* There are none. */
static void
apply_part_factors(const smla_attention_params *params, const smla_mha_tile *tile, unit_scalar *row)
{
    (void)params;
    (void)tile;
    (void)row;
}

/* Copies or widens `count` values, from element `at` of an array on. Whole vectors, because loads
 * of what memcpy has just stored in halves of vectors wait until it is in the cache. */
static void
widen_values(const void *array, smla_float_type type, int64_t at, int64_t count, unit_scalar *to)
{
    uint16_t *const halves = (uint16_t *)to;
    int64_t i = 0;
    if (type == SMLA_FLOAT_BF16) {
        const uint16_t *const from = (const uint16_t *)array + at;
        for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
            store_words(load_words(from + i, 0), halves + i, 0);
        }
        if (i < count) {
            memcpy(halves + i, from + i, (size_t)(count - i) * sizeof *halves);
        }
        return;
    }
    for (; i + QUAD <= count; i += QUAD) {
        store_bf16(load_e4m3((const uint8_t *)array + at + i, 1.0f), halves + i);
    }
    for (; i < count; i++) {
        halves[i] = smla_float_to_bf16(smla_cpu_load_float(array, type, at + i));
    }
}

/* Whether one of `count` pairs has a value above 2^50, infinite or NaN. The sum sets the upper bit
 * of such a half. */
static bool
has_huge_value(const unit_scalar *row, int count)
{
    vuint noted = {0};
    for (int i = 0; i < count; i += WIDTH) {
        noted |= (*(const vuint *)(row + i) & 0x7FFF7FFFu) + 0x277F277Fu;
    }
    return has_noted(noted);
}

SMLA_INLINE unit_scalar *
value_at(unit_scalar *values, int dim)
{
    return values + dim / 16 * VALUE_CHUNK + dim % 16;
}

/* Adds value row j of a block to its other rows. An even row waits, as halves, for the odd one. */
SMLA_INLINE void
place_values(const unit_scalar *row, int j, int num_dims, unit_scalar *values)
{
    unit_scalar *const pairs = values + j / 2 * VALUE_STEP;
    for (int d = 0; d < num_dims; d += 2 * WIDTH) {
        const vuint x = *(const vuint *)(row + d / 2);
        vuint *const first = (vuint *)value_at(pairs, d);
        vuint *const second = (vuint *)value_at(pairs, d + WIDTH);
        if (j % 2 == 0) {
            *first = x;
            continue;
        }
        const vuint even = *first;
        *first = interleave_halves(even, x, 0);
        *second = interleave_halves(even, x, WIDTH);
    }
}

/* Pairs the last of an odd number of rows with zeros. */
static void
finish_values(int count, int num_dims, unit_scalar *values)
{
    static const unit_scalar zeros[SMLA_KV_LORA_RANK / 2] __attribute__((aligned(64))) = {0};
    if (count % 2 == 1) {
        place_values(zeros, count, num_dims, values);
    }
}

/* The factors of values: pairs of weights, each rounded once, with zeros up to a multiple
 * of `depth` pairs. */
SMLA_INLINE unit_scalar *
pack_weights(float *weights, int count, int depth, const int vectors, unit_scalar *probs)
{
    const int row = vectors * WIDTH;
    const int pairs = (count + 1) / 2;
    const int padded = (pairs + depth - 1) / depth * depth;
    for (int j = 0; j < pairs; j++) {
        for (int at = j * row; at < (j + 1) * row; at += WIDTH) {
            const float *const from = weights + at + j * row;
            const vfloat odd = 2 * j + 1 < count ? *as_vectors(from + row) : (vfloat){0};
            *(vuint *)(probs + at) = round_to_pairs(*as_vectors(from), odd);
        }
    }
    memset(probs + pairs * row, 0, (size_t)((padded - pairs) * row) * sizeof *probs);
    return probs;
}
