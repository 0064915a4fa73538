/* varlen_results.cuh: how a warp finishes its rows and writes them. */
#pragma once

#include "cuda/attention/sm80/mha/varlen_products.cuh"

/* A scale of the tile's request and KV head. */
__device__ __forceinline__ float
load_scale(const smla_descale &scale, const varlen_tile &tile)
{
    return scale.pointer == NULL
               ? scale.value
               : __ldg(scale.pointer + smla_descale_at(&scale, tile.req, tile.kv_head));
}

/* The scale of part 0 of keys; that of part 1 is k_descale. */
__device__ __forceinline__ float
load_first_scale(const mha_params &p, const varlen_tile &tile)
{
    return load_scale(p.kv.has_value_part ? p.logits.v_descale : p.logits.k_descale, tile);
}

template <bool PAGED>
__device__ __forceinline__ varlen_rule
find_rule(const mha_params &p, const varlen_tile &tile)
{
    const float k_scale = load_scale(p.logits.k_descale, tile);
    const float key_scale = PAGED ? fmaxf(k_scale, load_first_scale(p, tile)) : k_scale;
    /* In double, because a product of two of the three may be beyond a float. */
    const double product =
        p.logits.softmax_scale * (double)load_scale(p.logits.q_descale, tile) * (double)key_scale;
    const float scale = (float)product * LOG2_E;
    /* -inf * scale must be -inf, so a scale that is not positive is multiplied before masks. */
    const bool is_early = p.logits.softcap != 0.0f || !(scale > 0.0f);
    return varlen_rule{is_early ? 1.0f : scale, scale, is_early};
}

/* The power of two that results are multiplied with at last, instead of v_descale: its quotient by
 * a sum may leave fp32 where results do not. */
__device__ __forceinline__ float
find_value_unit(float v_scale)
{
    return v_scale < 0x1p-64f ? 0x1p-64f : v_scale > 0x1p64f ? 0x1p64f : 1.0f;
}

/* Returns the factor that turns a row's out into its result, and writes the row's lse if `writes`.
 * A row without keys, or with no logit but -inf, has sum 0. */
__device__ __forceinline__ float
finish_row(const mha_params &p, int64_t token, int64_t head, float reference, float sum,
           float v_scale, bool writes)
{
    const float ln_2_high = 0x1.62e43p-1f;
    const float ln_2_low = -0x1.05c61p-29f;
    const float lse =
        sum == 0.0f ? -INFINITY : fmaf(reference, ln_2_high, fmaf(reference, ln_2_low, logf(sum)));
    if (writes && p.results.lse != NULL) {
        p.results.lse[token * p.results.lse_stride_token + head * p.results.lse_stride_head] = lse;
    }
    if (sum == 0.0f) {
        return 0.0f;
    }
    float factor = v_scale / sum;
    if (p.logits.sinks.values != NULL) {
        factor /= 1.0f + expf(__ldg(p.logits.sinks.values + head * p.logits.sinks.stride) - lse);
    }
    return factor;
}

/* Writes two neighbouring values. */
__device__ __forceinline__ void
write_pair(const varlen_args &args, int64_t index, float low, float high)
{
    if (args.p.results.out_type == SMLA_FLOAT_FP32) {
        const uint32_t words[2] = {smla_float_bits(low), smla_float_bits(high)};
        float *const to = (float *)args.p.results.out + index;
        if (args.out_is_paired) {
            smla_store_words<8, true>(to, words);
        } else {
            smla_store_words<8, false, 4>(to, words);
        }
        return;
    }
    const uint32_t pair = args.p.results.out_type == SMLA_FLOAT_FP16 ? ptx_cvt_f16x2(low, high)
                                                                     : smla_cvt_bf16x2(low, high);
    uint16_t *const to = (uint16_t *)args.p.results.out + index;
    if (args.out_is_paired) {
        smla_store_words<4, true>(to, &pair);
    } else {
        smla_store_words<4, false>(to, &pair);
    }
}

/* Finishes the warp's rows, which begin at row first_row of the tile, and writes their values from
 * first_value on. */
template <typename Shape, bool HALF, typename Args>
__device__ __forceinline__ void
write_results(const Args &args, const varlen_tile &tile, int first_row, int first_value,
              const varlen_rows<Shape> &rows, const float out[Shape::M][Shape::V][4])
{
    const mha_params &p = args.p;
    const float v_scale = load_scale(p.logits.v_descale, tile);
    const float unit = find_value_unit(v_scale);
#pragma unroll
    for (int m = 0; m < Shape::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = rows.sum[m][i] + rows.rest[m][i];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const int row = first_row + 16 * m + 8 * i + lane_idx() / 4;
            if (row >= tile.num_rows) {
                continue;
            }
            const varlen_row place = find_row(args, tile, row);
            int64_t token = tile.request.first_query + place.query;
            if constexpr (IS_PAGED<Args>) {
                token += tile.part * args.part_tokens;
            }
            const float reference = rows.reference[m][i] - WEIGHT_SHIFT<HALF>;
            const float factor = finish_row(p, token, place.head, reference, sum, v_scale / unit,
                                            lane_idx() % 4 == 0 && first_value == 0);
            const int64_t start = token * p.results.out_stride_token +
                                  place.head * p.results.out_stride_head + first_value +
                                  lane_idx() % 4 * 2;
#pragma unroll
            for (int v = 0; v < Shape::V; v++) {
                if (first_value + 8 * v < p.kv.value_dim) {
                    const float low = sum == 0.0f ? 0.0f : out[m][v][2 * i] * factor * unit;
                    const float high = sum == 0.0f ? 0.0f : out[m][v][2 * i + 1] * factor * unit;
                    write_pair(args, start + 8 * v, low, high);
                }
            }
        }
    }
}
