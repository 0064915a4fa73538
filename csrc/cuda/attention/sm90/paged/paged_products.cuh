/* paged_products.cuh: a consumer group's state, and its products. */
#pragma once

#include "cuda/attention/sm90/paged/paged_memory.cuh"
#include "cuda/ptx/wgmma.cuh"

/* What a thread of a group keeps. It has rows lane / 4 + 8 i of its warp's 16, i = 0, 1, and of
 * each the elements 8 j + 2 (lane % 4) and the next one: scores[4 j + 2 i], scores[4 j + 2 i + 1].
 */
template <int D> struct paged_consumer {
    static constexpr int KEYS = paged_shape<D>::KEYS;
    float scores[KEYS / 2];
    uint32_t weights[KEYS / 4]; /* A of the values; wgmma.cuh has the order */
    float out[D / 2];
    float reference[2]; /* -inf: no logit so far */
    float sum[2];       /* sum of the lane's weights */
    float rest[2];      /* what roundings of the sum lost */
    uint64_t queries;   /* descriptors: of the group's queries, */
    uint64_t keys;      /* and of buffer 0 as keys and as values */
    uint64_t values;
    uint32_t num_buffers; /* those of items in front, and of blocks whose scores are done */
    uint32_t query_turn;  /* parity of the group's queries */
    int group;
    int warp;       /* in the group */
    bool frees;     /* whether this lane frees memory for its warp */
    bool is_shared; /* whether both groups have rows of the item */
};

template <int D>
__device__ __forceinline__ void
start_consumer(const paged_memory<D> *shared, int group, int warp, paged_consumer<D> *state)
{
    const uint32_t buffers = ptx_shared_address(shared->buffers);
    state->queries = wgmma_descriptor(ptx_shared_address(shared->queries[group]), 8 * SEGMENT_BYTES,
                                      WGMMA_SWIZZLE_128);
    state->keys = wgmma_descriptor(buffers, 8 * SEGMENT_BYTES, WGMMA_SWIZZLE_128);
    state->values = wgmma_descriptor_of_tiles(buffers, paged_shape<D>::SEGMENT_STEP);
    state->num_buffers = 0;
    state->query_turn = 0;
    state->group = group;
    state->warp = warp;
    state->frees = lane_idx() == 0;
}

/* Where both groups have rows of an item, they take turns. */
template <int D>
__device__ __forceinline__ void
take_own_turn(const paged_consumer<D> &state)
{
    if (state.is_shared) {
        take_turn(state.group);
    }
}

template <int D>
__device__ __forceinline__ void
pass_own_turn(const paged_consumer<D> &state)
{
    if (state.is_shared) {
        pass_turn(state.group);
    }
}

/* ---- Memory --------------------------------------------------------------------------------- */

/* Waits until a buffer has its contents. */
template <int D>
__device__ __forceinline__ void
await_full(const paged_memory<D> *shared, uint32_t count)
{
    constexpr uint32_t BUFFERS = paged_shape<D>::BUFFERS;
    await_empty(shared, count); /* the other group has read the former contents */
    ptx_mbarrier_wait(at(shared->full[count % BUFFERS]), count / BUFFERS % 2);
}

/* The warp has read a buffer. Where the item is one group's, the other group's warps do not count.
 */
template <int D>
__device__ __forceinline__ void
free_buffer(const paged_memory<D> *shared, uint32_t count, const paged_consumer<D> &state)
{
    __syncwarp();
    ptx_mbarrier_arrive_times(at(shared->empty[count % paged_shape<D>::BUFFERS]),
                              state.is_shared ? 1 : GROUPS, state.frees);
}

/* ---- Products ------------------------------------------------------------------------------- */

/* Starts scores = queries * keys of buffer number `count`. */
template <int D, bool HALF>
__device__ __forceinline__ void
start_scores(uint32_t count, paged_consumer<D> *state)
{
    using shape = paged_shape<D>;
    const uint64_t keys = state->keys + count % shape::BUFFERS * (shape::BUFFER_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int q_offset = i / 4 * GROUP_ROWS * SEGMENT_BYTES + i % 4 * 32;
        const int k_offset = i / 4 * shape::SEGMENT_STEP + i % 4 * 32;
        wgmma_16_tiles<HALF>(state->scores, state->queries + (q_offset >> 4),
                             keys + (k_offset >> 4), i > 0);
    }
    wgmma_commit();
}

/* Starts out += weights * values of buffer number `count`. */
template <int D, bool HALF>
__device__ __forceinline__ void
start_values(uint32_t count, paged_consumer<D> *state)
{
    using shape = paged_shape<D>;
    const uint64_t values = state->values + count % shape::BUFFERS * (shape::BUFFER_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < shape::KEYS / 16; i++) {
        wgmma_16<HALF, true>(state->out, &state->weights[4 * i],
                             values + (i * 16 * SEGMENT_BYTES >> 4), true);
    }
    wgmma_commit();
}
