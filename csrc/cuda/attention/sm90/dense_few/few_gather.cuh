/* few_gather.cuh: how rows of the query and of the cache come to shared memory in
 * attention_few_sm90.cu. Chunks of 16 bytes lie in tiles as in attention_bf16_sm90.cu.
 */
#pragma once

#include "cuda/attention/sm90/dense_few/few_shape.cuh"

enum { CONSUMER_ROWS = TILE_HEADS / CONSUMER_WARPS }; /* rows of the query per warp */

/* ---- Query --------------------------------------------------------------------------------- */

/* The consumers' warps copy eight rows each. Rows that are not there are zeros. */
template <typename Kind>
static __device__ __forceinline__ void
copy_few_query(const few_launch &launch, const few_item &item, uint32_t base)
{
    const int lane = gather_lane();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
#pragma unroll
    for (int wave = 0; wave < CONSUMER_ROWS / LOAD_WAVE_ROWS; wave++) {
        const int row_in_eight = wave * LOAD_WAVE_ROWS + lane / 8;
        const int row = warp * CONSUMER_ROWS + row_in_eight;
        const few_place place = find_few_place(launch, item, row);
        const int64_t token = find_few_token(item, place);
        const uint16_t *const nope =
            smla_row16(&launch.query[SMLA_NOPE], token, place.head) + lane % 8 * 8;
        const uint16_t *const rope =
            smla_row16(&launch.query[SMLA_PE], token, place.head) + lane % 8 * 8;
        const uint32_t to = FEW_AT(base, query) + row * 128 + ((lane % 8) ^ row_in_eight) * 16;
#pragma unroll
        for (int tile = 0; tile < (Kind::ROPE ? QUERY_TILES : ROPE_TILE); tile++) {
            copy_chunk<true>(to + tile * TILE_BYTES, tile == ROPE_TILE ? rope : nope + tile * 64,
                             row < item.num_rows);
        }
    }
    announce_copies<true>(FEW_AT(base, query_full));
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* The table's entry for a position, or NO_INDEX behind the table's end. */
static __device__ __forceinline__ uint32_t
load_few_entry(const few_launch &launch, const few_item &item, uint32_t key)
{
    const uint32_t column = smla_divide_uint32(key, launch.entry_tokens);
    uint32_t entry;
    ptx_load_4_cached(launch.table + item.req * launch.table_stride_req +
                          column * launch.table_stride_entry,
                      key < (uint32_t)launch.num_columns, NO_INDEX, &entry);
    return entry;
}

/* The cache row of a position, NULL if nobody sees the position or the entry names no row. */
static __device__ __forceinline__ const uint8_t *
find_few_row(const few_launch &launch, const row_limits &seen, uint32_t key, uint32_t entry)
{
    const uint32_t tokens = (uint32_t)launch.entry_tokens.divisor;
    const uint32_t in_entry = key - smla_divide_uint32(key, launch.entry_tokens) * tokens;
    const uint64_t slot = (uint64_t)entry * tokens + in_entry;
    if (key < (uint32_t)seen.begin || key >= (uint32_t)seen.end || entry > INT32_MAX ||
        slot > INT32_MAX || (int64_t)slot >= launch.num_slots) {
        return NULL;
    }
    const uint32_t page = smla_divide_uint32((uint32_t)slot, launch.page_tokens);
    const uint32_t in_page = (uint32_t)slot - page * (uint32_t)launch.page_tokens.divisor;
    return launch.rows + page * launch.page_stride_bytes + in_page * launch.token_stride_bytes;
}

/* Copies the warp's rows of tiles FIRST to PAST - 1 of a block when that half is free, and says
 * which of them are keys. */
template <int FIRST, int PAST>
static __device__ __forceinline__ void
copy_half(uint32_t base, int block, uint32_t parity, uint32_t is_key,
          const uint8_t *const (&from)[ROW_LOAD_WAVES])
{
    constexpr int HALF = FIRST / HALF_TILES;
    const int warp = gather_warp();
    const uint32_t full = few_full(base, block, HALF);
    const uint32_t tiles = FEW_AT(base, keys) + block * BLOCK_BYTES + first_chunk_in_tile(warp);
    const bool is_first = gather_lane() == 0;
    ptx_mbarrier_wait(few_empty(base, block, HALF), parity ^ 1);
    if (is_first) {
        ptx_store_shared_2(FEW_AT(base, is_key) + 8 * (2 * block + HALF) + 2 * warp,
                           (uint16_t)is_key);
    }
    ptx_mbarrier_arrive(full, is_first);
#pragma unroll
    for (int wave = 0; wave < ROW_LOAD_WAVES; wave++) {
        const bool is_on = from[wave] != NULL;
        const uint32_t to = chunk_in_tile(tiles, wave);
#pragma unroll
        for (int tile = FIRST; tile < PAST; tile++) {
            copy_chunk<true>(to + tile * TILE_BYTES,
                             from[wave] + gather_lane() % 8 * 16 + tile * 128, is_on);
        }
    }
    announce_copies<true>(full);
}

/* The gather warps: all blocks of the CTA. Lane l finds row l % 16 of the warp's 16 in block l / 16
 * of two, and the table is read two blocks ahead. Its first entries are on their way before the
 * request's length is known: without a window, they lie where they lie whatever the length. */
template <typename Kind>
static __device__ __forceinline__ void
gather_blocks(const few_launch &launch, const few_item &item, uint32_t base)
{
    const int lane = gather_lane();
    const uint32_t stride = BLOCK_KEYS * (Kind::IS_SPLIT ? (uint32_t)launch.num_splits.divisor : 1);
    uint32_t key = (uint32_t)item.split * BLOCK_KEYS + lane / WARP_ROWS * stride +
                   gather_warp() * WARP_ROWS + lane % WARP_ROWS;
    uint32_t entry = load_few_entry(launch, item, key);
    const row_limits seen = find_seen(launch, item, load_num_keys(launch, item));
    const few_blocks blocks = find_few_blocks<Kind>(launch, item, seen);
    if (seen.begin >= BLOCK_KEYS) {
        key += (uint32_t)(seen.begin / BLOCK_KEYS * BLOCK_KEYS);
        entry = load_few_entry(launch, item, key);
    }
    const uint8_t *row = NULL;
#pragma unroll 1
    for (int i = 0; i < blocks.count; i++) {
        const int block = i % FEW_BLOCKS;
        if (block == 0) {
            row = find_few_row(launch, seen, key, entry);
            key += FEW_BLOCKS * stride;
            entry = load_few_entry(launch, item, key);
        }
        const uint32_t is_key =
            __ballot_sync(0xFFFFFFFFu, row != NULL) >> block * WARP_ROWS & ALL_KEYS;
        const uint8_t *from[ROW_LOAD_WAVES];
#pragma unroll
        for (int wave = 0; wave < ROW_LOAD_WAVES; wave++) {
            from[wave] = row_of_lane(row, block * WARP_ROWS + wave * LOAD_WAVE_ROWS + lane / 8);
        }
        const uint32_t parity = (uint32_t)i / FEW_BLOCKS & 1;
        copy_half<0, HALF_TILES>(base, block, parity, is_key, from);
        copy_half<HALF_TILES, Kind::ROPE ? QUERY_TILES : ROPE_TILE>(base, block, parity, is_key,
                                                                    from);
    }
    ptx_cp_async_wait_all(); /* a thread's copies end before it does */
}
