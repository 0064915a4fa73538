/* cache_rows.cuh: what kernels that write or read cache rows share: block sizes, lanes, and the
 * offsets of a row's parts. */
#pragma once

#include "cuda/host/cuda.h"
#include "cuda/ptx/launch.cuh"
#include "cuda/ptx/numeric.cuh"

namespace {

enum {
    BLOCK_WARPS = 8,
    BLOCK_THREADS = BLOCK_WARPS * SMLA_WARP_LANES,
    FEW_BLOCKS_PER_SM = 2, /* blocks per SM of kernels that need many registers */
};

__device__ __forceinline__ int
lane_idx()
{
    return (int)(threadIdx.x % SMLA_WARP_LANES);
}

/* The offsets of a row's parts, in bytes. */
struct row_offsets {
    int32_t scale;
    int32_t rope;
};

row_offsets
offsets_of(const smla_kv_view &kv)
{
    return {kv.format->scale_offset, kv.format->rope_offset};
}

bool
has_aligned_rows(const smla_kv_view &kv)
{
    return smla_is_multiple(kv.base, kv.page_stride_bytes, 16) && kv.token_stride_bytes % 16 == 0;
}

/* ---- Tables of kernels --------------------------------------------------------------------- */

/* A format's kernels, one for each choice that a launcher makes: a type, or whether rows are
 * aligned. */
template <typename Args, int CHOICES> struct format_kernels {
    smla_kv_row_number format;
    smla_kernel<Args> kernels[CHOICES];
};

/* The format whose kernels serve `format`. Kernels get the addresses of a token's data and scales,
 * so they need not know whether these lie in one row or apart. */
smla_kv_row_number
format_of_kernels(smla_kv_row_number format)
{
    return format == SMLA_ROW_FP8_V41_SPLIT   ? SMLA_ROW_FP8_V41
           : format == SMLA_ROW_FP4_V41_SPLIT ? SMLA_ROW_FP4_V41
                                              : format;
}

/* The kernel for a cache and a choice; NULL if the table does not have the format. */
template <typename Args, int CHOICES, int ROWS>
smla_kernel<Args>
find_kernel(const format_kernels<Args, CHOICES> (&table)[ROWS], const smla_kv_view &kv, int choice)
{
    for (const format_kernels<Args, CHOICES> &row : table) {
        if (row.format == format_of_kernels(kv.format->number)) {
            return row.kernels[choice];
        }
    }
    return NULL;
}

/* ---- Lanes --------------------------------------------------------------------------------- */

__device__ __forceinline__ uint8_t *
shuffle_pointer(const uint8_t *pointer, int lane)
{
    return (uint8_t *)__shfl_sync(ALL_LANES, (unsigned long long)pointer, lane);
}

} /* namespace */
