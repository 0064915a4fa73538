/* top_k_resident_sm90.cu: top_k_per_row on Hopper, of rows whose keys are resident in a cluster.
 * The kernel and its seven headings are in resident_select.cuh. */
#include "cuda/topk/resident_select.cuh"

namespace {

/* The size of the clusters is a constant of the kernel, so the launch needs no attribute for it. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__global__ void
__cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
    top_k_resident_kernel(const __grid_constant__ top_k_args args)
{
    select_resident_rows<IS_BF16, CTAS, THREADS, PARTS>(args);
}

/* How many clusters run at once. The SMs of a cluster are neighbours, and some SMs may be missing,
 * so only the driver knows. A cluster that waits for another would double the time. */
cudaError_t
count_clusters(const void *kernel, int ctas, int threads, int bytes, int *clusters)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)ctas);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = (size_t)bytes;
    return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
cudaError_t
launch_resident(const smla_top_k_params *p)
{
    static uint64_t allowed;
    static int most_clusters; /* clusters of the first device; other devices are alike */
    const int bytes =
        (int)sizeof(resident_memory) + THREADS * MOST_KEYS * (int)logit_type<IS_BF16>::BYTES;
    void (*const kernel)(top_k_args) = top_k_resident_kernel<IS_BF16, CTAS, THREADS, PARTS>;
    cudaError_t code =
        allow_shared_bytes((const void *)kernel, bytes, p->call.stream.device_id, &allowed);
    int clusters = __atomic_load_n(&most_clusters, __ATOMIC_RELAXED);
    if (code == cudaSuccess && clusters == 0) {
        code = count_clusters((const void *)kernel, CTAS, THREADS, bytes, &clusters);
        __atomic_store_n(&most_clusters, clusters, __ATOMIC_RELAXED);
    }
    if (code != cudaSuccess || p->num_tokens == 0) {
        return code;
    }
    /* Give every cluster the same number of rows. */
    const int64_t rounds = smla_count_parts(p->num_tokens, clusters > 0 ? clusters : 1);
    return smla_launch(kernel, make_top_k_args(p, 0),
                       smla_count_parts(p->num_tokens, rounds) * CTAS, THREADS, bytes,
                       p->call.stream, CTAS > 1);
}

template <bool IS_BF16, int PARTS>
cudaError_t
launch_ctas(const smla_top_k_params *p, const smla_resident_plan &plan)
{
    if (plan.threads == 512) {
        return launch_resident<IS_BF16, 1, 512, PARTS>(p);
    }
    switch (plan.ctas) {
    case 1: return launch_resident<IS_BF16, 1, 1024, PARTS>(p);
    case 2: return launch_resident<IS_BF16, 2, 1024, PARTS>(p);
    case 4: return launch_resident<IS_BF16, 4, 1024, PARTS>(p);
    default: return launch_resident<IS_BF16, 8, 1024, PARTS>(p);
    }
}

template <bool IS_BF16>
cudaError_t
launch_parts(const smla_top_k_params *p, const smla_resident_plan &plan)
{
    return plan.parts == 1   ? launch_ctas<IS_BF16, 1>(p, plan)
           : plan.parts == 2 ? launch_ctas<IS_BF16, 2>(p, plan)
                             : launch_resident<IS_BF16, SMLA_MAX_ROW_CTAS, 1024, 3>(p);
}

} // namespace

cudaError_t
smla_cuda_launch_top_k_resident(const smla_top_k_params *p, smla_resident_plan plan)
{
    return p->is_bf16 ? launch_parts<true>(p, plan) : launch_parts<false>(p, plan);
}
