/* quant_dims.h: merges the dimensions of dynamic_per_tensor_quant's arrays, for every backend.
 * Compiles as C and as CUDA.
 */
#pragma once

#include "core/backend.h"
#include "core/params_projection.h"

static inline int64_t
smla_count_elements(const smla_quant_params *p)
{
    int64_t count = 1;
    for (int i = 0; i < p->ndim; i++) {
        count *= p->shape[i];
    }
    return count;
}

/* Whether outer is inner * size, without the product, which could overflow. */
static inline bool
smla_dim_continues(int64_t outer, int64_t inner, int64_t size)
{
    return outer % size == 0 && outer / size == inner;
}

/* The same elements in the same order with the fewest dimensions, but at least one. Contiguous
 * arrays become a single row. No size may be 0. */
static inline smla_quant_params
smla_merge_dims(const smla_quant_params *p)
{
    smla_quant_params merged = *p;
    int last = -1;
    for (int i = 0; i < p->ndim; i++) {
        const int64_t size = p->shape[i];
        if (size == 1) {
            continue;
        }
        const bool is_same_row =
            last >= 0 && smla_dim_continues(merged.x_strides[last], p->x_strides[i], size) &&
            smla_dim_continues(merged.out_strides[last], p->out_strides[i], size);
        last += is_same_row ? 0 : 1;
        merged.shape[last] = is_same_row ? merged.shape[last] * size : size;
        merged.x_strides[last] = p->x_strides[i];
        merged.out_strides[last] = p->out_strides[i];
    }
    if (last < 0) {
        last = 0;
        merged.shape[0] = merged.x_strides[0] = merged.out_strides[0] = 1;
    }
    merged.ndim = last + 1;
    return merged;
}
