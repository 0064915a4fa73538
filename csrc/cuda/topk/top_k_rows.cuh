/* top_k_rows.cuh: what the kernels of top_k_per_row share: the columns of a token, the row of
 * results, and the cluster of CTAs that writes it. */
#pragma once

#include "core/params_topk.h"
#include "cuda/index/slot_rows.cuh"

enum {
    SMLA_MAX_ROW_CTAS = 8,   /* the largest cluster that every Hopper GPU can start */
    SMLA_RESIDENT_KEYS = 32, /* keys that a thread has of one part of a row */
};

/* How a row is resident: in a cluster of 1, 2, 4 or 8 CTAs of 1024 threads, or in one CTA of 512,
 * in one or two parts. With three parts, two are resident in 8 CTAs, which read the third again and
 * again. */
typedef struct smla_resident_plan {
    int ctas;
    int threads;
    int parts;
} smla_resident_plan;

/* top_k_sm90.cu: runs rows on clusters of 2, 4 or 8 CTAs. */
extern "C" cudaError_t smla_cuda_launch_top_k_clusters(const smla_top_k_params *params, int ctas);

/* top_k_resident_sm90.cu: runs rows of at most SMLA_RESIDENT_KEYS keys per thread and part, or rows
 * of any length in three parts. */
extern "C" cudaError_t smla_cuda_launch_top_k_resident(const smla_top_k_params *params,
                                                       smla_resident_plan plan);

namespace {

/* ---- The cluster --------------------------------------------------------------------------- */

template <int CTAS>
__device__ __forceinline__ uint32_t
cluster_rank(void)
{
    if constexpr (CTAS == 1) {
        return 0;
    } else {
        return ptx_cluster_rank();
    }
}

/* Synchronises all threads of the cluster. Each sees what the others wrote before. */
template <int CTAS>
__device__ __forceinline__ void
sync_ctas(void)
{
    if constexpr (CTAS == 1) {
        __syncthreads();
    } else {
        __syncwarp();
        ptx_cluster_sync();
    }
}

/* The sum of the values of this lane and of all lower lanes. */
__device__ __forceinline__ uint32_t
scan_lanes(uint32_t value)
{
    return smla_scan_lanes(value, (int)threadIdx.x % SMLA_WARP_LANES);
}

/* ---- Tokens -------------------------------------------------------------------------------- */

struct top_k_args {
    smla_top_k_params p;
    page_table pages; /* the slots' block table */
    /* Steps per warp whose keys fit in shared memory; only top_k.cuh uses it. */
    uint32_t memory_steps;
};

static inline top_k_args
make_top_k_args(const smla_top_k_params *p, uint32_t memory_steps)
{
    top_k_args args = {*p, {}, memory_steps};
    if (p->slots.out != NULL) {
        args.pages = page_table_of(p->slots.pages);
    }
    return args;
}

/* The number of keys of the longest row, with the elements that its first vector may have before
 * it. */
inline int64_t
count_row_keys(const smla_top_k_params *p)
{
    enum { VECTOR = 16 };
    const int64_t bytes = p->is_bf16 ? 2 : 4;
    const bool is_aligned = smla_is_multiple(p->logits, p->logits_stride_token * bytes, VECTOR);
    return p->num_columns + (is_aligned ? 0 : VECTOR / bytes - 1);
}

/* The columns of a token, clamped to 0...N. */
typedef struct token_columns {
    uint32_t begin;
    uint32_t count;
} token_columns;

__device__ __forceinline__ token_columns
load_columns(const smla_top_k_params &p, int64_t token)
{
    const int32_t most = (int32_t)p.num_columns;
    const int32_t start = p.starts == nullptr ? 0 : __ldg(p.starts + token * p.starts_stride);
    const int32_t begin = min(max(start, 0), most);
    const int32_t end = min(max(__ldg(p.ends + token * p.ends_stride), 0), most);
    return {(uint32_t)begin, end > begin ? (uint32_t)(end - begin) : 0};
}

/* ---- Results ------------------------------------------------------------------------------- */

/* A row of the results, and the logits that it comes from. */
typedef struct result_row {
    const uint8_t *logits; /* the row's first logit */
    int32_t *out;
    uint8_t *values; /* NULL if no values are wanted */
} result_row;

template <bool IS_BF16>
__device__ __forceinline__ result_row
open_result(const smla_top_k_params &p, int64_t token, const token_columns &columns)
{
    constexpr int BYTES = IS_BF16 ? 2 : 4;
    uint8_t *const values = (uint8_t *)p.values;
    return {(const uint8_t *)p.logits + (token * p.logits_stride_token + columns.begin) * BYTES,
            p.out + token * p.out_stride_token,
            values == nullptr ? nullptr : values + token * p.values_stride_token * BYTES};
}

template <bool IS_BF16>
__device__ __forceinline__ void
copy_value(const result_row &row, uint32_t index, uint32_t column)
{
    if constexpr (IS_BF16) {
        ((uint16_t *)row.values)[index] = __ldg((const uint16_t *)row.logits + column);
    } else {
        ((uint32_t *)row.values)[index] = __ldg((const uint32_t *)row.logits + column);
    }
}

template <bool IS_BF16>
__device__ __forceinline__ void
write_column(const result_row &row, uint32_t index, uint32_t column)
{
    row.out[index] = (int32_t)column;
    if (row.values != nullptr) {
        copy_value<IS_BF16>(row, index, column);
    }
}

/* Writes the row of a token with at most k columns: all of them, then -1. */
template <bool IS_BF16, int CTAS, int THREADS>
__device__ __forceinline__ void
write_all(const result_row &row, uint32_t count, uint32_t k)
{
    const uint32_t first = cluster_rank<CTAS>() * THREADS + threadIdx.x;
#pragma unroll 1
    for (uint64_t index = first; index < k; index += CTAS * THREADS) {
        if (index < count) {
            write_column<IS_BF16>(row, (uint32_t)index, (uint32_t)index);
            continue;
        }
        row.out[index] = -1;
        if (row.values != nullptr && IS_BF16) {
            ((uint16_t *)row.values)[index] = 0xFF80u;
        } else if (row.values != nullptr) {
            ((uint32_t *)row.values)[index] = 0xFF800000u;
        }
    }
}

} // namespace
