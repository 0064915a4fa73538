/* compressor_row.cuh: how the pooled values of a group become a row of the cache, and the arguments
 * of the compressor's kernels. compressor.cuh has the seven headings. */
#pragma once

#include "cuda/cache/row_encoder.cuh"
#include "cuda/compressor/partial_states.cuh"
#include "cuda/norm/rms_norm.cuh"
#include "cuda/rope/rope.cuh"

namespace {

struct compress_args {
    smla_compress_params p;
    smla_divisor ratio;
    smla_divisor state_block_size;
    smla_divisor block_size;
    int64_t run_tokens; /* tokens that a CTA takes at a time */
    bool angles_are_aligned;
};

/* The group that a CTA closes. */
struct group {
    int64_t token; /* the group's last token */
    int64_t position;
    int32_t req;
};

/* ---- Rows ---------------------------------------------------------------------------------- */

/* Returns the sum of a row's squares to every lane. In a row of 128 values, a lane has four of the
 * 256 partial sums, half of a vector; the other 128 partial sums are 0. */
template <int COUNT, int STEPS>
__device__ __forceinline__ float
sum_squares(const float x[STEPS][COUNT])
{
    if constexpr (COUNT == NORM_VECTOR) {
        float sums[NORM_VECTOR] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            norm_add_squares(sums, x[s]);
        }
        return norm_fold_sums(sums);
    } else {
        float squares[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            squares[i] = __fmul_rn(x[0][i], x[0][i]);
        }
        float sum = __fadd_rn(__fadd_rn(squares[0], squares[1]), __fadd_rn(squares[2], squares[3]));
        sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
#pragma unroll
        for (int lanes = SMLA_WARP_LANES / 2; lanes > 1; lanes /= 2) {
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, lanes));
        }
        return sum;
    }
}

/* Rotates the values of a lane that are among the last 64. */
template <int COUNT>
__device__ __forceinline__ void
rotate_lane(const compress_args &args, int64_t position, float x[COUNT])
{
    constexpr int FIRST_LANE = SMLA_WARP_LANES - SMLA_QK_ROPE_HEAD_DIM / COUNT;
    const int pair = (lane_idx() - FIRST_LANE) * (COUNT / 2);
    if (pair < 0) {
        return;
    }
    const int first = pair / ROPE_PAIRS * ROPE_PAIRS;
    rope_angles angles = rope_load_at(args.p.rope, position, first, args.angles_are_aligned);
    float rotated[2 * ROPE_PAIRS] = {};
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        rotated[i] = x[i];
    }
    if (pair != first) { /* take the second half of the angles */
        angles.cos[0] = angles.cos[2];
        angles.cos[1] = angles.cos[3];
        angles.sin[0] = angles.sin[2];
        angles.sin[1] = angles.sin[3];
    }
    rope_rotate<false>(rotated, angles);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = rotated[i];
    }
}

__device__ __forceinline__ float
load_weight(const smla_compress_params &p, int i)
{
    return smla_read_float(p.norm_weight, p.weight_type == SMLA_FLOAT_BF16, i);
}

/* Brings the factors of a group's row to L2: the weights and the angles. Thread i brings line i of
 * each. */
__device__ __forceinline__ void
prefetch_factors(const smla_compress_params &p, int64_t position, int i)
{
    enum { LINE = 128 };
    const int64_t at = (int64_t)i * LINE;
    const int64_t weight_bytes = p.dim * (p.weight_type == SMLA_FLOAT_BF16 ? 2 : 4);
    ptx_prefetch_l2((const uint8_t *)p.norm_weight + at, at < weight_bytes);
    const bool has_angles = position >= 0 && position < p.rope.max_pos;
    ptx_prefetch_l2((const uint8_t *)(p.rope.cos_sin + position * p.rope.cos_sin_stride_pos) + at,
                    has_angles && at < SMLA_QK_ROPE_HEAD_DIM * (int64_t)sizeof(float));
}

/* smla_floats_to_bf16x2 for results of arithmetic. NaN needs no path of its own, because
 * arithmetic gives the positive one. */
__device__ __forceinline__ uint32_t
round_products(float low, float high)
{
    /* Difference between the conversion's NaN and the library's. */
    const uint32_t fix = 0x7FFFu ^ 0x7FC0u;
    const uint32_t pair = smla_cvt_bf16x2(low, high);
    return pair ^ (isnan(low) ? fix : 0u) ^ (isnan(high) ? fix << 16 : 0u);
}

/* Normalises, rotates and stores the pooled values of a group. A warp calls this. */
template <int ROW, bool ALIGNED>
__device__ __forceinline__ void
finish_row(const compress_args &args, const group &of, const float *pooled)
{
    using layout = key_part<ROW>;
    constexpr int COUNT = layout::COUNT;
    const smla_compress_params &p = args.p;
    const smla_kv_token to =
        row_of_slot(p.insert.kv, args.block_size, read_slot(p.insert, of.token));
    const float inverse = 1.0f / smla_load_given_scale(p.insert.kv_scale);
    const int at = lane_idx() * COUNT;
    float x[layout::STEPS][COUNT];
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[s][i] = pooled[s * layout::STEP + at + i];
        }
    }
    const float factor = norm_factor(sum_squares<COUNT, layout::STEPS>(x), layout::VALUES, p.eps);
    layout key;
#pragma unroll
    for (int s = 0; s < layout::STEPS; s++) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            x[s][i] =
                __fmul_rn(__fmul_rn(x[s][i], factor), load_weight(p, s * layout::STEP + at + i));
        }
        if (s == layout::STEPS - 1) {
            rotate_lane<COUNT>(args, of.position + 1 - p.states.ratio, x[s]);
        }
#pragma unroll
        for (int k = 0; k < COUNT / 2; k++) {
            key.pairs[s][k] = round_products(x[s][2 * k], x[s][2 * k + 1]);
        }
    }
    store_key<ROW, ALIGNED>(key, inverse, to);
}

} /* namespace */
