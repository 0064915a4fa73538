/* wide_results.cuh: the results of an item of attention_wide_sm90.cu, and the marks of items that
 * are computed again.
 */
#pragma once

#include "cuda/attention/sm90/sparse_bf16/bf16_results.cuh"
#include "cuda/attention/table/wide_rows.h"

/* The argument of the kernel. Its lists are widened rows. */
typedef struct wide_launch : bf16_launch {
    bf16_launch source; /* the same launch over the cache */
    const smla_wide_header *header;
} wide_launch;

/* Leaves whether a head of the warp has the reference NaN (limit_reference). Both groups have the
 * same references. Others read it behind the barrier in finish_heads, and it is written again two
 * items later. */
static __device__ __forceinline__ void
leave_refusal(const thread_index &me, int turn, const bf16_consumer &state, bf16_memory *shared)
{
    const bool is_refused = isnan(state.reference[0]) || isnan(state.reference[1]);
    const bool any = __any_sync(0xFFFFFFFFu, is_refused);
    if (me.group == 0 && me.lane == 0) {
        shared->wide.is_refused[turn][me.warp] = any;
    }
}

/* Sets the fallback bit of the CTA's item of this number if a warp has refused it. */
static __device__ __forceinline__ void
mark_refused_item(int number, int turn, bf16_memory *shared)
{
    const uint32_t any = *(const volatile uint32_t *)shared->wide.is_refused[turn];
    if (any != 0) {
        mark_item(number, ptx_forget((int)threadIdx.x), shared->wide.fallback_bits);
    }
}

/* Writes the results of the CTA's item of this number. Sums are multiples of the unit of keys. An
 * only key's value comes from the cache, where it is not rounded yet; CODED: the cache may have any
 * format. */
template <bool CODED, bool MAXIMA>
static __device__ __forceinline__ void
finish_wide_item(const wide_launch &launch, int idx, int number, bf16_memory *shared,
                 const bf16_consumer &state)
{
    const work_item item = find_numbered_item<false>(launch.base, idx, TILE_HEADS);
    const thread_index me = find_thread_index_again();
    const int turn = number & 1;
    leave_refusal(me, turn, state, shared);
    float factors[2];
    const float factor = finish_heads<MAXIMA>(
        launch, item.num_heads, [&](int) { return item; }, me, turn, state, shared, factors);
    mark_refused_item(number, turn, shared);
    if (has_only_key(turn, shared)) {
        write_only_rows<CODED>(launch.source.base, item, turn, factor, shared);
        __syncwarp(); /* without it, ptxas believes that lanes diverge in the loops */
        return;
    }
    const float unit = __ldg(&launch.header->unit);
    const float scaled[2] = {factors[0] * unit, factors[1] * unit};
    const auto find_row = [&](int row) {
        return smla_out16(&launch.base.params.results, item.token, item.first_head + row);
    };
    write_out_rows<true>(item.num_heads, find_row, me, scaled, state);
}
