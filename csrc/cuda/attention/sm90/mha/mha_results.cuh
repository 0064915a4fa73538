/* mha_results.cuh: how a consumer warp of mha_attention_sm90.cu writes its rows' results. */
#pragma once

#include "cuda/attention/sm90/mha/mha_weights.cuh"

/* The lane's first row in the tile; its other one is 8 rows behind. */
template <int D>
__device__ __forceinline__ int
find_row(const mha_consumer<D> &state)
{
    return state.group * GROUP_ROWS + state.warp * WARP_ROWS + lane_again() / 4;
}

/* The sum over the lanes of a quad, not before `after` is known, which is not negative. Otherwise
 * ptxas would move this between the products in front, in the group's turn. */
__device__ __forceinline__ float
sum_of_quad(float x, int after)
{
    const int zero = after >> 31;
    x += __shfl_xor_sync(ALL_LANES, x, 1 + zero);
    return x + __shfl_xor_sync(ALL_LANES, x, 2 + zero);
}

/* The sum of squares of a lane's weights but the heaviest, as a share of their sum's square: 1 if
 * they were one key, 0 if they were very many. It is not known; this served all inputs well. */
constexpr float OTHERS_SHARE = 0.3f;

/* What is added to a row's sum because weights w are rounded in out, to w + d. Known are each
 * lane's heaviest weight and the sum of its others. If all values are unlike, least squares ask for
 * sum * sum(w d) / sum(w^2), both over all keys: the multiple of out that is closest to what the
 * roundings add to it. */
template <bool HALF>
__device__ __forceinline__ float
find_rounding(int top, float lane_sum, float sum, int after)
{
    const float weight = ptx_exp2(__int_as_float(top));
    const float rounded = HALF ? smla_cvt_float((uint16_t)ptx_cvt_f16x2(weight, weight))
                               : smla_low_bf16(smla_cvt_bf16x2(weight, weight));
    const float others = lane_sum - weight;
    const float shift = sum_of_quad(weight * (rounded - weight), after);
    const float spread = sum_of_quad(weight * weight + OTHERS_SHARE * others * others, after);
    return sum * (shift * smla_rcp(spread));
}

/* Writes lse, and finds the factors that turn the rows' out into results. There is no division
 * here: its rare path would be a called function, and ptxas would make every product of the kernel
 * wait for its end. */
template <int D, bool HALF>
__device__ __forceinline__ void
finish_rows(const mha_args &args, const mha_tile &tile, int after, const mha_consumer<D> &state,
            float factors[2])
{
    const mha_params &p = args.p;
    float sums[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float lane_sum = state.sum[i] + state.rest[i];
        sums[i] = sum_of_quad(lane_sum, after);
        const float rounding = find_rounding<HALF>(state.top[i], lane_sum, sums[i], after);
        factors[i] = sums[i] == 0.0f ? 0.0f : smla_rcp(sums[i] + rounding);
    }
    /* Even lanes have the lse of the first row, odd lanes that of the second. */
    const int lane = lane_again();
    const bool is_second = lane % 2 != 0;
    const float sum = is_second ? sums[1] : sums[0];
    const float reference = is_second ? state.reference[1] : state.reference[0];
    const float lse = find_lse(reference, (int)TOP_EXPONENT<HALF>, sum);
    const int own_row = find_row(state) + (is_second ? 8 : 0);
    if (tile.lse != NULL && own_row >= tile.absent_rows && lane % 4 < 2) {
        tile.lse[own_row * p.results.lse_stride_token] = lse;
    }
    if (__builtin_expect(p.logits.sinks.values != NULL, false)) {
        const float sink = __ldg(p.logits.sinks.values + tile.head * p.logits.sinks.stride);
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
                const uint32_t pair[2] = {smla_float_bits(state.out[4 * n + 2 * i] * factors[i]),
                                          smla_float_bits(state.out[4 * n + 2 * i + 1] *
                                                          factors[i])};
                smla_store_vector_2(to + 32 * n, pair);
            }
        }
    }
}

/* Writes out as bf16 or fp16, a segment at a time, through memory of the warp's own, so that a lane
 * writes 16 bytes and eight lanes write a row's segment. */
template <int D, bool HALF>
__device__ __forceinline__ void
write_halves(const mha_args &args, const mha_tile &tile, const mha_consumer<D> &state,
             const float factors[2], mha_memory<D> *shared)
{
    enum {
        CHUNKS = SEGMENT_BYTES / 16,
        ROWS_AT_ONCE = SMLA_WARP_LANES / CHUNKS,
        STORES = WARP_ROWS / ROWS_AT_ONCE,
    };
    const int lane = lane_again();
    const uint32_t memory = ptx_shared_address(shared->out[state.group * GROUP_WARPS + state.warp]);
    const int to_row = lane % WARP_ROWS;
    const int from_row = lane / CHUNKS;
    const int chunk = lane % CHUNKS;
    const int row = state.group * GROUP_ROWS + state.warp * WARP_ROWS + from_row;
    uint8_t *const to = tile.out + row * args.out_token_bytes + chunk * 16;
#pragma unroll
    for (int segment = 0; segment < VALUE_DIM / SEGMENT; segment++) {
#pragma unroll
        for (int n = 0; n < SEGMENT / 8; n += 2) {
            uint32_t pairs[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int at = segment * SEGMENT / 2 + 4 * n + 2 * k;
                const float low = state.out[at] * factors[k % 2];
                const float high = state.out[at + 1] * factors[k % 2];
                pairs[k] = HALF ? ptx_cvt_f16x2(low, high) : smla_cvt_bf16x2(low, high);
            }
            ptx_stmatrix_x4(memory + to_row * SEGMENT_BYTES +
                                ((n + lane / WARP_ROWS) ^ to_row % 8) * 16,
                            pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        __syncwarp(); /* the segment is visible to all lanes */
        uint32_t words[STORES][4];
#pragma unroll
        for (int k = 0; k < STORES; k++) {
            const int shared_row = ROWS_AT_ONCE * k + from_row;
            ptx_load_shared_16(memory + shared_row * SEGMENT_BYTES + (chunk ^ shared_row % 8) * 16,
                               words[k]);
        }
#pragma unroll
        for (int k = 0; k < STORES; k++) {
            smla_store_vector_4_if(to + ROWS_AT_ONCE * k * args.out_token_bytes +
                                       segment * SEGMENT_BYTES,
                                   words[k], row + ROWS_AT_ONCE * k >= tile.absent_rows);
        }
        __syncwarp(); /* all lanes have read the segment */
    }
}

/* Writes the results of the warp's rows, when `after` is known (sum_of_quad). */
template <int D, bool HALF>
__device__ __forceinline__ void
write_results(const mha_args &args, const mha_tile &tile, int after, const mha_consumer<D> &state,
              mha_memory<D> *shared)
{
    float factors[2];
    finish_rows<D, HALF>(args, tile, after, state, factors);
    if (__builtin_expect(args.out_is_fp32, false)) {
        write_floats(args, tile, state, factors);
    } else {
        write_halves<D, HALF>(args, tile, state, factors, shared);
    }
}
