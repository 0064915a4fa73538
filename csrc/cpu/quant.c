/* quant.c: dynamic per-tensor quantisation to e4m3, byte-exact.
 *
 *   scale = max(amax, 1e-10) / 448,  out = satE4M3(x / scale)
 *
 * NaN has no part in amax and an infinity counts as FLT_MAX, as in the cache write. The arrays are
 * cut into pieces of rows; pieces that are contiguous in x and in out go to cache_kernel.h.
 */
#include "cache.h"
#include "cpu.h"
#include "isa.h"

/* ---- Pieces -------------------------------------------------------------------------------- */

enum { PIECE = 4096 }; /* elements */

typedef struct quant_piece {
    int64_t x; /* first element */
    int64_t out;
    int64_t count;
} quant_piece;

static int64_t
count_elements(const smla_quant_params *p)
{
    int64_t count = 1;
    for (int i = 0; i < p->ndim; i++) {
        count *= p->shape[i];
    }
    return count;
}

/* Whether stepping `outer` is `size` steps of `inner`; a product could overflow. */
static bool
continues(int64_t outer, int64_t inner, int64_t size)
{
    return outer % size == 0 && outer / size == inner;
}

/* The same elements in the same order with the fewest dimensions, one at least: contiguous arrays
 * become a single row. No size may be 0. */
static smla_quant_params
merge_dims(const smla_quant_params *p)
{
    smla_quant_params merged = *p;
    int last = -1;
    for (int i = 0; i < p->ndim; i++) {
        const int64_t size = p->shape[i];
        if (size == 1) {
            continue;
        }
        const bool is_same_row = last >= 0 &&
                                 continues(merged.x_strides[last], p->x_strides[i], size) &&
                                 continues(merged.out_strides[last], p->out_strides[i], size);
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

static int64_t
pieces_per_row(const smla_quant_params *p)
{
    return (p->shape[p->ndim - 1] + PIECE - 1) / PIECE;
}

static quant_piece
find_piece(const smla_quant_params *p, int64_t index)
{
    const int last = p->ndim - 1;
    const int64_t start = index % pieces_per_row(p) * PIECE;
    const int64_t left = p->shape[last] - start;
    int64_t row = index / pieces_per_row(p);
    quant_piece piece = {
        .x = start * p->x_strides[last],
        .out = start * p->out_strides[last],
        .count = left < PIECE ? left : PIECE,
    };
    for (int i = last - 1; i >= 0; i--) {
        piece.x += row % p->shape[i] * p->x_strides[i];
        piece.out += row % p->shape[i] * p->out_strides[i];
        row /= p->shape[i];
    }
    return piece;
}

/* ---- One piece ----------------------------------------------------------------------------- */

static float
find_amax(const smla_cache_isa *cache, const smla_quant_params *p, quant_piece piece)
{
    const int64_t step = p->x_strides[p->ndim - 1];
    if (step == 1) {
        return cache->find_amax(p->x, p->type, piece.x, piece.count);
    }
    float amax = 0.0f;
    for (int64_t i = 0; i < piece.count; i++) {
        const float x = smla_cpu_load_float(p->x, p->type, piece.x + i * step);
        const float magnitude = smla_finite_abs(x);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

static void
quantize(const smla_cache_isa *cache, const smla_quant_params *p, quant_piece piece, float scale)
{
    const int64_t step = p->x_strides[p->ndim - 1];
    const int64_t out_step = p->out_strides[p->ndim - 1];
    if (step == 1 && out_step == 1) {
        cache->quantize(p->x, p->type, piece.x, piece.count, scale, p->out + piece.out);
        return;
    }
    for (int64_t i = 0; i < piece.count; i++) {
        const float x = smla_cpu_load_float(p->x, p->type, piece.x + i * step);
        p->out[piece.out + i * out_step] = smla_float_to_e4m3(x / scale);
    }
}

/* ---- All of them --------------------------------------------------------------------------- */

smla_status
smla_cpu_dynamic_per_tensor_quant(const smla_quant_params *params, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("dynamic_per_tensor_quant", &isa, error));
    const int64_t count = count_elements(params);
    float amax = 1e-10f;
    if (count == 0) {
        *params->scale = amax / SMLA_E4M3_MAX;
        return SMLA_OK;
    }
    const smla_quant_params p = merge_dims(params);
    const int64_t num_pieces = count / p.shape[p.ndim - 1] * pieces_per_row(&p);
    /* A maximum does not depend on the order it is taken in. */
#pragma omp parallel for schedule(static) reduction(max : amax) if (count >= 1 << 14)
    for (int64_t i = 0; i < num_pieces; i++) {
        const float found = find_amax(isa->cache, &p, find_piece(&p, i));
        amax = found > amax ? found : amax;
    }
    const float scale = amax / SMLA_E4M3_MAX;
    *p.scale = scale;
#pragma omp parallel for schedule(static) if (count >= 1 << 14)
    for (int64_t i = 0; i < num_pieces; i++) {
        quantize(isa->cache, &p, find_piece(&p, i), scale);
    }
    return SMLA_OK;
}
