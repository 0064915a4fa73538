/* cache_write.cu: writes tokens into the cache, quantised on the way.
 *
 * Computes     nope, rope -> bf16; fp8_ds_mla: per tile of 128 values of nope
 *              scale = max(amax / 448, FLT_MIN), byte = e4m3(x / scale)
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
#include "cuda/cache/cache_slots.cuh"

namespace {

enum { WRITE_BLOCKS_PER_SM = 4 };

/* ---- Write --------------------------------------------------------------------------------- */

/* A lane's part of a token in the caller's type: 16 bytes per step, then two values of rope. */
template <int TYPE> struct given_part {
    enum {
        ELEMENT_BYTES = TYPE == SMLA_FLOAT_FP32 ? 4 : 2,
        COUNT = 16 / ELEMENT_BYTES,
        STEP = COUNT * SMLA_WARP_LANES,
        STEPS = SMLA_KV_LORA_RANK / STEP,
        TILE_LANES = SMLA_SCALE_TILE / COUNT, /* lanes that share a scale */
    };
    uint32_t nope[STEPS][4];
    uint32_t rope[ELEMENT_BYTES / 2];
};

/* The addresses of a lane's part of the next token. */
struct given_pointers {
    const uint8_t *nope;
    const uint8_t *rope;
};

template <int TYPE>
__device__ __forceinline__ given_pointers
find_token(const smla_cache_write_params &p, int64_t token)
{
    using layout = given_part<TYPE>;
    constexpr int BYTES = layout::ELEMENT_BYTES;
    const int lane = lane_idx();
    return {(const uint8_t *)p.kv_c + (token * p.kv_c_stride_token + lane * layout::COUNT) * BYTES,
            (const uint8_t *)p.k_pe + (token * p.k_pe_stride_token + lane * 2) * BYTES};
}

template <int TYPE, int ROW, bool ALIGNED>
__device__ __forceinline__ void
load_next(const smla_cache_write_params &p, given_pointers *pointers, given_part<TYPE> *part)
{
    using layout = given_part<TYPE>;
    constexpr int BYTES = layout::ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        smla_load_words<16, ALIGNED, BYTES>(pointers->nope + i * layout::STEP * BYTES,
                                            part->nope[i]);
    }
    if constexpr (smla_row<ROW>::HAS_ROPE) {
        smla_load_words<2 * BYTES, ALIGNED, BYTES>(pointers->rope, part->rope);
    }
    pointers->nope += p.kv_c_stride_token * BYTES;
    pointers->rope += p.k_pe_stride_token * BYTES;
}

/* Finds the scales of a lane's tiles, one per step. */
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
        /* Pack both steps in a word: step i in the lower half, step i + 1 in the upper half. */
        uint32_t both = smla_max_bf16x2(__byte_perm(largest[0], largest[1], 0x5410),
                                        __byte_perm(largest[0], largest[1], 0x7632));
#pragma unroll
        for (int step = layout::TILE_LANES / 2; step > 0; step /= 2) {
            both = smla_max_bf16x2(both, __shfl_xor_sync(ALL_LANES, both, step));
        }
        const float amax[2] = {smla_low_bf16(both), smla_high_bf16(both)};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            /* A tile that has only NaN gets the amax 0. */
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

/* Stores the scales. Of the lanes that share a tile, lane i stores the scale of step i, for i <
 * STEPS. */
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

template <int TYPE, int ROW, bool ALIGNED>
__device__ __forceinline__ void
write_token(const given_part<TYPE> &part, const row_offsets &offsets, uint8_t *row)
{
    using layout = given_part<TYPE>;
    constexpr bool OUT_ALIGNED = ALIGNED || smla_row<ROW>::IS_E4M3;
    constexpr int OUT_BYTES = smla_row<ROW>::IS_E4M3 ? layout::COUNT : 2 * layout::COUNT;
    const int lane = lane_idx();
    uint8_t *const nope = row + lane * OUT_BYTES;
    uint32_t pairs[layout::STEPS][layout::COUNT / 2];
    uint32_t rope;
#pragma unroll
    for (int i = 0; i < layout::STEPS; i++) {
        narrow<TYPE, layout::COUNT>(part.nope[i], pairs[i]);
    }
    if constexpr (smla_row<ROW>::HAS_ROPE) {
        narrow<TYPE, 2>(part.rope, &rope);
    }
    if constexpr (smla_row<ROW>::IS_E4M3) {
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
    if constexpr (smla_row<ROW>::HAS_ROPE) {
        smla_store_words<4, OUT_ALIGNED>(row + offsets.rope + lane * 4, &rope);
    }
}

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
                write_token<TYPE, ROW, ALIGNED>(part, args.offsets, row);
            }
        }
    }
}

struct write_row {
    smla_float_type type;
    smla_kv_row_number format;
    bool is_aligned;
    void (*kernel)(write_args);
};

const write_row write_rows[] = {
    {SMLA_FLOAT_BF16, SMLA_ROW_FP8_DS_MLA, true,
     write_kernel<SMLA_FLOAT_BF16, SMLA_ROW_FP8_DS_MLA, true>},
    {SMLA_FLOAT_BF16, SMLA_ROW_FP8_DS_MLA, false,
     write_kernel<SMLA_FLOAT_BF16, SMLA_ROW_FP8_DS_MLA, false>},
    {SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16, true,
     write_kernel<SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16, true>},
    {SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16, false,
     write_kernel<SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16, false>},
    {SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16_512, true,
     write_kernel<SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16_512, true>},
    {SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16_512, false,
     write_kernel<SMLA_FLOAT_BF16, SMLA_ROW_BFLOAT16_512, false>},
    {SMLA_FLOAT_FP16, SMLA_ROW_FP8_DS_MLA, true,
     write_kernel<SMLA_FLOAT_FP16, SMLA_ROW_FP8_DS_MLA, true>},
    {SMLA_FLOAT_FP16, SMLA_ROW_FP8_DS_MLA, false,
     write_kernel<SMLA_FLOAT_FP16, SMLA_ROW_FP8_DS_MLA, false>},
    {SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16, true,
     write_kernel<SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16, true>},
    {SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16, false,
     write_kernel<SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16, false>},
    {SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16_512, true,
     write_kernel<SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16_512, true>},
    {SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16_512, false,
     write_kernel<SMLA_FLOAT_FP16, SMLA_ROW_BFLOAT16_512, false>},
    {SMLA_FLOAT_FP32, SMLA_ROW_FP8_DS_MLA, true,
     write_kernel<SMLA_FLOAT_FP32, SMLA_ROW_FP8_DS_MLA, true>},
    {SMLA_FLOAT_FP32, SMLA_ROW_FP8_DS_MLA, false,
     write_kernel<SMLA_FLOAT_FP32, SMLA_ROW_FP8_DS_MLA, false>},
    {SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16, true,
     write_kernel<SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16, true>},
    {SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16, false,
     write_kernel<SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16, false>},
    {SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16_512, true,
     write_kernel<SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16_512, true>},
    {SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16_512, false,
     write_kernel<SMLA_FLOAT_FP32, SMLA_ROW_BFLOAT16_512, false>},
};

} /* namespace */

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_cuda_launch_concat_and_cache_mla(const smla_cache_write_params *p, const smla_cuda_device *)
{
    const int64_t element_bytes = p->input_type == SMLA_FLOAT_FP32 ? 4 : 2;
    const bool is_aligned = has_aligned_rows(p->kv) &&
                            smla_is_multiple(p->kv_c, p->kv_c_stride_token * element_bytes, 16) &&
                            smla_is_multiple(p->k_pe, p->k_pe_stride_token * element_bytes, 8);
    const int32_t run_tokens = choose_run_tokens(p->num_tokens);
    const int64_t num_blocks = count_write_blocks(p->num_tokens, run_tokens);
    const write_args args = {*p, smla_make_divisor(p->kv.block_size), offsets_of(p->kv),
                             run_tokens};
    for (const write_row &row : write_rows) {
        if (row.type == p->input_type && row.format == p->kv.format->number &&
            row.is_aligned == is_aligned) {
            return smla_launch(row.kernel, args, num_blocks, BLOCK_THREADS, 0, p->call.stream);
        }
    }
    return SMLA_NO_KERNEL;
}
