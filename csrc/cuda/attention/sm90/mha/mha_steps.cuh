/* mha_steps.cuh: the order in which a consumer group of mha_attention_sm90.cu works. It goes from a
 * tile's last block to the first one of the next tile without a pause: the scores of the block that
 * comes next, wherever that is, are started before the weights at hand meet their values. */
#pragma once

#include "cuda/attention/sm90/mha/mha_results.cuh"

/* The keys to hide in a tile's first block. */
__device__ __forceinline__ int
count_absent_in_first(const mha_tile &tile)
{
    return tile.num_blocks == 1 ? tile.absent_keys : 0;
}

/* The first block of the CTA's first tile. */
template <int D, bool HALF>
__device__ __forceinline__ void
begin_tiles(const mha_args &args, const mha_tile &tile, const mha_memory<D> *shared,
            mha_consumer<D> *state)
{
    load_group_queries(shared, 0, state);
    await_keys(shared, *state);
    start_scores<D, HALF>(state);
    ptx_mbarrier_arrive(at(shared->q_empty[state->group]), state->frees);
    wgmma_wait<0>();
    free_keys(shared, state);
    weigh_first<D, HALF>(args, count_absent_in_first(tile), state);
}

/* Scores of a tile's next block, and values of the block before. `absent_keys` are hidden. */
template <int D, bool HALF>
__device__ __forceinline__ void
step(const mha_args &args, bool is_first, int absent_keys, const mha_memory<D> *shared,
     mha_consumer<D> *state)
{
    await_keys(shared, *state);
    take_turn(state->group);
    start_scores<D, HALF>(state);
    await_values(shared, *state);
    start_values<D, HALF>(state, is_first);
    pass_turn(state->group);
    wgmma_wait<1>(); /* the scores are there */
    free_keys(shared, state);
    weigh_next<D, HALF>(args, absent_keys, state);
    free_values(shared, state);
    pack_weights<HALF>(state->scores, state->weights);
}

/* Takes the turn for the values of a tile's last block. */
template <int D, bool HALF>
__device__ __forceinline__ void
start_last_values(const mha_tile &tile, mha_memory<D> *shared, mha_consumer<D> *state)
{
    await_values(shared, *state);
    if (__builtin_expect(tile.absent_keys > 0, false)) {
        clear_values(shared, *state, tile.absent_keys);
    }
    take_turn(state->group);
    start_values<D, HALF>(state, tile.num_blocks == 1);
}

/* The step from tile `number` to the next: the last values of one, and behind them the first scores
 * of the other, which cover the way of the older tile's results to memory. */
template <int D, bool HALF>
__device__ __forceinline__ void
change_tile(const mha_args &args, const mha_tile &older, const mha_tile &newer, uint32_t number,
            mha_memory<D> *shared, mha_consumer<D> *state)
{
    start_last_values<D, HALF>(older, shared, state);
    load_group_queries(shared, number + 1, state);
    await_keys(shared, *state);
    start_scores<D, HALF>(state);
    pass_turn(state->group);
    ptx_mbarrier_arrive(at(shared->q_empty[state->group]), state->frees);
    wgmma_wait<1>(); /* out is complete */
    free_values(shared, state);
    write_results<D, HALF>(args, older, newer.num_blocks, *state, shared);
    const int absent_keys = count_absent_in_first(newer);
    leave_tile(shared, number);
    wgmma_wait<0>(); /* the scores are there */
    free_keys(shared, state);
    weigh_first<D, HALF>(args, absent_keys, state);
}

/* The end of the CTA's last tile. Nobody waits for group 0's turn any more when group 1 is done. */
template <int D, bool HALF>
__device__ __forceinline__ void
end_tiles(const mha_args &args, const mha_tile &older, mha_memory<D> *shared,
          mha_consumer<D> *state)
{
    start_last_values<D, HALF>(older, shared, state);
    if (state->group == 0) {
        pass_turn(state->group);
    }
    wgmma_wait<0>();
    write_results<D, HALF>(args, older, older.num_blocks, *state, shared);
}

/* What each of the two groups does: computes its rows of the CTA's tiles. */
template <int D, bool HALF>
__device__ __forceinline__ void
consume_tiles(const mha_args &args, int group, int warp, mha_memory<D> *shared)
{
    const mha_tile *tile = await_tile(shared, 0);
    if (tile->num_blocks == 0) {
        return;
    }
    mha_consumer<D> state;
    start_consumer(shared, group, warp, &state);
    if (group == 1) {
        pass_turn(group); /* group 0 begins */
    }
    begin_tiles<D, HALF>(args, *tile, shared, &state);
    for (uint32_t number = 0;; number++) {
        const int num_blocks = tile->num_blocks;
        const int absent_keys = tile->absent_keys;
#pragma unroll 1
        for (int block = 1; block < num_blocks; block++) {
            step<D, HALF>(args, block == 1, block == num_blocks - 1 ? absent_keys : 0, shared,
                          &state);
        }
        const mha_tile older = *tile;
        tile = await_tile(shared, number + 1);
        if (tile->num_blocks == 0) {
            end_tiles<D, HALF>(args, older, shared, &state);
            return;
        }
        change_tile<D, HALF>(args, older, *tile, number, shared, &state);
    }
}
