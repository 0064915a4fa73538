/* cache_read.cu: gathers the rows of requests from the cache.
 *
 * Computes     out[workspace_start + p] = bf16(row of position seq_start + p) for p < seq_len,
 *              request by request; or out[request][offset + p], for the last positions of a request
 * Shapes       block_table [R, W], seq_lens, workspace_starts, seq_starts [R] int32, any strides;
 *              out [., 576] bf16 or fp32, rows any stride apart; a cache row as kv_format.h draws
 *              it
 * Shared mem   gather: 16 KiB, the running count of chunks of 2048 requests, and 64 bytes of sums.
 *              dequantize: none
 * Roles        A warp moves chunks of CHUNK_ROWS rows and reads all rows of a chunk before it
 *              writes the first. Lane i finds row i. Every lane moves 16 bytes of the wider side at
 *              a time, so that one instruction of the warp covers consecutive bytes. gather: a
 *              chunk belongs to one request, and chunks are dealt out in turn to all warps of the
 *              grid. The warps find theirs by counting, because the host does not know the lengths.
 *              Barriers (__syncthreads): sums written | counts written | counts used.
 * Roofline     Memory. Bytes per token, floor at 4.3 TB/s, and the share of that rate reached on an
 *              H200 with a million tokens, pages shuffled (2026-11-20, commit f9bb2e3,
 *              `python -m sparse_mla bench --device cuda --only bytes`):
 *                gather fp8_ds_mla               656 + 1152   0.42 ns   88 %
 *                gather bfloat16                1152 + 1152   0.54 ns   92 %
 *                dequantize fp8_ds_mla -> bf16   656 + 1152   0.42 ns   94 %
 * Numerics     Products are fp32 and rounded once. Every number equals the CPU's, and a NaN byte
 *              keeps its sign. gather writes no row outside of out. It writes zeros for a position
 *              without a page: before the first, beyond the table, or with a page number that the
 *              cache does not have. Output rows that two requests share hold parts of either.
 * Source       cp_gather_and_upconvert_fp8_kv_cache of vLLM, for what is computed. The schedule
 *              that needs no lengths on the host is ours.
 */
#include "core/params_cache.h"
#include "cuda/cache/row_decoder.cuh"

namespace {

enum {
    SEGMENT_REQS = 2048, /* requests whose chunks are counted together */
    GATHER_CHUNKS = 4,   /* chunks per warp in grids of more than one round */
};

/* ---- Gather -------------------------------------------------------------------------------- */

struct gather_args {
    smla_gather_params p;
    smla_divisor block_size;
    row_offsets offsets;
};

/* The positions of a request that have rows in out: first ... first + count - 1. */
struct gather_range {
    int64_t workspace_start;
    int64_t first;
    int64_t count;
};

__device__ __forceinline__ gather_range
find_range(const smla_gather_params &p, int64_t req)
{
    const int64_t seq_len = p.gather_lens == nullptr
                                ? __ldg(p.seq_lens + req * p.seq_lens_stride)
                                : __ldg(p.gather_lens + req * p.gather_lens_stride);
    const int64_t start = p.workspace_starts == nullptr
                              ? p.offset
                              : __ldg(p.workspace_starts + req * p.workspace_starts_stride);
    const int64_t first = start < 0 ? -start : 0;
    const int64_t end = seq_len < p.out_tokens - start ? seq_len : p.out_tokens - start;
    return {start, first, end > first ? end - first : 0};
}

/* Sets ends[i] to the number of chunks of the requests first_req ... first_req + i. */
__device__ __forceinline__ void
count_chunks(const smla_gather_params &p, int64_t first_req, int num_reqs, int64_t *ends,
             int64_t *warp_sums)
{
    const int lane = lane_idx();
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const int share = (num_reqs + BLOCK_THREADS - 1) / BLOCK_THREADS;
    const int begin = min((int)threadIdx.x * share, num_reqs);
    const int end = min(begin + share, num_reqs);
    int64_t sum = 0;
    for (int i = begin; i < end; i++) {
        sum += (find_range(p, first_req + i).count + CHUNK_ROWS - 1) / CHUNK_ROWS;
        ends[i] = sum;
    }
    int64_t before = smla_scan_lanes(sum, lane);
    if (lane == SMLA_WARP_LANES - 1) {
        warp_sums[warp] = before;
    }
    __syncthreads(); /* the warps' sums are written */
    before -= sum;
#pragma unroll
    for (int i = 0; i < BLOCK_WARPS; i++) {
        before += i < warp ? warp_sums[i] : 0;
    }
    for (int i = begin; i < end; i++) {
        ends[i] += before;
    }
    __syncthreads(); /* the counts are written */
}

/* The first request whose chunks end after `chunk`. */
__device__ __forceinline__ int
find_request(const int64_t *ends, int num_reqs, int64_t chunk)
{
    int low = 0;
    int high = num_reqs - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] > chunk) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* The first position of a request that is gathered. */
__device__ __forceinline__ int64_t
find_seq_start(const smla_gather_params &p, int64_t req)
{
    if (p.gather_lens != nullptr) {
        return (int64_t)__ldg(p.seq_lens + req * p.seq_lens_stride) -
               __ldg(p.gather_lens + req * p.gather_lens_stride);
    }
    return p.seq_starts == nullptr ? 0 : __ldg(p.seq_starts + req * p.seq_starts_stride);
}

/* The cache row of a request's position, or no_row. */
__device__ __forceinline__ smla_kv_token
find_position(const gather_args &args, int64_t req, int64_t position)
{
    const smla_gather_params &p = args.p;
    if (position < 0) {
        return find_no_row();
    }
    const int64_t block = smla_divide(position, args.block_size);
    if (block >= p.num_blocks) {
        return find_no_row();
    }
    const int64_t page =
        __ldg(p.block_table + req * p.block_table_stride_req + block * p.block_table_stride_block);
    if (page < 0 || page >= p.kv.num_pages) {
        return find_no_row();
    }
    return smla_kv_token_at(&p.kv, page, position - block * p.kv.block_size);
}

template <int ROW, bool ALIGNED>
__device__ __forceinline__ void
gather_chunk(const gather_args &args, int64_t req, int64_t chunk, float kv_scale)
{
    const smla_gather_params &p = args.p;
    const gather_range range = find_range(p, req);
    const int64_t seq_start = find_seq_start(p, req);
    const int64_t at = chunk * CHUNK_ROWS + lane_idx();
    const int64_t position = range.first + at;
    smla_kv_token source = find_no_row();
    const uint8_t *target = nullptr;
    if (lane_idx() < CHUNK_ROWS && at < range.count) {
        source = find_position(args, req, seq_start + position);
        target = (const uint8_t *)(p.out + req * p.out_stride_req +
                                   (range.workspace_start + position) * p.out_stride_token);
    }
    move_chunk<ROW, SMLA_FLOAT_BF16, ALIGNED>(source, target, args.offsets, kv_scale);
}

template <int ROW, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, ALIGNED ? READ_BLOCKS_PER_SM : FEW_BLOCKS_PER_SM)
    gather_kernel(const __grid_constant__ gather_args args)
{
    ptx_wait_for_grids();
    __shared__ int64_t ends[SEGMENT_REQS];
    __shared__ int64_t warp_sums[BLOCK_WARPS];
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    const float kv_scale = smla_load_given_scale(args.p.kv_scale);
    /* Give neighbouring chunks to different CTAs, so that all CTAs take part in the last, partial
     * round. */
    int64_t chunk = (int64_t)(threadIdx.x / SMLA_WARP_LANES) * gridDim.x + blockIdx.x;
    for (int64_t first_req = 0; first_req < args.p.num_reqs; first_req += SEGMENT_REQS) {
        const int64_t left = args.p.num_reqs - first_req;
        const int num_reqs = left < SEGMENT_REQS ? (int)left : SEGMENT_REQS;
        count_chunks(args.p, first_req, num_reqs, ends, warp_sums);
        for (; chunk < ends[num_reqs - 1]; chunk += num_warps) {
            const int req = find_request(ends, num_reqs, chunk);
            const int64_t before = req == 0 ? 0 : ends[req - 1];
            gather_chunk<ROW, ALIGNED>(args, first_req + req, chunk - before, kv_scale);
        }
        chunk -= ends[num_reqs - 1];
        __syncthreads(); /* no warp reads the counts any more */
    }
}

/* The kernels of a format: for any rows, and for aligned ones. */
template <int ROW>
constexpr format_kernels<gather_args, 2>
serve()
{
    return {(smla_kv_row_number)ROW, {gather_kernel<ROW, false>, gather_kernel<ROW, true>}};
}

const format_kernels<gather_args, 2> gather_table[] = {
    serve<SMLA_ROW_FP8_DS_MLA>(),  serve<SMLA_ROW_BFLOAT16>(),     serve<SMLA_ROW_BFLOAT16_512>(),
    serve<SMLA_ROW_FP8_V4>(),      serve<SMLA_ROW_FP8_E4M3>(),     serve<SMLA_ROW_FP8_INDEX>(),
    serve<SMLA_ROW_MXFP4_INDEX>(), serve<SMLA_ROW_FP8_V41>(),      serve<SMLA_ROW_FP4_V41>(),
    serve<SMLA_ROW_FP8_NOPE>(),    serve<SMLA_ROW_FP8_E4M3_576>(),
};

} /* namespace */

/* ---- Launchers ----------------------------------------------------------------------------- */

cudaError_t
smla_cuda_launch_gather_kv_cache(const smla_gather_params *p, const smla_cuda_device *device)
{
    const int64_t out_rows = p->out_stride_req == 0 ? p->out_tokens : p->num_reqs * p->out_tokens;
    if (p->num_reqs == 0 || out_rows == 0) {
        return cudaSuccess;
    }
    const bool is_aligned =
        has_aligned_rows(p->kv) &&
        smla_are_rows_aligned(p->out, p->out_stride_req, p->out_stride_token, 16);
    const gather_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv)};
    /* Use more CTAs than run in one round: CTAs start in order, so those that run together read
     * neighbouring pages. */
    const int64_t num_chunks = smla_count_parts(out_rows, CHUNK_ROWS) + p->num_reqs;
    const int64_t all_blocks = smla_count_parts(num_chunks, BLOCK_WARPS);
    const int64_t one_round = (int64_t)device->num_sms * READ_BLOCKS_PER_SM;
    const int64_t few_blocks = smla_count_parts(all_blocks, GATHER_CHUNKS);
    const int64_t num_blocks = all_blocks < one_round   ? all_blocks
                               : few_blocks < one_round ? one_round
                                                        : few_blocks;
    return smla_launch(find_kernel(gather_table, p->kv, is_aligned), args, num_blocks,
                       BLOCK_THREADS, 0, p->call.stream);
}

cudaError_t
smla_cuda_launch_dequantize_and_gather_k_cache(const smla_gather_params *p,
                                               const smla_cuda_device *device)
{
    return smla_cuda_launch_gather_kv_cache(p, device);
}
