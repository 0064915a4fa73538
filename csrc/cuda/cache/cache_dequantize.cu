/* cache_dequantize.cu: dequantises whole caches.
 *
 * Computes     every row of a cache, as bf16 or fp32
 * Shapes       out [pages, block_size, D] bf16 or fp32, pages and rows any stride apart; a cache
 *              row as kv_format.h draws it
 * Shared mem   none
 * Roles        A warp moves chunks of CHUNK_ROWS rows and reads all rows of a chunk before it
 *              writes the first. Lane i finds row i. Every lane moves 16 bytes of the wider side at
 *              a time, so that one instruction of the warp covers consecutive bytes. No barriers.
 * Roofline     Memory. fp8_ds_mla -> bf16 moves 656 + 1152 bytes per token, 0.42 ns at 4.3 TB/s,
 *              and reached 94 % of that rate on an H200 with a million tokens (2026-11-20, commit
 *              f9bb2e3, `python -m sparse_mla bench --device cuda --only bytes`).
 * Numerics     Products are fp32 and rounded once. Every number equals the CPU's, and a NaN byte
 *              keeps its sign.
 * Source       the row formats of vLLM and FlashMLA.
 */
#include "core/params_cache.h"
#include "cuda/cache/row_decoder.cuh"

namespace {

struct dequantize_args {
    smla_dequantize_params p;
    smla_divisor block_size;
    row_offsets offsets;
};

template <int ROW, int OUT, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, ALIGNED ? READ_BLOCKS_PER_SM : FEW_BLOCKS_PER_SM)
    dequantize_kernel(const __grid_constant__ dequantize_args args)
{
    ptx_wait_for_grids();
    constexpr int ELEMENT_BYTES = OUT == SMLA_FLOAT_FP32 ? 4 : 2;
    const smla_dequantize_params &p = args.p;
    const float kv_scale = smla_load_given_scale(p.kv_scale);
    const int64_t num_slots = p.kv.num_pages * p.kv.block_size;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t warp = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; warp * CHUNK_ROWS < num_slots; warp += num_warps) {
        const int64_t slot = warp * CHUNK_ROWS + lane_idx();
        smla_kv_token source = find_no_row();
        const uint8_t *target = nullptr;
        if (lane_idx() < CHUNK_ROWS && slot < num_slots) {
            const int64_t page = smla_divide(slot, args.block_size);
            const int64_t offset = slot - page * p.kv.block_size;
            const int64_t at = page * p.out_stride_page + offset * p.out_stride_token;
            source = smla_kv_token_at(&p.kv, page, offset);
            target = (const uint8_t *)p.out + at * ELEMENT_BYTES;
        }
        move_chunk<ROW, OUT, ALIGNED>(source, target, args.offsets, kv_scale);
    }
}

/* The kernels of a format: for bf16 and for fp32, each for any rows and for aligned ones. */
template <int ROW, bool HAS_ALIGNED = false>
constexpr format_kernels<dequantize_args, 4>
serve()
{
    return {(smla_kv_row_number)ROW,
            {dequantize_kernel<ROW, SMLA_FLOAT_BF16, false>,
             dequantize_kernel<ROW, SMLA_FLOAT_BF16, HAS_ALIGNED>,
             dequantize_kernel<ROW, SMLA_FLOAT_FP32, false>,
             dequantize_kernel<ROW, SMLA_FLOAT_FP32, HAS_ALIGNED>}};
}

const format_kernels<dequantize_args, 4> dequantize_table[] = {
    serve<SMLA_ROW_FP8_DS_MLA, true>(),
    serve<SMLA_ROW_BFLOAT16, true>(),
    serve<SMLA_ROW_BFLOAT16_512, true>(),
    serve<SMLA_ROW_FP8_V4>(),
    serve<SMLA_ROW_FP8_E4M3>(),
    serve<SMLA_ROW_FP8_INDEX>(),
    serve<SMLA_ROW_MXFP4_INDEX>(),
    serve<SMLA_ROW_FP8_V41>(),
    serve<SMLA_ROW_FP4_V41>(),
    serve<SMLA_ROW_FP8_NOPE>(),
    serve<SMLA_ROW_FP8_E4M3_576>(),
};

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_dequantize_kv_cache(const smla_dequantize_params *p, const smla_cuda_device *)
{
    const int64_t element_bytes = p->out_type == SMLA_FLOAT_FP32 ? 4 : 2;
    const bool is_aligned =
        has_aligned_rows(p->kv) &&
        smla_are_rows_aligned(p->out, p->out_stride_page, p->out_stride_token, 16, element_bytes);
    const dequantize_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv)};
    const int64_t num_slots = p->kv.num_pages * p->kv.block_size;
    const int choice = 2 * (p->out_type == SMLA_FLOAT_FP32) + is_aligned;
    return smla_launch(find_kernel(dequantize_table, p->kv, choice), args,
                       smla_count_parts(num_slots, CHUNK_ROWS * BLOCK_WARPS), BLOCK_THREADS, 0,
                       p->call.stream);
}
