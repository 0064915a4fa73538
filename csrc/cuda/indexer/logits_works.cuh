/* logits_works.cuh: how the kernel of logits_sm90.cu shares its work, and what it keeps in shared
 * memory. logits_keys.cuh and logits_queries.cuh have the warps that fill it, logits_sm90.cu the
 * headings.
 */
#pragma once

#include "cuda/host/tensor_map.h"
#include "cuda/indexer/logits.cuh"

namespace {

enum {
    WARPGROUPS = 3,
    GROUP_THREADS = 128,
    CONSUMERS = WARPGROUPS * GROUP_THREADS,
    COPIERS = 128,
    QUERY_THREADS = 64, /* the first two copy warps */
    KEY_WARPS = 2,      /* the others */
    COPY_REGISTERS = 104,
    CONSUMER_REGISTERS = 136,
    TILE_KEYS = 64,
    ROW_BYTES = SMLA_INDEX_HEAD_DIM,
    CHUNK_BYTES = 16,
    ROW_CHUNKS = ROW_BYTES / CHUNK_BYTES,
    TILE_BYTES = TILE_KEYS * ROW_BYTES,
    SCALE_ALIGN = 4,                  /* a copy of scales begins at such a multiple */
    SCALES = TILE_KEYS + SCALE_ALIGN, /* so that it brings a few more */
    SCALES_STRIDE = TILE_KEYS + 32,
    ROWS_PER_COPY = SMLA_WARP_LANES / ROW_CHUNKS,
    K_STEPS = ROW_BYTES / 32,
    SLOTS = 2,
    MOST_CHUNK = 8192,
    MOST_EVEN_BLOCKS = 256,
    MIX_ROWS = 4, /* rows that hold a token's mix (logits_queries.cuh) */
};

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

/* How warpgroups share the work. */
template <int HEADS_, int TOKENS_, int GROUPS_> struct logits_shape {
    static constexpr int HEADS = HEADS_;
    static constexpr int TOKENS = TOKENS_;             /* per warpgroup */
    static constexpr int GROUPS = GROUPS_;             /* token groups: 3, or 1 */
    static constexpr int PARTS = WARPGROUPS / GROUPS_; /* warpgroups that take tiles in turn */
    static constexpr int COLUMNS = HEADS * TOKENS;     /* columns of heads per product */
    static constexpr int PAIRS =
        (TOKENS + 1) / 2; /* pairs of tokens; each has 8 columns of mixes */
    static constexpr int GROUP_ROWS = COLUMNS + PAIRS * 2 * MIX_ROWS;
    static constexpr int BLOCK_TOKENS = TOKENS * GROUPS;
    static constexpr int MIXED_AT_ONCE = TOKENS == 1 ? 1 : 2; /* tokens */
    static constexpr int BLOCK_HEADS = BLOCK_TOKENS * HEADS;
    static constexpr int BLOCK_ROWS = GROUP_ROWS * GROUPS;
    /* A multiple of PARTS, so that a stage belongs to one warpgroup. Tiles come out of order, and
     * another one could take the barrier's phase before for its own. */
    static constexpr int STAGES = GROUPS == 1 ? 15 : 8;
    static constexpr int LEAST_CHUNK = GROUPS == 1 ? 4 * TILE_KEYS : 8 * TILE_KEYS;
    /* A decode's work costs a chain of loads, so it has few and long ones. */
    static constexpr int LARGEST_CHUNK = GROUPS == 1 ? MOST_CHUNK : 4096;
    static constexpr int WORKS_PER_SM = GROUPS == 1 ? 8 : 12;
};

/* The argument of the kernel. */
struct sm90_args {
    CUtensorMap keys;        /* 128 bytes, keys of a page, pages */
    CUtensorMap scales;      /* keys of a page, pages */
    bool has_maps;           /* else keys come by cp.async */
    bool is_even;            /* CTAs have equal shares of the tiles */
    smla_divisor req_tokens; /* tokens per request, if each has as many */
    logits_args args;
};

/* A run of tokens and a chunk of their columns. */
template <typename Shape> struct logits_item {
    int64_t first_token;
    int32_t num_tokens;
    int32_t num_tiles;                     /* 0: there are no more items */
    int32_t first;                         /* column */
    int32_t shift;                         /* scales in front of a tile's first one */
    uint32_t plain;                        /* a bit per token without a mix */
    int32_t contexts[Shape::BLOCK_TOKENS]; /* at most the chunk's end */
    float units[Shape::BLOCK_TOKENS];      /* what a mix counts in */
};

template <typename Shape> struct logits_memory {
    alignas(1024) uint8_t keys[Shape::STAGES][TILE_KEYS][ROW_BYTES];
    alignas(1024) uint8_t queries[SLOTS][Shape::BLOCK_ROWS][ROW_BYTES];
    alignas(128) float scales[Shape::STAGES][SCALES_STRIDE];
    alignas(16) float weights[SLOTS][Shape::BLOCK_HEADS];
    alignas(8) uint64_t found[Shape::STAGES]; /* a bit per key that exists */
    logits_item<Shape> items[SLOTS];
    uint32_t largest[2][2][2]; /* two sets of tokens, by token and query warp */
    alignas(8) uint64_t full[Shape::STAGES];
    uint64_t empty[Shape::STAGES];
    uint64_t q_full[SLOTS];
    uint64_t q_empty[SLOTS];
};

/* ---- Works ---------------------------------------------------------------------------------- */

/* A CTA's works, one after the other. They are works i, i + grid...; or, where `is_even`, an equal
 * share of all tiles, which follow each other by block of tokens. A warp walks as one. */
struct logits_walk {
    int64_t number; /* the next work */
    int32_t block;  /* even: where the next work begins */
    int32_t tile;
    int32_t left; /* even: tiles that the CTA has left */
};

/* Tiles of the longest token of a block. */
template <typename Shape>
__device__ __forceinline__ int32_t
count_tiles(const smla_logits_params &p, int64_t block)
{
    int64_t longest = 0;
#pragma unroll
    for (int i = 0; i < Shape::BLOCK_TOKENS; i++) {
        const int64_t token = block * Shape::BLOCK_TOKENS + i;
        const int64_t context = token < p.num_tokens ? context_of(p, token) : 0;
        longest = context > longest ? context : longest;
    }
    return (int32_t)((longest + TILE_KEYS - 1) / TILE_KEYS);
}

/* Finds the CTA's share; lane i counts the tiles of blocks i, i + 32... */
template <typename Shape>
__device__ __forceinline__ logits_walk
start_even_walk(const sm90_args &all)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int num_blocks = (int)all.args.token_blocks.divisor;
    int32_t own[MOST_EVEN_BLOCKS / SMLA_WARP_LANES];
    int32_t total = 0;
#pragma unroll
    for (int i = 0; i < MOST_EVEN_BLOCKS / SMLA_WARP_LANES; i++) {
        const int block = i * SMLA_WARP_LANES + lane;
        own[i] = block < num_blocks ? count_tiles<Shape>(all.args.p, block) : 0;
    }
#pragma unroll
    for (int i = 0; i < MOST_EVEN_BLOCKS / SMLA_WARP_LANES; i++) {
        total += own[i];
    }
    total = __reduce_add_sync(ALL_LANES, total);
    const int32_t share = (total + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x;
    const int32_t start = (int32_t)blockIdx.x * share;
    logits_walk walk = {0, 0, 0, total - start < share ? total - start : share};
    int32_t before = 0; /* tiles of the blocks before */
#pragma unroll
    for (int i = 0; i < MOST_EVEN_BLOCKS / SMLA_WARP_LANES; i++) {
        int32_t end = own[i];
#pragma unroll
        for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
            const int32_t other = __shfl_up_sync(ALL_LANES, end, step);
            end += lane >= step ? other : 0;
        }
        end += before;
        const uint32_t is_here = __ballot_sync(ALL_LANES, end - own[i] <= start && start < end);
        if (is_here != 0) {
            const int found = __ffs((int)is_here) - 1;
            walk.block = i * SMLA_WARP_LANES + found;
            walk.tile = start - __shfl_sync(ALL_LANES, end - own[i], found);
        }
        before = __shfl_sync(ALL_LANES, end, SMLA_WARP_LANES - 1);
        if (before > start) {
            break;
        }
    }
    return walk;
}

template <typename Shape>
__device__ __forceinline__ logits_walk
start_walk(const sm90_args &all)
{
    if (Shape::GROUPS == 1 && all.is_even) {
        return start_even_walk<Shape>(all);
    }
    return logits_walk{blockIdx.x, 0, 0, 0};
}

/* The next work of a walk; false: there is none. */
template <typename Shape>
__device__ __forceinline__ bool
next_work(const sm90_args &all, logits_walk *walk, logits_work *work)
{
    const smla_logits_params &p = all.args.p;
    if (Shape::GROUPS != 1 || !all.is_even) {
        if (walk->number >= all.args.num_works) {
            return false;
        }
        *work = find_work(all.args, walk->number, Shape::BLOCK_TOKENS);
        walk->number += gridDim.x;
        return true;
    }
    if (walk->left <= 0) {
        return false;
    }
    int32_t here = count_tiles<Shape>(p, walk->block) - walk->tile;
    while (here <= 0) {
        if (walk->block >= all.args.token_blocks.divisor) {
            return false; /* somebody has changed the contexts meanwhile */
        }
        walk->block++;
        walk->tile = 0;
        here = count_tiles<Shape>(p, walk->block);
    }
    here = here < walk->left ? here : walk->left;
    const int64_t token = (int64_t)walk->block * Shape::BLOCK_TOKENS;
    *work = logits_work{token, smaller_of(token + Shape::BLOCK_TOKENS, p.num_tokens),
                        (int64_t)walk->tile * TILE_KEYS,
                        smaller_of((int64_t)(walk->tile + here) * TILE_KEYS, p.num_columns)};
    walk->tile += here;
    walk->left -= here;
    return true;
}

/* A run of a work's tokens, as the copy warps go through them. */
struct logits_run {
    int64_t first_token;
    int64_t end_token;
    int64_t source;
    int32_t num_tiles; /* 0: its tokens have no keys here */
};

template <typename Shape>
__device__ __forceinline__ logits_run
find_run(const smla_logits_params &p, const logits_work &work, int64_t token)
{
    const int64_t next = end_of_run(p, token, work.end_token);
    int64_t longest = 0;
    for (int64_t t = token; t < next; t++) {
        const int64_t context = context_of(p, t);
        longest = context > longest ? context : longest;
    }
    longest = smaller_of(longest, work.end) - work.first;
    return logits_run{token, next, source_of(p, token),
                      longest > 0 ? (int32_t)((longest + TILE_KEYS - 1) / TILE_KEYS) : 0};
}

} // namespace
