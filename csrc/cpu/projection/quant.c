/* quant.c: dynamic per-tensor quantisation to e4m3, byte-exact.
 *
 *   scale = max(amax, 1e-10) / 448,  out = satE4M3(x / scale)
 *
 * amax ignores NaN and takes an infinity as FLT_MAX, as the cache write does. The arrays are cut
 * into pieces of rows, which cache_kernel.c takes. Where elements or short rows are apart, a piece
 * is copied.
 */
#include "core/fp_mode.h"
#include "core/quant_dims.h"
#include "cpu/cache/cache.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"
#include "cpu/projection/copy_rows.h"

/* ---- Pieces -------------------------------------------------------------------------------- */

enum {
    PIECE = 4096,    /* elements */
    COPIED = 1024,   /* elements of a piece that is copied */
    SHORT_ROW = 128, /* elements; where the last dimension has fewer, a piece has several rows */
};

/* What is quantised. Each element of `p` stands for `width` contiguous ones: 1, or a short row. */
typedef struct quant_plan {
    smla_quant_params p;
    int64_t width;
} quant_plan;

typedef struct quant_piece {
    int64_t x;   /* first element in x */
    int64_t out; /* first element in out */
    int64_t count;
} quant_piece;

static int64_t
piece_size(const quant_plan *plan)
{
    const int last = plan->p.ndim - 1;
    return plan->p.x_strides[last] == 1 && plan->p.out_strides[last] == 1 ? PIECE
                                                                          : COPIED / plan->width;
}

static int64_t
pieces_per_row(const quant_plan *plan)
{
    return (plan->p.shape[plan->p.ndim - 1] + piece_size(plan) - 1) / piece_size(plan);
}

static void
swap(int64_t *a, int64_t *b)
{
    const int64_t old = *a;
    *a = *b;
    *b = old;
}

/* The dimensions with long rows: no result depends on the order of elements. */
static quant_plan
plan_rows(const smla_quant_params *params)
{
    quant_plan plan = {.p = smla_merge_dims(params), .width = 1};
    smla_quant_params *const p = &plan.p;
    int last = p->ndim - 1;
    if (last > 0 && p->shape[last] < SHORT_ROW && p->x_strides[last] == 1 &&
        p->out_strides[last] == 1) {
        plan.width = p->shape[last];
        p->ndim = last--;
    }
    for (int i = 0; i < last && p->shape[last] < SHORT_ROW; i++) {
        if (p->shape[i] > p->shape[last]) {
            swap(&p->shape[i], &p->shape[last]);
            swap(&p->x_strides[i], &p->x_strides[last]);
            swap(&p->out_strides[i], &p->out_strides[last]);
        }
    }
    return plan;
}

static quant_piece
find_piece(const quant_plan *plan, int64_t index)
{
    const smla_quant_params *const p = &plan->p;
    const int last = p->ndim - 1;
    const int64_t row_pieces = pieces_per_row(plan);
    int64_t row = row_pieces == 1 ? index : index / row_pieces; /* divisions take time */
    const int64_t start = (index - row * row_pieces) * piece_size(plan);
    const int64_t left = p->shape[last] - start;
    quant_piece piece = {
        .x = start * p->x_strides[last],
        .out = start * p->out_strides[last],
        .count = left < piece_size(plan) ? left : piece_size(plan),
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

/* The values of a piece in a row: those of x, or a copy where they are apart. */
static const void *
join_values(const quant_plan *plan, quant_piece piece, uint32_t copy[COPIED])
{
    const int64_t size = plan->p.type == SMLA_FLOAT_FP32 ? 4 : 2;
    const int64_t step = plan->p.x_strides[plan->p.ndim - 1];
    const uint8_t *const x = (const uint8_t *)plan->p.x + piece.x * size;
    if (step == plan->width) {
        return x;
    }
    copy_rows(x, step * size, copy, plan->width * size, plan->width * size, piece.count);
    return copy;
}

static float
find_amax(const smla_cache_isa *cache, const quant_plan *plan, quant_piece piece)
{
    uint32_t copy[COPIED];
    return cache->find_amax(join_values(plan, piece, copy), plan->p.type, 0,
                            piece.count * plan->width);
}

static void
quantize(const smla_cache_isa *cache, const quant_plan *plan, quant_piece piece, float scale)
{
    const int64_t step = plan->p.out_strides[plan->p.ndim - 1];
    uint8_t *const out = plan->p.out + piece.out;
    uint8_t codes[COPIED];
    uint32_t copy[COPIED];
    cache->quantize(join_values(plan, piece, copy), plan->p.type, 0, piece.count * plan->width,
                    scale, step == plan->width ? out : codes);
    if (step != plan->width) {
        copy_rows(codes, plan->width, out, step, plan->width, piece.count);
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
    const quant_plan plan = plan_rows(params);
    const int64_t row = plan.p.shape[plan.p.ndim - 1] * plan.width;
    const int64_t num_pieces = count / row * pieces_per_row(&plan);
    /* A maximum does not depend on the order it is taken in. */
#pragma omp parallel for schedule(static) reduction(max : amax) if (count >= 1 << 14)
    for (int64_t i = 0; i < num_pieces; i++) {
        const float found = find_amax(isa->cache, &plan, find_piece(&plan, i));
        amax = found > amax ? found : amax;
    }
    const float scale = amax / SMLA_E4M3_MAX;
    *params->scale = scale;
    /* The scale is at least 2^-43, so a subnormal value is far below half of the smallest code. */
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
#pragma omp parallel for schedule(static) if (count >= 1 << 14)
    for (int64_t i = 0; i < num_pieces; i++) {
        quantize(isa->cache, &plan, find_piece(&plan, i), scale);
    }
    smla_fp_change(before);
    return SMLA_OK;
}
