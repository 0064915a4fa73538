/* merge.c: softmax-weighted merges of partial attention results over disjoint key sets.
 *
 *   lse = ln(sum of e^lse_i),  out = f (sum of e^(lse_i - lse) out_i)
 *
 * f = 1 / (1 + e^(sink - lse)), or 1 without a sink.
 */
#include <math.h>

#include "core/fp_mode.h"
#include "cpu/attention/attention.h"
#include "cpu/cpu.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"
#include "cpu/norm/norm.h"

/* The parts of a row that have keys. */
typedef struct row_parts {
    smla_weighted_rows rows;
    double lse[SMLA_MAX_PARTS];
} row_parts;

/* The lse of an empty part is -inf; some kernels write +inf instead. */
static double
read_lse(const smla_merge_part *part, int64_t token, int64_t head)
{
    const float lse = part->lse[token * part->lse_stride_token + head * part->lse_stride_head];
    return isinf(lse) ? -INFINITY : (double)lse;
}

/* The sink's factor of a row whose merged lse is `lse`. */
static double
find_factor(const smla_merge_rows *m, int64_t head, double lse)
{
    if (m->sinks.values == NULL || isinf(lse)) {
        return 1.0;
    }
    return 1.0 / (1.0 + exp(m->sinks.values[head * m->sinks.stride] - lse));
}

static void
take_part(row_parts *taken, const smla_merge_part *part, int64_t token, int64_t head, double lse)
{
    const int64_t bytes = taken->rows.type == SMLA_FLOAT_FP32 ? 4 : 2;
    const int64_t at = token * part->out_stride_token + head * part->out_stride_head;
    taken->rows.rows[taken->rows.num_rows] = (const uint8_t *)part->out + at * bytes;
    taken->lse[taken->rows.num_rows] = lse;
    taken->rows.num_rows++;
}

/* An empty part is left out, whatever its row holds. If all are empty, the first is taken. */
static void
take_parts(row_parts *taken, const smla_merge_part *parts, int64_t num_parts, int64_t token,
           int64_t head)
{
    taken->rows.num_rows = 0;
    for (int64_t i = 0; i < num_parts; i++) {
        const double lse = read_lse(&parts[i], token, head);
        if (!isinf(lse)) {
            take_part(taken, &parts[i], token, head, lse);
        }
    }
    if (taken->rows.num_rows == 0) {
        take_part(taken, &parts[0], token, head, -INFINITY);
    }
}

/* Weighs two parts or more. Returns their lse. */
static double
weigh_parts(const smla_merge_rows *m, int64_t head, row_parts *taken)
{
    double top = taken->lse[0];
    for (int64_t i = 1; i < taken->rows.num_rows; i++) {
        top = fmax(top, taken->lse[i]);
    }
    double sum = 0.0;
    for (int64_t i = 0; i < taken->rows.num_rows; i++) {
        taken->lse[i] = exp(taken->lse[i] - top);
        sum += taken->lse[i];
    }
    const double lse = top + log(sum);
    const double factor = find_factor(m, head, lse) / sum;
    for (int64_t i = 0; i < taken->rows.num_rows; i++) {
        taken->rows.weights[i] = (float)(taken->lse[i] * factor);
    }
    return lse;
}

void
smla_cpu_merge_row(const smla_norm_isa *norm, const smla_merge_rows *m,
                   const smla_merge_part *parts, int64_t num_parts, int64_t token, int64_t head)
{
    const int64_t out_bytes = m->out_type == SMLA_FLOAT_FP32 ? 4 : 2;
    uint8_t *const out =
        (uint8_t *)m->out + (token * m->out_stride_token + head * m->out_stride_head) * out_bytes;
    float *const merged = m->lse + token * m->lse_stride_token + head * m->lse_stride_head;
    row_parts taken;
    taken.rows.type = m->type;
    take_parts(&taken, parts, num_parts, token, head);
    if (taken.rows.num_rows > 1) {
        *merged = (float)weigh_parts(m, head, &taken);
        norm->add_weighted(&taken.rows, m->value_dim, m->out_type, out);
        return;
    }
    taken.rows.weights[0] = (float)find_factor(m, head, taken.lse[0]);
    *merged = (float)taken.lse[0];
    const smla_fp_mode before = smla_fp_change(SMLA_FP_EXACT); /* a copy keeps every value */
    norm->add_weighted(&taken.rows, m->value_dim, m->out_type, out);
    smla_fp_change(before);
}

/* Tokens from `merged_tokens` on have no first part. */
static smla_status
merge_rows(const char *op, const smla_merge_rows *m, const smla_merge_part *parts,
           int64_t num_parts, int64_t merged_tokens, smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(op, &isa, error));
    const int64_t num_rows = m->num_tokens * m->num_heads;
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
#pragma omp parallel for schedule(static) if (num_rows >= 64)
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t token = row / m->num_heads;
        const int64_t skipped = token >= merged_tokens ? 1 : 0;
        smla_cpu_merge_row(isa->norm, m, parts + skipped, num_parts - skipped, token,
                           row % m->num_heads);
    }
    smla_fp_change(before);
    return SMLA_OK;
}

smla_status
smla_cpu_merge_attn_states(const smla_merge_params *p, smla_error *error)
{
    return merge_rows(p->call.op, &p->rows, p->parts, 2, p->merged_tokens, error);
}

smla_status
smla_cpu_merge_attn_partials(const smla_merge_partials_params *p, smla_error *error)
{
    return merge_rows(p->call.op, &p->rows, p->parts, p->num_parts, INT64_MAX, error);
}
