/* bf16_results.cuh: the results of an item of attention_bf16_sm90.cu: rows, or partial
 * rows.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_common.cuh"

/* Stores the group's sums and maxima of all heads. */
template <bool MAXIMA>
static __device__ __forceinline__ void
store_sums(const thread_index &me, int turn, const bf16_consumer &state, bf16_memory *shared)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const float sum =
            smla_sum_of_lanes<SMLA_QUAD_LANES>(state.sum[piece] - state.excess[piece]);
        const int head = 16 * me.warp + 8 * piece + me.row;
        if (me.column == 0) {
            shared->sums[turn][me.group][head] = sum;
        }
        if constexpr (MAXIMA) {
            const float row_max = smla_max_of_lanes<SMLA_QUAD_LANES>(state.row_max[piece]);
            if (me.column == 0) {
                shared->row_maxima[turn][me.group][head] = row_max;
            }
        }
    }
}

/* Ends a head with both groups' sums. Returns the factor of its out, which both groups need. Rows
 * are finished and combined in units of 2^integer. Both sum and out are multiplied by `unit`, so
 * the rounding of `unit` affects lse alone. */
template <bool MAXIMA>
static __device__ __forceinline__ float
finish_head(const bf16_launch &launch, const work_item &item, int head, int turn, float reference,
            bool writes, const bf16_memory *shared)
{
    const float integer = ceilf(reference);
    const float unit = ptx_exp2(reference - integer);
    const float sum = (shared->sums[turn][0][head] + shared->sums[turn][1][head]) * unit;
    float row_max = reference;
    if constexpr (MAXIMA) {
        row_max += fmaxf(shared->row_maxima[turn][0][head], shared->row_maxima[turn][1][head]);
    }
    return leave_head(launch.base, item, head, integer, row_max, sum, writes) * unit;
}

/* Ends the rows of an item or a tile of `num_rows`, and finds the factors of both rows of a lane.
 * Lanes of even columns end row `row` of their warp, lanes of odd columns end row + 8. item_of(row)
 * is the item of the row. Returns the factor of the row that the lane ends. `turn` alternates
 * between 0 and 1: threads read the sums of an item after the barrier, when the other group may
 * already store those of the next item. */
template <bool MAXIMA, typename ItemOf>
static __device__ __forceinline__ float
finish_heads(const bf16_launch &launch, int num_rows, ItemOf item_of, const thread_index &me,
             int turn, const bf16_consumer &state, bf16_memory *shared, float factors[2])
{
    const int row = 16 * me.warp + 8 * (me.column & 1) + me.row;
    store_sums<MAXIMA>(me, turn, state, shared);
    ptx_barrier(BARRIER_CONSUMERS, CONSUMER_THREADS);
    float factor = 0.0f;
    if (row < num_rows) {
        const float reference = me.column & 1 ? state.reference[1] : state.reference[0];
        factor = finish_head<MAXIMA>(launch, item_of(row), row, turn, reference,
                                     me.group == 0 && me.column < 2, shared);
    }
    factors[0] = __shfl_sync(0xFFFFFFFFu, factor, me.lane & 28);
    factors[1] = __shfl_sync(0xFFFFFFFFu, factor, me.lane & 28 | 1);
    return factor;
}

/* Writes out * factor, rounded once. A lane has 2 values of every 8, and writes 8 of every 32. The
 * stores have no branch each, because ptxas would compute their addresses again behind a branch.
 * find_row: where out of a row of the tile begins. */
template <bool ALIGNED, typename FindRow>
static __device__ __forceinline__ void
write_out_rows(int num_rows, FindRow find_row, const thread_index &me, const float factors[2],
               const bf16_consumer &state)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const int head = 16 * me.warp + 8 * piece + me.row;
        const float factor = factors[piece];
        uint16_t *const to = find_row(head) + HALF_VALUES * me.group + 8 * me.column;
#pragma unroll
        for (int j = 0; j < HALF_VALUES / 8; j += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *const pair = &state.out[4 * (j + i) + 2 * piece];
                words[i] = smla_cvt_bf16x2(pair[0] * factor, pair[1] * factor);
            }
            smla_turn_words(me.column, words);
            if constexpr (ALIGNED) {
                smla_store_vector_4_if(to + 8 * j, words, head < num_rows);
            } else if (head < num_rows) {
                smla_store_words<16, false>(to + 8 * j, words);
            }
        }
    }
}

static __device__ __forceinline__ void
write_partial_rows(const bf16_launch &launch, const work_item &item, const thread_index &me,
                   const float factors[2], const bf16_consumer &state)
{
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const int head = 16 * me.warp + 8 * piece + me.row;
        const float factor = factors[piece];
        float *const to = launch.base.partials.out +
                          ((int64_t)item.first_row + head) * SMLA_KV_LORA_RANK +
                          HALF_VALUES * me.group + 2 * me.column;
        if (head >= item.num_heads || factor == 0.0f) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < HALF_VALUES / 8; j++) {
            *(float2 *)(to + 8 * j) = make_float2(state.out[4 * j + 2 * piece] * factor,
                                                  state.out[4 * j + 2 * piece + 1] * factor);
        }
    }
}

/* Writes the rows of an item with one key: the key's value times its weight. Of a warp's heads,
 * each group writes eight. `factor` is the lane's factor in finish_item. Not inlined, so that other
 * items do not jump over it. */
template <bool CODED>
static __device__ __noinline__ void
write_only_rows(const attention_launch &launch, work_item item, int turn, float factor,
                const bf16_memory *shared)
{
    const thread_index me = find_thread_index_again();
    const int first = 16 * me.warp + 8 * me.group;
    const int head = first + me.lane % 8;
    const float sum = shared->sums[turn][0][head] + shared->sums[turn][1][head];
    const float weight = sum * __shfl_sync(0xFFFFFFFFu, factor, 4 * (me.lane % 8) + me.group);
    const lane_part value =
        load_only_value<CODED>(launch, only_key_of_item(launch, item, turn, shared), me.lane);
#pragma unroll 1
    for (int i = 0; first + i < min(item.num_heads, first + 8); i++) {
        write_value(launch, item, first + i, me.lane, value, __shfl_sync(0xFFFFFFFFu, weight, i));
    }
}

/* Writes the item's results. */
template <typename Keys, bool MAXIMA, bool ALIGNED>
static __device__ __forceinline__ void
finish_item(const bf16_launch &launch, int idx, int turn, bf16_memory *shared,
            const bf16_consumer &state)
{
    const work_item item = find_numbered_item<!Keys::WIDE>(launch.base, idx, TILE_HEADS);
    const thread_index me = find_thread_index_again();
    float factors[2];
    const float factor = finish_heads<MAXIMA>(
        launch, item.num_heads, [&](int) { return item; }, me, turn, state, shared, factors);
    if (has_only_key(turn, shared)) {
        write_only_rows<Keys::CODED>(launch.base, item, turn, factor, shared);
        __syncwarp(); /* without it, ptxas believes that lanes diverge in the loops */
    } else if (item.first_row != NOT_PARTIAL) {
        write_partial_rows(launch, item, me, factors, state);
    } else {
        const auto find_row = [&](int row) {
            return smla_out16(&launch.base.params.results, item.token, item.first_head + row);
        };
        write_out_rows<ALIGNED>(item.num_heads, find_row, me, factors, state);
    }
}
