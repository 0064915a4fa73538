/* fp8_shape.cuh: the template parameters of the kernels attention_fp8_sm90.cu,
 * attention_fp8_dense_sm90.cu, attention_fp8_e4m3_sm90.cu and attention_fp8_tiles_sm90.cu, and what
 * follows from them: sizes of the ring and of tiles of heads, how keys are found and counted, and
 * which kernel stands in.
 */
#pragma once

#include "cuda/attention/keys/key_stream.cuh"
#include "cuda/attention/sm80/mqa/attend.cuh"
#include "cuda/attention/sm90/sparse_fp8/ring_rows.cuh"
#include "cuda/ptx/wgmma.cuh"

enum {
    GRANULE_KEYS = 16,
    GATHER_KEYS = GRANULE_KEYS / GATHER_WARPS, /* keys per gather warp in a granule */
    BLOCK_GRANULES = 4,                        /* the block of a warpgroup: 64 keys */
    STEP_GRANULES = 2 * BLOCK_GRANULES,        /* the blocks of both warpgroups */
    STEP_KEYS = SMLA_SM90_KEYS,
    CONSUMER_WARPS = CTA_WARPS,
    CONSUMER_THREADS = CTA_THREADS,
    GROUP_THREADS = 128,
    FP8_THREADS = CONSUMER_THREADS + GATHER_WARPS * SMLA_WARP_LANES,
    CONSUMER_REGISTERS = 240,
    GATHER_REGISTERS = 24,
};

static_assert((int)STEP_KEYS == STEP_GRANULES * GRANULE_KEYS, "kernels.h says so");
static_assert(FP8_THREADS == 384 && 2 * CONSUMER_REGISTERS + GATHER_REGISTERS == 3 * 168,
              "setmaxnreg shares out what the launch gave: 168 each");

/* 16 cache rows as they lie in the cache, and all that belongs to them: one address finds it. */
template <typename Row, bool HAS_SCALES = Row::HAS_SCALES> struct ring_granule {
    alignas(16) uint8_t rows[GRANULE_KEYS][Row::PITCH];
    alignas(16) uint16_t scales[Row::NUM_SCALES][GRANULE_KEYS]; /* scales relative to E, as f16 */
    uint64_t full;
    uint64_t empty;
    uint32_t is_key;         /* byte w: four bits, for the rows of gather warp w */
    uint32_t reference_jump; /* mark of a block's first granule (mark_reference_jump) */
};

/* Rows without scales. Their kernel has RANGED, so it takes no outlier keys first. */
template <typename Row> struct ring_granule<Row, false> {
    alignas(16) uint8_t rows[GRANULE_KEYS][Row::PITCH];
    uint64_t full;
    uint64_t empty;
    uint32_t is_key;
    uint32_t reference_jump;
};

/* The key of an item that has only one: in a dense call its position, else its index. */
template <bool RANGED> struct only_key {
    typedef listed_index type;
};

template <> struct only_key<true> {
    typedef listed_position type;
};

/* Which keys the tokens of an item see (tile_limits.cuh); nothing where an item is one token. */
template <bool TILED> struct tile_limits {};

template <> struct tile_limits<true> {
    alignas(
        4) uint8_t hidden[SMLA_TILE_TOKENS]; /* last keys of the tile that a token does not see */
    int32_t end;                             /* where the keys of the tile end */
    int32_t last_step[2]; /* where an item's last step begins, for items in turn */
};

template <int ROW, int HEADS_, bool MAXIMA_, bool RANGED_ = false, bool TILED_ = false>
struct fp8_shape {
    typedef ring_row<ROW> Row;
    typedef ring_granule<Row> Granule;
    static constexpr int HEADS = HEADS_;
    static constexpr bool MAXIMA = MAXIMA_; /* the caller wants max_logits */
    /* A dense call: keys are ranges of positions (range_gather.cuh), not lists of indices. */
    static constexpr bool RANGED = RANGED_;
    /* An item is a tile of rows: the heads of several query tokens (find_row_item). */
    static constexpr bool TILED = TILED_;
    static_assert(RANGED || !TILED, "tokens of a request see ranges");
    typedef tile_limits<TILED_> Limits;
    typedef typename only_key<RANGED>::type OnlyKey;
    static constexpr int GRANULES_OF_64 = /* with 64 heads and without maxima */
        Row::ROPE_IS_VALUE ? 15
        : Row::HAS_SCALES  ? 13
                           : 14;
    /* Fewer heads leave room for whole blocks. Rows without scales take more of it, where HBM
     * binds. */
    static constexpr int GRANULES = HEADS == 64                       ? GRANULES_OF_64 - MAXIMA
                                    : HEADS == 16 && !Row::HAS_SCALES ? 20
                                                                      : 16;
    static constexpr int GRANULE_BYTES = (int)sizeof(Granule);
    /* Indices per lane that consumers load at once to count keys: short code for short calls. */
    static constexpr int FIRST_COUNT_LOADS = HEADS == 16 ? 8 : 16;
    /* Indices per lane that gather warps load at once; fewer heads have no registers for eight. */
    static constexpr int COUNT_LOADS = HEADS == 64 ? 8 : 6;
    static constexpr bool COUNTS_APART = HEADS == 64 && !MAXIMA; /* maxima leave no register */
    static constexpr bool OUTLIERS_FIRST =
        HEADS == 64 && !Row::IS_SPLIT && !RANGED; /* see outlier_keys.cuh */
    /* Products of keys are added up apart for each scale, and only the sums are scaled. With 64
     * heads that takes as many multiplications as scaling the values, and too many registers. */
    static constexpr bool SCALES_SCORES = HEADS == 16 && Row::HAS_SCALES && !Row::HAS_BYTE_SCALES;
    static constexpr int SCORE_PARTS = SCALES_SCORES ? Row::NUM_SCALES : 1;
    static constexpr int CHUNKS = HEADS / 16;
    static constexpr int SLOTS = HEADS < 32 ? 32 : HEADS; /* sums per warp: 1 or 2 per lane */
    static constexpr int PROB_BYTES = HEADS * 2;          /* weights of one key */
    static constexpr int PROBS_SWIZZLE = HEADS == 64   ? WGMMA_SWIZZLE_128
                                         : HEADS == 32 ? WGMMA_SWIZZLE_64
                                                       : WGMMA_SWIZZLE_32;
    /* The fallback has tiles of at most 32 heads: larger ones need more registers. */
    static constexpr int FALLBACK_TILES = HEADS == 64 ? 2 : 1;
    typedef tile<HEADS_ / FALLBACK_TILES,
                 Row::ROPE_IS_VALUE ? SMLA_ROWS_512
                 : Row::HAS_SCALES  ? SMLA_ROWS_FP8
                                    : SMLA_ROWS_E4M3_576,
                 RANGED, false, true, TILED>
        Portable;
};

/* ---- Launchers ----------------------------------------------------------------------------- */

/* Starts the portable kernel, for calls whose rows no bulk copy brings, and for others that a
 * kernel for Hopper does not serve. */
template <int ROW, int HEADS>
static cudaError_t
launch_portable(const smla_attention_params *params, const smla_attention_start *start)
{
    if constexpr (ring_row<ROW>::ROPE_IS_VALUE) {
        return HEADS == 64   ? smla_attend_sm80_512_64(params, start)
               : HEADS == 32 ? smla_attend_sm80_512_32(params, start)
                             : smla_attend_sm80_512_16(params, start);
    } else if constexpr (!ring_row<ROW>::HAS_SCALES) {
        return HEADS == 64   ? smla_attend_sm80_e4m3_576_64(params, start)
               : HEADS == 32 ? smla_attend_sm80_e4m3_576_32(params, start)
                             : smla_attend_sm80_e4m3_576_16(params, start);
    } else {
        return HEADS == 64   ? smla_attend_sm80_fp8_64(params, start)
               : HEADS == 32 ? smla_attend_sm80_fp8_32(params, start)
                             : smla_attend_sm80_fp8_16(params, start);
    }
}
