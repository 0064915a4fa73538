/* norm_kernel.h: RMSNorm of a row, and RoPE of a head, for one instruction set.
 *
 * Computes     normalize          out = bf16(x * (1 / sqrt(sum(x^2) / size + eps)) * weight)
 *              turn_back_to_e4m3  x = RoPE of the last 64 values by the negative angles; per tile
 *                                 of 128 values the scale is the smallest power of two with
 *                                 448 scale >= max(amax, 1e-10), and a byte is e4m3(x / scale)
 *              turn_to_bf16       bf16 of RoPE by the angles, or by their negatives
 *              turn_index_head    the same by the angles, for a head of 128 values
 *              normalize_head     bf16 of RoPE of x * (1 / sqrt(sum(x^2) / 512 + eps));
 *                                 normalize_head_to_e4m3: e4m3 of that times a scale
 * Shapes       rows [size] and heads [512] of bf16, weight [size] bf16 or fp32, contiguous
 * Roofline     Memory binds where rows come from memory, else conversion does.
 * Numerics     fp32. backend.h has the order of a row's sum, which is that of every backend. Each
 *              operation is rounded: there is no FMA. A product with a power of two stands for the
 *              division, because both are exact. A result that is NaN is the positive quiet NaN,
 *              except that values which RoPE does not turn keep their bits, or their sign as e4m3.
 * Source       fused_q_kv_rmsnorm, fused_inv_rope_fp8_quant and the fused insert of vLLM, for the
 *              formulas.
 *
 * The including file defines SMLA_SIMD_WIDTH, and names its table of functions (SMLA_NORM).
 */
#pragma once

#include <math.h>
#include <string.h>

#include "core/numeric.h"
#include "cpu/machine/quads.h"
#include "cpu/norm/norm.h"
#include "cpu/norm/rope.h"

enum {
    SUM_QUADS = SMLA_NORM_SUMS / QUAD,
    NUM_SUMS = 32, /* sums that are left when eight neighbours have become one */
    HEAD_QUADS = SMLA_V4_HEAD_DIM / QUAD,
    ROPE_QUADS = SMLA_QK_ROPE_HEAD_DIM / QUAD,
    NOPE_QUADS = HEAD_QUADS - ROPE_QUADS,
    TILE_QUADS = SMLA_OUTPUT_TILE / QUAD,
};

_Static_assert(SMLA_OUTPUT_SCALES == 4, "a quad's vectors keep the maxima of the tiles");
_Static_assert(SUM_QUADS % 2 == 0, "neighbours are in pairs of quads");

/* ---- RMSNorm ------------------------------------------------------------------------------- */

static void
add_squares(quad *sums, const uint16_t *x)
{
#pragma GCC unroll 16
    for (int i = 0; i < SUM_QUADS; i++) {
        const quad values = load_bf16(x + (ptrdiff_t)i * QUAD);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            sums[i].v[k] += values.v[k] * values.v[k];
        }
    }
}

/* Adds the partial sums in the order that backend.h gives. */
static float
fold_sums(const quad *sums)
{
    float folded[NUM_SUMS] __attribute__((aligned(64)));
    for (int i = 0; i < SUM_QUADS; i += 2) {
        const vuint a = (vuint)((sums[i].v[0] + sums[i].v[1]) + (sums[i].v[2] + sums[i].v[3]));
        const quad *const next = &sums[i + 1];
        const vuint b = (vuint)((next->v[0] + next->v[1]) + (next->v[2] + next->v[3]));
        const vfloat eights = (vfloat)even_lanes(a, b) + (vfloat)odd_lanes(a, b);
        store_words((vuint)eights, folded, i / 2);
    }
    for (int half = NUM_SUMS / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            folded[i] += folded[i + half];
        }
    }
    return folded[0];
}

static float
sum_squares(const uint16_t *x, int64_t size)
{
    quad sums[SUM_QUADS] = {{{{0}}}};
    int64_t i = 0;
    for (; i + SMLA_NORM_SUMS <= size; i += SMLA_NORM_SUMS) {
        add_squares(sums, x + i);
    }
    if (i < size) {
        uint16_t padded[SMLA_NORM_SUMS] = {0};
        memcpy(padded, x + i, (size_t)(size - i) * sizeof *x);
        add_squares(sums, padded);
    }
    return fold_sums(sums);
}

SMLA_INLINE quad
scale_quad(quad x, float factor, quad weight)
{
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        x.v[k] = unify_nan(x.v[k] * factor * weight.v[k]);
    }
    return x;
}

/* Not inlined: where `size` is a constant, clang 14 takes minutes and all memory for the loop. */
__attribute__((noinline)) static float
find_factor(const uint16_t *x, int64_t size, float eps)
{
    return 1.0f / sqrtf(sum_squares(x, size) / (float)size + eps);
}

static void
normalize(const uint16_t *x, const void *weight, smla_float_type weight_type, int64_t size,
          float eps, uint16_t *out)
{
    const float factor = find_factor(x, size, eps);
    int64_t i = 0;
    for (; i + QUAD <= size; i += QUAD) {
        const quad w = load_quad(element_at(weight, weight_type, i), weight_type);
        store_bf16(scale_quad(load_bf16(x + i), factor, w), out + i);
    }
    if (i < size) {
        uint16_t last[QUAD];
        const quad w = load_part(element_at(weight, weight_type, i), weight_type, size - i);
        store_bf16(scale_quad(load_part(x + i, SMLA_FLOAT_BF16, size - i), factor, w), last);
        memcpy(out + i, last, (size_t)(size - i) * sizeof *out);
    }
}

/* ---- RoPE ---------------------------------------------------------------------------------- */

/* Turns quad `i` of a head, if it is a part of RoPE. */
SMLA_INLINE quad
turn_part(quad values, const float *cos_sin, bool is_inverse, int i)
{
    if (i < NOPE_QUADS) {
        return values;
    }
    const quad_angles angles = load_angles(cos_sin, (i - NOPE_QUADS) * QUAD_PAIRS);
    return turn_quad(values, is_inverse ? negate_angles(angles) : angles);
}

static void
turn_back_to_e4m3(const uint16_t *x, const float *cos_sin, uint8_t *out,
                  float scales[SMLA_OUTPUT_SCALES])
{
    quad values[HEAD_QUADS];
    quad best = {{{0}}};
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        for (int i = t * TILE_QUADS; i < (t + 1) * TILE_QUADS; i++) {
            values[i] = turn_part(load_bf16(x + (ptrdiff_t)i * QUAD), cos_sin, true, i);
            best.v[t] = max_of_quad(best.v[t], values[i]);
        }
    }
    finish_max(best, scales);
    for (int t = 0; t < SMLA_OUTPUT_SCALES; t++) {
        scales[t] = smla_power_of_two_scale(scales[t], SMLA_E4M3_MAX, SMLA_OUTPUT_FLOOR);
        const float inverse = 1.0f / scales[t];
        for (int i = t * TILE_QUADS; i < (t + 1) * TILE_QUADS; i++) {
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                values[i].v[k] *= inverse;
            }
            store_e4m3(values[i], out + (ptrdiff_t)i * QUAD);
        }
    }
}

static void
turn_to_bf16(const uint16_t *x, const float *cos_sin, bool is_inverse, uint16_t *out)
{
    memcpy(out, x, NOPE_QUADS * QUAD * sizeof *out);
    for (int i = NOPE_QUADS; i < HEAD_QUADS; i++) {
        const quad values = load_bf16(x + (ptrdiff_t)i * QUAD);
        store_bf16(turn_part(values, cos_sin, is_inverse, i), out + (ptrdiff_t)i * QUAD);
    }
}

static void
turn_index_head(const uint16_t *x, const float *cos_sin, uint16_t *out)
{
    const int nope_dim = SMLA_INDEX_HEAD_DIM - SMLA_QK_ROPE_HEAD_DIM;
    memcpy(out, x, (size_t)nope_dim * sizeof *out);
    for (int i = 0; i < ROPE_QUADS; i++) {
        const ptrdiff_t at = nope_dim + (ptrdiff_t)i * QUAD;
        store_bf16(turn_quad(load_bf16(x + at), load_angles(cos_sin, i * QUAD_PAIRS)), out + at);
    }
}

/* ---- RMSNorm and RoPE ---------------------------------------------------------------------- */

/* Quad `i` of a head that is normalised and turned. */
SMLA_INLINE quad
load_normalized(const uint16_t *x, const float *cos_sin, float factor, int i)
{
    quad values = load_bf16(x + (ptrdiff_t)i * QUAD);
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        values.v[k] = unify_nan(values.v[k] * factor);
    }
    return turn_part(values, cos_sin, false, i);
}

static void
normalize_head(const uint16_t *x, const float *cos_sin, float eps, uint16_t *out)
{
    const float factor = find_factor(x, SMLA_V4_HEAD_DIM, eps);
    for (int i = 0; i < HEAD_QUADS; i++) {
        store_bf16(load_normalized(x, cos_sin, factor, i), out + (ptrdiff_t)i * QUAD);
    }
}

/* No product here makes a new NaN, because `scale` is positive and finite. */
static void
normalize_head_to_e4m3(const uint16_t *x, const float *cos_sin, float eps, float scale,
                       uint8_t *out)
{
    const float factor = find_factor(x, SMLA_V4_HEAD_DIM, eps);
    for (int i = 0; i < HEAD_QUADS; i++) {
        quad values = load_normalized(x, cos_sin, factor, i);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            values.v[k] *= scale;
        }
        store_e4m3(values, out + (ptrdiff_t)i * QUAD);
    }
}

#include "cpu/norm/pool_kernel.h"

const smla_norm_isa SMLA_NORM = {
    .save_state = save_state,
    .pool_states = pool_states,
    .finish_pool = finish_pool,
    .normalize = normalize,
    .turn_back_to_e4m3 = turn_back_to_e4m3,
    .turn_to_bf16 = turn_to_bf16,
    .turn_index_head = turn_index_head,
    .normalize_head = normalize_head,
    .normalize_head_to_e4m3 = normalize_head_to_e4m3,
};
