/* partial_states.cu: saves the states of tokens for DeepSeek V4's compressor.
 *
 * Computes     state row of a slot = kv, then score + ape[position % r]
 * Shapes       kv and score [T, c D] fp32 or bf16, ape [r, c D] fp32, state rows [2 c D] fp32, any
 *              strides; positions and slot_mapping [T] int32 or int64
 * Shared mem   none
 * Roles        A warp saves 128 channels of a token: the values and the scores. No barriers.
 * Roofline     Memory. 16 bytes per value of kv in fp32, 12 in bf16; ape comes from L2.
 * Numerics     One fp32 addition per score; a NaN that it gives is the positive quiet NaN. A token
 *              with a bad slot or a negative position is skipped. Of tokens with one slot any may
 *              win, and their row may hold parts of several.
 * Source       The compressor kernels of DeepSeek V4 in vLLM, for the operator.
 */
#include "cuda/compressor/partial_states.cuh"

namespace {

enum { SAVE_THREADS = 256 };

struct save_args {
    smla_partial_states_params p;
    smla_divisor ratio;
    smla_divisor block_size;
    smla_divisor num_pieces; /* pieces per token */
};

/* Saves states; a work item is one piece of a token, for one warp. */
template <bool ALIGNED>
__global__ void
__launch_bounds__(SAVE_THREADS) save_kernel(const __grid_constant__ save_args args)
{
    ptx_wait_for_grids();
    const smla_partial_states_params &p = args.p;
    const int64_t num_work_items = p.rows.num_tokens * args.num_pieces.divisor;
    const int64_t step = (int64_t)gridDim.x * (SAVE_THREADS / SMLA_WARP_LANES);
    int64_t work =
        (int64_t)blockIdx.x * (SAVE_THREADS / SMLA_WARP_LANES) + threadIdx.x / SMLA_WARP_LANES;
    for (; work < num_work_items; work += step) {
        const int64_t token = smla_divide(work, args.num_pieces);
        const int64_t piece = work - token * args.num_pieces.divisor;
        const int64_t position = position_of(p, token);
        const int64_t slot = valid_slot(p.rows, token);
        if (slot >= 0 && position >= 0) {
            save_channels<ALIGNED>(p, token, index_in_group(position, args.ratio),
                                   (float *)row_of_slot(p.rows.kv, args.block_size, slot).row,
                                   piece * PIECE + lane_idx() * CHANNELS);
        }
    }
}

} /* namespace */

cudaError_t
smla_cuda_launch_save_partial_states(const smla_partial_states_params *params,
                                     const smla_cuda_device *)
{
    const save_args args = {*params, smla_make_divisor(params->ratio),
                            smla_make_divisor(params->rows.kv.block_size),
                            smla_make_divisor(params->width / PIECE)};
    const int64_t num_work_items = params->rows.num_tokens * args.num_pieces.divisor;
    return smla_launch(has_aligned_states(*params) ? save_kernel<true> : save_kernel<false>, args,
                       smla_count_parts(num_work_items, SAVE_THREADS / SMLA_WARP_LANES),
                       SAVE_THREADS, 0, params->call.stream);
}
