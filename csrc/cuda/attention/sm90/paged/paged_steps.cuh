/* paged_steps.cuh: the order in which a consumer group of paged_attention_sm90.cu works. Of an
 * item, the scores of a block are started before the weights at hand meet their values, and
 * exponents are taken while they do. */
#pragma once

#include "cuda/attention/sm90/paged/paged_results.cuh"

template <int D>
__device__ __forceinline__ void
clear_rows(paged_consumer<D> *state)
{
#pragma unroll
    for (int i = 0; i < D / 2; i++) {
        state->out[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        state->reference[i] = -INFINITY;
        state->sum[i] = 0.0f;
        state->rest[i] = 0.0f;
    }
}

/* The item's first block. */
template <int D, bool HALF>
__device__ __forceinline__ void
begin_item(const paged_args &args, const paged_view &view, int32_t first_key,
           const paged_memory<D> *shared, paged_consumer<D> *state)
{
    const uint32_t count = state->num_buffers;
    ptx_mbarrier_wait(at(shared->q_full[state->group]), state->query_turn);
    await_full(shared, count);
    take_own_turn(*state);
    start_scores<D, HALF>(count, state);
    pass_own_turn(*state);
    const paged_hidden<D> hidden = load_hidden(shared, count, *state);
    wgmma_wait<0>();
    free_buffer(shared, count, *state);
    weigh_block<D, HALF, true>(args, view, first_key, hidden, state);
    state->num_buffers += 2;
}

/* Scores of the item's next block, and values of the block before. */
template <int D, bool HALF>
__device__ __forceinline__ void
step(const paged_args &args, const paged_view &view, int32_t first_key,
     const paged_memory<D> *shared, paged_consumer<D> *state)
{
    const uint32_t count = state->num_buffers;
    await_full(shared, count);
    take_own_turn(*state);
    start_scores<D, HALF>(count, state);
    await_full(shared, count - 1);
    start_values<D, HALF>(count - 1, state);
    pass_own_turn(*state);
    const paged_hidden<D> hidden = load_hidden(shared, count, *state);
    wgmma_wait<1>(); /* the scores are there */
    free_buffer(shared, count, *state);
    weigh_block<D, HALF, false>(args, view, first_key, hidden, state);
    free_buffer(shared, count - 1, *state);
    state->num_buffers += 2;
}

/* The values of the item's last block. Nobody waits for group 0's turn any more when group 1 is
 * done. */
template <int D, bool HALF>
__device__ __forceinline__ void
end_item(const paged_memory<D> *shared, paged_consumer<D> *state)
{
    const uint32_t count = state->num_buffers - 1;
    ptx_mbarrier_arrive(at(shared->q_empty[state->group]), state->frees);
    await_full(shared, count);
    take_own_turn(*state);
    start_values<D, HALF>(count, state);
    if (state->group == 0) {
        pass_own_turn(*state);
    }
    wgmma_wait<0>();
    free_buffer(shared, count, *state);
}

/* Computes the group's rows of an item. What only the end needs is read again then. */
template <int D, bool HALF>
__device__ __forceinline__ void
consume_item(const paged_args &args, const paged_item &item, uint32_t number,
             paged_memory<D> *shared, paged_consumer<D> *state)
{
    state->is_shared = item.owners == 3;
    const int first_row =
        (state->is_shared ? state->group * GROUP_ROWS : 0) + state->warp * WARP_ROWS;
    const paged_view view = find_view(shared, number, item, first_row);
    uint32_t first_key = (uint32_t)item.first_key;
    const uint32_t past_key = first_key + (uint32_t)item.num_blocks * paged_shape<D>::KEYS;
    if (state->group == 1) {
        pass_own_turn(*state); /* group 0 begins */
    }
    clear_rows(state);
    begin_item<D, HALF>(args, view, (int32_t)first_key, shared, state);
#pragma unroll 1
    while ((first_key += paged_shape<D>::KEYS) < past_key) {
        step<D, HALF>(args, view, (int32_t)first_key, shared, state);
    }
    end_item<D, HALF>(shared, state);
    finish_item<D, HALF>(args, paged_item(item), first_row, *state, shared);
    state->query_turn ^= 1;
}

/* What each of the two groups does: its rows of the CTA's items. */
template <int D, bool HALF>
__device__ __forceinline__ void
consume_items(const paged_args &args, int group, int warp, paged_memory<D> *shared)
{
    paged_consumer<D> state;
    start_consumer(shared, group, warp, &state);
    for (uint32_t number = 0;; number++) {
        /* The first item is in slot 0, whatever the number of slots. */
        const paged_slots slots = number == 0 ? paged_slots{ITEM_SLOTS} : shared->slots;
        const uint32_t slot = slots.slot_of(number);
        ptx_mbarrier_wait(at(shared->item_full[slot]), slots.turn_of(number));
        const paged_item &item = shared->items[slot];
        if (item.num_rows == 0) {
            return;
        }
        if (item.owners >> group & 1) {
            consume_item<D, HALF>(args, item, number, shared, &state);
        } else {
            state.num_buffers += 2 * (uint32_t)item.num_blocks;
        }
        ptx_mbarrier_arrive(at(shared->item_empty[slot]), true);
    }
}
