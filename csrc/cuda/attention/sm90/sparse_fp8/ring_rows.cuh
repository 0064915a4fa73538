/* ring_rows.cuh: kinds of cache rows in the shared memory of Hopper's kernels for FP8 rows, and how
 * a lane gets its part of a key from there: codes, scales, RoPE values.
 */
#pragma once

#include "core/kv_format.h"
#include "cuda/ptx/numeric.cuh"
#include "cuda/ptx/ptx_sm90.cuh"

enum {
    ROPE_EXPONENT = 9 /* 16 - 7: values below 2^16 fit f16, and codes with scales below 2^7 */
};

/* A kind of cache row, an entry of smla_kv_formats, and how it lies in the ring. */
template <int NUMBER> struct ring_row {
    static constexpr smla_kv_format_info INFO = smla_kv_formats[NUMBER];
    /* the scales of a split page are copied apart from the row, and put behind it */
    static constexpr bool IS_SPLIT = INFO.layout == SMLA_PAGE_SPLIT;
    static constexpr int COPY_BYTES = IS_SPLIT ? INFO.data_bytes : INFO.row_bytes;
    static constexpr int SCALE_BYTES = INFO.scale_bytes;
    static constexpr int SCALE_OFFSET = IS_SPLIT ? INFO.data_bytes : INFO.scale_offset;
    static constexpr int ROPE_OFFSET = INFO.rope_offset;
    /* bytes from row to row: an odd multiple of 16, so that eight rows at one offset are on all
     * banks */
    static constexpr int PITCH = (INFO.row_bytes + 15) / 32 * 32 + 16;
    static constexpr int HEAD_BYTES = INFO.head_dim * 2; /* bytes in a query of bf16 */
    static constexpr int QUERY_TILES = INFO.head_dim / 64;
    static constexpr int NOPE_TILES = INFO.nope_dim / 64; /* the tile behind them is RoPE's */
    /* RoPE's values are codes, too, and are multiplied as those of any other tile */
    static constexpr bool HAS_ROPE_CODES = smla_has_rope_codes(&smla_kv_formats[NUMBER]);
    static constexpr int CODE_TILES = HAS_ROPE_CODES ? QUERY_TILES : NOPE_TILES;
    static constexpr bool HAS_BYTE_SCALES = INFO.scale_type == SMLA_SCALE_UE8M0;
    /* Rows without scales have one for the whole cache, which multiplies logits and results. */
    static constexpr bool HAS_SCALES = INFO.num_scales != 0;
    static constexpr int NUM_SCALES =
        HAS_SCALES ? SMLA_KV_LORA_RANK / INFO.scale_tile : 0; /* scale tiles of a row's values */
    static constexpr bool ROPE_IS_VALUE = INFO.value_dim > INFO.nope_dim;
    static_assert(QUERY_TILES == NOPE_TILES + 1 && PITCH >= INFO.row_bytes, "as in the cache");
};

/* ---- Scales --------------------------------------------------------------------------------- */

/* The exponent bits of a scale, 0 for NaN and infinities. */
static __device__ __forceinline__ uint32_t
exponent_of_scale(uint32_t scale)
{
    const uint32_t exponent = scale >> 23 & 0xFF;
    return exponent == 0xFF ? 0 : exponent;
}

/* Scales c and 4 + c of rows `row` and row + 8, as they are in the ring: exponent bits (c: column).
 * A byte that is no scale of NoPE values counts as 0. */
template <typename Row>
static __device__ __forceinline__ void
load_byte_scales(uint32_t row, int column, uint32_t scales[2][2])
{
    static_assert(Row::INFO.num_scales == 7, "the last of eight is none");
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t from = row + Row::SCALE_OFFSET + 8 * i * Row::PITCH + column;
        scales[0][i] = ptx_load_shared_1(from);
        scales[1][i] = ptx_load_shared_1(from + 4);
        scales[1][i] = column == 3 ? 0 : scales[1][i];
    }
}

/* The largest magnitude in a lane's part of a RoPE part, as bf16 bits. NaN is the largest. */
static __device__ __forceinline__ uint32_t
find_rope_top(const uint32_t words[8])
{
    uint32_t pair = words[0];
#pragma unroll
    for (int i = 1; i < 8; i++) {
        pair = ptx_max_abs_bf16x2(pair, words[i]);
    }
    return max(pair & 0x7FFFu, pair >> 16 & 0x7FFFu);
}

/* Whether a RoPE value, as bf16 bits, is 2^16 times the unit or more, so that it does not fit f16.
 * NaN fits. */
static __device__ __forceinline__ bool
is_rope_large(uint32_t top, int unit_exponent)
{
    return top >= (uint32_t)(127 + 16 + unit_exponent) << 7 && top <= 0x7F80;
}

/* Stores a lane's part of a RoPE part as f16, times a power of two, which is given as two bf16. */
static __device__ __forceinline__ void
store_rope_halves(uint32_t to, const uint32_t words[8], uint32_t factor)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t halves[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t pair = ptx_mul_bf16x2(words[4 * half + i], factor);
            halves[i] = ptx_cvt_f16x2(smla_low_bf16(pair), smla_high_bf16(pair));
        }
        ptx_store_shared_16(to + 16 * half, halves);
    }
}

/* 146, the largest scale / E that fits, as two f16: 448 * 146 is below 65,504. Scales / E with an
 * exponent up to TOP_SCALE_EXPONENT fit even when they are rounded up. */
enum : uint32_t { LARGEST_SCALES = 0x58905890u };

/* The largest magnitude in the lane's part of a row's RoPE part, as bf16 bits. */
template <typename Row>
static __device__ __forceinline__ uint32_t
rope_of_row(uint32_t row, int column)
{
    uint32_t words[8];
    ptx_load_shared_16(row + Row::ROPE_OFFSET + 32 * column, words);
    ptx_load_shared_16(row + Row::ROPE_OFFSET + 32 * column + 16, words + 4);
    return find_rope_top(words);
}

/* The largest of two scales and of the scale with which codes would be as large as these RoPE
 * values. All are exponent bits. A scale or value that is not finite does not count. */
static __device__ __forceinline__ uint32_t
max_of_scales(uint32_t a, uint32_t b, uint32_t rope)
{
    const int of_rope = (int)(rope >> 7) - ROPE_EXPONENT;
    return max(max(a == 0xFF ? 0 : a, b == 0xFF ? 0 : b),
               rope >= 0x7F80 ? 0 : (uint32_t)max(of_rope, 0));
}

/* The scales of rows `row` and row + 8 that a lane has: those of tile `column`, and where a row has
 * eight tiles, those of tile 4 + column. The first row's scale is in the low half of a word,
 * relative to E, as f16. */
typedef struct scale_pairs {
    uint32_t words[2];
} scale_pairs;

/* The scales of the lane's part of the 128 dimensions of tiles 2t and 2t + 1. */
template <typename Row>
static __device__ __forceinline__ uint32_t
scales_of_part(const scale_pairs &pairs, int lane, int t)
{
    if constexpr (Row::HAS_BYTE_SCALES) {
        /* columns 0 and 1 have dimensions of the first scale, if there are two */
        const bool is_pair = 2 * t + 1 < Row::NOPE_TILES;
        const int of_column = is_pair ? lane % 4 >> 1 : 0;
        return __shfl_sync(0xFFFFFFFFu, pairs.words[t / 2], (lane & 28) | (t % 2 * 2 + of_column));
    } else {
        return __shfl_sync(0xFFFFFFFFu, pairs.words[0], (lane & 28) | t);
    }
}

/* ---- e4m3 to f16 --------------------------------------------------------------------------- */

/* Four values times two scales: bytes 0 and 2 times the low half of `scale`, 1 and 3 the high. */
static __device__ __forceinline__ void
scale_e4m3x4(uint32_t bytes, uint32_t scale, uint32_t *low, uint32_t *high)
{
    ptx_cvt_f16x4_e4m3x4(bytes, low, high);
    *low = ptx_mul_f16x2(*low, scale);
    *high = ptx_mul_f16x2(*high, scale);
}

/* Operand A for 16 dimensions of scores: four codes of row `row` and four of row + 8. */
static __device__ __forceinline__ void
widen_key_step(uint32_t upper, uint32_t lower, uint32_t a[4])
{
    ptx_cvt_f16x4_e4m3x4(upper, &a[0], &a[2]);
    ptx_cvt_f16x4_e4m3x4(lower, &a[1], &a[3]);
}

/* widen_key_step, each value times the scale of its row, from scales_of_part. */
static __device__ __forceinline__ void
convert_key_step(uint32_t upper, uint32_t lower, uint32_t scales, uint32_t a[4])
{
    uint32_t of_upper, of_lower;
    ptx_double_halves(scales, &of_upper, &of_lower);
    widen_key_step(upper, lower, a);
    a[0] = ptx_mul_f16x2(a[0], of_upper);
    a[1] = ptx_mul_f16x2(a[1], of_lower);
    a[2] = ptx_mul_f16x2(a[2], of_upper);
    a[3] = ptx_mul_f16x2(a[3], of_lower);
}

/* Loads the bytes of rows `row` and row + 8 for a 64-dimension tile of the query. `nope` is the
 * address of the lane's column of dimensions in tile 0 (store_query_words). */
template <typename Row>
static __device__ __forceinline__ void
load_nope_words(uint32_t nope, int tile, uint32_t words[8])
{
    const bool is_single = Row::CODE_TILES % 2 != 0 && tile == Row::CODE_TILES - 1;
    const uint32_t from =
        nope + 128 * (tile / 2) + 16 * (tile % 2) - (is_single ? 16 * (ptx_thread() % 4) : 0);
    ptx_load_shared_16(from, words);
    ptx_load_shared_16(from + 8 * Row::PITCH, words + 4);
}
