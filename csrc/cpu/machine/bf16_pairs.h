/* bf16_pairs.h: vectors of bf16 pairs, one pair per 32-bit lane, and the dot product of two pairs.
 *
 * bf16_avx512.h and bf16_neon.h both define these functions:
 *   dot_pairs                  sum + a.even * b.even + a.odd * b.odd, with pair `a` in every lane
 *   round_to_pairs             two vectors of floats -> a vector of pairs, one value from each
 *   interleave_halves_first    16-bit halves a0 b0 a1 b1 ... up to the middle; _second: the rest
 *   min_halves, any_half_below compare unsigned 16-bit halves
 *   widen_e4m3                 4 * WIDTH e4m3 -> bf16, in order
 * Both dot products take subnormal inputs as zero and flush subnormal results to zero.
 */
#pragma once

#include <stdbool.h>

#if defined(__aarch64__)
#include "cpu/machine/bf16_neon.h"
#else
#include "cpu/machine/bf16_avx512.h"
#endif

typedef uint16_t vhalves __attribute__((vector_size(4 * SMLA_SIMD_WIDTH)));

/* The smallest |x| - 1 of all bf16 values seen so far. The bits of |x| count as an integer, and a
 * zero wraps to the largest one. Starts with all bits set; any_half_below reads the result. */
SMLA_INLINE vuint
track_smallest(vuint smallest, vuint words)
{
    return min_halves(smallest, (vuint)((vhalves)(words & 0x7FFF7FFFu) - 1));
}
