/* paged_items.cuh: which items a CTA of paged_attention_sm90.cu takes, one after the other.
 *
 * A tile is up to TILE_ROWS query rows of a request that read the same KV head: (token, head of the
 * group) pairs, token by token. Only the device knows lengths, so every gather warp plans for
 * itself: all of them read the same lengths and come to the same plan.
 *
 * First come the tiles that are not cut. CTA c takes tile c, and then claims others from a counter,
 * so that CTAs with long tiles take fewer, or without a counter every n-th. Neighbours are tiles of
 * the same keys, which L2 then holds. In a request, a KV head's last rows come first, because
 * causal masks give them the most keys.
 *
 * Then come the tiles that may be cut, of one group's rows at most: those of requests with no more
 * rows of a KV head, or where larger tiles would leave SMs idle, of all requests. They are counted
 * in units: a block of keys, and TILE_COST for beginning and ending a tile. Each CTA takes an equal
 * run of units, however long requests are. Tiles at the ends of runs are cut: their CTAs leave
 * partial rows, which the one that comes last folds. */
#pragma once

#include "cuda/attention/sm90/paged/paged_memory.cuh"
#include "cuda/attention/tiles/requests.cuh"

enum { TILE_COST = 1 }; /* blocks */

/* ---- Requests -------------------------------------------------------------------------------
 *
 * A launch begins with this code, whose instructions come from memory, so it is short: it counts in
 * 32 bits, and what few masks need is a called function. */

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

/* find_limits for masks of every kind, by the rule that all backends share. */
__device__ __noinline__ paged_limits
find_any_limits(const smla_range_rule *rule, int32_t position, int32_t num_keys)
{
    const smla_key_range range = smla_find_key_range(rule, position, num_keys);
    return paged_limits{(int32_t)range.begin, (int32_t)range.end};
}

/* The keys that query `query` of a request sees, as far as the table goes. */
__device__ __forceinline__ paged_limits
find_limits(const paged_args &args, const paged_request &request, int32_t query)
{
    const int32_t num_keys = request.num_keys;
    const int32_t position = num_keys - request.num_queries + query;
    const int32_t most = max(args.most_keys - request.position, 0);
    paged_limits limits = {0, num_keys};
    if (args.has_shares) {
        limits = find_any_limits(&args.p.visible.rule, position, num_keys);
    } else {
        if (args.left >= 0 && position > args.left) {
            limits.begin = min(position - args.left, num_keys);
        }
        if (args.right >= 0 && position < num_keys - 1 - args.right) {
            limits.end = max(position + args.right + 1, 0);
        }
    }
    return paged_limits{min(limits.begin, most), min(limits.end, most)};
}

/* The blocks that have a key of a range, and the first key of the first one. Without keys it is one
 * block, in which all are hidden. */
struct paged_blocks {
    int32_t first_key;
    int32_t count;
};

template <int D>
__device__ __forceinline__ paged_blocks
find_blocks(const paged_limits &seen)
{
    constexpr uint32_t KEYS = paged_shape<D>::KEYS;
    const uint32_t first = (uint32_t)seen.begin / KEYS;
    return seen.begin < seen.end
               ? paged_blocks{(int32_t)(first * KEYS),
                              (int32_t)((uint32_t)(seen.end - 1) / KEYS - first) + 1}
               : paged_blocks{0, 1};
}

/* What rows first...last of a request see. Limits grow from one query to the next. */
__device__ __forceinline__ paged_limits
find_range(const paged_args &args, const paged_request &request, int32_t first, int32_t last)
{
    return paged_limits{find_limits(args, request, find_row(args, 0, first).query).begin,
                        find_limits(args, request, find_row(args, 0, last).query).end};
}

/* The rows that a request has for each KV head. */
__device__ __forceinline__ int32_t
count_rows(const paged_args &args, const paged_request &request)
{
    return request.num_queries * (int32_t)args.group.divisor;
}

/* The units of one tile that may be cut. All tiles of a request go through the blocks that any of
 * them sees. */
template <int D>
__device__ __forceinline__ paged_blocks
find_cut_blocks(const paged_args &args, const paged_request &request)
{
    return find_blocks<D>(find_range(args, request, 0, count_rows(args, request) - 1));
}

/* What a KV head of a request has of the first kind of work, tiles that are not cut, or with
 * `is_cut` of the other one, units. */
template <int D>
__device__ __forceinline__ uint32_t
count_work(const paged_args &args, const paged_request &request, bool is_cut)
{
    const int32_t rows = count_rows(args, request);
    const bool may_cut = rows <= args.partials.most_rows;
    if (rows == 0 || may_cut != is_cut) {
        return 0;
    }
    return is_cut ? (uint32_t)(rows + GROUP_ROWS - 1) / GROUP_ROWS *
                        (TILE_COST + (uint32_t)find_cut_blocks<D>(args, request).count)
                  : (uint32_t)(rows + TILE_ROWS - 1) / TILE_ROWS;
}

/* ---- The plan ------------------------------------------------------------------------------- */

/* What is left of a CTA's plan, and the work of the request that it has come to. */
struct paged_walk {
    uint32_t next; /* the next tile that is not cut, or when is_cut, the next unit */
    uint32_t past;
    uint32_t request_begin;
    uint32_t request_past;
    uint32_t head_work; /* what a KV head has */
    uint32_t share;     /* units of a CTA's run; the first `rest` CTAs have one more */
    uint32_t rest;
    request_search<uint32_t> requests;
    bool is_cut;
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

/* Makes the plan. Each gather warp counts the work of some requests. All gather warps call this and
 * the functions below. */
template <int D>
__device__ __forceinline__ paged_walk
start_walk(const paged_args &args, paged_memory<D> *shared)
{
    uint32_t tiles = 0;
    uint32_t units = 0;
#pragma unroll 1
    for (int32_t req = (int32_t)threadIdx.x; req < args.num_reqs; req += GATHER_THREADS) {
        const paged_request request = find_request(args, req);
        tiles += count_work<D>(args, request, false);
        units += count_work<D>(args, request, true);
    }
    tiles = __reduce_add_sync(ALL_LANES, tiles);
    units = __reduce_add_sync(ALL_LANES, units);
    if (lane_idx() == 0) {
        shared->plan_sums[threadIdx.x / SMLA_WARP_LANES][0] = tiles;
        shared->plan_sums[threadIdx.x / SMLA_WARP_LANES][1] = units;
    }
    ptx_barrier(GATHER_BARRIER, GATHER_THREADS); /* the sums are visible */
    tiles = units = 0;
#pragma unroll
    for (int warp = 0; warp < GATHER_WARPS; warp++) {
        tiles += shared->plan_sums[warp][0];
        units += shared->plan_sums[warp][1];
    }
    const uint32_t kv_heads = (uint32_t)args.p.kv.num_kv_heads;
    paged_walk walk = {};
    walk.next = blockIdx.x;
    walk.past = tiles * kv_heads;
    units *= kv_heads;
    walk.share = units / gridDim.x;
    walk.rest = units - walk.share * gridDim.x;
    return walk;
}

/* An item, and what gather warps alone need to know of it. */
struct planned_item {
    paged_item item;
    paged_request request;
    paged_limits seen; /* what the tile's rows see */
    int32_t req;
};

/* Reduces a tile, which begins at unit `begin`, to the blocks of the CTA's run, and moves on.
 * Leaves no rows where the run has none of its blocks. */
template <int D>
__device__ __forceinline__ void
take_blocks(uint32_t begin, paged_walk *walk, paged_item *item)
{
    const uint32_t first_block = begin + TILE_COST;
    const uint32_t end = first_block + (uint32_t)item->num_blocks;
    const uint32_t first = max(walk->next, first_block);
    walk->next = min(walk->past, end);
    if (first >= walk->next) {
        item->num_rows = 0;
        return;
    }
    item->first_key += (int32_t)(first - first_block) * paged_shape<D>::KEYS;
    item->num_blocks = (int32_t)(walk->next - first);
    if (first > first_block || walk->next < end) {
        const uint32_t first_cta = cta_of_unit(*walk, first_block);
        item->num_parts = (int32_t)(cta_of_unit(*walk, end - 1) - first_cta) + 1;
        item->part = (int32_t)(blockIdx.x - first_cta);
        item->first_cta = (int32_t)first_cta;
    }
}

/* Finds the request that has walk->next. */
template <int D>
__device__ __forceinline__ void
seek_request(const paged_args &args, paged_walk *walk, planned_item *planned)
{
    paged_request mine = {};
    uint32_t work = 0; /* what a KV head of the lane's request has */
    tile_request<uint32_t> found = {};
    const uint32_t kv_heads = (uint32_t)args.p.kv.num_kv_heads;
    const auto count = [&](int32_t req) {
        mine = find_request(args, req);
        work = count_work<D>(args, mine, walk->is_cut);
        return work * kv_heads;
    };
    find_request_of_tile(walk->next, args.num_reqs, lane_idx(), count, &walk->requests, &found);
    planned->request = {__shfl_sync(ALL_LANES, mine.first_query, found.lane),
                        __shfl_sync(ALL_LANES, mine.num_queries, found.lane),
                        __shfl_sync(ALL_LANES, mine.position, found.lane),
                        __shfl_sync(ALL_LANES, mine.num_keys, found.lane)};
    planned->req = found.req;
    walk->head_work = __shfl_sync(ALL_LANES, work, found.lane);
    walk->request_begin = found.first_tile;
    walk->request_past = found.first_tile + walk->head_work * kv_heads;
}

/* Finds the tile, or the part of one, at walk->next, which is not past the last one. */
template <int D>
__device__ __forceinline__ void
take_item(const paged_args &args, paged_walk *walk, planned_item *planned)
{
    paged_item *const item = &planned->item;
    if (walk->next >= walk->request_past) {
        seek_request<D>(args, walk, planned);
    }
    const paged_request &request = planned->request;
    const int32_t rows = count_rows(args, request);
    const uint32_t head = (walk->next - walk->request_begin) / walk->head_work;
    uint32_t begin = walk->request_begin + head * walk->head_work;
    const int32_t from_end = (int32_t)(walk->next - begin);
    item->first_row = walk->is_cut ? 0 : ((int32_t)walk->head_work - 1 - from_end) * TILE_ROWS;
    item->num_rows = min(rows - item->first_row, (int32_t)TILE_ROWS);
    item->first_query = request.first_query;
    item->kv_head = (int32_t)head;
    item->num_parts = 1;
    planned->seen =
        find_range(args, request, item->first_row, item->first_row + item->num_rows - 1);
    if (walk->is_cut && rows > GROUP_ROWS) {
        planned->seen = find_range(args, request, 0, rows - 1);
        const uint32_t work = TILE_COST + (uint32_t)find_blocks<D>(planned->seen).count;
        const uint32_t tile = (walk->next - begin) / work;
        begin += tile * work;
        item->first_row = (int32_t)tile * GROUP_ROWS;
        item->num_rows = min(rows - item->first_row, (int32_t)GROUP_ROWS);
    }
    const paged_blocks blocks = find_blocks<D>(planned->seen);
    item->first_key = blocks.first_key;
    item->num_blocks = blocks.count;
    if (walk->is_cut) {
        take_blocks<D>(begin, walk, item);
    }
}

/* Finds the CTA's next item; one without rows follows the last one. Behind a tile that is not cut
 * walk->next is to be set. */
template <int D>
__device__ __forceinline__ void
find_item(const paged_args &args, paged_walk *walk, planned_item *planned)
{
    planned->item.num_rows = 0;
#pragma unroll 1
    while (planned->item.num_rows == 0) {
        if (walk->next >= walk->past) {
            if (walk->is_cut) {
                return;
            }
            walk->is_cut = true;
            walk->requests = {};
            walk->request_past = 0;
            walk->next = first_unit(*walk, blockIdx.x);
            walk->past = first_unit(*walk, blockIdx.x + 1);
        } else {
            take_item<D>(args, walk, planned);
        }
    }
}
