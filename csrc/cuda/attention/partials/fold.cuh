/* fold.cuh: how the partial rows of one query row become one row, for the kernels that fold.
 *
 * A partial row is a state (max_log2, sum) and values, multiples of 2^reference(max_log2). Its
 * factor is 2^(its reference - the reference of the whole row), a power of two, so rescaling loses
 * nothing. Values are summed in the order of the parts, sums along a fixed tree. A part without
 * keys has factor 0; its values were never written and are not used. Rows of halves have f16 values
 * (kernels.h); a minus in front of their sum tells, because a fallback leaves floats beside them.
 */
#pragma once

#include "cuda/attention/partials/softmax.cuh"
#include "cuda/attention/table/kernels.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"
#include "cuda/ptx/ptx_sm90.cuh"

/* Where the state and the values of part 0 of a row are. */
typedef struct row_parts {
    const float *states;
    const float *values;
    int64_t stride; /* rows from one part to the next */
    int count;
} row_parts;

static __device__ __forceinline__ row_parts
find_parts(const smla_partial_rows &partials, int64_t first, int64_t stride, int count)
{
    return row_parts{partials.state + 2 * first, partials.out + first * SMLA_KV_LORA_RANK, stride,
                     count};
}

/* A part's state, and where it may be halves, their unit. */
typedef struct part_state {
    float max_log2;
    float sum;
    float unit;
} part_state;

/* The state of a part; one without keys behind the last part. */
template <bool HALF>
static __device__ __forceinline__ part_state
load_state(const row_parts &parts, int64_t part)
{
    part_state found = {-INFINITY, 0.0f, 0.0f};
    if (part < parts.count) {
        const float2 state = *(const float2 *)(parts.states + 2 * part * parts.stride);
        found.max_log2 = state.x;
        found.sum = state.y;
        if (HALF) {
            found.unit = parts.values[part * parts.stride * SMLA_KV_LORA_RANK + SMLA_HALF_UNIT];
        }
    }
    return found;
}

/* What lanes know of a row whose parts they share. Each has the factors of its own parts' values;
 * all have the maximum and the sum of the whole row. */
template <int PARTS> struct whole_row {
    float factor[PARTS];
    float float_factor[PARTS]; /* HALF: factors of fp32 parts; else 0 */
    float max_log2;
    float sum;
};

/* Folds the states of a row that LANES neighbouring lanes have, PARTS each. HALF: values are f16,
 * or fp32 as the fallback leaves them. */
template <bool HALF, int LANES, int PARTS>
static __device__ __forceinline__ whole_row<PARTS>
fold_states(const part_state (&states)[PARTS])
{
    whole_row<PARTS> row;
    row.max_log2 = -INFINITY;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        row.max_log2 = fmaxf(row.max_log2, states[i].max_log2);
    }
    row.max_log2 = smla_max_of_lanes<LANES>(row.max_log2);
    const float reference = softmax_reference(row.max_log2);
    row.sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const float sum = states[i].sum;
        const bool is_half = HALF && smla_float_bits(sum) >> 31;
        const float factor = softmax_rescale(states[i].max_log2, reference);
        row.sum += (HALF ? fabsf(sum) : sum) * factor;
        row.float_factor[i] = is_half ? 0.0f : factor;
        row.factor[i] = !HALF ? factor : is_half && factor != 0.0f ? factor * states[i].unit : 0.0f;
    }
    row.sum = smla_sum_of_lanes<LANES>(row.sum);
    return row;
}

/* HALF: whether some part of the row is fp32. */
template <int PARTS>
static __device__ __forceinline__ bool
has_floats(const whole_row<PARTS> &row)
{
    bool has = false;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        has |= row.float_factor[i] != 0.0f;
    }
    return __any_sync(0xFFFFFFFFu, has);
}

/* Value number `value` of a part's words: a word has two values if they are HALF, else one. */
template <bool HALF>
static __device__ __forceinline__ float
unpack_value(const uint32_t *words, int value)
{
    if constexpr (HALF) {
        return smla_cvt_float((uint16_t)(words[value / 2] >> 16 * (value % 2)));
    } else {
        return smla_bits_float(words[value]);
    }
}
