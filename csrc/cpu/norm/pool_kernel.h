/* pool_kernel.h: DeepSeek V4's compressor for one instruction set: states are saved, pooled, and
 * normalised. norm_kernel.h includes it.
 *
 * Computes     save_state    row = kv, then score + ape
 *              pool_states   per channel and slice, over the next two states of the slice:
 *                            largest = max(largest, scores), weights = sum(exp(score - largest)),
 *                            totals = sum(exp(score - largest) * value)
 *              finish_pool   x = totals / weights over all slices; then
 *                            bf16 of RoPE of x * (1 / sqrt(sum(x^2) / dim + eps)) * weight
 * Shapes       kv and score [width] of fp32 or bf16, ape [width], rows of `dim` channels (512 or
 *              128) of fp32, all contiguous, of any alignment
 * Roofline     An exp takes 16 instructions, so pooling 8 bytes of a state takes about 25.
 * Numerics     fp32, each operation rounded: the bytes of every backend; params_compressor.h has
 *              the order. A saved score that is NaN is the positive quiet NaN. A NaN score makes
 *              its channel NaN, and so the whole key, as a NaN value does that has any weight.
 * Source       The compressor of DeepSeek V4 in vLLM and Transformers, for the formulas. The order
 *              is ours.
 */
#pragma once

_Static_assert(SMLA_POOL_ROWS == 2 * SMLA_POOL_SLICES, "a slice takes two states at a time");

/* ---- States -------------------------------------------------------------------------------- */

static void
save_state(const void *kv, const void *score, smla_float_type type, const float *ape, int64_t width,
           float *row)
{
    for (int64_t i = 0; i < width; i += QUAD) {
        store_float(load_quad(element_at(kv, type, i), type), row + i);
        const quad bias = load_float(ape + i);
        quad sum = load_quad(element_at(score, type, i), type);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            sum.v[k] = unify_nan(sum.v[k] + bias.v[k]);
        }
        store_float(sum, row + width + i);
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

SMLA_INLINE vfloat
load_vector(const float *x, int i)
{
    return (vfloat)load_words(x, i);
}

static void
pool_states(smla_pool *pool, const smla_pool_rows *rows, int64_t dim)
{
    for (int s = 0; s < SMLA_POOL_SLICES; s++) {
        for (int i = 0; i < dim / WIDTH; i++) {
            const vfloat former = load_vector(pool->largest[s], i);
            vfloat weights = load_vector(pool->weights[s], i);
            vfloat totals = load_vector(pool->totals[s], i);
            const vfloat scores[2] = {load_vector(rows->scores[s], i),
                                      load_vector(rows->scores[s + SMLA_POOL_SLICES], i)};
            const vfloat values[2] = {load_vector(rows->values[s], i),
                                      load_vector(rows->values[s + SMLA_POOL_SLICES], i)};
            const vfloat largest = max_lanes(max_lanes(former, scores[0]), scores[1]);
            const vfloat base = base_of(largest);
            const vfloat factor = exp_lanes(former - base);
            weights *= factor;
            totals *= factor;
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                const vfloat weight = exp_lanes(scores[k] - base);
                const vint is_there = scores[k] != splat(-INFINITY);
                weights += weight;
                totals += weight * select_lanes(is_there, values[k], splat(0.0f));
            }
            store_words((vuint)largest, pool->largest[s], i);
            store_words((vuint)weights, pool->weights[s], i);
            store_words((vuint)totals, pool->totals[s], i);
        }
    }
}

/* The pooled values: the sums of all slices, relative to one largest score, divided. */
SMLA_INLINE void
divide_pool(const smla_pool *pool, int64_t dim, float *x)
{
    for (int i = 0; i < dim / WIDTH; i++) {
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
        store_words((vuint)select_lanes(weight == splat(0.0f), splat(0.0f), quotient), x, i);
    }
}

/* ---- Norm and RoPE ------------------------------------------------------------------------- */

/* The sum of the squares of fp32 values, in the order of sum_squares. */
SMLA_INLINE float
sum_float_squares(const float *x, int64_t dim)
{
    quad sums[SUM_QUADS] = {{{{0}}}};
    for (int64_t i = 0; i < dim / QUAD; i++) {
        const quad values = load_float(x + i * QUAD);
        quad *const sum = &sums[i % SUM_QUADS];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            sum->v[k] += values.v[k] * values.v[k];
        }
    }
    return fold_sums(sums);
}

static void
finish_pool(const smla_pool *pool, int64_t dim, const smla_pool_norm *norm, const float *cos_sin,
            uint16_t *key)
{
    float x[SMLA_V4_HEAD_DIM];
    divide_pool(pool, dim, x);
    const float factor = 1.0f / sqrtf(sum_float_squares(x, dim) / (float)dim + norm->eps);
    for (int i = 0; i < dim / QUAD; i++) {
        const int64_t at = (int64_t)i * QUAD;
        const quad weight =
            load_quad(element_at(norm->weight, norm->weight_type, at), norm->weight_type);
        const quad values = scale_quad(load_float(x + at), factor, weight);
        /* turn_part takes quads of a head of 512 values. */
        const int last = HEAD_QUADS - (int)(dim / QUAD);
        store_bf16(turn_part(values, cos_sin, false, last + i), key + at);
    }
}
