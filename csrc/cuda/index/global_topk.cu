/* global_topk.cu: an indexer's positions -> slots of the compressed cache, without holes.
 *
 * Computes     out[t] = the slots of the entries of topk_indices[t] that have one, in their order,
 *              then -1; lens[t] = their number. A position's slot is its page,
 *              block_table[req_id[t], pos / block_size], times block_size, plus pos % block_size.
 *              The row of an invalid token is all -1 and has length 0.
 * Shapes       topk_indices, out [T, K] int32, rows any stride apart; req_id_per_token, lens [T]
 *              int32, is_valid [T] bytes, block_table [R, W] int32, any strides
 * Shared mem   few tokens: 256 bytes, the number of slots that each warp found in each vector of a
 *              tile, for two tiles
 * Roles        Few tokens: a CTA takes one token at a time; slot_rows.cuh writes its row. Barrier
 *              (__syncthreads): the counts of a tile are written.
 *              Many tokens: a warp takes one token at a time, 32 columns after 32, without
 *              barriers. It loads the entries of the first 256 columns before it knows the
 *              request, and the next entries before it stores slots.
 * Roofline     Memory: 8 bytes per entry; 32768 tokens of K = 512 take 32 us at 4.2 TB/s. Latency
 *              binds a launch of few tokens: load an entry, load its page, vote, meet, store. With
 *              many tokens, a warp has loads of 1 KiB of entries under way, and runs about 30
 *              instructions per 32 columns: 17 us on 132 SMs.
 * Numerics     Integers, exact. An entry has no slot if it is negative or beyond the table, if its
 *              page is negative, or if the slot is above int32. A bad request id has no slots.
 * Source       compute_global_topk_indices_and_lens of vLLM, for its arguments; the order-keeping
 *              compaction by votes and a scan of counts is ours.
 */
#include "cuda/index/slot_rows.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCK_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    SM_TOKENS = 16, /* tokens per SM from which on a warp, not a CTA, takes a token */
    LANE_ENTRIES = 8,
    PASS_ENTRIES = LANE_ENTRIES * SMLA_WARP_LANES,
};

struct global_topk_args {
    smla_topk_slots_params p;
    page_table pages;
};

/* ---- Few tokens ---------------------------------------------------------------------------- */

__global__ void
__launch_bounds__(BLOCK_THREADS) global_topk_kernel(const __grid_constant__ global_topk_args args)
{
    ptx_wait_for_grids();
    __shared__ int32_t counts[2][SLOT_COUNTS];
    int half = 0;
    for (int64_t token = blockIdx.x; token < args.p.num_tokens; token += gridDim.x) {
        write_slot_row<BLOCK_THREADS>(args.p, args.pages, token, counts, &half);
    }
}

/* ---- Many tokens --------------------------------------------------------------------------- */

/* Loads a lane's entries of a pass; those beyond the last column are -1. */
__device__ __forceinline__ void
load_entries(const int32_t *in, int64_t first, int64_t topk, int32_t entries[LANE_ENTRIES])
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int left = (int)(topk - first < PASS_ENTRIES ? topk - first : PASS_ENTRIES) - lane;
    const int32_t *const from = in + first + lane;
#pragma unroll
    for (int i = 0; i < LANE_ENTRIES; i++) {
        entries[i] = i * SMLA_WARP_LANES < left ? __ldcg(from + i * SMLA_WARP_LANES) : -1;
    }
}

/* Writes the row and the length of a token. All lanes of a warp call this together. */
__device__ __forceinline__ void
write_row_by_warp(const smla_topk_slots_params &p, const page_table &pages, int64_t token)
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int32_t *const in = p.topk_indices + token * p.topk_indices_stride_token;
    int32_t *const out = p.out + token * p.out_stride_token;
    int32_t entries[LANE_ENTRIES];
    load_entries(in, 0, p.topk, entries);
    const int64_t req = find_slot_request(p, token);
    int32_t *end = out; /* the address of the next slot */
    for (int64_t first = 0; req >= 0 && first < p.topk; first += PASS_ENTRIES) {
        int32_t slots[LANE_ENTRIES];
#pragma unroll
        for (int i = 0; i < LANE_ENTRIES; i++) {
            slots[i] = find_slot(pages, req, entries[i]);
        }
        load_entries(in, first + PASS_ENTRIES, p.topk, entries);
#pragma unroll
        for (int i = 0; i < LANE_ENTRIES; i++) {
            const uint32_t votes = __ballot_sync(ALL_LANES, slots[i] >= 0);
            if (slots[i] >= 0) {
                end[__popc(votes & ((1u << lane) - 1))] = slots[i];
            }
            end += __popc(votes);
        }
    }
    const int64_t count = end - out;
    for (int64_t column = count + lane; column < p.topk; column += SMLA_WARP_LANES) {
        out[column] = -1;
    }
    if (lane == 0) {
        p.lens[token * p.lens_stride] = (int32_t)count;
    }
}

__global__ void
__launch_bounds__(BLOCK_THREADS, 4)
    global_topk_warp_kernel(const __grid_constant__ global_topk_args args)
{
    ptx_wait_for_grids();
    const int64_t step = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t token = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; token < args.p.num_tokens; token += step) {
        write_row_by_warp(args.p, args.pages, token);
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_compute_global_topk_indices_and_lens(const smla_topk_slots_params *p,
                                                      const smla_cuda_device *device)
{
    const global_topk_args args = {*p, page_table_of(p->pages)};
    const int64_t num_sms = device->num_sms;
    const bool are_many = p->num_tokens >= SM_TOKENS * num_sms;
    return smla_launch(are_many ? global_topk_warp_kernel : global_topk_kernel, args,
                       are_many ? smla_count_parts(p->num_tokens, BLOCK_WARPS) : p->num_tokens,
                       BLOCK_THREADS, 0, p->call.stream);
}
