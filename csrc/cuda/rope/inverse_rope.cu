/* inverse_rope.cu: rotates the output of attention back to position 0 and quantises it by groups.
 *
 * Computes     x = o, its last 64 values rotated by the negative angles of the token's position.
 *              Per 128 values: scale = the smallest power of two with 448 scale >= max(amax,
 *              1e-10), out = e4m3(x / scale). Without scales: out = bf16(x)
 * Shapes       o [T, H, 512] bf16, tokens and heads any stride apart; positions [T] int64 or int32;
 *              cos_sin [max_pos, 64] fp32; out [T, G, H / G * 512] e4m3 or bf16, tokens and groups
 *              any stride apart; scales [T, G, H / G * 4] fp32 or [T, G, H / G] int32, any strides
 * Shared mem   none
 * Roles        A warp has two neighbouring heads of a token: 4 vectors of 16 bytes per lane, all
 *              loaded before the first is used. Half a warp has a tile of 128 values in a vector,
 *              and the largest values of all four tiles are found together. The last 8 lanes have
 *              the RoPE values, in the second vector of each head. A block has up to 8 tokens of
 *              the same heads, because the scales of tokens are neighbours in memory. Warps of
 *              their own clear the rows of scales behind the last token. No barriers.
 * Roofline     Memory binds: 1024 bytes read and 528 written per head, 0.36 ns at 4.3 TB/s; H 64, T
 *              8192: 189 us. A lane runs about 70 instructions per vector, of which 24 bytes move;
 *              in that time 132 SMs of 128 lanes at 1.75 GHz run 165.
 * Numerics     fp32; products and sums of RoPE are rounded one by one, and a product with a power
 *              of two stands for the division: every byte is the CPU's. NaN is left out of amax,
 *              and an infinity counts as FLT_MAX. A rotated value that is NaN is positive. Other
 *              values keep their bits as bf16, and their sign as e4m3. A token with a bad position
 *              is not rotated.
 * Source       fused_inv_rope_fp8_quant of vLLM, for the operator.
 */
#include "core/params_norm.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"
#include "cuda/rope/rope.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCK_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    WARP_HEADS = 2,
    VECTOR = 8, /* values of a vector: 16 bytes of bf16 */
    VECTOR_WORDS = VECTOR / 2,
    HEAD_VECTORS = SMLA_V4_HEAD_DIM / (SMLA_WARP_LANES * VECTOR), /* vectors of a head per lane */
    TILE_LANES = SMLA_OUTPUT_TILE / VECTOR,
    ROPE_LANES = SMLA_QK_ROPE_HEAD_DIM / VECTOR,
    FIRST_ROPE_LANE = SMLA_WARP_LANES - ROPE_LANES,
};

static_assert(HEAD_VECTORS == 2 && TILE_LANES == 16, "a warp has two tiles per vector");
static_assert(VECTOR == 2 * ROPE_PAIRS, "a lane turns its vector");

struct inverse_args {
    smla_inverse_rope_params p;
    smla_divisor group_heads;
    smla_divisor head_blocks; /* number of blocks that have the same tokens */
    int64_t num_rows;         /* number of tokens, and of rows of zero scales behind them */
    int64_t num_blocks;
    int32_t token_shift; /* log2 of the tokens per block */
    bool angles_are_aligned;
};

struct head_index {
    int64_t group;
    int64_t head; /* index of the head in its group */
};

__device__ __forceinline__ head_index
find_head(const inverse_args &args, int64_t head)
{
    const int64_t group = smla_divide(head, args.group_heads);
    return {group, head - group * args.p.group_heads};
}

__device__ __forceinline__ int64_t
offset_of_scale(const smla_inverse_rope_params &p, int64_t token, int64_t group, int64_t column)
{
    return token * p.scale_stride_token + group * p.scale_stride_group +
           column * p.scale_stride_column;
}

/* ---- One vector ---------------------------------------------------------------------------- */

/* The largest magnitude of a lane's vector. */
__device__ __forceinline__ float
find_amax(const float x[VECTOR])
{
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        amax = fmaxf(amax, fabsf(x[i])); /* fmaxf ignores NaN */
    }
    return amax;
}

template <bool ALIGNED>
__device__ __forceinline__ void
store_e4m3(uint8_t *out, const float x[VECTOR], float scale)
{
    const float inverse = smla_bits_float((254u << 23) - smla_float_bits(scale));
    uint32_t bytes[VECTOR / 4];
#pragma unroll
    for (int k = 0; k < VECTOR / 4; k++) {
        float quotients[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            quotients[i] = x[4 * k + i] * inverse;
        }
        bytes[k] =
            smla_floats_to_e4m3x4(quotients) | (smla_signs_of_floats(x + 4 * k) & 0x80808080u);
    }
    smla_store_words<VECTOR, ALIGNED, 1>(out, bytes);
}

/* ---- One head ------------------------------------------------------------------------------ */

__device__ __forceinline__ void
store_scales(const smla_inverse_rope_params &p, int64_t token, head_index index,
             const float scales[HEAD_VECTORS])
{
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int half = lane / TILE_LANES;
    if (p.scales_are_packed) {
        const uint32_t mine =
            smla_float_bits(scales[0]) >> 23 | smla_float_bits(scales[1]) >> 23 << 16;
        const uint32_t others = __shfl_xor_sync(ALL_LANES, mine, TILE_LANES);
        if (lane == 0) {
            ((uint32_t *)p.out_scale)[offset_of_scale(p, token, index.group, index.head)] =
                mine | others << 8;
        }
        return;
    }
    if (lane % TILE_LANES == 0) {
#pragma unroll
        for (int i = 0; i < HEAD_VECTORS; i++) {
            const int64_t column = index.head * SMLA_OUTPUT_SCALES + 2 * i + half;
            ((float *)p.out_scale)[offset_of_scale(p, token, index.group, column)] = scales[i];
        }
    }
}

/* Whether a lane's values in a vector of a head are RoPE values. */
__device__ __forceinline__ bool
is_rotated(int vector)
{
    return vector == HEAD_VECTORS - 1 && (int)threadIdx.x % SMLA_WARP_LANES >= FIRST_ROPE_LANE;
}

/* The offset in out of a lane's first vector of a head, in elements. */
__device__ __forceinline__ int64_t
offset_of_vector(const smla_inverse_rope_params &p, int64_t token, head_index index)
{
    return token * p.out_stride_token + index.group * p.out_stride_group +
           index.head * SMLA_V4_HEAD_DIM + (int)threadIdx.x % SMLA_WARP_LANES * VECTOR;
}

/* ---- Heads of a warp ----------------------------------------------------------------------- */

typedef uint32_t head_words[HEAD_VECTORS][VECTOR_WORDS];

/* Quantises a warp's heads. The lanes exchange the magnitudes of all vectors at once, because each
 * exchange is a wait. */
template <bool ALIGNED>
__device__ __forceinline__ void
quantize_heads(const inverse_args &args, int64_t token, int32_t first_head,
               const rope_angles &angles, const head_words words[WARP_HEADS])
{
    const smla_inverse_rope_params &p = args.p;
    float x[WARP_HEADS][HEAD_VECTORS][VECTOR];
    float scales[WARP_HEADS][HEAD_VECTORS];
#pragma unroll
    for (int h = 0; h < WARP_HEADS; h++) {
#pragma unroll
        for (int i = 0; i < HEAD_VECTORS; i++) {
            smla_widen_bf16<VECTOR>(words[h][i], x[h][i]);
            if (is_rotated(i)) {
                rope_rotate<true>(x[h][i], angles);
            }
            scales[h][i] = find_amax(x[h][i]);
        }
    }
#pragma unroll
    for (int lanes = TILE_LANES / 2; lanes > 0; lanes /= 2) {
#pragma unroll
        for (int k = 0; k < WARP_HEADS * HEAD_VECTORS; k++) {
            float &amax = scales[k / HEAD_VECTORS][k % HEAD_VECTORS];
            amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, lanes));
        }
    }
#pragma unroll
    for (int h = 0; h < WARP_HEADS; h++) {
        if (first_head + h >= p.num_heads) {
            break;
        }
        const head_index index = find_head(args, first_head + h);
        uint8_t *const out = (uint8_t *)p.out + offset_of_vector(p, token, index);
#pragma unroll
        for (int i = 0; i < HEAD_VECTORS; i++) {
            scales[h][i] = smla_power_of_two_scale(scales[h][i], SMLA_E4M3_MAX, SMLA_OUTPUT_FLOOR);
            store_e4m3<ALIGNED>(out + i * SMLA_WARP_LANES * VECTOR, x[h][i], scales[h][i]);
        }
        store_scales(p, token, index, scales[h]);
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void
round_head(const inverse_args &args, int64_t token, int64_t head, const rope_angles &angles,
           head_words words)
{
    const smla_inverse_rope_params &p = args.p;
    uint16_t *const out = (uint16_t *)p.out + offset_of_vector(p, token, find_head(args, head));
#pragma unroll
    for (int i = 0; i < HEAD_VECTORS; i++) {
        if (is_rotated(i)) {
            float x[VECTOR];
            smla_widen_bf16<VECTOR>(words[i], x);
            rope_rotate<true>(x, angles);
            smla_round_to_bf16<VECTOR>(x, words[i]);
        }
        smla_store_words<16, ALIGNED>(out + i * SMLA_WARP_LANES * VECTOR, words[i]);
    }
}

/* Loads, rotates and stores a warp's heads; a head that does not exist is read as zeros. int32 can
 * hold the index of a head, because each head has 512 elements of out. */
template <bool QUANTIZES, bool ALIGNED>
__device__ __forceinline__ void
rotate_heads(const inverse_args &args, int64_t token, int32_t first_head)
{
    const smla_inverse_rope_params &p = args.p;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    head_words words[WARP_HEADS] = {};
#pragma unroll
    for (int h = 0; h < WARP_HEADS; h++) {
        if (first_head + h < p.num_heads) {
            const uint16_t *const x =
                p.o + token * p.o_stride_token + (first_head + h) * p.o_stride_head + lane * VECTOR;
#pragma unroll
            for (int i = 0; i < HEAD_VECTORS; i++) {
                smla_load_words<16, ALIGNED>(x + i * SMLA_WARP_LANES * VECTOR, words[h][i]);
            }
        }
    }
    rope_angles angles = {};
    if (lane >= FIRST_ROPE_LANE) {
        angles = rope_load(p.rope, token, (lane - FIRST_ROPE_LANE) * ROPE_PAIRS,
                           args.angles_are_aligned);
    }
    if constexpr (QUANTIZES) {
        quantize_heads<ALIGNED>(args, token, first_head, angles, words);
    } else {
#pragma unroll
        for (int h = 0; h < WARP_HEADS; h++) {
            if (first_head + h < p.num_heads) {
                round_head<ALIGNED>(args, token, first_head + h, angles, words[h]);
            }
        }
    }
}

/* Sets the scales of a row behind the last token to 0. */
__device__ __forceinline__ void
clear_scales(const inverse_args &args, int64_t row, int32_t first_head)
{
    const smla_inverse_rope_params &p = args.p;
    const int lane = (int)threadIdx.x % SMLA_WARP_LANES;
    const int head_columns = p.scales_are_packed ? 1 : SMLA_OUTPUT_SCALES;
    const int64_t head = first_head + lane / head_columns;
    if (lane < WARP_HEADS * head_columns && head < p.num_heads) {
        const head_index index = find_head(args, head);
        const int64_t column = index.head * head_columns + lane % head_columns;
        ((uint32_t *)p.out_scale)[offset_of_scale(p, row, index.group, column)] = 0;
    }
}

template <bool QUANTIZES, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS, QUANTIZES && !ALIGNED ? 3 : 4)
    inverse_kernel(const __grid_constant__ inverse_args args)
{
    ptx_wait_for_grids();
    const smla_inverse_rope_params &p = args.p;
    const int warp = (int)threadIdx.x / SMLA_WARP_LANES;
    const int shift = args.token_shift;
    for (int64_t block = blockIdx.x; block < args.num_blocks; block += gridDim.x) {
        const int64_t token_block = smla_divide(block, args.head_blocks);
        const int64_t head_block = block - token_block * args.head_blocks.divisor;
        const int64_t token = (token_block << shift) + (warp & ((1 << shift) - 1));
        const int64_t head = (head_block * (BLOCK_WARPS >> shift) + (warp >> shift)) * WARP_HEADS;
        if (head >= p.num_heads || token >= args.num_rows) {
            continue;
        }
        if (token < p.num_tokens) {
            rotate_heads<QUANTIZES, ALIGNED>(args, token, (int32_t)head);
        } else {
            clear_scales(args, token, (int32_t)head);
        }
    }
}

bool
is_aligned(const smla_inverse_rope_params *p)
{
    const int64_t element_bytes = p->out_scale == NULL ? 2 : 1;
    const int64_t vector_bytes = VECTOR * element_bytes;
    return smla_are_rows_aligned(p->o, p->o_stride_token, p->o_stride_head, 16) &&
           smla_are_rows_aligned(p->out, p->out_stride_token, p->out_stride_group, vector_bytes,
                                 element_bytes);
}

/* The number of rows: the tokens, and the rows of scales behind them up to the next multiple of
 * 4. */
int64_t
count_rows(const smla_inverse_rope_params *p)
{
    const int64_t padded =
        smla_count_parts(p->num_tokens, SMLA_SCALE_ROW_ALIGN) * SMLA_SCALE_ROW_ALIGN;
    const int64_t rows = p->scale_rows < padded ? p->scale_rows : padded;
    return rows > p->num_tokens ? rows : p->num_tokens;
}

} /* namespace */

cudaError_t
smla_cuda_launch_fused_inv_rope_fp8_quant(const smla_inverse_rope_params *params,
                                          const smla_cuda_device *)
{
    inverse_args args = {};
    args.p = *params;
    args.group_heads = smla_make_divisor(params->group_heads);
    args.num_rows = count_rows(params);
    args.angles_are_aligned = rope_is_aligned(params->rope);
    while (2 << args.token_shift <= BLOCK_WARPS && 2 << args.token_shift <= args.num_rows) {
        args.token_shift++;
    }
    const int64_t block_heads = (BLOCK_WARPS >> args.token_shift) * WARP_HEADS;
    args.head_blocks = smla_make_divisor(smla_count_parts(params->num_heads, block_heads));
    args.num_blocks =
        smla_count_parts(args.num_rows, (int64_t)1 << args.token_shift) * args.head_blocks.divisor;
    static const smla_kernel<inverse_args> kernels[2][2] = {
        {inverse_kernel<false, false>, inverse_kernel<false, true>},
        {inverse_kernel<true, false>, inverse_kernel<true, true>},
    };
    return smla_launch(kernels[params->out_scale != NULL][is_aligned(params)], args,
                       args.num_blocks, BLOCK_THREADS, 0, params->call.stream);
}
