/* absorb_kernel.h: one block of the product of two weights, for one instruction set.
 *
 * Computes     out(r,h,l) = sum_n x(r, h D + n) * w[l,h,n] for a block of rows r and latents l of a
 *              head, where D is the values of x per head
 * Shapes       x [rows, H D] and w [L][H][n] in any storage and of any float type, e4m3 values of x
 *              with scales; out [rows][H L] or [H L][rows], bf16 or fp32
 * Scratch      panel [INNER_BLOCK][128 latents] 32 KiB: a piece of w, as fp32
 *              sums  [256 rows][128 latents] fp32   128 KiB
 *              x     [4 rows][INNER_BLOCK]          1 KiB, on the stack
 *              Lanes are latents: the products are those of projection_kernel.c.
 * Roofline     2 * rows * H * L * n FLOP, 26 G for the queries of DeepSeek-V3 and 120 G for its
 *              output, once a model. Converting a row of x takes as long as a 32nd of its products,
 *              and a panel serves 256 rows.
 * Numerics     Every operand is an fp32 number: the value times its scale, rounded once. Values of
 *              a block with a scale above 2^100 are multiples of a power of two, and so are its
 *              sums. Products are summed in fp32 in chains of INNER_BLOCK values, the chains one
 *              after another.
 *              Subnormal numbers are kept. The order of the sums depends on n alone.
 * Source       register blocking (GotoBLAS).
 *
 * projection_kernel.c includes this file for fp32 units; projection_bf16.h passes the call on to
 * one.
 */
#pragma once

#include "cpu/cpu.h"

/* ---- Operands ------------------------------------------------------------------------------ */

/* Widens `count` values, each of which is `stride` behind the last one. */
SMLA_INLINE void
widen_values(const void *values, smla_float_type type, int64_t at, const int64_t stride, int count,
             float *restrict out)
{
    switch (type) {
    case SMLA_FLOAT_BF16:
        for (int i = 0; i < count; i++) {
            out[i] = smla_bf16_to_float(((const uint16_t *)values)[at + i * stride]);
        }
        break;
    case SMLA_FLOAT_FP16:
        for (int i = 0; i < count; i++) {
            out[i] = smla_half_to_float(((const uint16_t *)values)[at + i * stride]);
        }
        break;
    case SMLA_FLOAT_E4M3:
        for (int i = 0; i < count; i++) {
            out[i] = smla_e4m3_to_float(((const uint8_t *)values)[at + i * stride]);
        }
        break;
    case SMLA_FLOAT_FP32:
        for (int i = 0; i < count; i++) {
            out[i] = ((const float *)values)[at + i * stride];
        }
        break;
    }
}

static void
read_values(const void *values, smla_float_type type, int64_t at, int64_t stride, int count,
            float *restrict out)
{
    if (stride == 1) { /* contiguous values become vectors */
        widen_values(values, type, at, 1, count, out);
    } else {
        widen_values(values, type, at, stride, count, out);
    }
}

/* What a block's values of x are multiples of: 1, unless a value times its scale may be beyond
 * fp32. Its product with w may fit. */
static float
choose_unit(const smla_absorb_params *p, const smla_projection_block *block)
{
    const smla_weight *const x = &p->x;
    const int64_t first = block->head * p->head_columns;
    const int64_t next_row = (int64_t)1 << x->scale_row_bits;
    const int64_t next_column = (int64_t)1 << x->scale_column_bits;
    bool has_huge_scale = false;
    for (int64_t row = block->token; x->scale != NULL && row < block->token + block->num_tokens;
         row = (row / next_row + 1) * next_row) {
        for (int64_t column = first; column < first + p->num_values;
             column = (column / next_column + 1) * next_column) {
            has_huge_scale |= fabsf(smla_scale_of_element(x, row, column)) > 0x1p100f;
        }
    }
    return has_huge_scale ? 0x1p32f : 1.0f;
}

/* Reads `count` columns of a row of x, divided by the unit. */
static void
read_row_of_x(const smla_weight *x, int64_t row, int64_t column, int count, float unit,
              float *restrict out)
{
    const float inverse = 1.0f / unit;
    read_values(x->values, x->type, row * x->stride_row + column * x->stride_column,
                x->stride_column, count, out);
    for (int i = 0; x->scale != NULL && i < count; i++) {
        out[i] *= smla_scale_of_element(x, row, column + i) * inverse;
    }
}

/* Fills panel [num_inner][OUTER_BLOCK] with values of w, and with zeros up to whole steps. */
static void
fill_panel(const smla_absorb_params *p, const smla_projection_block *block, int64_t inner,
           int num_inner, float *restrict panel)
{
    float values[INNER_BLOCK];
    const int end = round_up(block->num_outer, STEP_OUTER);
    for (int n = 0; n < end; n++) {
        memset(values, 0, sizeof values);
        if (n < block->num_outer) {
            read_values(p->w, p->w_type,
                        (block->outer + n) * p->w_stride_latent + block->head * p->w_stride_head +
                            inner * p->w_stride_value,
                        p->w_stride_value, num_inner, values);
        }
        for (int k = 0; k < num_inner; k++) {
            panel[k * OUTER_BLOCK + n] = values[k];
        }
    }
}

/* ---- A block ------------------------------------------------------------------------------- */

/* Adds the products of one panel to the sums of all rows. */
static void
add_panel(const smla_absorb_params *p, const smla_projection_block *block, int64_t inner,
          int num_inner, float unit, const float *panel, float *sums)
{
    static const float ones[ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
    float x[ROWS * X_STRIDE] __attribute__((aligned(64)));
    for (int t = 0; t < block->num_tokens; t += ROWS) {
        const int rows = block->num_tokens - t < ROWS ? block->num_tokens - t : ROWS;
        float *const to = sums + t * OUTER_BLOCK;
        for (int r = 0; r < rows; r++) {
            read_row_of_x(&p->x, block->token + t + r, block->head * p->head_columns + inner,
                          num_inner, unit, x + r * X_STRIDE);
        }
        if (rows == ROWS) {
            multiply_rows(x, panel, num_inner, block->num_outer, ones, to, ROWS);
            continue;
        }
        for (int r = 0; r < rows; r++) {
            multiply_rows(x + r * X_STRIDE, panel, num_inner, block->num_outer, ones,
                          to + r * OUTER_BLOCK, 1);
        }
    }
}

SMLA_INLINE void
store_sum(const smla_absorb_params *p, int64_t at, float sum)
{
    if (p->is_fp32) {
        ((float *)p->out)[at] = sum;
    } else {
        ((uint16_t *)p->out)[at] = smla_float_to_bf16(sum);
    }
}

/* Stores along the result's contiguous dimension. The sums are multiples of the unit. */
static void
store_sums(const smla_absorb_params *p, const smla_projection_block *block, float unit,
           const float *sums)
{
    const int64_t first = block->token * p->out_stride_row + block->head * p->out_stride_head +
                          block->outer * p->out_stride_latent;
    if (p->out_stride_latent == 1) {
        for (int t = 0; t < block->num_tokens; t++) {
            for (int n = 0; n < block->num_outer; n++) {
                store_sum(p, first + t * p->out_stride_row + n, sums[t * OUTER_BLOCK + n] * unit);
            }
        }
        return;
    }
    for (int n = 0; n < block->num_outer; n++) {
        for (int t = 0; t < block->num_tokens; t++) {
            store_sum(p, first + n * p->out_stride_latent + t * p->out_stride_row,
                      sums[t * OUTER_BLOCK + n] * unit);
        }
    }
}

static void
absorb_block(const smla_absorb_params *p, smla_projection_block block, void *scratch)
{
    float *const panel = __builtin_assume_aligned(scratch, 64);
    float *const sums =
        __builtin_assume_aligned((uint8_t *)scratch + SMLA_PROJECTION_PANEL_BYTES, 64);
    const float unit = choose_unit(p, &block);
    memset(sums, 0, (size_t)block.num_tokens * SMLA_PROJECTION_SUM_BYTES);
    for (int64_t inner = 0; inner < p->num_values; inner += INNER_BLOCK) {
        const int64_t left = p->num_values - inner;
        const int num_inner = left < INNER_BLOCK ? (int)left : INNER_BLOCK;
        fill_panel(p, &block, inner, num_inner, panel);
        add_panel(p, &block, inner, num_inner, unit, panel, sums);
    }
    store_sums(p, &block, unit, sums);
}
