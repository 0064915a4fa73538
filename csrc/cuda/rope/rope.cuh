/* rope.cuh: RoPE on registers, interleaved pairs (2i, 2i + 1), with the angles of a table.
 *
 * Products are rounded one by one, then their sum, as on the CPU. A rotated value that is NaN is
 * positive, like every NaN that an instruction makes.
 */
#pragma once

#include "core/backend.h"
#include "core/params_rope.h"

enum { ROPE_PAIRS = 4 }; /* pairs per thread: 8 values, 16 bytes of bf16 */

/* The cosines and sines of a thread's pairs. */
struct rope_angles {
    float cos[ROPE_PAIRS];
    float sin[ROPE_PAIRS];
};

static __device__ __forceinline__ int64_t
rope_position(const smla_rope &rope, int64_t token)
{
    return smla_read_integer(rope.positions, rope.positions_are_int64,
                             token * rope.positions_stride);
}

/* Whether every row of the table begins at a multiple of 16 bytes. */
static inline bool
rope_is_aligned(const smla_rope &rope)
{
    return (uintptr_t)rope.cos_sin % 16 == 0 && rope.cos_sin_stride_pos % 4 == 0;
}

/* Loads the angles of pairs `pair`...pair + 3 at a position. A position that the table lacks is not
 * read: its angles are 0. */
static __device__ __forceinline__ rope_angles
rope_load_at(const smla_rope &rope, int64_t position, int pair, bool is_aligned)
{
    const bool is_known = position >= 0 && position < rope.max_pos;
    const float *const cos = rope.cos_sin + position * rope.cos_sin_stride_pos + pair;
    const float *const sin = cos + SMLA_QK_ROPE_HEAD_DIM / 2;
    if (is_known && is_aligned) {
        const float4 c = __ldg((const float4 *)cos);
        const float4 s = __ldg((const float4 *)sin);
        return {{c.x, c.y, c.z, c.w}, {s.x, s.y, s.z, s.w}};
    }
    rope_angles angles;
#pragma unroll
    for (int i = 0; i < ROPE_PAIRS; i++) {
        angles.cos[i] = is_known ? __ldg(cos + i) : 1.0f;
        angles.sin[i] = is_known ? __ldg(sin + i) : 0.0f;
    }
    return angles;
}

/* Loads the same angles at the token's position. */
static __device__ __forceinline__ rope_angles
rope_load(const smla_rope &rope, int64_t token, int pair, bool is_aligned)
{
    return rope_load_at(rope, rope_position(rope, token), pair, is_aligned);
}

/* Rotates a thread's pairs by `angles`, or by their negatives. */
template <bool IS_INVERSE>
static __device__ __forceinline__ void
rope_rotate(float x[2 * ROPE_PAIRS], const rope_angles &angles)
{
#pragma unroll
    for (int i = 0; i < ROPE_PAIRS; i++) {
        const float c = angles.cos[i];
        const float s = IS_INVERSE ? -angles.sin[i] : angles.sin[i];
        const float a = x[2 * i];
        const float b = x[2 * i + 1];
        x[2 * i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
        x[2 * i + 1] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
}
