/* coded_gather.cuh: how the gather warps of attention_bf16_sm90.cu bring keys of codes: e4m3
 * or e2m1, with a scale byte for 16, 32 or 64 values. They become bf16 in shared memory, exactly
 * unless they are subnormal. So the consumers need not know what the cache holds.
 *
 * Two warps, twins, share a quarter of the keys and know the same lists. Each has 8 rows of every
 * block, in two load waves of four rows. In a load wave, lane l has chunk l % 8 of row l / 8: eight
 * values of each of a half's four tiles. It loads them as they are in memory and stores 16 bytes
 * per tile. A load wave of the next half goes into the registers that were just stored. RoPE
 * values, which are bf16 already, are copied. A step begins by asking L2 for all of its rows.
 *
 * NaN and scales from 2^8 on are rare. Where a half has any, it is stored again by the code of
 * coded_rows.cuh, which serves all values.
 *
 * Measured on an H200, 64 heads, 128 x 2 tokens of 128 + 512 keys: 92 us, where bf16 rows take 68.
 * With one warp per quarter it was 141 us; with a stream's state in local memory 111 us; with rows
 * prefetched a step ahead 96 us. A twin's step takes 14,000 cycles. 3000 of them are its start,
 * because the indices, scales and first codes come one after the other. Half of the rest are waits
 * for codes and for a free half. The fence and the decoding itself are 1 % and 7 % of the time.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_gather.cuh"

enum {
    HALF_PIECES = PIECES / 2,
    SCALE_PITCH = SMLA_WARP_LANES * 4, /* bytes between words of scales of a key */
    MAX_USUAL_SCALE = 134,             /* 2^7: times 2^120 it is a bf16 */
};

/* What a lane has of a load wave's row in half a block: eight codes of each tile. */
typedef struct coded_load_wave {
    uint32_t codes[HALF_TILES][2];
} coded_load_wave;

/* What a warp leaves in shared memory during a step. Lane l has element l of each array. `scales`
 * and `row` are of row l % 16 of the warp's rows of block l / 16. The others have no register
 * during the step. */
typedef struct coded_keys {
    uint32_t scales[SMLA_MAX_ROW_SCALES / 4][SMLA_WARP_LANES]; /* four scales per word */
    const uint8_t *row[SMLA_WARP_LANES];                       /* NULL if there is no key */
    const int32_t *at[SMLA_WARP_LANES]; /* field of the lane's key_stream, as the next three */
    int32_t left[SMLA_WARP_LANES];
    uint32_t waiting[SMLA_WARP_LANES];
    uint32_t over[SMLA_WARP_LANES];
    int32_t slot[SMLA_WARP_LANES];
} coded_keys;

static_assert(GATHER_WARPS * sizeof(coded_keys) <= TILE_BYTES, "they fit");

/* The warp's keys, in the tiles that keys of 512 values leave free: one tile for the warps that are
 * first of their twins, one for the others. */
template <typename Keys>
static __device__ __forceinline__ volatile coded_keys *
find_coded_keys(bf16_memory *shared)
{
    return (volatile coded_keys *)(gather_twin<Keys>() == 0 ? shared->query[ROPE_TILE]
                                                            : shared->keys[1][ROPE_TILE]) +
           __shfl_sync(0xFFFFFFFFu, gather_warp_again(), 0); /* the same in all lanes, for ptxas */
}

/* ---- The lane's stream --------------------------------------------------------------------- */

static __device__ __forceinline__ void
park_stream(const key_stream &stream, volatile coded_keys *to)
{
    const int lane = gather_lane();
    to->at[lane] = stream.at;
    to->left[lane] = stream.left;
    to->waiting[lane] = stream.waiting;
    to->over[lane] = stream.over;
}

static __device__ __forceinline__ void
take_back_stream(const volatile coded_keys *from, key_stream *stream)
{
    const int lane =
        (int)(ptx_thread() % SMLA_WARP_LANES); /* recomputed here, to save a register */
    stream->at = from->at[lane];
    stream->left = from->left[lane];
    stream->waiting = from->waiting[lane];
    stream->over = from->over[lane];
}

/* ---- Loads --------------------------------------------------------------------------------- */

/* Whether a tile of a half has bf16 values: the last one, in rows with a RoPE part. */
template <bool ROPE>
static __device__ __forceinline__ constexpr bool
is_rope_tile(int half, int tile)
{
    return ROPE && half == 1 && tile == HALF_TILES - 1;
}

/* Starts a load wave of a half: the lane's chunk of each tile of codes in its row. */
template <bool E2M1, bool ROPE>
static __device__ __forceinline__ void
start_load_wave(const uint8_t *row, int half, int chunk, coded_load_wave *load_wave)
{
    constexpr int CHUNK_BYTES = E2M1 ? 4 : 8;
    const uint8_t *const from = row + (half * (HALF_VALUES / 8) + chunk) * CHUNK_BYTES;
#pragma unroll
    for (int tile = 0; tile < HALF_TILES; tile++) {
        if (is_rope_tile<ROPE>(half, tile)) {
            continue;
        }
        if constexpr (E2M1) {
            ptx_load_4(from + tile * 8 * CHUNK_BYTES, row != NULL, 0, &load_wave->codes[tile][0]);
        } else {
            ptx_load_8(from + tile * 8 * CHUNK_BYTES, row != NULL, load_wave->codes[tile]);
        }
    }
}

/* Copies the lane's chunk of its row's RoPE values. */
static __device__ __forceinline__ void
copy_rope(uint32_t to, const uint8_t *row, int chunk)
{
    ptx_cp_async_16_or_zero(to, row + smla_row<SMLA_ROW_FP8_V4>::ROPE_OFFSET + chunk * 16,
                            row != NULL);
}

/* ---- Codes to bf16 ------------------------------------------------------------------------- */

/* Decodes eight codes, times the scale with this byte. `largest` has in each half the largest
 * magnitude so far, as bf16 times 2^-120 (widen_e4m3x2). */
template <bool E2M1>
static __device__ __forceinline__ void
decode_codes(const uint32_t codes[2], uint32_t byte, uint32_t words[4], uint32_t *largest)
{
    if constexpr (E2M1) {
        const uint4 values = widen_e2m1x8(codes[0]);
        const uint32_t factor = widen_e4m3x2(byte | byte << 16);
        words[0] = ptx_fma_bf16x2(values.x, factor, 0x80008000u);
        words[1] = ptx_fma_bf16x2(values.y, factor, 0x80008000u);
        words[2] = ptx_fma_bf16x2(values.z, factor, 0x80008000u);
        words[3] = ptx_fma_bf16x2(values.w, factor, 0x80008000u);
    } else {
        const uint32_t factor = (byte + 120) * 0x00800080u; /* its scale times 2^120, twice */
        uint32_t magnitudes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t bytes = __byte_perm(codes[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424);
            magnitudes[i] = bytes >> 4 & 0x07F007F0u;
            words[i] = ptx_fma_bf16x2((bytes & 0x80008000u) | magnitudes[i], factor, 0x80008000u);
        }
        *largest = __vimax3_u16x2(*largest, magnitudes[0], magnitudes[1]);
        *largest = __vimax3_u16x2(*largest, magnitudes[2], magnitudes[3]);
    }
}

/* ---- Stores -------------------------------------------------------------------------------- */

/* The scales of the lane's chunks in a half's tiles. A tile of 64 values has one scale in rows with
 * a RoPE part, two in other rows of e4m3, and four in rows of e2m1. */
template <bool E2M1, bool ROPE> struct half_scales {
    static constexpr int TILE_SCALES = E2M1 ? 4 : ROPE ? 1 : 2;
    static constexpr int WORD_TILES = 4 / TILE_SCALES;
    uint32_t words[TILE_SCALES]; /* the lane's own scales are the lowest bytes of a tile's */
};

/* `key` is the address of a key's first scales. */
template <bool E2M1, bool ROPE>
static __device__ __forceinline__ half_scales<E2M1, ROPE>
load_scales(uint32_t key, int half, int chunk)
{
    typedef half_scales<E2M1, ROPE> scales_type;
    scales_type scales;
    const int own = chunk * scales_type::TILE_SCALES / 8;
#pragma unroll
    for (int i = 0; i < scales_type::TILE_SCALES; i++) {
        scales.words[i] =
            ptx_load_shared_4(key + (half * scales_type::TILE_SCALES + i) * SCALE_PITCH) >> 8 * own;
    }
    return scales;
}

template <bool E2M1, bool ROPE>
static __device__ __forceinline__ uint32_t
scale_of_tile(const half_scales<E2M1, ROPE> &scales, int tile)
{
    constexpr int WORD_TILES = half_scales<E2M1, ROPE>::WORD_TILES;
    return scales.words[tile / WORD_TILES] >> tile % WORD_TILES * (32 / WORD_TILES) & 0xFF;
}

/* Stores the codes of a load wave in a half as bf16. `to` is the address of the lane's chunk in the
 * half's first tile. */
template <bool E2M1, bool ROPE>
static __device__ __forceinline__ void
store_load_wave(int half, const half_scales<E2M1, ROPE> &scales, uint32_t to,
                const coded_load_wave &load_wave, uint32_t *largest)
{
#pragma unroll
    for (int tile = 0; tile < HALF_TILES; tile++) {
        if (!is_rope_tile<ROPE>(half, tile)) {
            uint32_t words[4];
            decode_codes<E2M1>(load_wave.codes[tile], scale_of_tile(scales, tile), words, largest);
            ptx_store_shared_16(to + tile * TILE_BYTES, words);
        }
    }
}

/* Stores rows of a half again, by code that serves all values. The first is row `first` of the
 * block. */
static __device__ __forceinline__ void
store_rare_rows(const list_facts &facts, const volatile coded_keys *keys, int first, int num_rows,
                uint32_t base, int block, int half)
{
    const int chunk = half * (HALF_VALUES / 8) + gather_lane();
    const int scale = chunk >> facts.scale_shift;
    static_assert(HALF_VALUES / 8 == SMLA_WARP_LANES, "a chunk per lane");
    __syncwarp(); /* the usual code has stored all chunks */
#pragma unroll 1
    for (int i = first; i < first + num_rows; i++) {
        const int key = block * WARP_ROWS + i;
        coded_chunk coded = load_codes(facts, keys->row[key], chunk);
        coded.scale = keys->scales[scale / 4][key] >> scale % 4 * 8 & 0xFF;
        const uint4 values = decode_chunk(facts, chunk, coded);
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
        const int row = gather_warp_again() * WARP_ROWS + i;
        ptx_store_shared_16(BF16_AT(base, keys) + block * BLOCK_BYTES + chunk / 8 * TILE_BYTES +
                                row * 128 + ((chunk % 8) ^ (row & 7)) * 16,
                            words);
    }
}

/* ---- A step -------------------------------------------------------------------------------- */

/* Loads the scales of the lane's key. */
template <bool E2M1, bool ROPE>
static __device__ __forceinline__ void
load_all_scales(const smla_kv_token &from, uint32_t words[E2M1 ? 8 : 4])
{
#pragma unroll
    for (int i = 0; i < (E2M1 ? 8 : 4); i += 2) {
        ptx_load_8(from.scales + 4 * i, from.row != NULL && (i < 2 || !ROPE), words + i);
    }
}

/* Asks L2 for the lane's row. */
template <bool E2M1, bool ROPE>
static __device__ __forceinline__ void
prefetch_row(const uint8_t *row)
{
#pragma unroll
    for (int at = 0; at < SMLA_KV_LORA_RANK / (E2M1 ? 2 : 1); at += 128) {
        ptx_prefetch_l2(row + at, row != NULL);
    }
    constexpr int DATA_BYTES = (E2M1   ? smla_row<SMLA_ROW_FP4_V41>::INFO
                                : ROPE ? smla_row<SMLA_ROW_FP8_V4>::INFO
                                       : smla_row<SMLA_ROW_FP8_V41>::INFO)
                                   .data_bytes;
    ptx_prefetch_l2(row + DATA_BYTES - 1, row != NULL);
}

/* Stores the scales of the lane's key. Returns whether a scale of any of the warp's keys is
 * unusual. */
template <bool E2M1>
static __device__ __forceinline__ bool
store_all_scales(const uint32_t words[E2M1 ? 8 : 4], volatile coded_keys *keys)
{
    uint32_t rare = 0;
#pragma unroll
    for (int i = 0; i < (E2M1 ? 8 : 4); i++) {
        /* sets bit 7 of a byte that is NaN, or from MAX_USUAL_SCALE + 1 on */
        rare |= E2M1 ? smla_mark_nan_e4m3x4(words[i])
                     : words[i] & ((words[i] & 0x7F7F7F7Fu) + 0x79797979u);
        keys->scales[i][gather_lane()] = words[i];
    }
    static_assert(MAX_USUAL_SCALE + 1 == 0x80 + 0x80 - 0x79, "the sum carries from there on");
    __syncwarp(); /* all lanes see the scales */
    return __any_sync(0xFFFFFFFFu, (rare & 0x80808080u) != 0);
}

/* Gathers both blocks of a step. Calls between_blocks(slot) between them. */
template <bool E2M1, bool ROPE, typename Keys, typename Between>
static __device__ __forceinline__ void
gather_coded_step(const attention_launch &launch, const bf16_gather &state,
                  const listed_key &listed, uint32_t are_keys, uint32_t last_bit,
                  bf16_memory *shared, Between between_blocks)
{
    constexpr int TWIN_ROWS = WARP_ROWS / Keys::TWINS;
    constexpr int LOAD_WAVES = TWIN_ROWS / LOAD_WAVE_ROWS;
    const list_facts &facts = launch.lists[listed.list];
    const int twin = gather_twin<Keys>();
    volatile coded_keys *const keys = find_coded_keys<Keys>(shared);
    const int lane = gather_lane();
    const int chunk = lane % 8;
    const int first = twin * TWIN_ROWS + lane / 8; /* row of the lane's first load wave */
    const smla_kv_token from = address_of_slot(launch, listed.list, listed.slot);
    uint32_t loaded_scales[E2M1 ? 8 : 4];
    coded_load_wave load_waves[LOAD_WAVES];
    keys->row[lane] = from.row;
    keys->slot[lane] = listed.slot;
    load_all_scales<E2M1, ROPE>(from, loaded_scales);
    prefetch_row<E2M1, ROPE>(from.row);
    __syncwarp(); /* all lanes see the rows */
#pragma unroll
    for (int load_wave = 0; load_wave < LOAD_WAVES; load_wave++) {
        start_load_wave<E2M1, ROPE>(keys->row[first + load_wave * LOAD_WAVE_ROWS], 0, chunk,
                                    &load_waves[load_wave]);
    }
    const bool has_rare = store_all_scales<E2M1>(loaded_scales, keys);
#pragma unroll 1
    for (int block = 0; block < 2; block++) {
        const int block_first = block * WARP_ROWS + first;
        if (block == 1) {
            between_blocks(keys->slot[ptx_thread() % SMLA_WARP_LANES]);
        }
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const uint32_t to =
                BF16_AT(state.base, keys) + block * BLOCK_BYTES + half * (HALF_TILES * TILE_BYTES);
            const uint32_t full = full_barrier(state.base, block, half * HALF_PIECES);
            half_scales<E2M1, ROPE> scales = load_scales<E2M1, ROPE>(
                ptx_shared_address((const uint32_t *)&keys->scales[0][block_first]), half, chunk);
            ptx_mbarrier_wait(empty_barrier(state.base, block, half), state.phase.step ^ 1);
            if (half * HALF_PIECES == KEY_PIECE && twin == 0) {
                if (gather_lane() == 0) {
                    clear_has_moved(state.base, block);
                    ptx_store_shared_4(BF16_AT(state.base, is_key) +
                                           4 * (GATHER_WARPS * block + gather_warp_again()),
                                       (are_keys >> block * WARP_ROWS & ALL_KEYS) | last_bit);
                    ptx_mbarrier_arrive(full, true);
                }
                __syncwarp();
            }
            if (ROPE && half == 1) {
#pragma unroll
                for (int load_wave = 0; load_wave < LOAD_WAVES; load_wave++) {
                    copy_rope(to + (HALF_TILES - 1) * TILE_BYTES +
                                  chunk_in_tile(state.to, load_wave),
                              keys->row[block_first + load_wave * LOAD_WAVE_ROWS], chunk);
                }
            }
            uint32_t largest = 0;
#pragma unroll
            for (int load_wave = 0; load_wave < LOAD_WAVES; load_wave++) {
                /* the next load wave's scales are loaded before this one is decoded */
                const int here = block_first + load_wave * LOAD_WAVE_ROWS;
                half_scales<E2M1, ROPE> next_scales = scales;
                if (load_wave + 1 < LOAD_WAVES) {
                    next_scales = load_scales<E2M1, ROPE>(
                        ptx_shared_address(
                            (const uint32_t *)&keys->scales[0][here + LOAD_WAVE_ROWS]),
                        half, chunk);
                }
                store_load_wave<E2M1, ROPE>(half, scales, to + chunk_in_tile(state.to, load_wave),
                                            load_waves[load_wave], &largest);
                const uint8_t *const next = half == 0    ? keys->row[here]
                                            : block == 0 ? keys->row[here + WARP_ROWS]
                                                         : NULL;
                start_load_wave<E2M1, ROPE>(next, half ^ 1, chunk, &load_waves[load_wave]);
                scales = next_scales;
            }
            /* NaN is the largest magnitude: its sum with 1 carries */
            const bool is_rare = has_rare || ((largest + 0x00100010u) & 0x08000800u) != 0;
            if (__any_sync(0xFFFFFFFFu, is_rare)) {
                store_rare_rows(facts, keys, twin * TWIN_ROWS, TWIN_ROWS, state.base, block, half);
            }
            if (ROPE && half == 1) {
                ptx_cp_async_wait_all();
            }
            ptx_fence_async_shared();
            ptx_mbarrier_arrive(full, true);
            ptx_mbarrier_arrive(full + 8, true);
        }
    }
    __syncwarp(); /* all lanes have read the keys, which the next step replaces */
}
