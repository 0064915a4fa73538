/* write_token.cuh: a warp loads a token's NoPE and RoPE values, which are in arrays of their own,
 * and writes its cache row. cache_write.cu tells how, and the numerics.
 */
#pragma once

#include "cuda/cache/cache_scale.cuh"
#include "cuda/cache/cache_slots.cuh"

namespace {

/* A lane's part of a token in the caller's type: 16 bytes per step, then two values of rope. */
template <int TYPE> struct given_part {
    enum {
        ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2,
        COUNT = 16 / ELEMENT_BYTES,
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = SMLA_KV_LORA_RANK / STEP,
        TILE_LANES = SMLA_SCALE_TILE / COUNT, /* lanes that share a scale */
    };
    uint32_t nope[STEPS][4];
    uint32_t rope[ELEMENT_BYTES / 2];
};

/* The addresses of a lane's part of the next token. */
struct given_pointers {
    const uint8_t *nope;
    const uint8_t *rope;
};

template <int TYPE>
__device__ __forceinline__ given_pointers
find_token(const smla_cache_write_params &p, int64_t token)
{
    using layout = given_part<TYPE>;
    constexpr int BYTES = layout::ELEMENT_BYTES;
    const int lane = lane_idx();
    return {(const uint8_t *)p.kv_c + (token * p.kv_c_stride_token + lane * layout::COUNT) * BYTES,
            (const uint8_t *)p.k_pe + (token * p.k_pe_stride_token + lane * 2) * BYTES};
}

template <int TYPE, int ROW, bool ALIGNED>
__device__ __forceinline__ void
load_next(const smla_cache_write_params &p, given_pointers *pointers, given_part<TYPE> *part)
{
    using layout = given_part<TYPE>;
    constexpr int BYTES = layout::ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        smla_load_words<16, ALIGNED, BYTES>(pointers->nope + i * layout::STEP * BYTES,
                                            part->nope[i]);
    }
    if constexpr (smla_row<ROW>::HAS_ROPE) {
        smla_load_words<2 * BYTES, ALIGNED, BYTES>(pointers->rope, part->rope);
    }
    pointers->nope += p.kv_c_stride_token * BYTES;
    pointers->rope += p.k_pe_stride_token * BYTES;
}

/* A scale for an amax. A tile that has only NaN has the amax NaN, which counts as 0. */
__device__ __forceinline__ smla_scale
make_tile_scale(float amax)
{
    return smla_make_scale(smla_scale_of_tile(fminf(fmaxf(amax, 0.0f), FLT_MAX)));
}

/* Finds the scales of a lane's tiles, one per step. */
template <int TYPE>
__device__ __forceinline__ void
find_scales(const uint32_t (*pairs)[given_part<TYPE>::COUNT / 2], smla_scale *scales)
{
    using layout = given_part<TYPE>;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i += 2) {
        float amax[2];
        smla_find_amax_of_tiles<layout::TILE_LANES>(smla_find_largest<layout::COUNT>(pairs[i]),
                                                    smla_find_largest<layout::COUNT>(pairs[i + 1]),
                                                    amax);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            scales[i + j] = make_tile_scale(amax[j]);
        }
    }
}

/* Finds the one scale of a token. */
template <int TYPE>
__device__ __forceinline__ void
find_token_scale(const uint32_t (*pairs)[given_part<TYPE>::COUNT / 2], smla_scale *scales)
{
    using layout = given_part<TYPE>;
    uint32_t largest = smla_find_largest<layout::COUNT>(pairs[0]);
#pragma unroll
    for (int i = 1; i < layout::STEPS; i++) {
        largest = smla_max_bf16x2(largest, smla_find_largest<layout::COUNT>(pairs[i]));
    }
    float amax[2]; /* the same twice */
    smla_find_amax_of_tiles<SMLA_WARP_LANES>(largest, largest, amax);
    const smla_scale scale = make_tile_scale(amax[0]);
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        scales[i] = scale;
    }
}

/* The scales of a lane's tiles: one for all of them where it is the token's or the cache's. */
template <int TYPE, int ROW>
__device__ __forceinline__ void
choose_scales(const uint32_t (*pairs)[given_part<TYPE>::COUNT / 2], float kv_scale,
              smla_scale *scales)
{
    if constexpr (smla_row<ROW>::HAS_ROPE_CODES) {
#pragma unroll
        for (int i = 0; i < given_part<TYPE>::STEPS; i++) {
            scales[i] = make_cache_scale(kv_scale);
        }
    } else if constexpr (smla_row<ROW>::INFO.has_one_scale) {
        find_token_scale<TYPE>(pairs, scales);
    } else {
        find_scales<TYPE>(pairs, scales);
    }
}

/* Codes of four values by a moderate scale: that of their tile, or in ROWs with RoPE codes one that
 * the caller gives, of which values may be any multiple. */
template <int ROW>
__device__ __forceinline__ uint32_t
quantize_x4(const uint32_t pairs[2], const smla_scale &by)
{
    if constexpr (smla_row<ROW>::HAS_ROPE_CODES) {
        const float x[4] = {smla_low_bf16(pairs[0]), smla_high_bf16(pairs[0]),
                            smla_low_bf16(pairs[1]), smla_high_bf16(pairs[1])};
        return smla_quantize_halves_x4(x, smla_signs_of_bf16(pairs), by);
    }
    return smla_quantize_moderate_bf16x4(pairs, by);
}

/* Stores a lane's two RoPE values as codes. */
template <int ROW>
__device__ __forceinline__ void
store_rope_codes(uint32_t pair, const smla_scale &scale, uint8_t *to)
{
    const uint32_t pairs[2] = {pair, 0};
    const uint32_t codes = scale.is_moderate
                               ? quantize_x4<ROW>(pairs, scale)
                               : smla_quantize_rare_bf16x4(pairs[0], pairs[1], scale.scale);
    ((uint16_t *)to)[lane_idx()] = (uint16_t)codes;
}

template <int TYPE, int ROW>
__device__ __forceinline__ void
quantize_token(const uint32_t (*pairs)[given_part<TYPE>::COUNT / 2], const smla_scale *scales,
               uint32_t (*bytes)[given_part<TYPE>::COUNT / 4])
{
    using layout = given_part<TYPE>;
    bool is_moderate = true;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        is_moderate = is_moderate && scales[i].is_moderate;
    }
    if (is_moderate) {
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
#pragma unroll
            for (int k = 0; k < layout::COUNT / 4; k++) {
                bytes[i][k] = quantize_x4<ROW>(pairs[i] + 2 * k, scales[i]);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
#pragma unroll
        for (int k = 0; k < layout::COUNT / 4; k++) {
            bytes[i][k] =
                smla_quantize_rare_bf16x4(pairs[i][2 * k], pairs[i][2 * k + 1], scales[i].scale);
        }
    }
}

/* Stores the scales. Of the lanes that share a tile, lane i stores the scale of step i, for i <
 * STEPS. */
template <int TYPE>
__device__ __forceinline__ void
store_scales(const smla_scale *scales, float *to)
{
    using layout = given_part<TYPE>;
    const int step = lane_idx() % layout::TILE_LANES;
    const int tile = step * (layout::STEP / SMLA_SCALE_TILE) + lane_idx() / layout::TILE_LANES;
    float scale = scales[0].scale;
#pragma unroll
    for (int i = 1; i < layout::STEPS; i++) {
        scale = step == i ? scales[i].scale : scale;
    }
    if (step < layout::STEPS) {
        const uint32_t bits = smla_float_bits(scale);
        smla_store_words<4, true>(to + tile, &bits);
    }
}

/* `kv_scale` is the cache's, which only rows with RoPE codes have. */
template <int TYPE, int ROW, bool ALIGNED>
__device__ __forceinline__ void
write_token(const given_part<TYPE> &part, const row_offsets &offsets, float kv_scale, uint8_t *row)
{
    using layout = given_part<TYPE>;
    constexpr bool OUT_ALIGNED = ALIGNED || smla_row<ROW>::IS_E4M3;
    constexpr int OUT_BYTES = smla_row<ROW>::IS_E4M3 ? layout::COUNT : 2 * layout::COUNT;
    const int lane = lane_idx();
    uint8_t *const nope = row + lane * OUT_BYTES;
    uint32_t pairs[layout::STEPS][layout::COUNT / 2];
    uint32_t rope;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        narrow<TYPE, layout::COUNT>(part.nope[i], pairs[i]);
    }
    if constexpr (smla_row<ROW>::HAS_ROPE) {
        narrow<TYPE, 2>(part.rope, &rope);
    }
    if constexpr (smla_row<ROW>::IS_E4M3) {
        smla_scale scales[layout::STEPS];
        uint32_t bytes[layout::STEPS][layout::COUNT / 4];
        choose_scales<TYPE, ROW>(pairs, kv_scale, scales);
        quantize_token<TYPE, ROW>(pairs, scales, bytes);
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
            smla_store_words<OUT_BYTES, true>(nope + i * OUT_BYTES * SMLA_WARP_LANES, bytes[i]);
        }
        if constexpr (smla_row<ROW>::HAS_ROPE_CODES) {
            store_rope_codes<ROW>(rope, scales[0], row + offsets.rope);
            return;
        }
        store_scales<TYPE>(scales, (float *)(row + offsets.scale));
    } else {
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
            smla_store_words<OUT_BYTES, ALIGNED>(nope + i * OUT_BYTES * SMLA_WARP_LANES, pairs[i]);
        }
    }
    if constexpr (smla_row<ROW>::HAS_ROPE) {
        smla_store_words<4, OUT_ALIGNED>(row + offsets.rope + lane * 4, &rope);
    }
}

/* Whether the kernel for whole vectors may run. */
bool
has_aligned_tokens(const smla_cache_write_params &p)
{
    const int64_t element_bytes = p.input_type == SMLA_FLOAT_FP32 ? 4 : 2;
    return has_aligned_rows(p.kv) &&
           smla_is_multiple(p.kv_c, p.kv_c_stride_token * element_bytes, 16) &&
           smla_is_multiple(p.k_pe, p.k_pe_stride_token * element_bytes, 8);
}

} /* namespace */
