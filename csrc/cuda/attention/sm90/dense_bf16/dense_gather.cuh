/* dense_gather.cuh: the gather warps of attention_dense_sm90.cu. They bring queries and, by page,
 * cache rows to shared memory, as those of attention_bf16_sm90.cu do.
 */
#pragma once

#include "cuda/attention/sm90/dense_bf16/dense_items.cuh"
#include "cuda/attention/sm90/sparse_bf16/bf16_gather.cuh"

/* ---- Query --------------------------------------------------------------------------------- */

/* Where the rows of a tile lie in the query. */
typedef struct tile_query {
    const dense_launch &launch;
    int32_t token;
    int32_t first_row;
    int32_t num_rows;
} tile_query;

static __device__ __forceinline__ const uint16_t *
find_query_row(const tile_query &query, int part, int row)
{
    const row_place place = find_place(query.launch, query.token, query.first_row + row);
    return smla_row16(&query.launch.base.params.queries.parts[part], place.token, place.head);
}

/* Copies the query of an item. Not inlined, so that it takes no registers from the copies of
 * keys. */
template <typename Keys>
static __device__ __noinline__ void
copy_tile_query(const dense_launch &launch, const dense_item *item, uint32_t base)
{
    const tile_query query = {launch, item->token, item->first_row, item->num_rows};
    copy_query<Keys::ROPE, true>(query, base, gather_warp());
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* The slot of the lane's key of a step; negative where it has none. Lane l has row l % 16 of the
 * warp's rows of block l / 16. */
static __device__ __forceinline__ int32_t
find_step_slot(const dense_launch &launch, const dense_item *item, int32_t step)
{
    const int32_t key = step * STEP_KEYS + gather_lane() / WARP_ROWS * BLOCK_KEYS +
                        gather_warp_again() * WARP_ROWS + gather_lane() % WARP_ROWS;
    if (key < item->seen.begin || key >= item->seen.end) {
        return -1;
    }
    const int64_t slot = map_position(launch.base.params.keys.lists[0].map,
                                      launch.base.entry_tokens, item->req, key);
    return slot < launch.base.lists[0].num_slots ? (int32_t)slot : -1;
}

/* ALL_ROWS if every row of the tile sees all keys of a block. */
static __device__ __forceinline__ uint32_t
bit_of_rows(const dense_item *item, int32_t key)
{
    return key >= item->shared.begin && key + BLOCK_KEYS <= item->shared.end ? ALL_ROWS : 0;
}

/* Gathers the steps of an item, and its query after the first block. The table is read one step
 * ahead. */
template <typename Keys>
static __device__ __forceinline__ void
gather_steps(const dense_launch &launch, const dense_item *item, bf16_gather *state)
{
    const int32_t past = item->first_step + item->num_steps;
    int32_t slot = find_step_slot(launch, item, item->first_step);
#pragma unroll 1
    for (int32_t step = item->first_step; step < past; step++) {
        const uint32_t are_keys = __ballot_sync(0xFFFFFFFFu, slot >= 0);
        const uint8_t *const row = row_of_slot(launch.base, 0, slot);
        const uint32_t last_bit = step + 1 == past ? IS_LAST : 0;
        const int32_t key = step * STEP_KEYS;
        slot = step + 1 == past ? -1 : find_step_slot(launch, item, step + 1);
        gather_block<0, Keys, true>(*state, row, are_keys, last_bit | bit_of_rows(item, key),
                                    key | (int32_t)state->phase.item);
        if (step == item->first_step) {
            /* The CTA's first item has no predecessor, so its wait has already completed. */
            ptx_mbarrier_wait(BF16_AT(state->base, query_empty), state->phase.item ^ 1);
            copy_tile_query<Keys>(launch, item, state->base);
        }
        gather_block<1, Keys, true>(*state, row, are_keys,
                                    last_bit | bit_of_rows(item, key + BLOCK_KEYS),
                                    (key + BLOCK_KEYS) | (int32_t)state->phase.item);
        state->phase.step ^= 1;
    }
    state->phase.item ^= 1;
}

/* Gathers all items of the CTA. */
template <typename Keys>
static __device__ __forceinline__ void
gather_tiles(const dense_launch &launch, bf16_memory *shared)
{
    bf16_gather state = {};
    state.base = ptx_shared_address(shared);
    state.to = first_chunk_in_tile(gather_warp());
    ptx_wait_for_grids();
    ptx_barrier(BARRIER_GATHER, Keys::THREADS); /* consumers have initialised the mbarriers */
#pragma unroll 1
    for (int turn = 0;; turn = next_turn(turn)) {
        const dense_item *const item = &shared->dense.items[turn];
        ptx_mbarrier_wait(BF16_AT(state.base, order.planned), state.phase.item);
        if (((const volatile dense_item *)item)->num_rows == 0) {
            /* Wait until consumers have read the last query. Else its arrivals and those of
             * announce_copies could fall into one phase. */
            ptx_mbarrier_wait(BF16_AT(state.base, query_empty), state.phase.item ^ 1);
            announce_copies<true>(BF16_AT(state.base, query_full));
            break;
        }
        gather_steps<Keys>(launch, item, &state);
    }
}
