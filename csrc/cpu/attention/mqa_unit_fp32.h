/* mqa_unit_fp32.h: the multiply unit of instruction sets without a bf16 product: fp32 FMA, one
 * value of the dot product per step.
 *
 * A unit decides how queries, keys, values and probabilities lie in scratch, and how keys get
 * there. Here a key is a row of 576 floats, which serves as its value too.
 */
#pragma once

#include "cpu/attention/key_decoder.h"
#include "cpu/attention/mqa_block.h"
#include "cpu/machine/fp32_values.h"
#include "cpu/machine/narrow.h"

enum {
    BLOCK_KEYS = 64, /* 64 * 2368 B of keys leave room for q and out in 1 MiB of L2 */
    KEY_STRIDE = SMLA_HEAD_DIM + 16, /* 37 cache lines: an odd number uses every set */
    /* Element d of value row j is values[d / 16 * VALUE_CHUNK + d % 16 + j * VALUE_STEP]. */
    VALUE_CHUNK = 16,
    VALUE_STEP = KEY_STRIDE,
    VALUE_ELEMENTS = 0, /* the keys serve as values */
};

SMLA_INLINE void
widen_bf16(const uint8_t *bytes, int count, float *out)
{
    for (int i = 0; i < count; i += WIDTH) {
        const vhalf half = *(const vhalf *)(bytes + 2 * i);
        *(vuint *)(out + i) = __builtin_convertvector(half, vuint) << 16;
    }
}

SMLA_INLINE void
widen_e4m3(const uint8_t *bytes, int count, float *out)
{
    for (int i = 0; i < count; i += QUAD) {
        store_float(load_e4m3(bytes + i, 1.0f), out + i);
    }
}

/* Widens the block's rows. Scales of tiles, divided by the unit, go to scales[tile][key]. Returns
 * whether none is huge. */
static bool
load_block(const key_block *block, float unit, unit_scalar *keys, unit_scalar *values,
           float *scales)
{
    (void)values;
    const smla_kv_format_info *const format = block->format;
    const float factor = block->kv_scale / unit;
    bool has_huge_row = false;
    scale_bits huge_scales = {0};
    for (int i = 0; i < block->count; i++) {
        const smla_kv_token token = block->keys[i];
        float *const key = keys + i * KEY_STRIDE;
        const scale_bits bits = load_scales(format, factor, token.scales);
        huge_scales = note_huge_scales(huge_scales, bits);
        store_scales(bits, factor, i, BLOCK_KEYS, scales);
        if (is_decoded(format)) {
            decode_key(format, token, SMLA_FLOAT_FP32, key);
            has_huge_row |= has_huge_scale(format, token.scales);
        } else if (format->nope_type == SMLA_NOPE_E4M3) {
            widen_e4m3(token.row, SMLA_KV_LORA_RANK, key);
        } else {
            widen_bf16(token.row, SMLA_KV_LORA_RANK, key);
        }
        if (smla_has_rope_codes(format)) {
            widen_e4m3(token.row + format->rope_offset, SMLA_QK_ROPE_HEAD_DIM,
                       key + SMLA_KV_LORA_RANK);
        }
        widen_bf16(token.row + format->rope_offset, count_bf16_rope(format),
                   key + SMLA_KV_LORA_RANK);
    }
    return !has_huge_row && !has_scale(huge_scales);
}

/* probs[j][z] = weights[j][z] * scale[j], for the value tile that `scale` belongs to. */
SMLA_INLINE void
pack_probs(const float *weights, const float *scale, int count, int vectors, unit_scalar *probs)
{
    for (int j = 0; j < count; j++) {
        for (int v = 0; v < vectors; v++) {
            const int at = (j * vectors + v) * WIDTH;
            *(vfloat *)(probs + at) = *as_vectors(weights + at) * scale[j];
        }
    }
}
