/* paged_lists.cuh: what the items of paged_lists.cu share: their args, running sums over a CTA, the
 * slots of a request.
 */
#pragma once

#include "core/params_paged_step.h"
#include "cuda/ptx/launch.cuh"

namespace {

enum { BLOCK_THREADS = 256, NUM_WARPS = BLOCK_THREADS / SMLA_WARP_LANES };

struct paged_args {
    smla_paged_step_params p;
    smla_divisor page_size;
    smla_divisor shares; /* items of a request */
};

/* ---- Sums over a CTA ----------------------------------------------------------------------- */

struct cta_sums {
    int64_t warps[NUM_WARPS];
};

/* The sum of the values of this thread and of all lower ones; `total` is that of all threads. Every
 * thread of the CTA calls this. */
__device__ __forceinline__ int64_t
scan_cta(cta_sums &sums, int64_t value, int64_t *total)
{
    const int warp = threadIdx.x / SMLA_WARP_LANES, lane = threadIdx.x % SMLA_WARP_LANES;
    const int64_t in_warp = smla_scan_lanes(value, lane);
    __syncthreads(); /* the sums of the last call have been read */
    if (lane == SMLA_WARP_LANES - 1) {
        sums.warps[warp] = in_warp;
    }
    __syncthreads(); /* the sums of all warps are there */
    int64_t before = 0;
    *total = 0;
    for (int i = 0; i < NUM_WARPS; i++) {
        before += i < warp ? sums.warps[i] : 0;
        *total += sums.warps[i];
    }
    return before + in_warp;
}

/* ---- Slots --------------------------------------------------------------------------------- */

__device__ __forceinline__ int32_t
map_slot(const smla_paged_step_params &p, int64_t slot)
{
    return slot < 0 || slot >= p.num_mapped ? -1 : __ldg(p.mapping + slot * p.mapping_stride);
}

/* The slot of position `at` of a pool row, in the window pool if `is_mapped`; -1: none. */
__device__ __forceinline__ int32_t
read_slot(const smla_paged_step_params &p, int64_t pool_row, int64_t at, bool is_mapped)
{
    if (at >= p.pool_width) {
        return -1;
    }
    const int32_t slot = __ldg(p.req_to_token + pool_row * p.pool_stride + at);
    return is_mapped ? map_slot(p, slot) : slot;
}

/* The page of a slot, rounded down. */
__device__ __forceinline__ int32_t
page_of(const paged_args &args, int32_t slot)
{
    return slot >= 0 ? (int32_t)smla_divide_uint32((uint32_t)slot, args.page_size)
                     : ~(int32_t)smla_divide_uint32((uint32_t)~slot, args.page_size);
}

/* ---- Requests ------------------------------------------------------------------------------ */

/* A request, or nothing behind the last one. */
__device__ __forceinline__ smla_paged_request
read_request(const smla_paged_step_params &p, int64_t req)
{
    return req < p.num_reqs ? smla_read_paged_request(&p, req) : smla_paged_request{-1, 0, 0, 0, 0};
}

/* Extends a running sum by an entry per thread. The entry in front is in memory. */
__device__ __forceinline__ void
extend_sums(cta_sums &sums, int32_t *starts, int64_t at, int64_t count, int64_t value, int64_t most)
{
    int64_t total;
    const int64_t sum = scan_cta(sums, value, &total);
    const int64_t before = starts[at - threadIdx.x];
    if (at < count) {
        starts[at + 1] = (int32_t)smla_least_of(before + sum, most);
    }
    __syncthreads(); /* the next call reads the last entry */
}

} /* namespace */
