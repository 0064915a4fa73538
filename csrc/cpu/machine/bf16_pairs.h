/* bf16_pairs.h: vectors of bf16 pairs, one pair per 32-bit lane, and the dot product of two pairs.
 *
 * Two machines have it, each in a file of its own:
 *   dot_pairs                  sum + a.even * b.even + a.odd * b.odd, `a` for every lane
 *   round_to_pairs             two vectors of floats -> pairs of one value of each
 *   interleave_halves_first    a0 b0 a1 b1 ... of halves, up to the middle; _second: from there on
 *   min_halves, any_half_below of unsigned 16-bit halves
 *   widen_e4m3                 4 * WIDTH e4m3 -> bf16, in order
 * Both take subnormal inputs of the dot product as zero and flush subnormal results.
 */
#ifndef SMLA_CPU_BF16_PAIRS_H
#define SMLA_CPU_BF16_PAIRS_H

#include <stdbool.h>

#if defined(__aarch64__)
#include "cpu/machine/bf16_neon.h"
#else
#include "cpu/machine/bf16_avx512.h"
#endif

typedef uint16_t vhalves __attribute__((vector_size(4 * SMLA_SIMD_WIDTH)));

/* The smallest |x| - 1 of bf16 values seen so far, as integers: a zero wraps to the top. Starts
 * with all bits set; any_half_below tells what was seen. */
SMLA_INLINE vuint
track_smallest(vuint smallest, vuint words)
{
    return min_halves(smallest, (vuint)((vhalves)(words & 0x7FFF7FFFu) - 1));
}

#endif /* SMLA_CPU_BF16_PAIRS_H */
