/* consumer_groups.cuh: the two groups of consumers that Hopper's kernels for keys and values of KV
 * heads have: their threads, rows and turns, and mbarriers. */
#pragma once

#include "cuda/ptx/launch.cuh"

enum {
    GROUPS = 2,
    GROUP_WARPS = 4,
    GROUP_THREADS = GROUP_WARPS * SMLA_WARP_LANES,
    CONSUMER_WARPS = GROUPS * GROUP_WARPS,
    CONSUMER_THREADS = GROUPS * GROUP_THREADS,

    WARP_ROWS = 16, /* rows of a tile that a consumer warp has */
    GROUP_ROWS = GROUP_WARPS * WARP_ROWS,
    TILE_ROWS = GROUPS * GROUP_ROWS,
    SEGMENT = 64,        /* elements of a row in 128 bytes, whose 16-byte chunks are swizzled */
    SEGMENT_BYTES = 128, /* also the bytes between two rows of a segment */
};

/* Named barriers; the number of the group is added. */
enum {
    GROUP_BARRIER = 1, /* the group's threads | the same */
    TURN = 3,          /* the other group's threads | the group's */
};

__device__ __forceinline__ int
lane_idx(void)
{
    return (int)threadIdx.x % SMLA_WARP_LANES;
}

/* The lane, read again at each call, so that what depends on it occupies no register across the
 * loop over blocks. */
__device__ __forceinline__ int
lane_again(void)
{
    return (int)(ptx_thread() % SMLA_WARP_LANES);
}

/* ---- mbarriers ------------------------------------------------------------------------------ */

/* The address of an mbarrier. */
__device__ __forceinline__ uint32_t
at(const uint64_t &barrier)
{
    return ptx_shared_address(&barrier);
}

/* Initialises an array of mbarriers. */
template <int COUNT>
__device__ __forceinline__ void
start_barriers(uint64_t (&barriers)[COUNT], int arrivals)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        ptx_mbarrier_init(at(barriers[i]), arrivals);
    }
}

/* ---- Turns ----------------------------------------------------------------------------------
 *
 * Only the group whose turn it is starts products: one block's scores and one block's values. So
 * the groups alternate, and one takes exponents while the other one multiplies. Without turns they
 * drift into step, multiply at the same time, and lose a fifth of the speed. Both make the same
 * number of steps, so every turn that is passed is taken. */

__device__ __forceinline__ void
take_turn(int group)
{
    ptx_barrier(TURN + group, CONSUMER_THREADS);
}

__device__ __forceinline__ void
pass_turn(int group)
{
    ptx_barrier_arrive(TURN + 1 - group, CONSUMER_THREADS);
}
