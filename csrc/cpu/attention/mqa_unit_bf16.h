/* mqa_unit_bf16.h: the multiply unit of AVX-512 BF16, of AMX-BF16 and of NEON with BF16: two
 * values of the dot product per step.
 *
 * Here a query, a key or a value is a row of bf16 pairs, one pair per 32-bit element. A key's pair
 * is two neighbouring dimensions. A value's pair is one dimension of two neighbouring keys, so the
 * values are a second copy of the block. bf16 holds every e4m3 value exactly, without its scale.
 *
 * All these machines take subnormal inputs as zero and flush subnormal results to zero, NEON those
 * of single products too, as SMLA_FP_FLUSH makes the fp32 units do (mqa_kernel.c). A step
 * flushes less than 2^-124, in two products and two sums.
 */
#pragma once

#include "cpu/attention/key_decoder.h"
#include "cpu/attention/mqa_block.h"
#include "cpu/machine/bf16_pairs.h"
#include "cpu/machine/narrow.h"

enum {
    BLOCK_KEYS = 128,                    /* 0.7 MiB of L2, with q and out of 128 heads */
    KEY_STRIDE = SMLA_HEAD_DIM / 2 + 16, /* 19 cache lines: an odd number uses every set */
    /* Element d of value pair j is values[d / 16 * VALUE_CHUNK + d % 16 + j * VALUE_STEP]. One
     * cache line holds 16 dimensions, and the line of the next pair follows. */
    VALUE_CHUNK = (BLOCK_KEYS / 2 + 1) * 16,
    VALUE_STEP = 16,
    VALUE_ELEMENTS = SMLA_KV_LORA_RANK / 16 * VALUE_CHUNK,
};

SMLA_INLINE void
copy_bf16(const uint8_t *bytes, int count, uint32_t *out)
{
    for (int i = 0; i < count; i += 2 * WIDTH) {
        *(vuint *)(out + i / 2) = load_words(bytes + 2 * i, 0);
    }
}

SMLA_INLINE uint32_t *
value_at(uint32_t *values, int dim)
{
    return values + dim / 16 * VALUE_CHUNK + dim % 16;
}

/* Pairs the values of keys `even` and `odd`, dimension by dimension. */
SMLA_INLINE void
pair_values(const uint32_t *even, const uint32_t *odd, uint32_t *values)
{
    for (int d = 0; d < SMLA_KV_LORA_RANK; d += 2 * WIDTH) {
        const vuint a = *(const vuint *)(even + d / 2);
        const vuint b = *(const vuint *)(odd + d / 2);
        *(vuint *)value_at(values, d) = interleave_halves(a, b, 0);
        *(vuint *)value_at(values, d + WIDTH) = interleave_halves(a, b, WIDTH);
    }
}

/* Widens the block's rows. Scales of tiles, divided by the unit, go to scales[tile][key]. Returns
 * whether none is huge. */
static bool
load_block(const key_block *block, float unit, unit_scalar *keys, unit_scalar *values,
           float *scales)
{
    static const uint32_t zeros[SMLA_KV_LORA_RANK / 2] __attribute__((aligned(64))) = {0};
    const smla_kv_format_info *const format = block->format;
    const float factor = block->kv_scale / unit;
    bool has_huge_row = false;
    scale_bits huge_scales = {0};
    for (int i = 0; i < block->count; i++) {
        const smla_kv_token token = block->keys[i];
        uint32_t *const key = keys + i * KEY_STRIDE;
        const scale_bits bits = load_scales(format, factor, token.scales);
        huge_scales = note_huge_scales(huge_scales, bits);
        store_scales(bits, factor, i, BLOCK_KEYS, scales);
        if (is_decoded(format)) {
            decode_key(format, token, SMLA_FLOAT_BF16, key);
            has_huge_row |= has_huge_scale(format, token.scales);
        } else if (format->nope_type == SMLA_NOPE_E4M3) {
            for (int d = 0; d < SMLA_KV_LORA_RANK; d += QUAD) {
                widen_e4m3(token.row + d, key + d / 2);
            }
        } else {
            copy_bf16(token.row, SMLA_KV_LORA_RANK, key);
        }
        if (smla_has_rope_codes(format)) {
            for (int d = SMLA_KV_LORA_RANK; d < SMLA_HEAD_DIM; d += QUAD) {
                widen_e4m3(token.row + d, key + d / 2);
            }
        }
        copy_bf16(token.row + format->rope_offset, count_bf16_rope(format),
                  key + SMLA_KV_LORA_RANK / 2);
        if (i % 2 == 1) {
            pair_values(key - KEY_STRIDE, key, values + i / 2 * VALUE_STEP);
        } else if (i + 1 == block->count) {
            pair_values(key, zeros, values + i / 2 * VALUE_STEP);
        }
    }
    return !has_huge_row && !has_scale(huge_scales);
}

/* probs[j/2][z] = the pair weights[j][z] * scale[j], weights[j + 1][z] * scale[j + 1], for the
 * value tile that `scale` belongs to, rounded once. */
SMLA_INLINE void
pack_probs(const float *weights, const float *scale, int count, int vectors, unit_scalar *probs)
{
    for (int j = 0; j < count; j += 2) {
        for (int v = 0; v < vectors; v++) {
            const float *const from = weights + (j * vectors + v) * WIDTH;
            const vfloat even = *as_vectors(from) * scale[j];
            vfloat odd = {0};
            if (j + 1 < count) {
                odd = *as_vectors(from + vectors * WIDTH) * scale[j + 1];
            }
            *(vuint *)(probs + (j / 2 * vectors + v) * WIDTH) = round_to_pairs(even, odd);
        }
    }
}
