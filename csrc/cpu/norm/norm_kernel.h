/* norm_kernel.h: RMSNorm of a row or of a head, for one instruction set.
 *
 * Computes     normalize          out = bf16(x * (1 / sqrt(sum(x^2) / size + eps)) * weight)
 *              normalize_head     bf16 of RoPE of x * (1 / sqrt(sum(x^2) / 512 + eps));
 *                                 normalize_head_to_e4m3: e4m3 of that times a scale
 * Shapes       rows [size] and heads [512] of bf16, weight [size] bf16 or fp32, contiguous
 * Roofline     Memory binds where rows come from memory, else conversion does. ns per row in L1 on
 *              one core of a Zen 3 with AVX2 (2026-11-24), before and after values were taken as
 *              duos: normalize 512 values 339 -> 146, normalize_head 292 -> 130. About 80 of
 *              normalize's wait for the chain from the sum to the factor.
 * Numerics     fp32. params.h has the order of a row's sum, which is that of every backend. Each
 *              operation is rounded: there is no FMA. A result that is NaN is the positive quiet
 *              NaN, except that values which RoPE does not turn keep their sign as e4m3.
 * Source       fused_q_kv_rmsnorm and the fused insert of vLLM, for the formulas.
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
    SUM_VECTORS = SMLA_NORM_SUMS / 8 / WIDTH, /* vectors with sums of eight neighbours */
    SUM_DUOS = 4,                             /* duos that become one such vector */
};

_Static_assert(SUM_VECTORS > 0, "a vector must hold sums of one row");

/* ---- RMSNorm ------------------------------------------------------------------------------- */

/* Adds the squares of SUM_DUOS duos in a row to their sums. */
SMLA_INLINE void
add_squares(duo *sums, const uint8_t *x, smla_float_type type)
{
#pragma GCC unroll 4
    for (int k = 0; k < SUM_DUOS; k++) {
        const duo values = load_duo(element_at(x, type, (int64_t)k * DUO), type);
        sums[k].even += values.even * values.even;
        sums[k].odd += values.odd * values.odd;
    }
}

/* Adds each lane of two vectors to its neighbour. */
SMLA_INLINE vfloat
add_neighbours(vfloat a, vfloat b)
{
    return (vfloat)even_lanes((vuint)a, (vuint)b) + (vfloat)odd_lanes((vuint)a, (vuint)b);
}

/* The sum of squares, in the order that params.h gives. */
SMLA_INLINE float
sum_squares(const uint8_t *x, smla_float_type type, int64_t size)
{
    vfloat sums[SUM_VECTORS];
    float lanes[WIDTH] __attribute__((aligned(64)));
    uint8_t padded[SMLA_NORM_SUMS * sizeof(float)];
    const int64_t num_whole = size / SMLA_NORM_SUMS * SMLA_NORM_SUMS;
    if (num_whole < size) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, element_at(x, type, num_whole),
               (size_t)((size - num_whole) * element_bytes(type)));
    }
    for (int i = 0; i < SUM_VECTORS; i++) {
        const int64_t at = (int64_t)i * SUM_DUOS * DUO;
        duo part[SUM_DUOS] = {{{0}, {0}}};
        vfloat twos[SUM_DUOS];
        for (int64_t row = 0; row < num_whole; row += SMLA_NORM_SUMS) {
            add_squares(part, element_at(x, type, row + at), type);
        }
        if (num_whole < size) {
            add_squares(part, element_at(padded, type, at), type);
        }
#pragma GCC unroll 4
        for (int k = 0; k < SUM_DUOS; k++) {
            twos[k] = part[k].even + part[k].odd;
        }
        sums[i] =
            add_neighbours(add_neighbours(twos[0], twos[1]), add_neighbours(twos[2], twos[3]));
    }
    for (int half = SUM_VECTORS / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            sums[i] += sums[i + half];
        }
    }
    *(vfloat *)lanes = sums[0];
    for (int half = WIDTH / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) {
            lanes[i] += lanes[i + half];
        }
    }
    return lanes[0];
}

/* Not inlined: where `size` is a constant, clang 14 takes minutes and all memory for the loop. */
__attribute__((noinline)) static float
find_factor(const uint16_t *x, int64_t size, float eps)
{
    const float sum = sum_squares((const uint8_t *)x, SMLA_FLOAT_BF16, size);
    return 1.0f / sqrtf(sum / (float)size + eps);
}

SMLA_INLINE duo
multiply_duo(duo x, float factor, duo weight)
{
    return (duo){x.even * factor * weight.even, x.odd * factor * weight.odd};
}

SMLA_INLINE void
normalize_by(const uint16_t *x, const void *weight, smla_float_type weight_type, int64_t size,
             float factor, uint16_t *out)
{
    int64_t i = 0;
    for (; i + DUO <= size; i += DUO) {
        const duo w = load_duo(element_at(weight, weight_type, i), weight_type);
        store_unified(multiply_duo(load_bf16_duo(x + i), factor, w), out + i);
    }
    if (i < size) {
        uint16_t last[DUO];
        const duo w = load_part_of_duo(element_at(weight, weight_type, i), weight_type, size - i);
        const duo values = load_part_of_duo(x + i, SMLA_FLOAT_BF16, size - i);
        store_unified(multiply_duo(values, factor, w), last);
        memcpy(out + i, last, (size_t)(size - i) * sizeof *out);
    }
}

static void
normalize(const uint16_t *x, const void *weight, smla_float_type weight_type, int64_t size,
          float eps, uint16_t *out)
{
    const float factor = find_factor(x, size, eps);
    if (weight_type == SMLA_FLOAT_BF16) {
        normalize_by(x, weight, SMLA_FLOAT_BF16, size, factor, out);
    } else {
        normalize_by(x, weight, SMLA_FLOAT_FP32, size, factor, out);
    }
}

/* ---- RMSNorm and RoPE ---------------------------------------------------------------------- */

/* The values of a head from number `at` on, normalised and turned. A NaN of those that RoPE leaves
 * alone is not unified. */
SMLA_INLINE duo
load_normalized(const uint16_t *x, const float *cos_sin, float factor, int at)
{
    const duo loaded = load_bf16_duo(x + at);
    const duo values = {loaded.even * factor, loaded.odd * factor};
    return at < NOPE_DIM ? values : turn_part(values, cos_sin, false, at);
}

static void
normalize_head(const uint16_t *x, const float *cos_sin, float eps, uint16_t *out)
{
    const float factor = find_factor(x, SMLA_V4_HEAD_DIM, eps);
    for (int i = 0; i < NOPE_DIM; i += DUO) {
        store_unified(load_normalized(x, cos_sin, factor, i), out + i);
    }
    for (int i = NOPE_DIM; i < SMLA_V4_HEAD_DIM; i += DUO) {
        store_unified(load_normalized(x, cos_sin, factor, i), out + i);
    }
}

SMLA_INLINE duo
scale_unified(duo x, float scale)
{
    return (duo){unify_nan(x.even) * scale, unify_nan(x.odd) * scale};
}

/* No product here makes a new NaN, because `scale` is positive and finite. */
static void
normalize_head_to_e4m3(const uint16_t *x, const float *cos_sin, float eps, float scale,
                       uint8_t *out)
{
    const float factor = find_factor(x, SMLA_V4_HEAD_DIM, eps);
    for (int i = 0; i < SMLA_V4_HEAD_DIM; i += QUAD) {
        const duo first = load_normalized(x, cos_sin, factor, i);
        const duo second = load_normalized(x, cos_sin, factor, i + DUO);
        store_e4m3(join_duos(scale_unified(first, scale), scale_unified(second, scale)), out + i);
    }
}

#include "cpu/norm/merge_kernel.h"
#include "cpu/norm/pool_kernel.h"

const smla_norm_isa SMLA_NORM = {
    .save_state = save_state,
    .pool_states = pool_states,
    .finish_pool = finish_pool,
    .normalize = normalize,
    .normalize_head = normalize_head,
    .normalize_head_to_e4m3 = normalize_head_to_e4m3,
    .add_weighted = add_weighted,
};
