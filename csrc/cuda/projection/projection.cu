/* projection.cu: projections of arrays that faster kernels do not take, because rows overlap, are
 * repeated (broadcast), run backwards, or are unaligned, or a weight has no contiguous dimension;
 * and sums of no terms. projection_cublas.c sends other bf16 arrays to cuBLAS, and
 * projection_e4m3.cu has the kernel for other e4m3 arrays.
 *
 * Computes     out[t,h,n] = sum_k x[t,h,k] w(k,h,n), or for e4m3
 *              out[t,h,n] = sum_b x_scale[t,h,b] w_scale[h,n/128,b] sum_k x[t,h,k] w(k,h,n),
 *              where b is a block of 128 values of k; with a w_scale[h,n] per output, that
 *              multiplies the whole sum instead
 * Shapes       x [T, H, k], w [k, H, n] in any order of dimensions, bf16 or e4m3, any strides, zero
 *              and negative ones included; out [T, H, n] bf16, last dimension contiguous
 * Shared mem   none
 * Roles        A block computes 128 outputs of one token and head, one per thread. No barriers.
 * Roofline     None: the kernel is right for any strides, not fast. An output takes 2 k operations
 *              and 4 k bytes of cached loads, without reuse in registers or tensor cores.
 * Numerics     Products and sums in fp32, in the order of k, rounded once to bf16; of e4m3, the sum
 *              over b and the scales are fp64. A sum of no terms is 0. The last bit may differ from
 *              cuBLAS's, which sums in another order.
 * Source       The formula; the kernel is ours.
 */
#include "core/projection_scale.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum { BLOCK_THREADS = 128 };

struct project_args {
    smla_projection_params p;
    smla_divisor parts; /* number of blocks per token and head */
    smla_divisor num_heads;
};

/* Returns sum plus the products of `count` values; x and w are the offsets of the first ones. */
__device__ float
add_products(const smla_projection_params &p, int64_t x, int64_t w, int64_t count, float sum)
{
    for (int64_t k = 0; k < count; k++, x++, w += p.w_stride_inner) {
        if (p.is_e4m3) {
            const float value = smla_e4m3_to_float(__ldg((const uint8_t *)p.x + x));
            sum = fmaf(value, smla_e4m3_to_float(__ldg((const uint8_t *)p.w + w)), sum);
        } else {
            const float value = smla_bf16_to_float(__ldg((const uint16_t *)p.x + x));
            sum = fmaf(value, smla_bf16_to_float(__ldg((const uint16_t *)p.w + w)), sum);
        }
    }
    return sum;
}

/* The sum of e4m3 products with their scales. It is in fp64, because a product of two scales may be
 * outside of fp32's range where the sum is inside. */
__device__ float
add_scaled(const smla_projection_params &p, int64_t token, int64_t head, int64_t outer, int64_t x,
           int64_t w)
{
    double sum = 0.0;
    for (int64_t k = 0; k < p.inner_dim; k += SMLA_SCALE_TILE) {
        const int64_t tile = k / SMLA_SCALE_TILE;
        const double x_scale = smla_token_scale(&p.scales, token, head, tile);
        const double w_scale =
            p.scales.w_is_per_output ? 1.0 : *smla_weight_scale(&p.scales, head, outer, tile);
        sum += (double)add_products(p, x + k, w + k, SMLA_SCALE_TILE, 0.0f) * x_scale * w_scale;
    }
    return (float)(p.scales.w_is_per_output ? sum * *smla_output_scale(&p.scales, head, outer)
                                            : sum);
}

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
        const int64_t x = token * p.x_stride_token + head * p.x_stride_head;
        const int64_t w = head * p.w_stride_head + outer * p.w_stride_outer;
        const float sum = p.is_e4m3 ? add_scaled(p, token, head, outer, x, w)
                                    : add_products(p, x, w, p.inner_dim, 0.0f);
        p.out[token * p.out_stride_token + head * p.out_stride_head + outer] =
            smla_float_to_bf16(sum);
    }
}

} // namespace

cudaError_t
smla_cuda_launch_projection(const smla_projection_params *p)
{
    const int64_t parts = smla_count_parts(p->outer_dim, BLOCK_THREADS);
    const project_args args = {*p, smla_make_divisor(parts), smla_make_divisor(p->num_heads)};
    return smla_launch(project_kernel, args, p->num_tokens * p->num_heads * parts, BLOCK_THREADS, 0,
                       p->call.stream);
}
