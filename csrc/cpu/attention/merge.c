/* merge.c: softmax-weighted merge of two partial attention results over disjoint key sets.
 *
 *   lse = ln(e^lse_a + e^lse_b),  out = f (e^(lse_a - lse) out_a + e^(lse_b - lse) out_b)
 *
 * f = 1 / (1 + e^(sink - lse)), or 1 without a sink.
 */
#include <math.h>

#include "core/numeric.h"
#include "cpu/machine/cpu.h"
#include "cpu/machine/threads.h"

/* An empty side has lse -inf; some kernels write +inf instead. */
static double
read_lse(const smla_merge_params *p, int side, int64_t token, int64_t head)
{
    const float lse =
        p->lse_in[side][token * p->lse_in_stride_token[side] + head * p->lse_in_stride_head[side]];
    return isinf(lse) ? -INFINITY : (double)lse;
}

/* The sink's factor of a row whose merged lse is `lse`. */
static double
find_factor(const smla_merge_params *p, int64_t head, double lse)
{
    if (p->attn_sink == NULL) {
        return 1.0;
    }
    return 1.0 / (1.0 + exp(p->attn_sink[head * p->attn_sink_stride] - lse));
}

static void
store_value(const smla_merge_params *p, int64_t at, float value)
{
    if (p->type == SMLA_FLOAT_BF16) {
        ((uint16_t *)p->out)[at] = smla_float_to_bf16(value);
    } else {
        ((float *)p->out)[at] = value;
    }
}

static void
merge_row(const smla_merge_params *p, int64_t token, int64_t head)
{
    const double lse[2] = {read_lse(p, 0, token, head), read_lse(p, 1, token, head)};
    const int64_t row = token * p->out_stride_token + head * p->out_stride_head;
    const int64_t rows_in[2] = {
        token * p->out_in_stride_token[0] + head * p->out_in_stride_head[0],
        token * p->out_in_stride_token[1] + head * p->out_in_stride_head[1],
    };
    float *merged = p->lse + token * p->lse_stride_token + head * p->lse_stride_head;
    /* An empty side is ignored, whatever its rows hold. If both sides are empty, side 0 is copied,
     * whatever the sink is. */
    if (isinf(lse[0]) || isinf(lse[1])) {
        const int side = isinf(lse[1]) ? 0 : 1;
        const bool is_scaled = p->attn_sink != NULL && !isinf(lse[side]);
        const float factor = is_scaled ? (float)find_factor(p, head, lse[side]) : 1.0f;
        *merged = (float)lse[side];
        for (int64_t i = 0; i < p->value_dim; i++) {
            const float value = smla_cpu_load_float(p->out_in[side], p->type, rows_in[side] + i);
            store_value(p, row + i, is_scaled ? factor * value : value);
        }
        return;
    }
    const double top = fmax(lse[0], lse[1]);
    const double sum = exp(lse[0] - top) + exp(lse[1] - top);
    const double total = top + log(sum);
    const double factor = find_factor(p, head, total) / sum;
    const float weights[2] = {(float)(exp(lse[0] - top) * factor),
                              (float)(exp(lse[1] - top) * factor)};
    *merged = (float)total;
    for (int64_t i = 0; i < p->value_dim; i++) {
        const float a = smla_cpu_load_float(p->out_in[0], p->type, rows_in[0] + i);
        const float b = smla_cpu_load_float(p->out_in[1], p->type, rows_in[1] + i);
        store_value(p, row + i, weights[0] * a + weights[1] * b);
    }
}

smla_status
smla_cpu_merge_attn_states(const smla_merge_params *p, smla_error *error)
{
    (void)error;
    const int64_t num_rows = p->num_tokens * p->num_heads;
#pragma omp parallel for schedule(static) if (num_rows >= 64)
    for (int64_t row = 0; row < num_rows; row++) {
        merge_row(p, row / p->num_heads, row % p->num_heads);
    }
    return SMLA_OK;
}
