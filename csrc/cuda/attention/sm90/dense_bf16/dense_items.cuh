/* dense_items.cuh: which tiles and steps a CTA of attention_dense_sm90.cu takes, one after the
 * other. Only the device knows the lengths of requests, so every CTA plans for itself: all of them
 * read the same lengths and come to the same plan.
 *
 * A plan counts units. Where nothing is cut, a unit is a tile, and CTA c takes tiles c, c + grid,
 * and so on. Tiles of a request are neighbours, so that L2 serves all but the first that reads its
 * keys. Where a launch may cut tiles, and the longest CTA would take too long otherwise, a unit is
 * a step of keys, and a tile has TILE_COST units in front of its own. Then each CTA takes an equal
 * run of units, and tiles at the ends of the runs are cut: their CTAs leave partial rows, which
 * combine_tiles.cu folds.
 *
 * CTAs of a team take the same steps of neighbouring tiles at the same time, because those share
 * their keys. With cuts, a team's unit is a step of a group of tiles, one for each CTA of the team.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_common.cuh"

enum {
    TILE_COST = 1,         /* steps: the cost of beginning and ending an item */
    TILE_CUT_COST = 4,     /* steps: the cost of partial rows and of folding them */
    REQS_PER_LINE = 32,    /* numbers of a line of memory */
    PLANNED_REQS = 4,      /* lengths per lane that the planner loads at once */
    MOST_CUT_QUERIES = 64, /* where a request has more query tokens, no tile is cut */
};

/* The argument of the kernel. */
typedef struct dense_launch : bf16_launch {
    smla_divisor heads;
    smla_cut_tile *cut_tiles; /* [CTAs]: the cut tile that a CTA begins; NULL: nothing is cut */
    int32_t slot_rows;        /* partial rows per slot */
    int32_t team;             /* CTAs per team */
    int32_t num_reqs;         /* one more than requests where results of padding are wanted */
    int32_t left;             /* keys before its own that a query token sees; -1: all of them */
    int32_t right;            /* keys behind its own that it sees; -1: all of them */
    bool has_shares; /* the mask also has chunks, or gives each rank its share of the keys */
} dense_launch;

/* ---- Requests ------------------------------------------------------------------------------
 *
 * A launch begins with this code, whose instructions come from memory, so it is short: it divides
 * by 32 bits, and what few masks need is a called function. */

typedef struct dense_request {
    int32_t token; /* the first query token in the batch */
    int32_t num_queries;
    int32_t num_keys;
} dense_request;

/* The keys of a request; none where it stands for the padding. */
static __device__ __forceinline__ int32_t
load_num_keys(const dense_launch &launch, int32_t req)
{
    const smla_requests &reqs = launch.base.params.visible.reqs;
    uint32_t length;
    ptx_load_4_cached(reqs.seq_lens + req * reqs.seq_lens_stride, req < reqs.num_reqs, 0, &length);
    return max((int32_t)length, 0);
}

static __device__ __forceinline__ dense_request
find_request(const dense_launch &launch, int32_t req, int32_t num_keys)
{
    const smla_requests &reqs = launch.base.params.visible.reqs;
    const bool is_padding = req == reqs.num_reqs;
    const int64_t past = is_padding ? reqs.num_tokens : smla_query_start(&reqs, req + 1);
    const int32_t token = (int32_t)smla_query_start(&reqs, req);
    return dense_request{token, max((int32_t)past - token, 0), num_keys};
}

/* Brings the lengths and starts of requests to L2, where the planner reads them one line after the
 * other. They may still be written meanwhile. */
static __device__ __forceinline__ void
prefetch_requests(const dense_launch &launch, int lane)
{
    const smla_requests &reqs = launch.base.params.visible.reqs;
    const int64_t req = lane * REQS_PER_LINE;
    ptx_prefetch_l2(reqs.seq_lens + req * reqs.seq_lens_stride, req < reqs.num_reqs);
    ptx_prefetch_l2(reqs.query_starts + req * reqs.query_starts_stride,
                    reqs.query_starts != NULL && req <= reqs.num_reqs);
}

static __device__ __forceinline__ int32_t
count_tiles(const dense_launch &launch, const dense_request &request)
{
    const int32_t heads = (int32_t)launch.heads.divisor;
    return (request.num_queries * heads + TILE_HEADS - 1) / TILE_HEADS;
}

/* find_limits for masks of every kind, by the rule that all backends share. */
static __device__ __noinline__ row_limits
find_any_limits(const dense_launch &launch, int32_t position, int32_t num_keys)
{
    const smla_key_range range =
        smla_find_key_range(&launch.base.params.visible.rule, position, num_keys);
    return row_limits{(int32_t)range.begin, (int32_t)range.end};
}

/* The keys that a query token of a request sees: those of the rule, as far as the table goes. */
static __device__ __forceinline__ row_limits
find_limits(const dense_launch &launch, int32_t position, int32_t num_keys)
{
    row_limits limits = {0, num_keys};
    if (launch.has_shares) {
        limits = find_any_limits(launch, position, num_keys);
    } else {
        if (launch.left >= 0 && position > launch.left) {
            limits.begin = min(position - launch.left, num_keys);
        }
        if (launch.right >= 0 && position < num_keys - 1 - launch.right) {
            limits.end = max(position + launch.right + 1, 0);
        }
    }
    limits.end = min(limits.end, (int32_t)launch.base.params.keys.lists[0].topk);
    return limits;
}

typedef struct step_range {
    int32_t first;
    int32_t count;
} step_range;

/* The steps with keys begin to end - 1. Without keys it is one step, which finds none. */
static __device__ __forceinline__ step_range
steps_between(int32_t begin, int32_t end)
{
    const int32_t first = begin < end ? begin / STEP_KEYS : 0;
    const int32_t past = end > 0 ? (end - 1) / STEP_KEYS + 1 : 0;
    return step_range{first, max(past - first, 1)};
}

/* The steps that some row of a request sees. */
static __device__ __forceinline__ step_range
steps_of_request(const dense_launch &launch, const dense_request &request)
{
    const int32_t position = request.num_keys - request.num_queries;
    return steps_between(find_limits(launch, position, request.num_keys).begin,
                         find_limits(launch, request.num_keys - 1, request.num_keys).end);
}

/* The units of a request: where tiles are cut, of groups of tiles, one for each CTA of a team. */
static __device__ __forceinline__ int32_t
count_units(const dense_launch &launch, const dense_request &request, bool is_cut)
{
    const int32_t num_tiles = count_tiles(launch, request);
    return is_cut ? (num_tiles + launch.team - 1) / launch.team *
                        (TILE_COST + steps_of_request(launch, request).count)
                  : num_tiles;
}

/* ---- The plan ------------------------------------------------------------------------------ */

/* The first unit of a team. Each of the teams has at least one. */
static __device__ __forceinline__ int32_t
first_unit(const dense_walk &walk, int32_t team)
{
    return team * walk.share + min(team, walk.rest);
}

static __device__ __forceinline__ int32_t
team_of_unit(const dense_walk &walk, int32_t unit)
{
    const int32_t larger = walk.rest * (walk.share + 1); /* units of teams with one more */
    return unit < larger ? unit / (walk.share + 1) : walk.rest + (unit - larger) / walk.share;
}

/* Makes the plan. One warp calls it, and all functions below: the planner. */
static __device__ __forceinline__ void
start_walk(const dense_launch &launch, int lane, dense_walk *to)
{
    uint64_t num_units = 0;
    uint32_t num_tiles = 0, most_units = 0, most_queries = 0;
    int32_t num_keys[PLANNED_REQS];
#pragma unroll 1
    for (int32_t req = lane; req < launch.num_reqs; req += SMLA_WARP_LANES) {
        if (req / SMLA_WARP_LANES % PLANNED_REQS == 0) { /* lengths come from memory together */
#pragma unroll
            for (int i = 0; i < PLANNED_REQS; i++) {
                num_keys[i] = load_num_keys(launch, req + i * SMLA_WARP_LANES);
            }
        }
        const dense_request request = find_request(launch, req, num_keys[0]);
#pragma unroll
        for (int i = 1; i < PLANNED_REQS; i++) {
            num_keys[i - 1] = num_keys[i];
        }
        const uint32_t tiles = (uint32_t)count_tiles(launch, request);
        const uint32_t units = TILE_COST + (uint32_t)steps_of_request(launch, request).count;
        num_tiles += tiles;
        num_units += (uint64_t)((tiles + launch.team - 1) / launch.team) * units;
        most_units = max(most_units, tiles == 0 ? 0 : units);
        most_queries = max(most_queries, (uint32_t)request.num_queries);
    }
    num_units = smla_sum_of_lanes(num_units);
    num_tiles = __reduce_add_sync(0xFFFFFFFFu, num_tiles);
    most_units = __reduce_max_sync(0xFFFFFFFFu, most_units);
    most_queries = __reduce_max_sync(0xFFFFFFFFu, most_queries);
    const uint32_t num_ctas = gridDim.x;
    const uint32_t most_teams = num_ctas / launch.team;
    const uint32_t rounds = (num_tiles + num_ctas - 1) / num_ctas;
    dense_walk walk = {};
    walk.is_cut = launch.cut_tiles != NULL && most_queries <= MOST_CUT_QUERIES &&
                  num_units <= INT32_MAX &&
                  (uint32_t)num_units / most_teams + TILE_CUT_COST < rounds * most_units;
    walk.at = (int32_t)blockIdx.x;
    walk.past = (int32_t)num_tiles;
    if (walk.is_cut) {
        const uint32_t teams = min(most_teams, (uint32_t)num_units);
        walk.share = (int32_t)((uint32_t)num_units / teams);
        walk.rest = (int32_t)((uint32_t)num_units - walk.share * teams);
        walk.team = (int32_t)(blockIdx.x / launch.team);
        walk.member = (int32_t)(blockIdx.x - walk.team * launch.team);
        walk.at = walk.team < (int32_t)teams ? first_unit(walk, walk.team) : 0;
        walk.past = walk.team < (int32_t)teams ? first_unit(walk, walk.team + 1) : 0;
    }
    if (lane == 0) {
        *to = walk;
    }
    __syncwarp();
}

/* The request with unit walk->at, which is not beyond the last one. */
typedef struct found_request {
    dense_request request;
    int32_t req;
    int32_t first_unit;
} found_request;

static __device__ __forceinline__ found_request
find_request_of_unit(const dense_launch &launch, int lane, dense_walk *walk)
{
    dense_request mine = {};
    tile_request<int32_t> found = {};
    const auto count = [&](int32_t req) {
        mine = find_request(launch, req, load_num_keys(launch, req));
        return count_units(launch, mine, walk->is_cut);
    };
    find_request_of_tile(walk->at, launch.num_reqs, lane, count, &walk->requests, &found);
    return found_request{{__shfl_sync(0xFFFFFFFFu, mine.token, found.lane),
                          __shfl_sync(0xFFFFFFFFu, mine.num_queries, found.lane),
                          __shfl_sync(0xFFFFFFFFu, mine.num_keys, found.lane)},
                         found.req,
                         found.first_tile};
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* A row's query token in the batch, and its head. */
typedef struct row_place {
    int32_t token;
    int32_t head;
} row_place;

static __device__ __forceinline__ row_place
find_place(const dense_launch &launch, int32_t first_token, int32_t row)
{
    const int32_t token = (int32_t)smla_divide_uint32((uint32_t)row, launch.heads);
    return row_place{first_token + token, row - token * (int32_t)launch.heads.divisor};
}

/* Writes which keys the rows of an item's tile see. A row that is not there sees all, so that it
 * masks nothing. */
static __device__ __forceinline__ void
write_limits(const dense_launch &launch, const dense_item &item, int lane, row_limits *limits)
{
#pragma unroll 1
    for (int row = lane; row < TILE_HEADS; row += SMLA_WARP_LANES) {
        row_limits mine = {0, INT32_MAX};
        if (row < item.num_rows) {
            const row_place place = find_place(launch, 0, item.first_row + row);
            mine = find_limits(launch, item.position + place.token, item.num_keys);
        }
        limits[row] = mine;
    }
}

/* ---- Items --------------------------------------------------------------------------------- */

/* A whole tile. */
static __device__ __forceinline__ dense_item
make_tile(const dense_launch &launch, const found_request &found, int32_t tile)
{
    const dense_request &request = found.request;
    dense_item item;
    item.req = found.req;
    item.token = request.token;
    item.first_row = tile * TILE_HEADS;
    item.num_rows = min(request.num_queries * (int32_t)launch.heads.divisor - item.first_row,
                        (int32_t)TILE_HEADS);
    item.num_keys = request.num_keys;
    item.position = request.num_keys - request.num_queries;
    const int32_t first = find_place(launch, item.position, item.first_row).token;
    const int32_t last =
        find_place(launch, item.position, item.first_row + item.num_rows - 1).token;
    const row_limits first_limits = find_limits(launch, first, item.num_keys);
    const row_limits last_limits = find_limits(launch, last, item.num_keys);
    item.seen = row_limits{first_limits.begin, last_limits.end};
    item.shared = row_limits{last_limits.begin, first_limits.end};
    const step_range steps = steps_between(item.seen.begin, item.seen.end);
    item.first_step = steps.first;
    item.num_steps = steps.count;
    item.slot = NOT_PARTIAL;
    return item;
}

/* Reduces a tile to steps first to past - 1 of it. Without a step in common, one that finds no key
 * remains. */
static __device__ __forceinline__ void
take_steps(int32_t first, int32_t past, dense_item *item)
{
    first = max(first, item->first_step);
    past = min(past, item->first_step + item->num_steps);
    const bool has_any = first < past;
    item->seen.end = has_any ? item->seen.end : 0;
    item->first_step = has_any ? first : 0;
    item->num_steps = has_any ? past - first : 1;
}

/* Reduces a tile to the CTA's part of it, and moves to the next group of tiles. Leaves no rows
 * where the CTA has no part. */
static __device__ __forceinline__ void
take_part(const dense_launch &launch, const found_request &found, int32_t group, int lane,
          dense_walk *walk, dense_item *item)
{
    const step_range steps = steps_of_request(launch, found.request);
    const int32_t begin = found.first_unit + group * (TILE_COST + steps.count);
    const int32_t end = begin + TILE_COST + steps.count;
    const int32_t first = max(walk->at - begin - TILE_COST, 0);
    walk->at = min(walk->past, end);
    const int32_t past = walk->at - begin - TILE_COST;
    if (past <= first || item->num_rows <= 0) {
        item->num_rows = 0;
        return;
    }
    take_steps(steps.first + first, steps.first + past, item);
    const int32_t first_team = team_of_unit(*walk, begin + TILE_COST);
    const int32_t last_team = team_of_unit(*walk, end - 1);
    if (first_team == last_team) {
        return;
    }
    /* teams between the two have no other tile, so no two cut tiles have a slot in common */
    item->slot = (first_team + walk->team) * launch.team + walk->member;
    if (first_team == walk->team) {
        walk->begins_cut = true;
        if (lane == 0) {
            launch.cut_tiles[blockIdx.x] = smla_cut_tile{last_team - first_team + 1, item->token,
                                                         item->first_row, item->num_rows};
        }
    }
}

/* Makes the CTA's next item; one without rows follows the last one. */
static __device__ __forceinline__ void
next_item(const dense_launch &launch, int lane, dense_walk *shared_walk, dense_item *to,
          row_limits *limits)
{
    dense_walk walk = *shared_walk;
    dense_item item;
    item.num_rows = 0;
#pragma unroll 1
    while (item.num_rows == 0 && walk.at < walk.past) {
        const found_request found = find_request_of_unit(launch, lane, &walk);
        const int32_t at = walk.at - found.first_unit;
        if (walk.is_cut) {
            const int32_t group = at / (TILE_COST + steps_of_request(launch, found.request).count);
            item = make_tile(launch, found, group * launch.team + walk.member);
            take_part(launch, found, group, lane, &walk, &item);
        } else {
            item = make_tile(launch, found, at);
            walk.at += (int32_t)gridDim.x;
        }
    }
    if (item.num_rows != 0) {
        write_limits(launch, item, lane, limits);
    } else if (launch.cut_tiles != NULL && lane == 0 && !walk.begins_cut) {
        launch.cut_tiles[blockIdx.x] = smla_cut_tile{};
    }
    __syncwarp(); /* all lanes have read the walk */
    if (lane == 0) {
        *shared_walk = walk;
        *to = item;
    }
    __syncwarp();
}

static __device__ __forceinline__ int
next_turn(int turn)
{
    return turn + 1 == ITEM_TURNS ? 0 : turn + 1;
}

/* Makes the CTA's next item, and tells the gather warps. No consumer is at the last but one. Each
 * lane arrives, because racecheck does not know that lanes agree. */
static __device__ __forceinline__ void
publish_item(const dense_launch &launch, int lane, int turn, uint32_t parity, bf16_memory *shared)
{
    next_item(launch, lane, &shared->dense.walk, &shared->dense.items[turn],
              shared->limits[parity]);
    ptx_mbarrier_arrive(ptx_shared_address(&shared->order.planned), true);
}
