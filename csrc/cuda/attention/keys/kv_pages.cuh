/* kv_pages.cuh: where a page of a cache with KV heads becomes an address. The
 * portable kernel copies the table's entries of a block of keys to shared memory while it computes
 * another block; gather warps on Hopper load them one block ahead. Both turn them into places when
 * they copy the keys' rows. Nothing else in a kernel knows of pages.
 */
#pragma once

#include "core/attention/keys.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/ptx.cuh"

/* What kernels read of pages. */
typedef struct kv_pages {
    smla_kv_pages of;
    smla_divisor page_size;
    int64_t page_bytes[SMLA_KV_ARRAYS];
    bool has_slots; /* an entry is a slot, not a page */
} kv_pages;

static inline kv_pages
kv_pages_of(const smla_kv_pages &pages, smla_float_type type)
{
    kv_pages facts = {};
    facts.of = pages;
    facts.page_size = smla_make_divisor(pages.page_size);
    facts.has_slots = pages.table.block_size != pages.page_size;
    for (int i = 0; i < SMLA_KV_ARRAYS; i++) {
        facts.page_bytes[i] = pages.strides_page[i] * smla_float_bytes(type);
    }
    return facts;
}

/* A key's place in its arrays. */
struct kv_place {
    int32_t page; /* -1: the key is hidden */
    uint32_t token;
};

/* The column of a position in the table. */
__device__ __forceinline__ uint32_t
find_entry_column(const kv_pages &pages, uint32_t position)
{
    return pages.has_slots ? position : smla_divide_uint32(position, pages.page_size);
}

/* Starts the copy of the entries of `KEYS` keys, an entry per thread. `position` is that of the
 * first key, and `to` an address in shared memory. */
template <int KEYS>
__device__ __forceinline__ void
bring_entries(const kv_pages &pages, int64_t req, uint32_t position, uint32_t to)
{
    const uint32_t key = threadIdx.x;
    const uint32_t column = find_entry_column(pages, position + key);
    if (key < KEYS) {
        ptx_cp_async_4_or_zero(to + key * 4,
                               pages.of.table.block_table + req * pages.of.table.stride_req +
                                   column * pages.of.table.stride_block,
                               column < pages.of.table.num_blocks);
    }
}

/* Loads the entry of the key at a position; -1, which hides the key, unless `is_on`. */
__device__ __forceinline__ int32_t
load_entry(const kv_pages &pages, int64_t req, uint32_t position, bool is_on)
{
    const uint32_t column = find_entry_column(pages, position);
    uint32_t entry;
    ptx_load_4_cached(pages.of.table.block_table + req * pages.of.table.stride_req +
                          column * pages.of.table.stride_block,
                      is_on && column < pages.of.table.num_blocks, UINT32_MAX, &entry);
    return (int32_t)entry;
}

/* Where the key at a position lies, given its entry. */
__device__ __forceinline__ kv_place
find_place(const kv_pages &pages, int32_t entry, uint32_t position)
{
    const uint32_t page_size = (uint32_t)pages.page_size.divisor;
    const uint32_t number = pages.has_slots ? (uint32_t)entry : position;
    const uint32_t quotient = smla_divide_uint32(number, pages.page_size);
    const uint32_t column = pages.has_slots ? position : quotient;
    const int32_t page = pages.has_slots ? (int32_t)quotient : entry;
    const bool is_hidden =
        entry < 0 || page >= pages.of.num_pages || column >= pages.of.table.num_blocks;
    return kv_place{is_hidden ? -1 : page, number - quotient * page_size};
}

/* Which of the `KEYS` keys from a position on are hidden, as bits. All lanes get them. */
template <int KEYS>
__device__ __forceinline__ uint64_t
find_hidden(const kv_pages &pages, const int32_t *entries, uint32_t position)
{
    uint64_t hidden = 0;
#pragma unroll
    for (int first = 0; first < KEYS; first += SMLA_WARP_LANES) {
        const int key = first + (int)threadIdx.x % SMLA_WARP_LANES;
        const bool is_hidden =
            key < KEYS && find_place(pages, entries[key], position + key).page < 0;
        hidden |= (uint64_t)__ballot_sync(ALL_LANES, is_hidden) << first;
    }
    return hidden;
}
