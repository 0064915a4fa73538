/* bf16_neon.h: the functions of bf16_pairs.h on NEON with BF16.
 *
 * BFMMLA would multiply twice as much per instruction, but it multiplies 2 x 2 blocks, so lanes
 * would no longer be heads.
 */
#pragma once

#include <arm_neon.h>

#include "cpu/machine/narrow.h"
#include "cpu/machine/simd.h"

/* Rounds the sum of both products to odd, and its sum with `sum` too: each is less than an ulp off.
 * Multiplies by a lane, because a broadcast from memory would cost a slot of the vector units. */
SMLA_INLINE vfloat
multiply_add(vfloat sum, uint32_t a, vuint b)
{
    return vbfdotq_lane_f32(sum, (bfloat16x8_t)b, vcreate_bf16(a), 0);
}

SMLA_INLINE vuint
round_to_pairs(vfloat even, vfloat odd)
{
    return (vuint)vzip1q_u16((uint16x8_t)vcvtq_low_bf16_f32(even),
                             (uint16x8_t)vcvtq_low_bf16_f32(odd));
}

SMLA_INLINE vuint
interleave_halves(vuint a, vuint b, const int begin)
{
    return (vuint)(begin == 0 ? vzip1q_u16((uint16x8_t)a, (uint16x8_t)b)
                              : vzip2q_u16((uint16x8_t)a, (uint16x8_t)b));
}

SMLA_INLINE void
widen_e4m3(const uint8_t *bytes, uint32_t *out)
{
    store_bf16(load_e4m3(bytes, 1.0f), out);
}
