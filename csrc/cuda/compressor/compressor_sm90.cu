/* compressor_sm90.cu: the compressor's long groups of 512 channels on Hopper, where two CTAs divide
 * the channels of a group. The kernels and their seven headings are in compressor.cuh.
 */
#include "cuda/compressor/compressor.cuh"

namespace {

enum {
    PARTS = 2,
    PART_PAIRS = 2, /* pairs of states that a thread loads ahead */
};

/* The size of the clusters is a constant of the kernel, so the launch needs no attribute for it. */
template <int ROW, bool SAVES, bool ALIGNED>
__global__ void
__cluster_dims__(PARTS, 1, 1) __launch_bounds__(smla_row<ROW>::INFO.head_dim / PARTS, 2)
    compress_parts_kernel(const __grid_constant__ compress_args args)
{
    compress_runs<ROW, SAVES, ALIGNED, PART_PAIRS, PARTS>(args);
}

/* The kernels of a format: [saves][is aligned]. */
template <int ROW>
constexpr format_kernels<compress_args, 4>
serve()
{
    return {(smla_kv_row_number)ROW,
            {compress_parts_kernel<ROW, false, false>, compress_parts_kernel<ROW, false, true>,
             compress_parts_kernel<ROW, true, false>, compress_parts_kernel<ROW, true, true>}};
}

const format_kernels<compress_args, 4> parts_table[] = {
    serve<SMLA_ROW_FP8_V4>(),  serve<SMLA_ROW_BFLOAT16_512>(), serve<SMLA_ROW_FP8_E4M3>(),
    serve<SMLA_ROW_FP8_V41>(), serve<SMLA_ROW_FP4_V41>(),      serve<SMLA_ROW_FP8_NOPE>(),
};

} /* namespace */

cudaError_t
smla_cuda_launch_compress_in_parts(const smla_compress_params *params,
                                   const smla_cuda_device *device, bool is_aligned)
{
    const int choice = 2 * (params->states.ape != nullptr) + is_aligned;
    return launch_compress(find_kernel(parts_table, params->insert.kv, choice), params, device,
                           (int)params->dim / PARTS, PARTS);
}
