/* row_encoder.cuh: a warp encodes a key of 512 or 128 bf16 values as a quantised cache row.
 *
 * The rules are those of csrc/cpu/cache/row_encoder.h, and every byte is the CPU's. The calling
 * kernel loads the values into a key_part. All lanes of the warp must call encode_key together.
 */
#pragma once

#include "cuda/cache/cache_rows.cuh"
#include "cuda/ptx/e2m1.cuh"

namespace {

/* A lane's share of a key: value STEP * step + COUNT * lane + i is in half i of pairs[step]. */
template <int ROW> struct key_part {
    enum {
        VALUES = smla_row<ROW>::INFO.head_dim,
        COUNT = VALUES == SMLA_INDEX_HEAD_DIM ? 4 : 8,
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = VALUES / STEP,
    };
    static_assert(STEPS == 1 || STEPS == 2, "two steps share the words of a reduction");
    uint32_t pairs[STEPS][COUNT / 2];
};

/* The amax of a lane's tile in each step, for tiles of TILE_LANES lanes. NaN counts as 0, and an
 * infinity as FLT_MAX. */
template <int ROW, int TILE_LANES>
__device__ __forceinline__ void
find_tile_amax(const key_part<ROW> &key, float *amax)
{
    constexpr int COUNT = key_part<ROW>::COUNT;
    constexpr int STEPS = key_part<ROW>::STEPS;
    const uint32_t first = smla_find_largest<COUNT>(key.pairs[0]);
    const uint32_t second = STEPS == 1 ? first : smla_find_largest<COUNT>(key.pairs[STEPS - 1]);
    float found[2];
    smla_find_amax_of_tiles<TILE_LANES>(first, second, found);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        amax[s] = fminf(fmaxf(found[s], 0.0f), FLT_MAX); /* a tile that has only NaN gave NaN */
    }
}

/* Encodes x / scale as e4m3, for a lane's values x. Nearly all scales are moderate. */
template <int ROW>
__device__ __forceinline__ void
encode_quotients(const uint32_t *pairs, float scale, uint32_t *codes)
{
    const smla_scale by = smla_make_scale(scale);
#pragma unroll
    for (int k = 0; k < key_part<ROW>::COUNT / 4; k++) {
        codes[k] = by.is_moderate
                       ? smla_quantize_moderate_bf16x4(pairs + 2 * k, by)
                       : smla_quantize_rare_bf16x4(pairs[2 * k], pairs[2 * k + 1], scale);
    }
}

/* Encodes x * factor as e2m1, for a lane's values x. A lane of a short key fills half a word. */
template <int ROW>
__device__ __forceinline__ void
encode_e2m1(const uint32_t *pairs, float factor, uint32_t *codes)
{
    float x[8] = {};
    smla_widen_bf16<key_part<ROW>::COUNT>(pairs, x);
    codes[0] = smla_quantize_e2m1x8(x, factor * (1.0f / SMLA_E2M1_UNIT));
}

/* The scale of a lane's tile in a step. `bits` is the stored form: a byte, or an fp32. e4m3 values
 * with an fp32 scale are divided by `factor`; all others are multiplied by it. */
struct tile_scale {
    uint32_t bits;
    float factor;
};

template <int ROW>
__device__ __forceinline__ tile_scale
choose_scale(float amax)
{
    constexpr smla_kv_format_info INFO = smla_row<ROW>::INFO;
    if constexpr (INFO.least_amax != 0) {
        const float top = smla_row<ROW>::IS_E4M3 ? SMLA_E4M3_MAX : SMLA_E2M1_MAX;
        const uint32_t e = smla_power_scale(fmaxf(amax, INFO.least_amax), top);
        return {INFO.scale_type == SMLA_SCALE_FP32 ? e << 23 : e, smla_invert_power(e)};
    } else if constexpr (INFO.scale_type == SMLA_SCALE_E4M3) {
        /* Divide exactly. amax has 8 bits of mantissa, and 6 times a rounding tie has 7 bits. So
         * amax / 6 is either a tie or far from one, and the correction makes a quotient that is a
         * tie exact. */
        const float reciprocal = 1.0f / SMLA_E2M1_MAX;
        const float quotient =
            smla_correct_quotient(amax * reciprocal, amax, SMLA_E2M1_MAX, reciprocal);
        const float least[4] = {fmaxf(quotient, 0x1p-9f)};
        const uint32_t code = smla_floats_to_e4m3x4(least) & 0x7Fu;
        float scales[4]; /* the first one is the tile's scale */
        smla_scale_plain_e4m3x4(code, 1.0f, scales);
        return {code, smla_rcp(scales[0])};
    } else {
        const float scale = smla_scale_of_tile(amax);
        return {smla_float_bits(scale), scale};
    }
}

/* Stores the scales of the tiles of a step. Four neighbouring one-byte scales share a word. */
template <int ROW, int TILE_LANES>
__device__ __forceinline__ void
store_tile_scales(uint32_t bits, int step, uint8_t *scales)
{
    constexpr smla_kv_format_info INFO = smla_row<ROW>::INFO;
    constexpr int STEP_TILES = SMLA_WARP_LANES / TILE_LANES;
    const int lane = lane_idx();
    const int tile = step * STEP_TILES + lane / TILE_LANES;
    if constexpr (INFO.scale_type == SMLA_SCALE_FP32) {
        if (lane % TILE_LANES == 0) {
            smla_store_words<4, true>(scales + 4 * tile, &bits);
        }
    } else {
        static_assert(STEP_TILES % 4 == 0, "the scales of a step fill words");
        uint32_t word = bits << (8 * (tile % 4));
        word |= __shfl_xor_sync(ALL_LANES, word, TILE_LANES);
        word |= __shfl_xor_sync(ALL_LANES, word, 2 * TILE_LANES);
        if (lane % (4 * TILE_LANES) == 0) {
            smla_store_words<4, true>(scales + tile, &word);
        }
    }
}

/* Stores a lane's codes of a step. Lanes of the RoPE part store their bf16 values instead. */
template <int ROW>
__device__ __forceinline__ void
store_codes(const uint32_t *codes, const uint32_t *pairs, int step, uint8_t *row)
{
    using layout = key_part<ROW>;
    constexpr smla_kv_format_info INFO = smla_row<ROW>::INFO;
    const int at = step * layout::STEP + lane_idx() * layout::COUNT;
    if (INFO.rope_dim != 0 && at >= INFO.nope_dim) {
        uint8_t *const rope = row + INFO.rope_offset + 2 * (at - INFO.nope_dim);
        smla_store_words<8, true>(rope, pairs);
        smla_store_words<8, true>(rope + 8, pairs + 2);
    } else if constexpr (smla_row<ROW>::IS_E4M3) {
        smla_store_words<layout::COUNT, true>(row + at, codes);
    } else if constexpr (layout::COUNT == 8) {
        smla_store_words<4, true>(row + at / 2, codes);
    } else {
        *(uint16_t *)(row + at / 2) = (uint16_t)codes[0];
    }
}

/* Writes the cache row of a key. `inverse` is 1 / kv_scale, which formats with one scale per cache
 * need. */
template <int ROW>
__device__ __forceinline__ void
encode_key(const key_part<ROW> &key, float inverse, uint8_t *row, uint8_t *scales)
{
    using layout = key_part<ROW>;
    constexpr smla_kv_format_info INFO = smla_row<ROW>::INFO;
    static_assert(INFO.rope_dim == 0 || layout::COUNT == 8, "a lane has 16 bytes of RoPE values");
    constexpr bool HAS_SCALES = INFO.num_scales != 0;
    constexpr int TILE_LANES = HAS_SCALES ? INFO.scale_tile / layout::COUNT : 1;
    uint32_t codes[layout::COUNT / 4];
    float amax[layout::STEPS];
    if constexpr (HAS_SCALES) {
        find_tile_amax<ROW, TILE_LANES>(key, amax);
    }
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
        tile_scale scale = {0, inverse};
        if constexpr (HAS_SCALES) {
            scale = choose_scale<ROW>(amax[s]);
        }
        if constexpr (!smla_row<ROW>::IS_E4M3) {
            encode_e2m1<ROW>(key.pairs[s], scale.factor, codes);
        } else if constexpr (!HAS_SCALES || INFO.least_amax != 0) {
            smla_quantize_products<layout::COUNT>(key.pairs[s], scale.factor, codes);
        } else {
            encode_quotients<ROW>(key.pairs[s], scale.factor, codes);
        }
        store_codes<ROW>(codes, key.pairs[s], s, row);
        if constexpr (HAS_SCALES) {
            const bool is_rope = s * layout::STEP + lane_idx() * layout::COUNT >= INFO.nope_dim;
            store_tile_scales<ROW, TILE_LANES>(is_rope ? 0 : scale.bits, s, scales);
        }
    }
}

/* Stores a key as a row of any format: of bf16, whose rows may not be ALIGNED, or encoded. */
template <int ROW, bool ALIGNED>
__device__ __forceinline__ void
store_key(const key_part<ROW> &key, float inverse, const smla_kv_token &to)
{
    using layout = key_part<ROW>;
    if constexpr (smla_row<ROW>::IS_BF16) {
#pragma unroll
        for (int s = 0; s < layout::STEPS; s++) {
            const int at = s * layout::STEP + lane_idx() * layout::COUNT;
            smla_store_words<2 * layout::COUNT, ALIGNED>((uint16_t *)to.row + at, key.pairs[s]);
        }
    } else {
        encode_key<ROW>(key, inverse, to.row, to.scales);
    }
}

} /* namespace */
