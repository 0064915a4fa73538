/* mha_results.cuh: how a consumer warp of mha_attention_sm90.cu writes its rows' results. */
#pragma once

#include "cuda/varlen/sm90/mha_weights.cuh"

__device__ __forceinline__ float
log2_of(float x)
{
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(x));
    return log2;
}

/* ln(sum * 2^reference), for sums that are normal numbers, 0 or NaN. The logarithm of the mantissa
 * is off by 2^-23, and the exponent is exact. */
__device__ __forceinline__ float
find_lse_of_sum(float reference, float sum)
{
    const float ln_2_high = 0x1.62e43p-1f;
    const float ln_2_low = -0x1.05c61p-29f;
    const uint32_t least = 0x3F3504F3; /* sqrt(1/2) */
    const uint32_t bits = smla_float_bits(sum);
    const int32_t exponent = (int32_t)(bits - least) >> 23;
    const float log2 = log2_of(smla_bits_float(bits - ((uint32_t)exponent << 23)));
    const float ln = fmaf((float)exponent, ln_2_high, log2 * ln_2_high);
    const float lse = fmaf(reference, ln_2_high, fmaf(reference, ln_2_low, ln));
    return sum > 0.0f ? lse : sum == 0.0f ? -INFINITY : sum;
}

/* The lane's first row in the tile; its other one is 8 rows behind. */
template <int D>
__device__ __forceinline__ int
find_row(const mha_consumer<D> &state)
{
    return state.group * GROUP_ROWS + state.warp * WARP_ROWS + lane_again() / 4;
}

/* Writes lse, and finds the factors that turn the rows' out into results. There is no division here:
 * its rare path would be a called function, and ptxas would make every product of the kernel wait
 * for its end. */
template <int D, bool HALF>
__device__ __forceinline__ void
finish_rows(const mha_args &args, const mha_tile &tile, const mha_consumer<D> &state,
            float factors[2])
{
    const smla_varlen_params &p = args.p;
    float sums[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sums[i] = sum_of_quad(state.sum[i] + state.rest[i]);
        factors[i] = sums[i] == 0.0f ? 0.0f : smla_rcp(sums[i]);
    }
    /* Even lanes have the lse of the first row, odd lanes that of the second. */
    const int lane = lane_again();
    const bool is_second = lane % 2 != 0;
    const float sum = is_second ? sums[1] : sums[0];
    const float reference = is_second ? state.reference[1] : state.reference[0];
    const float lse = find_lse_of_sum(reference - WEIGHT_SHIFT<HALF>, sum);
    const int own_row = find_row(state) + (is_second ? 8 : 0);
    if (tile.lse != NULL && own_row >= tile.absent_rows && lane % 4 < 2) {
        tile.lse[own_row * p.lse_stride_token] = lse;
    }
    if (p.attn_sink != NULL) {
        const float sink = __ldg(p.attn_sink + tile.head * p.attn_sink_stride);
        const float share = sum == 0.0f ? 1.0f : smla_rcp(1.0f + expf(sink - lse));
        factors[0] *= __shfl_sync(ALL_LANES, share, lane & ~3);
        factors[1] *= __shfl_sync(ALL_LANES, share, (lane & ~3) + 1);
    }
}

/* Writes out as fp32. Four lanes write 32 neighbouring bytes. */
template <int D>
__device__ __forceinline__ void
write_floats(const mha_args &args, const mha_tile &tile, const mha_consumer<D> &state,
             const float factors[2])
{
    const int row = find_row(state);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int own_row = row + 8 * i;
        uint8_t *const to = tile.out + own_row * args.out_token_bytes + lane_again() % 4 * 8;
        if (own_row >= tile.absent_rows) {
#pragma unroll
            for (int n = 0; n < VALUE_DIM / 8; n++) {
                const uint32_t pair[2] = {
                    smla_float_bits(state.out[4 * n + 2 * i] * factors[i]),
                    smla_float_bits(state.out[4 * n + 2 * i + 1] * factors[i])};
                smla_store_vector_2(to + 32 * n, pair);
            }
        }
    }
}

/* Writes out as bf16 or fp16, through the warp's own rows of the queries' memory, so that a lane
 * writes 16 bytes and eight lanes write a segment of a row. */
template <int D, bool HALF>
__device__ __forceinline__ void
write_halves(const mha_args &args, const mha_tile &tile, const mha_consumer<D> &state,
             const float factors[2], mha_memory<D> *shared)
{
    enum { CHUNKS = SEGMENT_BYTES / 16, ROWS_AT_ONCE = SMLA_WARP_LANES / CHUNKS };
    constexpr int SEGMENT_STEP = GROUP_ROWS * SEGMENT_BYTES;
    const int lane = lane_again();
    const int first_row = state.warp * WARP_ROWS; /* in the group */
    const uint32_t memory =
        ptx_shared_address(shared->queries[state.group]) + first_row * SEGMENT_BYTES;
    const int to_row = lane % WARP_ROWS;
    const uint32_t put = memory + to_row * SEGMENT_BYTES;
#pragma unroll
    for (int n = 0; n < VALUE_DIM / 8; n += 2) {
        uint32_t pairs[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float low = state.out[4 * n + 2 * k] * factors[k % 2];
            const float high = state.out[4 * n + 2 * k + 1] * factors[k % 2];
            pairs[k] = HALF ? ptx_cvt_f16x2(low, high) : smla_cvt_bf16x2(low, high);
        }
        ptx_stmatrix_x4(put + n / 8 * SEGMENT_STEP + ((n % 8 + lane / WARP_ROWS) ^ to_row % 8) * 16,
                        pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    ptx_fence_async_shared(); /* a later copy of queries comes behind what this lane wrote */
    __syncwarp();             /* out is visible to all lanes */
    const int from_row = lane / CHUNKS;
    const int chunk = lane % CHUNKS;
    const int row = state.group * GROUP_ROWS + first_row + from_row;
    uint8_t *to = tile.out + row * args.out_token_bytes + chunk * 16;
#pragma unroll
    for (int k = 0; k < WARP_ROWS / ROWS_AT_ONCE; k++) {
        const int shared_row = ROWS_AT_ONCE * k + from_row;
        const uint32_t get = memory + shared_row * SEGMENT_BYTES + (chunk ^ shared_row % 8) * 16;
        const bool exists = row + ROWS_AT_ONCE * k >= tile.absent_rows;
#pragma unroll
        for (int segment = 0; segment < VALUE_DIM / SEGMENT; segment++) {
            uint32_t words[4];
            ptx_load_shared_16(get + segment * SEGMENT_STEP, words);
            smla_store_vector_4_if(to + segment * SEGMENT_BYTES, words, exists);
        }
        to += ROWS_AT_ONCE * args.out_token_bytes;
    }
}

/* Writes the values of the warp's rows. Afterwards this lane is done with the queries' memory. */
template <int D, bool HALF>
__device__ __forceinline__ void
write_values(const mha_args &args, const mha_tile &tile, const mha_consumer<D> &state,
             const float factors[2], mha_memory<D> *shared)
{
    if (args.out_is_fp32) {
        write_floats(args, tile, state, factors);
    } else {
        write_halves<D, HALF>(args, tile, state, factors, shared);
    }
}
