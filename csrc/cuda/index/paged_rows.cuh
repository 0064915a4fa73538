/* paged_rows.cuh: the rows of a tree in paged_lists.cu: their lengths, and the slots that they see.
 */
#pragma once

#include "cuda/index/paged_lists.cuh"

namespace {

/* ---- Lengths: an entry per row ------------------------------------------------------------- */

__device__ __forceinline__ bool
is_seen(const smla_paged_step_params &p, int64_t at)
{
    return at < p.mask_entries && __ldg(p.mask + at * p.mask_stride) != 0;
}

/* The drafts that a row sees in step 0, where `drafts` is the first entry of them in the mask. */
__device__ __forceinline__ int64_t
count_seen(const smla_paged_step_params &p, int64_t drafts)
{
    int64_t count = 0;
    for (int64_t i = 0; i < p.rows_per_req; i++) {
        count += is_seen(p, drafts + i);
    }
    return count;
}

/* Writes the lengths and the sums of a row per thread, of `len` slots; -1: padding. */
__device__ __forceinline__ void
extend_rows(const smla_paged_step_params &p, cta_sums &sums, const smla_paged_tree_rows &rows,
            int64_t row, int64_t count, int64_t len)
{
    for (int64_t step = 0; step < p.num_steps; step++) {
        const int64_t seen = row >= count || len < 0 ? 0 : len + step;
        if (row < count) {
            rows.seqlens[step * rows.seqlens_stride_step + row] = (int32_t)seen;
        }
        extend_sums(sums, rows.starts + step * rows.starts_stride_step, row, count, seen,
                    INT32_MAX);
    }
}

__device__ __forceinline__ void
clear_first_rows(const smla_paged_step_params &p, const smla_paged_tree_rows &rows)
{
    if (rows.seqlens != nullptr && threadIdx.x < p.num_steps) {
        rows.starts[threadIdx.x * rows.starts_stride_step] = 0;
    }
}

/* What the rows of 256 requests need of them. */
struct tree_facts {
    int64_t mask_start[BLOCK_THREADS];
    int64_t mask_row[BLOCK_THREADS];
    int32_t seq_len[BLOCK_THREADS];
    int32_t window_len[BLOCK_THREADS];
};

__device__ __forceinline__ void
write_row_lengths(const smla_paged_step_params &p, cta_sums &sums, tree_facts &facts)
{
    int64_t mask_before = 0;
    clear_first_rows(p, p.expand);
    clear_first_rows(p, p.swa);
    for (int64_t base = 0; base < p.num_reqs; base += BLOCK_THREADS) {
        const smla_paged_request r = read_request(p, base + threadIdx.x);
        int64_t total;
        const int64_t mask_len = p.rows_per_req * r.mask_row;
        facts.mask_start[threadIdx.x] = mask_before + scan_cta(sums, mask_len, &total) - mask_len;
        facts.mask_row[threadIdx.x] = r.mask_row;
        facts.seq_len[threadIdx.x] = (int32_t)r.seq_len;
        facts.window_len[threadIdx.x] = (int32_t)smla_paged_window_len(&p, &r);
        mask_before += total;
        __syncthreads(); /* the facts of all requests are there */
        const int64_t num_reqs = smla_least_of(BLOCK_THREADS, p.num_reqs - base);
        const int64_t first = base * p.rows_per_req, end = first + num_reqs * p.rows_per_req;
        for (int64_t row_base = first; row_base < end; row_base += BLOCK_THREADS) {
            const int64_t row = row_base + threadIdx.x;
            const int64_t in_block = row < end ? smla_divide_len(row - first, p.rows_per_req) : 0;
            const int64_t number = row - first - in_block * p.rows_per_req;
            int64_t len = -1;
            if (row < end && facts.seq_len[in_block] > 0) {
                len = p.mask == nullptr ? p.tree_slots
                                        : count_seen(p, facts.mask_start[in_block] +
                                                            number * facts.mask_row[in_block] +
                                                            facts.seq_len[in_block]);
            }
            extend_rows(p, sums, p.expand, row, end, len);
            if (p.swa.seqlens != nullptr) {
                extend_rows(p, sums, p.swa, row, end,
                            len < 0 ? -1 : len + facts.window_len[in_block]);
            }
        }
        __syncthreads(); /* the facts have been read */
    }
}

/* ---- Slots: a warp per row ----------------------------------------------------------------- */

/* Writes the slots of a row of `expand`, by a warp. Returns how many the row has in the last step.
 * `drafts` is the first entry of the drafts in the mask. */
__device__ __forceinline__ int64_t
write_expand_row(const smla_paged_step_params &p, const smla_paged_request &r, int64_t row,
                 int64_t drafts, int lane, int32_t *out)
{
    if (p.mask == nullptr) {
        const int64_t count = p.tree_slots + p.num_steps - 1;
        for (int64_t i = lane; i < count; i += SMLA_WARP_LANES) {
            out[i] = (int32_t)smla_int_at(&p.cache_loc, row * p.row_loc + i);
        }
        return count;
    }
    int64_t num_seen = 0;
    for (int64_t base = 0; base < p.rows_per_req; base += SMLA_WARP_LANES) {
        const int64_t i = base + lane;
        num_seen += __popc(__ballot_sync(ALL_LANES, i < p.rows_per_req && is_seen(p, drafts + i)));
    }
    int64_t seen_before = 0, others_before = num_seen;
    for (int64_t base = 0; base < p.rows_per_req; base += SMLA_WARP_LANES) {
        const int64_t i = base + lane;
        const bool is_there = i < p.rows_per_req;
        const bool sees = is_there && is_seen(p, drafts + i);
        const unsigned seen = __ballot_sync(ALL_LANES, sees);
        const unsigned others = __ballot_sync(ALL_LANES, is_there && !sees);
        const unsigned lower = (1u << lane) - 1;
        if (is_there) {
            const int64_t at =
                sees ? seen_before + __popc(seen & lower) : others_before + __popc(others & lower);
            out[at] = read_slot(p, r.pool_row, r.seq_len + i, false);
        }
        seen_before += __popc(seen);
        others_before += __popc(others);
    }
    return num_seen;
}

/* Writes a row of `swa`, by the warp that has written the row of `expand`. */
__device__ __forceinline__ void
write_window_row(const smla_paged_step_params &p, const smla_paged_request &r,
                 const int32_t *expand, int64_t count, int lane, int32_t *out)
{
    const bool is_mapped = p.mapping != nullptr;
    const int64_t len = smla_paged_window_len(&p, &r);
    for (int64_t i = lane; i < len; i += SMLA_WARP_LANES) {
        out[i] = read_slot(p, r.pool_row, r.seq_len - len + i, is_mapped);
    }
    __syncwarp(); /* the row of `expand` is written */
    for (int64_t i = lane; i < count; i += SMLA_WARP_LANES) {
        out[len + i] = is_mapped ? map_slot(p, expand[i]) : expand[i];
    }
}

__device__ __forceinline__ void
write_tree(const smla_paged_step_params &p, const smla_paged_request &r, int64_t req,
           int64_t mask_start)
{
    const int warp = threadIdx.x / SMLA_WARP_LANES, lane = threadIdx.x % SMLA_WARP_LANES;
    for (int64_t i = warp; r.seq_len > 0 && i < p.rows_per_req; i += NUM_WARPS) {
        const int64_t row = req * p.rows_per_req + i;
        int32_t *const slots = p.expand.slots + row * p.expand.slots_stride;
        const int64_t drafts = mask_start + i * r.mask_row + r.seq_len;
        const int64_t count = write_expand_row(p, r, row, drafts, lane, slots);
        if (p.swa.seqlens != nullptr) {
            write_window_row(p, r, slots, count, lane, p.swa.slots + row * p.swa.slots_stride);
        }
    }
}

} /* namespace */
