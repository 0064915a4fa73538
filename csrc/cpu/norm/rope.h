/* rope.h: RoPE on quads of floats, interleaved pairs (2i, 2i + 1).
 *
 * Each product is rounded, then the sum. So the files that include this one are compiled without
 * contraction to FMA: buildtools/graph.py does that for this folder. A turned value that is NaN has
 * the bits 0x7FC00000, because the sign of a new NaN depends on the machine.
 */
#pragma once

#include "cpu/machine/narrow.h"

enum { QUAD_PAIRS = QUAD / 2 };

/* Angles of the pairs of a quad. Pairs 2j and 2j + 1 of a quad are in lane j of its vectors. */
typedef struct quad_angles {
    vfloat cos[2]; /* pairs 0, 2, 4 ..., then pairs 1, 3, 5 ... */
    vfloat sin[2];
} quad_angles;

/* `pair` is the number of the quad's first pair. A table's row has 32 cosines, then 32 sines. */
SMLA_INLINE quad_angles
load_angles(const float *cos_sin, int pair)
{
    const float *const sin = cos_sin + SMLA_QK_ROPE_HEAD_DIM / 2;
    const vuint c[2] = {load_words(cos_sin + pair, 0), load_words(cos_sin + pair, 1)};
    const vuint s[2] = {load_words(sin + pair, 0), load_words(sin + pair, 1)};
    return (quad_angles){
        .cos = {(vfloat)even_lanes(c[0], c[1]), (vfloat)odd_lanes(c[0], c[1])},
        .sin = {(vfloat)even_lanes(s[0], s[1]), (vfloat)odd_lanes(s[0], s[1])},
    };
}

/* The angles of the inverse. */
SMLA_INLINE quad_angles
negate_angles(quad_angles by)
{
    by.sin[0] = -by.sin[0];
    by.sin[1] = -by.sin[1];
    return by;
}

SMLA_INLINE vfloat
unify_nan(vfloat x)
{
    return select_lanes(x == x, x, (vfloat)splat_bits(0x7FC00000u));
}

SMLA_INLINE quad
turn_quad(quad x, quad_angles by)
{
    quad y;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const vfloat a = x.v[2 * i];
        const vfloat b = x.v[2 * i + 1];
        y.v[2 * i] = unify_nan(a * by.cos[i] - b * by.sin[i]);
        y.v[2 * i + 1] = unify_nan(b * by.cos[i] + a * by.sin[i]);
    }
    return y;
}
