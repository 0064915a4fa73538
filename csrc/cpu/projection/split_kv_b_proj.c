/* split_kv_b_proj.c: splits kv_b_proj into W_UK and W_UV. */
#include "core/numeric.h"
#include "core/params_projection.h"
#include "cpu/cpu.h"
#include "cpu/machine/threads.h"

static uint16_t
read_weight(const smla_split_kv_b_proj_params *p, int64_t latent, int64_t column)
{
    const int64_t at = latent * p->stride_in + column * p->stride_out;
    if (p->type == SMLA_FLOAT_BF16 && p->scale == NULL) {
        return ((const uint16_t *)p->weight)[at];
    }
    float value = smla_cpu_load_float(p->weight, p->type, at);
    if (p->scale != NULL) {
        value *= p->scale[latent / SMLA_SCALE_TILE * p->scale_stride_in +
                          column / SMLA_SCALE_TILE * p->scale_stride_out];
    }
    return smla_float_to_bf16(value);
}

smla_status
smla_cpu_split_kv_b_proj(const smla_split_kv_b_proj_params *p, smla_error *error)
{
    (void)error;
#pragma omp parallel for schedule(static)
    for (int64_t latent = 0; latent < SMLA_KV_LORA_RANK; latent++) {
        for (int64_t head = 0; head < p->num_heads; head++) {
            const int64_t column = head * (p->nope_dim + p->value_dim);
            uint16_t *w_uk = p->w_uk + latent * p->w_uk_stride_in + head * p->w_uk_stride_head;
            uint16_t *w_uv = p->w_uv + latent * p->w_uv_stride_in + head * p->w_uv_stride_head;
            for (int64_t i = 0; i < p->nope_dim; i++) {
                w_uk[i] = read_weight(p, latent, column + i);
            }
            for (int64_t i = 0; i < p->value_dim; i++) {
                w_uv[i] = read_weight(p, latent, column + p->nope_dim + i);
            }
        }
    }
    return SMLA_OK;
}
