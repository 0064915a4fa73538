/* paged_items.cuh: which items a CTA of paged_attention_sm90.cu takes, one after the other.
 *
 * A tile is up to TILE_ROWS query rows of a request that read the same KV head: (token, head of the
 * group) pairs, token by token. Only the device knows lengths, so every gather warp plans for
 * itself: all of them read the same lengths and come to the same plan.
 *
 * First come the tiles that are not cut. CTA c takes tile c, and then claims others from a counter,
 * so that CTAs with long tiles take fewer, or without a counter every n-th. Neighbours are tiles of
 * the same keys, which L2 then holds. In a request, a KV head's last rows come first, because causal
 * masks give them the most keys.
 *
 * Then come the tiles that may be cut, those of requests whose rows of a KV head are one group's at
 * most. They are counted in units: a block of keys, and TILE_COST for beginning and ending a tile.
 * Each CTA takes an equal run of units, however long requests are. Tiles at the ends of runs are
 * cut: their CTAs leave partial rows, which the one that comes last folds. */
#pragma once

#include "cuda/attention/sm90/paged/paged_memory.cuh"
#include "cuda/attention/tiles/requests.cuh"

enum { TILE_COST = 1 }; /* blocks */

/* ---- Requests ------------------------------------------------------------------------------- */

struct paged_request {
    int32_t first_query;
    int32_t num_queries;
    int32_t position; /* where key 0 is in the request's row of the table */
    int32_t num_keys;
};

__device__ __forceinline__ paged_request
find_request(const paged_args &args, int32_t req)
{
    const smla_kv_request found =
        smla_find_kv_request(&args.p.visible.reqs, &args.p.kv, &args.pages.of, req);
    return paged_request{(int32_t)found.first_query, (int32_t)found.num_queries,
                         (int32_t)found.first_key, (int32_t)found.num_keys};
}

/* The keys that a query of a request sees, as far as the table goes. A called function, because
 * chunks and ranks make it divide by 64 bits. */
__device__ __noinline__ paged_limits
find_limits(const paged_args &args, paged_request request, int32_t query)
{
    const smla_kv_request found = {request.first_query, request.num_queries, request.position,
                                   request.num_keys};
    const smla_key_range range = smla_find_kv_range(&args.p.visible.rule, &found, query);
    const int64_t most = smla_clamp_int64(args.most_keys - request.position, 0, INT32_MAX);
    return paged_limits{(int32_t)min(range.begin, most), (int32_t)min(range.end, most)};
}

/* What the rows of queries first...last see. Limits grow from one query to the next. */
__device__ __forceinline__ paged_limits
find_range(const paged_args &args, const paged_request &request, int32_t first, int32_t last)
{
    return paged_limits{find_limits(args, request, first).begin,
                        find_limits(args, request, last).end};
}

/* Blocks with keys of a range. Without keys it is one block, in which all are hidden. */
template <int D>
__device__ __forceinline__ int32_t
count_blocks(const paged_limits &seen)
{
    constexpr int32_t KEYS = paged_shape<D>::KEYS;
    return seen.begin < seen.end ? (seen.end - 1) / KEYS - seen.begin / KEYS + 1 : 1;
}

/* The rows that a request has for each KV head. */
__device__ __forceinline__ int32_t
count_rows(const paged_args &args, const paged_request &request)
{
    return request.num_queries * (int32_t)args.group.divisor;
}

__device__ __forceinline__ bool
may_cut(const paged_args &args, int32_t num_rows)
{
    return args.partials.arrivals != NULL && num_rows <= GROUP_ROWS;
}

/* Tiles of a KV head that are not cut. */
__device__ __forceinline__ uint32_t
count_head_tiles(const paged_args &args, const paged_request &request)
{
    const int32_t rows = count_rows(args, request);
    return may_cut(args, rows) ? 0 : (uint32_t)(rows + TILE_ROWS - 1) / TILE_ROWS;
}

/* Units of a KV head whose tile may be cut. */
template <int D>
__device__ __forceinline__ uint32_t
count_head_units(const paged_args &args, const paged_request &request)
{
    const int32_t rows = count_rows(args, request);
    if (rows == 0 || !may_cut(args, rows)) {
        return 0;
    }
    return TILE_COST +
           (uint32_t)count_blocks<D>(find_range(args, request, 0, request.num_queries - 1));
}

/* ---- The plan ------------------------------------------------------------------------------- */

/* What is left of a CTA's plan. */
struct paged_walk {
    uint32_t tile; /* the next tile that is not cut */
    uint32_t num_tiles;
    uint32_t unit; /* the next unit of the CTA's run */
    uint32_t past;
    uint32_t share; /* units of a CTA's run; the first `rest` CTAs have one more */
    uint32_t rest;
    request_search<uint32_t> tiles;
    request_search<uint32_t> units;
};

/* The first unit of a CTA's run. */
__device__ __forceinline__ uint32_t
first_unit(const paged_walk &walk, uint32_t cta)
{
    return cta * walk.share + min(cta, walk.rest);
}

__device__ __forceinline__ uint32_t
cta_of_unit(const paged_walk &walk, uint32_t unit)
{
    const uint32_t larger = walk.rest * (walk.share + 1); /* units of runs with one more */
    return unit < larger ? unit / (walk.share + 1) : walk.rest + (unit - larger) / walk.share;
}

/* Makes the plan. Whole warps call this and the functions below. */
template <int D>
__device__ __forceinline__ paged_walk
start_walk(const paged_args &args)
{
    uint32_t tiles = 0;
    uint32_t units = 0;
#pragma unroll 1
    for (int32_t req = lane_idx(); req < (int32_t)args.p.visible.reqs.num_reqs;
         req += SMLA_WARP_LANES) {
        const paged_request request = find_request(args, req);
        tiles += count_head_tiles(args, request);
        units += count_head_units<D>(args, request);
    }
    const uint32_t kv_heads = (uint32_t)args.p.kv.num_kv_heads;
    paged_walk walk = {};
    walk.tile = blockIdx.x;
    walk.num_tiles = __reduce_add_sync(ALL_LANES, tiles) * kv_heads;
    units = __reduce_add_sync(ALL_LANES, units) * kv_heads;
    walk.share = units / gridDim.x;
    walk.rest = units - walk.share * gridDim.x;
    walk.unit = first_unit(walk, blockIdx.x);
    walk.past = first_unit(walk, blockIdx.x + 1);
    return walk;
}

/* An item, and what gather warps alone need to know of it. */
struct planned_item {
    paged_item item;
    paged_request request;
    paged_limits seen; /* what the tile's rows see */
    int32_t req;
};

/* Fills in a tile of up to TILE_ROWS rows, from row first_row on. */
template <int D>
__device__ __forceinline__ void
make_tile(const paged_args &args, int32_t req, int32_t kv_head, int32_t first_row,
          planned_item *planned)
{
    paged_item *const item = &planned->item;
    const paged_request request = find_request(args, req);
    item->num_rows = min(count_rows(args, request) - first_row, (int32_t)TILE_ROWS);
    item->first_row = first_row;
    item->first_query = request.first_query;
    item->kv_head = kv_head;
    planned->seen = find_range(args, request, find_row(args, 0, first_row).query,
                               find_row(args, 0, first_row + item->num_rows - 1).query);
    item->num_blocks = count_blocks<D>(planned->seen);
    item->first_key = planned->seen.begin < planned->seen.end
                          ? planned->seen.begin / paged_shape<D>::KEYS * paged_shape<D>::KEYS
                          : 0;
    item->num_parts = 1;
    item->part = 0;
    item->first_cta = 0;
    planned->request = request;
    planned->req = req;
}

/* Finds the CTA's next tile that is not cut. */
template <int D>
__device__ __forceinline__ void
take_tile(const paged_args &args, paged_walk *walk, planned_item *planned)
{
    const uint32_t kv_heads = (uint32_t)args.p.kv.num_kv_heads;
    tile_request<uint32_t> found = {};
    const auto count = [&](int32_t req) {
        return count_head_tiles(args, find_request(args, req)) * kv_heads;
    };
    find_request_of_tile(walk->tile, (int32_t)args.p.visible.reqs.num_reqs, lane_idx(), count,
                         &walk->tiles, &found);
    const uint32_t in_request = walk->tile - found.first_tile;
    const uint32_t head_tiles = count_head_tiles(args, find_request(args, found.req));
    const uint32_t head = in_request / head_tiles;
    const uint32_t from_end = in_request - head * head_tiles;
    make_tile<D>(args, found.req, (int32_t)head, (int32_t)(head_tiles - 1 - from_end) * TILE_ROWS,
                 planned);
}

/* Reduces a tile, which begins at unit `begin`, to the blocks of the CTA's run, and moves on. Leaves
 * no rows where the run has none of its blocks. */
template <int D>
__device__ __forceinline__ void
take_blocks(uint32_t begin, paged_walk *walk, paged_item *item)
{
    const uint32_t first_block = begin + TILE_COST;
    const uint32_t end = first_block + (uint32_t)item->num_blocks;
    const uint32_t first = max(walk->unit, first_block);
    walk->unit = min(walk->past, end);
    if (first >= walk->unit) {
        item->num_rows = 0;
        return;
    }
    const uint32_t first_cta = cta_of_unit(*walk, first_block);
    item->first_key += (int32_t)(first - first_block) * paged_shape<D>::KEYS;
    item->num_blocks = (int32_t)(walk->unit - first);
    item->num_parts = (int32_t)(cta_of_unit(*walk, end - 1) - first_cta) + 1;
    item->part = (int32_t)(blockIdx.x - first_cta);
    item->first_cta = (int32_t)first_cta;
}

/* Finds the CTA's next part of tiles that may be cut. */
template <int D>
__device__ __forceinline__ void
take_part(const paged_args &args, paged_walk *walk, planned_item *planned)
{
    const uint32_t kv_heads = (uint32_t)args.p.kv.num_kv_heads;
    tile_request<uint32_t> found = {};
    const auto count = [&](int32_t req) {
        return count_head_units<D>(args, find_request(args, req)) * kv_heads;
    };
    find_request_of_tile(walk->unit, (int32_t)args.p.visible.reqs.num_reqs, lane_idx(), count,
                         &walk->units, &found);
    const uint32_t in_request = walk->unit - found.first_tile;
    const uint32_t head_units = count_head_units<D>(args, find_request(args, found.req));
    const uint32_t head = in_request / head_units;
    make_tile<D>(args, found.req, (int32_t)head, 0, planned);
    take_blocks<D>(found.first_tile + head * head_units, walk, &planned->item);
}

/* Finds the CTA's next item; one without rows follows the last one. Returns whether it is a tile that
 * is not cut, behind which walk->tile is to be set. */
template <int D>
__device__ __forceinline__ bool
find_item(const paged_args &args, paged_walk *walk, planned_item *planned)
{
    planned->item.num_rows = 0;
    if (walk->tile < walk->num_tiles) {
        take_tile<D>(args, walk, planned);
        return true;
    }
#pragma unroll 1
    while (planned->item.num_rows == 0 && walk->unit < walk->past) {
        take_part<D>(args, walk, planned);
    }
    return false;
}
