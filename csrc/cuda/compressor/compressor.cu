/* compressor.cu: the table of DeepSeek V4's compressor, and its launcher. The kernels and their
 * seven headings are in compressor.cuh.
 */
#include "cuda/compressor/compressor.cuh"

namespace {

/* The threads of a CTA for short groups of `dim` channels: few threads, so that an SM holds many
 * CTAs. */
constexpr int
short_threads(int dim)
{
    return dim / CHANNELS;
}

template <int ROW, bool SAVES, bool ALIGNED>
__global__ void
__launch_bounds__(short_threads(smla_row<ROW>::INFO.head_dim),
                  SHORT_SM_THREADS / short_threads(smla_row<ROW>::INFO.head_dim))
    compress_short_kernel(const __grid_constant__ compress_args args)
{
    compress_runs<ROW, SAVES, ALIGNED, 0>(args);
}

template <int ROW, bool SAVES, bool ALIGNED>
__global__ void
__launch_bounds__(smla_row<ROW>::INFO.head_dim, 1)
    compress_long_kernel(const __grid_constant__ compress_args args)
{
    constexpr bool IS_SMALL = smla_row<ROW>::INFO.head_dim == SMLA_INDEX_HEAD_DIM;
    compress_runs<ROW, SAVES, ALIGNED, IS_SMALL ? LONG_PAIRS : 1>(args);
}

/* ---- Table --------------------------------------------------------------------------------- */

/* The kernels of a format: [is long][saves][is aligned]. */
template <int ROW>
constexpr format_kernels<compress_args, 8>
serve()
{
    return {(smla_kv_row_number)ROW,
            {compress_short_kernel<ROW, false, false>, compress_short_kernel<ROW, false, true>,
             compress_short_kernel<ROW, true, false>, compress_short_kernel<ROW, true, true>,
             compress_long_kernel<ROW, false, false>, compress_long_kernel<ROW, false, true>,
             compress_long_kernel<ROW, true, false>, compress_long_kernel<ROW, true, true>}};
}

const format_kernels<compress_args, 8> compress_table[] = {
    serve<SMLA_ROW_FP8_V4>(),    serve<SMLA_ROW_BFLOAT16_512>(), serve<SMLA_ROW_FP8_E4M3>(),
    serve<SMLA_ROW_FP8_V41>(),   serve<SMLA_ROW_FP4_V41>(),      serve<SMLA_ROW_FP8_NOPE>(),
    serve<SMLA_ROW_FP8_INDEX>(), serve<SMLA_ROW_MXFP4_INDEX>(),
};

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_compress_norm_rope_store(const smla_compress_params *params,
                                          const smla_cuda_device *device)
{
    const int64_t num_states = params->states.width / params->dim * params->states.ratio;
    const bool is_long = num_states > SHORT_STATES;
    const bool is_bf16 = params->insert.kv.format->nope_type == SMLA_NOPE_BF16;
    const bool aligned =
        has_aligned_states(params->states) && (!is_bf16 || has_aligned_rows(params->insert.kv));
    if (is_long && params->dim == SMLA_V4_HEAD_DIM && smla_cuda_is_hopper(device)) {
        return smla_cuda_launch_compress_in_parts(params, device, aligned);
    }
    const int num_threads = is_long ? (int)params->dim : short_threads((int)params->dim);
    const int choice = 4 * is_long + 2 * (params->states.ape != nullptr) + aligned;
    return launch_compress(find_kernel(compress_table, params->insert.kv, choice), params, device,
                           num_threads, 1);
}
