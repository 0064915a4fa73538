/* mha_tiles.cuh: which tiles a CTA of mha_attention_sm90.cu takes, and what a tile is.
 *
 * Only the device knows the requests' lengths. Tiles are numbered section by section of heads. In a
 * section they are numbered request by request, in a request from its last rows on, which have the
 * most keys, and for the same rows head by head. The number of a CTA's first tile is the CTA's own.
 * It claims the others from a counter, late, so that CTAs which are slower take fewer. Without a
 * counter it takes every n-th, forwards and backwards in turn.
 */
#pragma once

#include "cuda/attention/sm90/mha/mha_memory.cuh"
#include "cuda/attention/tiles/claims.cuh"
#include "cuda/attention/tiles/requests.cuh"

/* ---- Tiles ---------------------------------------------------------------------------------- */

/* Bytes of keys and values that tiles which run at the same time should share: half of an L2. */
constexpr uint32_t SECTION_BYTES = 24 << 20;

/* Where the last tile was found; numbers only grow. */
struct mha_search {
    uint32_t head_tiles;               /* tiles of a head: of all requests */
    uint32_t section_heads;            /* heads whose tiles run at the same time */
    uint32_t section;                  /* the section of the last tile */
    uint32_t section_first;            /* number of its first tile */
    request_search<uint32_t> requests; /* counts the tiles of a head */
};

__device__ __forceinline__ uint32_t
count_tiles(const smla_kv_request &request)
{
    return (uint32_t)(request.num_queries + TILE_ROWS - 1) / TILE_ROWS;
}

/* The query heads of a section: as many KV heads as have section_keys keys together in the longest
 * request, which L2 should hold. Their number divides that of all KV heads, so that the last
 * section is as large as the others. */
__device__ __forceinline__ uint32_t
choose_section(const mha_args &args, uint32_t most_keys, uint32_t section_keys)
{
    const uint32_t kv_heads = (uint32_t)args.p.kv.num_kv_heads;
    uint32_t heads = max(min(kv_heads, section_keys / max(most_keys, 1u)), 1u);
#pragma unroll 1
    while (kv_heads % heads != 0) {
        heads--;
    }
    return heads * (uint32_t)args.group.divisor;
}

/* All functions below are called by the scheduler, a warp. */
__device__ __forceinline__ mha_search
start_search(const mha_args &args, uint32_t section_keys)
{
    uint32_t tiles = 0;
    uint32_t most_keys = 0;
    /* Two loops, because one would take more registers than a load warp has. */
#pragma unroll 1
    for (int64_t req = lane_idx(); req < args.p.visible.reqs.num_reqs; req += SMLA_WARP_LANES) {
        tiles += count_tiles(smla_find_kv_request(&args.p.visible.reqs, &args.p.kv, NULL, req));
    }
#pragma unroll 1
    for (int64_t req = lane_idx(); req < args.p.visible.reqs.num_reqs; req += SMLA_WARP_LANES) {
        most_keys = max(
            most_keys,
            (uint32_t)smla_find_kv_request(&args.p.visible.reqs, &args.p.kv, NULL, req).num_keys);
    }
    mha_search search = {};
    /* A query_start_loc that falls could make more tiles than the host has counted on. */
    search.head_tiles = min(__reduce_add_sync(ALL_LANES, tiles), args.most_head_tiles);
    search.section_heads =
        choose_section(args, __reduce_max_sync(ALL_LANES, most_keys), section_keys);
    return search;
}

/* Makes tile `idx` of a request, counted from its end. */
__device__ __forceinline__ void
make_tile(const mha_args &args, const smla_kv_request &request, int32_t idx, int32_t head,
          mha_tile *tile)
{
    const int32_t num_keys = (int32_t)request.num_keys;
    const int32_t first_row = (int32_t)request.num_queries - (idx + 1) * TILE_ROWS;
    /* keys that the tile's last row sees */
    const int32_t end = args.is_causal ? max(num_keys - idx * TILE_ROWS, 0) : num_keys;
    const int32_t num_blocks = max((end + BLOCK_KEYS - 1) / BLOCK_KEYS, 1);
    const int64_t token = request.first_query + first_row;
    tile->first_query = (int32_t)token;
    tile->absent_rows = max(-first_row, 0);
    tile->num_blocks = num_blocks;
    tile->first_key = (int32_t)request.first_key + end - BLOCK_KEYS;
    tile->absent_keys = num_blocks * BLOCK_KEYS - end;
    tile->head = head;
    tile->kv_head = (int32_t)smla_divide_uint32((uint32_t)head, args.group);
    tile->out =
        (uint8_t *)args.p.results.out + token * args.out_token_bytes + head * args.out_head_bytes;
    tile->lse = args.p.results.lse == NULL
                    ? NULL
                    : args.p.results.lse + token * args.p.results.lse_stride_token +
                          head * args.p.results.lse_stride_head;
}

/* Finds tile `number`, which the first lane makes, or returns false if there are fewer tiles. */
__device__ __forceinline__ bool
find_tile(const mha_args &args, uint32_t number, mha_search *search, mha_tile *tile)
{
    const uint32_t heads = search->section_heads;
    const uint32_t section_tiles = search->head_tiles * heads;
    if (number >= search->head_tiles * (uint32_t)args.p.queries.num_heads) {
        return false;
    }
    while (number - search->section_first >= section_tiles) {
        search->section++;
        search->section_first += section_tiles;
        search->requests = {};
    }
    const uint32_t in_section = number - search->section_first;
    const uint32_t row = in_section / heads;
    const uint32_t head = search->section * heads + in_section - row * heads;
    const auto request_of = [&](int32_t req) {
        return smla_find_kv_request(&args.p.visible.reqs, &args.p.kv, NULL, req);
    };
    tile_request<uint32_t> found;
    if (!find_request_of_tile(
            row, (int32_t)args.p.visible.reqs.num_reqs, lane_idx(),
            [&](int32_t req) { return count_tiles(request_of(req)); }, &search->requests, &found)) {
        return false;
    }
    if (lane_idx() == 0) {
        make_tile(args, request_of(found.req), (int32_t)(row - found.first_tile), (int32_t)head,
                  tile);
    }
    return true;
}

/* ---- The scheduler -------------------------------------------------------------------------- */

/* The number of the CTA's n-th tile, n > 0. */
__device__ __forceinline__ uint32_t
claim_tile(const mha_args &args, uint32_t n)
{
    if (args.counters == NULL) {
        return n * gridDim.x + (n % 2 != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    uint32_t number = 0;
    if (lane_idx() == 0) {
        number = gridDim.x + add_to_counter(&args.counters[CLAIMS]);
    }
    return __shfl_sync(ALL_LANES, number, 0);
}

/* Publishes tiles until there are none. */
template <int D>
__device__ __forceinline__ void
schedule_tiles(const mha_args &args, mha_memory<D> *shared)
{
    const bool is_first_lane = lane_idx() == 0;
    if (args.counters != NULL && is_first_lane) {
        start_claims(args.counters);
    }
    __syncwarp();
    constexpr int KEY_BYTES = (D + VALUE_DIM) * 2;
    mha_search search = start_search(args, SECTION_BYTES / KEY_BYTES);
    for (uint32_t n = 0;; n++) {
        ptx_mbarrier_wait(at(shared->tile_empty[n % SLOTS]), (n / SLOTS % 2) ^ 1);
        if (n > 0) {
            ptx_mbarrier_wait(at(shared->tile_wanted), (n & 1) ^ 1);
        }
        mha_tile *const tile = &shared->tiles[n % SLOTS];
        const bool exists =
            find_tile(args, n == 0 ? blockIdx.x : claim_tile(args, n), &search, tile);
        if (!exists && is_first_lane) {
            tile->num_blocks = 0;
        }
        ptx_mbarrier_arrive(at(shared->tile_full[n % SLOTS]), is_first_lane);
        if (!exists) {
            break;
        }
    }
    if (args.counters != NULL && is_first_lane) {
        end_claims(args.counters);
    }
}
