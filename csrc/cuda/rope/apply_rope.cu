/* apply_rope.cu: rotates queries and keys to their positions, or back, in place or not.
 *
 * Computes     (a, b) -> (a cos - b sin, b cos + a sin) for the pairs of every head: neighbouring
 *              values, or value i of each half
 * Shapes       q [T, H, R] and k [T, R] bf16 or fp32, tokens and heads any stride apart; positions
 *              [T] int64 or int32; table [rows, R] fp32 or bf16: R / 2 cosines, then R / 2 sines
 * Shared mem   none
 * Roles        A thread has 4 pairs of 4 neighbouring heads of a token: of bf16, a vector of 16
 *              bytes per head, or with halves two of 8. It loads all of them before it uses the
 *              first, and the angles once. The key is the head behind the queries. Neighbouring
 *              lanes have neighbouring pairs. No barriers.
 * Roofline     Memory binds: 2 bytes read and 2 written per value of bf16; H 128, R 64, T 8192: 270
 *              MB, 63 us at 4.3 TB/s. Angles come from the cache: a token's are read by H / 4
 *              threads per pair.
 * Numerics     fp32; products and sums are rounded one by one, then once to the type of the heads:
 *              every byte is the CPU's. A value that becomes NaN is the positive quiet NaN. A token
 *              with a position that the table lacks is copied.
 */
#include "cuda/rope/rotate_heads.cuh"

namespace {

enum { BLOCK_THREADS = 256 };

template <int TYPE, bool IS_NEOX, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS) apply_kernel(const __grid_constant__ apply_args args)
{
    ptx_wait_for_grids();
    const int64_t step = (int64_t)gridDim.x * BLOCK_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x; i < args.num_threads;
         i += step) {
        rotate_part<TYPE, IS_NEOX, ALIGNED>(args, i);
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_apply_rope(const smla_apply_rope_params *params, const smla_cuda_device *)
{
    const apply_args args = make_apply_args(*params);
    /* [is bf16][is neox][is aligned] */
    static const smla_kernel<apply_args> kernels[2][2][2] = {
        {{apply_kernel<SMLA_FLOAT_FP32, false, false>, apply_kernel<SMLA_FLOAT_FP32, false, true>},
         {apply_kernel<SMLA_FLOAT_FP32, true, false>, apply_kernel<SMLA_FLOAT_FP32, true, true>}},
        {{apply_kernel<SMLA_FLOAT_BF16, false, false>, apply_kernel<SMLA_FLOAT_BF16, false, true>},
         {apply_kernel<SMLA_FLOAT_BF16, true, false>, apply_kernel<SMLA_FLOAT_BF16, true, true>}},
    };
    return smla_launch(
        kernels[params->type == SMLA_FLOAT_BF16][params->is_neox][are_vectors(*params)], args,
        smla_count_parts(args.num_threads, BLOCK_THREADS), BLOCK_THREADS, 0, params->call.stream);
}
