/* hopper_query.cuh: how a work begins in attention_sm90.cu: its query in shared memory, permuted and
 * scaled, and the powers of two that its scales and values are taken relative to.
 */
#ifndef SMLA_CUDA_HOPPER_QUERY_CUH
#define SMLA_CUDA_HOPPER_QUERY_CUH

#include "hopper.cuh"

/* ---- Consumers: query ---------------------------------------------------------------------- */

/* A lane's part of the query of head 8 warp + row: of each scale tile the dimensions 32 column to
 * 32 column + 31, and 16 of the RoPE part. */
typedef struct query_part {
    uint32_t nope[SMLA_NUM_SCALE_TILES][16];
    uint32_t rope[8];
} query_part;

template <bool ALIGNED>
static __device__ __forceinline__ void
load_query_part(const smla_attention_params &params, const cta_work &work, int head, int column,
                query_part *part)
{
    const uint16_t *const nope = params.q_nope + work.token * params.q_nope_stride_token +
                                 (work.first_head + head) * params.q_nope_stride_head + 32 * column;
    const uint16_t *const rope = params.q_pe + work.token * params.q_pe_stride_token +
                                 (work.first_head + head) * params.q_pe_stride_head + 16 * column;
#pragma unroll
    for (int t = 0; t < SMLA_NUM_SCALE_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            smla_load_words<16, ALIGNED>(nope + t * SMLA_SCALE_TILE + 8 * i, &part->nope[t][4 * i]);
        }
    }
    smla_load_words<16, ALIGNED>(rope, &part->rope[0]);
    smla_load_words<16, ALIGNED>(rope + 8, &part->rope[4]);
}

static __device__ __forceinline__ uint32_t
max_of_pairs(uint32_t pair_max, uint32_t pair)
{
    return __vmaxu2(pair_max, pair & 0x7FFF7FFFu);
}

/* The largest absolute value, as the bits of a bf16, of the lane's head. */
static __device__ __forceinline__ uint32_t
find_query_max(const query_part &part)
{
    uint32_t pair = 0;
#pragma unroll
    for (int t = 0; t < SMLA_NUM_SCALE_TILES; t++) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            pair = max_of_pairs(pair, part.nope[t][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        pair = max_of_pairs(pair, part.rope[i]);
    }
    uint32_t value = max(pair & 0xFFFFu, pair >> 16);
    value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
    return max(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

/* One 64-dimension tile of the lane's head: word i of 16 dimensions goes to chunk i, of 8, and
 * there to word `column`: the order in which score_block has bytes of rows. */
template <typename Shape>
static __device__ __forceinline__ void
store_query_words(hopper_memory<Shape> *shared, int tile, int head, int column,
                  const uint32_t words[8])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        *(uint32_t *)&shared->query[tile][head][(i ^ (head & 7)) * 16 + 4 * column] = words[i];
    }
}

template <typename Shape>
static __device__ __forceinline__ void
store_query_nope(hopper_memory<Shape> *shared, int head, int column, const query_part &part,
                 float factor)
{
#pragma unroll
    for (int tile = 0; tile < 2 * SMLA_NUM_SCALE_TILES; tile++) {
        uint32_t words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t pair = part.nope[tile / 2][tile % 2 * 8 + i];
            words[i] = ptx_cvt_f16x2(smla_low_bf16(pair) * factor, smla_high_bf16(pair) * factor);
        }
        store_query_words(shared, tile, head, column, words);
    }
}

/* The largest exponent of a scale among the warp's keys of the work's first 128, 0 for none. */
template <typename Shape>
static __device__ __forceinline__ uint32_t
find_scale_max(const hopper_addresses &at, const lane_place &me, int slot, uint32_t parity)
{
    ptx_mbarrier_wait(at.full + 8 * slot, parity);
    const key_masks is_key = load_key_masks(at, me, slot);
    const uint32_t from =
        at.ring + slot * GRANULE_BYTES + me.row * FP8_ROW_BYTES + SCALE_OFFSET + 4 * me.column;
    const uint32_t a = ptx_load_shared_4(from) & is_key.first;
    const uint32_t b = ptx_load_shared_4(from + 8 * FP8_ROW_BYTES) & is_key.second;
    return __reduce_max_sync(0xFFFFFFFFu, max(a & 0x7F800000u, b & 0x7F800000u)) >> 23;
}

/* The query to shared memory, and from it and the scales of the first 128 keys the powers of two
 * of the work. After it everyone may multiply. */
template <typename Shape>
static __device__ __forceinline__ void
store_query(const hopper_launch &launch, const cta_work &work, const lane_place &me,
            hopper_memory<Shape> *shared, consumer<Shape> *state)
{
    const hopper_addresses at = find_addresses(shared, me.group);
    const smla_attention_params &params = launch.base.params;
    const int warp = 4 * me.group + me.warp;
    const int head = 8 * warp + me.row;
    query_part part = {};
    if (head < work.num_heads) {
        if (launch.base.q_is_aligned) {
            load_query_part<true>(params, work, head, me.column, &part);
        } else {
            load_query_part<false>(params, work, head, me.column, &part);
        }
    }
    uint32_t head_max = find_query_max(part);
    const bool is_finite =
        head_max < 0x7F80; /* else the head's results are NaN, whatever happens */
    head_max = is_finite ? head_max : 0;
    if (head < Shape::HEADS && me.column == 0) {
        shared->reference[head] = is_finite ? 0.0f : NAN;
    }
    const uint32_t warp_max = __reduce_max_sync(0xFFFFFFFFu, head_max);
    if (me.lane == 0) {
        shared->query_max[warp] = warp_max;
    }
    /* zeros in place of the block before group 1's first */
    if (me.group == 1) {
#pragma unroll
        for (int i = 0; i < 64 * Shape::PROB_BYTES / 16 / GROUP_THREADS; i++) {
            ((uint4 *)shared->probs[1])[i * GROUP_THREADS + 32 * me.warp + me.lane] =
                make_uint4(0, 0, 0, 0);
        }
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    uint32_t query_max = 0;
#pragma unroll
    for (int i = 0; i < (Shape::HEADS + 7) / 8; i++) {
        query_max = max(query_max, shared->query_max[i]);
    }
    int exponent = query_max == 0 ? 0 : (int)(query_max >> 7) - 127 - QUERY_EXPONENT;
    lose_row(shared, exponent > MAX_QUERY_EXPONENT || exponent < -MAX_QUERY_EXPONENT ||
                         (head_max != 0 && (head_max >> 7) + MAX_HEAD_RATIO < query_max >> 7));
    exponent = min(max(exponent, -(int)MAX_QUERY_EXPONENT), (int)MAX_QUERY_EXPONENT);
    if (head < Shape::HEADS) {
        store_query_nope(shared, head, me.column, part, power_of_two(-exponent));
    }
    int slot = state->own + me.warp;
    const uint32_t parity = (state->phase & RING_PARITY) ^ (slot >= Shape::GRANULES);
    slot = wrap_slot<Shape>(slot);
    const uint32_t warp_scale = find_scale_max<Shape>(at, me, slot, parity);
    if (me.lane == 0) {
        shared->scale_max[warp] = warp_scale;
    }
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    uint32_t scale_max = 0;
#pragma unroll
    for (int i = 0; i < CONSUMER_WARPS; i++) {
        scale_max = max(scale_max, shared->scale_max[i]);
    }
    int key_exponent = scale_max == 0 ? 0 : (int)scale_max - 127 - SCALE_EXPONENT;
    key_exponent = min(max(key_exponent, -(int)MAX_KEY_EXPONENT), (int)MAX_KEY_EXPONENT);
    if (head < Shape::HEADS) {
        const uint32_t factor = (uint32_t)(127 - exponent - key_exponent) * 0x00800080u;
        uint32_t words[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            words[i] = ptx_mul_bf16x2(part.rope[i], factor);
        }
        store_query_words(shared, QUERY_TILES - 1, head, me.column, words);
    }
    const float score_scale =
        launch.base.scale_log2 * power_of_two(exponent) * power_of_two(key_exponent);
    lose_row(shared, !(fabsf(score_scale) <= 0x1p100f) ||
                         (fabsf(score_scale) < 0x1p-100f && launch.base.scale_log2 != 0.0f));
    if (warp == 0 && me.lane == 0) {
        shared->score_scale = score_scale;
        shared->key_unit = power_of_two(key_exponent);
        shared->window = (uint32_t)(key_exponent + 127 - WINDOW_LOW);
    }
    ptx_fence_async_shared();
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
}

#endif /* SMLA_CUDA_HOPPER_QUERY_CUH */
