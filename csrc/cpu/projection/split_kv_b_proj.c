/* split_kv_b_proj.c: splits kv_b_proj, or another weight, into two parts of each head. */
#include "core/numeric.h"
#include "core/projection_scale.h"
#include "cpu/cpu.h"
#include "cpu/machine/threads.h"

/* Copies `count` columns of a row from `column` on. */
static void
copy_columns(const smla_split_kv_b_proj_params *p, int64_t row, int64_t column, int64_t count,
             void *part, int64_t at)
{
    const smla_weight *const w = &p->weight;
    const bool is_copy = w->type == SMLA_FLOAT_BF16 && w->scale == NULL && !p->is_fp32;
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = row * w->stride_row + (column + i) * w->stride_column;
        if (is_copy) {
            ((uint16_t *)part)[at + i] = ((const uint16_t *)w->values)[from];
            continue;
        }
        float value = smla_cpu_load_float(w->values, w->type, from);
        if (w->scale != NULL) {
            value *= smla_scale_of_element(w, row, column + i);
        }
        if (p->is_fp32) {
            ((float *)part)[at + i] = value;
        } else {
            ((uint16_t *)part)[at + i] = smla_float_to_bf16(value);
        }
    }
}

smla_status
smla_cpu_split_kv_b_proj(const smla_split_kv_b_proj_params *p, smla_error *error)
{
    (void)error;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < p->num_rows; row++) {
        for (int64_t head = 0; head < p->num_heads; head++) {
            const int64_t column = head * (p->nope_dim + p->value_dim);
            copy_columns(p, row, column, p->nope_dim, p->w_uk,
                         row * p->w_uk_stride_in + head * p->w_uk_stride_head);
            copy_columns(p, row, column + p->nope_dim, p->value_dim, p->w_uv,
                         row * p->w_uv_stride_in + head * p->w_uv_stride_head);
        }
    }
    return SMLA_OK;
}
