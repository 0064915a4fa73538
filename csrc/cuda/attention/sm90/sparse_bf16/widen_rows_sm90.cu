/* widen_rows_sm90.cu: makes rows of f16 of caches of FP8 rows, once for all query tokens of a
 * prefill (attention_wide_sm90.cu).
 *
 * Computes     E = 2^e from the largest scale of the caches; per row, f16(code * scale / E), and
 *              the RoPE values: of fp8_ds_mla as they are, of fp8_v4 f16(value / E)
 * Shapes       caches of fp8_ds_mla, or of fp8_v4, rows aligned to 16 bytes -> the workspace: a
 *              header and a row of 1152 bytes, or 1024, per slot (wide_rows.h)
 * Shared mem   32 bytes, for a block's maximum
 * Roles        Two kernels, because every row needs E before it is written.
 *                find_scales  A thread per row reads its scales. Each block leaves its maximum in a
 *                             place of its own, so nothing needs to be zero before.
 *                widen_rows   Each block finds E from these maxima. A warp takes ROWS rows at a
 *                             time, and loads all of them before it stores the first: lane l has
 *                             values 8 l to 8 l + 7 of each half, and lanes 0 to 7 of fp8_ds_mla
 *                             have the RoPE part.
 * Roofline     Memory: 656 bytes in and 1152 out per row. 128k rows are 237 MB, 55 us at 4.3 TB/s;
 *              the first pass reads a sector of 32 bytes per row, 4 MB. Both took 63 us more over
 *              128k rows than over 8k (H200, README.md), which is 0.85 of that rate. The first pass
 *              over fp8_v4 reads RoPE values, too: 136 of 584 bytes.
 * Numerics     A product of a code and a scale is rounded to fp32, then to f16. The largest scale
 *              lies between 2^6 E and 2^7 E, so 448 times it fits, and RoPE values of fp8_v4 are
 *              below 2^16 E. What is below 2^-14 E loses bits, 2^-25 E at most, as in
 *              attention_fp8_sm90.cu. There E may be 2^3 at most and 2^-40 at least, and here, too.
 *              So a scale of 2^10 or more sets is_refused, and no row is written. A largest
 *              scale below 2^-34 does so, too, unless it is below 2^-125, as in a cache of zeros.
 *              NaN scales and codes give NaN.
 * Source       ours
 */
#include "cuda/attention/keys/key_source.cuh"
#include "cuda/attention/table/wide_rows.h"
#include "cuda/ptx/numeric.cuh"
#include "cuda/ptx/widen_e4m3.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCK_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    BLOCKS_PER_SM = 4,
    ROWS = 4,       /* rows per warp at a time */
    ROPE_LANES = 8, /* lanes with 16 bytes of RoPE values each */
    NAN_BYTE = 255, /* a UE8M0 scale that is NaN */
    /* exponents of E, as in fp8_common.cuh */
    TOP_SCALE_EXPONENT = 6,
    TOP_ROPE_EXPONENT = 15,
    MAX_UNIT_EXPONENT = 3,
    MIN_UNIT_EXPONENT = -40,
    USUAL_UNIT_EXPONENT = -9, /* where all rows are zeros */
};

struct widen_args {
    smla_kv_view kv[2];
    smla_divisor block_size[2];
    int64_t past_slots[2]; /* a list's slots end here; slots count on over both lists */
    smla_wide_header *header;
    int32_t num_maxima; /* blocks of find_scales */
};

/* A lane's part of a row. */
struct row_part {
    uint32_t codes[2][2]; /* eight codes of each half */
    float scales[2];
    uint32_t rope[4]; /* eight RoPE values, if the lane has any */
};

static __device__ __forceinline__ smla_kv_token
find_row(const widen_args &args, int64_t slot)
{
    const int list = slot >= args.past_slots[0];
    const int64_t own = list == 0 ? slot : slot - args.past_slots[0];
    const smla_divisor &block_size = args.block_size[list];
    const int64_t page = smla_divide(own, block_size);
    return smla_kv_token_at(&args.kv[list], page, own - page * block_size.divisor);
}

/* The largest value of a block's threads, in all of them. */
static __device__ __forceinline__ uint32_t
max_of_block(uint32_t value, uint32_t (&warp_maxima)[BLOCK_WARPS])
{
    value = __reduce_max_sync(ALL_LANES, value);
    if (threadIdx.x % SMLA_WARP_LANES == 0) {
        warp_maxima[threadIdx.x / SMLA_WARP_LANES] = value;
    }
    __syncthreads();
    return __reduce_max_sync(ALL_LANES, warp_maxima[threadIdx.x % BLOCK_WARPS]);
}

/* The exponent field of an fp32; 0 for NaN, whose products are NaN whatever E is. */
static __device__ __forceinline__ uint32_t
exponent_of_float(uint32_t word)
{
    const uint32_t size = word & 0x7FFFFFFFu;
    return size > 0x7F800000u ? 0 : size >> 23;
}

/* The exponent field of the largest scale of a row of fp8_ds_mla. */
static __device__ __forceinline__ uint32_t
find_largest_float(const smla_kv_token &row)
{
    uint32_t scales[SMLA_NUM_SCALE_TILES];
    smla_load_vector_4(row.row + smla_row<SMLA_ROW_FP8_DS_MLA>::SCALE_OFFSET, scales);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < SMLA_NUM_SCALE_TILES; i++) {
        largest = max(largest, exponent_of_float(scales[i]));
    }
    return largest;
}

/* The same of a row of fp8_v4. A RoPE value counts as the scale that needs as large an E. */
static __device__ __forceinline__ uint32_t
find_largest_byte(const smla_kv_token &row)
{
    uint32_t scales[2];
    smla_load_vector_2(row.scales, scales);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < smla_row<SMLA_ROW_FP8_V4>::INFO.num_scales; i++) {
        const uint32_t scale = scales[i / 4] >> 8 * (i % 4) & 0xFF;
        largest = max(largest, scale == NAN_BYTE ? 0 : scale);
    }
    uint32_t largest_rope = 0;
#pragma unroll
    for (int chunk = 0; chunk < ROPE_LANES; chunk++) {
        uint32_t words[4];
        smla_load_vector_4(row.row + smla_row<SMLA_ROW_FP8_V4>::ROPE_OFFSET + 16 * chunk, words);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            largest_rope = max(largest_rope, max(exponent_of_float(words[i] << 16),
                                                 exponent_of_float(words[i] & 0xFFFF0000u)));
        }
    }
    constexpr uint32_t BELOW = TOP_ROPE_EXPONENT - TOP_SCALE_EXPONENT;
    return max(largest, max(largest_rope, BELOW) - BELOW);
}

template <int ROW>
__global__ void
__launch_bounds__(BLOCK_THREADS) find_scales(const __grid_constant__ widen_args args)
{
    __shared__ uint32_t warp_maxima[BLOCK_WARPS];
    ptx_let_next_grid_start();
    ptx_wait_for_grids();
    uint32_t largest = 0;
    const int64_t step = (int64_t)gridDim.x * BLOCK_THREADS;
#pragma unroll 4
    for (int64_t slot = (int64_t)blockIdx.x * BLOCK_THREADS + threadIdx.x;
         slot < args.past_slots[1]; slot += step) {
        const smla_kv_token row = find_row(args, slot);
        largest = max(largest, ROW == SMLA_ROW_FP8_DS_MLA ? find_largest_float(row)
                                                          : find_largest_byte(row));
    }
    const uint32_t of_block = max_of_block(largest, warp_maxima);
    if (threadIdx.x == 0) {
        args.header->maxima[blockIdx.x] = of_block;
    }
}

/* The exponent of E for a largest scale of this exponent field. */
static __device__ __forceinline__ int
find_exponent(uint32_t largest_scale)
{
    return largest_scale <= 1 ? (int)USUAL_UNIT_EXPONENT
                              : (int)largest_scale - 127 - TOP_SCALE_EXPONENT;
}

/* 2^exponent, if no row is refused. */
static __device__ __forceinline__ float
unit_of(int exponent)
{
    return smla_bits_float((uint32_t)(exponent + 127) << 23);
}

/* Whether a lane's second half is RoPE values. */
template <int ROW>
static __device__ __forceinline__ bool
has_rope_half(int lane)
{
    return ROW == SMLA_ROW_FP8_V4 && lane >= SMLA_WARP_LANES - ROPE_LANES;
}

static __device__ __forceinline__ float
value_of_byte_scale(uint32_t scale)
{
    return scale == NAN_BYTE ? NAN : smla_bits_float(scale == 0 ? 0x00400000u : scale << 23);
}

template <int ROW>
static __device__ __forceinline__ row_part
load_part(const smla_kv_token &row, int lane)
{
    typedef smla_row<ROW> facts;
    constexpr int HALF = SMLA_KV_LORA_RANK / 2;
    row_part part = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half == 0 || !has_rope_half<ROW>(lane)) {
            const int first = half * HALF + 8 * lane;
            smla_load_vector_2(row.row + first, part.codes[half]);
            if constexpr (ROW == SMLA_ROW_FP8_DS_MLA) {
                part.scales[half] = __ldg((const float *)(row.row + facts::SCALE_OFFSET) +
                                          first / facts::INFO.scale_tile);
            } else {
                part.scales[half] =
                    value_of_byte_scale(__ldg(row.scales + first / facts::INFO.scale_tile));
            }
        }
    }
    const int rope_lane = ROW == SMLA_ROW_FP8_V4 ? lane - (SMLA_WARP_LANES - ROPE_LANES) : lane;
    if (rope_lane >= 0 && rope_lane < ROPE_LANES) {
        smla_load_vector_4(row.row + facts::ROPE_OFFSET + 16 * rope_lane, part.rope);
    }
    return part;
}

/* Stores a lane's part of a row, in multiples of E. */
template <int ROW>
static __device__ __forceinline__ void
store_part(uint8_t *row, int lane, const row_part &part, float inv_unit)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const bool is_rope = half == 1 && has_rope_half<ROW>(lane);
        const float scale = is_rope ? inv_unit : part.scales[half] * inv_unit;
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float values[2];
            ptx_cvt_f32x2_e4m3x2(part.codes[half][i / 2] >> 16 * (i % 2), values);
            if (is_rope) {
                values[0] = smla_low_bf16(part.rope[i]);
                values[1] = smla_high_bf16(part.rope[i]);
            }
            words[i] = ptx_cvt_f16x2(values[0] * scale, values[1] * scale);
        }
        smla_store_vector_4(row + half * SMLA_KV_LORA_RANK + 16 * lane, words);
    }
    if (ROW == SMLA_ROW_FP8_DS_MLA && lane < ROPE_LANES) {
        smla_store_vector_4(row + 2 * SMLA_KV_LORA_RANK + 16 * lane, part.rope);
    }
}

template <int ROW>
__global__ void
__launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM) widen_rows(const __grid_constant__ widen_args args)
{
    constexpr int WIDE_BYTES = 2 * smla_row<ROW>::INFO.head_dim;
    __shared__ uint32_t warp_maxima[BLOCK_WARPS];
    ptx_wait_for_grids();
    uint32_t largest = 0;
    for (int i = (int)threadIdx.x; i < args.num_maxima; i += BLOCK_THREADS) {
        largest = max(largest, *(const volatile uint32_t *)&args.header->maxima[i]);
    }
    const int exponent = find_exponent(max_of_block(largest, warp_maxima));
    const bool is_refused = exponent > MAX_UNIT_EXPONENT || exponent < MIN_UNIT_EXPONENT;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        args.header->unit = unit_of(exponent);
        args.header->exponent = exponent;
        args.header->is_refused = is_refused;
    }
    const float inv_unit = unit_of(-exponent);
    const int lane = (int)(threadIdx.x % SMLA_WARP_LANES);
    const int64_t num_slots = args.past_slots[1];
    const int64_t step = (int64_t)gridDim.x * BLOCK_WARPS * ROWS;
    uint8_t *const to = (uint8_t *)args.header + SMLA_WIDE_ROW_BYTES;
    int64_t slot = ((int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES) * ROWS;
#pragma unroll 1
    for (; slot < num_slots && !is_refused; slot += step) {
        row_part parts[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) { /* the last row is loaded again behind itself */
            parts[i] = load_part<ROW>(find_row(args, min(slot + i, num_slots - 1)), lane);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (slot + i < num_slots) {
                store_part<ROW>(to + (slot + i) * WIDE_BYTES, lane, parts[i], inv_unit);
            }
        }
    }
}

template <int ROW>
cudaError_t
launch_widening(widen_args args, const smla_call &call)
{
    const int64_t num_slots = args.past_slots[1];
    const int64_t num_sms = smla_cuda_find_device(call.stream.device_id)->num_sms;
    const int64_t num_maxima =
        smla_clamp_int64(smla_count_parts(num_slots, BLOCK_THREADS), 1, SMLA_WIDE_MAXIMA);
    const int64_t num_blocks = smla_clamp_int64(smla_count_parts(num_slots, BLOCK_WARPS * ROWS), 1,
                                                num_sms * BLOCKS_PER_SM);
    args.num_maxima = (int32_t)num_maxima;
    const cudaError_t code =
        smla_launch(find_scales<ROW>, args, num_maxima, BLOCK_THREADS, 0, call.stream);
    return code != cudaSuccess
               ? code
               : smla_launch(widen_rows<ROW>, args, num_blocks, BLOCK_THREADS, 0, call.stream);
}

} // namespace

/* ---- Launcher ------------------------------------------------------------------------------ */

cudaError_t
smla_widen_rows_sm90(const smla_attention_params *params, smla_wide_header *header)
{
    widen_args args = {};
    int64_t past_slot = 0;
    for (int i = 0; i < 2; i++) {
        const int list = i < params->keys.num_lists ? i : 0;
        args.kv[i] = params->keys.lists[list].kv;
        args.block_size[i] = smla_make_divisor(args.kv[i].block_size);
        past_slot += i < params->keys.num_lists ? smla_kv_num_slots(&args.kv[i]) : 0;
        args.past_slots[i] = past_slot;
    }
    args.header = header;
    return args.kv[0].format->number == SMLA_ROW_FP8_DS_MLA
               ? launch_widening<SMLA_ROW_FP8_DS_MLA>(args, params->call)
               : launch_widening<SMLA_ROW_FP8_V4>(args, params->call);
}
