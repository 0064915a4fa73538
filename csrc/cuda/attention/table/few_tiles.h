/* few_tiles.h: how many splits attention_few_sm90.cu cuts a call into, for schedule.c. It has a CTA
 * for each split of each tile, all in one wave, or in a few waves without splits. The number of
 * splits follows from shapes alone, so the width of the table stands for the lengths, which only
 * the device knows.
 */
#pragma once

#include "cuda/attention/table/kernels.h"

enum {
    FEW_KEYS = 64,           /* keys per block */
    FEW_BLOCK_COST = 2300,   /* time per block, in partial rows that pass L2 meanwhile */
    FEW_COMBINE_COST = 2300, /* time of the combine kernel, without its partial rows */
    /* The most blocks that CTAs of an SM have where other requests may be shorter: they take no
     * longer than the start of the kernel for many tiles, which shares out unequal lengths. */
    FEW_MOST_BLOCKS = 16,
    FEW_MOST_WAVES = 4, /* every wave costs a start */
};

/* Tiles of a call; if only the device knows how many tokens a request has, the most that there may
 * be. Tokens of no request have tiles of their own then, too. */
static inline int64_t
smla_count_few_tiles(int64_t num_tokens, int64_t num_heads, int64_t num_reqs, bool has_starts)
{
    if (!has_starts) {
        return num_reqs *
               smla_count_parts(num_tokens / num_reqs * num_heads, (int64_t)SMLA_TILE_ROWS);
    }
    const int64_t starts = num_reqs + 1 < num_tokens ? num_reqs + 1 : num_tokens;
    const int64_t in_whole = num_tokens * num_heads / SMLA_TILE_ROWS + starts;
    const int64_t by_token = num_tokens * smla_count_parts(num_heads, (int64_t)SMLA_TILE_ROWS);
    return by_token < in_whole ? by_token : in_whole;
}

/* Returns 0 where the call has too many tiles, or too many keys for them. */
static inline int
count_few_splits(const smla_cuda_device *device, const smla_attention_shape *shape)
{
    if (shape->table_reqs == 0 || shape->num_tokens == 0) {
        return 0;
    }
    const int64_t num_rows = shape->num_tokens * shape->num_heads;
    const int64_t tiles = smla_count_few_tiles(shape->num_tokens, shape->num_heads,
                                               shape->table_reqs, shape->has_starts);
    const int64_t blocks = smla_count_parts(shape->topk, FEW_KEYS);
    const int64_t waves = smla_count_parts(tiles, (int64_t)device->num_sms);
    if (waves > 1) {
        return waves <= FEW_MOST_WAVES && blocks * waves <= FEW_MOST_BLOCKS ? 1 : 0;
    }
    const int64_t fit = device->num_sms / tiles;
    const int64_t most = fit < (int64_t)SMLA_MAX_SPLITS ? fit : (int64_t)SMLA_MAX_SPLITS;
    if (shape->table_reqs > 1 && blocks > most * FEW_MOST_BLOCKS) {
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
