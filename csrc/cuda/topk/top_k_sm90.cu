/* top_k_sm90.cu: top_k_per_row on Hopper, with clusters of CTAs that share a row. The kernel and
 * its seven headings are in top_k.cuh.
 */
#include "cuda/topk/top_k_launch.cuh"

namespace {

/* The size of the clusters is a constant of the kernel, so the launch needs no attribute for it. */
template <bool IS_BF16, int CTAS>
__global__ void
__cluster_dims__(CTAS, 1, 1) __launch_bounds__(BLOCK_THREADS, 2)
    top_k_cluster_kernel(const __grid_constant__ top_k_args args)
{
    select_rows<IS_BF16, CTAS>(args);
}

template <int CTAS>
cudaError_t
launch_clusters(const smla_top_k_params *p)
{
    return p->is_bf16 ? launch_top_k<top_k_cluster_kernel<true, CTAS>>(p, CTAS)
                      : launch_top_k<top_k_cluster_kernel<false, CTAS>>(p, CTAS);
}

} // namespace

cudaError_t
smla_cuda_launch_top_k_clusters(const smla_top_k_params *p, int ctas)
{
    switch (ctas) {
    case 2: return launch_clusters<2>(p);
    case 4: return launch_clusters<4>(p);
    default: return launch_clusters<8>(p);
    }
}
