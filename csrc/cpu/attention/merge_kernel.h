/* merge_kernel.h: weighted sums of rows, for one instruction set. norm_kernel.h includes it.
 *
 * Computes     add_weighted       out = weights[0] * a + weights[1] * b; without b, weights[0] * a
 * Shapes       a, b, out [count] of bf16, fp16 or fp32, contiguous, of any alignment; out may be a
 *              or b
 * Roofline     Memory binds.
 * Numerics     fp32, each operation rounded, in SMLA_FP_FLUSH: what is below 2^-126 is zero. Only
 *              rows that have no other values are added as they are, in units of 2^-149. A result
 *              that is NaN keeps its sign as bf16.
 * Source       vLLM, for the formula.
 */
#pragma once

/* A subnormal number in units of 2^-149, which its bits count. */
SMLA_INLINE vfloat
count_units(vfloat x)
{
    const vfloat count = __builtin_convertvector((vint)((vuint)x & 0x7FFFFFFFu), vfloat);
    return (vfloat)((vuint)count | ((vuint)x & 0x80000000u));
}

/* The inverse, rounded: the last bit of the sum with 2^23 is 1. */
SMLA_INLINE vfloat
join_units(vfloat count)
{
    const vuint sign = (vuint)count & 0x80000000u;
    const vfloat sum = (vfloat)((vuint)count ^ sign) + 0x1p23f;
    return (vfloat)(((vuint)sum - 0x4B000000u) | sign); /* the bits of 2^23 */
}

SMLA_INLINE vfloat
weigh_lanes(vfloat a, vfloat b, const float weights[2], bool is_subnormal)
{
    if (is_subnormal) {
        return join_units(weights[0] * count_units(a) + weights[1] * count_units(b));
    }
    return weights[0] * a + weights[1] * b;
}

SMLA_INLINE void
add_weighted_duo(const void *a, const void *b, const float weights[2], smla_float_type type,
                 bool is_subnormal, void *out)
{
    const duo x = load_duo(a, type);
    const vfloat zero = (vfloat)splat_bits(0x80000000u); /* adding -0 keeps the sign of a zero */
    const duo none = {zero, zero};
    const duo y = b == NULL ? none : load_duo(b, type);
    store_duo((duo){weigh_lanes(x.even, y.even, weights, is_subnormal),
                    weigh_lanes(x.odd, y.odd, weights, is_subnormal)},
              type, out);
}

SMLA_INLINE void
add_weighted_of(const uint8_t *a, const uint8_t *b, const float weights[2], smla_float_type type,
                int64_t count, bool is_subnormal, uint8_t *out)
{
    const int64_t bytes = element_bytes(type);
    int64_t i = 0;
    for (; i + DUO <= count; i += DUO) {
        add_weighted_duo(a + i * bytes, b == NULL ? NULL : b + i * bytes, weights, type,
                         is_subnormal, out + i * bytes);
    }
    if (i < count) {
        uint8_t last[3][DUO * sizeof(float)] = {{0}};
        const size_t left = (size_t)((count - i) * bytes);
        memcpy(last[0], a + i * bytes, left);
        if (b != NULL) {
            memcpy(last[1], b + i * bytes, left);
        }
        add_weighted_duo(last[0], b == NULL ? NULL : last[1], weights, type, is_subnormal, last[2]);
        memcpy(out + i * bytes, last[2], left);
    }
}

/* Whether all values of a row are subnormal or zero. Most rows show in their first values that they
 * are not. */
SMLA_INLINE bool
is_subnormal_row(const uint8_t *x, smla_float_type type, int64_t count)
{
    for (int64_t i = 0; i < count; i += DUO) {
        const uint8_t *const at = element_at(x, type, i);
        const duo values =
            i + DUO <= count ? load_duo(at, type) : load_part_of_duo(at, type, count - i);
        const vuint bits = ((vuint)values.even | (vuint)values.odd) & 0x7F800000u;
        if (has_lane((vint)(bits != 0))) {
            return false;
        }
    }
    return true;
}

SMLA_INLINE void
add_weighted_by(const void *a, const void *b, const float weights[2], smla_float_type type,
                int64_t count, void *out)
{
    if (is_subnormal_row(a, type, count) && (b == NULL || is_subnormal_row(b, type, count))) {
        add_weighted_of(a, b, weights, type, count, true, out);
    } else {
        add_weighted_of(a, b, weights, type, count, false, out);
    }
}

/* Each type, with and without b, has a loop of its own. */
static void
add_weighted(const void *a, const void *b, const float weights[2], smla_float_type type,
             int64_t count, void *out)
{
    if (b == NULL) {
        switch (type) {
        case SMLA_FLOAT_BF16:
            add_weighted_by(a, NULL, weights, SMLA_FLOAT_BF16, count, out);
            return;
        case SMLA_FLOAT_FP16:
            add_weighted_by(a, NULL, weights, SMLA_FLOAT_FP16, count, out);
            return;
        default: add_weighted_by(a, NULL, weights, SMLA_FLOAT_FP32, count, out); return;
        }
    }
    switch (type) {
    case SMLA_FLOAT_BF16: add_weighted_by(a, b, weights, SMLA_FLOAT_BF16, count, out); return;
    case SMLA_FLOAT_FP16: add_weighted_by(a, b, weights, SMLA_FLOAT_FP16, count, out); return;
    default: add_weighted_by(a, b, weights, SMLA_FLOAT_FP32, count, out);
    }
}
