/* softmax_lanes.h: what the attention kernels do to lanes, which are query rows: heads of a token
 * in sparse attention, tokens or heads of a group in multi-head attention. Their scores become
 * weights. One or two vectors of lanes are a group.
 *
 * Computes     w_j = 2^(s_j - ref), sum = sum_j w_j, for the scores s_j [key][lanes] of a block
 * Numerics     ref is the running maximum rounded up to an integer, so rescaling by a power of two
 *              is exact however often the maximum grows. `sum` is fp32 inside a block, compensated,
 *              and double across blocks.
 */
#pragma once

#include <float.h>
#include <math.h>
#include <stdbool.h>

#include "core/numeric.h"
#include "cpu/machine/narrow.h"

enum {
    GROUP_VECTORS = 2,
    GROUP_LANES = GROUP_VECTORS * WIDTH,
};

/* Whether products of this scale with numbers that SMLA_FP_FLUSH takes as zero do not matter: 0, or
 * a normal float of at most 2^16. Asked of a double, because a subnormal float equals 0 there, and
 * a double that becomes one is 0 behind the conversion. */
static bool
is_ordinary_scale(double softmax_scale)
{
    const double magnitude = fabs(softmax_scale);
    return magnitude == 0 || (magnitude >= (double)FLT_MIN && magnitude <= 0x1p16);
}

/* ---- Softmax ------------------------------------------------------------------------------- */

/* The log2 of a maximum's reference: an integer that is at least as large, or -inf for -inf. A
 * subnormal maximum counts as 0, because weights may be made in SMLA_FP_EXACT and results in
 * SMLA_FP_FLUSH, where a comparison takes it for 0. */
SMLA_INLINE vfloat
reference_of(vfloat max_log2)
{
    const vint is_normal = (vint)((vuint)max_log2 & 0x7FFFFFFFu) >= 0x00800000;
    return ceil_lanes((vfloat)((vint)max_log2 & is_normal));
}

/* reference_of, but 0 for -inf, so that it can be subtracted. */
SMLA_INLINE vfloat
finite_reference_of(vfloat max_log2)
{
    return (vfloat)((vint)reference_of(max_log2) & (max_log2 != -INFINITY));
}

/* What makes logits of scores, in the log2 domain. */
typedef struct logit_rule {
    float scale_log2;
    float cap_log2; /* 0: logits are not capped */
} logit_rule;

static inline logit_rule
logit_rule_of(float scale, float softcap)
{
    const double log2_e = 1.4426950408889634074;
    return (logit_rule){.scale_log2 = (float)(scale * log2_e),
                        .cap_log2 = (float)(softcap * log2_e)};
}

/* Replaces scores by capped logits, cap * tanh(scale * s / cap). Where the quotient is small, tanh
 * changes nothing. */
static void
cap_scores(float *scores, int count, logit_rule rule)
{
    for (int i = 0; i < count; i += WIDTH) {
        vfloat *const s = (vfloat *)(scores + i);
        const vfloat logit = *s * rule.scale_log2;
        const vfloat x = logit / rule.cap_log2;
        const vfloat magnitude = (vfloat)((vuint)x & 0x7FFFFFFFu);
        *s = select_lanes(magnitude < 0x1p-13f, logit, tanh_lanes(x) * rule.cap_log2);
    }
}

enum { SUM_CHAINS = 2 }; /* sums that grow side by side, to hide the latency of additions */

/* Adds to a compensated sum: equal terms all round the same way, and lse must not lose that much.
 * `excess` is how much too large the sum is. */
SMLA_INLINE void
add_compensated(vfloat x, vfloat *sum, vfloat *excess)
{
    const vfloat term = x - *excess;
    const vfloat next = *sum + term;
    *excess = (next - *sum) - term;
    *sum = next;
}

/* Replaces scores by weights 2^(s - ref). Updates the maximum and the sum of the group's lanes, and
 * sets `alpha` to the factors by which older sums shrink. Scores have room for a multiple of
 * SUM_CHAINS keys. */
SMLA_INLINE void
weigh_scores(float *scores, int count, float scale_log2, float *max_log2, double *sums,
             vfloat *alpha, const int vectors)
{
    const int stride = vectors * WIDTH;
    const int padded = (count + SUM_CHAINS - 1) / SUM_CHAINS * SUM_CHAINS;
    vfloat max[GROUP_VECTORS], reference[GROUP_VECTORS];
    vfloat total[SUM_CHAINS * GROUP_VECTORS] = {{0}}, excess[SUM_CHAINS * GROUP_VECTORS] = {{0}};
    for (int v = 0; v < vectors; v++) {
        max[v] = *as_vectors(max_log2 + v * WIDTH);
    }
    for (int j = 0; j < count; j++) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            vfloat *const s = (vfloat *)(scores + j * stride + v * WIDTH);
            *s *= scale_log2;
            max[v] = max_lanes(max[v], *s);
        }
    }
    for (int v = 0; v < vectors; v++) {
        const vfloat old_max = *as_vectors(max_log2 + v * WIDTH);
        reference[v] = finite_reference_of(max[v]);
        alpha[v] = exp2_lanes(reference_of(old_max) - reference[v]);
        *(vfloat *)(max_log2 + v * WIDTH) = max[v];
    }
    for (int at = count * stride; at < padded * stride; at += WIDTH) {
        *(vfloat *)(scores + at) = splat(-INFINITY);
    }
    for (int j = 0; j < padded; j += SUM_CHAINS) {
#pragma GCC unroll 4
        for (int i = 0; i < SUM_CHAINS * vectors; i++) {
            vfloat *const s = (vfloat *)(scores + j * stride + i * WIDTH);
            *s = exp2_flushed(*s - reference[i % vectors]);
            add_compensated(*s, &total[i], &excess[i]);
        }
    }
    for (int i = 0; i < vectors * WIDTH; i++) {
        const int v = i / WIDTH, lane = i % WIDTH;
        double block_sum = 0.0;
        for (int chain = v; chain < SUM_CHAINS * vectors; chain += vectors) {
            block_sum += (double)total[chain][lane] - (double)excess[chain][lane];
        }
        sums[i] = sums[i] * (double)alpha[v][lane] + block_sum;
    }
}
