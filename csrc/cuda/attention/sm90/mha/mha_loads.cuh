/* mha_loads.cuh: the lanes of mha_attention_sm90.cu that bring queries, keys and values. Each waits
 * for its own part of shared memory alone, so that no order of copies can block another. */
#pragma once

#include "cuda/attention/sm90/mha/mha_memory.cuh"
#include "cuda/ptx/tensor_copy.cuh"

/* Blocks of a tile's keys that are still to be copied when the next tile is claimed. */
enum { CLAIM_BLOCKS = 3 };

/* Copies ROWS rows of a head, all segments of them, whether of one array or of a pair. Rows outside
 * the arrays become zeros; those of other requests are copied, too. */
template <int ROWS>
__device__ __forceinline__ void
copy_rows(const CUtensorMap maps[2], const mha_rows &rows, int first, int head, uint32_t to,
          uint32_t barrier)
{
    ptx_tensor_copy_4d(to, &maps[0], 0, first, 0, head * rows.head_step[0], barrier);
    if (rows.segments[1] > 0) {
        ptx_tensor_copy_4d(to + rows.segments[0] * ROWS * SEGMENT_BYTES, &maps[1], 0, first, 0,
                           head * rows.head_step[1], barrier);
    }
}

/* Brings the queries of the CTA's tiles, half of them for each group. */
template <int D>
__device__ __forceinline__ void
load_queries(const mha_args &args, mha_memory<D> *shared)
{
    for (uint32_t n = 0;; n++) {
        const mha_tile tile = *await_tile(shared, n);
        if (tile.num_blocks == 0) {
            break;
        }
        for (int group = 0; group < GROUPS; group++) {
            ptx_mbarrier_wait(at(shared->q_empty[group]), (n & 1) ^ 1);
            ptx_mbarrier_arrive_expect(at(shared->q_full[group]), sizeof shared->queries[0]);
            copy_rows<GROUP_ROWS>(args.q_maps, args.q, tile.first_query + group * GROUP_ROWS,
                                  tile.head, ptx_shared_address(shared->queries[group]),
                                  at(shared->q_full[group]));
        }
        leave_tile(shared, n);
    }
}

/* Copies the keys or values of all blocks of the CTA's tiles; `memory` has a stage for each of two
 * blocks. before(tile, block) comes in front of a block's wait. */
template <int D, typename Memory, typename Before>
__device__ __forceinline__ void
load_blocks(const CUtensorMap maps[2], const mha_rows &rows, const uint64_t (&full)[STAGES],
            const uint64_t (&empty)[STAGES], const Memory (&memory)[STAGES],
            const mha_memory<D> *shared, Before before)
{
    uint32_t count = 0; /* blocks so far */
    for (uint32_t n = 0;; n++) {
        const mha_tile tile = *await_tile(shared, n);
        if (tile.num_blocks == 0) {
            break;
        }
#pragma unroll 1
        for (int block = 0; block < tile.num_blocks; block++, count++) {
            const uint32_t stage = count % STAGES;
            before(tile, block);
            ptx_mbarrier_wait(at(empty[stage]), (count / STAGES % 2) ^ 1);
            ptx_mbarrier_arrive_expect(at(full[stage]), sizeof memory[0]);
            copy_rows<BLOCK_KEYS>(maps, rows, tile.first_key - block * BLOCK_KEYS, tile.kv_head,
                                  ptx_shared_address(memory[stage]), at(full[stage]));
        }
        leave_tile(shared, n);
    }
}

/* Brings the blocks of keys, and asks for the next tile in time. */
template <int D>
__device__ __forceinline__ void
load_keys(const mha_args &args, mha_memory<D> *shared)
{
    const auto ask = [&](const mha_tile &tile, int block) {
        ptx_mbarrier_arrive(at(shared->tile_wanted),
                            block == max(tile.num_blocks - CLAIM_BLOCKS, 0));
    };
    load_blocks<D>(args.k_maps, args.k, shared->k_full, shared->k_empty, shared->keys, shared, ask);
}

template <int D>
__device__ __forceinline__ void
load_values(const mha_args &args, mha_memory<D> *shared)
{
    load_blocks<D>(args.v_maps, args.v, shared->v_full, shared->v_empty, shared->values, shared,
                   [](const mha_tile &, int) {});
}
