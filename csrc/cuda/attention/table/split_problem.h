/* split_problem.h: what schedule.c knows of a call, and the sizes that follow from it: CTAs that
 * the device runs at once, columns of splits, and tiles of query tokens.
 */
#pragma once

#include "cuda/attention/table/kernels.h"

/* What a schedule depends on. */
typedef struct split_problem {
    const smla_cuda_device *device;
    const smla_attention_kernel *whole; /* runs the call when it is not split */
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
    bool has_tiles; /* a token of the problem is a group of tokens, and a head a row (take_tiles) */
} split_problem;

enum {
    MAX_WAVES = 3, /* a split call with more waves of CTAs gains nothing and costs memory */
    /* Waves of tiles. Their partial rows then fit where all workspaces for tables have room for
     * those of two tiles per SM (tiles_bytes). */
    MAX_TILE_WAVES = 2,
};

static inline int64_t
min_int64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* How many CTAs of the kernel the device runs at once. */
static inline int64_t
count_resident_ctas(const smla_cuda_device *device, const smla_attention_kernel *kernel)
{
    if (kernel->ctas_per_sm == 1) {
        return device->num_sms;
    }
    const int64_t fit = (device->max_shared_bytes + SMLA_RESERVED_SHARED_BYTES) /
                        (kernel->shared_bytes + SMLA_RESERVED_SHARED_BYTES);
    return device->num_sms * min_int64(kernel->ctas_per_sm, fit < 1 ? 1 : fit);
}

/* The columns of a split in both lists together (smla_split_columns). */
static inline int64_t
count_columns(const split_problem *problem, int num_splits)
{
    const int64_t units =
        smla_count_parts(smla_count_parts(problem->topk, num_splits), SMLA_SPLIT_ALIGN) +
        smla_count_parts(smla_count_parts(problem->extra_topk, num_splits), SMLA_SPLIT_ALIGN);
    return units * SMLA_SPLIT_ALIGN;
}

/* CTAs per token and split. */
static inline int64_t
count_tiles(const split_problem *problem, const smla_attention_kernel *kernel)
{
    return smla_count_parts(problem->num_heads, kernel->heads_per_cta);
}

/* Splits beyond this number have no columns. */
static inline int64_t
max_useful_splits(const split_problem *problem)
{
    const int64_t columns =
        problem->topk > problem->extra_topk ? problem->topk : problem->extra_topk;
    const int64_t useful = smla_count_parts(columns, SMLA_SPLIT_ALIGN);
    return useful < 1 ? 1 : min_int64(useful, SMLA_MAX_SPLITS);
}

/* The most pairs of token and split that a plan with several splits may have, for any batch. */
static inline int64_t
max_parts(const split_problem *problem)
{
    const int waves = problem->has_tiles ? MAX_TILE_WAVES : MAX_WAVES;
    return waves * count_resident_ctas(problem->device, problem->whole) /
           count_tiles(problem, problem->whole);
}

/* ---- Tiles of query tokens ------------------------------------------------------------------ */

/* How many query tokens a tile has: as many as fit, of a number that divides those of a request. 1:
 * there is no tile of several. */
static inline int64_t
count_tile_tokens(const smla_attention_shape *shape)
{
    const int64_t fit = min_int64(SMLA_TILE_TOKENS, SMLA_TILE_ROWS / shape->num_heads);
    int64_t count = min_int64(fit, shape->tile_queries);
    while (count > 1 && shape->tile_queries % count != 0) {
        count--;
    }
    return count < 1 ? 1 : count;
}
