/* rope.h: RoPE on duos of floats, interleaved pairs (2i, 2i + 1), and rounding of what may be NaN.
 *
 * Each product is rounded, then the sum. So the files that include this one are compiled without
 * contraction to FMA: buildtools/graph.py does that for this folder. A rotated value that is NaN
 * has the bits 0x7FC00000, because the sign of a new NaN depends on the machine.
 */
#pragma once

#include <stdbool.h>

#include "core/params.h"
#include "cpu/machine/narrow.h"

enum { NOPE_DIM = SMLA_V4_HEAD_DIM - SMLA_QK_ROPE_HEAD_DIM }; /* values that RoPE leaves alone */

SMLA_INLINE vfloat
unify_nan(vfloat x)
{
    return select_lanes(x == x, x, (vfloat)splat_bits(0x7FC00000u));
}

/* bf16 of a lane, in its upper half, with one NaN; the lower half is anything. */
SMLA_INLINE vuint
round_unified(vfloat x)
{
    return (vuint)select_lanes(x == x, (vfloat)round_finite(x), (vfloat)splat_bits(0x7FC00000u));
}

SMLA_INLINE void
store_unified(duo x, uint16_t *out)
{
    store_words(join_upper_halves(round_unified(x.even), round_unified(x.odd)), out, 0);
}

/* Rotates pairs, of which the duo has the first and the second values. */
SMLA_INLINE duo
rotate_pairs(duo x, vfloat cos, vfloat sin)
{
    return (duo){unify_nan(x.even * cos - x.odd * sin), unify_nan(x.odd * cos + x.even * sin)};
}

/* Rotates the pairs of a duo, or rotates them back. Its first pair is number `pair` of the head's.
 * A table's row has 32 cosines, then 32 sines. */
SMLA_INLINE duo
rotate_duo(duo x, const float *cos_sin, int pair, bool is_inverse)
{
    const vfloat cos = (vfloat)load_words(cos_sin + pair, 0);
    const vfloat angle_sin = (vfloat)load_words(cos_sin + SMLA_QK_ROPE_HEAD_DIM / 2 + pair, 0);
    return rotate_pairs(x, cos, is_inverse ? -angle_sin : angle_sin);
}

/* Rotates a head's values from number `at` on, which belong to RoPE, or rotates them back. */
SMLA_INLINE duo
rotate_part(duo values, const float *cos_sin, bool is_inverse, int at)
{
    return rotate_duo(values, cos_sin, (at - NOPE_DIM) / 2, is_inverse);
}
