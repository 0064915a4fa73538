/* slot_rows.cuh: a CTA writes one row of slots: the slots of the entries that have one, in their
 * order, then -1.
 *
 * The CTA takes the columns in tiles of 1024. The columns of a thread are a CTA's width apart, so
 * that loads and stores are whole lines. Every warp counts its slots by votes. All warps together
 * leave 32 counts per tile in shared memory, and from these counts each warp finds where its slots
 * go. Tiles alternate between the two halves of the counts, so one barrier per tile suffices.
 */
#pragma once

#include "cuda/index/slot.cuh"

enum { SLOT_COUNTS = SMLA_WARP_LANES }; /* counts per tile, a lane per count */

/* The request of a token, or -1 if its row has no slots. */
static __device__ __forceinline__ int64_t
find_slot_request(const smla_topk_slots_params &p, int64_t token)
{
    if (!is_valid_token(p.is_valid, p.is_valid_stride, token)) {
        return -1;
    }
    const int64_t req = __ldg(p.req_id_per_token + token * p.req_id_stride);
    return req < p.num_reqs ? req : -1;
}

/* Loads a thread's slots of a tile; a slot is -1 where an entry has none. Entries are read from L2,
 * because other CTAs of the grid may have written them. */
template <int THREADS>
static __device__ __forceinline__ void
load_slots(const smla_topk_slots_params &p, const page_table &pages, const int32_t *in,
           int64_t tile, int64_t req, int32_t *slots)
{
    constexpr int UNROLL = SLOT_COUNTS * SMLA_WARP_LANES / THREADS;
    int32_t entries[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int64_t column = tile + i * THREADS + threadIdx.x;
        entries[i] = column < p.topk ? __ldcg(in + column) : -1;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        slots[i] = find_slot(pages, req, entries[i]);
    }
}

/* Returns the sum of the counts of lower lanes; each lane passes one count. */
static __device__ __forceinline__ int32_t
scan_counts(int32_t count, int lane, int32_t *total)
{
    const int32_t sum = smla_scan_lanes(count, lane);
    *total = __shfl_sync(0xFFFFFFFFu, sum, SMLA_WARP_LANES - 1);
    return sum - count;
}

/* Appends the slots of a tile to out[begin...], and returns how many there are. All threads of the
 * CTA call this for each tile, with `counts` alternating between the two halves. */
template <int THREADS>
static __device__ __forceinline__ int32_t
append_slots(const int32_t *slots, int32_t *counts, int32_t *out)
{
    constexpr int WARPS = THREADS / SMLA_WARP_LANES;
    constexpr int UNROLL = SLOT_COUNTS / WARPS;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    uint32_t votes[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        votes[i] = __ballot_sync(ALL_LANES, slots[i] >= 0);
        if (lane == 0) {
            counts[i * WARPS + warp] = __popc(votes[i]);
        }
    }
    __syncthreads(); /* the counts of a tile are written */
    int32_t total;
    const int32_t before = scan_counts(counts[lane], lane, &total);
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int32_t first = __shfl_sync(ALL_LANES, before, i * WARPS + warp);
        if (slots[i] >= 0) {
            out[first + __popc(votes[i] & ((1u << lane) - 1))] = slots[i];
        }
    }
    return total;
}

/* Writes the row and the length of a token. All threads of the CTA call this. `half` says which
 * half of `counts` the next tile uses. */
template <int THREADS>
static __device__ __forceinline__ void
write_slot_row(const smla_topk_slots_params &p, const page_table &pages, int64_t token,
               int32_t (*counts)[SLOT_COUNTS], int *half)
{
    const int32_t *const in = p.topk_indices + token * p.topk_indices_stride_token;
    int32_t *const out = p.out + token * p.out_stride_token;
    const int64_t req = find_slot_request(p, token);
    int64_t count = 0;
    for (int64_t tile = 0; req >= 0 && tile < p.topk; tile += SLOT_COUNTS * SMLA_WARP_LANES) {
        int32_t slots[SLOT_COUNTS * SMLA_WARP_LANES / THREADS];
        load_slots<THREADS>(p, pages, in, tile, req, slots);
        count += append_slots<THREADS>(slots, counts[*half], out + count);
        *half ^= 1;
    }
    for (int64_t column = count + threadIdx.x; column < p.topk; column += THREADS) {
        out[column] = -1;
    }
    if (threadIdx.x == 0) {
        p.lens[token * p.lens_stride] = (int32_t)count;
    }
}
