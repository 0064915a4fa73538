/* merge_kernel.h: weighted sums of rows, for one instruction set. norm_kernel.h includes it.
 *
 * Computes     add_weighted       out = weights[0] * rows[0] + weights[1] * rows[1] + ...
 * Shapes       rows and out [count] of bf16, fp16 or fp32, contiguous, of any alignment; out has
 *              the rows' type, or is bf16 where they are fp32; out may be one of the rows
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

/* The sum of the rows' values from value `i` on. */
SMLA_INLINE duo
add_duos(const smla_weighted_rows *rows, int64_t num_rows, smla_float_type type, int64_t i,
         int64_t left, bool is_subnormal)
{
    const uint8_t *const first = element_at(rows->rows[0], type, i);
    duo sum = weigh_duo(first, rows->weights[0], type, left, is_subnormal);
    for (int64_t k = 1; k < num_rows; k++) {
        const uint8_t *const row = element_at(rows->rows[k], type, i);
        const duo x = weigh_duo(row, rows->weights[k], type, left, is_subnormal);
        sum = (duo){sum.even + x.even, sum.odd + x.odd};
    }
    return is_subnormal ? (duo){join_units(sum.even), join_units(sum.odd)} : sum;
}

enum { MERGED_DUOS = 4 };

/* add_duos for MERGED_DUOS duos from value `i` on, which share the look-up of a row. */
SMLA_INLINE void
add_many_duos(const smla_weighted_rows *rows, int64_t num_rows, smla_float_type type, int64_t i,
              duo sums[MERGED_DUOS])
{
    for (int64_t k = 0; k < num_rows; k++) {
        const uint8_t *const row = element_at(rows->rows[k], type, i);
        for (int j = 0; j < MERGED_DUOS; j++) {
            const duo x =
                weigh_duo(element_at(row, type, j * DUO), rows->weights[k], type, DUO, false);
            sums[j] = k == 0 ? x : (duo){sums[j].even + x.even, sums[j].odd + x.odd};
        }
    }
}

SMLA_INLINE void
add_rows(const smla_weighted_rows *rows, int64_t num_rows, smla_float_type type, int64_t count,
         smla_float_type out_type, bool is_subnormal, uint8_t *out)
{
    const int64_t out_bytes = element_bytes(out_type);
    int64_t i = 0;
    if (num_rows > 2 && !is_subnormal) {
        for (; i + MERGED_DUOS * DUO <= count; i += MERGED_DUOS * DUO) {
            duo sums[MERGED_DUOS];
            add_many_duos(rows, num_rows, type, i, sums);
            for (int j = 0; j < MERGED_DUOS; j++) {
                store_duo(sums[j], out_type, out + (i + j * DUO) * out_bytes);
            }
        }
    }
    for (; i + DUO <= count; i += DUO) {
        store_duo(add_duos(rows, num_rows, type, i, DUO, is_subnormal), out_type,
                  out + i * out_bytes);
    }
    if (i < count) {
        store_part_of_duo(add_duos(rows, num_rows, type, i, count - i, is_subnormal), out_type,
                          count - i, out + i * out_bytes);
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
    } else {
        add_rows_by(rows, SMLA_FLOAT_FP32, count, SMLA_FLOAT_FP32, out);
    }
}
