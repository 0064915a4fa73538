/* key_ranges.cu: which request each token of a dense call belongs to, and which keys it sees
 * (visible.h). Attention waits for it on the same stream, because only the device knows lengths.
 *
 * Shapes       starts [R + 1], seq_lens [R] -> req_ids, begin, end [T] int32; and 0 in out, -inf in
 *              lse, where the call made them, for tokens of no request
 * Roles        A thread per token, which searches its request by halves. Then a CTA fills the rows
 *              of one such token at a time.
 * Roofline     12 bytes a token: the start of the launch binds.
 * Numerics     Integers. Starts that fall, or that are past T, are clamped: the results then mean
 *              nothing, and name no request, token or key that is not there.
 */
#include "core/attention/params_attention.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/ptx_sm90.cuh"

enum { BLOCK_THREADS = 128 };

static __global__ void
__launch_bounds__(BLOCK_THREADS)
    write_key_ranges(const __grid_constant__ smla_key_ranges_params params)
{
    ptx_let_next_grid_start(); /* attention's CTAs start meanwhile, and wait for the ranges */
    ptx_wait_for_grids();
    const int64_t step = (int64_t)gridDim.x * BLOCK_THREADS;
    for (int64_t token = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x;
         token < params.reqs.num_tokens; token += step) {
        smla_write_key_range(&params, token);
    }
    if (smla_has_padding(&params.padding)) {
        const int64_t first = smla_query_start(&params.reqs, params.reqs.num_reqs);
        smla_fill_padding(&params.padding, first + blockIdx.x, gridDim.x, params.reqs.num_tokens,
                          (int)threadIdx.x, BLOCK_THREADS);
    }
}

cudaError_t
smla_cuda_launch_key_ranges(const smla_key_ranges_params *params, const smla_cuda_device *)
{
    return smla_launch(write_key_ranges, *params,
                       smla_count_parts(params->reqs.num_tokens, BLOCK_THREADS), BLOCK_THREADS, 0,
                       params->call.stream);
}
