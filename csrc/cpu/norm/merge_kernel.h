/* merge_kernel.h: weighted sums of rows, for one instruction set. norm_kernel.h includes it.
 *
 * Computes     add_weighted       out = weights[0] * a + weights[1] * b; without b, weights[0] * a
 * Shapes       a, b, out [count] of bf16 or fp32, contiguous, of any alignment; out may be a or b
 * Roofline     Memory binds.
 * Numerics     fp32, each operation rounded, in SMLA_FP_FLUSH: a product or a weight below 2^-126 is
 *              zero. Values that are all small are not: their sum is computed 2^64 times as large. A
 *              result that is NaN keeps its sign as bf16.
 * Source       vLLM, for the formula.
 */
#pragma once

/* The sums of one vector. Values and sums that are subnormal are rare even among small ones. */
SMLA_INLINE vfloat
weigh_lanes(vfloat a, vfloat b, const float weights[2])
{
    const vfloat sum = weights[0] * a + weights[1] * b;
    const vuint sizes[2] = {(vuint)a & 0x7FFFFFFFu, (vuint)b & 0x7FFFFFFFu};
    const vint is_tiny = max_lanes((vfloat)sizes[0], (vfloat)sizes[1]) < SMLA_TINY;
    if (!has_lane(is_tiny)) {
        return sum;
    }
    vfloat lifted = weights[0] * 0x1p64f * a + weights[1] * 0x1p64f * b;
    if (has_lane((vint)((sizes[0] - 1u < 0x007FFFFFu) | (sizes[1] - 1u < 0x007FFFFFu)))) {
        lifted = weights[0] * lift_lanes(a) + weights[1] * lift_lanes(b);
    }
    const vint is_small = (vfloat)((vuint)lifted & 0x7FFFFFFFu) < 0x1p-62f;
    if (has_lane(is_small)) {
        return select_lanes(is_tiny, lower_lanes(lifted), sum);
    }
    return select_lanes(is_tiny, lifted * 0x1p-64f, sum);
}

/* Stores a duo of bf16 or fp32. */
SMLA_INLINE void
store_duo(duo x, smla_float_type type, void *out)
{
    if (type == SMLA_FLOAT_BF16) {
        store_words(join_upper_halves(round_to_upper_half(x.even), round_to_upper_half(x.odd)), out,
                    0);
    } else {
        store_float_duo(x, out);
    }
}

SMLA_INLINE void
add_weighted_duo(const void *a, const void *b, const float weights[2], smla_float_type type,
                 void *out)
{
    const duo x = load_duo(a, type);
    const vfloat zero = (vfloat)splat_bits(0x80000000u); /* adding -0 keeps the sign of a zero */
    const duo none = {zero, zero};
    const duo y = b == NULL ? none : load_duo(b, type);
    store_duo((duo){weigh_lanes(x.even, y.even, weights), weigh_lanes(x.odd, y.odd, weights)}, type,
              out);
}

SMLA_INLINE void
add_weighted_of(const uint8_t *a, const uint8_t *b, const float weights[2], smla_float_type type,
                int64_t count, uint8_t *out)
{
    const int64_t bytes = element_bytes(type);
    int64_t i = 0;
    for (; i + DUO <= count; i += DUO) {
        add_weighted_duo(a + i * bytes, b == NULL ? NULL : b + i * bytes, weights, type,
                         out + i * bytes);
    }
    if (i < count) {
        uint8_t last[3][DUO * sizeof(float)] = {{0}};
        const size_t left = (size_t)((count - i) * bytes);
        memcpy(last[0], a + i * bytes, left);
        if (b != NULL) {
            memcpy(last[1], b + i * bytes, left);
        }
        add_weighted_duo(last[0], b == NULL ? NULL : last[1], weights, type, last[2]);
        memcpy(out + i * bytes, last[2], left);
    }
}

/* Each type, with and without b, has a loop of its own. */
static void
add_weighted(const void *a, const void *b, const float weights[2], smla_float_type type,
             int64_t count, void *out)
{
    if (type == SMLA_FLOAT_BF16 && b != NULL) {
        add_weighted_of(a, b, weights, SMLA_FLOAT_BF16, count, out);
    } else if (type == SMLA_FLOAT_BF16) {
        add_weighted_of(a, NULL, weights, SMLA_FLOAT_BF16, count, out);
    } else if (b != NULL) {
        add_weighted_of(a, b, weights, SMLA_FLOAT_FP32, count, out);
    } else {
        add_weighted_of(a, NULL, weights, SMLA_FLOAT_FP32, count, out);
    }
}
