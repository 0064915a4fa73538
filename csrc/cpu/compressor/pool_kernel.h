/* pool_kernel.h: DeepSeek V4's compressor for one instruction set: states are saved, pooled, and
 * normalised. norm_kernel.c includes it.
 *
 * Computes     save_state    row = kv, then score + ape
 *              pool_states   per channel and slice, over the next two states of the slice:
 *                            largest = max(largest, scores), weights = sum(exp(score - largest)),
 *                            totals = sum(exp(score - largest) * value)
 *              finish_pool   x = totals / weights over all slices; then
 *                            bf16 of RoPE of x * (1 / sqrt(sum(x^2) / dim + eps)) * weight
 * Shapes       kv and score [width] of fp32 or bf16, ape [width], rows of `dim` channels (512 or
 *              128) of fp32, all contiguous, of any alignment
 * Roofline     Memory binds saving. An exp takes 26 instructions without FMA, and pooling takes one
 *              for every two states of the first eight, and one per state of the others. ns per
 *              token on one core of a Zen 3 with AVX2 (2026-11-24), C4 and C128, before and after
 *              exps that are 1 were left out: 1980 -> 1440, 680 -> 530.
 * Numerics     fp32, each operation rounded: the bytes of every backend; params_compressor.h has
 *              the order. A saved score that is NaN is the positive quiet NaN. A NaN score makes
 *              its channel NaN, and so the whole key, as a NaN value does that has any weight.
 * Source       The compressor of DeepSeek V4 in vLLM and Transformers, for the formulas. The order
 *              is ours.
 */
#pragma once

_Static_assert(SMLA_POOL_ROWS == 2 * SMLA_POOL_SLICES, "a slice takes two states at a time");

/* ---- States -------------------------------------------------------------------------------- */

SMLA_INLINE vfloat
load_vector(const float *x, int64_t i)
{
    return (vfloat)load_words(x + i, 0);
}

static void
save_floats(const float *kv, const float *score, const float *ape, int64_t width, float *row)
{
    memcpy(row, kv, (size_t)width * sizeof *row);
    for (int64_t i = 0; i < width; i += WIDTH) {
        const vfloat sum = load_vector(score, i) + load_vector(ape, i);
        store_words((vuint)unify_nan(sum), row + width + i, 0);
    }
}

static void
save_halves(const uint16_t *kv, const uint16_t *score, const float *ape, int64_t width, float *row)
{
    for (int64_t i = 0; i < width; i += DUO) {
        const duo bias = load_float_duo(ape + i);
        const duo sum = load_bf16_duo(score + i);
        store_float_duo(load_bf16_duo(kv + i), row + i);
        store_float_duo((duo){unify_nan(sum.even + bias.even), unify_nan(sum.odd + bias.odd)},
                        row + width + i);
    }
}

static void
save_state(const void *kv, const void *score, smla_float_type type, const float *ape, int64_t width,
           float *row)
{
    if (type == SMLA_FLOAT_BF16) {
        save_halves(kv, score, ape, width, row);
    } else {
        save_floats(kv, score, ape, width, row);
    }
}

/* ---- Softmax ------------------------------------------------------------------------------- */

SMLA_INLINE vfloat
exp_lanes(vfloat x)
{
    return exp2_lanes(x * SMLA_LOG2_E);
}

/* What scores are relative to: the largest one, or 0 while all are -inf. */
SMLA_INLINE vfloat
base_of(vfloat largest)
{
    return select_lanes(largest > -INFINITY, largest, splat(0.0f));
}

/* The exps of x[0], x[1] and x[2], of which the largest is 0 in most lanes. Two exps serve them,
 * because that of 0 is 1. In a lane without a 0, exps[2] is wrong, but there the sums that it
 * multiplies are 0 or NaN. */
SMLA_INLINE void
find_exps(const vfloat *x, vfloat *exps)
{
    const vfloat one = splat(1.0f);
    const vint is_first = x[0] == splat(0.0f);
    const vint is_second = ~is_first & (x[1] == splat(0.0f));
    const vfloat a = exp_lanes(select_lanes(is_first, x[2], x[0]));
    const vfloat b = exp_lanes(select_lanes(is_second, x[2], x[1]));
    exps[0] = select_lanes(is_first, one, a);
    exps[1] = select_lanes(is_second, one, b);
    exps[2] = select_lanes(is_first, a, select_lanes(is_second, b, one));
}

/* The exps of x[0] and x[1], of which the larger is 0 in most lanes. */
SMLA_INLINE void
find_first_exps(const vfloat *x, vfloat *exps)
{
    const vfloat one = splat(1.0f);
    const vint is_first = x[0] == splat(0.0f);
    if (has_lane(~is_first & (x[1] != splat(0.0f)))) { /* infinities and NaN */
        exps[0] = exp_lanes(x[0]);
        exps[1] = exp_lanes(x[1]);
        return;
    }
    const vfloat other = exp_lanes(select_lanes(is_first, x[1], x[0]));
    exps[0] = select_lanes(is_first, one, other);
    exps[1] = select_lanes(is_first, other, one);
}

/* Pools two states of slice `s`, whose largest score so far is `former`. */
SMLA_INLINE void
pool_channels(smla_pool *pool, const smla_pool_rows *rows, int s, int64_t i, bool is_first)
{
    const vfloat former = is_first ? splat(-INFINITY) : load_vector(pool->largest[s], i);
    const vfloat scores[2] = {load_vector(rows->scores[s], i),
                              load_vector(rows->scores[s + SMLA_POOL_SLICES], i)};
    const vfloat largest = max_lanes(max_lanes(former, scores[0]), scores[1]);
    const vfloat base = base_of(largest);
    const vfloat x[3] = {scores[0] - base, scores[1] - base, former - base};
    vfloat exps[3];
    vfloat weights = {0};
    vfloat totals = {0};
    if (is_first) {
        find_first_exps(x, exps);
    } else {
        find_exps(x, exps);
        weights = load_vector(pool->weights[s], i) * exps[2];
        totals = load_vector(pool->totals[s], i) * exps[2];
    }
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        const vfloat value = load_vector(rows->values[s + k * SMLA_POOL_SLICES], i);
        const vint is_there = scores[k] != splat(-INFINITY);
        weights += exps[k];
        totals += exps[k] * select_lanes(is_there, value, splat(0.0f));
    }
    store_words((vuint)largest, pool->largest[s] + i, 0);
    store_words((vuint)weights, pool->weights[s] + i, 0);
    store_words((vuint)totals, pool->totals[s] + i, 0);
}

static void
pool_states(smla_pool *pool, const smla_pool_rows *rows, int64_t dim, bool is_first)
{
    for (int s = 0; s < SMLA_POOL_SLICES; s++) {
        for (int64_t i = 0; is_first && i < dim; i += WIDTH) {
            pool_channels(pool, rows, s, i, true);
        }
        for (int64_t i = 0; !is_first && i < dim; i += WIDTH) {
            pool_channels(pool, rows, s, i, false);
        }
    }
}

/* The pooled values: the sums of all slices, relative to one largest score, divided. */
SMLA_INLINE void
divide_pool(const smla_pool *pool, int64_t dim, float *x)
{
    for (int64_t i = 0; i < dim; i += WIDTH) {
        vfloat largest = load_vector(pool->largest[0], i);
        for (int s = 1; s < SMLA_POOL_SLICES; s++) {
            largest = max_lanes(largest, load_vector(pool->largest[s], i));
        }
        const vfloat base = base_of(largest);
        vfloat weights[SMLA_POOL_SLICES];
        vfloat totals[SMLA_POOL_SLICES];
#pragma GCC unroll 4
        for (int s = 0; s < SMLA_POOL_SLICES; s++) {
            const vfloat factor = exp_lanes(load_vector(pool->largest[s], i) - base);
            weights[s] = load_vector(pool->weights[s], i) * factor;
            totals[s] = load_vector(pool->totals[s], i) * factor;
        }
        const vfloat weight = (weights[0] + weights[1]) + (weights[2] + weights[3]);
        const vfloat total = (totals[0] + totals[1]) + (totals[2] + totals[3]);
        const vfloat quotient = total / weight;
        store_words((vuint)select_lanes(weight == splat(0.0f), splat(0.0f), quotient), x + i, 0);
    }
}

/* ---- Norm and RoPE ------------------------------------------------------------------------- */

static void
finish_pool(const smla_pool *pool, int64_t dim, const smla_pool_norm *norm, const float *cos_sin,
            uint16_t *key)
{
    float x[SMLA_V4_HEAD_DIM] = {0}; /* `dim` may be less */
    divide_pool(pool, dim, x);
    const float factor = find_factor((const uint8_t *)x, SMLA_FLOAT_FP32, dim, norm->eps).factor;
    const row_factor by = {factor, false}; /* fp32 values may have subnormal products */
    const int nope_dim = (int)dim - SMLA_QK_ROPE_HEAD_DIM;
    for (int i = 0; i < dim; i += DUO) {
        const duo weight =
            load_duo(element_at(norm->weight, norm->weight_type, i), norm->weight_type);
        const duo values = multiply_duo(load_float_duo(x + i), by, weight);
        store_unified(i < nope_dim ? values
                                   : rotate_duo(values, cos_sin, (i - nope_dim) / 2, false),
                      key + i);
    }
}
