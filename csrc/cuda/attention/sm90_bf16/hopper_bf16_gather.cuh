/* hopper_bf16_gather.cuh: the gather warps of attention_bf16_sm90.cu. Ahead of the consumers, they
 * bring queries and, by index, cache rows to shared memory.
 *
 * A warp has 16 rows of every block. A thread copies 16 bytes of a tile's row at a time. In a
 * flight of four rows, lane l copies chunk l % 8 of row l / 8, so that eight lanes copy a row's 128
 * bytes. Four flights are the warp's rows. Entries of a list that are no keys take no place in a
 * block (key_stream.cuh). Behind the last key, and where an index names no cache row after all, a
 * row of the block is filled with zeros, and nothing is read.
 */
#pragma once

#include "cuda/attention/sm90_bf16/hopper_bf16.cuh"

enum {
    WARP_ROWS = BLOCK_KEYS / GATHER_WARPS,
    FLIGHT_ROWS = SMLA_WARP_LANES / 8, /* rows per copy instruction of a warp */
    ROW_FLIGHTS = WARP_ROWS / FLIGHT_ROWS,
    BF16_COUNT_LOADS = 16, /* indices per lane that are counted at once: those of 2048 columns */
};

static_assert(2 * WARP_ROWS == SMLA_WARP_LANES, "a lane knows one row of a step");
static_assert((int)TILE_HEADS == (int)BLOCK_KEYS, "a warp's heads are as many as its keys");

/* What a gather thread keeps. */
typedef struct bf16_gather {
    uint32_t base; /* address of shared memory */
    uint32_t to;   /* offset of the thread's chunk in a tile in even flights; odd ones flip bit 6 */
    bf16_phase phase;
} bf16_gather;

static __device__ __forceinline__ int
gather_lane(void)
{
    return (int)(threadIdx.x % SMLA_WARP_LANES);
}

static __device__ __forceinline__ int
gather_warp(void)
{
    return (int)(threadIdx.x / SMLA_WARP_LANES) - CONSUMER_WARPS;
}

/* gather_warp, recomputed at each call: keeping it, and what depends on it, would cost the copies
 * registers. */
static __device__ __forceinline__ int
gather_warp_again(void)
{
    return (int)((uint32_t)ptx_forget((int)threadIdx.x) / SMLA_WARP_LANES) - CONSUMER_WARPS;
}

/* The offset in a tile of the thread's chunk in even flights, in the n-th of four warps. */
static __device__ __forceinline__ uint32_t
first_chunk_in_tile(int warp)
{
    const int row = gather_lane() / 8;
    return (warp * WARP_ROWS + row) * 128 + ((gather_lane() % 8) ^ row) * 16;
}

/* The offset in a tile of the thread's chunk of its row in a flight. */
static __device__ __forceinline__ uint32_t
chunk_in_tile(uint32_t first_chunk, int flight)
{
    return (first_chunk ^ (flight & 1) * 64) + flight * (FLIGHT_ROWS * 128);
}

/* ---- Copies -------------------------------------------------------------------------------- */

/* Copies 16 bytes of a row, or zeros if not is_on. Aligned bytes bypass the registers; others pass
 * through them. */
template <bool ALIGNED>
static __device__ __forceinline__ void
copy_chunk(uint32_t to, const void *from, bool is_on)
{
    if constexpr (ALIGNED) {
        ptx_cp_async_16_or_zero(to, from, is_on);
    } else {
        uint32_t words[4] = {};
        if (is_on) {
            smla_load_words<16, false>(from, words);
        }
        ptx_store_shared_16(to, words);
    }
}

/* Arrives at the mbarrier when what this thread has copied is in shared memory. */
template <bool ALIGNED>
static __device__ __forceinline__ void
announce_copies(uint32_t barrier)
{
    if constexpr (ALIGNED) {
        ptx_mbarrier_arrive_after_copies(barrier);
    } else {
        ptx_fence_async_shared();
        ptx_mbarrier_arrive(barrier, true);
    }
}

/* ---- Query --------------------------------------------------------------------------------- */

/* Copies the query of a work; `warp` is the number of the calling warp among four. Group 1 brings
 * the CTA's first query, because it is idle while the gather warps read the first indices. The
 * gather warps bring the others. */
template <bool ROPE, bool ALIGNED>
static __device__ __forceinline__ void
copy_query(const smla_attention_params &params, const cta_work &work, uint32_t base, int warp)
{
#pragma unroll 1
    for (int flight = 0; flight < ROW_FLIGHTS; flight++) {
        const int head = warp * WARP_ROWS + flight * FLIGHT_ROWS + gather_lane() / 8;
        const uint16_t *const nope = params.q_nope + work.token * params.q_nope_stride_token +
                                     (work.first_head + head) * params.q_nope_stride_head;
        const uint16_t *const rope = params.q_pe + work.token * params.q_pe_stride_token +
                                     (work.first_head + head) * params.q_pe_stride_head;
        const uint32_t to = BF16_AT(base, query) + chunk_in_tile(first_chunk_in_tile(warp), flight);
#pragma unroll
        for (int tile = 0; tile < (ROPE ? QUERY_TILES : ROPE_TILE); tile++) {
            const uint16_t *const from = tile == ROPE_TILE ? rope : nope + tile * 64;
            copy_chunk<ALIGNED>(to + tile * TILE_BYTES, from + gather_lane() % 8 * 8,
                                head < work.num_heads);
        }
    }
    announce_copies<ALIGNED>(BF16_AT(base, query_full));
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* Copies the warp's rows of a piece of a block. 16 lanes from first_lane on have the addresses. */
template <int PIECE, bool ROPE, bool ALIGNED>
static __device__ __forceinline__ void
copy_piece(const bf16_gather &state, int block, const uint8_t *row, int first_lane)
{
#pragma unroll
    for (int flight = 0; flight < ROW_FLIGHTS; flight++) {
        const uint8_t *const from =
            row_of_lane(row, first_lane + flight * FLIGHT_ROWS + gather_lane() / 8);
        const uint32_t to =
            BF16_AT(state.base, keys) + block * BLOCK_BYTES + chunk_in_tile(state.to, flight);
#pragma unroll
        for (int tile = first_tile<ROPE>(PIECE); tile < first_tile<ROPE>(PIECE + 1); tile++) {
            copy_chunk<ALIGNED>(to + tile * TILE_BYTES, from + tile * 128 + gather_lane() % 8 * 16,
                                from != NULL);
        }
    }
    announce_copies<ALIGNED>(full_barrier(state.base, block, PIECE));
}

/* Copies a block, each half when it becomes free: first the half whose values the block's group
 * adds (nth_piece). is_key comes with piece KEY_PIECE, which is in the second half. Then both
 * halves are free, and no thread reads the last is_key. */
template <int BLOCK, bool ROPE, bool ALIGNED>
static __device__ __forceinline__ void
gather_block(const bf16_gather &state, const uint8_t *row, uint32_t are_keys, uint32_t last_bit)
{
    const int first_lane = BLOCK * WARP_ROWS;
    const uint32_t is_key = (are_keys >> first_lane & ALL_KEYS) | last_bit;
    ptx_mbarrier_wait(empty_barrier(state.base, BLOCK, BLOCK), state.phase.step ^ 1);
    copy_piece<nth_piece(BLOCK, 0), ROPE, ALIGNED>(state, BLOCK, row, first_lane);
    copy_piece<nth_piece(BLOCK, 1), ROPE, ALIGNED>(state, BLOCK, row, first_lane);
    ptx_mbarrier_wait(empty_barrier(state.base, BLOCK, BLOCK ^ 1), state.phase.step ^ 1);
    if (gather_lane() == 0) {
        ptx_store_shared_4(BF16_AT(state.base, is_key) + 4 * (GATHER_WARPS * BLOCK + gather_warp()),
                           is_key);
        ptx_mbarrier_arrive(full_barrier(state.base, BLOCK, nth_piece(BLOCK, KEY_PIECE)), true);
    }
    __syncwarp();
    copy_piece<nth_piece(BLOCK, 2), ROPE, ALIGNED>(state, BLOCK, row, first_lane);
    copy_piece<nth_piece(BLOCK, 3), ROPE, ALIGNED>(state, BLOCK, row, first_lane);
}

/* ---- A work with one key -------------------------------------------------------------------
 *
 * Places without a key are counted between the two blocks of a step. By then the warps have waited
 * until the first block was free, so all consumers are done with work n - 2, which had the same
 * `turn` as this work n. Group 1 sees the counts when it has waited for the second block, and group
 * 0 after the barrier at the end of a work. */

/* Begins the count of a work's keys, in its first step. */
static __device__ __forceinline__ void
begin_count(const list_steps &steps, uint32_t turn, bf16_memory *shared)
{
    if (threadIdx.x == CONSUMER_THREADS) {
        shared->num_steps[turn] = steps.main + steps.extra;
    }
    if (ptx_elect()) {
        shared->num_absent[turn][gather_warp_again()] = 0;
    }
    __syncwarp();
}

/* ---- Works --------------------------------------------------------------------------------- */

/* Asks for the indices of work number idx to be in L2; -1 is no work. */
static __device__ __forceinline__ void
prefetch_work(const bf16_launch &launch, int idx)
{
    if (idx >= 0) {
        const cta_work work = find_numbered_work(launch.base, idx, TILE_HEADS);
#pragma unroll 1
        for (int list = 0; list < launch.base.params.num_lists; list++) {
            prefetch_keys(launch.base, work, list, gather_warp_again(), gather_lane());
        }
    }
}

/* Gathers a list of the CTA's n-th work. Lane l has row l % 16 of the warp's rows of block l / 16.
 * The first step of a work brings its query, too, between the blocks. Behind them it prefetches the
 * indices that the next work's count will read. */
template <bool ROPE, bool ALIGNED>
static __device__ __forceinline__ void
gather_list(const bf16_launch &launch, const cta_work &work, int n, int list,
            const list_steps &steps, bf16_memory *shared, key_stream *stream, bool *is_first_step,
            bf16_gather *state)
{
    const bool is_last_list = list == 1 || steps.extra == 0;
#pragma unroll 1
    for (int32_t left = list == 0 ? steps.main : steps.extra; left > 0; left--) {
        const uint32_t limit = launch.base.lists[list].index_limit;
        const uint32_t index = take_step(stream, limit, gather_lane());
        const int32_t slot = slot_of_index(launch.base, list, work.token, (int32_t)index);
        const uint8_t *const row = row_of_slot(launch.base, list, slot);
        const uint32_t are_keys = __ballot_sync(0xFFFFFFFFu, slot >= 0);
        const uint32_t last_bit = is_last_list && left == 1 ? IS_LAST : 0;
        gather_block<0, ROPE, ALIGNED>(*state, row, are_keys, last_bit);
        if (*is_first_step) {
            begin_count(steps, state->phase.work, shared);
            if (n != 0) {
                ptx_mbarrier_wait(BF16_AT(state->base, query_empty), state->phase.work ^ 1);
                copy_query<ROPE, ALIGNED>(launch.base.params, work, state->base,
                                          gather_warp_again());
            }
        }
        count_step(are_keys, slot >= 0, listed_key{slot, list}, state->phase.work,
                   gather_warp_again, shared);
        gather_block<1, ROPE, ALIGNED>(*state, row, are_keys, last_bit);
        if (*is_first_step) {
            wait_for_order(launch.is_ordered, BF16_AT(state->base, order.planned));
            prefetch_work(launch,
                          nth_work(launch.is_ordered, launch.num_works, &shared->order, n + 1));
            *is_first_step = false;
        }
        state->phase.step ^= 1;
    }
}

/* Gathers all works of the CTA. A work without keys needs no query. */
template <bool ROPE, bool ALIGNED>
static __device__ __forceinline__ void
gather(const bf16_launch &launch, bf16_memory *shared)
{
    bf16_gather state = {};
    state.base = ptx_shared_address(shared);
    state.to = first_chunk_in_tile(gather_warp());
#pragma unroll 1
    for (int n = 0;; n++) {
        const int idx = nth_work(launch.is_ordered, launch.num_works, &shared->order, n);
        if (idx < 0) {
            break;
        }
        cta_work work = find_numbered_work(launch.base, idx, TILE_HEADS);
        key_stream stream =
            open_stream(launch.base, work, 0, gather_warp_again(), gather_lane(), 0);
        load_next(&stream); /* comes together with the indices that are counted */
        key_counts *const counts = &shared->num_keys[state.phase.work];
        count_work<BF16_COUNT_LOADS>(launch.base, work, stream, gather_warp_again(), gather_lane(),
                                     BARRIER_GATHER, counts);
        const list_steps steps = find_steps(launch.base, counts);
        stream.to_come = find_count(counts, 0, gather_warp_again());
        work.num_heads = steps.num_keys != 0 ? work.num_heads : 0;
        bool is_first_step = true;
#pragma unroll 1
        for (int list = 0; list < launch.base.params.num_lists; list++) {
            if (list == 1) {
                stream = open_stream(launch.base, work, 1, gather_warp_again(), gather_lane(),
                                     find_count(counts, 1, gather_warp_again()));
                load_next(&stream);
            }
            gather_list<ROPE, ALIGNED>(launch, work, n, list, steps, shared, &stream,
                                       &is_first_step, &state);
        }
        state.phase.work ^= 1;
    }
}
