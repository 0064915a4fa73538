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
 *              instruction of the warp covers consecutive bytes. write: a run of 1 to 8 tokens, the
 *              next one's loads in flight while one is written; lane i finds the row of token i.
 *              gather, dequantize: chunks of CHUNK_ROWS rows, all read before the first is written,
 *              lane i finds row i; chunks are of one request and dealt out in turn to all warps of
 *              the grid. Only gather has barriers (__syncthreads): sums written | counts written |
 *              counts used.
 * Roofline     Memory. Bytes a token, floor at 4.3 TB/s, and the share of that rate reached on an
 *              H200 with a million tokens (2026-11-20, the operators of `python -m sparse_mla bench
 *              --device cuda --only bytes`, replayed without the copy between them); slots in order
 *              | pages shuffled | slots shuffled:
 *                write  bf16 -> fp8_ds_mla   1160 +  656   0.42 ns   98 | 93 | 81 %
 *                write  bf16 -> bfloat16     1160 + 1152   0.54 ns   93 | 89 | 87 %
 *                gather fp8_ds_mla            656 + 1152   0.42 ns        86 %
 *                gather bfloat16             1152 + 1152   0.54 ns        90 %
 *                dequantize fp8_ds_mla        656 + 1152   0.42 ns   93 %
 *              A row of fp8_ds_mla is 20.5 sectors. If its neighbour is not written soon after it,
 *              the sector that they share is read to be completed, once a row (ncu: 38.98 million
 *              sectors read, not 38.01): shuffled slots are slower for any number of warps tried.
 *              Loads that leave L1 or L2 first: 2 to 14 points less.
 * Numerics     write: every byte is what the CPU's write gives, which divides; smla_scale_of_tile
 *              and smla_quantize_moderate_bf16x4 say why it is. Reads: the product in fp32, one
 *              rounding; every number is the CPU's, a NaN byte keeps its sign.
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
    MAX_RUN_TOKENS = 4,  /* that a warp writes in turn */
    MIN_RUNS = 1 << 14,  /* before a warp takes a second token */
    CHUNK_ROWS = 2,      /* that a warp reads together */
    SEGMENT_REQS = 2048, /* requests whose chunks are counted at a time */
    WRITE_BLOCKS_PER_SM = 4,
    READ_BLOCKS_PER_SM = 2, /* at least */
    GATHER_CHUNKS = 4,      /* of a warp, at least, before blocks are fewer */
    FEW_BLOCKS_PER_SM = 2,  /* of kernels that need more addresses or registers */
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
    int32_t run_tokens;
};

/* A lane's part of a token, as it was given: 16 bytes at a time, then two values of rope. */
template <int TYPE> struct given_part {
    enum {
        ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2,
        COUNT = 16 / ELEMENT_BYTES,
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = SMLA_KV_LORA_RANK / STEP,
        TILE_LANES = SMLA_SCALE_TILE / COUNT, /* that share a scale */
    };
    uint32_t nope[STEPS][4];
    uint32_t rope[ELEMENT_BYTES / 2];
};

/* Where a lane's part of the next token is. */
struct given_place {
    const uint8_t *nope;
    const uint8_t *rope;
};

template <int TYPE>
__device__ __forceinline__ given_place
find_token(const smla_cache_write_params &p, int64_t token)
{
    using layout = given_part<TYPE>;
    constexpr int BYTES = layout::ELEMENT_BYTES;
    const int lane = lane_idx();
    return {(const uint8_t *)p.kv_c + (token * p.kv_c_stride_token + lane * layout::COUNT) * BYTES,
            (const uint8_t *)p.k_pe + (token * p.k_pe_stride_token + lane * 2) * BYTES};
}

template <int TYPE, bool ALIGNED>
__device__ __forceinline__ void
load_next(const smla_cache_write_params &p, given_place *place, given_part<TYPE> *part)
{
    using layout = given_part<TYPE>;
    constexpr int BYTES = layout::ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        smla_load_words<16, ALIGNED, BYTES>(place->nope + i * layout::STEP * BYTES, part->nope[i]);
    }
    smla_load_words<2 * BYTES, ALIGNED, BYTES>(place->rope, part->rope);
    place->nope += p.kv_c_stride_token * BYTES;
    place->rope += p.k_pe_stride_token * BYTES;
}

/* `COUNT` values as bf16, two to a word. */
template <int TYPE, int COUNT>
__device__ __forceinline__ void
narrow(const uint32_t *given, uint32_t *pairs)
{
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) {
        if constexpr (TYPE == SMLA_FLOAT_FP32) {
            pairs[i] = smla_floats_to_bf16x2(smla_bits_float(given[2 * i]),
                                             smla_bits_float(given[2 * i + 1]));
        } else if constexpr (TYPE == SMLA_FLOAT_FP16) {
            float floats[2];
            smla_halves_to_floats(given[i], floats);
            pairs[i] = smla_floats_to_bf16x2(floats[0], floats[1]);
        } else {
            pairs[i] = given[i];
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

/* Lane i: where token first + i of a run goes, null where it is not written: its slot is outside
 * the cache, or one of the next 31 tokens has the same. */
__device__ __forceinline__ uint8_t *
find_targets(const write_args &args, int64_t first, int num_tokens)
{
    const smla_cache_write_params &p = args.p;
    const int lane = lane_idx();
    const int64_t token = first + lane;
    const bool sees_behind = lane + 1 < num_tokens && token + SMLA_WARP_LANES < p.num_tokens;
    const int64_t slot = token < p.num_tokens ? read_slot(p, token) : -1;
    const int64_t behind = sees_behind ? read_slot(p, token + SMLA_WARP_LANES) : -1;
    bool yields = false;
    for (int i = 0; i < num_tokens; i++) {
        const int64_t own = __shfl_sync(ALL_LANES, slot, i);
        const int64_t other = lane > i ? slot : behind; /* of a token 1 to 31 after it */
        const bool is_taken = __any_sync(ALL_LANES, lane != i && other == own);
        yields = lane == i ? is_taken : yields;
    }
    if (lane >= num_tokens || yields || slot < 0 || slot >= p.kv.num_pages * p.kv.block_size) {
        return nullptr;
    }
    const int64_t page = smla_divide(slot, args.block_size);
    return find_row(p.kv, page, slot - page * p.kv.block_size);
}

__device__ __forceinline__ uint8_t *
shuffle_pointer(const uint8_t *pointer, int lane)
{
    return (uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)pointer, lane);
}

/* The scales of a lane's steps. */
template <int TYPE>
__device__ __forceinline__ void
find_scales(const uint32_t (*pairs)[given_part<TYPE>::COUNT / 2], smla_scale *scales)
{
    using layout = given_part<TYPE>;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i += 2) {
        uint32_t largest[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            largest[j] = smla_abs_bf16x2(pairs[i + j][0]);
#pragma unroll
            for (int k = 1; k < layout::COUNT / 2; k++) {
                largest[j] = smla_max_bf16x2(largest[j], smla_abs_bf16x2(pairs[i + j][k]));
            }
        }
        /* One step in the lower halves, one in the upper. */
        uint32_t both = smla_max_bf16x2(__byte_perm(largest[0], largest[1], 0x5410),
                                        __byte_perm(largest[0], largest[1], 0x7632));
#pragma unroll
        for (int step = layout::TILE_LANES / 2; step > 0; step /= 2) {
            both = smla_max_bf16x2(both, __shfl_xor_sync(ALL_LANES, both, step));
        }
        const float amax[2] = {smla_low_bf16(both), smla_high_bf16(both)};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            /* Of NaN alone 0. */
            const float bounded = fminf(fmaxf(amax[j], 0.0f), FLT_MAX);
            scales[i + j] = smla_make_scale(smla_scale_of_tile(bounded));
        }
    }
}

template <int TYPE>
__device__ __forceinline__ void
quantize_token(const uint32_t (*pairs)[given_part<TYPE>::COUNT / 2], const smla_scale *scales,
               uint32_t (*bytes)[given_part<TYPE>::COUNT / 4])
{
    using layout = given_part<TYPE>;
    bool is_moderate = true;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        is_moderate = is_moderate && scales[i].is_moderate;
    }
    if (is_moderate) {
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
#pragma unroll
            for (int k = 0; k < layout::COUNT / 4; k++) {
                bytes[i][k] = smla_quantize_moderate_bf16x4(pairs[i] + 2 * k, scales[i]);
            }
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
#pragma unroll
        for (int k = 0; k < layout::COUNT / 4; k++) {
            bytes[i][k] =
                smla_quantize_rare_bf16x4(pairs[i][2 * k], pairs[i][2 * k + 1], scales[i].scale);
        }
    }
}

/* Lanes 0 ... STEPS - 1 of a tile's have its scale of that step. */
template <int TYPE>
__device__ __forceinline__ void
store_scales(const smla_scale *scales, float *to)
{
    using layout = given_part<TYPE>;
    const int step = lane_idx() % layout::TILE_LANES;
    const int tile = step * (layout::STEP / SMLA_SCALE_TILE) + lane_idx() / layout::TILE_LANES;
    float scale = scales[0].scale;
#pragma unroll
    for (int i = 1; i < layout::STEPS; i++) {
        scale = step == i ? scales[i].scale : scale;
    }
    if (step < layout::STEPS) {
        const uint32_t bits = smla_float_bits(scale);
        smla_store_words<4, true>(to + tile, &bits);
    }
}

template <int TYPE, int NOPE, bool ALIGNED>
__device__ __forceinline__ void
write_token(const given_part<TYPE> &part, const row_offsets &offsets, uint8_t *row)
{
    using layout = given_part<TYPE>;
    constexpr bool OUT_ALIGNED = ALIGNED || NOPE == SMLA_NOPE_E4M3;
    constexpr int OUT_BYTES = NOPE == SMLA_NOPE_E4M3 ? layout::COUNT : 2 * layout::COUNT;
    const int lane = lane_idx();
    uint8_t *const nope = row + lane * OUT_BYTES;
    uint32_t pairs[layout::STEPS][layout::COUNT / 2];
    uint32_t rope;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        narrow<TYPE, layout::COUNT>(part.nope[i], pairs[i]);
    }
    narrow<TYPE, 2>(part.rope, &rope);
    if constexpr (NOPE == SMLA_NOPE_E4M3) {
        smla_scale scales[layout::STEPS];
        uint32_t bytes[layout::STEPS][layout::COUNT / 4];
        find_scales<TYPE>(pairs, scales);
        quantize_token<TYPE>(pairs, scales, bytes);
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
            smla_store_words<OUT_BYTES, true>(nope + i * OUT_BYTES * SMLA_WARP_LANES, bytes[i]);
        }
        store_scales<TYPE>(scales, (float *)(row + offsets.scale));
    } else {
#pragma unroll
        for (int i = 0; i < layout::STEPS; i++) {
            smla_store_words<OUT_BYTES, ALIGNED>(nope + i * OUT_BYTES * SMLA_WARP_LANES, pairs[i]);
        }
    }
    smla_store_words<4, OUT_ALIGNED>(row + offsets.rope + lane * 4, &rope);
}

template <int TYPE, int NOPE, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS,
                  ALIGNED &&TYPE != SMLA_FLOAT_FP32 ? WRITE_BLOCKS_PER_SM : FEW_BLOCKS_PER_SM)
    write_kernel(const __grid_constant__ write_args args)
{
    const smla_cache_write_params &p = args.p;
    const int64_t num_warps = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t run = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; run * args.run_tokens < p.num_tokens; run += num_warps) {
        const int64_t first = run * args.run_tokens;
        const int64_t left = p.num_tokens - first;
        const int num_tokens = left < args.run_tokens ? (int)left : args.run_tokens;
        /* Every token is read: its loads do not wait for the slot. */
        given_part<TYPE> next;
        given_place place = find_token<TYPE>(p, first);
        load_next<TYPE, ALIGNED>(p, &place, &next);
        const uint8_t *const targets = find_targets(args, first, num_tokens);
#pragma unroll 2
        for (int i = 0; i < num_tokens; i++) {
            const given_part<TYPE> part = next;
            if (i + 1 < num_tokens) {
                load_next<TYPE, ALIGNED>(p, &place, &next);
            }
            uint8_t *const row = shuffle_pointer(targets, i);
            if (row != nullptr) {
                write_token<TYPE, NOPE, ALIGNED>(part, args.offsets, row);
            }
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
    uint32_t scale_bits[STEPS];
    uint32_t rope;
};

/* What is read where a row does not exist: zeros. */
__device__ const uint4 no_row[SMLA_HEAD_DIM * 2 / sizeof(uint4)] = {};

template <int NOPE, int OUT, bool ALIGNED>
__device__ __forceinline__ void
load_row(const uint8_t *row, const row_offsets &offsets, row_part<NOPE, OUT> *part)
{
    using layout = row_part<NOPE, OUT>;
    constexpr bool IN_ALIGNED = ALIGNED || NOPE == SMLA_NOPE_E4M3;
    const int lane = lane_idx();
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        const uint8_t *const from = row + i * layout::IN_BYTES * SMLA_WARP_LANES;
        smla_load_words<layout::IN_BYTES, IN_ALIGNED>(from + lane * layout::IN_BYTES,
                                                      part->nope[i]);
        if constexpr (NOPE == SMLA_NOPE_E4M3) {
            const int tile = (i * layout::STEP + lane * layout::COUNT) / SMLA_SCALE_TILE;
            smla_load_words<4, true>(row + offsets.scale + tile * 4, &part->scale_bits[i]);
        }
    }
    smla_load_words<4, IN_ALIGNED>(row + offsets.rope + lane * 4, &part->rope);
}

/* A step's values as 16 bytes of out. */
template <int OUT, bool PLAIN>
__device__ __forceinline__ void
upconvert_step(const uint32_t *bytes, float scale, uint32_t *words)
{
    constexpr int COUNT = OUT == SMLA_FLOAT_FP32 ? 1 : 2; /* words of bytes */
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
template <int NOPE, int OUT>
__device__ __forceinline__ void
upconvert(const row_part<NOPE, OUT> &part, uint32_t (*words)[4])
{
    using layout = row_part<NOPE, OUT>;
    if constexpr (NOPE == SMLA_NOPE_E4M3) {
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

template <int NOPE, int OUT, bool ALIGNED>
__device__ __forceinline__ void
store_row(const row_part<NOPE, OUT> &part, uint8_t *out)
{
    using layout = row_part<NOPE, OUT>;
    constexpr int UNIT = OUT == SMLA_FLOAT_FP32 ? 4 : 2;
    const int lane = lane_idx();
    uint32_t words[layout::STEPS][4];
    upconvert<NOPE, OUT>(part, words);
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        smla_store_words<16, ALIGNED, UNIT>(out + (i * SMLA_WARP_LANES + lane) * 16, words[i]);
    }
    uint8_t *const rope = out + SMLA_KV_LORA_RANK * UNIT + lane * 2 * UNIT;
    if constexpr (OUT == SMLA_FLOAT_FP32) {
        const uint32_t words[2] = {part.rope << 16, part.rope & 0xFFFF0000u};
        smla_store_words<8, ALIGNED, UNIT>(rope, words);
    } else {
        smla_store_words<4, ALIGNED, UNIT>(rope, &part.rope);
    }
}

/* Lane i knows where row i of a chunk is, and where it goes: null where there is none. */
template <int NOPE, int OUT, bool ALIGNED>
__device__ __forceinline__ void
move_chunk(const uint8_t *source, const uint8_t *target, const row_offsets &offsets)
{
    row_part<NOPE, OUT> parts[CHUNK_ROWS];
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        load_row<NOPE, OUT, ALIGNED>(shuffle_pointer(source, i), offsets, &parts[i]);
    }
#pragma unroll
    for (int i = 0; i < CHUNK_ROWS; i++) {
        uint8_t *const out = shuffle_pointer(target, i);
        if (out != nullptr) {
            store_row<NOPE, OUT, ALIGNED>(parts[i], out);
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

/* ends[i] = chunks of the requests first_req ... first_req + i. */
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

/* The row of a position of a request. */
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

template <int NOPE, bool ALIGNED>
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
    move_chunk<NOPE, SMLA_FLOAT_BF16, ALIGNED>(source, target, args.offsets);
}

template <int NOPE, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, ALIGNED ? READ_BLOCKS_PER_SM : FEW_BLOCKS_PER_SM)
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
        count_chunks(args.p, first_req, num_reqs, ends, warp_sums);
        for (; chunk < ends[num_reqs - 1]; chunk += num_warps) {
            const int req = find_request(ends, num_reqs, chunk);
            const int64_t before = req == 0 ? 0 : ends[req - 1];
            gather_chunk<NOPE, ALIGNED>(args, first_req + req, chunk - before);
        }
        chunk -= ends[num_reqs - 1];
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
__launch_bounds__(BLOCK_THREADS, ALIGNED ? READ_BLOCKS_PER_SM : FEW_BLOCKS_PER_SM)
    dequantize_kernel(const __grid_constant__ dequantize_args args)
{
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
        move_chunk<NOPE, OUT, ALIGNED>(source, target, args.offsets);
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
    const int64_t tokens = p->num_tokens / MIN_RUNS;
    const int32_t run_tokens = tokens < 1                ? 1
                               : tokens < MAX_RUN_TOKENS ? (int32_t)tokens
                                                         : MAX_RUN_TOKENS;
    const int64_t num_blocks = smla_count_parts(p->num_tokens, (int64_t)run_tokens * BLOCK_WARPS);
    const write_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv),
                             run_tokens};
    for (const write_row &row : write_rows) {
        if (row.type == p->input_type && row.nope == p->kv.format->nope_type &&
            row.is_aligned == is_aligned) {
            return smla_launch(row.kernel, args, num_blocks, BLOCK_THREADS, 0, p->stream.handle);
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
    /* Blocks that start in order keep to neighbouring pages: more than a round of them. */
    const int64_t num_chunks = smla_count_parts(p->out_tokens, CHUNK_ROWS) + p->num_reqs;
    const int64_t all_blocks = smla_count_parts(num_chunks, BLOCK_WARPS);
    const int64_t one_round = (int64_t)device->num_sms * READ_BLOCKS_PER_SM;
    const int64_t few_blocks = smla_count_parts(all_blocks, GATHER_CHUNKS);
    const int64_t num_blocks = all_blocks < one_round   ? all_blocks
                               : few_blocks < one_round ? one_round
                                                        : few_blocks;
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
