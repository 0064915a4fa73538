/* paged_results.cuh: how a consumer group of paged_attention_sm90.cu finishes the rows of an item:
 * as results, or as partial rows, which the last CTA of a cut tile folds. There is no division
 * here, because its rare path is a called function, which makes all products wait
 * (mha_results.cuh). */
#pragma once

#include "cuda/attention/partials/softmax.cuh"
#include "cuda/attention/sm90/paged/paged_weights.cuh"
#include "cuda/attention/tiles/claims.cuh"

/* ---- Results -------------------------------------------------------------------------------- */

/* The token and head of a tile's row. */
__device__ __forceinline__ paged_row
find_result(const paged_args &args, const paged_item &item, int row)
{
    paged_row place = find_row(args, item.kv_head, item.first_row + row);
    place.query += item.first_query;
    return place;
}

__device__ __forceinline__ uint8_t *
find_out(const paged_args &args, const paged_row &place)
{
    return (uint8_t *)args.p.results.out + place.query * args.out_token_bytes +
           place.head * args.out_head_bytes;
}

/* Returns the factor that turns a row's out into its result, given the row's sum of
 * 2^(logit - reference + top), and writes its lse if `writes`. */
__device__ __forceinline__ float
finish_row(const paged_args &args, const paged_row &place, float reference, int top, float sum,
           bool writes)
{
    const mha_params &p = args.p;
    const float lse = find_lse(reference, top, sum);
    if (writes && p.results.lse != NULL) {
        p.results.lse[place.query * p.results.lse_stride_token +
                      place.head * p.results.lse_stride_head] = lse;
    }
    float factor = sum == 0.0f ? 0.0f : smla_rcp(sum);
    if (p.logits.sinks.values != NULL && sum != 0.0f) {
        const float sink = __ldg(p.logits.sinks.values + place.head * p.logits.sinks.stride);
        factor *= smla_rcp(1.0f + expf(sink - lse));
    }
    return factor;
}

/* A row's value times its factor; 0 where it is 0, whatever the value is. */
__device__ __forceinline__ float
finish_value(float value, float factor)
{
    return factor == 0.0f ? 0.0f : value * factor;
}

__device__ __forceinline__ uint32_t
pack_results(const paged_args &args, float low, float high)
{
    return args.p.results.out_type == SMLA_FLOAT_FP16 ? ptx_cvt_f16x2(low, high)
                                                      : smla_cvt_bf16x2(low, high);
}

/* The partial row of a tile's row. Each CTA begins one cut tile at most and ends one, so the slots
 * of a tile's parts are no other tile's. */
__device__ __forceinline__ int64_t
find_partial_row(const paged_args &args, const paged_item &item, int part, int row)
{
    return (int64_t)(2 * item.first_cta + part) * args.partials.slot_rows + row;
}

/* Leaves the state of a part's row, by the rules of softmax.cuh, and returns the factor of its
 * values: the maximum is an integer, to which sums and values are rescaled. */
template <bool HALF>
__device__ __forceinline__ float
leave_state(const paged_args &args, int64_t number, float reference, float sum, bool writes)
{
    const float exponent = reference - TOP_EXPONENT<HALF>;
    const float factor = sum == 0.0f ? 0.0f : ptx_exp2(exponent - ceilf(exponent));
    if (writes) {
        const uint32_t words[2] = {smla_float_bits(sum == 0.0f ? -INFINITY : ceilf(exponent)),
                                   smla_float_bits(sum * factor)};
        smla_store_vector_2(args.partials.states + 2 * number, words);
    }
    return factor;
}

/* Writes a thread's values of a row as fp32. Four lanes write 32 neighbouring bytes. */
template <int D>
__device__ __forceinline__ void
write_floats(uint8_t *to, int i, float factor, bool is_row, const paged_consumer<D> &state)
{
    to += lane_again() % 4 * 8;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const float *const pair = &state.out[4 * n + 2 * i];
        const uint32_t words[2] = {smla_float_bits(finish_value(pair[0], factor)),
                                   smla_float_bits(finish_value(pair[1], factor))};
        if (is_row) {
            smla_store_vector_2(to + 32 * n, words);
        }
    }
}

/* Writes them as bf16 or fp16. Four lanes have 8 columns; each lane gets 8 columns of its own. */
template <int D>
__device__ __forceinline__ void
write_halves(const paged_args &args, uint8_t *to, int i, float factor, bool is_row,
             const paged_consumer<D> &state)
{
    const int column = lane_again() % 4;
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float *const pair = &state.out[4 * (n + k) + 2 * i];
            words[k] =
                pack_results(args, finish_value(pair[0], factor), finish_value(pair[1], factor));
        }
        smla_turn_words(column, words);
        smla_store_vector_4_if(to + 16 * (n + column), words, is_row);
    }
}

/* Writes the warp's rows, whole or as a part. */
template <int D, bool HALF>
__device__ __forceinline__ void
write_rows(const paged_args &args, const paged_item &item, int first_row,
           const paged_consumer<D> &state)
{
    const bool is_part = item.num_parts > 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (first_row + 8 * i >= item.num_rows) {
            break;
        }
        const int row = first_row + lane_again() / 4 + 8 * i;
        const bool is_row = row < item.num_rows;
        const bool writes = is_row && lane_again() % 4 == 0;
        const float sum = smla_sum_of_lanes<SMLA_QUAD_LANES>(state.sum[i] + state.rest[i]);
        uint8_t *to;
        float factor;
        if (is_part) {
            const int64_t number = find_partial_row(args, item, item.part, row);
            factor = leave_state<HALF>(args, number, state.reference[i], sum, writes);
            to = (uint8_t *)(args.partials.values + number * D);
        } else {
            const paged_row place = find_result(args, item, is_row ? row : 0);
            factor =
                finish_row(args, place, state.reference[i], (int)TOP_EXPONENT<HALF>, sum, writes);
            to = find_out(args, place);
        }
        if (is_part || args.p.results.out_type == SMLA_FLOAT_FP32) {
            write_floats(to, i, factor, is_row, state);
        } else {
            write_halves(args, to, i, factor, is_row, state);
        }
    }
}

/* ---- Folds ---------------------------------------------------------------------------------- */

/* The state of a row's part; one without keys behind the last part. */
__device__ __forceinline__ float2
load_part(const paged_args &args, const paged_item &item, int part, int row)
{
    return part < item.num_parts ? __ldcg((const float2 *)args.partials.states +
                                          find_partial_row(args, item, part, row))
                                 : make_float2(-INFINITY, 0.0f);
}

/* The maximum and the sum of a whole row. A lane reads its first part once. */
__device__ __forceinline__ float2
fold_states(const paged_args &args, const paged_item &item, int row)
{
    const float2 first = load_part(args, item, lane_again(), row);
    float max_log2 = first.x;
#pragma unroll 1
    for (int part = SMLA_WARP_LANES; part < item.num_parts; part += SMLA_WARP_LANES) {
        max_log2 = fmaxf(max_log2, load_part(args, item, part + lane_again(), row).x);
    }
    max_log2 = smla_max_of_lanes(max_log2);
    const float reference = softmax_reference(max_log2);
    float sum = first.y * softmax_rescale(first.x, reference);
#pragma unroll 1
    for (int part = SMLA_WARP_LANES; part < item.num_parts; part += SMLA_WARP_LANES) {
        const float2 later = load_part(args, item, part + lane_again(), row);
        sum += later.y * softmax_rescale(later.x, reference);
    }
    return make_float2(max_log2, smla_sum_of_lanes(sum));
}

/* Adds a row's values in the order of the parts. A lane has LANE_VALUES of them. */
template <int LANE_VALUES>
__device__ __forceinline__ void
fold_values(const paged_args &args, const paged_item &item, int row, float max_log2,
            float (&total)[LANE_VALUES])
{
    constexpr int D = LANE_VALUES * SMLA_WARP_LANES;
    constexpr int AT_ONCE = 32 / LANE_VALUES;
#pragma unroll 1
    for (int first = 0; first < item.num_parts; first += AT_ONCE) {
        float2 values[AT_ONCE][LANE_VALUES / 2];
        float factors[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int part = min(first + k, item.num_parts - 1);
            const float *const from =
                args.partials.values + find_partial_row(args, item, part, row) * D;
            factors[k] = softmax_rescale(load_part(args, item, first + k, row).x,
                                         softmax_reference(max_log2));
#pragma unroll
            for (int j = 0; j < LANE_VALUES / 2; j++) {
                values[k][j] = __ldcg((const float2 *)from + j * SMLA_WARP_LANES + lane_again());
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
#pragma unroll
            for (int j = 0; j < LANE_VALUES / 2; j++) {
                ptx_fma_unless_zero(&total[2 * j], values[k][j].x, factors[k]);
                ptx_fma_unless_zero(&total[2 * j + 1], values[k][j].y, factors[k]);
            }
        }
    }
}

/* Folds the rows of a cut tile, of which each warp takes every fourth. */
template <int D>
__device__ __forceinline__ void
fold_tile(const paged_args &args, const paged_item &item, int warp)
{
    constexpr int LANE_VALUES = D / SMLA_WARP_LANES;
#pragma unroll 1
    for (int row = warp; row < item.num_rows; row += GROUP_WARPS) {
        const float2 whole = fold_states(args, item, row);
        float total[LANE_VALUES] = {};
        fold_values(args, item, row, whole.x, total);
        const paged_row place = find_result(args, item, row);
        const float factor =
            finish_row(args, place, softmax_reference(whole.x), 0, whole.y, lane_again() == 0);
        uint8_t *const out = find_out(args, place);
#pragma unroll
        for (int j = 0; j < LANE_VALUES / 2; j++) {
            const int pair = j * SMLA_WARP_LANES + lane_again();
            const float low = finish_value(total[2 * j], factor);
            const float high = finish_value(total[2 * j + 1], factor);
            if (args.p.results.out_type == SMLA_FLOAT_FP32) {
                const uint32_t words[2] = {smla_float_bits(low), smla_float_bits(high)};
                smla_store_vector_2(out + 8 * pair, words);
            } else {
                const uint32_t word = pack_results(args, low, high);
                smla_store_vector_1(out + 4 * pair, &word);
            }
        }
    }
}

/* Finishes the group's rows of an item, of which `first_row` is the warp's first one. If they are
 * the last ones of a cut tile, its parts are folded. */
template <int D, bool HALF>
__device__ __forceinline__ void
finish_item(const paged_args &args, const paged_item &item, int first_row,
            const paged_consumer<D> &state, paged_memory<D> *shared)
{
    write_rows<D, HALF>(args, item, first_row, state);
    if (item.num_parts == 1) {
        return;
    }
    const int barrier = GROUP_BARRIER + state.group;
    ptx_barrier(barrier, GROUP_THREADS); /* all rows of the part are written */
    if (state.warp == 0 && lane_again() == 0) {
        shared->is_last[state.group] =
            count_arrival(&args.partials.arrivals[item.first_cta], (uint32_t)item.num_parts);
    }
    ptx_barrier(barrier, GROUP_THREADS);
    if (shared->is_last[state.group]) {
        fold_tile<D>(args, item, state.warp);
    }
}
