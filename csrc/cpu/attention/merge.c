/* merge.c: softmax-weighted merge of two partial attention results over disjoint key sets.
 *
 *   lse = ln(e^lse_a + e^lse_b),  out = f (e^(lse_a - lse) out_a + e^(lse_b - lse) out_b)
 *
 * f = 1 / (1 + e^(sink - lse)), or 1 without a sink. From token merged_tokens on, b is all.
 */
#include <math.h>

#include "core/fp_mode.h"
#include "core/params_attention.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"
#include "cpu/norm/norm.h"

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

static const uint8_t *
row_in(const smla_merge_params *p, int side, int64_t token, int64_t head, int64_t bytes)
{
    return (const uint8_t *)p->out_in[side] +
           (token * p->out_in_stride_token[side] + head * p->out_in_stride_head[side]) * bytes;
}

static void
merge_row(const smla_norm_isa *norm, const smla_merge_params *p, int64_t token, int64_t head)
{
    const int64_t bytes = p->type == SMLA_FLOAT_FP32 ? 4 : 2;
    const bool takes_b = token >= p->merged_tokens;
    const double lse[2] = {takes_b ? -INFINITY : read_lse(p, 0, token, head),
                           read_lse(p, 1, token, head)};
    const uint8_t *const rows[2] = {row_in(p, 0, token, head, bytes),
                                    row_in(p, 1, token, head, bytes)};
    uint8_t *const out =
        (uint8_t *)p->out + (token * p->out_stride_token + head * p->out_stride_head) * bytes;
    float *merged = p->lse + token * p->lse_stride_token + head * p->lse_stride_head;
    /* An empty side is ignored, whatever its rows hold. If both sides are empty, side 0 is copied,
     * whatever the sink is. */
    if (isinf(lse[0]) || isinf(lse[1])) {
        const int side = isinf(lse[1]) && !takes_b ? 0 : 1;
        const float weights[2] = {isinf(lse[side]) ? 1.0f : (float)find_factor(p, head, lse[side]),
                                  0.0f};
        *merged = (float)lse[side];
        const smla_fp_mode before = smla_fp_change(SMLA_FP_EXACT); /* a copy keeps every value */
        norm->add_weighted(rows[side], NULL, weights, p->type, p->value_dim, out);
        smla_fp_change(before);
        return;
    }
    const double top = fmax(lse[0], lse[1]);
    const double sum = exp(lse[0] - top) + exp(lse[1] - top);
    const double total = top + log(sum);
    const double factor = find_factor(p, head, total) / sum;
    const float weights[2] = {(float)(exp(lse[0] - top) * factor),
                              (float)(exp(lse[1] - top) * factor)};
    *merged = (float)total;
    norm->add_weighted(rows[0], rows[1], weights, p->type, p->value_dim, out);
}

smla_status
smla_cpu_merge_attn_states(const smla_merge_params *p, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa("merge_attn_states", &isa, error));
    const int64_t num_rows = p->num_tokens * p->num_heads;
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
#pragma omp parallel for schedule(static) if (num_rows >= 64)
    for (int64_t row = 0; row < num_rows; row++) {
        merge_row(isa->norm, p, row / p->num_heads, row % p->num_heads);
    }
    smla_fp_change(before);
    return SMLA_OK;
}
