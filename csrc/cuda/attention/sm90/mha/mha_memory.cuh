/* mha_memory.cuh: the argument, the shared memory and the barriers of mha_attention_sm90.cu. */
#pragma once

#include "cuda/attention/kernel_params.cuh"
#include "cuda/attention/sm90/mha/consumer_groups.cuh"
#include "cuda/host/tensor_map.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    LOAD_WARPS = 4,
    MHA_THREADS = CONSUMER_THREADS + LOAD_WARPS * SMLA_WARP_LANES,
    CONSUMER_REGISTERS = 240,
    LOAD_REGISTERS = 24,

    BLOCK_KEYS = 128,
    VALUE_DIM = 128,

    STAGES = 2, /* blocks of keys, and of values, in shared memory */
    SLOTS = 4,  /* tiles that the scheduler may be ahead */
};

/* Arrays of queries, keys or values, for copies by tensor maps: one, or the two of a pair. */
struct mha_rows {
    int32_t segments[2];  /* segments of a row; 0: there is no such part */
    int32_t head_step[2]; /* 0: all heads share their rows, as those of k_pe do */
};

struct mha_args {
    CUtensorMap q_maps[2];
    CUtensorMap k_maps[2];
    CUtensorMap v_maps[2]; /* the second one is not used */
    mha_rows q;
    mha_rows k;
    mha_rows v;
    mha_params p;
    int64_t out_token_bytes;
    int64_t out_head_bytes;
    smla_divisor group;       /* H / Hk */
    uint32_t most_head_tiles; /* tiles of a head, if starts never fall */
    float scale_log2;
    bool is_causal;
    bool out_is_fp32;
    unsigned long long *counters; /* words of claims.cuh; NULL: no tile is claimed */
};

/* TILE_ROWS rows of a head: query tokens of one request. A request's tiles end at its last token,
 * and a tile's keys end where its last row's do, so that the diagonal of a causal mask is that of
 * the first block. Blocks go from there towards the request's first key. */
struct alignas(16) mha_tile {
    int32_t first_query; /* token of row 0, which may be in front of the request */
    int32_t absent_rows; /* rows in front of the request's first token: 0 to TILE_ROWS - 1 */
    int32_t first_key;   /* row in the arrays of the first block's key 0 */
    int32_t num_blocks;  /* at least one; 0: there are no more tiles */
    int32_t absent_keys; /* keys of the last block in front of the request's first key */
    int32_t head;
    int32_t kv_head;
    uint8_t *out; /* row 0's results, which do not exist if the row does not */
    float *lse;   /* NULL: nobody wants it */
};

template <int D> struct mha_memory {
    static constexpr int SEGMENTS = D / SEGMENT;
    alignas(1024) uint16_t queries[GROUPS][SEGMENTS][GROUP_ROWS][SEGMENT];
    alignas(1024) uint16_t keys[STAGES][SEGMENTS][BLOCK_KEYS][SEGMENT];
    alignas(1024) uint16_t values[STAGES][VALUE_DIM / SEGMENT][BLOCK_KEYS][SEGMENT];
    alignas(16) uint16_t out[CONSUMER_WARPS][WARP_ROWS][SEGMENT];
    mha_tile tiles[SLOTS];
    /* mbarriers; mha_attention_sm90.cu lists who arrives and who waits */
    uint64_t q_full[GROUPS];
    uint64_t q_empty[GROUPS];
    uint64_t k_full[STAGES];
    uint64_t k_empty[STAGES];
    uint64_t v_full[STAGES];
    uint64_t v_empty[STAGES];
    uint64_t tile_full[SLOTS];
    uint64_t tile_empty[SLOTS];
    uint64_t tile_wanted;
};

/* Called by one thread. */
template <int D>
__device__ __forceinline__ void
start_memory(mha_memory<D> *shared)
{
    start_barriers(shared->q_full, 1);
    start_barriers(shared->q_empty, GROUP_WARPS);
    start_barriers(shared->k_full, 1);
    start_barriers(shared->k_empty, CONSUMER_WARPS);
    start_barriers(shared->v_full, 1);
    start_barriers(shared->v_empty, CONSUMER_WARPS);
    start_barriers(shared->tile_full, 1);
    start_barriers(shared->tile_empty, LOAD_WARPS - 1 + CONSUMER_THREADS);
    ptx_mbarrier_init(at(shared->tile_wanted), 1);
    ptx_fence_mbarrier_init();
}

/* Waits for the CTA's tile `number`, and returns where it is. */
template <int D>
__device__ __forceinline__ const mha_tile *
await_tile(const mha_memory<D> *shared, uint32_t number)
{
    ptx_mbarrier_wait(at(shared->tile_full[number % SLOTS]), number / SLOTS % 2);
    return &shared->tiles[number % SLOTS];
}

/* Arrives as one of the threads that read the tile. All consumers do: racecheck does not see that
 * the reads of a warp come before one lane's arrival when only a turn lies between them. */
template <int D>
__device__ __forceinline__ void
leave_tile(const mha_memory<D> *shared, uint32_t number)
{
    ptx_mbarrier_arrive(at(shared->tile_empty[number % SLOTS]), true);
}
