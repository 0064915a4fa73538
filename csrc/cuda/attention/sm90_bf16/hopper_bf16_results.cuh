/* hopper_bf16_results.cuh: what a work of attention_bf16_sm90.cu leaves behind: results, or partial
 * rows.
 */
#pragma once

#include "cuda/attention/sm90_bf16/hopper_bf16.cuh"

/* Stores the group's sums and maxima of all heads. */
template <bool MAXIMA>
static __device__ __forceinline__ void
store_sums(const lane_place &me, int turn, const bf16_consumer &state, bf16_memory *shared)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        float sum = state.sum[piece] - state.excess[piece];
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        const int head = 16 * me.warp + 8 * piece + me.row;
        if (me.column == 0) {
            shared->sums[turn][me.group][head] = sum;
        }
        if constexpr (MAXIMA) {
            const float top = max_of_lanes(state.top[piece]);
            if (me.column == 0) {
                shared->tops[turn][me.group][head] = top;
            }
        }
    }
}

/* Ends a head with both groups' sums. Returns the factor of its out, which both groups need. Rows
 * are finished and combined in units of 2^integer. Both sum and out are multiplied by `unit`, so
 * its rounding affects lse alone. */
template <bool MAXIMA>
static __device__ __forceinline__ float
finish_head(const bf16_launch &launch, const cta_work &work, int head, int turn, float reference,
            bool writes, const bf16_memory *shared)
{
    const float integer = ceilf(reference);
    const float unit = ptx_exp2(reference - integer);
    const float sum = (shared->sums[turn][0][head] + shared->sums[turn][1][head]) * unit;
    float top = reference;
    if constexpr (MAXIMA) {
        top += fmaxf(shared->tops[turn][0][head], shared->tops[turn][1][head]);
    }
    return leave_head(launch.base, work, head, integer, top, sum, writes) * unit;
}

/* Transposes four words of a row's four lanes: word i of lane c becomes word c of lane i. */
static __device__ __forceinline__ void
turn_words(int column, uint32_t words[4])
{
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool is_upper = column & step;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int low = step == 1 ? 2 * i : i;
            const uint32_t give = is_upper ? words[low] : words[low + step];
            const uint32_t take = __shfl_xor_sync(0xFFFFFFFFu, give, step);
            words[low] = is_upper ? take : words[low];
            words[low + step] = is_upper ? words[low + step] : take;
        }
    }
}

/* Writes out * factor, rounded once. A lane has 2 values of every 8, and writes 8 of every 32. The
 * stores have no branch each, because ptxas would compute their addresses again behind it. */
template <bool ALIGNED>
static __device__ __forceinline__ void
write_out_rows(const smla_attention_params &params, const cta_work &work, const lane_place &me,
               const float factors[2], const bf16_consumer &state)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const int head = 16 * me.warp + 8 * piece + me.row;
        const float factor = factors[piece];
        uint16_t *const to = params.out + work.token * params.out_stride_token +
                             (work.first_head + head) * params.out_stride_head +
                             HALF_VALUES * me.group + 8 * me.column;
#pragma unroll
        for (int j = 0; j < HALF_VALUES / 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *const pair = &state.out[4 * (j + i) + 2 * piece];
                words[i] = smla_cvt_bf16x2(pair[0] * factor, pair[1] * factor);
            }
            turn_words(me.column, words);
            if constexpr (ALIGNED) {
                smla_store_vector_4_if(to + 8 * j, words, head < work.num_heads);
            } else if (head < work.num_heads) {
                smla_store_words<16, false>(to + 8 * j, words);
            }
        }
    }
}

static __device__ __forceinline__ void
write_partial_rows(const bf16_launch &launch, const cta_work &work, const lane_place &me,
                   const float factors[2], const bf16_consumer &state)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const int head = 16 * me.warp + 8 * piece + me.row;
        const float factor = factors[piece];
        float *const to = launch.base.partials.out +
                          ((int64_t)work.first_row + head) * SMLA_KV_LORA_RANK +
                          HALF_VALUES * me.group + 2 * me.column;
        if (head >= work.num_heads || factor == 0.0f) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < HALF_VALUES / 8; j++) {
            *(float2 *)(to + 8 * j) = make_float2(state.out[4 * j + 2 * piece] * factor,
                                                  state.out[4 * j + 2 * piece + 1] * factor);
        }
    }
}

/* Writes the rows of a work with one key: the key's value times its weight. Of a warp's heads, each
 * group writes eight. `factor` is the lane's in finish_work. Not inlined, so that other works do
 * not jump over it. */
template <bool CODED>
static __device__ __noinline__ void
write_only_rows(const attention_launch &launch, cta_work work, int turn, float factor,
                const bf16_memory *shared)
{
    const lane_place me = find_place_again();
    const int first = 16 * me.warp + 8 * me.group;
    const int head = first + me.lane % 8;
    const float sum = shared->sums[turn][0][head] + shared->sums[turn][1][head];
    const float weight = sum * __shfl_sync(0xFFFFFFFFu, factor, 4 * (me.lane % 8) + me.group);
    const lane_part value =
        load_only_value<CODED>(launch, only_key_of_work(launch, work, turn, shared), me.lane);
#pragma unroll 1
    for (int i = 0; first + i < min(work.num_heads, first + 8); i++) {
        write_value(launch, work, first + i, me.lane, value, __shfl_sync(0xFFFFFFFFu, weight, i));
    }
}

/* Writes the work's results. Lanes of even columns end head `row` of their warp, lanes of odd
 * columns head row + 8. `turn` alternates between 0 and 1: the sums of a work are read after the
 * barrier, when the other group may already store those of the next work. */
template <typename Keys, bool MAXIMA, bool ALIGNED>
static __device__ __forceinline__ void
finish_work(const bf16_launch &launch, int idx, int turn, bf16_memory *shared,
            const bf16_consumer &state)
{
    const cta_work work = find_numbered_work(launch.base, idx, TILE_HEADS);
    const lane_place me = find_place_again();
    const int head = 16 * me.warp + 8 * (me.column & 1) + me.row;
    store_sums<MAXIMA>(me, turn, state, shared);
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    float factor = 0.0f;
    if (head < work.num_heads) {
        const float reference = me.column & 1 ? state.reference[1] : state.reference[0];
        factor = finish_head<MAXIMA>(launch, work, head, turn, reference,
                                     me.group == 0 && me.column < 2, shared);
    }
    const float factors[2] = {__shfl_sync(0xFFFFFFFFu, factor, me.lane & 28),
                              __shfl_sync(0xFFFFFFFFu, factor, me.lane & 28 | 1)};
    if (has_only_key(turn, shared)) {
        write_only_rows<Keys::CODED>(launch.base, work, turn, factor, shared);
        __syncwarp(); /* without it, ptxas believes that lanes diverge in the loops */
    } else if (work.first_row != NOT_PARTIAL) {
        write_partial_rows(launch, work, me, factors, state);
    } else {
        write_out_rows<ALIGNED>(launch.base.params, work, me, factors, state);
    }
}
