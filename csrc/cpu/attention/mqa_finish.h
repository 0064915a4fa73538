/* mqa_finish.h: states of parts -> out, lse and max_logits of a token, for one instruction
 * set, and the table of its functions. mqa_kernel.c includes it.
 *
 * fold adds a second state to a first one; finish divides, applies the sink, and rounds to bf16
 * once. The rescaling factors are powers of two (mqa_kernel.c), so folding rounds only in its
 * additions. Both use the head groups of mqa_kernel.c.
 */
#pragma once

#include "core/fp_mode.h"
#include "core/numeric.h"

/* total = total * total_factor + part * part_factor, for one group's out; one factor per head. */
static void
fold_group(float *total, const vfloat *total_factor, const float *part, const vfloat *part_factor,
           int vectors)
{
    for (int d = 0; d < SMLA_KV_LORA_RANK; d++) {
        for (int v = 0; v < vectors; v++) {
            const int at = (d * vectors + v) * WIDTH;
            vfloat *const to = (vfloat *)(total + at);
            *to = *to * total_factor[v] + *as_vectors(part + at) * part_factor[v];
        }
    }
}

static void
fold(smla_head_range heads, smla_mqa_state total, smla_mqa_state part)
{
    for (int64_t head = heads.begin; head < heads.end; head += GROUP_HEADS) {
        const head_group group = group_at(head, heads.end);
        vfloat total_factor[GROUP_VECTORS];
        vfloat part_factor[GROUP_VECTORS];
        for (int v = 0; v < group.vectors; v++) {
            const int64_t lane_0 = head + v * WIDTH;
            vfloat *const total_max = (vfloat *)(total.max_log2 + lane_0);
            const vfloat part_max = *as_vectors(part.max_log2 + lane_0);
            const vfloat new_max = max_lanes(*total_max, part_max);
            const vfloat reference = finite_reference_of(new_max);
            total_factor[v] = exp2_lanes(reference_of(*total_max) - reference);
            part_factor[v] = exp2_lanes(reference_of(part_max) - reference);
            for (int lane = 0; lane < WIDTH; lane++) {
                total.sum[lane_0 + lane] =
                    total.sum[lane_0 + lane] * (double)total_factor[v][lane] +
                    part.sum[lane_0 + lane] * (double)part_factor[v][lane];
            }
            *total_max = new_max;
        }
        const int64_t at = head * SMLA_KV_LORA_RANK;
        fold_group(total.out + at, total_factor, part.out + at, part_factor, group.vectors);
    }
}

/* Writes lse and max_logits of one head, and returns the factor that its out, a multiple of `unit`,
 * is multiplied with. */
static float
finish_head(const smla_attention_params *params, int64_t token, int64_t head, double unit,
            double sum, double max_log2)
{
    const double ln_2 = 0.69314718055994530942;
    const float max_lane = (float)max_log2;
    const double reference = (double)finite_reference_of(splat(max_lane))[0];
    const double lse_empty = params->results.empty_lse_is_plus_inf ? INFINITY : -INFINITY;
    const double lse = sum == 0.0 ? lse_empty : reference * ln_2 + log(sum);
    if (params->results.lse != NULL) {
        params->results.lse[token * params->results.lse_stride_token +
                            head * params->results.lse_stride_head] = (float)lse;
    }
    if (params->results.max_logits != NULL) {
        params->results.max_logits[token * params->results.max_logits_stride_token +
                                   head * params->results.max_logits_stride_head] =
            isnan(sum) ? NAN : (float)(max_log2 * ln_2);
    }
    if (sum == 0.0) {
        return 0.0f;
    }
    double factor = unit / sum;
    if (params->logits.sinks.values != NULL) {
        const double sink = params->logits.sinks.values[head * params->logits.sinks.stride];
        factor /= 1.0 + exp(sink - lse);
    }
    return (float)factor;
}

/* Scales a group's out and rounds it to bf16 in place. Row d of the result overwrites a half of row
 * d / 2 of out, which has been read by then. */
static void
round_group(float *out, const vfloat *factor, int vectors)
{
    uint16_t *const rounded = (uint16_t *)out;
    for (int d = 0; d < SMLA_KV_LORA_RANK; d++) {
        for (int v = 0; v < vectors; v++) {
            const int at = (d * vectors + v) * WIDTH;
            const vfloat x = *as_vectors(out + at) * factor[v];
            for (int lane = 0; lane < WIDTH; lane++) {
                rounded[at + lane] = smla_float_to_bf16(x[lane]);
            }
        }
    }
}

static void
finish(const smla_attention_params *params, int64_t token, smla_head_range heads,
       smla_mqa_state state)
{
    const double unit = (double)choose_key_unit(params);
    for (int64_t head = heads.begin; head < heads.end; head += GROUP_HEADS) {
        const head_group group = group_at(head, heads.end);
        const int lanes = group.vectors * WIDTH;
        float *const group_out = state.out + head * SMLA_KV_LORA_RANK;
        vfloat factor[GROUP_VECTORS] = {{0}};
        for (int lane = 0; lane < lanes && head + lane < heads.end; lane++) {
            factor[lane / WIDTH][lane % WIDTH] =
                finish_head(params, token, head + lane, unit, state.sum[head + lane],
                            state.max_log2[head + lane]);
        }
        round_group(group_out, factor, group.vectors);
        const uint16_t *const rounded = (const uint16_t *)group_out;
        for (int lane = 0; lane < lanes && head + lane < heads.end; lane++) {
            uint16_t *const row = smla_out16(&params->results, token, head + lane);
            for (int d = 0; d < SMLA_KV_LORA_RANK; d++) {
                row[d] = rounded[d * lanes + lane];
            }
        }
    }
}

/* Computes a part with subnormal numbers kept, if this is an fp32 unit. */
static void
run_part_exactly(const smla_attention_params *params, int64_t token, int split, uint8_t *scratch,
                 smla_mqa_state state)
{
    const smla_fp_mode before = smla_fp_change(SMLA_FP_EXACT);
    begin_products();
    (void)try_part(params, token, split, true, scratch, state);
    end_products();
    smla_fp_change(before);
}

static void
run_part(const smla_attention_params *params, int64_t token, int split, uint8_t *scratch,
         smla_mqa_state state)
{
    bool is_done = false;
    if (is_ordinary_scale(params->logits.softmax_scale)) {
        begin_products();
        is_done = try_part(params, token, split, false, scratch, state);
        end_products();
    }
    if (!is_done) {
        SMLA_OF_FP32_ISA(smla_mqa).run_part_exactly(params, token, split, scratch, state);
    }
}

const smla_mqa_isa SMLA_OF_ISA(smla_mqa) = {
    .scratch = {.bytes = BLOCK_BYTES, .bytes_per = {QUERY_BYTES_PER_HEAD}},
    .run_part_exactly = run_part_exactly,
    .run_part = run_part,
    .fold = fold,
    .finish = finish,
};
