/* quant.c: dynamic per-tensor quantisation to e4m3, byte-exact.
 *
 *   scale = max(amax, 1e-10) / 448,  out = satE4M3(x / scale)
 *
 * NaN has no part in amax and an infinity counts as FLT_MAX, as in the cache write.
 */
#include <assert.h>

#include "cpu.h"
#include "numeric.h"

static int64_t
count_elements(const smla_quant_params *p)
{
    int64_t count = 1;
    for (int i = 0; i < p->ndim; i++) {
        count *= p->shape[i];
    }
    return count;
}

/* Offset of element number `index` (row-major) under `strides`. */
static int64_t
offset_of(const smla_quant_params *p, const int64_t *strides, int64_t index)
{
    int64_t offset = 0;
    assert(p->ndim >= 0 && p->ndim <= SMLA_MAX_RANK);
    for (int i = p->ndim - 1; i >= 0; i--) {
        offset += index % p->shape[i] * strides[i];
        index /= p->shape[i];
    }
    return offset;
}

smla_status
smla_cpu_dynamic_per_tensor_quant(const smla_quant_params *p, smla_error *error)
{
    (void)error;
    const int64_t count = count_elements(p);
    float amax = 1e-10f;
    /* A maximum does not depend on the order it is taken in. */
#pragma omp parallel for schedule(static) reduction(max : amax) if (count >= 1 << 14)
    for (int64_t i = 0; i < count; i++) {
        const float x = smla_cpu_load_float(p->x, p->type, offset_of(p, p->x_strides, i));
        const float magnitude = smla_finite_abs(x);
        amax = magnitude > amax ? magnitude : amax;
    }
    const float scale = amax / SMLA_E4M3_MAX;
    *p->scale = scale;
#pragma omp parallel for schedule(static) if (count >= 1 << 14)
    for (int64_t i = 0; i < count; i++) {
        const float x = smla_cpu_load_float(p->x, p->type, offset_of(p, p->x_strides, i));
        p->out[offset_of(p, p->out_strides, i)] = smla_float_to_e4m3(x / scale);
    }
    return SMLA_OK;
}
