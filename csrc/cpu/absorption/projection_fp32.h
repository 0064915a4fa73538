/* projection_fp32.h: the multiply unit of instruction sets without a bf16 product: fp32 FMA, one
 * value of the sum per step.
 *
 * A unit decides how values of x and w lie in scratch. Its input is words of two bf16, k and k + 1.
 */
#pragma once

#include <stdbool.h>

#include "cpu/machine/simd.h"

typedef float unit_scalar;
typedef vfloat unit_vector;

enum {
    UNIT_STEP = 1,    /* values of the sum per multiply-add */
    INNER_BLOCK = 64, /* values per chain: 32 KiB of fp32 for 128 outputs */
};

SMLA_INLINE vfloat
multiply_add(vfloat sum, unit_scalar a, unit_vector b)
{
    return multiply_add_float(sum, a, b);
}

/* Stores 2 * WIDTH values of a token. */
SMLA_INLINE void
store_tokens(vuint words, unit_scalar *x)
{
    const vuint even = words << 16;
    const vuint odd = words & 0xFFFF0000u;
    *(vuint *)x = interleave_first(even, odd);
    *(vuint *)(x + WIDTH) = interleave_second(even, odd);
}

/* Stores values k and k + 1 of WIDTH outputs; rows of the panel are `stride` elements apart. */
SMLA_INLINE void
store_weights(vuint words, unit_scalar *panel, int stride)
{
    *(vuint *)panel = words << 16;
    *(vuint *)(panel + stride) = words & 0xFFFF0000u;
}

/* This unit accepts every value. */
SMLA_INLINE vuint
track_smallest(vuint smallest, vuint words)
{
    (void)words;
    return smallest;
}

SMLA_INLINE bool
is_exact(vuint smallest)
{
    (void)smallest;
    return true;
}
