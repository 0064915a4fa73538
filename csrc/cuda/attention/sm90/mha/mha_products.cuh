/* mha_products.cuh: a consumer group's state, and its products. */
#pragma once

#include "cuda/attention/sm90/mha/mha_memory.cuh"
#include "cuda/ptx/wgmma.cuh"

/* What a thread of a group keeps. It has rows lane / 4 + 8 i of its warp's 16, i = 0, 1, and of
 * each the elements 8 j + 2 (lane % 4) and the next one: scores[4 j + 2 i], scores[4 j + 2 i + 1].
 */
template <int D> struct mha_consumer {
    uint32_t queries[D / 4]; /* A of the scores; wgmma.cuh has the order */
    float scores[BLOCK_KEYS / 2];
    uint32_t weights[BLOCK_KEYS / 4]; /* A of the values */
    float out[VALUE_DIM / 2];
    float reference[2]; /* -inf: no logit so far */
    float sum[2];       /* sum of the lane's weights */
    float rest[2];      /* what roundings of the sum lost */
    int top[2];         /* the lane's largest exponent of a weight, as bits: see may_move */
    uint64_t keys;      /* descriptor of stage 0 */
    uint64_t values;
    uint32_t key_count; /* blocks whose scores are done */
    uint32_t value_count;
    int group;
    int warp;   /* in the group */
    bool frees; /* whether this lane frees memory for its warp */
};

template <int D>
__device__ __forceinline__ void
start_consumer(const mha_memory<D> *shared, int group, int warp, mha_consumer<D> *state)
{
    state->keys =
        wgmma_descriptor(ptx_shared_address(shared->keys), 8 * SEGMENT_BYTES, WGMMA_SWIZZLE_128);
    state->values =
        wgmma_descriptor_of_tiles(ptx_shared_address(shared->values), BLOCK_KEYS * SEGMENT_BYTES);
    state->key_count = 0;
    state->value_count = 0;
    state->group = group;
    state->warp = warp;
    state->frees = lane_idx() == 0;
}

/* ---- Memory --------------------------------------------------------------------------------- */

/* Waits for a group's queries of tile `number`, and loads them to registers. Their memory is not
 * free before a product has used them: loads may still be under way behind this function. */
template <int D>
__device__ __forceinline__ void
load_group_queries(const mha_memory<D> *shared, uint32_t number, mha_consumer<D> *state)
{
    ptx_mbarrier_wait(at(shared->q_full[state->group]), number & 1);
    const int lane = lane_again();
    const int row = lane % WARP_ROWS;
    const int upper = lane / WARP_ROWS; /* half of 16 columns: 0 or 1 */
    const uint32_t from = ptx_shared_address(shared->queries[state->group]) +
                          (state->warp * WARP_ROWS + row) * SEGMENT_BYTES;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        ptx_ldmatrix_x4(from + i / 4 * GROUP_ROWS * SEGMENT_BYTES +
                            ((2 * (i % 4) + upper) ^ row % 8) * 16,
                        &state->queries[4 * i]);
    }
}

template <int D>
__device__ __forceinline__ void
await_keys(const mha_memory<D> *shared, const mha_consumer<D> &state)
{
    ptx_mbarrier_wait(at(shared->k_full[state.key_count % STAGES]), state.key_count / STAGES % 2);
}

template <int D>
__device__ __forceinline__ void
await_values(const mha_memory<D> *shared, const mha_consumer<D> &state)
{
    ptx_mbarrier_wait(at(shared->v_full[state.value_count % STAGES]),
                      state.value_count / STAGES % 2);
}

/* The warp's products with the keys are done. */
template <int D>
__device__ __forceinline__ void
free_keys(const mha_memory<D> *shared, mha_consumer<D> *state)
{
    ptx_mbarrier_arrive(at(shared->k_empty[state->key_count % STAGES]), state->frees);
    state->key_count++;
}

template <int D>
__device__ __forceinline__ void
free_values(const mha_memory<D> *shared, mha_consumer<D> *state)
{
    ptx_mbarrier_arrive(at(shared->v_empty[state->value_count % STAGES]), state->frees);
    state->value_count++;
}

/* Clears the first `count` values of the block. They are another request's and may be NaN, which
 * weights of 0 do not hide. Both groups do it, so neither has to wait for the other. */
template <int D>
__device__ __forceinline__ void
clear_values(mha_memory<D> *shared, const mha_consumer<D> &state, int count)
{
    constexpr int SEGMENT_CHUNKS = SEGMENT_BYTES / 16;
    const uint32_t to = ptx_shared_address(shared->values[state.value_count % STAGES]);
#pragma unroll 1
    for (int i = state.warp * SMLA_WARP_LANES + lane_again(); i < count * SEGMENT_CHUNKS;
         i += GROUP_THREADS) {
#pragma unroll
        for (int segment = 0; segment < VALUE_DIM / SEGMENT; segment++) {
            ptx_clear_shared_16(to + segment * BLOCK_KEYS * SEGMENT_BYTES + i * 16);
        }
    }
    ptx_fence_async_shared(); /* wgmma sees the zeros */
    ptx_barrier(GROUP_BARRIER + state.group, GROUP_THREADS);
}

/* ---- Products ------------------------------------------------------------------------------- */

/* Starts scores = queries * keys of the next block. */
template <int D, bool HALF>
__device__ __forceinline__ void
start_scores(mha_consumer<D> *state)
{
    constexpr int STAGE_BYTES = (int)sizeof(mha_memory<D>::keys) / STAGES;
    const uint64_t keys = state->keys + state->key_count % STAGES * (STAGE_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int offset = i / 4 * BLOCK_KEYS * SEGMENT_BYTES + i % 4 * 32;
        wgmma_16<HALF, false>(state->scores, &state->queries[4 * i], keys + (offset >> 4), i > 0);
    }
    wgmma_commit();
}

/* Starts out += weights * values, or out = weights * values for a tile's first block. */
template <int D, bool HALF>
__device__ __forceinline__ void
start_values(mha_consumer<D> *state, bool is_first)
{
    constexpr int STAGE_BYTES = (int)sizeof(mha_memory<D>::values) / STAGES;
    const uint64_t values = state->values + state->value_count % STAGES * (STAGE_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_KEYS / 16; i++) {
        wgmma_16<HALF, true>(state->out, &state->weights[4 * i],
                             values + (i * 16 * SEGMENT_BYTES >> 4), i > 0 || !is_first);
    }
    wgmma_commit();
}
