/* cache.cu: writes tokens into the cache, gathers them back, and dequantises whole caches.
 *
 * Computes     write       nope, rope -> bf16; fp8_ds_mla: per tile of 128 values of nope
 *                          scale = max(amax / 448, FLT_MIN), byte = e4m3(x / scale)
 *              gather      out[workspace_start + p] = bf16(row of position seq_start + p) for
 *                          p < seq_len, request by request
 *              dequantize  every row of a cache, as bf16 or fp32
 * Shapes       kv_c [T, 512], k_pe [T, 64] bf16, fp16 or fp32, rows any stride apart;
 *              slot_mapping [T] int32 or int64, any stride; block_table [R, W], seq_lens,
 *              workspace_starts, seq_starts [R] int32, any strides; out [., 576] bf16 or fp32, rows
 *              any stride apart; a cache row as kv_format.h draws it
 * Shared mem   gather: 16 KiB, the running count of chunks of 2048 requests, and 64 bytes of sums.
 *              The others: none
 * Roles        A warp moves whole rows, a lane 16 bytes of the wider side at a time, so that one
 *              instruction of the warp covers consecutive bytes. write: a row; dequantize: 4 rows;
 *              gather: chunks of 4 rows of one request, dealt out in turn to all warps of the grid.
 *              Only gather has barriers (__syncthreads): sums written | totals read | counts
 *              written | counts used.
 * Roofline     Memory. Bytes a token, floor at 4.3 TB/s, and the warp instructions that fit into it
 *              on 132 SMs of 4 schedulers at 1.75 GHz, against those of the aligned path (sm_90a):
 *                write  bf16 -> fp8_ds_mla   1152 +  656   0.42 ns   388   about 270
 *                write  bf16 -> bfloat16     1152 + 1152   0.54 ns   495   about 130
 *                gather fp8_ds_mla            656 + 1152   0.42 ns   388   about 235
 *                gather bfloat16             1152 + 1152   0.54 ns   495   about 170
 *                dequantize -> fp32           656 + 2304   0.69 ns   636   about 165
 * Numerics     write: every byte is what the CPU's write gives, by true divisions. Reads: the
 *              product in fp32, one rounding; every number is the CPU's, a NaN byte keeps its sign.
 *              A slot outside the cache is skipped. A token yields to another one of the same slot
 *              among the 31 after it; of those farther apart a row may hold parts of both. gather
 *              writes no row outside of out, and zeros for a position whose page does not exist:
 *              before the first, beyond the table, or a number that the cache does not have. Rows
 *              that two requests share hold parts of either.
 * Source       concat_and_cache_mla and cp_gather_and_upconvert_fp8_kv_cache of vLLM, for the
 *              formats. The schedule that needs no lengths on the host is ours.
 */
#include "cuda.h"
#include "launch.cuh"
#include "numeric.cuh"

namespace {

enum {
    BLOCK_WARPS = 8,
    BLOCK_THREADS = BLOCK_WARPS * SMLA_WARP_LANES,
    CHUNK_ROWS = 4,               /* rows that a warp has in flight */
    SEGMENT_REQS = 2048,          /* requests whose chunks are counted at a time */
    GATHER_BLOCKS_PER_SM = 3,     /* 84 registers */
    DEQUANTIZE_BLOCKS_PER_SM = 3, /* at least */
};

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

__device__ __forceinline__ int
lane_idx()
{
    return (int)(threadIdx.x % SMLA_WARP_LANES);
}

/* Where the parts of a row begin, in bytes. */
struct row_offsets {
    int32_t scale;
    int32_t rope;
};

row_offsets
offsets_of(const smla_kv_view &kv)
{
    return {kv.format->scale_offset, kv.format->rope_offset};
}

bool
has_aligned_rows(const smla_kv_view &kv)
{
    return smla_is_multiple(kv.base, kv.page_stride_bytes, 16) && kv.token_stride_bytes % 16 == 0;
}

__device__ __forceinline__ uint8_t *
find_row(const smla_kv_view &kv, int64_t page, int64_t offset)
{
    return kv.base + page * kv.page_stride_bytes + offset * kv.token_stride_bytes;
}

/* ---- Write --------------------------------------------------------------------------------- */

struct write_args {
    smla_cache_write_params p;
    smla_divisor block_size;
    row_offsets offsets;
};

/* COUNT values as bf16, two to a word. */
template <int TYPE, int COUNT, bool ALIGNED>
__device__ __forceinline__ void
load_bf16(const uint8_t *from, uint32_t *words)
{
    if constexpr (TYPE == SMLA_FLOAT_FP32) {
        uint32_t floats[COUNT];
        smla_load_words<COUNT * 4, ALIGNED, 4>(from, floats);
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            words[i] = smla_floats_to_bf16x2(smla_bits_float(floats[2 * i]),
                                             smla_bits_float(floats[2 * i + 1]));
        }
    } else {
        smla_load_words<COUNT * 2, ALIGNED>(from, words);
#pragma unroll
        for (int i = 0; TYPE == SMLA_FLOAT_FP16 && i < COUNT / 2; i++) {
            float floats[2];
            smla_halves_to_floats(words[i], floats);
            words[i] = smla_floats_to_bf16x2(floats[0], floats[1]);
        }
    }
}

__device__ __forceinline__ int64_t
read_slot(const smla_cache_write_params &p, int64_t token)
{
    const int64_t at = token * p.slot_stride;
    return p.slots_are_int64 ? ((const int64_t *)p.slot_mapping)[at]
                             : ((const int32_t *)p.slot_mapping)[at];
}

/* The slot of a token, -1 where nothing is to be written: outside the cache, or one of the next 31
 * tokens has the same. */
__device__ __forceinline__ int64_t
choose_slot(const smla_cache_write_params &p, int64_t token)
{
    const int lane = lane_idx();
    const int64_t later = token + lane < p.num_tokens ? read_slot(p, token + lane) : -1;
    const int64_t slot = __shfl_sync(ALL_LANES, later, 0);
    const bool yields = __any_sync(ALL_LANES, lane > 0 && later == slot);
    return yields || slot >= p.kv.num_pages * p.kv.block_size ? -1 : slot;
}

/* `COUNT` bf16 of every lane -> bytes; LANES lanes in a row share a tile. -> its scale. */
template <int COUNT, int LANES>
__device__ __forceinline__ float
quantize_tile(const uint32_t *words, uint32_t *bytes)
{
    float values[COUNT];
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        values[i] = i % 2 == 0 ? smla_low_bf16(words[i / 2]) : smla_high_bf16(words[i / 2]);
        amax = fmaxf(amax, fabsf(values[i])); /* passes over NaN */
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, step));
    }
    const smla_scale by = smla_make_scale(smla_scale_of_tile(fminf(amax, FLT_MAX)));
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
        bytes[i] = smla_quantize_x4<true>(values + 4 * i, smla_signs_of_bf16(words + 2 * i), by);
    }
    return by.scale;
}

/* A lane's part of a row to write. */
template <int TYPE, int NOPE> struct write_part {
    enum {
        COUNT = TYPE == SMLA_FLOAT_FP32 ? 4 : 8, /* values of a lane: 16 bytes of input */
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = SMLA_KV_LORA_RANK / STEP,
        OUT_BYTES = NOPE == SMLA_NOPE_E4M3 ? COUNT : 2 * COUNT,
    };
    uint32_t nope[STEPS][OUT_BYTES / 4];
    float scales[STEPS];
    uint32_t rope;
};

template <int TYPE, int NOPE, bool ALIGNED>
__device__ __forceinline__ void
make_part(const smla_cache_write_params &p, int64_t token, write_part<TYPE, NOPE> *part)
{
    using layout = write_part<TYPE, NOPE>;
    constexpr int ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2;
    const int lane = lane_idx();
    const uint8_t *const nope =
        (const uint8_t *)p.kv_c +
        (token * p.kv_c_stride_token + lane * layout::COUNT) * ELEMENT_BYTES;
    const uint8_t *const rope =
        (const uint8_t *)p.k_pe + (token * p.k_pe_stride_token + lane * 2) * ELEMENT_BYTES;
    uint32_t words[layout::STEPS][layout::COUNT / 2];
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        load_bf16<TYPE, layout::COUNT, ALIGNED>(nope + i * layout::STEP * ELEMENT_BYTES, words[i]);
    }
    load_bf16<TYPE, 2, ALIGNED>(rope, &part->rope);
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        if constexpr (NOPE == SMLA_NOPE_E4M3) {
            part->scales[i] =
                quantize_tile<layout::COUNT, SMLA_SCALE_TILE / layout::COUNT>(words[i],
                                                                              part->nope[i]);
        } else {
#pragma unroll
            for (int k = 0; k < layout::COUNT / 2; k++) {
                part->nope[i][k] = words[i][k];
            }
        }
    }
}

template <int TYPE, int NOPE, bool ALIGNED>
__device__ __forceinline__ void
store_part(const write_part<TYPE, NOPE> &part, const row_offsets &offsets, uint8_t *row)
{
    using layout = write_part<TYPE, NOPE>;
    constexpr bool OUT_ALIGNED = ALIGNED || NOPE == SMLA_NOPE_E4M3;
    constexpr int TILE_LANES = SMLA_SCALE_TILE / layout::COUNT;
    const int lane = lane_idx();
    uint8_t *const nope = row + lane * layout::OUT_BYTES;
    float *const scales = (float *)(row + offsets.scale) + lane / TILE_LANES;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        smla_store_words<layout::OUT_BYTES, OUT_ALIGNED>(nope + i * layout::OUT_BYTES *
                                                                    SMLA_WARP_LANES,
                                                         part.nope[i]);
        if (NOPE == SMLA_NOPE_E4M3 && lane % TILE_LANES == 0) {
            scales[i * layout::STEP / SMLA_SCALE_TILE] = part.scales[i];
        }
    }
    smla_store_words<4, OUT_ALIGNED>(row + offsets.rope + lane * 4, &part.rope);
}

template <int TYPE, int NOPE, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS) write_kernel(const __grid_constant__ write_args args)
{
    const smla_cache_write_params &p = args.p;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t token = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; token < p.num_tokens; token += num_warps) {
        /* Every token is made: its loads do not wait for the slot. */
        write_part<TYPE, NOPE> part;
        const int64_t slot = choose_slot(p, token);
        make_part<TYPE, NOPE, ALIGNED>(p, token, &part);
        if (slot >= 0) {
            const int64_t page = smla_divide(slot, args.block_size);
            uint8_t *const row = find_row(p.kv, page, slot - page * p.kv.block_size);
            store_part<TYPE, NOPE, ALIGNED>(part, args.offsets, row);
        }
    }
}

struct write_row {
    smla_float_type type;
    smla_nope_type nope;
    bool is_aligned;
    void (*kernel)(write_args);
};

const write_row write_rows[] = {
    {SMLA_FLOAT_BF16, SMLA_NOPE_E4M3, true, write_kernel<SMLA_FLOAT_BF16, SMLA_NOPE_E4M3, true>},
    {SMLA_FLOAT_BF16, SMLA_NOPE_E4M3, false, write_kernel<SMLA_FLOAT_BF16, SMLA_NOPE_E4M3, false>},
    {SMLA_FLOAT_BF16, SMLA_NOPE_BF16, true, write_kernel<SMLA_FLOAT_BF16, SMLA_NOPE_BF16, true>},
    {SMLA_FLOAT_BF16, SMLA_NOPE_BF16, false, write_kernel<SMLA_FLOAT_BF16, SMLA_NOPE_BF16, false>},
    {SMLA_FLOAT_FP16, SMLA_NOPE_E4M3, true, write_kernel<SMLA_FLOAT_FP16, SMLA_NOPE_E4M3, true>},
    {SMLA_FLOAT_FP16, SMLA_NOPE_E4M3, false, write_kernel<SMLA_FLOAT_FP16, SMLA_NOPE_E4M3, false>},
    {SMLA_FLOAT_FP16, SMLA_NOPE_BF16, true, write_kernel<SMLA_FLOAT_FP16, SMLA_NOPE_BF16, true>},
    {SMLA_FLOAT_FP16, SMLA_NOPE_BF16, false, write_kernel<SMLA_FLOAT_FP16, SMLA_NOPE_BF16, false>},
    {SMLA_FLOAT_FP32, SMLA_NOPE_E4M3, true, write_kernel<SMLA_FLOAT_FP32, SMLA_NOPE_E4M3, true>},
    {SMLA_FLOAT_FP32, SMLA_NOPE_E4M3, false, write_kernel<SMLA_FLOAT_FP32, SMLA_NOPE_E4M3, false>},
    {SMLA_FLOAT_FP32, SMLA_NOPE_BF16, true, write_kernel<SMLA_FLOAT_FP32, SMLA_NOPE_BF16, true>},
    {SMLA_FLOAT_FP32, SMLA_NOPE_BF16, false, write_kernel<SMLA_FLOAT_FP32, SMLA_NOPE_BF16, false>},
};

/* ---- Rows out of the cache ----------------------------------------------------------------- */

template <int NOPE, int OUT> struct row_part {
    enum {
        COUNT = OUT == SMLA_FLOAT_FP32 ? 4 : 8, /* values of a lane: 16 bytes of out */
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = SMLA_KV_LORA_RANK / STEP,
        IN_BYTES = NOPE == SMLA_NOPE_E4M3 ? COUNT : 2 * COUNT,
    };
    uint32_t nope[STEPS][IN_BYTES / 4];
    float scales[STEPS];
    uint32_t rope;
};

/* A lane's part of a row; zeros of a row that does not exist. */
template <int NOPE, int OUT, bool ALIGNED>
__device__ __forceinline__ void
load_row(const uint8_t *row, const row_offsets &offsets, row_part<NOPE, OUT> *part)
{
    using layout = row_part<NOPE, OUT>;
    constexpr bool IN_ALIGNED = ALIGNED || NOPE == SMLA_NOPE_E4M3;
    const int lane = lane_idx();
    *part = {};
    if (row == nullptr) {
        return;
    }
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        const uint8_t *const from = row + i * layout::IN_BYTES * SMLA_WARP_LANES;
        smla_load_words<layout::IN_BYTES, IN_ALIGNED>(from + lane * layout::IN_BYTES,
                                                      part->nope[i]);
        if constexpr (NOPE == SMLA_NOPE_E4M3) {
            const int tile = (i * layout::STEP + lane * layout::COUNT) / SMLA_SCALE_TILE;
            part->scales[i] = __ldg((const float *)(row + offsets.scale) + tile);
        }
    }
    smla_load_words<4, IN_ALIGNED>(row + offsets.rope + lane * 4, &part->rope);
}

template <int NOPE, int OUT, bool ALIGNED>
__device__ __forceinline__ void
store_row(const row_part<NOPE, OUT> &part, uint8_t *out)
{
    using layout = row_part<NOPE, OUT>;
    constexpr int UNIT = OUT == SMLA_FLOAT_FP32 ? 4 : 2;
    const int lane = lane_idx();
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        uint32_t words[4];
        if constexpr (NOPE == SMLA_NOPE_E4M3 && OUT == SMLA_FLOAT_FP32) {
            smla_scale_e4m3x4(part.nope[i][0], part.scales[i], words);
        } else if constexpr (NOPE == SMLA_NOPE_E4M3) {
            smla_scale_e4m3x4_to_bf16(part.nope[i][0], part.scales[i], words);
            smla_scale_e4m3x4_to_bf16(part.nope[i][1], part.scales[i], words + 2);
        } else if constexpr (OUT == SMLA_FLOAT_FP32) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                words[k] =
                    k % 2 == 0 ? part.nope[i][k / 2] << 16 : part.nope[i][k / 2] & 0xFFFF0000u;
            }
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                words[k] = part.nope[i][k];
            }
        }
        smla_store_words<16, ALIGNED, UNIT>(out + (i * SMLA_WARP_LANES + lane) * 16, words);
    }
    uint8_t *const rope = out + SMLA_KV_LORA_RANK * UNIT + lane * 2 * UNIT;
    if constexpr (OUT == SMLA_FLOAT_FP32) {
        const uint32_t words[2] = {part.rope << 16, part.rope & 0xFFFF0000u};
        smla_store_words<8, ALIGNED, UNIT>(rope, words);
    } else {
        smla_store_words<4, ALIGNED, UNIT>(rope, &part.rope);
    }
}

/* All rows are read before the first is written. No target, no row. */
template <int NOPE, int OUT, bool ALIGNED>
__device__ __forceinline__ void
move_rows(const uint8_t *const *sources, uint8_t *const *targets, const row_offsets &offsets)
{
    row_part<NOPE, OUT> parts[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        load_row<NOPE, OUT, ALIGNED>(sources[i], offsets, &parts[i]);
    }
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        if (targets[i] != nullptr) {
            store_row<NOPE, OUT, ALIGNED>(parts[i], targets[i]);
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

/* ends[i] = chunks of the requests first_req ... first_req + i. -> chunks of all of them. */
__device__ __forceinline__ int64_t
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
    int64_t total = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_WARPS; i++) {
        before += i < warp ? warp_sums[i] : 0;
        total += warp_sums[i];
    }
    for (int i = begin; i < end; i++) {
        ends[i] += before;
    }
    __syncthreads(); /* counts written, totals read */
    return total;
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

/* The row of a position of a request, null where its page does not exist. */
__device__ __forceinline__ const uint8_t *
find_position(const gather_args &args, int64_t req, int64_t position)
{
    const smla_gather_params &p = args.p;
    if (position < 0) {
        return nullptr;
    }
    const int64_t block = smla_divide(position, args.block_size);
    if (block >= p.num_blocks) {
        return nullptr;
    }
    const int64_t page =
        __ldg(p.block_table + req * p.block_table_stride_req + block * p.block_table_stride_block);
    if (page < 0 || page >= p.kv.num_pages) {
        return nullptr;
    }
    return find_row(p.kv, page, position - block * p.kv.block_size);
}

template <int NOPE, bool ALIGNED>
__device__ __forceinline__ void
gather_chunk(const gather_args &args, int64_t req, int64_t chunk)
{
    const smla_gather_params &p = args.p;
    const gather_range range = find_range(p, req);
    const int64_t seq_start =
        p.seq_starts == nullptr ? 0 : __ldg(p.seq_starts + req * p.seq_starts_stride);
    const uint8_t *sources[CHUNK_ROWS];
    uint8_t *targets[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        const int64_t at = chunk * CHUNK_ROWS + i;
        const int64_t position = range.first + at;
        const bool exists = at < range.count;
        sources[i] = exists ? find_position(args, req, seq_start + position) : nullptr;
        targets[i] =
            exists ? (uint8_t *)(p.out + (range.workspace_start + position) * p.out_stride_token)
                   : nullptr;
    }
    move_rows<NOPE, SMLA_FLOAT_BF16, ALIGNED>(sources, targets, args.offsets);
}

template <int NOPE, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, GATHER_BLOCKS_PER_SM)
    gather_kernel(const __grid_constant__ gather_args args)
{
    __shared__ int64_t ends[SEGMENT_REQS];
    __shared__ int64_t warp_sums[BLOCK_WARPS];
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    /* Neighbouring chunks to different blocks: the last round, which is not full, reaches all. */
    int64_t chunk = (int64_t)(threadIdx.x / SMLA_WARP_LANES) * gridDim.x + blockIdx.x;
    for (int64_t first_req = 0; first_req < args.p.num_reqs; first_req += SEGMENT_REQS) {
        const int64_t left = args.p.num_reqs - first_req;
        const int num_reqs = left < SEGMENT_REQS ? (int)left : SEGMENT_REQS;
        const int64_t total = count_chunks(args.p, first_req, num_reqs, ends, warp_sums);
        for (; chunk < total; chunk += num_warps) {
            const int req = find_request(ends, num_reqs, chunk);
            const int64_t before = req == 0 ? 0 : ends[req - 1];
            gather_chunk<NOPE, ALIGNED>(args, first_req + req, chunk - before);
        }
        chunk -= total;
        __syncthreads(); /* counts used */
    }
}

struct gather_row {
    smla_nope_type nope;
    bool is_aligned;
    void (*kernel)(gather_args);
};

const gather_row gather_rows[] = {
    {SMLA_NOPE_E4M3, true, gather_kernel<SMLA_NOPE_E4M3, true>},
    {SMLA_NOPE_E4M3, false, gather_kernel<SMLA_NOPE_E4M3, false>},
    {SMLA_NOPE_BF16, true, gather_kernel<SMLA_NOPE_BF16, true>},
    {SMLA_NOPE_BF16, false, gather_kernel<SMLA_NOPE_BF16, false>},
};

/* ---- Dequantise ---------------------------------------------------------------------------- */

struct dequantize_args {
    smla_dequantize_params p;
    smla_divisor block_size;
    row_offsets offsets;
};

template <int NOPE, int OUT, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, DEQUANTIZE_BLOCKS_PER_SM)
    dequantize_kernel(const __grid_constant__ dequantize_args args)
{
    constexpr int ELEMENT_BYTES = OUT == SMLA_FLOAT_FP32 ? 4 : 2;
    const smla_dequantize_params &p = args.p;
    const int64_t num_slots = p.kv.num_pages * p.kv.block_size;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t warp = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; warp * CHUNK_ROWS < num_slots; warp += num_warps) {
        const uint8_t *sources[CHUNK_ROWS];
        uint8_t *targets[CHUNK_ROWS];
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; i++) {
            const int64_t slot = warp * CHUNK_ROWS + i;
            const int64_t page = smla_divide(slot, args.block_size);
            const int64_t offset = slot - page * p.kv.block_size;
            const int64_t at = page * p.out_stride_page + offset * p.out_stride_token;
            const bool exists = slot < num_slots;
            sources[i] = exists ? find_row(p.kv, page, offset) : nullptr;
            targets[i] = exists ? (uint8_t *)p.out + at * ELEMENT_BYTES : nullptr;
        }
        move_rows<NOPE, OUT, ALIGNED>(sources, targets, args.offsets);
    }
}

struct dequantize_row {
    smla_nope_type nope;
    smla_float_type out;
    bool is_aligned;
    void (*kernel)(dequantize_args);
};

const dequantize_row dequantize_rows[] = {
    {SMLA_NOPE_E4M3, SMLA_FLOAT_BF16, true,
     dequantize_kernel<SMLA_NOPE_E4M3, SMLA_FLOAT_BF16, true>},
    {SMLA_NOPE_E4M3, SMLA_FLOAT_BF16, false,
     dequantize_kernel<SMLA_NOPE_E4M3, SMLA_FLOAT_BF16, false>},
    {SMLA_NOPE_E4M3, SMLA_FLOAT_FP32, true,
     dequantize_kernel<SMLA_NOPE_E4M3, SMLA_FLOAT_FP32, true>},
    {SMLA_NOPE_E4M3, SMLA_FLOAT_FP32, false,
     dequantize_kernel<SMLA_NOPE_E4M3, SMLA_FLOAT_FP32, false>},
    {SMLA_NOPE_BF16, SMLA_FLOAT_BF16, true,
     dequantize_kernel<SMLA_NOPE_BF16, SMLA_FLOAT_BF16, true>},
    {SMLA_NOPE_BF16, SMLA_FLOAT_BF16, false,
     dequantize_kernel<SMLA_NOPE_BF16, SMLA_FLOAT_BF16, false>},
    {SMLA_NOPE_BF16, SMLA_FLOAT_FP32, true,
     dequantize_kernel<SMLA_NOPE_BF16, SMLA_FLOAT_FP32, true>},
    {SMLA_NOPE_BF16, SMLA_FLOAT_FP32, false,
     dequantize_kernel<SMLA_NOPE_BF16, SMLA_FLOAT_FP32, false>},
};

} /* namespace */

/* ---- Launchers ----------------------------------------------------------------------------- */

cudaError_t
smla_cuda_launch_cache_write(const smla_cache_write_params *p)
{
    const int64_t element_bytes = p->input_type == SMLA_FLOAT_FP32 ? 4 : 2;
    const bool is_aligned = has_aligned_rows(p->kv) &&
                            smla_is_multiple(p->kv_c, p->kv_c_stride_token * element_bytes, 16) &&
                            smla_is_multiple(p->k_pe, p->k_pe_stride_token * element_bytes, 8);
    const write_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv)};
    for (const write_row &row : write_rows) {
        if (row.type == p->input_type && row.nope == p->kv.format->nope_type &&
            row.is_aligned == is_aligned) {
            return smla_launch(row.kernel, args, smla_count_parts(p->num_tokens, BLOCK_WARPS),
                               BLOCK_THREADS, 0, p->stream.handle);
        }
    }
    return cudaErrorInvalidDeviceFunction;
}

cudaError_t
smla_cuda_launch_gather(const smla_gather_params *p, const smla_cuda_device *device)
{
    if (p->num_reqs == 0 || p->out_tokens == 0) {
        return cudaSuccess;
    }
    const bool is_aligned =
        has_aligned_rows(p->kv) &&
        smla_is_multiple(p->out, p->out_stride_token * (int64_t)sizeof(uint16_t), 16);
    const gather_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv)};
    /* One round of blocks, or fewer where even requests that fill out need no more. */
    const int64_t most_blocks = (int64_t)device->num_sms * GATHER_BLOCKS_PER_SM;
    const int64_t blocks_per_req = smla_count_parts(p->out_tokens, CHUNK_ROWS * BLOCK_WARPS);
    const int64_t num_blocks =
        p->num_reqs < most_blocks / blocks_per_req ? p->num_reqs * blocks_per_req : most_blocks;
    for (const gather_row &row : gather_rows) {
        if (row.nope == p->kv.format->nope_type && row.is_aligned == is_aligned) {
            return smla_launch(row.kernel, args, num_blocks, BLOCK_THREADS, 0, p->stream.handle);
        }
    }
    return cudaErrorInvalidDeviceFunction;
}

cudaError_t
smla_cuda_launch_dequantize(const smla_dequantize_params *p)
{
    const int64_t element_bytes = p->out_type == SMLA_FLOAT_FP32 ? 4 : 2;
    const bool is_aligned = has_aligned_rows(p->kv) &&
                            smla_is_multiple(p->out, p->out_stride_token * element_bytes, 16) &&
                            p->out_stride_page * element_bytes % 16 == 0;
    const dequantize_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv)};
    const int64_t num_slots = p->kv.num_pages * p->kv.block_size;
    for (const dequantize_row &row : dequantize_rows) {
        if (row.nope == p->kv.format->nope_type && row.out == p->out_type &&
            row.is_aligned == is_aligned) {
            return smla_launch(row.kernel, args,
                               smla_count_parts(num_slots, CHUNK_ROWS * BLOCK_WARPS), BLOCK_THREADS,
                               0, p->stream.handle);
        }
    }
    return cudaErrorInvalidDeviceFunction;
}
