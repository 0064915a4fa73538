/* reference.h: the contract in double precision, as plainly as it can be written.
 *
 * Cache rows are read from the bytes that the library reads, and e4m3 values are multiplied by
 * their scales exactly. Bounds come from the contract's rounding model; no tolerance is chosen.
 */
#pragma once

#include "testing.h"

enum {
    NOPE = 512,
    ROPE = 64,
    ROW = 576,
    FP8_ROW = 656,
    TILE = 128,
    SCALES_AT = 512,
    ROPE_AT = 528
};

/* The value of a small float, as its standard defines it. */
static inline double
decode(unsigned magnitude, int mantissa_bits, int bias)
{
    const unsigned mantissa = magnitude & ((1u << mantissa_bits) - 1u);
    const int exponent = (int)(magnitude >> mantissa_bits);
    if (exponent == 0) {
        return ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return ldexp(mantissa + (double)(1u << mantissa_bits), exponent - bias - mantissa_bits);
}

/* The nearest e4m3 code; ties go to even. Values grow with their codes, so the nearest code is the
 * last one whose value is not above |x|, which is found by halving, or the one behind it. Numbers
 * beyond the largest value get the largest code. The values are computed once, because ldexp is
 * slow under an emulator. */
static inline uint8_t
nearest_e4m3(double x)
{
    if (isnan(x)) {
        return signbit(x) ? 0xFF : 0x7F;
    }
    enum { largest = 0x7E };
    static double values[largest + 1];
    for (unsigned code = 1; values[largest] == 0.0 && code <= largest; code++) {
        values[code] = decode(code, 3, 7);
    }
    unsigned code = 0;
    for (unsigned step = 64; step > 0; step /= 2) {
        if (code + step <= largest && values[code + step] <= fabs(x)) {
            code += step;
        }
    }
    if (code < largest) {
        const double below = fabs(x) - values[code];
        const double above = values[code + 1] - fabs(x);
        code += above < below || (above == below && code % 2 == 1);
    }
    return (uint8_t)(signbit(x) ? code | 0x80u : code);
}

/* ---- Cached rows --------------------------------------------------------------------------- */

static inline bool
is_fp8(const array *kv)
{
    return kv->tensor.dtype.bits == 8;
}

/* Slots of a cache of shape [pages, block, row], [pages, block, 1, row] or [slots, row]. */
static inline int64_t
num_slots(const array *kv)
{
    return kv->tensor.ndim == 2 ? kv->shape[0] : kv->shape[0] * kv->shape[1];
}

static inline uint8_t *
row_of(const array *kv, int64_t slot)
{
    const int64_t page = kv->tensor.ndim == 2 ? 0 : slot / kv->shape[1];
    const int64_t token = kv->tensor.ndim == 2 ? slot : slot % kv->shape[1];
    const int64_t offset = kv->tensor.ndim == 2 ? token * kv->strides[0]
                                                : page * kv->strides[0] + token * kv->strides[1];
    return (uint8_t *)kv->tensor.data + offset * (kv->tensor.dtype.bits / 8);
}

/* Value `i` of a cache row, exactly. */
static inline double
row_value(const array *kv, const uint8_t *row, int i)
{
    if (!is_fp8(kv)) {
        return read_value(bf16, row + 2 * i);
    }
    if (i >= NOPE) {
        return read_value(bf16, row + ROPE_AT + 2 * (i - NOPE));
    }
    const double scale = read_value(fp32, row + SCALES_AT + i / TILE * (int)sizeof(float));
    return read_value(e4m3, row + i) * scale;
}

/* Fills a cache with random rows: FP8 codes except NaN, and scales that are no powers of two. */
static inline array *
fill_cache(array *kv)
{
    for (int64_t slot = 0; slot < num_slots(kv); slot++) {
        uint8_t *row = row_of(kv, slot);
        for (int i = 0; i < ROW; i++) {
            if (!is_fp8(kv)) {
                write_value(bf16, row + 2 * i, random_normal());
            } else if (i < NOPE) {
                row[i] = nearest_e4m3(60.0 * random_normal());
            } else {
                write_value(bf16, row + ROPE_AT + 2 * (i - NOPE), random_normal());
            }
        }
        for (int tile = 0; is_fp8(kv) && tile < NOPE / TILE; tile++) {
            const double scale = 0.01 + 0.02 * (double)random_int(1000) / 1000.0;
            write_value(fp32, row + SCALES_AT + tile * (int)sizeof(float), scale);
        }
    }
    return kv;
}

/* ---- Attention ----------------------------------------------------------------------------- */

/* Optional arrays may be NULL. There is a second list where its kv is not NULL. */
typedef struct key_list {
    const array *kv;
    const array *indices;
    const array *topk_length;
} key_list;

typedef struct attention_inputs {
    const array *q;    /* [T, H, 576], or [T, H, 512] with q_pe */
    const array *q_pe; /* [T, H, 64] */
    key_list lists[2];
    const array *attn_sink;
    double softmax_scale;
} attention_inputs;

typedef struct attention_row {
    double out[NOPE];
    double out_bound[NOPE];
    double lse;
    double lse_bound;
    double max_logit;
} attention_row;

/* A whole cache in doubles, [slots][576]. */
typedef double reference_key[ROW];

static inline reference_key *
decode_cache(const array *kv)
{
    if (kv == NULL) {
        return NULL;
    }
    reference_key *keys = malloc((size_t)(num_slots(kv) + 1) * sizeof *keys);
    for (int64_t slot = 0; keys != NULL && slot < num_slots(kv); slot++) {
        const uint8_t *row = row_of(kv, slot);
        for (int i = 0; i < ROW; i++) {
            keys[slot][i] = row_value(kv, row, i);
        }
    }
    return keys;
}

static inline double
query_value(const attention_inputs *in, int64_t token, int64_t head, int i)
{
    if (in->q_pe == NULL || i < NOPE) {
        return GET(in->q, token, head, i);
    }
    return GET(in->q_pe, token, head, i - NOPE);
}

/* The slot in column k of a list, or -1 where the column names no key. */
static inline int64_t
key_slot(const key_list *list, int64_t token, int64_t k)
{
    const int64_t slot = (int64_t)GET(list->indices, token, k);
    const double length = list->topk_length == NULL ? INFINITY : GET(list->topk_length, token);
    return slot < 0 || slot >= num_slots(list->kv) || (double)k >= length ? -1 : slot;
}

/* Attention of one token and head, in three passes over the keys: largest logit, sum, values.
 * `magnitude` is A, the largest sum of |softmax_scale q k|. */
static inline attention_row
reference_attention(const attention_inputs *in, reference_key *const keys[2], int64_t token,
                    int64_t head)
{
    attention_row result = {.lse = -INFINITY, .max_logit = -INFINITY};
    double q[ROW];
    double weights[NOPE] = {0}; /* sum of p |v| */
    double magnitude = 0.0;
    double sum = 0.0;
    for (int i = 0; i < ROW; i++) {
        q[i] = in->softmax_scale * query_value(in, token, head, i);
    }
    for (int pass = 0; pass < 3; pass++) {
        for (int l = 0; l < 2 && in->lists[l].kv != NULL; l++) {
            for (int64_t k = 0; k < in->lists[l].indices->shape[1]; k++) {
                const int64_t slot = key_slot(&in->lists[l], token, k);
                if (slot < 0) {
                    continue;
                }
                const double *key = keys[l][slot];
                double s = 0.0;
                double a = 0.0;
                for (int i = 0; i < ROW; i++) {
                    s += q[i] * key[i];
                    a += fabs(q[i] * key[i]);
                }
                if (pass == 0) {
                    magnitude = fmax(magnitude, a);
                    result.max_logit = fmax(result.max_logit, s);
                } else if (pass == 1) {
                    sum += exp(s - result.max_logit);
                } else {
                    const double p = exp(s - result.lse);
                    for (int i = 0; i < NOPE; i++) {
                        result.out[i] += p * key[i];
                        weights[i] += p * fabs(key[i]);
                    }
                }
            }
        }
        if (pass == 1 && sum > 0.0) {
            result.lse = result.max_logit + log(sum);
        }
    }
    double factor = 1.0;
    if (in->attn_sink != NULL && !isinf(result.lse)) {
        factor = 1.0 / (1.0 + exp(GET(in->attn_sink, head) - result.lse));
    }
    const double e = 16.0 * 0x1p-24 * magnitude;
    result.lse_bound = e + 1e-6;
    for (int i = 0; i < NOPE; i++) {
        result.out[i] *= factor;
        result.out_bound[i] = 2.0 * 0x1p-9 * (factor * weights[i] + fabs(result.out[i])) +
                              2.0 * e * factor * weights[i] + 1e-6;
    }
    return result;
}

/* Compares every element of out and lse, and of max_logits if given, with the reference. */
static inline void
expect_attention(const attention_inputs *in, const array *out, const array *lse,
                 const array *max_logits)
{
    reference_key *const keys[2] = {decode_cache(in->lists[0].kv), decode_cache(in->lists[1].kv)};
    for (int64_t token = 0; token < in->q->shape[0]; token++) {
        for (int64_t head = 0; head < in->q->shape[1]; head++) {
            const attention_row row = reference_attention(in, keys, token, head);
            EXPECT_NEAR(GET(lse, token, head), row.lse, row.lse_bound);
            if (max_logits != NULL) {
                EXPECT_NEAR(GET(max_logits, token, head), row.max_logit, row.lse_bound);
            }
            for (int i = 0; i < NOPE; i++) {
                EXPECT_NEAR(GET(out, token, head, i), row.out[i], row.out_bound[i]);
            }
        }
    }
    free(keys[0]);
    free(keys[1]);
}
