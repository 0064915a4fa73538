/* quant.c: dynamic per-tensor quantisation to e4m3, byte-exact.
 *
 *   scale = max(amax, 1e-10) / 448,  out = satE4M3(x / scale)
 *
 * amax ignores NaN and takes an infinity as FLT_MAX, as the cache write does. The arrays are cut
 * into pieces of rows. Pieces that are contiguous in x and in out go to cache_kernel.h.
 */
#include "core/fp_mode.h"
#include "core/quant_dims.h"
#include "cpu/cache/cache.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

/* ---- Pieces -------------------------------------------------------------------------------- */

enum { PIECE = 4096 }; /* elements */

typedef struct quant_piece {
    int64_t x;   /* first element in x */
    int64_t out; /* first element in out */
    int64_t count;
} quant_piece;

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

/* ---- All pieces ---------------------------------------------------------------------------- */

smla_status
smla_cpu_dynamic_per_tensor_quant(const smla_quant_params *params, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("dynamic_per_tensor_quant", &isa, error));
    const int64_t count = smla_count_elements(params);
    float amax = 1e-10f;
    if (count == 0) {
        *params->scale = amax / SMLA_E4M3_MAX;
        return SMLA_OK;
    }
    const smla_quant_params p = smla_merge_dims(params);
    const int64_t num_pieces = count / p.shape[p.ndim - 1] * pieces_per_row(&p);
    /* A maximum does not depend on the order it is taken in. */
#pragma omp parallel for schedule(static) reduction(max : amax) if (count >= 1 << 14)
    for (int64_t i = 0; i < num_pieces; i++) {
        const float found = find_amax(isa->cache, &p, find_piece(&p, i));
        amax = found > amax ? found : amax;
    }
    const float scale = amax / SMLA_E4M3_MAX;
    *p.scale = scale;
    /* The scale is at least 2^-43, so a subnormal value is far below half of the smallest code. */
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
#pragma omp parallel for schedule(static) if (count >= 1 << 14)
    for (int64_t i = 0; i < num_pieces; i++) {
        quantize(isa->cache, &p, find_piece(&p, i), scale);
    }
    smla_fp_change(before);
    return SMLA_OK;
}
