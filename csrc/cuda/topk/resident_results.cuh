/* resident_results.cuh: writes the columns that a cluster takes of a row, in order. */
#pragma once

#include "cuda/topk/resident_choose.cuh"

namespace {

/* The lowest `count` bits of a mask. */
__device__ __forceinline__ uint32_t
lowest_bits(uint32_t mask, uint32_t count)
{
#pragma unroll 1
    for (uint32_t extra = __popc(mask); extra > count && count != 0; extra--) {
        mask &= 0x7FFFFFFFu >> __clz(mask);
    }
    return count == 0 ? 0 : mask;
}

/* Writes the columns that the warp takes; each lane has the mask of its run, which begins at
 * `column`, and its first index in the result. If a run has many columns to write, all lanes write
 * each run together, one run after the other. */
template <bool IS_BF16>
__device__ __forceinline__ void
write_columns(const result_row &result, uint32_t mask, uint32_t index, uint32_t column)
{
    enum { MANY = 12 };
    if (!__any_sync(ALL_LANES, __popc(mask) > MANY)) {
        int32_t *out = result.out + index;
#pragma unroll 1
        for (uint32_t left = mask; left != 0; left &= left - 1) {
            *out++ = (int32_t)(column + __ffs(left) - 1);
        }
        if (result.values != nullptr) {
#pragma unroll 1
            for (; mask != 0; mask &= mask - 1) {
                copy_value<IS_BF16>(result, index++, column + __ffs(mask) - 1);
            }
        }
        return;
    }
    const uint32_t lane = threadIdx.x % SMLA_WARP_LANES;
#pragma unroll 4
    for (int run = 0; run < SMLA_WARP_LANES; run++) {
        const uint32_t run_mask = __shfl_sync(ALL_LANES, mask, run);
        const uint32_t run_index = __shfl_sync(ALL_LANES, index, run);
        const uint32_t run_column = __shfl_sync(ALL_LANES, column, run);
        if ((run_mask >> lane & 1) != 0) {
            write_column<IS_BF16>(result, run_index + __popc(run_mask & ((1u << lane) - 1)),
                                  run_column + lane);
        }
    }
}

/* Writes the columns that the warp takes of its lanes' runs: all of `taken`, and of `equal` those
 * that are among the row's first num_equal. `before` counts the keys that earlier warps take.
 * `column` is the first column of the lane's run. */
template <bool IS_BF16>
__device__ __forceinline__ void
write_runs(const result_row &result, uint32_t taken, uint32_t equal, uint32_t num_equal,
           const key_counts &before, uint32_t column)
{
    uint32_t index = before.before;
    if (num_equal != 0) {
        const uint32_t count = __popc(equal);
        const uint32_t equal_before = before.equal + scan_lanes(count) - count;
        index += min(before.equal, num_equal);
        taken |= lowest_bits(equal, num_equal - min(equal_before, num_equal));
    }
    const uint32_t count = __popc(taken);
    write_columns<IS_BF16>(result, taken, index + scan_lanes(count) - count, column);
}

/* Writes the columns that the warp takes of its share of the streamed part. */
template <bool IS_BF16>
__device__ __forceinline__ void
write_streamed(const streamed_keys<IS_BF16> &keys, const result_row &result,
               const key_threshold &threshold, key_counts before)
{
    using type = logit_type<IS_BF16>;
    const uint32_t begin = keys.row->begin;
    keys.visit_vectors([&](uint32_t vector, const uint32_t *vector_keys) {
        uint32_t taken;
        uint32_t equal;
        keys.compare(vector, vector_keys, threshold, &taken, &equal);
        if (__any_sync(ALL_LANES, (taken | equal) != 0)) {
            write_runs<IS_BF16>(result, taken, equal, threshold.num_equal, before,
                                vector * type::PER_VECTOR - begin);
            before.before += __reduce_add_sync(ALL_LANES, __popc(taken));
            before.equal += __reduce_add_sync(ALL_LANES, __popc(equal));
        }
    });
}

/* Writes the columns that the warp takes of all parts, after those of earlier warps. */
template <bool IS_BF16, int CTAS, int THREADS, int PARTS>
__device__ __forceinline__ void
write_taken(const thread_keys<IS_BF16, PARTS> &keys, const resident_row &row,
            const taken_masks<PARTS> &masks, const resident_memory *shared)
{
    constexpr uint32_t WARPS = CTAS * THREADS / SMLA_WARP_LANES;
    const result_row result = row.result;
    const uint32_t num_equal = count_equal(shared);
#pragma unroll 1
    for (uint32_t part = 0; part < RESIDENT<PARTS>; part++) {
        const uint32_t run = part * CTAS * THREADS + cluster_thread<CTAS, THREADS>();
        uint32_t taken = masks.taken[0];
        uint32_t equal = masks.equal[0];
        if constexpr (PARTS > 1) {
            taken = part == 0 ? taken : masks.taken[1];
            equal = part == 0 ? equal : masks.equal[1];
        }
        write_runs<IS_BF16>(result, taken, equal, num_equal,
                            sum_taken<WARPS, PARTS>(shared, run / SMLA_WARP_LANES),
                            open_run<IS_BF16>(row, run).first - row.begin);
    }
    if constexpr (PARTS > RESIDENT_PARTS) {
        const uint32_t warp = cluster_thread<CTAS, THREADS>() / SMLA_WARP_LANES;
        if ((shared->streamed[warp] | (num_equal != 0 ? shared->streamed[WARPS + warp] : 0)) != 0) {
            write_streamed<IS_BF16>(keys.streamed, result, {masks.order, num_equal},
                                    sum_taken<WARPS, PARTS>(shared, RESIDENT_PARTS * WARPS + warp));
        }
    }
}

} // namespace
