/* quads.h: duos and quads of bf16, fp16 and fp32 arrays, and the largest magnitude of quads.
 * Kernels that quantise include it.
 */
#pragma once

#include <string.h>

#include "core/backend.h"
#include "core/numeric.h"
#include "cpu/machine/narrow.h"

/* ---- Duos and quads of any type ------------------------------------------------------------ */

SMLA_INLINE int64_t
element_bytes(smla_float_type type)
{
    return type == SMLA_FLOAT_FP32 ? 4 : 2;
}

SMLA_INLINE const uint8_t *
element_at(const void *array, smla_float_type type, int64_t index)
{
    return (const uint8_t *)array + index * element_bytes(type);
}

SMLA_INLINE quad
load_quad(const void *values, smla_float_type type)
{
    switch (type) {
    case SMLA_FLOAT_BF16: return load_bf16(values);
    case SMLA_FLOAT_FP16: return load_half(values);
    default: return load_float(values);
    }
}

SMLA_INLINE duo
load_duo(const void *values, smla_float_type type)
{
    switch (type) {
    case SMLA_FLOAT_BF16: return load_bf16_duo(values);
    case SMLA_FLOAT_FP16: return load_fp16_duo(values);
    default: return load_float_duo(values);
    }
}

/* Loads a duo of which `count` values exist. The others are zeros. */
SMLA_INLINE duo
load_part_of_duo(const void *values, smla_float_type type, int64_t count)
{
    const int64_t bytes = count * element_bytes(type);
    if (type == SMLA_FLOAT_FP32 && count > WIDTH) {
        const uint8_t *const second = (const uint8_t *)values + 4 * WIDTH;
        return float_to_duo(load_words(values, 0), load_part_of_words(second, bytes - 4 * WIDTH));
    }
    const vuint words = load_part_of_words(values, bytes);
    switch (type) {
    case SMLA_FLOAT_BF16: return bf16_to_duo(words);
    case SMLA_FLOAT_FP16: return fp16_to_duo(words);
    default: return float_to_duo(words, (vuint){0});
    }
}

/* A duo as bf16 or fp16. */
SMLA_INLINE vuint
round_duo(duo x, smla_float_type type)
{
    if (type == SMLA_FLOAT_BF16) {
        return join_upper_halves(round_to_upper_half(x.even), round_to_upper_half(x.odd));
    }
    return round_to_half(x.even) | round_to_half(x.odd) << 16;
}

SMLA_INLINE void
store_duo(duo x, smla_float_type type, void *out)
{
    if (type == SMLA_FLOAT_FP32) {
        store_float_duo(x, out);
    } else {
        store_words(round_duo(x, type), out, 0);
    }
}

/* Stores the first `count` values of a duo. */
SMLA_INLINE void
store_part_of_duo(duo x, smla_float_type type, int64_t count, void *out)
{
    const int64_t bytes = count * element_bytes(type);
    if (type == SMLA_FLOAT_FP32 && count > WIDTH) {
        store_words(interleave_first((vuint)x.even, (vuint)x.odd), out, 0);
        store_part_of_words(interleave_second((vuint)x.even, (vuint)x.odd),
                            (uint8_t *)out + 4 * WIDTH, bytes - 4 * WIDTH);
    } else if (type == SMLA_FLOAT_FP32) {
        store_part_of_words(interleave_first((vuint)x.even, (vuint)x.odd), out, bytes);
    } else {
        store_part_of_words(round_duo(x, type), out, bytes);
    }
}

/* Loads a quad of which `count` values exist. The others are zeros. */
SMLA_INLINE quad
load_part(const void *values, smla_float_type type, int64_t count)
{
    duo second = {{0}, {0}};
    if (count > DUO) {
        second = load_part_of_duo(element_at(values, type, DUO), type, count - DUO);
    }
    return join_duos(load_part_of_duo(values, type, count), second);
}

SMLA_INLINE quad
magnitude_of(quad x)
{
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        x.v[k] = (vfloat)((vuint)x.v[k] & 0x7FFFFFFFu);
    }
    return x;
}

/* max(best, |x|) per lane over the four vectors of x; NaN is ignored. */
SMLA_INLINE vfloat
max_of_quad(vfloat best, quad x)
{
    const quad m = magnitude_of(x);
    const vfloat pair = max_lanes(max_lanes(best, m.v[0]), m.v[1]);
    return max_lanes(max_lanes(pair, m.v[2]), m.v[3]);
}

/* Folds the upper half of each vector into its lower half. Lanes of the result: a, b, a, b ... */
SMLA_INLINE vfloat
fold_max(vfloat a, vfloat b)
{
    return max_lanes((vfloat)interleave_first((vuint)a, (vuint)b),
                     (vfloat)interleave_second((vuint)a, (vuint)b));
}

/* The largest lane of each vector, infinity as FLT_MAX. Comments give the vector of each lane. */
SMLA_INLINE void
finish_max(quad x, float *largest)
{
    vfloat folded = fold_max(fold_max(x.v[0], x.v[2]), fold_max(x.v[1], x.v[3])); /* 0 1 2 3 ... */
#pragma GCC unroll 2
    for (int copies = 1; copies < WIDTH / 4; copies *= 2) {
        folded = fold_max(folded, folded); /* 0 0 1 1 2 2 3 3 ... */
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        largest[k] = smla_finite_abs(folded[k * WIDTH / 4]);
    }
}
