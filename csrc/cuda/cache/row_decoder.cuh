/* row_decoder.cuh: a warp converts cache rows of any format to bf16 or fp32.
 *
 * A chunk is CHUNK_ROWS rows. A warp reads all of them before it writes the first. The conversion
 * rules are those of csrc/cpu/cache/row_decoder.h.
 */
#pragma once

#include "cuda/cache/cache_rows.cuh"
#include "cuda/ptx/e2m1.cuh"

namespace {

enum {
    CHUNK_ROWS = 2,         /* rows that a warp reads together */
    READ_BLOCKS_PER_SM = 2, /* blocks per SM, at least */
};

/* A lane's part of a row. Rows of 576 values keep RoPE values beside the steps, in `rope`: two
 * bf16, or two codes in its low half. In fp8_v4 the RoPE values are the last values of the last
 * step, which some lanes hold as bf16. */
template <int ROW, int OUT> struct row_part {
    static constexpr smla_kv_format_info INFO = smla_row<ROW>::INFO;
    enum {
        HAS_ROPE_BESIDE = INFO.head_dim == SMLA_HEAD_DIM,
        /* Formats whose pages may be split have their scales at an address of their own. */
        HAS_SCALES_APART = INFO.num_scales != 0 &&
            !(INFO.scale_type == SMLA_SCALE_FP32 && INFO.layout == SMLA_PAGE_ROWS),
        HAS_ROPE_INSIDE = !HAS_ROPE_BESIDE && INFO.rope_dim != 0,
        VALUES = HAS_ROPE_BESIDE ? INFO.nope_dim : INFO.head_dim,
        /* Values per lane and step: 16 bytes of out, or less for short keys. */
        COUNT = OUT == SMLA_FLOAT_FP32 || VALUES == SMLA_INDEX_HEAD_DIM ? 4 : 8,
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = VALUES / STEP,
        OUT_BYTES = OUT == SMLA_FLOAT_FP32 ? 4 * COUNT : 2 * COUNT,
        IN_BYTES = smla_row<ROW>::IS_BF16 ? 2 * COUNT
        : smla_row<ROW>::IS_E4M3          ? COUNT
                                          : COUNT / 2,
        IN_WORDS = HAS_ROPE_INSIDE ? COUNT / 2 : (IN_BYTES + 3) / 4,
    };
    uint32_t nope[STEPS][IN_WORDS];
    uint32_t scale_bits[STEPS];
    uint32_t rope;
};

/* Zeros that are read in place of a row that does not exist; they stand for 0 in every format. */
__device__ const uint4 no_row[SMLA_HEAD_DIM * 2 / sizeof(uint4)] = {};

__device__ __forceinline__ smla_kv_token
find_no_row()
{
    return {(uint8_t *)no_row, (uint8_t *)no_row};
}

/* Whether a lane's values in a step are RoPE values. */
template <int ROW, int OUT>
__device__ __forceinline__ bool
is_rope_step(int step)
{
    using layout = row_part<ROW, OUT>;
    return layout::HAS_ROPE_INSIDE &&
           step * layout::STEP + lane_idx() * layout::COUNT >= layout::INFO.nope_dim;
}

/* Loads a lane's quantised values of a step, or its RoPE values. */
template <int ROW, int OUT, bool ALIGNED>
__device__ __forceinline__ void
load_codes(const uint8_t *row, int step, uint32_t *words)
{
    using layout = row_part<ROW, OUT>;
    constexpr bool IN_ALIGNED = ALIGNED || !smla_row<ROW>::IS_BF16;
    const uint8_t *const from = row + step * layout::IN_BYTES * SMLA_WARP_LANES;
    if (is_rope_step<ROW, OUT>(step)) {
        const int at = step * layout::STEP + lane_idx() * layout::COUNT - layout::INFO.nope_dim;
#pragma unroll
        for (int k = 0; k < layout::COUNT / 2; k += 2) {
            smla_load_words<8, true>(row + layout::INFO.rope_offset + 2 * at + 4 * k, words + k);
        }
    } else if constexpr (layout::IN_BYTES == 2) {
        words[0] = __ldg((const uint16_t *)from + lane_idx());
    } else {
        smla_load_words<layout::IN_BYTES, IN_ALIGNED>(from + lane_idx() * layout::IN_BYTES, words);
    }
}

/* Loads the scale of a lane's tile as the format stores it. */
template <int ROW>
__device__ __forceinline__ uint32_t
load_scale_bits(const uint8_t *scales, int tile)
{
    uint32_t bits;
    if constexpr (smla_row<ROW>::INFO.scale_type == SMLA_SCALE_FP32) {
        smla_load_words<4, true>(scales + tile * 4, &bits);
    } else {
        bits = __ldg(scales + tile);
    }
    return bits;
}

template <int ROW>
__device__ __forceinline__ float
read_tile_scale(uint32_t bits, float kv_scale)
{
    constexpr smla_scale_type TYPE = smla_row<ROW>::INFO.scale_type;
    return TYPE == SMLA_SCALE_CACHE   ? kv_scale
           : TYPE == SMLA_SCALE_UE8M0 ? smla_ue8m0_to_float((uint8_t)bits)
           : TYPE == SMLA_SCALE_E4M3  ? smla_e4m3_to_float((uint8_t)bits)
                                      : smla_bits_float(bits);
}

template <int ROW, int OUT, bool ALIGNED>
__device__ __forceinline__ void
load_row(const uint8_t *row, const uint8_t *scales, const row_offsets &offsets,
         row_part<ROW, OUT> *part)
{
    using layout = row_part<ROW, OUT>;
    constexpr bool IN_ALIGNED = ALIGNED || !smla_row<ROW>::IS_BF16;
    const int lane = lane_idx();
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        load_codes<ROW, OUT, ALIGNED>(row, i, part->nope[i]);
        if constexpr (layout::INFO.num_scales != 0) {
            const int tile = (i * layout::STEP + lane * layout::COUNT) / layout::INFO.scale_tile;
            part->scale_bits[i] = load_scale_bits<ROW>(scales, tile);
        }
    }
    if constexpr (smla_row<ROW>::HAS_ROPE_CODES) {
        part->rope = __ldg((const uint16_t *)(row + offsets.rope) + lane);
    } else if constexpr (layout::HAS_ROPE_BESIDE) {
        smla_load_words<4, IN_ALIGNED>(row + offsets.rope + lane * 4, &part->rope);
    }
}

/* Converts COUNT products, none of which is NaN, to words of out. */
template <int OUT, int COUNT>
__device__ __forceinline__ void
pack_products(const float *products, uint32_t *words)
{
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        if constexpr (OUT == SMLA_FLOAT_FP32) {
            words[i] = smla_float_bits(products[i]);
            words[i + 1] = smla_float_bits(products[i + 1]);
        } else {
            words[i / 2] = smla_cvt_bf16x2(products[i], products[i + 1]);
        }
    }
}

/* Converts the e4m3 values of one step to words of out. */
template <int OUT, int COUNT, bool PLAIN>
__device__ __forceinline__ void
upconvert_step(const uint32_t *bytes, float scale, uint32_t *words)
{
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
        if constexpr (PLAIN || OUT == SMLA_FLOAT_FP32) {
            float products[4];
            if constexpr (PLAIN) {
                smla_scale_plain_e4m3x4(bytes[i], scale, products);
            } else {
                smla_spread_vector(smla_scale_rare_e4m3x4(bytes[i], scale), products);
            }
            pack_products<OUT, 4>(products, words + (OUT == SMLA_FLOAT_FP32 ? 4 : 2) * i);
        } else {
            const uint2 rare = smla_scale_rare_e4m3x4_to_bf16(bytes[i], scale);
            words[2 * i] = rare.x;
            words[2 * i + 1] = rare.y;
        }
    }
}

/* Converts a lane's two RoPE codes to the first words of `words`. */
template <int OUT>
__device__ __forceinline__ void
upconvert_rope(uint32_t codes, float scale, uint32_t words[4])
{
    if (smla_is_plain_scale(scale) && (smla_mark_nan_e4m3x4(codes) & 0x80808080u) == 0) {
        upconvert_step<OUT, 4, true>(&codes, scale, words);
    } else {
        upconvert_step<OUT, 4, false>(&codes, scale, words);
    }
}

/* The products of two e2m1 values and any scale. */
__device__ __noinline__ float2
scale_rare_e2m1x2(uint32_t codes, float scale)
{
    return make_float2(smla_scale_value(smla_e2m1_to_float((uint8_t)(codes & 15u)), scale),
                       smla_scale_value(smla_e2m1_to_float((uint8_t)(codes >> 4 & 15u)), scale));
}

__device__ __noinline__ uint32_t
scale_rare_e2m1x2_to_bf16(uint32_t codes, float scale)
{
    const float2 products = scale_rare_e2m1x2(codes, scale);
    return smla_round_rare_floats(products.x, products.y);
}

/* Converts the e2m1 values of one step to words of out. */
template <int OUT, int COUNT>
__device__ __forceinline__ void
upconvert_e2m1(uint32_t codes, float scale, uint32_t *words)
{
    const bool is_plain = smla_is_plain_e2m1_scale(scale);
    float products[8];
    smla_scale_plain_e2m1x8(codes, scale, products);
    pack_products<OUT, COUNT>(products, words);
    if (is_plain) {
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) {
        if constexpr (OUT == SMLA_FLOAT_FP32) {
            const float2 rare = scale_rare_e2m1x2(codes >> (4 * i), scale);
            words[i] = smla_float_bits(rare.x);
            words[i + 1] = smla_float_bits(rare.y);
        } else {
            words[i / 2] = scale_rare_e2m1x2_to_bf16(codes >> (4 * i), scale);
        }
    }
}

/* Converts the bf16 values of one step to words of out. */
template <int OUT, int COUNT>
__device__ __forceinline__ void
widen_bf16(const uint32_t *pairs, uint32_t *words)
{
#pragma unroll
    for (int k = 0; k < (OUT == SMLA_FLOAT_FP32 ? COUNT : COUNT / 2); k++) {
        const uint32_t pair = pairs[OUT == SMLA_FLOAT_FP32 ? k / 2 : k];
        words[k] = OUT != SMLA_FLOAT_FP32 ? pair : k % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u;
    }
}

/* Whether the fast conversion of e4m3 values is exact: none of them is NaN, and their scales are
 * plain. */
template <int ROW, int OUT>
__device__ __forceinline__ bool
is_plain_row(const row_part<ROW, OUT> &part, float kv_scale)
{
    using layout = row_part<ROW, OUT>;
    uint32_t marks = 0;
    bool is_plain = true;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        is_plain =
            is_plain && smla_is_plain_scale(read_tile_scale<ROW>(part.scale_bits[i], kv_scale));
#pragma unroll
        for (int k = 0; k < layout::IN_BYTES / 4; k++) {
            marks |= smla_mark_nan_e4m3x4(part.nope[i][k]);
        }
    }
    return is_plain && (marks & 0x80808080u) == 0;
}

/* Converts the values of all steps of a lane to words of out. */
template <int ROW, int OUT>
__device__ __forceinline__ void
upconvert(const row_part<ROW, OUT> &part, float kv_scale,
          uint32_t (*words)[row_part<ROW, OUT>::OUT_BYTES / 4])
{
    using layout = row_part<ROW, OUT>;
    constexpr int COUNT = layout::COUNT;
    bool is_plain = true;
    if constexpr (smla_row<ROW>::IS_E4M3) {
        is_plain = is_plain_row<ROW, OUT>(part, kv_scale);
    }
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        if constexpr (smla_row<ROW>::IS_BF16) {
            widen_bf16<OUT, COUNT>(part.nope[i], words[i]);
        } else {
            const float scale = read_tile_scale<ROW>(part.scale_bits[i], kv_scale);
            if (is_rope_step<ROW, OUT>(i)) {
                widen_bf16<OUT, COUNT>(part.nope[i], words[i]);
            } else if constexpr (!smla_row<ROW>::IS_E4M3) {
                upconvert_e2m1<OUT, COUNT>(part.nope[i][0], scale, words[i]);
            } else if (is_plain) {
                upconvert_step<OUT, COUNT, true>(part.nope[i], scale, words[i]);
            } else {
                upconvert_step<OUT, COUNT, false>(part.nope[i], scale, words[i]);
            }
        }
    }
}

template <int ROW, int OUT, bool ALIGNED>
__device__ __forceinline__ void
store_row(const row_part<ROW, OUT> &part, float kv_scale, uint8_t *out)
{
    using layout = row_part<ROW, OUT>;
    constexpr int UNIT = OUT == SMLA_FLOAT_FP32 ? 4 : 2;
    constexpr int BYTES = layout::OUT_BYTES;
    const int lane = lane_idx();
    uint32_t words[layout::STEPS][BYTES / 4];
    upconvert<ROW, OUT>(part, kv_scale, words);
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        smla_store_words<BYTES, ALIGNED, UNIT>(out + (i * SMLA_WARP_LANES + lane) * BYTES,
                                               words[i]);
    }
    uint8_t *const rope = out + SMLA_KV_LORA_RANK * UNIT + lane * 2 * UNIT;
    if constexpr (!layout::HAS_ROPE_BESIDE) {
        return;
    } else if constexpr (smla_row<ROW>::HAS_ROPE_CODES) {
        uint32_t values[4];
        upconvert_rope<OUT>(part.rope, kv_scale, values);
        smla_store_words<2 * UNIT, ALIGNED, UNIT>(rope, values);
    } else if constexpr (OUT == SMLA_FLOAT_FP32) {
        const uint32_t pair[2] = {part.rope << 16, part.rope & 0xFFFF0000u};
        smla_store_words<8, ALIGNED, UNIT>(rope, pair);
    } else {
        smla_store_words<4, ALIGNED, UNIT>(rope, &part.rope);
    }
}

/* Moves a chunk. Lane i passes the source and target of row i; the target of a missing row is
 * null. */
template <int ROW, int OUT, bool ALIGNED>
__device__ __forceinline__ void
move_chunk(const smla_kv_token &source, const uint8_t *target, const row_offsets &offsets,
           float kv_scale)
{
    row_part<ROW, OUT> parts[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        const uint8_t *const row = shuffle_pointer(source.row, i);
        const uint8_t *scales = row + offsets.scale;
        if constexpr (row_part<ROW, OUT>::HAS_SCALES_APART) {
            scales = shuffle_pointer(source.scales, i);
        }
        load_row<ROW, OUT, ALIGNED>(row, scales, offsets, &parts[i]);
    }
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        uint8_t *const out = shuffle_pointer(target, i);
        if (out != nullptr) {
            store_row<ROW, OUT, ALIGNED>(parts[i], kv_scale, out);
        }
    }
}

} /* namespace */
