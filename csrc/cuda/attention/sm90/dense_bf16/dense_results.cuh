/* dense_results.cuh: the results of an item of attention_dense_sm90.cu: rows, or partial rows of a
 * cut tile.
 */
#pragma once

#include "cuda/attention/sm90/dense_bf16/dense_gather.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_results.cuh"

/* The item with one row of the tile, as functions for items of one token see it: row `row` of the
 * tile is head first_head + row of the token. */
static __device__ __forceinline__ work_item
find_row_item(const dense_launch &launch, const dense_item &item, int row)
{
    const row_place place = find_place(launch, item.token, item.first_row + row);
    return work_item{place.token,
                     0,
                     1,
                     place.head - row,
                     item.num_rows,
                     item.slot == NOT_PARTIAL ? NOT_PARTIAL : item.slot * launch.slot_rows};
}

/* Does for a tile what finish_item (bf16_results.cuh) does for an item. */
static __device__ __forceinline__ void
finish_tile(const dense_launch &launch, const dense_item &item, int turn, bf16_memory *shared,
            const bf16_consumer &state)
{
    const thread_index me = find_thread_index_again();
    float factors[2];
    const auto item_of = [&](int row) { return find_row_item(launch, item, row); };
    finish_heads<false>(launch, item.num_rows, item_of, me, turn, state, shared, factors);
    if (item.slot != NOT_PARTIAL) {
        write_partial_rows(launch, find_row_item(launch, item, 0), me, factors, state);
        return;
    }
    const auto find_row = [&](int i) {
        const row_place place = find_place(launch, item.token, item.first_row + i);
        return smla_out16(&launch.base.params.results, place.token, place.head);
    };
    write_out_rows<true>(item.num_rows, find_row, me, factors, state);
}
