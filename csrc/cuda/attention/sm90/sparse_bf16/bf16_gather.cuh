/* bf16_gather.cuh: the gather warps of attention_bf16_sm90.cu. Ahead of the consumers, they
 * bring queries and, by index, cache rows to shared memory.
 *
 * A warp has 16 rows of every block. A thread copies 16 bytes of a tile's row at a time. A load
 * wave is four rows: lane l copies chunk l % 8 of row l / 8, so that eight lanes copy a row's 128
 * bytes. Four load waves are the warp's rows. Entries of a list that are no keys take no row of a
 * block (key_stream.cuh). Behind the last key, and where an index names no cache row after all, a
 * row of the block is filled with zeros, and nothing is read.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_common.cuh"

enum {
    WARP_ROWS = BLOCK_KEYS / GATHER_WARPS,
    LOAD_WAVE_ROWS = SMLA_WARP_LANES / 8, /* rows per copy instruction of a warp */
    ROW_LOAD_WAVES = WARP_ROWS / LOAD_WAVE_ROWS,
};

static_assert(CONSUMER_WARPS % GATHER_WARPS == 0, "gather_warp");
static_assert(2 * WARP_ROWS == SMLA_WARP_LANES, "a lane knows one row of a step");
static_assert((int)TILE_HEADS == (int)BLOCK_KEYS, "a warp's heads are as many as its keys");

/* What a gather thread keeps. */
typedef struct bf16_gather {
    uint32_t base; /* address of shared memory */
    uint32_t to;   /* offset of the thread's chunk in a tile; odd load waves flip bit 6 */
    bf16_phase phase;
} bf16_gather;

static __device__ __forceinline__ int
gather_lane(void)
{
    return (int)(threadIdx.x % SMLA_WARP_LANES);
}

static __device__ __forceinline__ int
gather_warp(void)
{
    return (int)(threadIdx.x / SMLA_WARP_LANES) % GATHER_WARPS;
}

/* gather_warp, recomputed at each call, because keeping it, and the values that depend on it, would
 * cost the copies registers. */
static __device__ __forceinline__ int
gather_warp_again(void)
{
    return (int)((uint32_t)ptx_forget((int)threadIdx.x) / SMLA_WARP_LANES) % GATHER_WARPS;
}

/* The warp's number among those that share its keys; it brings an equal part of every 16 rows. The
 * shuffle lets ptxas know that all lanes have the same number. */
template <typename Keys>
static __device__ __forceinline__ int
gather_twin(void)
{
    const int group = (int)((uint32_t)ptx_forget((int)threadIdx.x) / GROUP_THREADS);
    return Keys::TWINS == 1 ? 0
                            : __shfl_sync(0xFFFFFFFFu, group - CONSUMER_THREADS / GROUP_THREADS, 0);
}

/* The offset in a tile of the thread's chunk in even load waves, for warp `warp` of four. */
static __device__ __forceinline__ uint32_t
first_chunk_in_tile(int warp)
{
    const int row = gather_lane() / 8;
    return (warp * WARP_ROWS + row) * 128 + ((gather_lane() % 8) ^ row) * 16;
}

/* The offset in a tile of the thread's chunk of its row in a load wave. */
static __device__ __forceinline__ uint32_t
chunk_in_tile(uint32_t first_chunk, int load_wave)
{
    return (first_chunk ^ (load_wave & 1) * 64) + load_wave * (LOAD_WAVE_ROWS * 128);
}

/* ---- Copies -------------------------------------------------------------------------------- */

/* Copies 16 bytes of a row, or zeros if not is_on. Aligned bytes bypass the registers; others pass
 * through them. */
template <bool ALIGNED>
static __device__ __forceinline__ void
copy_chunk(uint32_t to, const void *from, bool is_on)
{
    if constexpr (ALIGNED) {
        ptx_cp_async_16_or_zero(to, from, is_on);
    } else {
        uint32_t words[4] = {};
        if (is_on) {
            smla_load_words<16, false>(from, words);
        }
        ptx_store_shared_16(to, words);
    }
}

/* Arrives at the mbarrier when all bytes that this thread has copied are in shared memory. */
template <bool ALIGNED>
static __device__ __forceinline__ void
announce_copies(uint32_t barrier)
{
    if constexpr (ALIGNED) {
        ptx_mbarrier_arrive_after_copies(barrier);
    } else {
        ptx_fence_async_shared();
        ptx_mbarrier_arrive(barrier, true);
    }
}

/* ---- Query --------------------------------------------------------------------------------- */

/* Where an item's query lies. */
typedef struct query_source {
    const uint16_t *parts[2];
    int64_t strides[2]; /* elements from a head to the next */
    int32_t num_rows;
} query_source;

/* Where a part of a row of the tile begins. */
static __device__ __forceinline__ const uint16_t *
find_query_row(const query_source &query, int part, int row)
{
    return query.parts[part] + row * query.strides[part];
}

static __device__ __forceinline__ query_source
find_query(const smla_queries &queries, const work_item &item)
{
    const smla_head_rows &nope = queries.parts[SMLA_NOPE], &pe = queries.parts[SMLA_PE];
    return query_source{{smla_row16(&nope, item.token, item.first_head),
                         smla_row16(&pe, item.token, item.first_head)},
                        {nope.stride_head, pe.stride_head},
                        item.num_heads};
}

/* Copies the query of an item, from where find_query_row says; `warp` is the number of the
 * calling warp among four. Group 1 brings the CTA's first query, because it is idle while the
 * gather warps read the first indices. The gather warps bring the others. */
template <bool ROPE, bool ALIGNED, typename Query>
static __device__ __forceinline__ void
copy_query(const Query &query, uint32_t base, int warp)
{
#pragma unroll 1
    for (int load_wave = 0; load_wave < ROW_LOAD_WAVES; load_wave++) {
        const int head = warp * WARP_ROWS + load_wave * LOAD_WAVE_ROWS + gather_lane() / 8;
        const uint16_t *const nope = find_query_row(query, SMLA_NOPE, head);
        const uint16_t *const rope = find_query_row(query, SMLA_PE, head);
        const uint32_t to =
            BF16_AT(base, query) + chunk_in_tile(first_chunk_in_tile(warp), load_wave);
#pragma unroll
        for (int tile = 0; tile < (ROPE ? QUERY_TILES : ROPE_TILE); tile++) {
            const uint16_t *const from = tile == ROPE_TILE ? rope : nope + tile * 64;
            copy_chunk<ALIGNED>(to + tile * TILE_BYTES, from + gather_lane() % 8 * 8,
                                head < query.num_rows);
        }
    }
    announce_copies<ALIGNED>(BF16_AT(base, query_full));
}

/* copy_query as a called function, because a launch's first item, which has its query, would jump
 * over the code. */
template <bool ROPE, bool ALIGNED>
static __device__ __noinline__ void
copy_query_apart(query_source query, uint32_t base, int warp)
{
    copy_query<ROPE, ALIGNED>(query, base, warp);
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* What a thread copies of a block: its chunks in the first tile, one per load wave, and whether
 * their rows exist. It is found before the wait for a free block, so that only copies come behind
 * the wait. */
template <typename Keys> struct block_rows {
    static constexpr int LOAD_WAVES = ROW_LOAD_WAVES / Keys::TWINS;
    const uint8_t *from[LOAD_WAVES];
    bool is_on[LOAD_WAVES];
};

/* The warp's rows of a block. The lanes from first_lane on have their addresses. */
template <typename Keys>
static __device__ __forceinline__ block_rows<Keys>
find_block_rows(const uint8_t *row, int first_lane)
{
    block_rows<Keys> rows;
#pragma unroll
    for (int load_wave = 0; load_wave < block_rows<Keys>::LOAD_WAVES; load_wave++) {
        const uint8_t *const from =
            row_of_lane(row, first_lane + load_wave * LOAD_WAVE_ROWS + gather_lane() / 8);
        rows.is_on[load_wave] = from != NULL;
        rows.from[load_wave] = from + gather_lane() % 8 * 16;
    }
    return rows;
}

/* Copies the warp's rows of a piece of a block. */
template <int PIECE, typename Keys, bool ALIGNED>
static __device__ __forceinline__ void
copy_piece(const bf16_gather &state, int block, const block_rows<Keys> &rows)
{
#pragma unroll
    for (int load_wave = 0; load_wave < block_rows<Keys>::LOAD_WAVES; load_wave++) {
        const uint32_t to =
            BF16_AT(state.base, keys) + block * BLOCK_BYTES + chunk_in_tile(state.to, load_wave);
#pragma unroll
        for (int tile = first_tile<Keys::ROPE>(PIECE); tile < first_tile<Keys::ROPE>(PIECE + 1);
             tile++) {
            copy_chunk<ALIGNED>(to + tile * TILE_BYTES, rows.from[load_wave] + tile * 128,
                                rows.is_on[load_wave]);
        }
    }
    announce_copies<ALIGNED>(full_barrier(state.base, block, PIECE));
}

/* Says, before a step's first block comes, that it has not moved references. Group 1 has read what
 * the block before said, because both halves of that are free. */
static __device__ __forceinline__ void
clear_has_moved(uint32_t base, int block)
{
    if (block == 0 && gather_warp_again() == 0) {
        ptx_store_shared_4(BF16_AT(base, has_moved), 0);
    }
}

/* Copies a block, each half when it becomes free, first the half whose values the block's group
 * adds (nth_piece). is_key comes with piece KEY_PIECE, which is in the second half. By then both
 * halves are free, and no thread reads the previous is_key. */
template <int BLOCK, typename Keys, bool ALIGNED>
static __device__ __forceinline__ void
gather_block(const bf16_gather &state, const uint8_t *row, uint32_t are_keys, uint32_t last_bit,
             int32_t block_key = 0)
{
    constexpr int first_half = nth_piece<Keys>(BLOCK, 0) / (PIECES / 2);
    const int first_lane = BLOCK * WARP_ROWS;
    const int from = first_lane + gather_twin<Keys>() * (WARP_ROWS / Keys::TWINS);
    const uint32_t is_key = (are_keys >> first_lane & ALL_KEYS) | last_bit;
    const block_rows<Keys> rows = find_block_rows<Keys>(row, from);
    ptx_mbarrier_wait(empty_barrier(state.base, BLOCK, first_half), state.phase.step ^ 1);
    copy_piece<nth_piece<Keys>(BLOCK, 0), Keys, ALIGNED>(state, BLOCK, rows);
    copy_piece<nth_piece<Keys>(BLOCK, 1), Keys, ALIGNED>(state, BLOCK, rows);
    ptx_mbarrier_wait(empty_barrier(state.base, BLOCK, first_half ^ 1), state.phase.step ^ 1);
    if (gather_twin<Keys>() == 0 && gather_lane() == 0) {
        clear_has_moved(state.base, BLOCK);
        if (Keys::TILED && gather_warp_again() == 0) {
            ptx_store_shared_4(BF16_AT(state.base, dense.block_key) + 4 * BLOCK,
                               (uint32_t)block_key);
        }
        ptx_store_shared_4(BF16_AT(state.base, is_key) + 4 * (GATHER_WARPS * BLOCK + gather_warp()),
                           is_key);
        ptx_mbarrier_arrive(full_barrier(state.base, BLOCK, nth_piece<Keys>(BLOCK, KEY_PIECE)),
                            true);
    }
    __syncwarp();
    copy_piece<nth_piece<Keys>(BLOCK, 2), Keys, ALIGNED>(state, BLOCK, rows);
    copy_piece<nth_piece<Keys>(BLOCK, 3), Keys, ALIGNED>(state, BLOCK, rows);
}
