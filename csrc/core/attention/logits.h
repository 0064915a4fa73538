/* logits.h: what makes logits of scores q . k, and what weighs beside them in a softmax. Compiles
 * as C and as CUDA.
 */
#pragma once

#include "core/params.h"

/* Sinks: a logit per head that takes part of a row's weight and has no value. */
typedef struct smla_sinks {
    const float *values; /* [H]; NULL: there are none */
    int64_t stride;
} smla_sinks;

/* What e4m3 values of each request and KV head are multiplied with: [rows, Hk] fp32 in memory of
 * the device, or a number. As many requests share each row, one behind another. */
typedef struct smla_descale {
    const float *pointer; /* NULL: the scale is `value` */
    int64_t stride_row;
    int64_t stride_head;
    int32_t reqs_per_row;
    float value;
} smla_descale;

/* The number of an array's element for a request and a KV head. */
SMLA_HOST_DEVICE static inline int64_t
smla_descale_at(const smla_descale *scale, int64_t req, int64_t kv_head)
{
    const int32_t row = (int32_t)req / scale->reqs_per_row;
    return row * scale->stride_row + kv_head * scale->stride_head;
}

/* Hopper's kernels for FP8 rows read the sinks, and nothing behind them. */
typedef struct smla_logits {
    smla_sinks sinks;
    /* As given, because its product with scales may be ordinary where it is no normal float. */
    double softmax_scale;
    float softcap; /* logits become softcap * tanh(logit / softcap); 0: they stay */
    /* Of calls over latents. */
    smla_given_scale q_scale; /* multiplies logits; 1 for a bf16 query, but in sparse_mla_dsv4 */
    smla_given_scale divisor; /* divides logits; 1 but in sparse_mla_dsv4 */
    /* main, extra: of formats with a scale of the cache, else 1; equal if there is no extra list */
    smla_given_scale kv_scale[2];
    /* Of calls over keys and values. */
    smla_descale q_descale;
    smla_descale k_descale;
    smla_descale v_descale;
} smla_logits;

/* What q . k is multiplied with, besides the kv_scale of the key's cache, where the scales' memory
 * can be read. CUDA's find_scale_log2 computes the same. */
static inline float
smla_read_logit_scale(const smla_logits *logits)
{
    return (float)logits->softmax_scale * smla_read_scale(&logits->q_scale) /
           smla_read_scale(&logits->divisor);
}

/* The power of two that kernels divide all scales of keys by, given those of the caches. The factor
 * of logits is multiplied with it, and so are results. So no score and no sum of values leaves
 * fp32, however large or small the scales of caches are. It is near the largest of them, but not so
 * large that another one becomes 0. Within 2^+-96 it leaves room for factors beside it. It is 1 if
 * no format has a scale of the cache. */
SMLA_HOST_DEVICE static inline float
smla_choose_key_unit(float main_scale, float extra_scale)
{
    enum { BIAS = 127, ROOM = 96 };
    const int main_exponent = (int)(smla_float_bits(main_scale) >> 23); /* biased */
    const int extra_exponent = (int)(smla_float_bits(extra_scale) >> 23);
    const int most = main_exponent > extra_exponent ? main_exponent : extra_exponent;
    const int least = main_exponent < extra_exponent ? main_exponent : extra_exponent;
    int unit = most < least + ROOM ? most : least + ROOM;
    unit = unit > most - BIAS ? unit : most - BIAS;
    unit = unit > BIAS - ROOM ? unit : BIAS - ROOM;
    unit = unit < BIAS + ROOM ? unit : BIAS + ROOM;
    return smla_bits_float((uint32_t)unit << 23);
}

/* 1 / unit */
SMLA_HOST_DEVICE static inline float
smla_inverse_unit(float unit)
{
    return smla_bits_float((254u << 23) - smla_float_bits(unit));
}
