/* bf16_steps.cuh: the steps of a work item by the two groups of consumers of
 * attention_bf16_sm90.cu: in which order each scores, weighs and adds. The file starts the
 * mbarriers, too.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_products.cuh"

/* ---- A work item ----------------------------------------------------------------------------- */

static __device__ __forceinline__ void
clear_sums(bf16_consumer *state)
{
#pragma unroll
    for (int i = 0; i < HALF_VALUES / 2; i++) {
        state->out[i] = 0.0f;
    }
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        state->sum[piece] = 0.0f;
        state->excess[piece] = 0.0f;
        state->row_max[piece] = -INFINITY;
        state->reference[piece] = NO_REFERENCE;
    }
    state->is_late = INT32_MAX;
}

/* Recomputes the address of shared memory, because dozens of descriptors would otherwise be kept
 * over the loops. */
static __device__ __forceinline__ uint32_t
find_base(const bf16_memory *shared)
{
    return (uint32_t)ptx_forget((int)ptx_shared_address(shared));
}

/* Adds the values of the group's own block with its weights, of which the first half is stored. The
 * products start before the other half becomes weights, and before the other group gets the
 * weights. So products of the other group do not delay them, and half of the block is free behind
 * them. No product that adds to `out` is under way. scales_out: `out` must be multiplied by the
 * factors. */
template <typename Keys>
static __device__ __forceinline__ void
add_own_block(uint32_t base, const thread_index &me, bool scales_out, const float factors[2],
              bf16_consumer *state)
{
    if (scales_out) {
        scale_out(factors, state);
    }
    add_own_half<Keys>(base, me, 0, state);
    weigh_half<Keys>(1, state);
    store_half(base, me, 1, *state);
    add_own_half<Keys>(base, me, 1, state);
    publish_weights(base, me);
    add_to_sums(state);
    wgmma_wait<0>();
    free_values(base, me.group, me.group);
}

/* A step of group 0: scores, weights and values of its block, then values of group 1's block.
 * Returns whether it was the item's last step. */
template <typename Keys, bool MAXIMA>
static __device__ __forceinline__ bool
lead_step(const bf16_launch &launch, uint32_t parity, bf16_memory *shared, bf16_consumer *state)
{
    const uint32_t base = find_base(shared);
    thread_index me = find_thread_index_again();
    me.group = 0;
    score_block<Keys>(base, me, parity, state);
    ptx_mbarrier_arrive(BF16_AT(base, begun), true);
    const uint32_t block_bits = load_block_bits(base, me);
    const bool is_last = (block_bits & IS_LAST) != 0;
    if constexpr (Keys::HALVES_SCORES) {
        wgmma_wait<PIECES / 2>();
        begin_exponents<Keys>(launch.base, state);
    }
    wgmma_wait<0>();
    ptx_mbarrier_arrive(BF16_AT(base, scored), true);
    ptx_mbarrier_arrive(BF16_AT(base, query_empty), is_last);
    float factors[2] = {1.0f, 1.0f};
    const bool scales_out =
        find_exponents<Keys, MAXIMA>(launch.base, base, me, block_bits, shared, state, factors);
    weigh_half<Keys>(0, state);
    ptx_mbarrier_wait(BF16_AT(base, scored), parity); /* the weights replace a tile of keys */
    store_half(base, me, 0, *state);
    add_own_block<Keys>(base, me, scales_out, factors, state);
    follow_other_group<0>(base, me, parity, shared, state);
    wait_for_weights(base, me, parity);
    add_other_block<Keys>(base, me, state);
    wgmma_wait<0>();
    free_values(base, 1, 0);
    return is_last;
}

/* A step of group 1: scores of its block, values of group 0's block while the scores become
 * weights, then values of its own block. Returns as lead_step does. */
template <typename Keys, bool MAXIMA>
static __device__ __forceinline__ bool
follow_step(const bf16_launch &launch, uint32_t parity, bf16_memory *shared, bf16_consumer *state)
{
    const uint32_t base = find_base(shared);
    thread_index me = find_thread_index_again();
    me.group = 1;
    ptx_mbarrier_wait(BF16_AT(base, begun), parity);
    score_block<Keys>(base, me, parity, state);
    const uint32_t block_bits = load_block_bits(base, me);
    const bool is_last = (block_bits & IS_LAST) != 0;
    follow_other_group<1>(base, me, parity, shared, state);
    wait_for_weights(base, me, parity);
    add_other_block<Keys>(base, me, state);
    if constexpr (Keys::HALVES_SCORES) {
        wgmma_wait<1 + PIECES / 2>(); /* the first halves of the scores are done */
        begin_exponents<Keys>(launch.base, state);
    }
    wgmma_wait<1>(); /* the scores are done */
    ptx_mbarrier_arrive(BF16_AT(base, query_empty), is_last);
    float factors[2] = {1.0f, 1.0f};
    const bool scales_out =
        find_exponents<Keys, MAXIMA>(launch.base, base, me, block_bits, shared, state, factors);
    weigh_half<Keys>(0, state);
    store_half(base, me, 0, *state);
    wgmma_wait<0>();
    free_values(base, 0, 1);
    add_own_block<Keys>(base, me, scales_out, factors, state);
    return is_last;
}

/* All steps of an item; there is at least one. */
template <typename Keys, bool MAXIMA>
static __device__ __forceinline__ void
consume_steps(const bf16_launch &launch, bf16_phase *phase, bf16_memory *shared,
              bf16_consumer *state)
{
    bool is_last;
    ptx_mbarrier_wait(BF16_AT(find_base(shared), query_full), phase->item);
    if (find_thread_index_again().group == 0) {
#pragma unroll 1
        do {
            is_last = lead_step<Keys, MAXIMA>(launch, phase->step, shared, state);
            phase->step ^= 1;
        } while (!is_last);
    } else {
#pragma unroll 1
        do {
            is_last = follow_step<Keys, MAXIMA>(launch, phase->step, shared, state);
            phase->step ^= 1;
        } while (!is_last);
    }
    phase->item ^= 1;
}

/* Initialises the mbarriers, in a thread of the consumers, which have the time. The gather warps
 * wait for it when their first keys are counted. */
template <typename Keys>
static __device__ __forceinline__ void
start(const bf16_launch &launch, bf16_memory *shared)
{
    if (threadIdx.x == 0) {
        for (int block = 0; block < 2; block++) {
            for (int piece = 0; piece < PIECES; piece++) {
                const bool has_keys = piece == nth_piece<Keys>(block, KEY_PIECE);
                ptx_mbarrier_init(ptx_shared_address(&shared->full[block][piece]),
                                  Keys::GATHER_THREADS + (has_keys ? GATHER_WARPS : 0));
            }
            for (int half = 0; half < 2; half++) {
                ptx_mbarrier_init(ptx_shared_address(&shared->empty[block][half]), GROUP_THREADS);
            }
            ptx_mbarrier_init(ptx_shared_address(&shared->references_ready[block]), GROUP_THREADS);
            ptx_mbarrier_init(ptx_shared_address(&shared->probs_ready[block]), GROUP_THREADS);
        }
        ptx_mbarrier_init(ptx_shared_address(&shared->scored), GROUP_THREADS);
        ptx_mbarrier_init(ptx_shared_address(&shared->begun), GROUP_THREADS);
        ptx_mbarrier_init(ptx_shared_address(&shared->query_full), GROUP_THREADS);
        ptx_mbarrier_init(ptx_shared_address(&shared->query_empty), CONSUMER_THREADS);
        if constexpr (Keys::TILED) { /* the lanes of the planner */
            ptx_mbarrier_init(ptx_shared_address(&shared->order.planned), SMLA_WARP_LANES);
        } else {
            start_order(launch.base, &shared->order);
        }
        ptx_fence_mbarrier_init();
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    ptx_barrier_arrive(BARRIER_GATHER, Keys::THREADS);
}
