/* bf16_lists.cuh: how the gather warps of attention_bf16_sm90.cu go through items, lists and
 * steps.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/coded_gather.cuh"

enum { BF16_COUNT_LOADS = 16 }; /* indices per lane counted at once: those of 2048 columns */

/* ---- An item with one key ------------------------------------------------------------------
 *
 * Positions without a key are counted between the two blocks of a step. By then the warps have
 * waited until the first block was free, so all consumers are done with item n - 2, which had the
 * same `turn` as this item n. Group 1 sees the counts when it has waited for the second block.
 * Group 0 sees them after the barrier at the end of an item. */

/* Begins the count of an item's keys, in its first step. */
static __device__ __forceinline__ void
begin_count(int32_t num_steps, uint32_t turn, bf16_memory *shared)
{
    if (threadIdx.x == CONSUMER_THREADS) {
        shared->num_steps[turn] = num_steps;
    }
    if (ptx_elect()) {
        shared->num_absent[turn][gather_warp_again()] = 0;
    }
    __syncwarp();
}

/* ---- Work items ---------------------------------------------------------------------------- */

/* The consumers' start: group 1 brings the query of the CTA's first item, and all put the items in
 * order. */
template <typename Keys, bool ALIGNED>
static __device__ __forceinline__ void
begin_items(const bf16_launch &launch, bf16_memory *shared)
{
    const int follower = (int)threadIdx.x - GROUP_THREADS; /* a thread of group 1 */
    if (follower >= 0) {
        const work_item first =
            find_numbered_item<!Keys::WIDE>(launch.base, (int)blockIdx.x, TILE_HEADS);
        copy_query<Keys::ROPE, ALIGNED>(find_query(launch.base.params.queries, first),
                                        ptx_shared_address(shared), follower / SMLA_WARP_LANES);
    }
    order_items(launch, BARRIER_CONSUMERS, shared);
}

/* Asks for the indices of item number idx to be in L2; -1 is no item. Not inlined, because a CTA's
 * last item jumps over it. */
template <typename Keys>
static __device__ __noinline__ void
prefetch_item(const bf16_launch &launch, int idx)
{
    if (idx >= 0) {
        const work_item item = find_numbered_item<!Keys::WIDE>(launch.base, idx, TILE_HEADS);
#pragma unroll 1
        for (int list = 0; list < launch.base.params.keys.num_lists; list++) {
            prefetch_keys(launch.base, item, list, gather_warp_again(), gather_lane());
        }
    }
}

/* What a step of a list needs besides its keys. */
typedef struct step_context {
    work_item item;
    int n;             /* the item's number among the CTA's */
    bool is_first;     /* the step is the item's first */
    int32_t num_steps; /* steps of the item */
} step_context;

/* What a gather warp does between the two blocks of a step. The first step of an item begins the
 * count of its keys and brings its query. */
template <typename Keys, bool ALIGNED>
static __device__ __forceinline__ void
pass_middle(const bf16_launch &launch, const step_context &context, uint32_t are_keys,
            const listed_key &key, bf16_memory *shared, const bf16_gather &state)
{
    if (gather_twin<Keys>() != 0) {
        return;
    }
    if (context.is_first) {
        begin_count(context.num_steps, state.phase.item, shared);
        if (context.n != 0) {
            ptx_mbarrier_wait(BF16_AT(state.base, query_empty), state.phase.item ^ 1);
            copy_query_apart<Keys::ROPE, ALIGNED>(find_query(launch.base.params.queries,
                                                             context.item),
                                                  state.base, gather_warp_again());
        }
    }
    count_step(are_keys, key.slot >= 0, key, state.phase.item, gather_warp_again, shared);
}

/* Gathers a step of a list. Lane l has row l % 16 of the warp's rows of block l / 16. */
template <typename Keys, bool ALIGNED>
static __device__ __forceinline__ void
gather_step(const bf16_launch &launch, const step_context &context, const listed_key &key,
            uint32_t last_bit, bf16_memory *shared, key_stream *stream, const bf16_gather &state)
{
    const uint32_t are_keys = __ballot_sync(0xFFFFFFFFu, key.slot >= 0);
    const int list = key.list;
    /* ptx_forget stops the compiler from computing this earlier and keeping it in registers. */
    const auto between = [&](int32_t slot) {
        pass_middle<Keys, ALIGNED>(launch, context, (uint32_t)ptx_forget((int)are_keys),
                                   listed_key{slot, list}, shared, state);
    };
    if constexpr (Keys::CODED) {
        const uint8_t nope_type = launch.base.lists[list].nope_type;
        if (nope_type != SMLA_NOPE_BF16) {
            volatile coded_keys *const mine = find_coded_keys<Keys>(shared);
            park_stream(*stream, mine);
            if (nope_type == SMLA_NOPE_E2M1) {
                gather_coded_step<true, false, Keys>(launch.base, state, key, are_keys, last_bit,
                                                     shared, between);
            } else if (launch.base.lists[list].nope_chunks == SMLA_KV_LORA_RANK / 8) {
                gather_coded_step<false, false, Keys>(launch.base, state, key, are_keys, last_bit,
                                                      shared, between);
            } else {
                gather_coded_step<false, true, Keys>(launch.base, state, key, are_keys, last_bit,
                                                     shared, between);
            }
            take_back_stream(mine, stream);
            return;
        }
    }
    const uint8_t *const row = row_of_slot(launch.base, list, key.slot);
    gather_block<0, Keys, ALIGNED>(state, row, are_keys, last_bit);
    between(key.slot);
    gather_block<1, Keys, ALIGNED>(state, row, are_keys, last_bit);
}

/* Gathers a list of the CTA's n-th item. After the item's first step it prefetches the indices that
 * the count of the next item will read. */
template <typename Keys, bool ALIGNED>
static __device__ __forceinline__ void
gather_list(const bf16_launch &launch, const work_item &item, int n, int list,
            const list_steps &steps, bf16_memory *shared, key_stream *stream, bool *is_first_step,
            bf16_gather *state)
{
    const bool is_last_list = list == 1 || steps.extra == 0;
    const int32_t num_steps = steps.main + steps.extra;
#pragma unroll 1
    for (int32_t left = list == 0 ? steps.main : steps.extra; left > 0; left--) {
        const uint32_t index = take_step<true>(launch.base, list, stream, gather_lane());
        const int32_t slot = slot_of_index<true>(launch.base, list, item.token, (int32_t)index);
        gather_step<Keys, ALIGNED>(launch, step_context{item, n, *is_first_step, num_steps},
                                   listed_key{slot, list}, is_last_list && left == 1 ? IS_LAST : 0,
                                   shared, stream, *state);
        if (*is_first_step) {
            wait_for_order(launch.is_ordered, BF16_AT(state->base, order.planned));
            if (gather_twin<Keys>() == 0) {
                prefetch_item<Keys>(launch, nth_item(launch.is_ordered, launch.num_items,
                                                     &shared->order, n + 1));
            }
            *is_first_step = false;
        }
        state->phase.step ^= 1;
    }
}

/* Gathers all items of the CTA. */
template <typename Keys, bool ALIGNED>
static __device__ __forceinline__ void
gather(const bf16_launch &launch, bf16_memory *shared)
{
    bf16_gather state = {};
    state.base = ptx_shared_address(shared);
    state.to =
        first_chunk_in_tile(gather_warp()) + gather_twin<Keys>() * (WARP_ROWS / Keys::TWINS * 128);
    ptx_wait_for_grids();
    int idx = (int)blockIdx.x; /* item 0, whatever the order */
#pragma unroll 1
    for (int n = 0; idx >= 0;) {
        const work_item item = find_numbered_item<!Keys::WIDE>(launch.base, idx, TILE_HEADS);
        key_counts *const counts = &shared->num_keys[state.phase.item];
        key_stream stream = {};
#pragma unroll 1
        for (int list = 0; list < launch.base.params.keys.num_lists; list++) {
            key_stream opened =
                open_stream(launch.base, item, list, gather_warp_again(), gather_lane(), 0);
            if (list == 0) { /* its next index comes with those that are counted */
                stream = opened;
                load_next(&stream);
            }
            if (gather_twin<Keys>() == 0) {
                (*counts)[list][gather_warp_again()] =
                    count_keys<BF16_COUNT_LOADS, false>(launch.base, list, opened,
                                                        launch.base.column_stride);
            }
        }
        /* the first time, consumers arrive here, too, when they have initialised the mbarriers
         * (start) */
        ptx_barrier(BARRIER_GATHER, n == 0 ? Keys::THREADS : Keys::GATHER_THREADS);
        const list_steps steps = find_steps(launch.base, counts);
        stream.to_come = find_count(counts, 0, gather_warp_again());
        bool is_first_step = true;
#pragma unroll 1
        for (int list = 0; list < launch.base.params.keys.num_lists; list++) {
            gather_list<Keys, ALIGNED>(launch, item, n, list, steps, shared, &stream,
                                       &is_first_step, &state);
            if (list + 1 < launch.base.params.keys.num_lists) {
                stream =
                    open_stream(launch.base, item, list + 1, gather_warp_again(), gather_lane(),
                                find_count(counts, list + 1, gather_warp_again()));
                load_next(&stream);
            }
        }
        state.phase.item ^= 1;
        idx = nth_item(launch.is_ordered, launch.num_items, &shared->order, ++n);
    }
}
