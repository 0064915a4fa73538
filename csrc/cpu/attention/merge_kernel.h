/* merge_kernel.h: weighted sums of rows, for one instruction set. norm_kernel.c includes it.
 *
 * Computes     add_weighted       out = weights[0] * rows[0] + weights[1] * rows[1] + ...
 * Shapes       rows and out [count] of bf16, fp16 or fp32, contiguous, of any alignment; out has
 *              the rows' type, or is bf16 or fp16 where they are fp32; out may be one of the rows
 * Roofline     Memory binds.
 * Numerics     fp32, each operation rounded, in the order of the rows, in SMLA_FP_FLUSH: what is
 *              below 2^-126 is zero. Only rows that have no other values are added as they are, in
 *              units of 2^-149. A result that is NaN keeps its sign as bf16.
 * Source       vLLM, for the formula of two rows.
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

enum { MERGED_DUOS = 4 };

/* `left` values, or a whole duo, times the row's weight. */
SMLA_INLINE duo
weigh_duo(const uint8_t *row, float weight, smla_float_type type, int64_t left, bool is_subnormal)
{
    duo x = left < DUO ? load_part_of_duo(row, type, left) : load_duo(row, type);
    if (is_subnormal) {
        x = (duo){count_units(x.even), count_units(x.odd)};
    }
    return (duo){weight * x.even, weight * x.odd};
}

/* Stores the sums of the rows' values from value `i` on: of `num_duos` duos, which share a row's
 * address, or of `left` values of one. */
SMLA_INLINE void
add_duos(const smla_weighted_rows *rows, int64_t num_rows, smla_float_type type, int64_t i,
         const int num_duos, int64_t left, smla_float_type out_type, bool is_subnormal,
         uint8_t *out)
{
    duo sums[MERGED_DUOS];
    for (int j = 0; j < num_duos; j++) {
        sums[j] = weigh_duo(element_at(rows->rows[0], type, i + j * DUO), rows->weights[0], type,
                            left, is_subnormal);
    }
    for (int64_t k = 1; k < num_rows; k++) {
        const uint8_t *const row = element_at(rows->rows[k], type, i);
        for (int j = 0; j < num_duos; j++) {
            const duo x = weigh_duo(element_at(row, type, j * DUO), rows->weights[k], type, left,
                                    is_subnormal);
            sums[j] = (duo){sums[j].even + x.even, sums[j].odd + x.odd};
        }
    }
    for (int j = 0; j < num_duos; j++) {
        const duo sum =
            is_subnormal ? (duo){join_units(sums[j].even), join_units(sums[j].odd)} : sums[j];
        uint8_t *const to = out + (i + j * DUO) * element_bytes(out_type);
        if (left < DUO) {
            store_part_of_duo(sum, out_type, left, to);
        } else {
            store_duo(sum, out_type, to);
        }
    }
}

SMLA_INLINE void
add_rows(const smla_weighted_rows *rows, int64_t num_rows, smla_float_type type, int64_t count,
         smla_float_type out_type, bool is_subnormal, uint8_t *out)
{
    int64_t i = 0;
    for (; num_rows > 2 && i + MERGED_DUOS * DUO <= count; i += MERGED_DUOS * DUO) {
        add_duos(rows, num_rows, type, i, MERGED_DUOS, DUO, out_type, is_subnormal, out);
    }
    for (; i + DUO <= count; i += DUO) {
        add_duos(rows, num_rows, type, i, 1, DUO, out_type, is_subnormal, out);
    }
    if (i < count) {
        add_duos(rows, num_rows, type, i, 1, count - i, out_type, is_subnormal, out);
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
add_rows_of(const smla_weighted_rows *rows, int64_t num_rows, smla_float_type type, int64_t count,
            smla_float_type out_type, void *out)
{
    bool is_subnormal = true;
    for (int64_t k = 0; is_subnormal && k < num_rows; k++) {
        is_subnormal = is_subnormal_row(rows->rows[k], type, count);
    }
    if (is_subnormal) {
        add_rows(rows, num_rows, type, count, out_type, true, out);
    } else {
        add_rows(rows, num_rows, type, count, out_type, false, out);
    }
}

/* One row, two rows and more have loops of their own. */
SMLA_INLINE void
add_rows_by(const smla_weighted_rows *rows, smla_float_type type, int64_t count,
            smla_float_type out_type, void *out)
{
    switch (rows->num_rows) {
    case 1: add_rows_of(rows, 1, type, count, out_type, out); return;
    case 2: add_rows_of(rows, 2, type, count, out_type, out); return;
    default: add_rows_of(rows, rows->num_rows, type, count, out_type, out);
    }
}

/* So do the types. */
static void
add_weighted(const smla_weighted_rows *rows, int64_t count, smla_float_type out_type, void *out)
{
    if (rows->type == SMLA_FLOAT_BF16) {
        add_rows_by(rows, SMLA_FLOAT_BF16, count, SMLA_FLOAT_BF16, out);
    } else if (rows->type == SMLA_FLOAT_FP16) {
        add_rows_by(rows, SMLA_FLOAT_FP16, count, SMLA_FLOAT_FP16, out);
    } else if (out_type == SMLA_FLOAT_BF16) {
        add_rows_by(rows, SMLA_FLOAT_FP32, count, SMLA_FLOAT_BF16, out);
    } else if (out_type == SMLA_FLOAT_FP16) {
        add_rows_by(rows, SMLA_FLOAT_FP32, count, SMLA_FLOAT_FP16, out);
    } else {
        add_rows_by(rows, SMLA_FLOAT_FP32, count, SMLA_FLOAT_FP32, out);
    }
}
