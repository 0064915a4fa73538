/* norm_kernel.c: RMSNorm of a row or of a head, for one instruction set.
 *
 * Computes     normalize          out = bf16(x * (1 / sqrt(sum(x^2) / size + eps)) * weight)
 *              normalize_head     bf16 of RoPE of x * (1 / sqrt(sum(x^2) / 512 + eps));
 *                                 normalize_head_to_e4m3: e4m3 of that times a scale
 * Shapes       rows [size] and heads [512] of bf16, weight [size] bf16 or fp32, contiguous
 * Roofline     Memory binds where rows come from memory, else conversion does. ns per row in L1 on
 *              one core of a Zen 3 with AVX2 (2026-11-24), before and after values were taken as
 *              duos: normalize 512 values 339 -> 146, normalize_head 292 -> 130. About 80 of
 *              normalize's wait for the chain from the sum to the factor.
 * Numerics     fp32. params_norm.h has the order of a row's sum, which is that of every backend.
 *              Each operation is rounded: there is no FMA. A result that is NaN is the positive
 *              quiet NaN, except that values which RoPE does not rotate keep their sign as e4m3.
 * Source       fused_q_kv_rmsnorm and the fused insert of vLLM, for the formulas.
 */
#define SMLA_SIMD_WIDTH SMLA_LANES

#include <math.h>
#include <string.h>

#include "core/numeric.h"
#include "cpu/machine/quads.h"
#include "cpu/norm/norm.h"
#include "cpu/rope/rope.h"

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

/* The sum of squares, in the order that params_norm.h gives. */
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

/* The sizes of a row's values. */
typedef enum row_size {
    ROW_IS_ORDINARY,
    ROW_IS_SMALL,
    ROW_IS_SUBNORMAL, /* small, and some values are subnormal */
} row_size;

/* A row is small if the mean of its squares is less than half of the last bit of eps. Then eps is
 * the sum of both, and no square, which may be subnormal, is needed. Most rows show in their first
 * values that they are not. */
SMLA_INLINE row_size
find_row_size(const uint8_t *x, smla_float_type type, int64_t size, float eps)
{
    const vuint limit = (vuint)splat(sqrtf(eps) * 0x1p-14f) & 0x7FFFFFFFu; /* eps may be -0 */
    vint has_subnormal = {0};
    for (int64_t i = 0; i < size; i += DUO) {
        const uint8_t *const at = element_at(x, type, i);
        const duo values =
            i + DUO <= size ? load_duo(at, type) : load_part_of_duo(at, type, size - i);
        const vuint even = (vuint)values.even & 0x7FFFFFFFu;
        const vuint odd = (vuint)values.odd & 0x7FFFFFFFu;
        if (has_lane((vint)((even >= limit) | (odd >= limit)))) {
            return ROW_IS_ORDINARY;
        }
        /* Less one, zero becomes the largest number. */
        has_subnormal |= (vint)((even - 1u < 0x007FFFFFu) | (odd - 1u < 0x007FFFFFu));
    }
    return has_lane(has_subnormal) ? ROW_IS_SUBNORMAL : ROW_IS_SMALL;
}

/* What the values of a row are multiplied with. */
typedef struct row_factor {
    float factor;
    bool is_lifted; /* products are normal numbers even where values are subnormal */
} row_factor;

/* Not inlined: where `size` is a constant, clang 14 takes minutes and all memory for the loop. */
__attribute__((noinline)) static row_factor
find_factor(const uint8_t *x, smla_float_type type, int64_t size, float eps)
{
    const row_size found = find_row_size(x, type, size, eps);
    const float square =
        found == ROW_IS_ORDINARY ? sum_squares(x, type, size) / (float)size + eps : eps;
    const float factor = 1.0f / sqrtf(square);
    /* bf16's smallest number is 2^-133, so no product with such a factor is subnormal. */
    return (row_factor){factor, found == ROW_IS_SUBNORMAL && factor >= 0x1p7f};
}

SMLA_INLINE vfloat
multiply_lanes(vfloat x, row_factor by)
{
    return by.is_lifted ? lift_lanes(x) * by.factor * 0x1p-64f : x * by.factor;
}

SMLA_INLINE duo
multiply_duo(duo x, row_factor by, duo weight)
{
    return (duo){multiply_lanes(x.even, by) * weight.even, multiply_lanes(x.odd, by) * weight.odd};
}

SMLA_INLINE void
normalize_by(const uint16_t *x, const void *weight, smla_float_type weight_type, int64_t size,
             row_factor by, uint16_t *out)
{
    int64_t i = 0;
    for (; i + DUO <= size; i += DUO) {
        const duo w = load_duo(element_at(weight, weight_type, i), weight_type);
        store_unified(multiply_duo(load_bf16_duo(x + i), by, w), out + i);
    }
    if (i < size) {
        const duo w = load_part_of_duo(element_at(weight, weight_type, i), weight_type, size - i);
        const duo values = load_part_of_duo(x + i, SMLA_FLOAT_BF16, size - i);
        const duo y = multiply_duo(values, by, w);
        store_part_of_words(join_upper_halves(round_unified(y.even), round_unified(y.odd)), out + i,
                            (size - i) * (int64_t)sizeof *out);
    }
}

/* Each type of the weights, and each kind of factor, has a loop of its own. */
static void
normalize(const uint16_t *x, const void *weight, smla_float_type weight_type, int64_t size,
          float eps, uint16_t *out)
{
    const row_factor by = find_factor((const uint8_t *)x, SMLA_FLOAT_BF16, size, eps);
    const row_factor lifted = {by.factor, true};
    const row_factor plain = {by.factor, false};
    if (weight_type == SMLA_FLOAT_BF16 && !by.is_lifted) {
        normalize_by(x, weight, SMLA_FLOAT_BF16, size, plain, out);
    } else if (weight_type == SMLA_FLOAT_BF16) {
        normalize_by(x, weight, SMLA_FLOAT_BF16, size, lifted, out);
    } else if (!by.is_lifted) {
        normalize_by(x, weight, SMLA_FLOAT_FP32, size, plain, out);
    } else {
        normalize_by(x, weight, SMLA_FLOAT_FP32, size, lifted, out);
    }
}

/* ---- RMSNorm and RoPE ---------------------------------------------------------------------- */

/* The values of a head from number `at` on, normalised and rotated. A NaN of those that RoPE leaves
 * alone is not unified. */
SMLA_INLINE duo
load_normalized(const uint16_t *x, const float *cos_sin, row_factor by, int at)
{
    const duo loaded = load_bf16_duo(x + at);
    const duo values = {multiply_lanes(loaded.even, by), multiply_lanes(loaded.odd, by)};
    return at < NOPE_DIM ? values : rotate_part(values, cos_sin, false, at);
}

SMLA_INLINE void
normalize_head_by(const uint16_t *x, const float *cos_sin, row_factor by, uint16_t *out)
{
    for (int i = 0; i < NOPE_DIM; i += DUO) {
        store_unified(load_normalized(x, cos_sin, by, i), out + i);
    }
    for (int i = NOPE_DIM; i < SMLA_V4_HEAD_DIM; i += DUO) {
        store_unified(load_normalized(x, cos_sin, by, i), out + i);
    }
}

static void
normalize_head(const uint16_t *x, const float *cos_sin, float eps, uint16_t *out)
{
    const row_factor by = find_factor((const uint8_t *)x, SMLA_FLOAT_BF16, SMLA_V4_HEAD_DIM, eps);
    if (by.is_lifted) {
        normalize_head_by(x, cos_sin, (row_factor){by.factor, true}, out);
    } else {
        normalize_head_by(x, cos_sin, (row_factor){by.factor, false}, out);
    }
}

SMLA_INLINE duo
scale_unified(duo x, float scale)
{
    return (duo){unify_nan(x.even) * scale, unify_nan(x.odd) * scale};
}

SMLA_INLINE void
normalize_head_to_e4m3_by(const uint16_t *x, const float *cos_sin, row_factor by, float scale,
                          uint8_t *out)
{
    for (int i = 0; i < SMLA_V4_HEAD_DIM; i += QUAD) {
        const duo first = load_normalized(x, cos_sin, by, i);
        const duo second = load_normalized(x, cos_sin, by, i + DUO);
        store_e4m3(join_duos(scale_unified(first, scale), scale_unified(second, scale)), out + i);
    }
}

/* No product here makes a new NaN, because `scale` is positive and finite. */
static void
normalize_head_to_e4m3(const uint16_t *x, const float *cos_sin, float eps, float scale,
                       uint8_t *out)
{
    const row_factor by = find_factor((const uint8_t *)x, SMLA_FLOAT_BF16, SMLA_V4_HEAD_DIM, eps);
    if (by.is_lifted) {
        normalize_head_to_e4m3_by(x, cos_sin, (row_factor){by.factor, true}, scale, out);
    } else {
        normalize_head_to_e4m3_by(x, cos_sin, (row_factor){by.factor, false}, scale, out);
    }
}

#include "cpu/attention/merge_kernel.h"
#include "cpu/compressor/pool_kernel.h"

const smla_norm_isa SMLA_OF_ISA(smla_norm) = {
    .save_state = save_state,
    .pool_states = pool_states,
    .finish_pool = finish_pool,
    .normalize = normalize,
    .normalize_head = normalize_head,
    .normalize_head_to_e4m3 = normalize_head_to_e4m3,
    .add_weighted = add_weighted,
};
