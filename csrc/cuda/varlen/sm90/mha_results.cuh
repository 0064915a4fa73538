/* mha_results.cuh: how a consumer warp of mha_attention_sm90.cu writes its rows' results. */
#pragma once

#include "cuda/varlen/sm90/mha_weights.cuh"

/* The place of a warp's rows in the arrays. */
struct mha_place {
    int64_t token; /* of the warp's row 0 */
    int64_t head;
    int absent; /* rows in front that the request does not have; may be negative */
};

template <int D>
__device__ __forceinline__ mha_place
find_place(const mha_tile &tile, const mha_consumer<D> &state)
{
    const int first_row = state.group * GROUP_ROWS + state.warp * WARP_ROWS;
    return mha_place{(int64_t)tile.first_query + first_row, tile.head,
                     tile.absent_rows - first_row};
}

/* Writes lse, and finds the factors that turn the rows' out into results. Even lanes finish the
 * first of the quad's two rows, odd lanes the second. There is no division here: its rare path would
 * be a called function, and ptxas would make every product of the kernel wait for its end. */
template <int D, bool HALF>
__device__ __forceinline__ void
finish_rows(const mha_args &args, const mha_place &place, const mha_consumer<D> &state,
            float factors[2])
{
    const smla_varlen_params &p = args.p;
    const float first_sum = sum_of_quad(state.sum[0] + state.rest[0]);
    const float second_sum = sum_of_quad(state.sum[1] + state.rest[1]);
    const int lane = lane_again();
    const bool is_second = lane % 2 != 0;
    const float sum = is_second ? second_sum : first_sum;
    const float reference = is_second ? state.reference[1] : state.reference[0];
    const float lse = find_lse(reference - WEIGHT_SHIFT<HALF>, sum);
    const int row = lane / 4 + (is_second ? 8 : 0);
    if (row >= place.absent && lane % 4 < 2) {
        write_lse(p, place.token + row, place.head, lse);
    }
    float factor = sum == 0.0f ? 0.0f : smla_rcp(sum);
    if (p.attn_sink != NULL && sum != 0.0f) {
        const float sink = __ldg(p.attn_sink + place.head * p.attn_sink_stride);
        factor *= smla_rcp(1.0f + expf(sink - lse));
    }
    factors[0] = __shfl_sync(ALL_LANES, factor, lane & ~3);
    factors[1] = __shfl_sync(ALL_LANES, factor, (lane & ~3) + 1);
}

/* Writes out as fp32. Four lanes write 32 neighbouring bytes. */
template <int D>
__device__ __forceinline__ void
write_floats(const mha_args &args, const mha_place &place, const mha_consumer<D> &state,
             const float factors[2])
{
    const smla_varlen_params &p = args.p;
    const int lane = lane_again();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane / 4 + 8 * i;
        float *const to = (float *)p.out + (place.token + row) * p.out_stride_token +
                          place.head * p.out_stride_head + lane % 4 * 2;
        if (row >= place.absent) {
#pragma unroll
            for (int n = 0; n < VALUE_DIM / 8; n++) {
                const uint32_t pair[2] = {
                    smla_float_bits(state.out[4 * n + 2 * i] * factors[i]),
                    smla_float_bits(state.out[4 * n + 2 * i + 1] * factors[i])};
                smla_store_vector_2(to + 8 * n, pair);
            }
        }
    }
}

/* Writes out as bf16 or fp16, a segment at a time, through memory of the warp's own, so that a lane
 * writes 16 bytes and eight lanes write a row's segment. */
template <int D, bool HALF>
__device__ __forceinline__ void
write_halves(const mha_args &args, const mha_place &place, const mha_consumer<D> &state,
             const float factors[2], mha_memory<D> *shared)
{
    enum { CHUNKS = SEGMENT_BYTES / 16, ROWS_AT_ONCE = SMLA_WARP_LANES / CHUNKS };
    const smla_varlen_params &p = args.p;
    const uint32_t memory =
        ptx_shared_address(shared->out[state.group * GROUP_WARPS + state.warp]);
    const int lane = lane_again();
    const int to_row = lane % WARP_ROWS;
    const int from_row = lane / CHUNKS;
    const int chunk = lane % CHUNKS;
    uint16_t *const to = (uint16_t *)p.out + (place.token + from_row) * p.out_stride_token +
                         place.head * p.out_stride_head + chunk * 8;
    const int64_t step = ROWS_AT_ONCE * p.out_stride_token;
#pragma unroll
    for (int segment = 0; segment < VALUE_DIM / SEGMENT; segment++) {
#pragma unroll
        for (int n = 0; n < SEGMENT / 8; n += 2) {
            const float *const own = &state.out[segment * SEGMENT / 2 + 4 * n];
            uint32_t pairs[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float low = own[2 * k] * factors[k % 2];
                const float high = own[2 * k + 1] * factors[k % 2];
                pairs[k] = HALF ? ptx_cvt_f16x2(low, high) : smla_cvt_bf16x2(low, high);
            }
            ptx_stmatrix_x4(memory + to_row * SEGMENT_BYTES +
                                ((n + lane / WARP_ROWS) ^ to_row % 8) * 16,
                            pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        __syncwarp(); /* the segment is visible to all lanes */
#pragma unroll
        for (int k = 0; k < WARP_ROWS / ROWS_AT_ONCE; k++) {
            const int row = ROWS_AT_ONCE * k + from_row;
            uint32_t words[4];
            ptx_load_shared_16(memory + row * SEGMENT_BYTES + (chunk ^ row % 8) * 16, words);
            smla_store_vector_4_if(to + k * step + segment * SEGMENT, words, row >= place.absent);
        }
        __syncwarp(); /* all lanes have read the segment */
    }
}

template <int D, bool HALF>
__device__ __forceinline__ void
write_results(const mha_args &args, const mha_tile &tile, const mha_consumer<D> &state,
              mha_memory<D> *shared)
{
    const mha_place place = find_place(tile, state);
    float factors[2];
    finish_rows<D, HALF>(args, place, state, factors);
    if (args.out_is_fp32) {
        write_floats(args, place, state, factors);
    } else {
        write_halves<D, HALF>(args, place, state, factors, shared);
    }
}
