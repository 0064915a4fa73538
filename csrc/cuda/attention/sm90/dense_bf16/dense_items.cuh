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
    MOST_CUT_QUERIES = 64, /* with more query tokens, a request's tiles differ much in length */
};

/* The argument of the kernel. */
typedef struct dense_launch : bf16_launch {
    smla_divisor heads;
    smla_cut_tile *cut_tiles; /* [CTAs]: the cut tile that a CTA begins; NULL: nothing is cut */
    int32_t slot_rows;        /* partial rows per slot */
    int32_t team;             /* CTAs per team */
    int32_t num_reqs;         /* with one of no keys that has the padding, where that is wanted */
} dense_launch;

/* ---- Requests ------------------------------------------------------------------------------ */

/* A request, and the steps that some row of it sees. */
typedef struct dense_request {
    int32_t token;
    int32_t num_queries;
    int32_t num_keys;
    int32_t num_tiles;
    int32_t first_step;
    int32_t num_steps;
} dense_request;

typedef struct step_range {
    int32_t first;
    int32_t count;
} step_range;

/* The steps with keys begin to end - 1. Without keys it is one step, which finds none. */
static __device__ __forceinline__ step_range
steps_between(const row_limits &seen)
{
    const int32_t first = seen.begin < seen.end ? seen.begin / STEP_KEYS : 0;
    const int32_t past = seen.end > 0 ? (seen.end - 1) / STEP_KEYS + 1 : 0;
    return step_range{first, max(past - first, 1)};
}

/* The keys that a query token of a request sees: those of the rule, as far as the table goes. */
static __device__ __forceinline__ row_limits
find_limits(const dense_launch &launch, int32_t position, int32_t num_keys)
{
    const smla_attention_params &params = launch.base.params;
    const smla_key_range range = smla_find_key_range(&params.dense.rule, position, num_keys);
    const int64_t end = min(range.end, params.lists[0].topk);
    return row_limits{(int32_t)range.begin, (int32_t)end};
}

static __device__ __forceinline__ dense_request
find_request(const dense_launch &launch, int32_t req)
{
    const smla_requests &reqs = launch.base.params.dense.reqs;
    dense_request request = {};
    if (req >= launch.num_reqs) {
        return request;
    }
    const bool is_padding = req == reqs.num_reqs;
    const int64_t past = is_padding ? reqs.num_tokens : smla_query_start(&reqs, req + 1);
    request.token = (int32_t)smla_query_start(&reqs, req);
    request.num_queries = max((int32_t)past - request.token, 0);
    request.num_keys = is_padding ? 0 : (int32_t)smla_seq_len(&reqs, req);
    const int64_t rows = request.num_queries * launch.heads.divisor;
    request.num_tiles = (int32_t)((rows + TILE_HEADS - 1) / TILE_HEADS);
    const int32_t position = request.num_keys - request.num_queries;
    const row_limits first = find_limits(launch, position, request.num_keys);
    const row_limits last = find_limits(launch, request.num_keys - 1, request.num_keys);
    const step_range steps = steps_between(row_limits{first.begin, last.end});
    request.first_step = steps.first;
    request.num_steps = steps.count;
    return request;
}

/* Units of a group of tiles, one per CTA of a team, where tiles are cut. */
static __device__ __forceinline__ int32_t
units_of_group(const dense_request &request)
{
    return TILE_COST + request.num_steps;
}

static __device__ __forceinline__ int64_t
count_units(const dense_launch &launch, const dense_request &request, bool is_cut)
{
    const int32_t num_groups = (request.num_tiles + launch.team - 1) / launch.team;
    return is_cut ? (int64_t)num_groups * units_of_group(request) : request.num_tiles;
}

/* ---- The plan ------------------------------------------------------------------------------ */

static __device__ __forceinline__ int64_t
sum_of_lanes(int64_t value)
{
#pragma unroll
    for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
    }
    return value;
}

/* The first unit of a team. Each of the teams has at least one. */
static __device__ __forceinline__ int64_t
first_unit(const dense_walk &walk, int64_t team)
{
    return team * walk.num_units / walk.num_teams;
}

static __device__ __forceinline__ int32_t
team_of_unit(const dense_walk &walk, int64_t unit)
{
    int64_t team = unit * walk.num_teams / walk.num_units;
    while (first_unit(walk, team + 1) <= unit) {
        team++;
    }
    while (first_unit(walk, team) > unit) {
        team--;
    }
    return (int32_t)team;
}

/* Makes the plan. One warp calls it, and all functions below: the planner. */
static __device__ __forceinline__ void
start_walk(const dense_launch &launch, int lane, dense_walk *to)
{
    int64_t num_tiles = 0, num_units = 0;
    int32_t most_units = 0, most_queries = 0;
    for (int32_t req = lane; req < launch.num_reqs; req += SMLA_WARP_LANES) {
        const dense_request request = find_request(launch, req);
        num_tiles += request.num_tiles;
        num_units += count_units(launch, request, true);
        most_units = max(most_units, request.num_tiles == 0 ? 0 : units_of_group(request));
        most_queries = max(most_queries, request.num_queries);
    }
    num_tiles = sum_of_lanes(num_tiles);
    num_units = sum_of_lanes(num_units);
    most_units = __reduce_max_sync(0xFFFFFFFFu, most_units);
    most_queries = __reduce_max_sync(0xFFFFFFFFu, most_queries);
    const int32_t num_ctas = (int32_t)gridDim.x;
    const int32_t num_teams = num_ctas / launch.team;
    const int64_t rounds = (num_tiles + num_ctas - 1) / num_ctas;
    const bool is_cut = launch.cut_tiles != NULL && most_queries <= MOST_CUT_QUERIES &&
                        num_units / num_teams + TILE_CUT_COST < rounds * most_units;
    dense_walk walk = {};
    walk.is_cut = is_cut;
    if (is_cut) {
        walk.num_units = num_units;
        walk.num_teams = (int32_t)min((int64_t)num_teams, num_units);
        walk.member = (int32_t)blockIdx.x % launch.team;
        walk.team = (int32_t)blockIdx.x / launch.team;
        if (walk.team < walk.num_teams) {
            walk.at = first_unit(walk, walk.team);
            walk.past = first_unit(walk, walk.team + 1);
        }
    } else {
        walk.at = blockIdx.x;
        walk.past = num_tiles;
    }
    if (lane == 0) {
        *to = walk;
    }
    __syncwarp();
}

/* Finds the request that has unit walk->at, which is not beyond the last one. Returns the first
 * unit of the request. */
static __device__ __forceinline__ int64_t
find_request_of_unit(const dense_launch &launch, int lane, dense_walk *walk, int32_t *req)
{
    for (;;) {
        const dense_request request = find_request(launch, walk->first_req + lane);
        const int64_t units = count_units(launch, request, walk->is_cut);
        const int64_t past = walk->before + smla_scan_lanes(units, lane);
        const uint32_t are_behind = __ballot_sync(0xFFFFFFFFu, past > walk->at);
        if (are_behind != 0) {
            const int found = __ffs(are_behind) - 1;
            *req = walk->first_req + found;
            return __shfl_sync(0xFFFFFFFFu, past - units, found);
        }
        walk->before = __shfl_sync(0xFFFFFFFFu, past, SMLA_WARP_LANES - 1);
        walk->first_req += SMLA_WARP_LANES;
    }
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
make_tile(const dense_launch &launch, int32_t req, const dense_request &request, int32_t tile)
{
    dense_item item = {};
    const int64_t num_rows = request.num_queries * launch.heads.divisor;
    const int64_t first = (int64_t)tile * TILE_HEADS;
    item.req = req;
    item.token = request.token;
    item.first_row = (int32_t)first;
    item.num_rows = (int32_t)min(num_rows - first, (int64_t)TILE_HEADS);
    item.num_keys = request.num_keys;
    item.position = request.num_keys - request.num_queries;
    const int32_t early = (int32_t)smla_divide_uint32(item.first_row, launch.heads);
    const int32_t late =
        (int32_t)smla_divide_uint32(item.first_row + item.num_rows - 1, launch.heads);
    const row_limits first_limits = find_limits(launch, item.position + early, item.num_keys);
    const row_limits last_limits = find_limits(launch, item.position + late, item.num_keys);
    item.seen = row_limits{first_limits.begin, last_limits.end};
    item.shared = row_limits{last_limits.begin, first_limits.end};
    const step_range steps = steps_between(item.seen);
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
    if (first < past) {
        item->first_step = first;
        item->num_steps = past - first;
        return;
    }
    item->seen = row_limits{0, 0};
    item->first_step = 0;
    item->num_steps = 1;
}

/* The next part of a tile, or an item without rows where the CTA has its last one. */
static __device__ __forceinline__ dense_item
next_part(const dense_launch &launch, int lane, dense_walk *walk)
{
    dense_item item = {};
    while (walk->at < walk->past) {
        int32_t req;
        const int64_t base = find_request_of_unit(launch, lane, walk, &req);
        const dense_request request = find_request(launch, req);
        const int32_t units = units_of_group(request);
        const int32_t group = (int32_t)((walk->at - base) / units);
        const int64_t begin = base + (int64_t)group * units;
        const int32_t first = max((int32_t)(walk->at - begin) - TILE_COST, 0);
        walk->at = min(walk->past, begin + units);
        const int32_t past = (int32_t)(walk->at - begin) - TILE_COST;
        const int32_t tile = group * launch.team + walk->member;
        if (past <= first || tile >= request.num_tiles) {
            continue;
        }
        item = make_tile(launch, req, request, tile);
        take_steps(request.first_step + first, request.first_step + past, &item);
        const int32_t first_team = team_of_unit(*walk, begin + TILE_COST);
        const int32_t last_team = team_of_unit(*walk, begin + units - 1);
        if (first_team == last_team) {
            return item;
        }
        /* teams between the two have no other tile, so no two cut tiles have a slot in common */
        item.slot = (first_team + walk->team) * launch.team + walk->member;
        if (first_team == walk->team) {
            walk->begins_cut = true;
            if (lane == 0) {
                launch.cut_tiles[blockIdx.x] = smla_cut_tile{last_team - first_team + 1, item.token,
                                                             item.first_row, item.num_rows};
            }
        }
        return item;
    }
    if (lane == 0 && !walk->begins_cut) {
        launch.cut_tiles[blockIdx.x] = smla_cut_tile{};
    }
    return item;
}

/* Makes the CTA's next item; one without rows follows the last one. */
static __device__ __forceinline__ void
next_item(const dense_launch &launch, int lane, dense_walk *shared_walk, dense_item *to,
          row_limits *limits)
{
    dense_walk walk = *shared_walk;
    dense_item item = {};
    if (walk.is_cut) {
        item = next_part(launch, lane, &walk);
    } else if (walk.at < walk.past) {
        int32_t req;
        const int64_t base = find_request_of_unit(launch, lane, &walk, &req);
        item = make_tile(launch, req, find_request(launch, req), (int32_t)(walk.at - base));
        walk.at += gridDim.x;
    } else if (launch.cut_tiles != NULL && lane == 0) {
        launch.cut_tiles[blockIdx.x] = smla_cut_tile{};
    }
    write_limits(launch, item, lane, limits);
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

/* Makes the CTA's next item, and tells the gather warps. No consumer is at the last but one. */
static __device__ __forceinline__ void
publish_item(const dense_launch &launch, int lane, int turn, uint32_t parity, bf16_memory *shared)
{
    next_item(launch, lane, &shared->dense.walk, &shared->dense.items[turn],
              shared->limits[parity]);
    ptx_mbarrier_arrive(ptx_shared_address(&shared->order.planned), lane == 0);
}
