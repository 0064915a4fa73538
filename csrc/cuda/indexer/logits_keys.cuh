/* logits_keys.cuh: the warps of logits_sm90.cu that bring keys: by tensor maps, where tiles of 64
 * keys lie in one page or keys are flat, or else by cp.async.
 */
#pragma once

#include "cuda/indexer/logits_works.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace {

/* ---- Keys by tensor maps ------------------------------------------------------------------- */

/* What a copy needs to know of a tile. */
struct tile_place {
    uint64_t found; /* a bit per key that exists */
    int32_t row;    /* the first key, in its page */
    int32_t page;
};

/* The place of the tile of columns `column`..., whose page is `page`. Where no key exists, it is
 * outside the array, and zeros come. */
__device__ __forceinline__ tile_place
place_tile(const logits_args &args, int64_t source, int64_t column, int32_t page)
{
    const smla_kv_view &kv = args.p.kv;
    const int64_t row =
        args.p.has_pages ? (uint32_t)column - smla_divide_uint32((uint32_t)column, args.page_keys) *
                                                  (uint32_t)args.page_keys.divisor
                         : source + column;
    const int64_t left = kv.block_size - row;
    if (page < 0 || page >= kv.num_pages || left <= 0 || row <= -TILE_KEYS) {
        return tile_place{0, (int32_t)kv.block_size, 0};
    }
    uint64_t found = ~(uint64_t)0;
    found = left < TILE_KEYS ? found >> (TILE_KEYS - left) : found;
    found = row < 0 ? found & found << -row : found;
    return tile_place{found, (int32_t)row, page};
}

/* Asks for a tile as tile number `count` of the CTA; one lane calls it. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_tile(const sm90_args &all, const tile_place &place, uint32_t count,
             logits_memory<Shape> *shared)
{
    const int stage = (int)(count % Shape::STAGES);
    const uint32_t full = ptx_shared_address(&shared->full[stage]);
    ptx_mbarrier_wait(ptx_shared_address(&shared->empty[stage]), count / Shape::STAGES % 2 ^ 1);
    shared->found[stage] = place.found;
    ptx_mbarrier_arrive_expect(full, TILE_BYTES + SCALES * (int)sizeof(float));
    ptx_tensor_copy_3d(ptx_shared_address(shared->keys[stage]), &all.keys, 0, place.row, place.page,
                       full);
    ptx_tensor_copy_2d(ptx_shared_address(shared->scales[stage]), &all.scales,
                       place.row & -SCALE_ALIGN, place.page, full);
}

/* Brings a key warp's tiles of an item, those with its parity in the CTA. Each lane finds
 * the place of one of 32 tiles, then they ask in turn, since this leaves little to do between two
 * tiles. `page` is the page of the lane's first tile. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_item(const sm90_args &all, int64_t source, int64_t first_column, int num_tiles,
             uint32_t tiles, int own_tile, int32_t page, logits_memory<Shape> *shared)
{
    const logits_args &args = all.args;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
#pragma unroll 1
    for (int tile = own_tile; tile - KEY_WARPS * lane < num_tiles;
         tile += KEY_WARPS * SMLA_WARP_LANES) {
        const int64_t column = first_column + (int64_t)tile * TILE_KEYS;
        const tile_place place = place_tile(args, source, column, page);
        page = find_page(args, source, column + KEY_WARPS * SMLA_WARP_LANES * TILE_KEYS);
        const int first = tile - KEY_WARPS * lane;
        const int count = (num_tiles - first + KEY_WARPS - 1) / KEY_WARPS;
#pragma unroll 1
        for (int i = 0; i < (count < SMLA_WARP_LANES ? count : SMLA_WARP_LANES); i++) {
            if (lane == i) {
                ask_for_tile(all, place, tiles + (uint32_t)tile, shared);
            }
            __syncwarp();
        }
    }
}

/* ---- Keys by cp.async ---------------------------------------------------------------------- */

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
    const uint32_t warp = (threadIdx.x - CONSUMERS - QUERY_THREADS) / SMLA_WARP_LANES;
    uint32_t i = (warp - tiles) % KEY_WARPS;
    int64_t first = first_column + (int64_t)i * TILE_KEYS;
    int32_t pages[2] = {find_page(args, source, first + own_column(args, 0)),
                        find_page(args, source, first + own_column(args, 1))};
    for (; i < (uint32_t)num_tiles; i += KEY_WARPS) {
        const int64_t ahead = first + KEY_WARPS * TILE_KEYS;
        const int32_t next[2] = {find_page(args, source, ahead + own_column(args, 0)),
                                 find_page(args, source, ahead + own_column(args, 1))};
        bring_keys(args, source, first, pages, tiles + i, shared);
        first = ahead;
        pages[0] = next[0];
        pages[1] = next[1];
    }
}

/* ---- Key warps ----------------------------------------------------------------------------- */

/* The key warps where there are tensor maps. The request of a work's first token is guessed, so
 * that its pages are asked for together with the request and not behind it. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_works(const sm90_args &all, logits_memory<Shape> *shared)
{
    const logits_args &args = all.args;
    const uint32_t warp = (threadIdx.x - CONSUMERS - QUERY_THREADS) / SMLA_WARP_LANES;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    uint32_t tiles = 0; /* tiles in the items before */
    logits_walk walk = start_walk<Shape>(all);
    logits_work work;
    while (next_work<Shape>(all, &walk, &work)) {
        const int64_t guess = smla_divide(work.first_token, all.req_tokens);
        int own = (int)((warp - tiles) % KEY_WARPS) + KEY_WARPS * lane;
        const int32_t guessed = find_page(args, guess, work.first + own * TILE_KEYS);
        int64_t token = work.first_token;
        while (token < work.end_token) {
            const logits_run run = find_run<Shape>(args.p, work, token);
            const int32_t page = run.source == guess && token == work.first_token
                                     ? guessed
                                     : find_page(args, run.source, work.first + own * TILE_KEYS);
            ask_for_item(all, run.source, work.first, run.num_tiles, tiles, own, page, shared);
            tiles += (uint32_t)run.num_tiles;
            own = (int)((warp - tiles) % KEY_WARPS) + KEY_WARPS * lane;
            token = run.end_token;
        }
    }
}

/* The key warps where there are none. */
template <typename Shape>
__device__ __forceinline__ void
bring_works(const sm90_args &all, logits_memory<Shape> *shared)
{
    uint32_t tiles = 0; /* tiles in the items before */
    logits_walk walk = start_walk<Shape>(all);
    logits_work work;
    while (next_work<Shape>(all, &walk, &work)) {
        int64_t token = work.first_token;
        while (token < work.end_token) {
            const logits_run run = find_run<Shape>(all.args.p, work, token);
            bring_item(all.args, run.source, work.first, run.num_tiles, tiles, shared);
            tiles += (uint32_t)run.num_tiles;
            token = run.end_token;
        }
    }
}

/* Fills the columns that have no keys, whoever has the keys before them. */
template <typename Shape>
__device__ __forceinline__ void
fill_works(const logits_args &args, int thread, int num_threads)
{
    for (int64_t number = blockIdx.x; number < args.num_works; number += gridDim.x) {
        fill_rest(args.p, find_work(args, number, Shape::BLOCK_TOKENS), thread, num_threads);
    }
}

template <typename Shape>
__device__ __forceinline__ void
copy_keys(const sm90_args &all, logits_memory<Shape> *shared)
{
    if (all.has_maps) {
        ask_for_works(all, shared);
    } else {
        bring_works(all, shared);
    }
    fill_works<Shape>(all.args, (int)threadIdx.x - CONSUMERS - QUERY_THREADS,
                      KEY_WARPS * SMLA_WARP_LANES);
}

} // namespace
