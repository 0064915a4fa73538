/* logits_copiers.cuh: how the kernel of logits_sm90.cu shares its work, what it keeps in shared
 * memory, and the warps that bring queries and keys there. logits_sm90.cu has the headings.
 */
#pragma once

#include "cuda/indexer/logits.cuh"

namespace {

enum {
    WARPGROUPS = 3,
    GROUP_THREADS = 128,
    CONSUMERS = WARPGROUPS * GROUP_THREADS,
    COPIERS = 128,
    COPY_WARPS = COPIERS / SMLA_WARP_LANES,
    COPY_REGISTERS = 104,
    CONSUMER_REGISTERS = 136,
    TILE_KEYS = 64,
    ROW_BYTES = SMLA_INDEX_HEAD_DIM,
    CHUNK_BYTES = 16,
    ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES,
    TILE_BYTES = TILE_KEYS * ROW_BYTES,
    ROWS_PER_COPY = SMLA_WARP_LANES / ROW_CHUNKS,
    K_STEPS = ROW_BYTES / 32,
    SLOTS = 2,
    MOST_CHUNK = 8192,
};

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

/* How warpgroups share the work. */
template <int HEADS_, int TOKENS_, int GROUPS_> struct logits_shape {
    static constexpr int HEADS = HEADS_;
    static constexpr int TOKENS = TOKENS_;             /* per warpgroup */
    static constexpr int GROUPS = GROUPS_;             /* token groups: 3, or 1 */
    static constexpr int PARTS = WARPGROUPS / GROUPS_; /* warpgroups that take tiles in turn */
    static constexpr int COLUMNS = HEADS * TOKENS;     /* columns per product */
    static constexpr int BLOCK_TOKENS = TOKENS * GROUPS;
    static constexpr int BLOCK_ROWS = BLOCK_TOKENS * HEADS;
    static constexpr int STAGES = GROUPS == 1 ? 16 : 8;
    static constexpr int LEAST_CHUNK = GROUPS == 1 ? 4 * TILE_KEYS : 8 * TILE_KEYS;
    /* A decode's work costs a chain of loads, so it has few and long ones. */
    static constexpr int LARGEST_CHUNK = GROUPS == 1 ? MOST_CHUNK : 2048;
    static constexpr int WORKS_PER_SM = GROUPS == 1 ? 8 : 24;
};

/* A run of tokens and a chunk of their columns. */
template <typename Shape> struct logits_item {
    int64_t first_token;
    int32_t num_tokens;
    int32_t num_tiles;                     /* 0: there are no more items */
    int32_t first;                         /* column */
    int32_t contexts[Shape::BLOCK_TOKENS]; /* at most the chunk's end */
};

template <typename Shape> struct logits_memory {
    alignas(1024) uint8_t keys[Shape::STAGES][TILE_KEYS][ROW_BYTES];
    alignas(1024) uint8_t queries[SLOTS][Shape::BLOCK_ROWS][ROW_BYTES];
    float scales[Shape::STAGES][TILE_KEYS];
    alignas(16) float weights[SLOTS][Shape::BLOCK_ROWS];
    alignas(8) uint64_t found[Shape::STAGES]; /* a bit per key that exists */
    logits_item<Shape> items[SLOTS];
    alignas(8) uint64_t full[Shape::STAGES];
    uint64_t empty[Shape::STAGES];
    uint64_t q_full[SLOTS];
    uint64_t q_empty[SLOTS];
};

/* ---- Copy warps ---------------------------------------------------------------------------- */

/* Where the weight of a column is: a lane's four of 16 columns, 2 c, 2 c + 1, 2 c + 8 and 2 c + 9,
 * follow each other. */
__device__ __forceinline__ int
weight_place(int column)
{
    return (column & ~15) | (column >> 1 & 3) << 2 | (column >> 3 & 1) << 1 | (column & 1);
}

/* Brings the queries and weights of an item. */
template <typename Shape>
__device__ __forceinline__ void
bring_queries(const smla_logits_params &p, int64_t first_token, int num_tokens, int slot,
              logits_memory<Shape> *shared)
{
    const int thread = (int)threadIdx.x - CONSUMERS;
    const int chunk = thread % ROW_CHUNKS;
    const int num_rows = num_tokens * Shape::HEADS;
    const uint32_t to = ptx_shared_address(shared->queries[slot]);
#pragma unroll 2
    for (int row = thread / ROW_CHUNKS; row < num_rows; row += COPIERS / ROW_CHUNKS) {
        const uint8_t *const from = p.q + (first_token + row / Shape::HEADS) * p.q_stride_token +
                                    row % Shape::HEADS * p.q_stride_head + chunk * CHUNK_BYTES;
        ptx_cp_async_16_or_zero(to + row * ROW_BYTES + (chunk ^ (row & 7)) * CHUNK_BYTES, from,
                                true);
    }
#pragma unroll 1
    for (int row = thread; row < num_rows; row += COPIERS) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->weights[slot][weight_place(row)]),
                               p.weights +
                                   (first_token + row / Shape::HEADS) * p.weights_stride_token +
                                   row % Shape::HEADS,
                               true);
    }
}

/* Copies 64 keys that follow each other. */
template <typename Shape>
__device__ __forceinline__ void
copy_run(const logits_args &args, const key_place &first, int stage, logits_memory<Shape> *shared)
{
    const smla_kv_view &kv = args.p.kv;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int chunk = lane % ROW_CHUNKS;
    const int row = lane / ROW_CHUNKS;
    const uint32_t to = ptx_shared_address(shared->keys[stage][row]);
    const uint8_t *from = first.row + row * kv.token_stride_bytes + chunk * CHUNK_BYTES;
#pragma unroll 4
    for (int i = 0; i < TILE_KEYS / ROWS_PER_COPY; i++) {
        const int place = chunk ^ ((row + i * ROWS_PER_COPY) & 7);
        ptx_cp_async_16_or_zero(to + i * ROWS_PER_COPY * ROW_BYTES + place * CHUNK_BYTES, from,
                                true);
        from += ROWS_PER_COPY * kv.token_stride_bytes;
    }
#pragma unroll
    for (int key = lane; key < TILE_KEYS; key += SMLA_WARP_LANES) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->scales[stage][key]),
                               first.scales + key * kv.scale_token_stride_bytes, true);
    }
}

/* Copies 64 keys that lie anywhere; lane i has the places of keys i and i + 32. Keys that do not
 * exist become zeros. */
template <typename Shape>
__device__ __forceinline__ void
copy_places(const key_place places[2], int stage, logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int chunk = lane % ROW_CHUNKS;
    const uint32_t to = ptx_shared_address(shared->keys[stage]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll 4
        for (int i = 0; i < SMLA_WARP_LANES / ROWS_PER_COPY; i++) {
            const int lane_of_row = i * ROWS_PER_COPY + lane / ROW_CHUNKS;
            const int row = half * SMLA_WARP_LANES + lane_of_row;
            const uint8_t *const from =
                (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)places[half].row,
                                             lane_of_row);
            ptx_cp_async_16_or_zero(to + row * ROW_BYTES + (chunk ^ (row & 7)) * CHUNK_BYTES,
                                    from + chunk * CHUNK_BYTES, from != NULL);
        }
        ptx_cp_async_4_or_zero(ptx_shared_address(
                                   &shared->scales[stage][half * SMLA_WARP_LANES + lane]),
                               places[half].scales, places[half].row != NULL);
    }
}

/* The columns of a tile that a lane looks up: the first one where the tile's keys follow each
 * other, or its own two. */
__device__ __forceinline__ int
own_column(const logits_args &args, int half)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    return args.has_runs ? half * (TILE_KEYS - 1) : half * SMLA_WARP_LANES + lane;
}

/* Brings the tile of columns `first`... as tile number `count` of the CTA. A warp calls it;
 * `pages` are those of its lanes' columns. */
template <typename Shape>
__device__ __forceinline__ void
bring_keys(const logits_args &args, int64_t source, int64_t first, const int32_t pages[2],
           uint32_t count, logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int stage = (int)(count % Shape::STAGES);
    key_place places[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        places[half] = place_key(args, source, first + own_column(args, half), pages[half]);
    }
    ptx_mbarrier_wait(ptx_shared_address(&shared->empty[stage]), count / Shape::STAGES % 2 ^ 1);
    uint32_t found[2] = {__ballot_sync(ALL_LANES, places[0].row != NULL),
                         __ballot_sync(ALL_LANES, places[1].row != NULL)};
    if (args.has_runs && found[0] != 0 && found[1] != 0) {
        copy_run(args, places[0], stage, shared);
    } else if (!args.has_runs || !args.p.has_pages) {
        if (args.has_runs) { /* flat keys begin or end inside the tile */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                places[half] = place_key(args, source, first + half * SMLA_WARP_LANES + lane, 0);
                found[half] = __ballot_sync(ALL_LANES, places[half].row != NULL);
            }
        }
        copy_places(places, stage, shared);
    }
    if (lane == 0) {
        shared->found[stage] = (uint64_t)found[1] << 32 | found[0];
    }
    const uint32_t full = ptx_shared_address(&shared->full[stage]);
    ptx_mbarrier_arrive_after_copies(full);
    ptx_mbarrier_arrive(full, lane == 0);
}

/* Brings a warp's share of an item's tiles. Pages are looked up a tile ahead, because a key can be
 * asked for only when its page is known. `tiles` counts those of the items before. */
template <typename Shape>
__device__ __forceinline__ void
bring_item(const logits_args &args, int64_t source, int64_t first_column, int num_tiles,
           uint32_t tiles, logits_memory<Shape> *shared)
{
    const uint32_t warp = (threadIdx.x - CONSUMERS) / SMLA_WARP_LANES;
    uint32_t i = (warp - tiles) % COPY_WARPS;
    int64_t first = first_column + (int64_t)i * TILE_KEYS;
    int32_t pages[2] = {find_page(args, source, first + own_column(args, 0)),
                        find_page(args, source, first + own_column(args, 1))};
    for (; i < (uint32_t)num_tiles; i += COPY_WARPS) {
        const int64_t ahead = first + COPY_WARPS * TILE_KEYS;
        const int32_t next[2] = {find_page(args, source, ahead + own_column(args, 0)),
                                 find_page(args, source, ahead + own_column(args, 1))};
        bring_keys(args, source, first, pages, tiles + i, shared);
        first = ahead;
        pages[0] = next[0];
        pages[1] = next[1];
    }
}

/* Hands an item with `num_tokens` tokens over; without tokens it is the end. */
template <typename Shape>
__device__ __forceinline__ void
hand_over(const logits_args &args, const logits_work &work, int64_t first_token, int num_tokens,
          int num_tiles, uint32_t item, logits_memory<Shape> *shared)
{
    const int slot = (int)(item % SLOTS);
    const uint32_t full = ptx_shared_address(&shared->q_full[slot]);
    const bool is_first = threadIdx.x == CONSUMERS;
    ptx_mbarrier_wait(ptx_shared_address(&shared->q_empty[slot]), item / SLOTS % 2 ^ 1);
    bring_queries(args.p, first_token, num_tokens, slot, shared);
    if (is_first) {
        logits_item<Shape> *const to = &shared->items[slot];
        to->first_token = first_token;
        to->num_tokens = num_tokens;
        to->num_tiles = num_tiles;
        to->first = (int32_t)work.first;
        for (int i = 0; i < num_tokens; i++) {
            to->contexts[i] = (int32_t)smaller_of(context_of(args.p, first_token + i), work.end);
        }
    }
    ptx_mbarrier_arrive_after_copies(full);
    ptx_mbarrier_arrive(full, is_first);
}

template <typename Shape>
__device__ __forceinline__ void
copy_works(const logits_args &args, logits_memory<Shape> *shared)
{
    const smla_logits_params &p = args.p;
    uint32_t tiles = 0; /* tiles in the items before */
    uint32_t items = 0;
    logits_work work = {};
    for (int64_t number = blockIdx.x; number < args.num_works; number += gridDim.x) {
        work = find_work(args, number, Shape::BLOCK_TOKENS);
        int64_t token = work.first_token;
        while (token < work.end_token) {
            const int64_t next = end_of_run(p, token, work.end_token);
            int64_t longest = 0;
            for (int64_t t = token; t < next; t++) {
                const int64_t context = context_of(p, t);
                longest = context > longest ? context : longest;
            }
            longest = smaller_of(longest, work.end);
            if (longest > work.first) {
                const int num_tiles = (int)((longest - work.first + TILE_KEYS - 1) / TILE_KEYS);
                const int64_t source = source_of(p, token);
                hand_over(args, work, token, (int)(next - token), num_tiles, items, shared);
                bring_item(args, source, work.first, num_tiles, tiles, shared);
                tiles += (uint32_t)num_tiles;
                items++;
            }
            token = next;
        }
        fill_rest(p, work, (int)threadIdx.x - CONSUMERS, COPIERS);
    }
    hand_over(args, work, 0, 0, 0, items, shared);
}

} // namespace
