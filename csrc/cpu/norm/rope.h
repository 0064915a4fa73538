/* rope.h: RoPE on duos of floats, interleaved pairs (2i, 2i + 1).
 *
 * Each product is rounded, then the sum. So the files that include this one are compiled without
 * contraction to FMA: buildtools/graph.py does that for this folder. A turned value that is NaN has
 * the bits 0x7FC00000, because the sign of a new NaN depends on the machine.
 */
#pragma once

#include <stdbool.h>

#include "cpu/machine/narrow.h"

SMLA_INLINE vfloat
unify_nan(vfloat x)
{
    return select_lanes(x == x, x, (vfloat)splat_bits(0x7FC00000u));
}

/* Turns the pairs of a duo, or turns them back. Its first pair is number `pair` of the head's. A
 * table's row has 32 cosines, then 32 sines. */
SMLA_INLINE duo
turn_duo(duo x, const float *cos_sin, int pair, bool is_inverse)
{
    const vfloat cos = (vfloat)load_words(cos_sin + pair, 0);
    const vfloat angle_sin = (vfloat)load_words(cos_sin + SMLA_QK_ROPE_HEAD_DIM / 2 + pair, 0);
    const vfloat sin = is_inverse ? -angle_sin : angle_sin;
    return (duo){unify_nan(x.even * cos - x.odd * sin), unify_nan(x.odd * cos + x.even * sin)};
}
