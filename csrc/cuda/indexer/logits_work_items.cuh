/* logits_work_items.cuh: how the kernel of logits_sm90.cu shares its work, and what it keeps in
 * shared memory. logits_keys.cuh and logits_queries.cuh have the warps that fill this memory, and
 * logits_sm90.cu has the headings. */
#pragma once

#include "cuda/host/tensor_map.h"
#include "cuda/indexer/logits.cuh"
#include "cuda/indexer/logits_plan.h"

namespace {

enum {
    WARPGROUPS = 3,
    GROUP_THREADS = 128,
    CONSUMERS = WARPGROUPS * GROUP_THREADS,
    COPIERS = 128,
    CTA_WARPS = (CONSUMERS + COPIERS) / SMLA_WARP_LANES,
    COPY_REGISTERS = 104,
    CONSUMER_REGISTERS = 136,
    TILE_KEYS = SMLA_LOGITS_TILE_KEYS,
    ROW_BYTES = SMLA_INDEX_HEAD_DIM,
    CHUNK_BYTES = 16,
    ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES,
    TILE_BYTES = TILE_KEYS * ROW_BYTES,
    SCALE_ALIGN = 4,                  /* a copy of scales begins at a multiple of this number, */
    SCALES = TILE_KEYS + SCALE_ALIGN, /* so it may bring a few scales too many */
    SCALES_STRIDE = TILE_KEYS + 32,
    ROWS_PER_COPY = SMLA_WARP_LANES / ROW_CHUNKS,
    K_STEPS = ROW_BYTES / 32,
    SLOTS = 2,
    MIX_ROWS = 4, /* rows that hold a token's mix (logits_queries.cuh) */
};

/* A shape: how warpgroups share the work. */
template <int HEADS_, int TOKENS_, int GROUPS_, bool HAS_MAPS_, bool IS_EVEN_> struct logits_shape {
    static constexpr int HEADS = HEADS_;
    static constexpr int TOKENS = TOKENS_; /* tokens per warpgroup */
    static constexpr int GROUPS = GROUPS_; /* groups of tokens: 3, or 1 */
    /* Whether tensor maps bring keys, or else cp.async. */
    static constexpr bool HAS_MAPS = HAS_MAPS_;
    /* Whether CTAs have equal shares of the tiles. */
    static constexpr bool IS_EVEN = IS_EVEN_;
    /* Warpgroups that take a group's tiles alternately. */
    static constexpr int PARTS = WARPGROUPS / GROUPS_;
    static constexpr int COLUMNS = HEADS * TOKENS; /* columns of heads per product */
    static constexpr int PAIRS =
        (TOKENS + 1) / 2; /* pairs of tokens; each has 8 columns of mixes */
    static constexpr int GROUP_ROWS = COLUMNS + PAIRS * 2 * MIX_ROWS;
    static constexpr int BLOCK_TOKENS = TOKENS * GROUPS;
    /* The first copy warps bring queries, the others keys. A prefill has three query warps, because
     * there a tile of keys takes the tensor cores long, and the mixes of a block take the query
     * warps long. */
    static constexpr bool IS_LONG = HAS_MAPS && GROUPS == 3 && TOKENS > 1;
    static constexpr int QUERY_THREADS = (IS_LONG ? 3 : 2) * SMLA_WARP_LANES;
    static constexpr int KEY_WARPS = (COPIERS - QUERY_THREADS) / SMLA_WARP_LANES;
    static constexpr int MIX_THREADS =
        GROUPS == 3 ? SMLA_WARP_LANES : QUERY_THREADS; /* threads per token's mix */
    static constexpr int MIXERS = QUERY_THREADS / MIX_THREADS;
    /* Values of a mix per thread. */
    static constexpr int MIX_VALUES = SMLA_INDEX_HEAD_DIM / MIX_THREADS;
    /* Tokens that a thread mixes at once. */
    static constexpr int MIXED_AT_ONCE = TOKENS == 1 || MIX_VALUES > 2 ? 1 : 2;
    static constexpr int BLOCK_HEADS = BLOCK_TOKENS * HEADS;
    static constexpr int BLOCK_ROWS = GROUP_ROWS * GROUPS;
    /* A multiple of PARTS, so that a stage belongs to one warpgroup. Warpgroups take tiles out of
     * order, so another warpgroup could take a former phase of the barrier for its own. */
    static constexpr int STAGES = TOKENS * GROUPS > 3 ? (GROUPS == 1 ? 15 : 8) : 15;
};

/* The argument of the kernel. */
struct sm90_args {
    CUtensorMap keys;          /* map of the keys: 128 bytes, keys of a page, pages */
    CUtensorMap scales;        /* map of the scales: keys of a page, pages */
    logits_args args;          /* its work items are those of fill_work_items */
    smla_divisor guess_tokens; /* tokens per request if all have as many, else 1 */
    smla_divisor req_blocks;
    smla_divisor blocks;
    smla_divisor step;
    smla_logits_plan plan;
    int32_t column_tiles;
    int32_t thread_blocks; /* if even: blocks whose tiles a thread counts */
};

/* A block of tokens, and its tiles `tile`, `tile` + step... below `end_tile`. */
struct logits_part {
    int32_t first_token;
    int32_t end_token;
    int32_t tile;
    int32_t end_tile;
};

/* A task: a run of tokens, and the part of their columns. */
template <typename Shape> struct logits_task {
    int32_t first_token;
    int32_t num_tokens;
    int32_t num_tiles;                     /* number of tiles; 0 if there are no more tasks */
    int32_t first;                         /* first column */
    int32_t shift;                         /* number of scales in front of a tile's first one */
    uint32_t plain;                        /* a bit per token without a mix */
    uint32_t scaled;                       /* a bit per plain token whose logits have a power */
    int32_t contexts[Shape::BLOCK_TOKENS]; /* number of columns of each token's keys */
    float units[Shape::BLOCK_TOKENS];      /* unit of each token's mix, or the power of logits */
};

/* How far a CTA has come in its work items. They are numbers i, i + grid...; or, where IS_EVEN, an
 * equal share of all tiles, in the order of blocks of tokens. All lanes of a warp have the same
 * walk. */
struct logits_walk {
    uint32_t number; /* number of the next work item */
    int32_t block;   /* if even: block and tile of the next work item */
    int32_t tile;
    int32_t left; /* if even: tiles that the CTA has left */
};

template <typename Shape> struct logits_memory {
    alignas(1024) uint8_t keys[Shape::STAGES][TILE_KEYS][ROW_BYTES];
    alignas(1024) uint8_t queries[SLOTS][Shape::BLOCK_ROWS][ROW_BYTES];
    alignas(128) float scales[Shape::STAGES][SCALES_STRIDE];
    alignas(16) float weights[SLOTS][Shape::BLOCK_HEADS];
    alignas(8) uint64_t found[Shape::STAGES]; /* a bit per key that exists */
    logits_task<Shape> tasks[SLOTS];
    uint2 largest[2][2][2]; /* bits for two sets of tokens, by token and query warp */
    logits_walk walk;       /* if even: the start of the CTA's share */
    int32_t sums[CTA_WARPS];
    alignas(8) uint64_t full[Shape::STAGES];
    uint64_t empty[Shape::STAGES];
    uint64_t q_full[SLOTS];
    uint64_t q_empty[SLOTS];
};

/* ---- Work items ----------------------------------------------------------------------------- */

/* Returns a part with the tokens of a block; its tiles are set later. */
template <typename Shape>
__device__ __forceinline__ logits_part
part_of_block(const sm90_args &all, int32_t block)
{
    if (Shape::BLOCK_TOKENS == 1) {
        return logits_part{block, block + 1, 0, 0};
    }
    const int32_t req = (int32_t)smla_divide_uint32((uint32_t)block, all.req_blocks);
    const int32_t index = block - req * all.plan.req_blocks;
    const int32_t first = req * all.plan.req_tokens + index * Shape::BLOCK_TOKENS;
    return logits_part{first, min(first + Shape::BLOCK_TOKENS, (req + 1) * all.plan.req_tokens), 0,
                       0};
}

/* The number of tiles of the longest token of a block; 0 past the last block. */
template <typename Shape>
__device__ __forceinline__ int32_t
count_tiles(const sm90_args &all, int32_t block)
{
    const logits_part part = part_of_block<Shape>(all, block);
    int32_t longest = 0;
#pragma unroll
    for (int i = 0; i < Shape::BLOCK_TOKENS; i++) {
        const int32_t token = part.first_token + i;
        const bool exists = block < all.plan.token_blocks && token < part.end_token;
        longest = max(longest, exists ? (int32_t)context_of(all.args.p, token) : 0);
    }
    return (longest + TILE_KEYS - 1) / TILE_KEYS;
}

/* count_tiles for a warp, each lane of which reads the context of one token. */
template <typename Shape>
__device__ __forceinline__ int32_t
count_tiles_as_warp(const sm90_args &all, int32_t block)
{
    const logits_part part = part_of_block<Shape>(all, block);
    const int32_t token = part.first_token + (int)threadIdx.x % SMLA_WARP_LANES;
    const bool exists = block < all.plan.token_blocks && token < part.end_token;
    const uint32_t own = exists ? (uint32_t)context_of(all.args.p, token) : 0;
    return (int32_t)((__reduce_max_sync(ALL_LANES, own) + TILE_KEYS - 1) / TILE_KEYS);
}

/* Finds the CTA's share of all tiles. All threads call this; `walk` is set after the next
 * barrier. */
template <typename Shape>
__device__ __forceinline__ void
find_share(const sm90_args &all, logits_memory<Shape> *shared)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    int32_t block = (int32_t)threadIdx.x * all.thread_blocks;
    int32_t own = 0;
#pragma unroll 1
    for (int i = 0; i < all.thread_blocks; i++) {
        own += count_tiles<Shape>(all, block + i);
    }
    int32_t end = smla_scan_lanes(own, lane);
    if (lane == SMLA_WARP_LANES - 1) {
        shared->sums[warp] = end;
    }
    if (threadIdx.x == 0) {
        shared->walk = logits_walk{};
    }
    __syncthreads(); /* all threads see `sums`, which the warps set */
    const int32_t sum = lane < CTA_WARPS ? shared->sums[lane] : 0;
    const int32_t total = __reduce_add_sync(ALL_LANES, sum);
    end += __reduce_add_sync(ALL_LANES, lane < warp ? sum : 0);
    const int32_t share = (total + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x;
    const int32_t start = (int32_t)blockIdx.x * share;
    if (end - own <= start && start < end) { /* true for one thread */
        int32_t tile = start - (end - own);
#pragma unroll 1
        for (;;) {
            const int32_t here = count_tiles<Shape>(all, block);
            if (tile < here || block >= all.plan.token_blocks) {
                break;
            }
            tile -= here;
            block++;
        }
        shared->walk = logits_walk{0, block, tile, min(total - start, share)};
    }
}

/* Waits until all barriers are initialised. Each warp calls this once, where it first needs them,
 * so that its first loads do not wait. Where IS_EVEN, the kernel has waited already. */
template <typename Shape>
__device__ __forceinline__ void
await_start(bool *is_started)
{
    if (!Shape::IS_EVEN && !*is_started) {
        __syncthreads();
    }
    *is_started = true;
}

template <typename Shape>
__device__ __forceinline__ logits_walk
start_walk(const logits_memory<Shape> *shared)
{
    return Shape::IS_EVEN ? shared->walk : logits_walk{blockIdx.x, 0, 0, 0};
}

/* Finds the next part of a walk. Returns false if there is none. */
template <typename Shape>
__device__ __forceinline__ bool
next_part(const sm90_args &all, logits_walk *walk, logits_part *part)
{
    if constexpr (!Shape::IS_EVEN) {
        if (walk->number >= (uint32_t)all.plan.num_work_items) {
            return false;
        }
        const uint32_t tile = smla_divide_uint32(walk->number, all.blocks);
        *part = part_of_block<Shape>(all, (int32_t)(walk->number -
                                                    tile * (uint32_t)all.plan.token_blocks));
        part->tile = (int32_t)tile;
        part->end_tile = all.column_tiles;
        walk->number += gridDim.x;
        return true;
    }
    if (walk->left <= 0) {
        return false;
    }
    int32_t here;
#pragma unroll 1
    for (;;) {
        here = count_tiles_as_warp<Shape>(all, walk->block) - walk->tile;
        if (here > 0) {
            break;
        }
        if (walk->block >= all.plan.token_blocks) {
            return false; /* the caller has changed the contexts meanwhile */
        }
        walk->block++;
        walk->tile = 0;
    }
    here = min(here, walk->left);
    *part = part_of_block<Shape>(all, walk->block);
    part->tile = walk->tile;
    part->end_tile = walk->tile + here;
    walk->tile += here;
    walk->left -= here;
    return true;
}

/* The step from one tile of a part to its next. */
template <typename Shape>
__device__ __forceinline__ int32_t
step_of(const sm90_args &all)
{
    return Shape::IS_EVEN ? 1 : all.plan.step;
}

/* A run of a part's tokens, as the copy warps handle them. */
struct logits_run {
    int32_t first_token;
    int32_t num_tokens;
    int32_t source;
    int32_t num_tiles; /* number of tiles; 0 if the tokens have no keys here */
    int32_t context;   /* the context of token `lane` of the run */
};

/* Finds the run that begins at `token`. Each lane loads the facts of one token. */
template <typename Shape>
__device__ __forceinline__ logits_run
find_run(const sm90_args &all, const logits_part &part, int32_t token)
{
    const smla_logits_params &p = all.args.p;
    logits_run run = {token, 1, 0, 0, 0};
    int32_t longest;
    if constexpr (Shape::BLOCK_TOKENS == 1) {
        run.source = (int32_t)source_of(p, token);
        run.context = (int32_t)context_of(p, token);
        longest = run.context;
    } else {
        const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
        const bool exists = token + lane < part.end_token;
        const int32_t own = exists ? token + lane : token;
        const int32_t source = (int32_t)source_of(p, own);
        run.context = (int32_t)context_of(p, own);
        run.source = __shfl_sync(ALL_LANES, source, 0);
        const uint32_t others = ~__ballot_sync(ALL_LANES, exists && source == run.source);
        /* Blocks have fewer than 32 tokens, so one bit is set. */
        run.num_tokens = __ffs((int)others) - 1;
        longest = (int32_t)__reduce_max_sync(ALL_LANES,
                                             lane < run.num_tokens ? (uint32_t)run.context : 0);
    }
    const int32_t end = min((longest + TILE_KEYS - 1) / TILE_KEYS, part.end_tile);
    const int32_t tiles = end - part.tile;
    if (tiles > 0) {
        run.num_tiles =
            Shape::IS_EVEN
                ? tiles
                : (int32_t)smla_divide_uint32((uint32_t)(tiles + all.plan.step - 1), all.step);
    }
    return run;
}

} // namespace
