/* logits_rows.cuh: rows of queries and keys as logits.cu loads them, a lane's part in registers,
 * and as operands of 16 bits.
 */
#pragma once

#include "core/logit_powers.h"
#include "cuda/indexer/logits.cuh"

namespace {

enum { K_STEPS = SMLA_INDEX_HEAD_DIM / 16 };

__device__ __forceinline__ int
lane_idx(void)
{
    return (int)threadIdx.x % SMLA_WARP_LANES;
}

/* A lane's values of a row as they lie in memory: 16 values of each half. */
template <bool IS_FP4> struct raw_row {
    enum { HALF_WORDS = IS_FP4 ? 2 : 4 };
    uint32_t words[2][HALF_WORDS];
    uint32_t scales; /* four UE8M0 scales, one per byte */
};

/* A lane's values of a row: two words of bf16 or fp16 per k-step. */
struct row_fragment {
    uint32_t pairs[K_STEPS][2];
};

/* Loads the lane's part of a row whose alignment is ALIGNMENT: 16, 4 or 1 bytes. */
template <bool IS_FP4, int ALIGNMENT>
__device__ __forceinline__ void
load_row(const uint8_t *row, const uint8_t *scales, raw_row<IS_FP4> *raw)
{
    constexpr int WORDS = raw_row<IS_FP4>::HALF_WORDS;
    const int c = lane_idx() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint8_t *const from = row + (4 * half + c) * WORDS * 4;
        smla_load_words<4 * WORDS, ALIGNMENT == 16, ALIGNMENT == 1 ? 1 : 4>(from, raw->words[half]);
    }
    raw->scales = 0;
    if constexpr (IS_FP4) {
        smla_load_words<4, ALIGNMENT != 1, 1>(scales, &raw->scales);
    }
}

/* Four e4m3 as two pairs of bf16, exactly. Exponent and mantissa keep their bits, which bf16 reads
 * as 2^-120 of the value. */
__device__ __forceinline__ void
widen_to_bf16(uint32_t bytes, uint32_t pairs[2])
{
    constexpr uint32_t UNIT = 0x7B807B80u; /* 2^120 twice, as bf16 */
    constexpr uint32_t MINUS_ZERO = 0x80008000u;
    const uint32_t nan = smla_mark_nan_e4m3x4(bytes) & 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t high = __byte_perm(bytes, 0, i == 0 ? 0x1404 : 0x3424);
        const uint32_t small = (high & 0x80008000u) | (high >> 4 & 0x07F007F0u);
        pairs[i] = ptx_fma_bf16x2(small, UNIT, MINUS_ZERO);
    }
    if (nan != 0) {
        pairs[0] |= (__byte_perm(nan, 0, 0x1404) >> 15 & 0x00010001u) * 0x7FC0u;
        pairs[1] |= (__byte_perm(nan, 0, 0x3424) >> 15 & 0x00010001u) * 0x7FC0u;
    }
}

/* Moves the bits of two e2m1, in the low byte, to a pair of bf16 that is 2^-126 of their values. */
__device__ __forceinline__ uint32_t
spread_e2m1x2(uint32_t byte)
{
    return (byte & 0x07u) << 6 | (byte & 0x08u) << 12 | (byte & 0x70u) << 18 | (byte & 0x80u) << 24;
}

/* Converts four e2m1, in the low half, times the scale, which both halves of `scale` have. The
 * products are exact, or infinite. */
__device__ __forceinline__ void
widen_e2m1x4(uint32_t codes, uint32_t scale, uint32_t pairs[2])
{
    constexpr uint32_t UNIT = 0x7E807E80u; /* 2^126 twice, as bf16 */
    constexpr uint32_t MINUS_ZERO = 0x80008000u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t value = ptx_fma_bf16x2(spread_e2m1x2(codes >> 8 * i), UNIT, MINUS_ZERO);
        pairs[i] = ptx_fma_bf16x2(value, scale, MINUS_ZERO);
    }
}

/* Converts a row to fp16 if IS_HALF, else to bf16. `signs` is xor-ed into four e4m3. */
template <bool IS_HALF, bool IS_FP4>
__device__ __forceinline__ void
widen_row(const raw_row<IS_FP4> &raw, uint32_t signs, row_fragment *fragment)
{
#pragma unroll
    for (int s = 0; s < K_STEPS; s++) {
        const int half = s / 4;
        const int part = s % 4;
        if constexpr (IS_FP4) {
            /* These are values from 64 half + 16 c on, whose scale is number 2 half + c / 2. */
            const int tile = 2 * half + lane_idx() % 4 / 2;
            const uint8_t e = (uint8_t)(raw.scales >> 8 * tile);
            const uint32_t scale = smla_float_bits(smla_ue8m0_to_float(e)) >> 16;
            widen_e2m1x4(raw.words[half][part / 2] >> 16 * (part % 2), scale | scale << 16,
                         fragment->pairs[s]);
        } else if constexpr (IS_HALF) {
            smla_widen_e4m3x4(raw.words[half][part] ^ signs, fragment->pairs[s]);
        } else {
            widen_to_bf16(raw.words[half][part] ^ signs, fragment->pairs[s]);
        }
    }
}

/* ---- Scales -------------------------------------------------------------------------------- */

/* smla_shift_ue8m0 for four scales in a word. */
__device__ __forceinline__ uint32_t
shift_scales(uint32_t scales, int power)
{
    uint8_t bytes[4];
    memcpy(bytes, &scales, sizeof bytes);
    smla_shift_ue8m0(bytes, 4, power, bytes);
    memcpy(&scales, bytes, sizeof scales);
    return scales;
}

/* Not 0 if a key's or a query's power may not be 0, given the four scales in a word. Few usual
 * words have a scale from 2^17 on, or none from 2^-63 on, which a few instructions see. */
__device__ __forceinline__ uint32_t
may_have_power(uint32_t scales)
{
    const uint32_t large = scales & (scales << 1 | scales << 2 | scales << 3) & 0x80808080u;
    return (scales & 0xC0C0C0C0u) == 0 ? 1 : large;
}

} /* namespace */
