/* slot.cuh: what the kernels that build index lists share: the slots of positions, and the keys
 * that a token of a batch sees. csrc/cpu/index/ has the same rules. */
#pragma once

#include "core/params_index.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"

/* A block table, and its page size as a divisor. */
typedef struct page_table {
    smla_page_table pages;
    smla_divisor block_size;
} page_table;

static inline page_table
page_table_of(const smla_page_table &pages)
{
    return page_table{pages, smla_make_divisor(pages.block_size)};
}

/* The slot of a position of request `req`, which is a row of the table. It is -1 where the table
 * has no page for the position, or where int32 cannot hold the slot. */
static __device__ __forceinline__ int32_t
find_slot(const page_table &table, int64_t req, int32_t position)
{
    const smla_page_table &pages = table.pages;
    const int64_t block = smla_divide_uint32((uint32_t)position, table.block_size);
    if (position < 0 || block >= pages.num_blocks) {
        return -1;
    }
    const int64_t page =
        __ldg(pages.block_table + req * pages.stride_req + block * pages.stride_block);
    const int64_t slot = page * pages.block_size + (position - block * pages.block_size);
    return page < 0 || slot > INT32_MAX ? -1 : (int32_t)slot;
}

static __device__ __forceinline__ bool
is_valid_token(const uint8_t *is_valid, int64_t stride, int64_t token)
{
    return is_valid == nullptr || __ldg(is_valid + token * stride) != 0;
}

static __device__ __forceinline__ int64_t
read_start(const smla_query_batch &batch, int64_t req)
{
    return __ldg(batch.query_start_loc + req * batch.query_start_loc_stride);
}

/* A token's position, and how many keys it sees: in its window, and as compressed rows. A token
 * past the end of its request sees none. */
typedef struct token_sight {
    int64_t position;
    int64_t window_len;
    int64_t topk_len;
} token_sight;

/* Finds how many keys a token of request `req` sees. If it sees any, its position fits int32. */
static __device__ __forceinline__ token_sight
find_sight(const smla_query_batch &batch, int64_t req, int64_t token, int64_t window,
           const smla_divisor &ratio, int64_t topk)
{
    const int64_t num_left = read_start(batch, req + 1) - token;
    const int64_t position = __ldg(batch.seq_lens + req * batch.seq_lens_stride) - num_left;
    const int64_t seen = num_left <= 0 || position < 0 ? 0 : position + 1;
    const int64_t groups = smla_divide_uint32((uint32_t)seen, ratio);
    return token_sight{position, seen < window ? seen : window, groups < topk ? groups : topk};
}
