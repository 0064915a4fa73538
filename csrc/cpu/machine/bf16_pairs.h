/* bf16_pairs.h: vectors of bf16 pairs, one pair per 32-bit lane, and the dot product of two pairs.
 *
 * bf16_avx512.h and bf16_neon.h both define these functions:
 *   multiply_add               sum + a.even * b.even + a.odd * b.odd, with pair `a` in every lane
 *   round_to_pairs             two vectors of floats -> a vector of pairs, one value from each
 *   interleave_halves          WIDTH 16-bit halves of each, a b a b ..., from half 0 or WIDTH on
 *   widen_e4m3                 4 * WIDTH e4m3 -> bf16, in order
 * Both dot products take subnormal inputs as zero and flush subnormal results to zero.
 */
#pragma once

#if defined(__aarch64__)
#include "cpu/machine/bf16_neon.h"
#else
#include "cpu/machine/bf16_avx512.h"
#endif

typedef uint32_t unit_scalar;
typedef vuint unit_vector;

enum { UNIT_STEP = 2 }; /* values of a dot product per multiply-add */

/* Stores values k and k + 1 of WIDTH columns, which are a row of pairs. */
SMLA_INLINE void
store_pairs(vuint words, unit_scalar *to, int stride)
{
    (void)stride;
    *(vuint *)to = words;
}
