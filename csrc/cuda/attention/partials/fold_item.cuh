/* fold_item.cuh: how the CTA that finishes the last part of a cut item (cut_work_items.cuh) folds
 * the partial rows of all its parts.
 */
#pragma once

#include "cuda/attention/partials/fold.cuh"
#include "cuda/attention/tiles/claims.cuh"
#include "cuda/attention/tiles/cut_work_items.cuh"

enum {
    FOLD_HEADS = SMLA_WARP_LANES / MAX_PARTS, /* heads per warp: a lane for each of their parts */
};

/* Returns the lane's factor for one part of one head, among FOLD_HEADS heads from `first_head` on.
 * `weight` becomes the factor of the folded values of its head. Writes lse and max_logits. */
template <bool TILED>
static __device__ __forceinline__ whole_row<1>
fold_heads(const attention_launch &launch, const work_item &item, int part, int first_head,
           int lane, float *weight)
{
    const int head = first_head + lane / MAX_PARTS;
    const int nth = lane % MAX_PARTS;
    const int64_t row = (int64_t)slot_of_part(part, nth) * launch.slot_heads + head;
    const bool is_on = head < item.num_heads && nth < count_parts(part);
    float2 state = make_float2(-INFINITY, 0.0f);
    float unit = 0.0f;
    if (is_on) {
        state = __ldcg((const float2 *)(launch.partials.state + 2 * row));
        unit = __ldcg(launch.partials.out + row * SMLA_KV_LORA_RANK + SMLA_HALF_UNIT);
    }
    const float max_log2 = smla_max_of_lanes<MAX_PARTS>(state.x);
    const bool is_half = smla_float_bits(state.y) >> 31;
    const float factor = softmax_rescale(state.x, softmax_reference(max_log2));
    const float sum = smla_sum_of_lanes<MAX_PARTS>(fabsf(state.y) * factor);
    *weight = 0.0f;
    if (head < item.num_heads) {
        const work_item of_row = find_row_item<TILED>(launch, item, head);
        const float sink = softmax_sink(launch.params.logits.sinks, of_row.first_head + head);
        *weight = softmax_finish(launch.params.results, launch.params.logits.sinks, of_row.token,
                                 of_row.first_head + head, max_log2, sum, sink, nth == 0);
    }
    return whole_row<1>{{is_half && factor != 0.0f ? factor * unit : 0.0f},
                        {is_half ? 0.0f : factor},
                        max_log2,
                        sum};
}

/* values += the lane's values (one_key.cuh) of the n-th part of each head, times the part's factor.
 * A part with factor 0 is not read, and may hold anything. */
template <bool HALF>
static __device__ __forceinline__ void
fold_parts(const attention_launch &launch, int part, int n, int first_head, int lane, float factors,
           lane_part values[FOLD_HEADS])
{
    constexpr int WORDS = HALF ? LANE_VALUES / 2 : LANE_VALUES;
    const int64_t row = (int64_t)slot_of_part(part, n) * launch.slot_heads + first_head;
    const float *const from = launch.partials.out + row * SMLA_KV_LORA_RANK + WORDS * lane;
    uint32_t words[FOLD_HEADS][2][WORDS];
    float factor[FOLD_HEADS];
#pragma unroll
    for (int head = 0; head < FOLD_HEADS; head++) {
        factor[head] = __shfl_sync(0xFFFFFFFFu, factors, MAX_PARTS * head + n);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < WORDS; i += 4) {
                ptx_load_16_of_grid(from + head * SMLA_KV_LORA_RANK +
                                        half * (HALF ? NOPE_HALF / 2 : NOPE_HALF) + i,
                                    factor[head] != 0.0f, &words[head][half][i]);
            }
        }
    }
#pragma unroll
    for (int head = 0; head < FOLD_HEADS; head++) {
#pragma unroll
        for (int i = 0; i < 2 * LANE_VALUES; i++) {
            const int half = i / LANE_VALUES;
            ptx_fma_unless_zero(&values[head].nope[half][i % LANE_VALUES],
                                unpack_value<HALF>(words[head][half], i % LANE_VALUES),
                                factor[head]);
        }
    }
}

/* Folds the parts of an item in their order. All consumers call it. HAS_UNIT: the call has a unit
 * of keys, which the parts' values are divided by. */
template <bool HAS_UNIT, bool TILED>
static __device__ __forceinline__ void
fold_item(const attention_launch &launch, int part, int heads_per_cta)
{
    const work_item item = find_numbered_item<false>(launch, item_of_part(part), heads_per_cta);
    const int thread = ptx_forget((int)threadIdx.x);
    const int lane = thread % SMLA_WARP_LANES;
#pragma unroll 1
    for (int first_head = thread / SMLA_WARP_LANES * FOLD_HEADS; first_head < item.num_heads;
         first_head += CTA_WARPS * FOLD_HEADS) {
        float weight;
        lane_part values[FOLD_HEADS];
#pragma unroll
        for (int i = 0; i < FOLD_HEADS * 2 * LANE_VALUES; i++) {
            /* -0 + x is x, so a single key's -0 keeps its sign */
            values[i / (2 * LANE_VALUES)].nope[i / LANE_VALUES % 2][i % LANE_VALUES] = -0.0f;
        }
        const whole_row<1> whole = fold_heads<TILED>(launch, item, part, first_head, lane, &weight);
        if constexpr (HAS_UNIT) {
            weight *= find_key_unit(launch);
        }
        const bool folds_floats = has_floats(whole);
#pragma unroll 1
        for (int n = 0; n < count_parts(part); n++) {
            fold_parts<true>(launch, part, n, first_head, lane, whole.factor[0], values);
            if (folds_floats) {
                fold_parts<false>(launch, part, n, first_head, lane, whole.float_factor[0], values);
            }
        }
#pragma unroll
        for (int i = 0; i < FOLD_HEADS; i++) {
            const float head_weight = __shfl_sync(0xFFFFFFFFu, weight, MAX_PARTS * i);
            if (first_head + i < item.num_heads) {
                if constexpr (TILED) {
                    const work_item of_row = find_row_item<TILED>(launch, item, first_head + i);
                    write_out_part(launch.params.results, of_row.token,
                                   of_row.first_head + first_head + i, lane, values[i],
                                   head_weight);
                } else {
                    write_out_part(launch.params.results, item.token,
                                   item.first_head + first_head + i, lane, values[i], head_weight);
                }
            }
        }
    }
}

/* Called when the CTA has done all its items: counts its parts, and folds the items whose last
 * parts they are. Inlined, because with one more call ptxas keeps other values in registers, and
 * the kernel's loop gets longer. HAS_UNIT: as in fold_item. */
template <bool HAS_UNIT, bool TILED = false>
static __device__ __forceinline__ void
fold_cut_items(const attention_launch &launch, int heads_per_cta, int barrier, item_order *order)
{
    const int thread = ptx_forget((int)threadIdx.x);
    ptx_barrier(barrier, ORDER_THREADS); /* all partial rows of the CTA are written */
    if (thread < SMLA_WARP_LANES) {
        const int part = thread < 2 ? order->items[thread] : -1;
        const bool is_last =
            part >= 0 && count_parts(part) > 1 &&
            count_arrival((unsigned long long *)launch.arrivals + item_of_part(part),
                          (uint32_t)count_parts(part));
        const uint32_t are_last = __ballot_sync(0xFFFFFFFFu, is_last);
        if (thread == 0) {
            order->seen = are_last;
        }
    }
    ptx_barrier(barrier, ORDER_THREADS);
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        if (order->seen >> i & 1) {
            fold_item<HAS_UNIT, TILED>(launch, order->items[i], heads_per_cta);
        }
    }
}
