/* global_topk.cu: an indexer's positions -> slots of the compressed cache, without holes.
 *
 * Computes     out[t] = the slots of the entries of topk_indices[t] that have one, in their order,
 *              then -1; lens[t] = their number. A position's slot is its page,
 *              block_table[req_id[t], pos / block_size], times block_size, plus pos % block_size. A
 *              row of an invalid token is -1, of length 0.
 * Shapes       topk_indices, out [T, K] int32, rows any stride apart; req_id_per_token, lens [T]
 *              int32, is_valid [T] bytes, block_table [R, W] int32, any strides
 * Shared mem   256 bytes: how many slots each warp found in each vector of a tile, twice
 * Roles        A CTA takes one token at a time; slot_rows.cuh writes its row. Barrier
 *              (__syncthreads): the counts of a tile are written.
 * Roofline     Memory: 8 bytes per entry. At K = 512, the usual length, a launch of few tokens is
 *              latency: load an entry, load its page, vote, meet, store. Measured on an H200, many
 *              tokens: 1.3 TB/s, a third of a copy.
 * Numerics     Integers, exact. An entry has no slot where it is negative or beyond the table, its
 *              page is negative, or the slot is above int32. A bad request id has no slots.
 * Source       compute_global_topk_indices_and_lens of vLLM, for its arguments; the order-keeping
 *              compaction by votes and a scan of counts is ours.
 */
#include "cuda/index/slot_rows.cuh"

namespace {

enum { BLOCK_THREADS = 256 };

struct global_topk_args {
    smla_topk_slots_params p;
    page_table pages;
};

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

} /* namespace */

cudaError_t
smla_cuda_launch_compute_global_topk_indices_and_lens(const smla_topk_slots_params *p)
{
    const global_topk_args args = {*p, page_table_of(p->pages)};
    return smla_launch(global_topk_kernel, args, p->num_tokens, BLOCK_THREADS, 0, p->stream);
}
