/* cache_read.cu: gathers the rows of requests from the cache, and dequantises whole caches.
 *
 * Computes     gather      out[workspace_start + p] = bf16(row of position seq_start + p) for
 *                          p < seq_len, request by request
 *              dequantize  every row of a cache, as bf16 or fp32
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
#include "cuda/cache/cache_rows.cuh"

namespace {

enum {
    CHUNK_ROWS = 2,         /* rows that a warp reads together */
    SEGMENT_REQS = 2048,    /* requests whose chunks are counted at a time */
    READ_BLOCKS_PER_SM = 2, /* at least */
    GATHER_CHUNKS = 4,      /* chunks per warp in grids of more than one round */
};

/* ---- Rows out of the cache ----------------------------------------------------------------- */

template <int ROW, int OUT> struct row_part {
    enum {
        COUNT = OUT == SMLA_FLOAT_FP32 ? 4 : 8, /* values per lane: 16 bytes of out */
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = SMLA_KV_LORA_RANK / STEP,
        IN_BYTES = smla_row<ROW>::IS_E4M3 ? COUNT : 2 * COUNT,
    };
    uint32_t nope[STEPS][IN_BYTES / 4];
    uint32_t scale_bits[STEPS];
    uint32_t rope;
};

/* Zeros, which are read where a row does not exist. */
__device__ const uint4 no_row[SMLA_HEAD_DIM * 2 / sizeof(uint4)] = {};

template <int ROW, int OUT, bool ALIGNED>
__device__ __forceinline__ void
load_row(const uint8_t *row, const row_offsets &offsets, row_part<ROW, OUT> *part)
{
    using layout = row_part<ROW, OUT>;
    constexpr bool IN_ALIGNED = ALIGNED || smla_row<ROW>::IS_E4M3;
    const int lane = lane_idx();
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        const uint8_t *const from = row + i * layout::IN_BYTES * SMLA_WARP_LANES;
        smla_load_words<layout::IN_BYTES, IN_ALIGNED>(from + lane * layout::IN_BYTES,
                                                      part->nope[i]);
        if constexpr (smla_row<ROW>::IS_E4M3) {
            const int tile = (i * layout::STEP + lane * layout::COUNT) / SMLA_SCALE_TILE;
            smla_load_words<4, true>(row + offsets.scale + tile * 4, &part->scale_bits[i]);
        }
    }
    if constexpr (smla_row<ROW>::HAS_ROPE) {
        smla_load_words<4, IN_ALIGNED>(row + offsets.rope + lane * 4, &part->rope);
    }
}

/* The values of one step as 16 bytes of out. */
template <int OUT, bool PLAIN>
__device__ __forceinline__ void
upconvert_step(const uint32_t *bytes, float scale, uint32_t *words)
{
    constexpr int COUNT = OUT == SMLA_FLOAT_FP32 ? 1 : 2; /* words of e4m3 */
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if constexpr (PLAIN || OUT == SMLA_FLOAT_FP32) {
            float products[4];
            if constexpr (PLAIN) {
                smla_scale_plain_e4m3x4(bytes[i], scale, products);
            } else {
                const float4 rare = smla_scale_rare_e4m3x4(bytes[i], scale);
                products[0] = rare.x;
                products[1] = rare.y;
                products[2] = rare.z;
                products[3] = rare.w;
            }
            if constexpr (OUT == SMLA_FLOAT_FP32) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    words[k] = smla_float_bits(products[k]);
                }
            } else {
                words[2 * i] = smla_cvt_bf16x2(products[0], products[1]);
                words[2 * i + 1] = smla_cvt_bf16x2(products[2], products[3]);
            }
        } else {
            const uint2 rare = smla_scale_rare_e4m3x4_to_bf16(bytes[i], scale);
            words[2 * i] = rare.x;
            words[2 * i + 1] = rare.y;
        }
    }
}

/* The NoPE values of a lane as vectors of out. */
template <int ROW, int OUT>
__device__ __forceinline__ void
upconvert(const row_part<ROW, OUT> &part, uint32_t (*words)[4])
{
    using layout = row_part<ROW, OUT>;
    if constexpr (smla_row<ROW>::IS_E4M3) {
        uint32_t marks = 0;
        bool is_plain = true;
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
            is_plain = is_plain && smla_is_plain_scale(smla_bits_float(part.scale_bits[i]));
#pragma unroll
            for (int k = 0; k < layout::IN_BYTES / 4; k++) {
                marks |= smla_mark_nan_e4m3x4(part.nope[i][k]);
            }
        }
        is_plain = is_plain && (marks & 0x80808080u) == 0;
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
            const float scale = smla_bits_float(part.scale_bits[i]);
            if (is_plain) {
                upconvert_step<OUT, true>(part.nope[i], scale, words[i]);
            } else {
                upconvert_step<OUT, false>(part.nope[i], scale, words[i]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const uint32_t pair = part.nope[i][OUT == SMLA_FLOAT_FP32 ? k / 2 : k];
                words[i][k] = OUT != SMLA_FLOAT_FP32 ? pair
                              : k % 2 == 0           ? pair << 16
                                                     : pair & 0xFFFF0000u;
            }
        }
    }
}

template <int ROW, int OUT, bool ALIGNED>
__device__ __forceinline__ void
store_row(const row_part<ROW, OUT> &part, uint8_t *out)
{
    using layout = row_part<ROW, OUT>;
    constexpr int UNIT = OUT == SMLA_FLOAT_FP32 ? 4 : 2;
    const int lane = lane_idx();
    uint32_t words[layout::STEPS][4];
    upconvert<ROW, OUT>(part, words);
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        smla_store_words<16, ALIGNED, UNIT>(out + (i * SMLA_WARP_LANES + lane) * 16, words[i]);
    }
    uint8_t *const rope = out + SMLA_KV_LORA_RANK * UNIT + lane * 2 * UNIT;
    if constexpr (!smla_row<ROW>::HAS_ROPE) {
        return;
    } else if constexpr (OUT == SMLA_FLOAT_FP32) {
        const uint32_t words[2] = {part.rope << 16, part.rope & 0xFFFF0000u};
        smla_store_words<8, ALIGNED, UNIT>(rope, words);
    } else {
        smla_store_words<4, ALIGNED, UNIT>(rope, &part.rope);
    }
}

/* Moves a chunk. Lane i gives the source and target of row i; a missing row has target null. */
template <int ROW, int OUT, bool ALIGNED>
__device__ __forceinline__ void
move_chunk(const uint8_t *source, const uint8_t *target, const row_offsets &offsets)
{
    row_part<ROW, OUT> parts[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        load_row<ROW, OUT, ALIGNED>(shuffle_pointer(source, i), offsets, &parts[i]);
    }
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        uint8_t *const out = shuffle_pointer(target, i);
        if (out != nullptr) {
            store_row<ROW, OUT, ALIGNED>(parts[i], out);
        }
    }
}

/* ---- Gather -------------------------------------------------------------------------------- */

struct gather_args {
    smla_gather_params p;
    smla_divisor block_size;
    row_offsets offsets;
};

/* Positions first ... first + count - 1 of a request have rows in out. */
struct gather_range {
    int64_t workspace_start;
    int64_t first;
    int64_t count;
};

__device__ __forceinline__ gather_range
find_range(const smla_gather_params &p, int64_t req)
{
    const int64_t seq_len = __ldg(p.seq_lens + req * p.seq_lens_stride);
    const int64_t start = __ldg(p.workspace_starts + req * p.workspace_starts_stride);
    const int64_t first = start < 0 ? -start : 0;
    const int64_t end = seq_len < p.out_tokens - start ? seq_len : p.out_tokens - start;
    return {start, first, end > first ? end - first : 0};
}

/* ends[i] = number of chunks of the requests first_req ... first_req + i. */
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
    int64_t before = sum;
#pragma unroll
    for (int step = 1; step < SMLA_WARP_LANES; step *= 2) {
        const int64_t lower = __shfl_up_sync(ALL_LANES, before, step);
        before += lane >= step ? lower : 0;
    }
    if (lane == SMLA_WARP_LANES - 1) {
        warp_sums[warp] = before;
    }
    __syncthreads(); /* sums written */
    before -= sum;
#pragma unroll
    for (int i = 0; i < BLOCK_WARPS; i++) {
        before += i < warp ? warp_sums[i] : 0;
    }
    for (int i = begin; i < end; i++) {
        ends[i] += before;
    }
    __syncthreads(); /* counts written */
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

/* The cache row of a position of a request, or no_row. */
__device__ __forceinline__ const uint8_t *
find_position(const gather_args &args, int64_t req, int64_t position)
{
    const smla_gather_params &p = args.p;
    const uint8_t *const none = (const uint8_t *)no_row;
    if (position < 0) {
        return none;
    }
    const int64_t block = smla_divide(position, args.block_size);
    if (block >= p.num_blocks) {
        return none;
    }
    const int64_t page =
        __ldg(p.block_table + req * p.block_table_stride_req + block * p.block_table_stride_block);
    if (page < 0 || page >= p.kv.num_pages) {
        return none;
    }
    return find_row(p.kv, page, position - block * p.kv.block_size);
}

template <int ROW, bool ALIGNED>
__device__ __forceinline__ void
gather_chunk(const gather_args &args, int64_t req, int64_t chunk)
{
    const smla_gather_params &p = args.p;
    const gather_range range = find_range(p, req);
    const int64_t seq_start =
        p.seq_starts == nullptr ? 0 : __ldg(p.seq_starts + req * p.seq_starts_stride);
    const int64_t at = chunk * CHUNK_ROWS + lane_idx();
    const int64_t position = range.first + at;
    const uint8_t *source = (const uint8_t *)no_row;
    const uint8_t *target = nullptr;
    if (lane_idx() < CHUNK_ROWS && at < range.count) {
        source = find_position(args, req, seq_start + position);
        target = (const uint8_t *)(p.out + (range.workspace_start + position) * p.out_stride_token);
    }
    move_chunk<ROW, SMLA_FLOAT_BF16, ALIGNED>(source, target, args.offsets);
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
    /* Neighbouring chunks go to different CTAs, so that the last, partial round reaches all. */
    int64_t chunk = (int64_t)(threadIdx.x / SMLA_WARP_LANES) * gridDim.x + blockIdx.x;
    for (int64_t first_req = 0; first_req < args.p.num_reqs; first_req += SEGMENT_REQS) {
        const int64_t left = args.p.num_reqs - first_req;
        const int num_reqs = left < SEGMENT_REQS ? (int)left : SEGMENT_REQS;
        count_chunks(args.p, first_req, num_reqs, ends, warp_sums);
        for (; chunk < ends[num_reqs - 1]; chunk += num_warps) {
            const int req = find_request(ends, num_reqs, chunk);
            const int64_t before = req == 0 ? 0 : ends[req - 1];
            gather_chunk<ROW, ALIGNED>(args, first_req + req, chunk - before);
        }
        chunk -= ends[num_reqs - 1];
        __syncthreads(); /* counts used */
    }
}

struct gather_row {
    smla_kv_row_number format;
    bool is_aligned;
    void (*kernel)(gather_args);
};

const gather_row gather_rows[] = {
    {SMLA_ROW_FP8_DS_MLA, true, gather_kernel<SMLA_ROW_FP8_DS_MLA, true>},
    {SMLA_ROW_FP8_DS_MLA, false, gather_kernel<SMLA_ROW_FP8_DS_MLA, false>},
    {SMLA_ROW_BFLOAT16, true, gather_kernel<SMLA_ROW_BFLOAT16, true>},
    {SMLA_ROW_BFLOAT16, false, gather_kernel<SMLA_ROW_BFLOAT16, false>},
    {SMLA_ROW_BFLOAT16_512, true, gather_kernel<SMLA_ROW_BFLOAT16_512, true>},
    {SMLA_ROW_BFLOAT16_512, false, gather_kernel<SMLA_ROW_BFLOAT16_512, false>},
};

/* ---- Dequantise ---------------------------------------------------------------------------- */

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
    const int64_t num_slots = p.kv.num_pages * p.kv.block_size;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t warp = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; warp * CHUNK_ROWS < num_slots; warp += num_warps) {
        const int64_t slot = warp * CHUNK_ROWS + lane_idx();
        const uint8_t *source = (const uint8_t *)no_row;
        const uint8_t *target = nullptr;
        if (lane_idx() < CHUNK_ROWS && slot < num_slots) {
            const int64_t page = smla_divide(slot, args.block_size);
            const int64_t offset = slot - page * p.kv.block_size;
            const int64_t at = page * p.out_stride_page + offset * p.out_stride_token;
            source = find_row(p.kv, page, offset);
            target = (const uint8_t *)p.out + at * ELEMENT_BYTES;
        }
        move_chunk<ROW, OUT, ALIGNED>(source, target, args.offsets);
    }
}

struct dequantize_row {
    smla_kv_row_number format;
    smla_float_type out;
    bool is_aligned;
    void (*kernel)(dequantize_args);
};

const dequantize_row dequantize_rows[] = {
    {SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_BF16, true,
     dequantize_kernel<SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_BF16, true>},
    {SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_BF16, false,
     dequantize_kernel<SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_BF16, false>},
    {SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_FP32, true,
     dequantize_kernel<SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_FP32, true>},
    {SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_FP32, false,
     dequantize_kernel<SMLA_ROW_FP8_DS_MLA, SMLA_FLOAT_FP32, false>},
    {SMLA_ROW_BFLOAT16, SMLA_FLOAT_BF16, true,
     dequantize_kernel<SMLA_ROW_BFLOAT16, SMLA_FLOAT_BF16, true>},
    {SMLA_ROW_BFLOAT16, SMLA_FLOAT_BF16, false,
     dequantize_kernel<SMLA_ROW_BFLOAT16, SMLA_FLOAT_BF16, false>},
    {SMLA_ROW_BFLOAT16, SMLA_FLOAT_FP32, true,
     dequantize_kernel<SMLA_ROW_BFLOAT16, SMLA_FLOAT_FP32, true>},
    {SMLA_ROW_BFLOAT16, SMLA_FLOAT_FP32, false,
     dequantize_kernel<SMLA_ROW_BFLOAT16, SMLA_FLOAT_FP32, false>},
    {SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_BF16, true,
     dequantize_kernel<SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_BF16, true>},
    {SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_BF16, false,
     dequantize_kernel<SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_BF16, false>},
    {SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_FP32, true,
     dequantize_kernel<SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_FP32, true>},
    {SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_FP32, false,
     dequantize_kernel<SMLA_ROW_BFLOAT16_512, SMLA_FLOAT_FP32, false>},
};

} /* namespace */

/* ---- Launchers ----------------------------------------------------------------------------- */

cudaError_t
smla_cuda_launch_gather_kv_cache(const smla_gather_params *p, const smla_cuda_device *device)
{
    if (p->num_reqs == 0 || p->out_tokens == 0) {
        return cudaSuccess;
    }
    const bool is_aligned =
        has_aligned_rows(p->kv) &&
        smla_is_multiple(p->out, p->out_stride_token * (int64_t)sizeof(uint16_t), 16);
    const gather_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv)};
    /* Use more CTAs than one round: those that start in order keep to neighbouring pages. */
    const int64_t num_chunks = smla_count_parts(p->out_tokens, CHUNK_ROWS) + p->num_reqs;
    const int64_t all_blocks = smla_count_parts(num_chunks, BLOCK_WARPS);
    const int64_t one_round = (int64_t)device->num_sms * READ_BLOCKS_PER_SM;
    const int64_t few_blocks = smla_count_parts(all_blocks, GATHER_CHUNKS);
    const int64_t num_blocks = all_blocks < one_round   ? all_blocks
                               : few_blocks < one_round ? one_round
                                                        : few_blocks;
    for (const gather_row &row : gather_rows) {
        if (row.format == p->kv.format->number && row.is_aligned == is_aligned) {
            return smla_launch(row.kernel, args, num_blocks, BLOCK_THREADS, 0, p->stream);
        }
    }
    return cudaErrorInvalidDeviceFunction;
}

cudaError_t
smla_cuda_launch_dequantize_kv_cache(const smla_dequantize_params *p)
{
    const int64_t element_bytes = p->out_type == SMLA_FLOAT_FP32 ? 4 : 2;
    const bool is_aligned = has_aligned_rows(p->kv) &&
                            smla_is_multiple(p->out, p->out_stride_token * element_bytes, 16) &&
                            p->out_stride_page * element_bytes % 16 == 0;
    const dequantize_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv)};
    const int64_t num_slots = p->kv.num_pages * p->kv.block_size;
    for (const dequantize_row &row : dequantize_rows) {
        if (row.format == p->kv.format->number && row.out == p->out_type &&
            row.is_aligned == is_aligned) {
            return smla_launch(row.kernel, args,
                               smla_count_parts(num_slots, CHUNK_ROWS * BLOCK_WARPS), BLOCK_THREADS,
                               0, p->stream);
        }
    }
    return cudaErrorInvalidDeviceFunction;
}
