/* unit_bf16.h: the multiply unit of AVX-512 BF16: vdpbf16ps, two values of the dot product per
 * step.
 *
 * Here a query, a key or a value is a row of bf16 pairs, one pair per 32-bit element. Keys pair two
 * neighbouring dimensions; values pair two neighbouring keys, so they are a second copy of the
 * block. bf16 holds every e4m3 value exactly, and scales stay out of it.
 *
 * vdpbf16ps takes subnormal inputs as zero and flushes subnormal results. When that can be seen:
 *   - A subnormal bf16 (below 2^-126) in q or in a bf16 row would vanish although its partner may
 *     be 1e38. Such queries and blocks are refused, and the part is run again on the fp32 unit.
 *   - A flushed partial sum loses less than 2^-126. What it is multiplied with afterwards, the
 *     row's scale, is refused above 2^64, which leaves less than 576 * 2^-62 of a logit, times
 *     softmax_scale. (NaN and infinite scales are refused with them.)
 *   - weight * scale below 2^-126 becomes zero, an error below 2^-126 * 448 per key in out: nothing
 *     against the 1e-6 that the contract allows. The same holds for a bf16 value row, with 3e38 in
 *     place of 448 and weights that are at most 1: a weight is 0 below 2^-126 in every unit.
 * What is refused depends on the part's own rows, so batch invariance holds.
 */
#ifndef SMLA_CPU_UNIT_BF16_H
#define SMLA_CPU_UNIT_BF16_H

#include <immintrin.h>
#include <stdbool.h>

#include "../numeric.h"
#include "attention_block.h"
#include "simd.h"

typedef uint32_t unit_scalar;
typedef vuint unit_vector;

enum {
    UNIT_STEP = 2,                       /* values of a dot product per multiply-add */
    BLOCK_KEYS = 128,                    /* with q and out of 128 heads: 0.7 MiB of L2 */
    KEY_STRIDE = SMLA_HEAD_DIM / 2 + 16, /* 19 cache lines: an odd number visits every set */
    /* Element d of value pair j is values[d / 16 * VALUE_CHUNK + d % 16 + j * VALUE_STEP]: one
     * cache line feeds 16 dimensions, and the next pair's line follows. */
    VALUE_CHUNK = (BLOCK_KEYS / 2 + 1) * 16,
    VALUE_STEP = 16,
    VALUE_ELEMENTS = SMLA_KV_LORA_RANK / 16 * VALUE_CHUNK,
};

SMLA_INLINE vfloat
multiply_add(vfloat sum, unit_scalar a, unit_vector b)
{
    const __m512i pair = _mm512_set1_epi32((int)a);
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)b);
}

/* Query values (k, k + UNIT_STEP - 1) of one head. */
SMLA_INLINE unit_scalar
load_query(const uint16_t *q)
{
    unit_scalar pair;
    memcpy(&pair, q, sizeof pair);
    return pair;
}

/* The smallest |x| - 1 of bf16 values seen so far, as integers. Zero wraps to the top, so what is
 * below 0x7F is a subnormal. */
SMLA_INLINE __m512i
track_smallest(__m512i smallest, __m512i x)
{
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
    return _mm512_min_epu16(smallest, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
}

SMLA_INLINE bool
has_subnormal(__m512i smallest)
{
    return _mm512_cmplt_epu16_mask(smallest, _mm512_set1_epi16(0x7F)) != 0;
}

/* `count` is a multiple of 32. */
SMLA_INLINE bool
query_is_exact(const uint16_t *q, int count)
{
    __m512i smallest = _mm512_set1_epi16(-1);
    for (int i = 0; i < count; i += 32) {
        smallest = track_smallest(smallest, _mm512_loadu_si512(q + i));
    }
    return !has_subnormal(smallest);
}

/* bf16 of the 128 magnitudes of e4m3, high bytes and low bytes. */
static const uint8_t e4m3_high[128] __attribute__((aligned(64))) = {
    0x00, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C,
    0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D, 0x3D,
    0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E, 0x3E,
    0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F, 0x3F,
    0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
    0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x7F,
};
static const uint8_t e4m3_low[128] __attribute__((aligned(64))) = {
    0x00, 0x00, 0x80, 0xC0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xF0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xA0, 0xB0, 0xC0, 0xD0, 0xE0, 0xC0,
};

/* 512 e4m3 -> bf16 by two byte look-ups (vpermi2b ignores the sign bit of its index). */
SMLA_INLINE void
widen_e4m3(const uint8_t *bytes, uint32_t *out)
{
    const __m512i high_0 = _mm512_load_si512(e4m3_high);
    const __m512i high_1 = _mm512_load_si512(e4m3_high + 64);
    const __m512i low_0 = _mm512_load_si512(e4m3_low);
    const __m512i low_1 = _mm512_load_si512(e4m3_low + 64);
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    /* Unpacking works inside 128-bit lanes: deal the 8-byte words out so that it leaves them in
     * order. */
    const __m512i deal = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < SMLA_KV_LORA_RANK; i += 64) {
        const __m512i x = _mm512_permutexvar_epi64(deal, _mm512_loadu_si512(bytes + i));
        const __m512i low = _mm512_permutex2var_epi8(low_0, x, low_1);
        const __m512i magnitude = _mm512_permutex2var_epi8(high_0, x, high_1);
        const __m512i high = _mm512_or_si512(magnitude, _mm512_and_si512(x, sign));
        _mm512_store_si512(out + i / 2, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(out + i / 2 + 16, _mm512_unpackhi_epi8(low, high));
    }
}

SMLA_INLINE __m512i
copy_bf16(const uint8_t *bytes, int count, uint32_t *out, __m512i smallest)
{
    for (int i = 0; i < count; i += 32) {
        const __m512i x = _mm512_loadu_si512(bytes + 2 * i);
        smallest = track_smallest(smallest, x);
        _mm512_store_si512(out + i / 2, x);
    }
    return smallest;
}

/* Value pair = keys `even` and `odd`, dimension by dimension. */
SMLA_INLINE void
pair_values(const uint32_t *even, const uint32_t *odd, uint32_t *values)
{
    const __m512i first = _mm512_set1_epi32(0x00200000); /* word 0 of `even`, word 0 of `odd` */
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i both_lanes = _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x10001));
    const __m512i low = _mm512_add_epi16(first, both_lanes);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int d = 0; d < SMLA_KV_LORA_RANK; d += 32) {
        const __m512i a = _mm512_load_si512(even + d / 2);
        const __m512i b = _mm512_load_si512(odd + d / 2);
        uint32_t *const out = values + d / 16 * VALUE_CHUNK;
        _mm512_store_si512(out, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(out + VALUE_CHUNK, _mm512_permutex2var_epi16(a, high, b));
    }
}

/* Dequantises the block's rows, all but the scales, which go to scales[tile][key]. False when the
 * unit cannot do these rows exactly. */
static bool
load_block(const key_block *block, unit_scalar *keys, unit_scalar *values, float *scales)
{
    static const uint32_t zeros[SMLA_KV_LORA_RANK / 2] __attribute__((aligned(64))) = {0};
    const smla_kv_format_info *const format = block->format;
    __m512i smallest = _mm512_set1_epi16(-1);
    __m128i largest_scale = _mm_setzero_si128();
    for (int i = 0; i < block->count; i++) {
        const uint8_t *const row = block->rows[i];
        uint32_t *const key = keys + i * KEY_STRIDE;
        const scale_bits bits = load_scales(format, row);
        largest_scale = _mm_max_epu32(largest_scale, (__m128i)(bits & 0x7FFFFFFFu));
        store_scales(bits, i, BLOCK_KEYS, scales);
        if (format->nope_type == SMLA_NOPE_E4M3) {
            widen_e4m3(row, key);
        } else {
            smallest = copy_bf16(row, SMLA_KV_LORA_RANK, key, smallest);
        }
        smallest = copy_bf16(row + format->rope_offset, SMLA_QK_ROPE_HEAD_DIM,
                             key + SMLA_KV_LORA_RANK / 2, smallest);
        if (i % 2 == 1) {
            pair_values(key - KEY_STRIDE, key, values + i / 2 * VALUE_STEP);
        } else if (i + 1 == block->count) {
            pair_values(key, zeros, values + i / 2 * VALUE_STEP);
        }
    }
    const __m128i limit = _mm_set1_epi32(0x5F800000); /* 2^64 */
    return !has_subnormal(smallest) && _mm_cmpgt_epu32_mask(largest_scale, limit) == 0;
}

/* probs[j/2][z] = the pair weights[j][z] * scale[j], weights[j + 1][z] * scale[j + 1], for the
 * value tile that `scale` belongs to, rounded once. */
SMLA_INLINE void
pack_probs(const float *weights, const float *scale, int count, int vectors, unit_scalar *probs)
{
    const __m512i deal =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int j = 0; j < count; j += 2) {
        for (int v = 0; v < vectors; v++) {
            const float *const from = weights + (j * vectors + v) * WIDTH;
            const vfloat even = *as_vectors(from) * scale[j];
            vfloat odd = {0};
            if (j + 1 < count) {
                odd = *as_vectors(from + vectors * WIDTH) * scale[j + 1];
            }
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
            const __m512i pairs = _mm512_permutexvar_epi16(deal, both);
            _mm512_store_si512(probs + (j / 2 * vectors + v) * WIDTH, pairs);
        }
    }
}

#endif /* SMLA_CPU_UNIT_BF16_H */
