/* index.cu: positions inside a request -> slots of the cache, or rows of the prefill workspace.
 *
 * Computes     out[t,k] = block_table[req_id[t], tok / block_size] * block_size + tok % block_size
 *              for tok = topk_indices[t,k], or prefill_workspace_starts[id] + tok where the token
 *              belongs to prefill id >= 0; counts[t] = entries of out[t] that are >= 0
 * Shapes       topk_indices, out [T, K] int32, rows any stride apart; req_id_per_token,
 *              prefill_request_ids, counts [T], prefill_workspace_starts, block_table [R, W] int32,
 *              any strides
 * Shared mem   what find_block_start gives for the row of block_table in use, W + 1 words, where W
 *              is at most 8192; 64 bytes of maps and 16 of counts
 * Roles        A CTA takes 1 to 4 tokens in turn, a thread 4 columns at a time and 2 such vectors
 *              per tile. The next tile's loads are in flight while a tile is converted. A new
 *              request's row of block_table is staged. Barriers (__syncthreads): maps written,
 *              counts cleared | former row used | row staged | maps used, counts complete.
 * Roofline     Memory: 8 bytes per element, 1.9 ps at 4.3 TB/s. In this time 132 SMs of 128 lanes
 *              at 1.75 GHz run 55 instructions; the loop has about 25. Reached on an H200: 83 % of
 *              that rate, with 32768 tokens of 2048 columns (2026-11-20, this operator of `python
 *              -m sparse_mla bench --device cuda --only bytes`, replayed without the copy). Staging
 *              is for the look-ups: 32 lanes that look up random entries take 32 tag look-ups of
 *              L1, but 3 to 4 passes of shared memory.
 * Numerics     Integers, exact. -1 where tok is negative or beyond the table, its page or workspace
 *              start is negative, its request or prefill id is out of range, or the result is above
 *              int32. The order is kept. A count is a sum of integers, the same in any order.
 * Source       convert_req_index_to_global_index of vLLM, for the rules.
 */
#include "core/params_index.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCKS_PER_SM = 4,          /* at least so many, which leaves 64 registers per thread */
    MAX_TOKENS = 4,             /* most tokens per CTA */
    MIN_BLOCKS = 1024,          /* CTAs that a grid has before a CTA takes a second token */
    MAX_STAGED_PAGES = 1 << 13, /* most pages that are staged: 32 KiB of table entries */
};

struct convert_args {
    smla_convert_params p;
    smla_divisor block_size;
    int32_t tokens_per_block;
};

/* How to convert the indices of a token. */
struct token_map {
    int64_t req;             /* -1: the token has no request, and its results are -1 */
    int64_t workspace_start; /* -1: the results are slots of the cache */
};

__device__ __forceinline__ token_map
find_map(const smla_convert_params &p, int64_t token)
{
    const token_map none = {-1, -1};
    const int64_t req = __ldg(p.req_id_per_token + token * p.req_id_stride);
    if (req < 0 || req >= p.num_reqs) {
        return none;
    }
    if (p.prefill_request_ids == nullptr) {
        return {req, -1};
    }
    const int64_t prefill = __ldg(p.prefill_request_ids + token * p.prefill_request_ids_stride);
    if (prefill < 0) {
        return {req, -1};
    }
    if (prefill >= p.num_prefills) {
        return none;
    }
    const int64_t start =
        __ldg(p.prefill_workspace_starts + prefill * p.prefill_workspace_starts_stride);
    return start < 0 ? none : token_map{req, start};
}

/* The index of a block's first key, or NOWHERE. `staged` holds these indices for all blocks of a
 * request, and NOWHERE after the last. So staged[block] + tok % block_size is the index of tok, and
 * it is negative where tok has none. */
constexpr uint32_t NOWHERE = 0x80000000u;

__device__ __forceinline__ uint32_t
find_block_start(const smla_convert_params &p, const token_map &map, int64_t block)
{
    if (map.req < 0 || block >= p.num_blocks) {
        return NOWHERE;
    }
    const int64_t page = __ldg(p.block_table + map.req * p.block_table_stride_req +
                               block * p.block_table_stride_block);
    const int64_t start =
        map.workspace_start >= 0 ? map.workspace_start + block * p.block_size : page * p.block_size;
    return page < 0 || start > INT32_MAX ? NOWHERE : (uint32_t)start;
}

/* Stages the first indices of a request's blocks. All threads of the CTA call this. */
__device__ __forceinline__ void
stage_row(const smla_convert_params &p, const token_map &map, uint32_t *staged)
{
    __syncthreads(); /* no thread reads the former row any more */
    for (int64_t block = threadIdx.x; block <= p.num_blocks; block += BLOCK_THREADS) {
        staged[block] = find_block_start(p, map, block);
    }
    __syncthreads(); /* the row is staged */
}

/* The converted index, or -1 where tok names no key. */
template <bool STAGED>
__device__ __forceinline__ int32_t
convert_one(const convert_args &args, const token_map &map, const uint32_t *staged, int32_t tok)
{
    const uint32_t block = smla_divide_uint32((uint32_t)tok, args.block_size);
    const uint32_t offset = (uint32_t)tok - block * (uint32_t)args.block_size.divisor;
    const uint32_t start = STAGED ? staged[min(block, (uint32_t)args.p.num_blocks)]
                                  : find_block_start(args.p, map, block);
    /* Set all bits where tok names no key: a sum above int32 is negative, which max() makes -1, and
     * a negative tok has the sign bit. */
    return max((int32_t)(start + offset), -1) | tok >> 31;
}

/* A thread's part of a tile: UNROLL vectors of a token, BLOCK_THREADS vectors apart. */
template <int WIDTH> struct tile_part {
    enum { UNROLL = WIDTH == 4 ? 2 : 4, STEP = BLOCK_THREADS * WIDTH };
    uint32_t words[UNROLL][WIDTH];
};

/* A token of the CTA, and the first column of a thread's part of a tile. */
struct tile_origin {
    int token;
    int64_t column;
};

template <int WIDTH>
__device__ __forceinline__ void
load_tile(const smla_convert_params &p, int64_t first, const tile_origin &origin,
          tile_part<WIDTH> *part)
{
    using layout = tile_part<WIDTH>;
    const int32_t *const in =
        p.topk_indices + (first + origin.token) * p.topk_indices_stride_token + origin.column;
#pragma unroll
    for (int i = 0; i < layout::UNROLL; i++) {
        if (origin.column + i * layout::STEP < p.topk) {
            smla_load_words<WIDTH * 4, true>(in + i * layout::STEP, part->words[i]);
        }
    }
}

/* Converts a tile, and returns the number of entries >= 0 that this thread wrote. */
template <int WIDTH, bool STAGED>
__device__ __forceinline__ int32_t
convert_tile(const convert_args &args, int64_t first, const tile_origin &origin,
             const token_map &map, const uint32_t *staged, const tile_part<WIDTH> &part)
{
    using layout = tile_part<WIDTH>;
    const smla_convert_params &p = args.p;
    int32_t *const out = p.out + (first + origin.token) * p.out_stride_token + origin.column;
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < layout::UNROLL; i++) {
        if (origin.column + i * layout::STEP < p.topk) {
            uint32_t indices[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                const int32_t index =
                    convert_one<STAGED>(args, map, staged, (int32_t)part.words[i][j]);
                indices[j] = (uint32_t)index;
                count += 1 + (index >> 31);
            }
            smla_store_words<WIDTH * 4, true>(out + i * layout::STEP, indices);
        }
    }
    return count;
}

template <int WIDTH, bool STAGED>
__global__ void
__launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM)
    convert_kernel(const __grid_constant__ convert_args args)
{
    ptx_wait_for_grids();
    extern __shared__ uint32_t staged[];
    __shared__ int32_t counts[MAX_TOKENS];
    __shared__ token_map maps[MAX_TOKENS];
    constexpr int64_t TILE = tile_part<WIDTH>::STEP * tile_part<WIDTH>::UNROLL;
    const smla_convert_params &p = args.p;
    const bool has_counts = p.counts != nullptr;
    const int64_t step = (int64_t)gridDim.x * args.tokens_per_block;
    token_map staged_map = {-2, -2}; /* the map of no token */
    for (int64_t first = (int64_t)blockIdx.x * args.tokens_per_block; first < p.num_tokens;
         first += step) {
        const int64_t left = p.num_tokens - first;
        const int num_tokens = left < args.tokens_per_block ? (int)left : args.tokens_per_block;
        tile_origin origin = {0, (int64_t)threadIdx.x * WIDTH};
        tile_part<WIDTH> next = {};
        load_tile<WIDTH>(p, first, origin, &next);
        if ((int)threadIdx.x < num_tokens) {
            maps[threadIdx.x] = find_map(p, first + threadIdx.x);
            counts[threadIdx.x] = 0;
        }
        __syncthreads(); /* the maps are written, the counts cleared */
        int32_t count = 0;
        while (origin.token < num_tokens) {
            /* Load the next tile while this one is converted. */
            const tile_part<WIDTH> part = next;
            const tile_origin here = origin;
            origin.column += TILE;
            const bool is_last = origin.column - (int64_t)threadIdx.x * WIDTH >= p.topk;
            if (is_last) {
                origin = {here.token + 1, (int64_t)threadIdx.x * WIDTH};
            }
            if (origin.token < num_tokens) {
                load_tile<WIDTH>(p, first, origin, &next);
            }
            const token_map map = maps[here.token];
            if (STAGED &&
                (map.req != staged_map.req || map.workspace_start != staged_map.workspace_start)) {
                stage_row(p, map, staged);
                staged_map = map;
            }
            count += convert_tile<WIDTH, STAGED>(args, first, here, map, staged, part);
            if (has_counts && is_last) {
                const int32_t sum = __reduce_add_sync(ALL_LANES, count);
                if (threadIdx.x % SMLA_WARP_LANES == 0) {
                    atomicAdd(&counts[here.token], sum);
                }
                count = 0;
            }
        }
        __syncthreads(); /* the maps are no longer read, the counts are complete */
        if (has_counts && (int)threadIdx.x < num_tokens) {
            p.counts[(first + threadIdx.x) * p.counts_stride] = counts[threadIdx.x];
        }
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_convert_req_index_to_global_index(const smla_convert_params *p,
                                                   const smla_cuda_device *)
{
    const int64_t tokens = p->num_tokens / MIN_BLOCKS;
    const int32_t tokens_per_block = tokens < 1            ? 1
                                     : tokens < MAX_TOKENS ? (int32_t)tokens
                                                           : MAX_TOKENS;
    const bool is_aligned =
        p->topk % 4 == 0 &&
        smla_is_multiple(p->topk_indices, p->topk_indices_stride_token * 4, 16) &&
        smla_is_multiple(p->out, p->out_stride_token * 4, 16);
    /* A look-up that misses L1 moves 8 entries, so staging 4 entries per index costs no more than
     * look-ups do. */
    const bool is_staged = p->num_blocks <= MAX_STAGED_PAGES && p->num_blocks / 4 <= p->topk;
    const convert_args args = {*p, smla_make_divisor(p->block_size), tokens_per_block};
    static const smla_kernel<convert_args> kernels[2][2] = {
        {convert_kernel<1, false>, convert_kernel<1, true>},
        {convert_kernel<4, false>, convert_kernel<4, true>},
    };
    return smla_launch(kernels[is_aligned][is_staged], args,
                       smla_count_parts(p->num_tokens, tokens_per_block), BLOCK_THREADS,
                       is_staged ? (int)(p->num_blocks + 1) * 4 : 0, p->call.stream);
}
