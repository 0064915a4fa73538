/* logits.cuh: what the kernels of indexer_logits share: work items, the keys of a token, and
 * results.
 *
 * A work item is a block of tokens and a chunk of their columns. Neighbouring tokens of a block
 * with the same keys are a run, for which a key is read once. No logit depends on the cut into work
 * items.
 */
#pragma once

#include <math.h>

#include "core/params_indexer.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

/* logits_sm90.cu: whether it serves a call, and its launch. */
extern "C" bool smla_cuda_serves_logits_sm90(const smla_logits_params *params);
extern "C" cudaError_t smla_cuda_launch_logits_sm90(const smla_logits_params *params);

/* The argument of the kernels. */
typedef struct logits_args {
    smla_logits_params p;
    smla_divisor page_keys;
    /* Blocks of tokens; work items of the same chunk follow each other. */
    smla_divisor token_blocks;
    int64_t num_work_items;
    int64_t chunk_columns;
    int32_t head_chunks;  /* parts of the heads that fit in shared memory (logits.cu) */
    int32_t chunk_groups; /* groups of eight heads per part */
    int32_t block_tokens; /* tokens per work item */
    bool q_is_aligned;    /* rows of q begin at multiples of 16 bytes */
    bool has_runs;        /* tiles of 64 columns lie in one page each, or keys are flat */
} logits_args;

/* A work item. Its tokens are those from first_token to end_token - 1. */
typedef struct logits_work_item {
    int64_t first_token;
    int64_t end_token;
    int64_t first; /* the columns are those from first to end - 1 */
    int64_t end;
} logits_work_item;

static __device__ __forceinline__ int64_t
smaller_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static __device__ __forceinline__ logits_work_item
find_work_item(const logits_args &args, int64_t number, int block_tokens)
{
    const int64_t chunk = smla_divide(number, args.token_blocks);
    const int64_t token = (number - chunk * args.token_blocks.divisor) * block_tokens;
    const int64_t first = chunk * args.chunk_columns;
    return logits_work_item{token, smaller_of(token + block_tokens, args.p.num_tokens), first,
                            smaller_of(first + args.chunk_columns, args.p.num_columns)};
}

/* The number that identifies a token's keys: its request, or the key of column 0. */
static __device__ __forceinline__ int64_t
source_of(const smla_logits_params &p, int64_t token)
{
    if (p.has_pages) {
        return __ldg(p.req_id_per_token + token * p.req_id_stride);
    }
    return p.starts == NULL ? 0 : __ldg(p.starts + token * p.starts_stride);
}

/* How many columns of a token are scored: its length clamped to [0, N], or 0. */
static __device__ __forceinline__ int64_t
context_of(const smla_logits_params &p, int64_t token)
{
    const int64_t length = __ldg(p.context_lens + token * p.context_lens_stride);
    return length < p.least_context ? 0 : smaller_of(length, p.num_columns);
}

/* The first token after `token` that has other keys, or `end`. */
static __device__ __forceinline__ int64_t
end_of_run(const smla_logits_params &p, int64_t token, int64_t end)
{
    const int64_t source = source_of(p, token);
    int64_t next = token + 1;
    while (next < end && source_of(p, next) == source) {
        next++;
    }
    return next;
}

/* The page that the block table has for a column; -1 where it has no entry. */
static __device__ __forceinline__ int32_t
find_page(const logits_args &args, int64_t source, int64_t column)
{
    const smla_logits_params &p = args.p;
    if (!p.has_pages) {
        return 0;
    }
    const int64_t block = smla_divide_uint32((uint32_t)column, args.page_keys);
    return source >= 0 && source < p.num_reqs && block < p.pages.num_blocks
               ? __ldg(p.pages.block_table + source * p.pages.stride_req +
                       block * p.pages.stride_block)
               : -1;
}

/* The key of a column in the page that find_page gave. Its row is NULL if the key does not
 * exist. */
static __device__ __forceinline__ smla_kv_token
key_in_page(const logits_args &args, int64_t source, int64_t column, int32_t page)
{
    const smla_logits_params &p = args.p;
    int64_t offset = source + column;
    if (p.has_pages) {
        offset = (uint32_t)column - smla_divide_uint32((uint32_t)column, args.page_keys) *
                                        (uint32_t)args.page_keys.divisor;
    }
    if (page < 0 || page >= p.kv.num_pages || offset < 0 || offset >= p.kv.block_size) {
        return smla_kv_token{NULL, NULL};
    }
    return smla_kv_token_at(&p.kv, page, offset);
}

static __device__ __forceinline__ smla_kv_token
find_key(const logits_args &args, int64_t source, int64_t column)
{
    return key_in_page(args, source, column, find_page(args, source, column));
}

static __device__ __forceinline__ void
store_logit(const smla_logits_params &p, int64_t token, int64_t column, float logit)
{
    const int64_t at = token * p.out_stride_token + column;
    if (p.out_type == SMLA_FLOAT_BF16) {
        ((uint16_t *)p.out)[at] = (uint16_t)smla_cvt_bf16x2(logit, 0.0f);
    } else {
        ((float *)p.out)[at] = logit;
    }
}

/* Fills a work item's columns from each token's context on with -inf, by `num_threads` threads. */
static __device__ __forceinline__ void
fill_rest(const smla_logits_params &p, const logits_work_item &work, int thread, int num_threads)
{
    if (p.leaves_rest) {
        return;
    }
    for (int64_t token = work.first_token; token < work.end_token; token++) {
        const int64_t context = context_of(p, token);
        const int64_t from = context > work.first ? context : work.first;
        for (int64_t n = from + thread; n < work.end; n += num_threads) {
            store_logit(p, token, n, -INFINITY);
        }
    }
}

/* Returns x, which is the same in every lane of the warp; the result tells the compiler so. */
static __device__ __forceinline__ uint32_t
same_in_warp(uint32_t x)
{
    return __reduce_max_sync(0xFFFFFFFFu, x);
}

/* max(x, 0), or NaN for NaN. */
static __device__ __forceinline__ float
relu(float x)
{
    return ptx_max_nan(x, 0.0f);
}

/* The columns per work item for about `num_work_items` work items. */
static inline int64_t
choose_chunk(int64_t num_columns, int64_t token_blocks, int64_t num_work_items, int64_t least,
             int64_t most)
{
    const int64_t chunks = smla_count_parts(num_work_items, token_blocks);
    const int64_t columns = smla_count_parts(smla_count_parts(num_columns, chunks), least) * least;
    return columns < least ? least : columns > most ? most : columns;
}
