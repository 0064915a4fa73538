/* projection.cu: the up projections of arrays whose strides cuBLAS cannot express: rows that
 * overlap, are repeated (broadcast), or run backwards; and sums of no terms. projection_cublas.c
 * sends everything else to cuBLAS.
 *
 * Computes     out[t,h,n] = sum_k x[t,h,k] w(k,h,n)
 * Shapes       x [T, H, k], w [k, H, n] in any order of dimensions, bf16, any strides, zero and
 *              negative ones included; out [T, H, n] bf16, last dimension contiguous
 * Shared mem   none
 * Roles        A block computes 128 outputs of one token and head, one per thread. No barriers.
 * Roofline     None: the kernel is right for any strides, not fast. An output takes 2 k operations
 *              and 4 k bytes of cached loads, without reuse in registers or tensor cores.
 * Numerics     Products and sums in fp32, in the order of k, rounded once to bf16; a sum of no
 *              terms is 0. The last bit may differ from cuBLAS's, which sums in another order.
 * Source       The formula; the kernel is ours.
 */
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum { BLOCK_THREADS = 128 };

struct project_args {
    smla_projection_params p;
    smla_divisor parts; /* blocks per token and head */
    smla_divisor num_heads;
};

__global__ void
__launch_bounds__(BLOCK_THREADS) project_kernel(const __grid_constant__ project_args args)
{
    ptx_wait_for_grids();
    const smla_projection_params &p = args.p;
    const int64_t num_blocks = p.num_tokens * p.num_heads * args.parts.divisor;
    for (int64_t block = blockIdx.x; block < num_blocks; block += gridDim.x) {
        const int64_t row = smla_divide(block, args.parts);
        const int64_t token = smla_divide(row, args.num_heads);
        const int64_t head = row - token * p.num_heads;
        const int64_t outer = (block - row * args.parts.divisor) * BLOCK_THREADS + threadIdx.x;
        if (outer >= p.outer_dim) {
            continue;
        }
        const uint16_t *x = p.x + token * p.x_stride_token + head * p.x_stride_head;
        const uint16_t *w = p.w + head * p.w_stride_head + outer * p.w_stride_outer;
        float sum = 0.0f;
        for (int64_t k = 0; k < p.inner_dim; k++) {
            const float value = smla_bf16_to_float(__ldg(x + k));
            sum = fmaf(value, smla_bf16_to_float(__ldg(w + k * p.w_stride_inner)), sum);
        }
        p.out[token * p.out_stride_token + head * p.out_stride_head + outer] =
            smla_float_to_bf16(sum);
    }
}

} // namespace

cudaError_t
smla_cuda_launch_up_proj(const smla_projection_params *p)
{
    const int64_t parts = smla_count_parts(p->outer_dim, BLOCK_THREADS);
    const project_args args = {*p, smla_make_divisor(parts), smla_make_divisor(p->num_heads)};
    return smla_launch(project_kernel, args, p->num_tokens * p->num_heads * parts, BLOCK_THREADS, 0,
                       p->stream);
}
