/* wide_query.cuh: the query of attention_wide_sm90.cu. The gather warps bring it as bf16, as they
 * do for attention_bf16_sm90.cu. Here consumers make f16 of its values, in place.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_common.cuh"
#include "cuda/attention/table/wide_rows.h"

enum {
    LANE_HEADS = TILE_HEADS * QUERY_LANES / CONSUMER_THREADS, /* heads of which a lane has a part */
    LEAST_QUERY_EXPONENT = -80, /* a power of two that divides keys by 2^-40 still fits a bf16 */
};

/* The exponent that a head is divided by, so that its largest value has QUERY_EXPONENT. head_max
 * has the bits of that value, a finite bf16. */
static __device__ __forceinline__ int
find_head_exponent(uint32_t head_max)
{
    return head_max == 0
               ? 0
               : max((int)(head_max >> 7) - 127 - QUERY_EXPONENT, (int)LEAST_QUERY_EXPONENT);
}

/* Divides a lane's part of a head by powers of two. A head that is not finite becomes NaN: its
 * results are NaN if it has a key, and other heads do not change. */
template <int TILES>
static __device__ __forceinline__ void
convert_head(uint32_t (&words)[TILES][4], int exponent, bool is_finite, int unit_exponent)
{
    const float factor = is_finite ? power_of_two(-exponent) : NAN;
    const uint32_t rope_factors = two_powers_of_two(-exponent - unit_exponent);
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        uint32_t *const word = &words[i / 4][i % 4];
        *word = i / 4 == ROPE_TILE
                    ? ptx_mul_bf16x2(*word, rope_factors)
                    : ptx_cvt_f16x2(smla_low_bf16(*word) * factor, smla_high_bf16(*word) * factor);
    }
}

/* Waits for an item's query and converts it. Eight lanes have a head: 16 bytes of each tile. RoPE
 * values with a tile of their own stay bf16. They are divided by the unit of the keys, too, whose
 * RoPE values are not. Leaves what multiplies the scores of each head. All consumers may multiply
 * afterwards. */
template <typename Keys>
static __device__ __forceinline__ void
convert_query(const attention_launch &launch, const smla_wide_header *header, uint32_t parity,
              bf16_memory *shared)
{
    constexpr int TILES = Keys::ROPE ? QUERY_TILES : ROPE_TILE;
    const thread_index me = find_thread_index_again();
    const float unit = __ldg(&header->unit);
    const int unit_exponent = __ldg(&header->exponent);
    const uint32_t base = ptx_shared_address(shared);
    ptx_mbarrier_wait(BF16_AT(base, query_full), parity);
#pragma unroll
    for (int j = 0; j < LANE_HEADS; j++) {
        const int head = 8 * (4 * me.group + me.warp) + 4 * j + me.lane / QUERY_LANES;
        const uint32_t at =
            BF16_AT(base, query) + head * 128 + ((me.lane % QUERY_LANES) ^ (head & 7)) * 16;
        uint32_t words[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            ptx_load_shared_16(at + tile * TILE_BYTES, words[tile]);
        }
        const uint32_t head_max = find_head_max(words);
        const bool is_finite = head_max < 0x7F80;
        const int exponent = is_finite ? find_head_exponent(head_max) : 0;
        convert_head(words, exponent, is_finite, unit_exponent);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            ptx_store_shared_16(at + tile * TILE_BYTES, words[tile]);
        }
        if (me.lane % QUERY_LANES == 0) {
            shared->wide.score_scale[head] = launch.scale_log2 * unit * power_of_two(exponent);
        }
    }
    ptx_fence_async_shared();
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
}

/* Takes what multiplies the scores of the lane's heads. */
static __device__ __forceinline__ void
take_score_scales(const bf16_memory *shared, bf16_consumer *state)
{
    const thread_index me = find_thread_index_again();
    const volatile float *const scales = &shared->wide.score_scale[16 * me.warp + me.row];
    state->score_scale[0] = scales[0];
    state->score_scale[1] = scales[8];
}
