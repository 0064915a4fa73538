/* few_shape.cuh: what the files of attention_few_sm90.cu share: its argument, its shared memory,
 * and which rows and keys a CTA has.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_gather.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_results.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_steps.cuh"

enum {
    FEW_BLOCKS = 2, /* blocks of keys in shared memory */
    FEW_THREADS = CONSUMER_THREADS + GATHER_WARPS * SMLA_WARP_LANES,
    FEW_CONSUMER_REGISTERS = 232,
    FEW_GATHER_REGISTERS = 40,
    KEPT_KEYS = BLOCK_KEYS / 2, /* keys of a block that a group makes weights of */
};

static_assert(2 * FEW_CONSUMER_REGISTERS + FEW_GATHER_REGISTERS == 3 * 168,
              "setmaxnreg shares out what the launch gave");

/* If the exponent of a weight is above this, the reference of its row moves: that of bf16 rows. */
static constexpr float FEW_MAX_EXPONENT = key_kind<true, false>::MAX_EXPONENT;

/* ROPE: keys have a RoPE part behind their values. IS_SPLIT: CTAs leave partial rows. HAS_STARTS:
 * only the device knows how many query tokens a request has. */
template <bool ROPE_, bool IS_SPLIT_, bool HAS_STARTS_> struct few_kind {
    static constexpr bool ROPE = ROPE_;
    static constexpr bool IS_SPLIT = IS_SPLIT_;
    static constexpr bool HAS_STARTS = HAS_STARTS_;
};

/* The argument of the kernel, in the order in which a CTA reads it. Its lines are in no cache. */
typedef struct few_launch {
    smla_divisor num_splits;
    smla_divisor req_tiles; /* tiles per request; unused with starts */
    smla_requests reqs;
    const int32_t *table; /* pages or slots of each request */
    int64_t table_stride_req;
    int64_t table_stride_entry;
    smla_divisor entry_tokens;
    int32_t num_columns; /* tokens that the table has room for */
    int32_t left;        /* keys before its own that a query token sees; -1: all of them */
    int32_t right;       /* keys behind its own that it sees; -1: all of them */
    smla_divisor heads;
    smla_head_rows query[2];
    const uint8_t *rows; /* the cache */
    smla_divisor page_tokens;
    int64_t num_slots;
    int64_t page_stride_bytes;
    int64_t token_stride_bytes;
    float scale_log2;           /* softmax_scale * log2(e) */
    smla_partial_rows partials; /* IS_SPLIT */
    smla_results results;
    smla_sinks sinks;
    int32_t
        *req_ids; /* IS_SPLIT and HAS_STARTS: what the combine kernel reads; NULL: it is there */
} few_launch;

/* Half h of a block is tiles 4h and on: group h scores with them, and adds their values. */
struct few_memory {
    alignas(1024) uint8_t query[QUERY_TILES][TILE_HEADS][128];
    alignas(1024) uint8_t keys[FEW_BLOCKS][QUERY_TILES][BLOCK_KEYS][128];
    alignas(1024) uint8_t probs[TILE_HEADS][128]; /* weights; until then, scores of group 0 */
    float maxima[2][TILE_HEADS];                  /* [group]: of the block's scores */
    float sums[2][TILE_HEADS];                    /* [group]: of all weights */
    /* [block][half][warp]: bits of the 16 rows that are keys; a copy for each half */
    alignas(8) uint16_t is_key[FEW_BLOCKS][2][GATHER_WARPS];
    /* mbarriers */
    alignas(8) uint64_t full[FEW_BLOCKS][2]; /* [block][half] */
    uint64_t empty[FEW_BLOCKS][2];
    uint64_t query_full;
};

enum { FEW_MBARRIERS = 4 * FEW_BLOCKS + 1, FULL_ARRIVALS = 128 + GATHER_WARPS };

/* The address of a member of few_memory, which begins at `base`. */
#define FEW_AT(base, member) ((base) + (uint32_t)offsetof(few_memory, member))

static __device__ __forceinline__ uint32_t
few_full(uint32_t base, int block, int half)
{
    return FEW_AT(base, full) + 16 * block + 8 * half;
}

static __device__ __forceinline__ uint32_t
few_empty(uint32_t base, int block, int half)
{
    return FEW_AT(base, empty) + 16 * block + 8 * half;
}

/* ---- Items --------------------------------------------------------------------------------- */

/* A CTA's tile: up to 64 rows of a request, and its share of their keys. */
typedef struct few_item {
    int32_t tile; /* number in the call */
    int32_t split;
    int32_t req;
    int32_t token; /* the request's first query token in the batch */
    int32_t num_queries;
    int32_t first_row; /* row i of a request is head i % H of its query token i / H */
    int32_t num_rows;
} few_item;

/* Cuts the tile out of the request's rows. */
static __device__ __forceinline__ void
take_rows(const few_launch &launch, int32_t tile, few_item *item)
{
    item->first_row = tile * TILE_HEADS;
    item->num_rows = min(item->num_queries * (int32_t)launch.heads.divisor - item->first_row,
                         (int32_t)TILE_HEADS);
}

/* The CTA's item; with starts, all that is known without memory. */
template <typename Kind>
static __device__ __forceinline__ few_item
find_few_item(const few_launch &launch)
{
    few_item item = {};
    uint32_t tile = blockIdx.x;
    if constexpr (Kind::IS_SPLIT) {
        tile = smla_divide_uint32(blockIdx.x, launch.num_splits);
        item.split = (int32_t)(blockIdx.x - tile * (uint32_t)launch.num_splits.divisor);
    }
    item.tile = (int32_t)tile;
    if constexpr (!Kind::HAS_STARTS) {
        const uint32_t req = smla_divide_uint32(tile, launch.req_tiles);
        item.req = (int32_t)req;
        item.num_queries = (int32_t)launch.reqs.query_len;
        item.token = item.req * item.num_queries;
        take_rows(launch, (int32_t)(tile - req * (uint32_t)launch.req_tiles.divisor), &item);
    }
    return item;
}

/* Finds the tile's request. Tokens behind the last request are those of request num_reqs. Returns
 * false where the call has fewer tiles. A warp calls it. */
static __device__ __forceinline__ bool
search_item(const few_launch &launch, few_item *item)
{
    const smla_requests &reqs = launch.reqs;
    const int32_t num_reqs = (int32_t)reqs.num_reqs;
    int32_t token = 0, num_queries = 0;
    const auto count_tiles = [&](int32_t req) {
        token = (int32_t)smla_query_start(&reqs, req);
        const int64_t past = req < num_reqs ? smla_query_start(&reqs, req + 1) : reqs.num_tokens;
        num_queries = max((int32_t)past - token, 0);
        return (num_queries * (int32_t)launch.heads.divisor + TILE_HEADS - 1) / TILE_HEADS;
    };
    request_search<int32_t> search = {};
    tile_request<int32_t> found = {};
    if (!find_request_of_tile(item->tile, num_reqs + 1, gather_lane(), count_tiles, &search,
                              &found)) {
        return false;
    }
    item->req = found.req;
    item->token = __shfl_sync(0xFFFFFFFFu, token, found.lane);
    item->num_queries = __shfl_sync(0xFFFFFFFFu, num_queries, found.lane);
    take_rows(launch, item->tile - found.first_tile, item);
    return true;
}

/* A row's query token in its request, and its head. */
typedef struct few_place {
    int32_t query;
    int32_t head;
} few_place;

static __device__ __forceinline__ few_place
find_few_place(const few_launch &launch, const few_item &item, int row)
{
    const uint32_t number = (uint32_t)(item.first_row + row);
    const uint32_t query = smla_divide_uint32(number, launch.heads);
    return few_place{(int32_t)query, (int32_t)(number - query * (uint32_t)launch.heads.divisor)};
}

static __device__ __forceinline__ int64_t
find_few_token(const few_item &item, const few_place &place)
{
    return (int64_t)item.token + place.query;
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* The keys of the item's request; none where it is no request. */
static __device__ __forceinline__ int32_t
load_num_keys(const few_launch &launch, const few_item &item)
{
    return item.req < (int32_t)launch.reqs.num_reqs ? (int32_t)smla_seq_len(&launch.reqs, item.req)
                                                    : 0;
}

/* The keys that a query token of a request sees: smla_find_key_range without chunks and shares, as
 * far as the table goes. */
static __device__ __forceinline__ row_limits
find_few_limits(const few_launch &launch, const few_item &item, int32_t query, int32_t num_keys)
{
    const int32_t position = num_keys - item.num_queries + query;
    row_limits limits = {0, num_keys};
    if (launch.left >= 0 && position > launch.left) {
        limits.begin = min(position - launch.left, num_keys);
    }
    if (launch.right >= 0 && position < num_keys - 1 - launch.right) {
        limits.end = max(position + launch.right + 1, 0);
    }
    limits.end = min(limits.end, launch.num_columns);
    return limits;
}

/* The keys that some row of the tile sees. */
static __device__ __forceinline__ row_limits
find_seen(const few_launch &launch, const few_item &item, int32_t num_keys)
{
    const int32_t first = find_few_place(launch, item, 0).query;
    const int32_t last = find_few_place(launch, item, item.num_rows - 1).query;
    return row_limits{find_few_limits(launch, item, first, num_keys).begin,
                      find_few_limits(launch, item, last, num_keys).end};
}

/* A CTA's blocks. Splits take blocks in turn, so those of a short request are as equal as can be,
 * and where the first one lies seldom depends on the request's length. */
typedef struct few_blocks {
    int32_t first_key;
    int32_t stride; /* keys from one block to the next */
    int32_t count;
} few_blocks;

template <typename Kind>
static __device__ __forceinline__ few_blocks
find_few_blocks(const few_launch &launch, const few_item &item, const row_limits &seen)
{
    const int32_t first = seen.begin / BLOCK_KEYS;
    const int32_t past = seen.begin < seen.end ? (seen.end - 1) / BLOCK_KEYS + 1 : first;
    few_blocks blocks = {(first + item.split) * BLOCK_KEYS, BLOCK_KEYS, past - first};
    if constexpr (Kind::IS_SPLIT) {
        const int32_t num_splits = (int32_t)launch.num_splits.divisor;
        blocks.stride = num_splits * BLOCK_KEYS;
        blocks.count =
            (int32_t)smla_divide_uint32((uint32_t)(past - first + num_splits - 1 - item.split),
                                        launch.num_splits);
    }
    return blocks;
}
