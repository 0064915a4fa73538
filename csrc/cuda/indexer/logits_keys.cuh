/* logits_keys.cuh: the warps of logits_sm90.cu that bring keys. They use tensor maps where tiles of
 * 64 keys lie in one page or keys are flat, and cp.async elsewhere. */
#pragma once

#include "cuda/indexer/logits_work_items.cuh"
#include "cuda/ptx/tensor_copy.cuh"

namespace {

/* ---- Keys by tensor maps ------------------------------------------------------------------- */

/* The position of a tile in the array of keys. */
struct tile_position {
    uint64_t found; /* a bit per key that exists */
    int32_t row;    /* index of the first key in its page */
    int32_t page;
};

/* Finds the position of the tile that begins at `column` and whose page is `page`. Where no key
 * exists, the position is outside the array, so that the copy gives zeros. */
__device__ __forceinline__ tile_position
find_tile_position(const logits_args &args, int64_t source, int64_t column, int32_t page)
{
    const smla_kv_view &kv = args.p.kv;
    const int64_t row =
        args.p.has_pages ? (uint32_t)column - smla_divide_uint32((uint32_t)column, args.page_keys) *
                                                  (uint32_t)args.page_keys.divisor
                         : source + column;
    const int64_t left = kv.block_size - row;
    if (page < 0 || page >= kv.num_pages || left <= 0 || row <= -TILE_KEYS) {
        return tile_position{0, (int32_t)kv.block_size, 0};
    }
    uint64_t found = ~(uint64_t)0;
    found = left < TILE_KEYS ? found >> (TILE_KEYS - left) : found;
    found = row < 0 ? found & found << -row : found;
    return tile_position{found, (int32_t)row, page};
}

/* Starts the copies of a tile, which is tile number `count` of the CTA. One lane calls this. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_tile(const sm90_args &all, const tile_position &position, uint32_t count,
             logits_memory<Shape> *shared)
{
    const int stage = (int)(count % Shape::STAGES);
    const uint32_t full = ptx_shared_address(&shared->full[stage]);
    ptx_mbarrier_wait(ptx_shared_address(&shared->empty[stage]), count / Shape::STAGES % 2 ^ 1);
    shared->found[stage] = position.found;
    ptx_mbarrier_arrive_expect(full, TILE_BYTES + SCALES * (int)sizeof(float));
    ptx_tensor_copy_3d(ptx_shared_address(shared->keys[stage]), &all.keys, 0, position.row,
                       position.page, full);
    ptx_tensor_copy_2d(ptx_shared_address(shared->scales[stage]), &all.scales,
                       position.row & -SCALE_ALIGN, position.page, full);
}

/* Starts the copies of a key warp's tiles of a task. Each lane finds the position of one of 32
 * tiles. Then the lanes start their copies one after another, which leaves little to do between two
 * tiles. `page` is the page of the lane's first tile. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_task(const sm90_args &all, int64_t source, int64_t first_column, int num_tiles,
             uint32_t tiles, int own_tile, int32_t page, logits_memory<Shape> *shared)
{
    const logits_args &args = all.args;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    /* Distance of a task's tiles, in columns. */
    const int64_t step = step_of<Shape>(all) * TILE_KEYS;
#pragma unroll 1
    for (int tile = own_tile; tile - Shape::KEY_WARPS * lane < num_tiles;
         tile += Shape::KEY_WARPS * SMLA_WARP_LANES) {
        const int64_t column = first_column + tile * step;
        const tile_position position = find_tile_position(args, source, column, page);
        const int first = tile - Shape::KEY_WARPS * lane;
        const int count = (num_tiles - first + Shape::KEY_WARPS - 1) / Shape::KEY_WARPS;
        const int end = count < SMLA_WARP_LANES ? count : SMLA_WARP_LANES;
#pragma unroll 1
        for (int i = 0; i < end; i++) {
            if (lane == i) {
                ask_for_tile(all, position, tiles + (uint32_t)tile, shared);
            }
            __syncwarp();
        }
        if (count > SMLA_WARP_LANES) { /* the copies under way hide the wait for this load */
            page = find_page(args, source, column + Shape::KEY_WARPS * SMLA_WARP_LANES * step);
        }
    }
}

/* ---- Keys by cp.async ---------------------------------------------------------------------- */

/* Copies 64 keys that are neighbours in memory. */
template <typename Shape>
__device__ __forceinline__ void
copy_run(const logits_args &args, const smla_kv_token &first, int stage,
         logits_memory<Shape> *shared)
{
    const smla_kv_view &kv = args.p.kv;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int chunk = lane % ROW_CHUNKS;
    const int row = lane / ROW_CHUNKS;
    const uint32_t to = ptx_shared_address(shared->keys[stage][row]);
    const uint8_t *from = first.row + row * kv.token_stride_bytes + chunk * CHUNK_BYTES;
#pragma unroll 4
    for (int i = 0; i < TILE_KEYS / ROWS_PER_COPY; i++) {
        const int position = chunk ^ ((row + i * ROWS_PER_COPY) & 7);
        ptx_cp_async_16_or_zero(to + i * ROWS_PER_COPY * ROW_BYTES + position * CHUNK_BYTES, from,
                                true);
        from += ROWS_PER_COPY * kv.token_stride_bytes;
    }
#pragma unroll
    for (int key = lane; key < TILE_KEYS; key += SMLA_WARP_LANES) {
        ptx_cp_async_4_or_zero(ptx_shared_address(&shared->scales[stage][key]),
                               first.scales + key * kv.scale_token_stride_bytes, true);
    }
}

/* Copies 64 keys that lie anywhere; lane i has the addresses of keys i and i + 32. Keys that do not
 * exist become zeros. */
template <typename Shape>
__device__ __forceinline__ void
copy_scattered(const smla_kv_token two_keys[2], int stage, logits_memory<Shape> *shared)
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
                (const uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)two_keys[half].row,
                                             lane_of_row);
            ptx_cp_async_16_or_zero(to + row * ROW_BYTES + (chunk ^ (row & 7)) * CHUNK_BYTES,
                                    from + chunk * CHUNK_BYTES, from != NULL);
        }
        ptx_cp_async_4_or_zero(ptx_shared_address(
                                   &shared->scales[stage][half * SMLA_WARP_LANES + lane]),
                               two_keys[half].scales, two_keys[half].row != NULL);
    }
}

/* The column, in a tile, of the lane's key `half`: the first or the last one where the tile's keys
 * are neighbours, else one of the lane's own two. */
__device__ __forceinline__ int
own_column(const logits_args &args, int half)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    return args.has_runs ? half * (TILE_KEYS - 1) : half * SMLA_WARP_LANES + lane;
}

/* Copies the tile that begins at column `first`, which is tile number `count` of the CTA. A warp
 * calls this; `pages` are the pages of its lanes' columns. */
template <typename Shape>
__device__ __forceinline__ void
bring_keys(const logits_args &args, int64_t source, int64_t first, const int32_t pages[2],
           uint32_t count, logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int stage = (int)(count % Shape::STAGES);
    smla_kv_token two_keys[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        two_keys[half] = key_in_page(args, source, first + own_column(args, half), pages[half]);
    }
    ptx_mbarrier_wait(ptx_shared_address(&shared->empty[stage]), count / Shape::STAGES % 2 ^ 1);
    uint32_t found[2] = {__ballot_sync(ALL_LANES, two_keys[0].row != NULL),
                         __ballot_sync(ALL_LANES, two_keys[1].row != NULL)};
    if (args.has_runs && found[0] != 0 && found[1] != 0) {
        copy_run(args, two_keys[0], stage, shared);
    } else if (!args.has_runs || !args.p.has_pages) {
        if (args.has_runs) { /* the array of flat keys begins or ends inside the tile */
#pragma unroll
            for (int half = 0; half < 2; half++) {
                two_keys[half] =
                    key_in_page(args, source, first + half * SMLA_WARP_LANES + lane, 0);
                found[half] = __ballot_sync(ALL_LANES, two_keys[half].row != NULL);
            }
        }
        copy_scattered(two_keys, stage, shared);
    }
    if (lane == 0) {
        shared->found[stage] = (uint64_t)found[1] << 32 | found[0];
    }
    const uint32_t full = ptx_shared_address(&shared->full[stage]);
    ptx_mbarrier_arrive_after_copies(full);
    ptx_mbarrier_arrive(full, lane == 0);
}

/* Copies a warp's share of a task's tiles. Pages are looked up a tile ahead, because a key can be
 * copied only when its page is known. `tiles` counts the tiles of earlier tasks. */
template <typename Shape>
__device__ __forceinline__ void
bring_task(const sm90_args &all, int64_t source, int64_t first_column, int num_tiles,
           uint32_t tiles, logits_memory<Shape> *shared)
{
    const logits_args &args = all.args;
    const uint32_t warp = (threadIdx.x - CONSUMERS - Shape::QUERY_THREADS) / SMLA_WARP_LANES;
    /* Distance of a task's tiles, in columns. */
    const int64_t step = step_of<Shape>(all) * TILE_KEYS;
    uint32_t i = (warp - tiles) % Shape::KEY_WARPS;
    int64_t first = first_column + i * step;
    int32_t pages[2] = {find_page(args, source, first + own_column(args, 0)),
                        find_page(args, source, first + own_column(args, 1))};
#pragma unroll 1
    for (; i < (uint32_t)num_tiles; i += Shape::KEY_WARPS) {
        const int64_t ahead = first + Shape::KEY_WARPS * step;
        const int32_t next[2] = {find_page(args, source, ahead + own_column(args, 0)),
                                 find_page(args, source, ahead + own_column(args, 1))};
        bring_keys(args, source, first, pages, tiles + i, shared);
        first = ahead;
        pages[0] = next[0];
        pages[1] = next[1];
    }
}

/* ---- Key warps ----------------------------------------------------------------------------- */

/* The loop of the key warps, with tensor maps. The request of a part's first token is guessed, so
 * that its pages are loaded together with the request and not after it. */
template <typename Shape>
__device__ __forceinline__ void
ask_for_work_items(const sm90_args &all, logits_memory<Shape> *shared)
{
    const logits_args &args = all.args;
    const uint32_t warp = (threadIdx.x - CONSUMERS - Shape::QUERY_THREADS) / SMLA_WARP_LANES;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    /* Distance of a task's tiles, in columns. */
    const int64_t step = step_of<Shape>(all) * TILE_KEYS;
    uint32_t tiles = 0; /* number of tiles in earlier tasks */
    bool is_started = false;
    logits_walk walk = start_walk<Shape>(shared);
    logits_part part;
    while (next_part<Shape>(all, &walk, &part)) {
        const int64_t guess =
            Shape::BLOCK_TOKENS == 1
                ? part.first_token
                : (int64_t)smla_divide_uint32((uint32_t)part.first_token, all.guess_tokens);
        const int64_t first = (int64_t)part.tile * TILE_KEYS;
        int own = (int)((warp - tiles) % Shape::KEY_WARPS) + Shape::KEY_WARPS * lane;
        int32_t page = find_page(args, guess, first + own * step);
        /* Other warps wait here for this one, so it must not wait for loads first. */
        await_start<Shape>(&is_started);
        int32_t token = part.first_token;
#pragma unroll 1
        while (token < part.end_token) {
            const logits_run run = find_run<Shape>(all, part, token);
            if (run.source != guess || token != part.first_token) {
                page = find_page(args, run.source, first + own * step);
            }
            ask_for_task(all, run.source, first, run.num_tiles, tiles, own, page, shared);
            tiles += (uint32_t)run.num_tiles;
            own = (int)((warp - tiles) % Shape::KEY_WARPS) + Shape::KEY_WARPS * lane;
            token += run.num_tokens;
        }
    }
    await_start<Shape>(&is_started);
}

/* The loop of the key warps, without tensor maps. */
template <typename Shape>
__device__ __forceinline__ void
bring_work_items(const sm90_args &all, logits_memory<Shape> *shared)
{
    uint32_t tiles = 0; /* number of tiles in earlier tasks */
    logits_walk walk = start_walk<Shape>(shared);
    logits_part part;
    while (next_part<Shape>(all, &walk, &part)) {
        int32_t token = part.first_token;
#pragma unroll 1
        while (token < part.end_token) {
            const logits_run run = find_run<Shape>(all, part, token);
            bring_task(all, run.source, (int64_t)part.tile * TILE_KEYS, run.num_tiles, tiles,
                       shared);
            tiles += (uint32_t)run.num_tiles;
            token += run.num_tokens;
        }
    }
}

template <typename Shape>
__device__ __forceinline__ void
copy_keys(const sm90_args &all, logits_memory<Shape> *shared)
{
    if constexpr (Shape::HAS_MAPS) {
        ask_for_work_items(all, shared);
    } else {
        bool is_started = false;
        await_start<Shape>(&is_started);
        bring_work_items(all, shared);
    }
}

} // namespace
