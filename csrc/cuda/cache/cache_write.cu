/* cache_write.cu: writes tokens into the cache, quantised on the way.
 *
 * Computes     nope, rope -> bf16; fp8_ds_mla: per tile of 128 values of nope
 *              scale = max(amax / 448, FLT_MIN), byte = e4m3(x / scale); fp8_token: all 512 values
 *              are one tile; fp8_e4m3 of 576 values:
 *              byte = e4m3(x / kv_scale), for rope too
 * Shapes       kv_c [T, 512], k_pe [T, 64] bf16, fp16 or fp32, rows any stride apart; slot_mapping
 *              [T] int32 or int64, any stride; a cache row as kv_format.h draws it
 * Shared mem   none
 * Roles        A warp writes a run of 1 to 4 tokens, a lane 16 bytes of the wider side at a time:
 *              one instruction of the warp covers consecutive bytes. The next token's loads are in
 *              flight meanwhile. Lane i finds the row of token i. No barriers.
 * Roofline     Memory. Bytes per token, floor at 4.3 TB/s, and the share of that rate reached on an
 *              H200 with a million tokens, pages shuffled | slots shuffled (2026-11-20, commit
 *              f9bb2e3, `python -m sparse_mla bench --device cuda --only bytes`):
 *                bf16 -> fp8_ds_mla   1160 +  656   0.42 ns   92 | 82 %
 *                bf16 -> bfloat16     1160 + 1152   0.54 ns   89 | 87 %
 *              A row of fp8_ds_mla is 20.5 sectors. If its neighbour is not written soon after it,
 *              the sector that both share is read in order to complete it, once per row (ncu: 38.98
 *              million sectors read, not 38.01). So shuffled slots are slower with any number of
 *              warps tried. Loads that L1 or L2 evicts first reach 2 to 14 points less.
 * Numerics     Every byte is that of the CPU's write, which divides; smla_scale_of_tile and
 *              smla_quantize_moderate_bf16x4 say why. A token whose slot is outside the cache is
 *              skipped. A token yields to a token of the same slot among the 31 after it. If two
 *              such tokens are farther apart, their row may hold parts of both.
 * Source       concat_and_cache_mla of vLLM, for the format.
 */
#include "cuda/cache/write_token.cuh"

namespace {

enum { WRITE_BLOCKS_PER_SM = 4 };

/* Blocks per SM for which registers must suffice. On sm_120 one block more would spill
 * registers. */
template <int TYPE, bool ALIGNED>
constexpr int
min_write_blocks()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
    constexpr int most = WRITE_BLOCKS_PER_SM - 1;
#else
    constexpr int most = WRITE_BLOCKS_PER_SM;
#endif
    return ALIGNED && TYPE != SMLA_FLOAT_FP32 ? most : FEW_BLOCKS_PER_SM;
}

template <int TYPE, int ROW, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, min_write_blocks<TYPE, ALIGNED>())
    write_kernel(const __grid_constant__ write_args args)
{
    ptx_wait_for_grids();
    const smla_cache_write_params &p = args.p;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    const float kv_scale = smla_row<ROW>::HAS_ROPE_CODES ? smla_load_given_scale(p.kv_scale) : 1.0f;
    int64_t run = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; run * args.run_tokens < p.num_tokens; run += num_warps) {
        const int64_t first = run * args.run_tokens;
        const int64_t left = p.num_tokens - first;
        const int num_tokens = left < args.run_tokens ? (int)left : args.run_tokens;
        /* Read every token, even one that is not written, so that its loads do not wait for the
         * slot. */
        given_part<TYPE> next;
        given_pointers pointers = find_token<TYPE>(p, first);
        load_next<TYPE, ROW, ALIGNED>(p, &pointers, &next);
        const int64_t slot = find_slots(p, first, num_tokens);
        const uint8_t *const target = find_slot_row(p.kv, args.block_size, slot).row;
#pragma unroll 2
        for (int i = 0; i < num_tokens; i++) {
            const given_part<TYPE> part = next;
            if (i + 1 < num_tokens) {
                load_next<TYPE, ROW, ALIGNED>(p, &pointers, &next);
            }
            uint8_t *const row = shuffle_pointer(target, i);
            if (row != nullptr) {
                write_token<TYPE, ROW, ALIGNED>(part, args.offsets, kv_scale, row);
            }
        }
    }
}

/* The kernels of a format: for bf16, fp16 and fp32, each for any rows and for aligned ones. */
template <int ROW>
constexpr format_kernels<write_args, 6>
serve()
{
    return {(smla_kv_row_number)ROW,
            {write_kernel<SMLA_FLOAT_BF16, ROW, false>, write_kernel<SMLA_FLOAT_BF16, ROW, true>,
             write_kernel<SMLA_FLOAT_FP16, ROW, false>, write_kernel<SMLA_FLOAT_FP16, ROW, true>,
             write_kernel<SMLA_FLOAT_FP32, ROW, false>, write_kernel<SMLA_FLOAT_FP32, ROW, true>}};
}

const format_kernels<write_args, 6> write_table[] = {
    serve<SMLA_ROW_FP8_DS_MLA>(),   serve<SMLA_ROW_BFLOAT16>(),  serve<SMLA_ROW_BFLOAT16_512>(),
    serve<SMLA_ROW_FP8_E4M3_576>(), serve<SMLA_ROW_FP8_TOKEN>(),
};

/* The operators differ in their arguments, not in the rows: the format alone chooses the kernel. */
cudaError_t
write_any_row(const smla_cache_write_params *p)
{
    const int choice = 2 * (p->input_type - SMLA_FLOAT_BF16) + has_aligned_tokens(*p);
    const cudaError_t code = launch_writes(find_kernel(write_table, p->kv, choice), p);
    return code == SMLA_NO_KERNEL ? smla_cuda_insert_keys(p) : code;
}

} /* namespace */

/* ---- Launchers ----------------------------------------------------------------------------- */

cudaError_t
smla_cuda_launch_concat_and_cache_mla(const smla_cache_write_params *p, const smla_cuda_device *)
{
    return write_any_row(p);
}

cudaError_t
smla_cuda_launch_quantize_and_insert_k_cache(const smla_cache_write_params *p,
                                             const smla_cuda_device *)
{
    return write_any_row(p);
}

cudaError_t
smla_cuda_launch_indexer_k_quant_and_cache(const smla_cache_write_params *p,
                                           const smla_cuda_device *)
{
    return write_any_row(p);
}
