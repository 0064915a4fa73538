/* global_topk.cu: an indexer's positions -> slots of the compressed cache, without holes.
 *
 * Computes     out[t] = the slots of the entries of topk_indices[t] that have one, in their order,
 *              then -1; lens[t] = their number. A position's slot is its page,
 *              block_table[req_id[t], pos / block_size], times block_size, plus pos % block_size. A
 *              row of an invalid token is -1, of length 0.
 * Shapes       topk_indices, out [T, K] int32, rows any stride apart; req_id_per_token, lens [T]
 *              int32, is_valid [T] bytes, block_table [R, W] int32, any strides
 * Shared mem   256 bytes: how many slots each warp found in each vector of a tile, twice
 * Roles        A CTA takes one token at a time, and its columns in tiles of 1024. A thread takes
 *              column i * 256 + thread of a tile, for i = 0...3, so that loads and stores are whole
 *              lines. Every warp counts its slots by votes and leaves the 4 counts in shared
 *              memory. From all 32 counts each warp finds where its slots go. Barrier
 *              (__syncthreads): the counts of a tile are written. The two halves of the counts take
 *              turns, so that one barrier per tile suffices.
 * Roofline     Memory: 8 bytes per entry. At K = 512, the usual length, a launch of few tokens is
 *              latency: load an entry, load its page, vote, meet, store. Measured on an H200, many
 *              tokens: 1.3 TB/s, a third of a copy.
 * Numerics     Integers, exact. An entry has no slot where it is negative or beyond the table, its
 *              page is negative, or the slot is above int32. A bad request id has no slots.
 * Source       compute_global_topk_indices_and_lens of vLLM, for its arguments; the order-keeping
 *              compaction by votes and a scan of counts is ours.
 */
#include "cuda/index/slot.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    NUM_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    UNROLL = 4, /* vectors per tile */
    NUM_COUNTS = UNROLL * NUM_WARPS,
    TILE = UNROLL * BLOCK_THREADS,
};

static_assert((int)NUM_COUNTS == (int)SMLA_WARP_LANES, "a lane per count");

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

struct global_topk_args {
    smla_topk_slots_params p;
    page_table pages;
};

/* The request of a token, or -1 if its row has no slots. */
__device__ __forceinline__ int64_t
find_request(const smla_topk_slots_params &p, int64_t token)
{
    if (!is_valid_token(p.is_valid, p.is_valid_stride, token)) {
        return -1;
    }
    const int64_t req = __ldg(p.req_id_per_token + token * p.req_id_stride);
    return req < p.num_reqs ? req : -1;
}

/* A thread's slots of a tile; -1 where an entry has none. */
__device__ __forceinline__ void
load_slots(const global_topk_args &args, const int32_t *in, int64_t tile, int64_t req,
           int32_t *slots)
{
    int32_t entries[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int64_t column = tile + i * BLOCK_THREADS + threadIdx.x;
        entries[i] = column < args.p.topk ? __ldg(in + column) : -1;
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        slots[i] = find_slot(args.pages, req, entries[i]);
    }
}

/* The sum of the counts in front of each, one per lane. */
__device__ __forceinline__ int32_t
scan_counts(int32_t count, int lane, int32_t *total)
{
    int32_t sum = count;
#pragma unroll
    for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
        const int32_t before = __shfl_up_sync(ALL_LANES, sum, step);
        sum += lane >= step ? before : 0;
    }
    *total = __shfl_sync(ALL_LANES, sum, SMLA_WARP_LANES - 1);
    return sum - count;
}

/* Appends the slots of a tile to out[begin...], and returns how many there are. All threads of the
 * CTA call this, tile after tile, with `counts` in turn one and the other half of the counts. */
__device__ __forceinline__ int32_t
append_slots(const int32_t *slots, int32_t *counts, int32_t *out)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    uint32_t votes[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        votes[i] = __ballot_sync(ALL_LANES, slots[i] >= 0);
        if (lane == 0) {
            counts[i * NUM_WARPS + warp] = __popc(votes[i]);
        }
    }
    __syncthreads(); /* the counts of a tile are written */
    int32_t total;
    const int32_t before = scan_counts(counts[lane], lane, &total);
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int32_t first = __shfl_sync(ALL_LANES, before, i * NUM_WARPS + warp);
        if (slots[i] >= 0) {
            out[first + __popc(votes[i] & ((1u << lane) - 1))] = slots[i];
        }
    }
    return total;
}

__global__ void
__launch_bounds__(BLOCK_THREADS) global_topk_kernel(const __grid_constant__ global_topk_args args)
{
    ptx_wait_for_grids();
    __shared__ int32_t counts[2][NUM_COUNTS];
    const smla_topk_slots_params &p = args.p;
    int half = 0;
    for (int64_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
        const int32_t *const in = p.topk_indices + token * p.topk_indices_stride_token;
        int32_t *const out = p.out + token * p.out_stride_token;
        const int64_t req = find_request(p, token);
        int64_t count = 0;
        for (int64_t tile = 0; req >= 0 && tile < p.topk; tile += TILE) {
            int32_t slots[UNROLL];
            load_slots(args, in, tile, req, slots);
            count += append_slots(slots, counts[half], out + count);
            half ^= 1;
        }
        for (int64_t column = count + threadIdx.x; column < p.topk; column += BLOCK_THREADS) {
            out[column] = -1;
        }
        if (threadIdx.x == 0) {
            p.lens[token * p.lens_stride] = (int32_t)count;
        }
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_compute_global_topk_indices_and_lens(const smla_topk_slots_params *p)
{
    const global_topk_args args = {*p, page_table_of(p->pages)};
    return smla_launch(global_topk_kernel, args, p->num_tokens, BLOCK_THREADS, 0, p->stream);
}
