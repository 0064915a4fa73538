/* index_query.cu: rotates the indexer's queries and quantises them like the indexer's keys.
 *
 * Computes     x = bf16 of q, its last 64 values rotated by the angles of the token's position.
 *              FP8: per head scale = the smallest power of two with 448 scale >= max(amax, 1e-4),
 *              out = e4m3(x / scale), out_weights = weights * weight_scale * scale
 *              FP4: per 32 values scale = the smallest with 6 scale >= max(amax, 6 * 2^-126),
 *              out = e2m1(x / scale), out_weights = weights * weight_scale
 * Shapes       q [T, H, 128] bf16, tokens and heads any stride apart; weights [T, H] bf16 or fp32;
 *              positions [T] int64 or int32; cos_sin [max_pos, 64] fp32; out [T, H, 128] bytes or
 *              [T, H, 64], scales [T, H, 4] UE8M0, tokens and heads any stride apart
 * Shared mem   none
 * Roles        Half a warp has a head: a vector of 16 bytes per lane. A warp has 8 neighbouring
 *              heads of a token, and loads all of them before it uses the first. The last 8 lanes
 *              of a half have the RoPE values. The first 8 lanes have a weight each. No barriers.
 * Roofline     Memory binds: 256 bytes read and 132 or 72 written per head; H 64, T 8192: 48 us at
 *              4.3 TB/s. In the time of 8 heads of FP8 an SM issues 670 instructions; a warp runs
 *              about 500.
 * Numerics     fp32, each operation rounded: the bytes of the CPU. A rotated value that is NaN is
 *              positive, and so is a weight. NaN is left out of amax, and an infinity counts as
 *              FLT_MAX. A token with a bad position is not rotated.
 * Source       vLLM's fused_indexer_q_rope_quant, for the operator.
 */
#include <float.h>

#include "core/params_indexer.h"
#include "cuda/host/cuda.h"
#include "cuda/ptx/e2m1.cuh"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"
#include "cuda/rope/rope.cuh"

namespace {

enum {
    BLOCK_THREADS = 256,
    BLOCK_WARPS = BLOCK_THREADS / SMLA_WARP_LANES,
    VECTOR = 8, /* values of a vector: 16 bytes of bf16 */
    VECTOR_WORDS = VECTOR / 2,
    HEAD_LANES = SMLA_INDEX_HEAD_DIM / VECTOR,
    FIRST_ROPE_LANE = HEAD_LANES - SMLA_QK_ROPE_HEAD_DIM / VECTOR,
    STEP_HEADS = SMLA_WARP_LANES / HEAD_LANES,
    STEPS = 4, /* vectors per lane */
    WARP_HEADS = STEPS * STEP_HEADS,
};

static_assert(STEPS % 2 == 0, "two steps share the words of a reduction");
static_assert(HEAD_LANES == 16 && VECTOR == 2 * ROPE_PAIRS, "a lane turns its vector");

struct query_args {
    smla_index_query_params p;
    smla_divisor head_work_items; /* work items per token, one per warp */
    int64_t num_work_items;
    bool angles_are_aligned;
};

__device__ __forceinline__ int
lane_idx(void)
{
    return (int)threadIdx.x % SMLA_WARP_LANES;
}

__device__ __forceinline__ int
lane_of_head(void)
{
    return (int)threadIdx.x % HEAD_LANES;
}

/* Finds the scale bytes of a lane's vectors, two steps at a time. */
template <bool IS_FP4>
__device__ __forceinline__ void
find_scales(const uint32_t words[STEPS][VECTOR_WORDS], uint32_t scales[STEPS])
{
    constexpr int LANES = IS_FP4 ? 4 : HEAD_LANES; /* lanes that share a scale */
    constexpr float TOP = IS_FP4 ? SMLA_E2M1_MAX : SMLA_E4M3_MAX;
    constexpr float FLOOR =
        smla_kv_formats[IS_FP4 ? SMLA_ROW_MXFP4_INDEX : SMLA_ROW_FP8_INDEX].least_amax;
#pragma unroll
    for (int i = 0; i < STEPS; i += 2) {
        float found[2];
        smla_find_amax_of_tiles<LANES>(smla_find_largest<VECTOR>(words[i]),
                                       smla_find_largest<VECTOR>(words[i + 1]), found);
#pragma unroll
        /* If all values are NaN, so is `found`, which the bounds replace. */
        for (int k = 0; k < 2; k++) {
            scales[i + k] = smla_power_scale(fminf(fmaxf(found[k], FLOOR), FLT_MAX), TOP);
        }
    }
}

/* Quantises and stores a lane's vector. `out` is the address of its head. */
template <bool IS_FP4, bool ALIGNED>
__device__ __forceinline__ void
store_vector(const uint32_t words[VECTOR_WORDS], float inverse, uint8_t *out)
{
    if constexpr (IS_FP4) {
        float x[VECTOR];
        smla_widen_bf16<VECTOR>(words, x);
        const uint32_t codes = smla_quantize_e2m1x8(x, inverse * (1.0f / SMLA_E2M1_UNIT));
        smla_store_words<VECTOR / 2, ALIGNED, 1>(out + lane_of_head() * (VECTOR / 2), &codes);
    } else {
        uint32_t codes[VECTOR / 4];
        smla_quantize_products<VECTOR>(words, inverse, codes);
        smla_store_words<VECTOR, ALIGNED, 1>(out + lane_of_head() * VECTOR, codes);
    }
}

/* The scale byte of the head whose weight this lane has. Head 2 i + h of a warp belongs to step i
 * and half h. */
__device__ __forceinline__ uint32_t
find_scale_of_weight(const uint32_t scales[STEPS])
{
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const uint32_t scale = __shfl_sync(ALL_LANES, scales[i], lane_idx() % 2 * HEAD_LANES);
        found = lane_idx() / 2 == i ? scale : found;
    }
    return found;
}

/* Rotates a lane's vectors. A NaN that this gives is positive, whatever its other bits are. */
__device__ __forceinline__ void
rotate_vectors(const query_args &args, int64_t token, uint32_t words[STEPS][VECTOR_WORDS])
{
    const rope_angles angles =
        rope_load(args.p.rope, token, (lane_of_head() - FIRST_ROPE_LANE) * ROPE_PAIRS,
                  args.angles_are_aligned);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        float x[VECTOR];
        smla_widen_bf16<VECTOR>(words[i], x);
        rope_rotate<false>(x, angles);
#pragma unroll
        for (int k = 0; k < VECTOR_WORDS; k++) {
            words[i][k] = smla_cvt_bf16x2(x[2 * k], x[2 * k + 1]);
        }
    }
}

template <bool IS_FP4, bool ALIGNED>
__device__ __forceinline__ void
quantize_heads(const query_args &args, int64_t token, int64_t first_head)
{
    const smla_index_query_params &p = args.p;
    const int num_heads =
        (int)(p.num_heads - first_head < WARP_HEADS ? p.num_heads - first_head : WARP_HEADS);
    const int half = lane_idx() / HEAD_LANES; /* index of the lane's head in each step */
    const uint16_t *const q = p.q + token * p.q_stride_token +
                              (first_head + half) * p.q_stride_head + lane_of_head() * VECTOR;
    uint32_t words[STEPS][VECTOR_WORDS] = {};
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (i * STEP_HEADS + half < num_heads) {
            smla_load_words<16, ALIGNED>(q + i * STEP_HEADS * p.q_stride_head, words[i]);
        }
    }
    const bool has_weight = lane_idx() < num_heads; /* lane i has the weight of head i */
    float weight = 0.0f;
    if (has_weight) {
        weight = smla_read_float(p.weights, p.weights_type == SMLA_FLOAT_BF16,
                                 token * p.weights_stride_token + first_head + lane_idx());
    }
    if (lane_of_head() >= FIRST_ROPE_LANE) {
        rotate_vectors(args, token, words);
    }
    __syncwarp();
    uint32_t scales[STEPS];
    find_scales<IS_FP4>(words, scales);
    uint8_t *const out =
        p.out + token * p.out_stride_token + (first_head + half) * p.out_stride_head;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        if (i * STEP_HEADS + half < num_heads) {
            store_vector<IS_FP4, ALIGNED>(words[i], smla_invert_power(scales[i]),
                                          out + i * STEP_HEADS * p.out_stride_head);
            if (IS_FP4 && lane_of_head() % 4 == 0) {
                p.out_scale[token * p.out_scale_stride_token +
                            (first_head + half + i * STEP_HEADS) * p.out_scale_stride_head +
                            lane_of_head() / 4] = (uint8_t)scales[i];
            }
        }
    }
    __syncwarp();
    /* Exact in fp64, because a scale is a power of two. In fp32 two of three factors may
     * overflow. */
    double product = (double)weight * (double)p.weight_scale;
    if constexpr (!IS_FP4) {
        product *= (double)smla_bits_float(find_scale_of_weight(scales) << 23);
    }
    weight = __double2float_rn(product);
    if (has_weight) {
        p.out_weights[token * p.out_weights_stride_token + first_head + lane_idx()] =
            isnan(weight) ? smla_bits_float(0x7FC00000u) : weight;
    }
}

template <bool IS_FP4, bool ALIGNED>
__global__ void
__launch_bounds__(BLOCK_THREADS) query_kernel(const __grid_constant__ query_args args)
{
    ptx_wait_for_grids();
    const int64_t step = (int64_t)gridDim.x * BLOCK_WARPS;
    int64_t work = (int64_t)blockIdx.x * BLOCK_WARPS + threadIdx.x / SMLA_WARP_LANES;
    for (; work < args.num_work_items; work += step) {
        const int64_t token = smla_divide(work, args.head_work_items);
        const int64_t part = work - token * args.head_work_items.divisor;
        quantize_heads<IS_FP4, ALIGNED>(args, token, part * WARP_HEADS);
    }
}

bool
is_aligned(const smla_index_query_params *p)
{
    const int64_t bytes = p->out_scale == NULL ? VECTOR : VECTOR / 2;
    return smla_are_rows_aligned(p->q, p->q_stride_token, p->q_stride_head, 16) &&
           smla_are_rows_aligned(p->out, p->out_stride_token, p->out_stride_head, bytes, 1);
}

} /* namespace */

cudaError_t
smla_cuda_launch_fused_indexer_q_rope_quant(const smla_index_query_params *params,
                                            const smla_cuda_device *)
{
    query_args args = {};
    args.p = *params;
    args.head_work_items = smla_make_divisor(smla_count_parts(params->num_heads, WARP_HEADS));
    args.num_work_items = params->num_tokens * args.head_work_items.divisor;
    args.angles_are_aligned = rope_is_aligned(params->rope);
    static const smla_kernel<query_args> kernels[2][2] = {
        {query_kernel<false, false>, query_kernel<false, true>},
        {query_kernel<true, false>, query_kernel<true, true>},
    };
    return smla_launch(kernels[params->out_scale != NULL][is_aligned(params)], args,
                       smla_count_parts(args.num_work_items, BLOCK_WARPS), BLOCK_THREADS, 0,
                       params->call.stream);
}
