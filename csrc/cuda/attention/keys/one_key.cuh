/* one_key.cuh: rows of out of a work item with exactly one key, for every attention kernel.
 *
 * The kernels round weights to bf16 or f16; with FP8 rows they multiply them by the scale first.
 * Where a single key has all of the weight, its value would be off by a step. Here the value is
 * multiplied in fp32, and rounded once. So out is a bf16 row's value in every bit, and an FP8 row's
 * value within half a step of bf16 and 2^-20 of the value.
 *
 * Roles        Warps take the item's heads in turn. Lanes share the dimensions: lane l has values
 *              8 l to 8 l + 7 of each half of the NoPE part, and 2 l, 2 l + 1 of the RoPE part. The
 *              code needs no shared memory and no barrier, so any warps of a CTA can run it. The
 *              portable kernel has no scores yet, so attend_one_key computes everything without
 *              tensor cores: 1.3 us for each head of a warp. Hopper's kernels have scores, from
 *              which they know the weights, and need the key's value only (write_value).
 * Numerics     A lane's part of a score is 8 + 8 + 2 products deep; 5 sums over lanes follow. The
 *              unfinished row is like the kernels': max_log2, sum = 2^(max_log2 - reference), out =
 *              sum * value in fp32. out / sum is the value to 2^-22, here and in the combine
 *              kernel. Logits of -inf and NaN give what they give in the kernels.
 */
#pragma once

#include "cuda/attention/keys/coded_rows.cuh"
#include "cuda/attention/partials/softmax.cuh"
#include "cuda/ptx/numeric.cuh"

enum {
    NOPE_HALF = SMLA_KV_LORA_RANK / 2,
    LANE_VALUES = NOPE_HALF / SMLA_WARP_LANES, /* values per half of the NoPE part */
};

static_assert(LANE_VALUES == 8, "16 bytes of bf16");
static_assert(SMLA_QK_ROPE_HEAD_DIM == 2 * SMLA_WARP_LANES, "a pair per lane");

/* A lane's part of a query or of a key. A key's scales are kept apart from it. */
typedef struct lane_part {
    float nope[2][LANE_VALUES];
    float rope[2];
} lane_part;

static __device__ __forceinline__ void
widen_bf16x8(const uint32_t words[4], float values[LANE_VALUES])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[2 * i] = smla_low_bf16(words[i]);
        values[2 * i + 1] = smla_high_bf16(words[i]);
    }
}

/* `nope` and `rope` are the lane's own addresses. ROPE: cache rows and queries have a RoPE part. */
template <bool ROPE, bool ALIGNED>
static __device__ __forceinline__ void
load_bf16_part(const void *nope, const void *rope, lane_part *part)
{
    uint32_t words[2][4];
    uint32_t pair = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        smla_load_words<16, ALIGNED>((const uint16_t *)nope + half * NOPE_HALF, words[half]);
    }
    if constexpr (ROPE) {
        smla_load_words<4, ALIGNED>(rope, &pair);
    }
    widen_bf16x8(words[0], part->nope[0]);
    widen_bf16x8(words[1], part->nope[1]);
    part->rope[0] = smla_low_bf16(pair);
    part->rope[1] = smla_high_bf16(pair);
}

/* Loads e4m3 values without their scale. The cache row is aligned to 16 bytes. */
template <bool ROPE>
static __device__ __forceinline__ void
load_fp8_part(const uint8_t *nope, const void *rope, lane_part *part)
{
    uint32_t pair = 0;
    if constexpr (ROPE) {
        smla_load_words<4, true>(rope, &pair);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t words[2];
        smla_load_words<8, true>(nope + half * NOPE_HALF, words);
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            part->nope[half][i] = smla_e4m3_to_float((uint8_t)(words[i / 4] >> 8 * (i % 4)));
        }
    }
    part->rope[0] = smla_low_bf16(pair);
    part->rope[1] = smla_high_bf16(pair);
}

/* The lane's part of the key, and the scales of its two halves. */
template <bool ROPE>
static __device__ __forceinline__ void
load_key_part(const list_facts &facts, const uint8_t *row, int lane, lane_part *key,
              float scales[2])
{
    const uint8_t *const rope = row + facts.rope_offset + 4 * lane;
    scales[0] = scales[1] = 1.0f;
    if (facts.is_fp8) {
        const float *const from =
            (const float *)(row + facts.scale_offset) + LANE_VALUES * lane / SMLA_SCALE_TILE;
        scales[0] = __ldg(from);
        scales[1] = __ldg(from + NOPE_HALF / SMLA_SCALE_TILE);
        load_fp8_part<ROPE>(row + LANE_VALUES * lane, rope, key);
    } else if (facts.is_aligned) {
        load_bf16_part<ROPE, true>(row + 2 * LANE_VALUES * lane, rope, key);
    } else {
        load_bf16_part<ROPE, false>(row + 2 * LANE_VALUES * lane, rope, key);
    }
}

/* Two e4m3 values at any address. */
static __device__ __forceinline__ void
load_e4m3_pair(const uint8_t *codes, float values[2])
{
    values[0] = smla_e4m3_to_float(__ldg(codes));
    values[1] = smla_e4m3_to_float(__ldg(codes + 1));
}

/* The lane's RoPE values of a key in any format, with the scale of their cache, and divided by the
 * unit of keys as load_tile_scale. */
static __device__ __forceinline__ void
load_coded_rope(const attention_launch &launch, int list, const uint8_t *row, int lane,
                float values[2])
{
    const list_facts &facts = launch.lists[list];
    const uint8_t *const rope = row + facts.rope_offset;
    float scale = launch.has_key_unit ? smla_inverse_unit(find_key_unit(launch)) : 1.0f;
    if (has_rope_codes(facts)) {
        load_e4m3_pair(rope + 2 * lane, values);
        scale *= smla_load_given_scale(launch.key_scales.given[list]);
    } else {
        uint32_t pair;
        smla_load_words<4, false>(rope + 4 * lane, &pair);
        values[0] = smla_low_bf16(pair);
        values[1] = smla_high_bf16(pair);
    }
    values[0] *= scale;
    values[1] *= scale;
}

/* load_key_part for keys of any format. */
template <bool ROPE>
static __device__ __forceinline__ void
load_coded_part(const attention_launch &launch, int list, int32_t slot, int lane, lane_part *part,
                float scales[2])
{
    const smla_kv_token key = address_of_slot(launch, list, slot);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int chunk = SMLA_WARP_LANES * half + lane;
        const uint4 values = decode_chunk(launch.lists[list], chunk,
                                          load_coded_chunk(launch.lists[list], key, chunk));
        const uint32_t words[4] = {values.x, values.y, values.z, values.w};
        widen_bf16x8(words, part->nope[half]);
        scales[half] =
            load_tile_scale(launch, launch.lists[list], list, key, 8 * chunk / SMLA_SCALE_TILE);
    }
    part->rope[0] = part->rope[1] = 0.0f;
    if constexpr (ROPE) {
        load_coded_rope(launch, list, key.row, lane, part->rope);
    }
}

/* The lane's part of a head's query. */
template <bool ROPE, bool CODED>
static __device__ __forceinline__ void
load_query_part(const attention_launch &launch, int32_t token, int32_t head, int lane,
                lane_part *query)
{
    const smla_queries &queries = launch.params.queries;
    if (CODED && queries.type == SMLA_FLOAT_E4M3) {
        const uint8_t *const codes =
            smla_row8(&queries.parts[SMLA_NOPE], token, head) + LANE_VALUES * lane;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 values = load_e4m3_query(codes + half * NOPE_HALF);
            const uint32_t words[4] = {values.x, values.y, values.z, values.w};
            widen_bf16x8(words, query->nope[half]);
        }
        query->rope[0] = query->rope[1] = 0.0f;
        if constexpr (ROPE) {
            load_e4m3_pair(smla_row8(&queries.parts[SMLA_PE], token, head) + 2 * lane, query->rope);
        }
        return;
    }
    const uint16_t *const nope =
        smla_row16(&queries.parts[SMLA_NOPE], token, head) + LANE_VALUES * lane;
    const uint16_t *const rope = smla_row16(&queries.parts[SMLA_PE], token, head) + 2 * lane;
    if (launch.q_is_aligned) {
        load_bf16_part<ROPE, true>(nope, rope, query);
    } else {
        load_bf16_part<ROPE, false>(nope, rope, query);
    }
}

/* A key of an item, by its slot (slot_of_index). */
typedef struct listed_key {
    int32_t slot;
    int32_t list;
} listed_key;

/* The lane's part of an item's only key. CODED: the key has any format. */
template <bool ROPE, bool CODED>
static __device__ __forceinline__ void
load_only_key(const attention_launch &launch, const listed_key &only, int lane, lane_part *key,
              float scales[2])
{
    if constexpr (CODED) {
        load_coded_part<ROPE>(launch, only.list, only.slot, lane, key, scales);
    } else {
        load_key_part<ROPE>(launch.lists[only.list], row_of_slot(launch, only.list, only.slot),
                            lane, key, scales);
    }
}

/* Multiplies the NoPE part with its scales. */
static __device__ __forceinline__ void
scale_part(const lane_part &key, const float scales[2], lane_part *value)
{
#pragma unroll
    for (int i = 0; i < 2 * LANE_VALUES; i++) {
        const int half = i / LANE_VALUES;
        value->nope[half][i % LANE_VALUES] = key.nope[half][i % LANE_VALUES] * scales[half];
    }
}

/* The lane's part of the value of an item's only key. */
template <bool CODED>
static __device__ __forceinline__ lane_part
load_only_value(const attention_launch &launch, const listed_key &only, int lane)
{
    lane_part key;
    lane_part value;
    float scales[2];
    load_only_key<false, CODED>(launch, only, lane, &key, scales);
    scale_part(key, scales, &value);
    return value;
}

/* Returns q . k, in all lanes. */
static __device__ __forceinline__ float
multiply_parts(const lane_part &query, const lane_part &key, const float scales[2])
{
    float sum = query.rope[0] * key.rope[0] + query.rope[1] * key.rope[1];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float products = 0.0f;
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            products += query.nope[half][i] * key.nope[half][i];
        }
        sum += products * scales[half];
    }
    return smla_sum_of_lanes(sum);
}

/* Stores the lane's part of a row of 512 floats, times a weight. */
static __device__ __forceinline__ void
store_part(float *row, int lane, const lane_part &value, float weight)
{
    float *const to = row + LANE_VALUES * lane;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i += 4) {
            const float *const from = value.nope[half] + i;
            *(float4 *)(to + half * NOPE_HALF + i) =
                make_float4(from[0] * weight, from[1] * weight, from[2] * weight, from[3] * weight);
        }
    }
}

/* Writes value * weight, rounded once. If the weight is 0 it writes +0, whatever the value is. */
static __device__ __forceinline__ void
write_out_part(const smla_results &results, int32_t token, int32_t head, int lane,
               const lane_part &value, float weight)
{
    uint16_t *const to = smla_out16(&results, token, head) + LANE_VALUES * lane;
    const bool is_aligned = (uintptr_t)to % 16 == 0;
    const uint32_t mask = weight == 0.0f ? 0 : 0xFFFFFFFFu;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = mask & smla_cvt_bf16x2(value.nope[half][2 * i] * weight,
                                              value.nope[half][2 * i + 1] * weight);
        }
        if (is_aligned) {
            smla_store_words<16, true>(to + half * NOPE_HALF, words);
        } else {
            smla_store_words<16, false>(to + half * NOPE_HALF, words);
        }
    }
}

/* Writes a head's value * weight: its row of out, or its partial row unless the weight is 0. */
static __device__ __forceinline__ void
write_value(const attention_launch &launch, const work_item &item, int head, int lane,
            const lane_part &value, float weight)
{
    if (item.first_row == NOT_PARTIAL) {
        write_out_part(launch.params.results, item.token, item.first_head + head, lane, value,
                       weight);
    } else if (weight != 0.0f) {
        store_part(launch.partials.out + ((int64_t)item.first_row + head) * SMLA_KV_LORA_RANK, lane,
                   value, weight);
    }
}

/* Writes all results of an item with one key. `num_threads` threads call it, whole warps of a CTA;
 * this is thread number `thread`. The caller must know that the key is the only one in the item's
 * columns. CODED: the key has any format. */
template <bool ROPE, bool CODED, bool RANGED = false>
static __device__ __forceinline__ void
attend_one_key(const attention_launch &launch, const work_item &item, const listed_key &only,
               int thread, int num_threads)
{
    const list_params &params = launch.params;
    const int lane = thread % SMLA_WARP_LANES;
    lane_part key;
    lane_part value;
    float scales[2];
    load_only_key<ROPE, CODED>(launch, only, lane, &key, scales);
    const logit_rule rule = find_logit_rule<CODED, RANGED>(launch);
    scale_part(key, scales, &value);
#pragma unroll 1
    for (int head = thread / SMLA_WARP_LANES; head < item.num_heads;
         head += num_threads / SMLA_WARP_LANES) {
        lane_part query;
        load_query_part<ROPE, CODED>(launch, item.token, item.first_head + head, lane, &query);
        const float score = find_logit<RANGED>(multiply_parts(query, key, scales), rule);
        const float max_log2 = fmaxf(-INFINITY, score); /* a NaN never is the maximum */
        const float sum = ptx_exp2(score - softmax_reference(max_log2));
        float weight = sum;
        if (item.first_row == NOT_PARTIAL) {
            const float sink = softmax_sink(params.logits.sinks, item.first_head + head);
            weight *= softmax_finish(params.results, params.logits.sinks, item.token,
                                     item.first_head + head, max_log2, sum, sink, lane == 0) *
                      (CODED ? find_key_unit(launch) : 1.0f);
        } else if (lane == 0) {
            *(float2 *)(launch.partials.state + 2 * ((int64_t)item.first_row + head)) =
                make_float2(max_log2, sum);
        }
        write_value(launch, item, head, lane, value, weight);
    }
}
