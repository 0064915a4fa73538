/* compressor_sm90.cu: DeepSeek V4's compressor on Hopper, with clusters of CTAs that share a long
 * group. The kernel and its seven headings are in compressor.cuh.
 */
#include "cuda/norm/compressor.cuh"
#include "cuda/norm/compressor_clusters.h"

namespace {

enum { CLUSTER_THREADS = SMLA_V4_HEAD_DIM / CLUSTER_CTAS }; /* four slices of 4 channels each */

/* The compiler knows the size of the clusters, so the launch needs no attribute for it. */
template <int ROW, bool SAVES>
__global__ void
__cluster_dims__(CLUSTER_CTAS, 1, 1) __launch_bounds__(CLUSTER_THREADS, 2)
    compress_cluster_kernel(const __grid_constant__ compress_args args)
{
    compress_runs<ROW, CLUSTER_CTAS, SAVES, true, LONG_PAIRS>(args);
}

struct cluster_row {
    smla_kv_row_number format;
    void (*kernels[2])(compress_args); /* [saves] */
};

template <int ROW>
constexpr cluster_row
serve(smla_kv_row_number format = (smla_kv_row_number)ROW)
{
    return {format, {compress_cluster_kernel<ROW, false>, compress_cluster_kernel<ROW, true>}};
}

const cluster_row cluster_rows[] = {
    serve<SMLA_ROW_FP8_V4>(),   serve<SMLA_ROW_BFLOAT16_512>(),
    serve<SMLA_ROW_FP8_E4M3>(), serve<SMLA_ROW_FP8_V41>(),
    serve<SMLA_ROW_FP4_V41>(),  serve<SMLA_ROW_FP8_V41>(SMLA_ROW_FP8_V41_SPLIT),
    serve<SMLA_ROW_FP8_NOPE>(), serve<SMLA_ROW_FP4_V41>(SMLA_ROW_FP4_V41_SPLIT),
};

} /* namespace */

cudaError_t
smla_cuda_launch_compress_clusters(const smla_compress_params *params,
                                   const smla_cuda_device *device)
{
    for (const cluster_row &row : cluster_rows) {
        if (row.format == params->insert.kv.format->number) {
            return launch_compress(row.kernels[params->states.ape != nullptr], params, device,
                                   CLUSTER_THREADS, CLUSTER_CTAS);
        }
    }
    return cudaErrorInvalidDeviceFunction;
}
