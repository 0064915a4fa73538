/* scaled_quantize_sm90.cu: quantisation to e4m3 of groups that are too large for one block and few,
 * by a cluster of blocks per group, in one launch. scaled_quantize.cu has the other groups.
 *
 * Computes     amax = max(max |x|, 1e-12),  out = e4m3(x * (448 / amax)),  descale = amax / 448
 * Shapes       as scaled_quantize.cu; rows are aligned to 16 bytes, and groups hold whole units
 * Shared mem   the maxima of 16 warps and of the block, 68 bytes
 * Roles        8 blocks of 512 threads have a group: a thread keeps up to four units in registers,
 *              from the load to the store. Each block reads the other blocks' maxima.
 *              Barriers of the cluster: maxima are written; maxima are read, because a block's
 *              memory ends with it.
 * Roofline     launches: 64 tokens of 1536 bf16 are 0.3 MB. Three launches fewer than parts take.
 * Numerics     as scaled_quantize.cu, byte for byte: a maximum does not depend on the order.
 * Source       ours
 */
#include "cuda/projection/scaled_quantize.cuh"

namespace {

template <int TYPE, int COUNT>
__global__ void
__cluster_dims__(CLUSTER_BLOCKS) __launch_bounds__(MOST_THREADS)
    quantize_cluster(const __grid_constant__ scaled_args args)
{
    __shared__ float block_maximum;
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    const int rank = (int)ptx_cluster_rank();
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const group_place group = find_group(args, blockIdx.x / CLUSTER_BLOCKS);
    unit_words<TYPE, COUNT> held[HELD] = {};
    const auto unit_of = [=](int k) {
        return (k * CLUSTER_BLOCKS + rank) * MOST_THREADS + threadIdx.x;
    };
    float amax = max_of_block(load_held(args, group, unit_of, held));
    if (threadIdx.x == 0) {
        block_maximum = amax;
    }
    ptx_cluster_sync(); /* the blocks' maxima are written */
    const uint32_t there =
        ptx_cluster_address(ptx_shared_address(&block_maximum), (uint32_t)(lane % CLUSTER_BLOCKS));
    amax = max_of_lanes(ALL_LANES, smla_bits_float(ptx_load_cluster_4(there)));
    ptx_cluster_arrive_release();
    const float factor = factor_of(amax);
    if (rank == 0 && threadIdx.x == 0) {
        store_descale(args.p, group.row_group, group.column_group, amax);
    }
    store_held(args, group, unit_of, held, factor);
    ptx_cluster_wait(); /* the blocks' maxima are read */
}

} /* namespace */

cudaError_t
smla_cuda_launch_scaled_quantize_sm90(const scaled_args *args)
{
    static const smla_kernel<scaled_args> kernels[] = {
        quantize_cluster<SMLA_FLOAT_BF16, 8>,
        quantize_cluster<SMLA_FLOAT_FP16, 8>,
        quantize_cluster<SMLA_FLOAT_FP32, 4>,
    };
    return smla_launch(kernels[args->p.type - SMLA_FLOAT_BF16], *args,
                       args->num_groups * CLUSTER_BLOCKS, MOST_THREADS, 0, args->p.call.stream,
                       true);
}
