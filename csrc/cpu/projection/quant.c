/* quant.c: dynamic per-tensor quantisation to e4m3, byte-exact.
 *
 *   scale = max(amax, 1e-10) / 448,  out = satE4M3(x / scale)
 *
 * amax ignores NaN and takes an infinity as FLT_MAX, as the cache write does. The arrays are cut
 * into pieces of rows, which cache_kernel.h takes. Where elements are apart, a piece is copied.
 */
#include "core/fp_mode.h"
#include "core/quant_dims.h"
#include "cpu/cache/cache.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

/* ---- Pieces -------------------------------------------------------------------------------- */

enum {
    PIECE = 4096,   /* elements */
    COPIED = 1024,  /* elements of a piece that is copied */
    SHORT_ROW = 32, /* elements; where the last dimension has fewer, the longest takes its place */
};

typedef struct quant_piece {
    int64_t x;   /* first element in x */
    int64_t out; /* first element in out */
    int64_t count;
} quant_piece;

static int64_t
piece_size(const smla_quant_params *p)
{
    const int last = p->ndim - 1;
    return p->x_strides[last] == 1 && p->out_strides[last] == 1 ? PIECE : COPIED;
}

static int64_t
pieces_per_row(const smla_quant_params *p)
{
    return (p->shape[p->ndim - 1] + piece_size(p) - 1) / piece_size(p);
}

static void
swap(int64_t *a, int64_t *b)
{
    const int64_t old = *a;
    *a = *b;
    *b = old;
}

/* The dimensions with long rows: no result depends on the order of elements. */
static smla_quant_params
choose_rows(const smla_quant_params *params)
{
    smla_quant_params p = smla_merge_dims(params);
    const int last = p.ndim - 1;
    for (int i = 0; i < last && p.shape[last] < SHORT_ROW; i++) {
        if (p.shape[i] > p.shape[last]) {
            swap(&p.shape[i], &p.shape[last]);
            swap(&p.x_strides[i], &p.x_strides[last]);
            swap(&p.out_strides[i], &p.out_strides[last]);
        }
    }
    return p;
}

static quant_piece
find_piece(const smla_quant_params *p, int64_t index)
{
    const int last = p->ndim - 1;
    const int64_t row_pieces = pieces_per_row(p);
    int64_t row = row_pieces == 1 ? index : index / row_pieces; /* divisions take time */
    const int64_t start = (index - row * row_pieces) * piece_size(p);
    const int64_t left = p->shape[last] - start;
    quant_piece piece = {
        .x = start * p->x_strides[last],
        .out = start * p->out_strides[last],
        .count = left < piece_size(p) ? left : piece_size(p),
    };
    for (int i = last - 1; i > 0; i--) {
        piece.x += row % p->shape[i] * p->x_strides[i];
        piece.out += row % p->shape[i] * p->out_strides[i];
        row /= p->shape[i];
    }
    if (last > 0) {
        piece.x += row * p->x_strides[0];
        piece.out += row * p->out_strides[0];
    }
    return piece;
}

/* ---- One piece ----------------------------------------------------------------------------- */

/* Copies the elements of a piece whose elements are apart. */
static void
copy_piece(const smla_quant_params *p, quant_piece piece, uint32_t copy[COPIED])
{
    const int64_t step = p->x_strides[p->ndim - 1];
    if (p->type == SMLA_FLOAT_FP32) {
        const uint32_t *const from = (const uint32_t *)p->x + piece.x;
        for (int64_t i = 0; i < piece.count; i++) {
            copy[i] = from[i * step];
        }
        return;
    }
    const uint16_t *const from = (const uint16_t *)p->x + piece.x;
    uint16_t *const to = (uint16_t *)(void *)copy;
    for (int64_t i = 0; i < piece.count; i++) {
        to[i] = from[i * step];
    }
}

static float
find_amax(const smla_cache_isa *cache, const smla_quant_params *p, quant_piece piece)
{
    uint32_t copy[COPIED];
    if (p->x_strides[p->ndim - 1] == 1) {
        return cache->find_amax(p->x, p->type, piece.x, piece.count);
    }
    copy_piece(p, piece, copy);
    return cache->find_amax(copy, p->type, 0, piece.count);
}

static void
quantize(const smla_cache_isa *cache, const smla_quant_params *p, quant_piece piece, float scale)
{
    const int64_t step = p->x_strides[p->ndim - 1];
    const int64_t out_step = p->out_strides[p->ndim - 1];
    uint8_t *const out = p->out + piece.out;
    uint8_t codes[COPIED];
    uint32_t copy[COPIED];
    if (step == 1 && out_step == 1) {
        cache->quantize(p->x, p->type, piece.x, piece.count, scale, out);
        return;
    }
    if (step != 1) {
        copy_piece(p, piece, copy);
    }
    cache->quantize(step == 1 ? p->x : copy, p->type, step == 1 ? piece.x : 0, piece.count, scale,
                    codes);
    for (int64_t i = 0; i < piece.count; i++) {
        out[i * out_step] = codes[i];
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
    const smla_quant_params p = choose_rows(params);
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
