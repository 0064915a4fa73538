/* fp32_values.h: what bf16_pairs.h has, for instruction sets without a bf16 product: one fp32 value
 * per lane.
 */
#pragma once

#include "cpu/machine/simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float unit_scalar;
typedef vfloat unit_vector;

enum { UNIT_STEP = 1 }; /* values of a dot product per multiply-add */

/* sum + a * b. NEON multiplies by a lane: a broadcast would cost a slot of the vector units. */
SMLA_INLINE vfloat
multiply_add(vfloat sum, unit_scalar a, unit_vector b)
{
#if defined(__aarch64__)
    uint32_t bits;
    memcpy(&bits, &a, sizeof bits);
    return vfmaq_lane_f32(sum, b, vcreate_f32(bits), 0);
#else
    return b * a + sum;
#endif
}

/* Stores values k and k + 1 of WIDTH columns; rows are `stride` elements apart. */
SMLA_INLINE void
store_pairs(vuint words, unit_scalar *to, int stride)
{
    *(vuint *)to = words << 16;
    *(vuint *)(to + stride) = words & 0xFFFF0000u;
}
