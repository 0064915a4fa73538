/* few_tiles.h: how many splits attention_few_sm90.cu cuts a call into, for schedule.c. It has a CTA
 * for each split of each tile, all in one wave. The number of splits follows from shapes alone, so
 * the width of the table stands for the lengths, which only the device knows.
 */
#pragma once

#include "cuda/attention/table/kernels.h"

enum {
    FEW_KEYS = 64,           /* keys per block */
    FEW_BLOCK_COST = 2300,   /* time per block, in partial rows that pass L2 meanwhile */
    FEW_COMBINE_COST = 2300, /* time of the combine kernel, without its partial rows */
    FEW_EVEN_SPLITS = 4,     /* with so many splits, a tile takes any number of keys */
    FEW_BLOCKS = 8,          /* the most blocks per CTA with fewer */
};

/* Returns 0 where the call has too many tiles, or too many keys for them. */
static inline int
count_few_splits(const smla_cuda_device *device, const smla_attention_shape *shape)
{
    if (shape->equal_reqs == 0 || shape->num_tokens == 0) {
        return 0;
    }
    const int64_t num_rows = shape->num_tokens * shape->num_heads;
    const int64_t req_rows = num_rows / shape->equal_reqs;
    const int64_t tiles = shape->equal_reqs * smla_count_parts(req_rows, SMLA_TILE_ROWS);
    const int64_t fit = device->num_sms / tiles;
    const int64_t most = fit < SMLA_MAX_SPLITS ? fit : SMLA_MAX_SPLITS;
    const int64_t blocks = smla_count_parts(shape->topk, FEW_KEYS);
    if (most == 0 || (most < FEW_EVEN_SPLITS && blocks > most * FEW_BLOCKS)) {
        return 0;
    }
    int64_t least_cost = INT64_MAX;
    int best = 0;
    for (int splits = 1; splits <= most; splits++) {
        const int64_t combine_cost = splits == 1 ? 0 : FEW_COMBINE_COST + splits * num_rows;
        const int64_t cost = smla_count_parts(blocks, splits) * FEW_BLOCK_COST + combine_cost;
        if (cost < least_cost) {
            least_cost = cost;
            best = splits;
        }
    }
    return best;
}
