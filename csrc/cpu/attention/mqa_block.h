/* mqa_block.h: finds the keys of a part, block by block: from columns to indices, slots and
 * cache rows.
 *
 * The cursor walks a split's columns of the main list, then of the extra list. It drops every
 * masked index: one outside begin...end, negative, past the last slot, or on a page that the block
 * table does not have. The rows of dropped indices are never touched, not even by a prefetch. A
 * block holds keys of one list, in column order.
 */
#pragma once

#include <assert.h>
#include <string.h>

#include "core/attention/params_attention.h"
#include "core/backend.h"
#include "core/numeric.h"
#include "cpu/index/slot.h"

enum {
    MAX_BLOCK_KEYS = 128,
    NUM_TILES = SMLA_NUM_SCALE_TILES + 1, /* four tiles of the latent, and the RoPE tile */
};

typedef struct key_block {
    smla_kv_token keys[MAX_BLOCK_KEYS];
    const smla_kv_format_info *format;
    float kv_scale; /* the scale of the whole cache */
    int count;
} key_block;

typedef struct key_cursor {
    const smla_attention_params *params;
    int64_t token;
    int split;
    int list;
    int64_t column; /* next column of the current list */
    int64_t end;
} key_cursor;

/* values[token] - offset, clamped to 0...most; `otherwise` if there is no array. */
static inline int64_t
read_bound(const int32_t *values, int64_t stride, int64_t offset, int64_t token, int64_t most,
           int64_t otherwise)
{
    const int64_t value = values == NULL ? otherwise : values[token * stride] - offset;
    return value < 0 ? 0 : value < most ? value : most;
}

static inline void
enter_list(key_cursor *cursor, int list)
{
    assert(list >= 0 && cursor->params->keys.num_lists <= 2);
    cursor->list = list;
    if (list >= cursor->params->keys.num_lists) {
        return;
    }
    const smla_key_list *const keys = &cursor->params->keys.lists[list];
    const int64_t topk = keys->topk;
    const int64_t begin = read_bound(keys->begin, keys->begin_stride, 0, cursor->token, topk, 0);
    const int64_t end =
        read_bound(keys->end, keys->end_stride, keys->end_offset, cursor->token, topk, topk);
    const smla_attention_params *const params = cursor->params;
    const int64_t columns = smla_is_table(&params->keys)
                                ? smla_table_split_columns(&params->keys, &params->visible,
                                                           &params->results, cursor->token)
                                : smla_split_columns(topk, params->results.num_splits);
    const int64_t first = cursor->split * columns;
    cursor->column = first < begin ? begin : first;
    cursor->end = first + columns < end ? first + columns : end;
}

static inline key_cursor
start_cursor(const smla_attention_params *params, int64_t token, int split)
{
    key_cursor cursor = {.params = params, .token = token, .split = split};
    enter_list(&cursor, 0);
    return cursor;
}

/* The slot of position `index` in the token's request, -1 if there is none: the rules of
 * convert_req_index_to_global_index. */
static inline int64_t
map_index(const smla_attention_params *params, const smla_key_list *keys, int64_t token,
          int64_t index)
{
    const smla_index_map *const map = &keys->map;
    const int64_t req = map->req_id_per_token[token];
    if (req < 0 || req >= map->num_reqs) {
        return -1;
    }
    const int64_t entry_tokens = params->keys.entry_tokens;
    const smla_page_row row = {map->block_table + req * map->block_table_stride_req,
                               map->block_table_stride_block, map->num_blocks,
                               entry_tokens != 0 ? entry_tokens : keys->kv.block_size};
    return smla_find_slot(&row, index);
}

/* The slot that a column names, negative if it names none. */
static inline int64_t
find_slot(const smla_attention_params *params, const smla_key_list *keys, int64_t token,
          int64_t column)
{
    const int64_t index =
        keys->indices == NULL ? column : keys->indices[token * keys->indices_stride_token + column];
    const bool is_mapped = index >= 0 && keys->map.block_table != NULL;
    const int64_t slot = is_mapped ? map_index(params, keys, token, index) : index;
    return slot < smla_kv_num_slots(&keys->kv) ? slot : -1;
}

enum { HOLES = 16 };

/* The first column from `column` on behind which there may be a key, in steps of HOLES columns.
 * Lists may have a few keys and then a hole in each of 100,000 columns. */
static inline int64_t
skip_holes(const smla_key_list *keys, int64_t token, int64_t column, int64_t end)
{
    if (keys->indices == NULL) {
        return column;
    }
    const int32_t *const indices = keys->indices + token * keys->indices_stride_token;
    for (; column + HOLES <= end; column += HOLES) {
        int32_t signs = -1;
        for (int i = 0; i < HOLES; i++) {
            signs &= indices[column + i];
        }
        if (signs >= 0) {
            break;
        }
    }
    return column;
}

/* Fills the block with up to `capacity` keys. A block of 0 keys is the end. */
static inline void
next_block(key_cursor *cursor, int capacity, key_block *block)
{
    block->count = 0;
    while (cursor->list < cursor->params->keys.num_lists) {
        const smla_key_list *const keys = &cursor->params->keys.lists[cursor->list];
        int64_t column = cursor->column;
        int count = 0;
        for (; column < cursor->end && count < capacity; column++) {
            const int64_t slot = find_slot(cursor->params, keys, cursor->token, column);
            if (slot >= 0) {
                block->keys[count++] = smla_kv_slot(&keys->kv, slot);
            } else {
                column = skip_holes(keys, cursor->token, column + 1, cursor->end) - 1;
            }
        }
        cursor->column = column;
        block->format = keys->kv.format;
        block->kv_scale = smla_read_scale(&cursor->params->logits.kv_scale[cursor->list]);
        block->count = count;
        if (column >= cursor->end) {
            enter_list(cursor, cursor->list + 1);
        }
        if (count > 0) {
            return;
        }
    }
}

static inline float
choose_key_unit(const smla_attention_params *params)
{
    return smla_choose_key_unit(smla_read_scale(&params->logits.kv_scale[0]),
                                smla_read_scale(&params->logits.kv_scale[1]));
}

/* Whether the kernels multiply the scales of such rows with sums over tiles of 128 values. Other
 * rows are multiplied with their scales first: a product of a few bits, which is exact. */
static inline bool
has_tile_scales(const smla_kv_format_info *format)
{
    return format->scale_type == SMLA_SCALE_FP32 || format->scale_type == SMLA_SCALE_CACHE;
}

/* How many values behind a row's latent are bf16. */
static inline int
count_bf16_rope(const smla_kv_format_info *format)
{
    return smla_has_rope_codes(format) ? 0 : format->head_dim - SMLA_KV_LORA_RANK;
}

/* Scales of one key, {tile 0, ..., tile 3}, times a factor. A row without scales of tiles has the
 * factor alone, which is the scale of its cache, or 1, in the kernels divided by their unit. */
typedef uint32_t scale_bits __attribute__((vector_size(4 * SMLA_NUM_SCALE_TILES)));
typedef float tile_scales __attribute__((vector_size(4 * SMLA_NUM_SCALE_TILES)));

static inline scale_bits
load_scales(const smla_kv_format_info *format, float factor, const uint8_t *scales)
{
    tile_scales products = (tile_scales){0} + factor;
    if (format->scale_type == SMLA_SCALE_FP32) {
        tile_scales own;
        memcpy(&own, scales, sizeof own);
        products *= own;
    }
    return (scale_bits)products;
}

/* Notes scales of tiles above 2^64, infinite or NaN. */
static inline scale_bits
note_huge_scales(scale_bits noted, scale_bits bits)
{
    return noted | (scale_bits)((bits & 0x7FFFFFFFu) > 0x5F800000u);
}

static inline bool
has_scale(scale_bits noted)
{
    return (noted[0] | noted[1] | noted[2] | noted[3]) != 0;
}

/* Stores a key's scales where the kernel reads them: scales[tile][key]. Scales in a row are not
 * those of its RoPE tile, which has the factor of load_scales alone. */
static inline void
store_scales(scale_bits bits, float factor, int key, int stride, float *scales)
{
    float row[SMLA_NUM_SCALE_TILES];
    memcpy(row, &bits, sizeof row);
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        scales[tile * stride + key] = row[tile];
    }
    scales[SMLA_NUM_SCALE_TILES * stride + key] = factor;
}

/* Prefetches bytes [begin, begin + 256) of a block's key into L2, because a block does not fit L1.
 * The scales of a split page come with the first bytes. */
static inline void
prefetch_key(const key_block *block, int key, int begin)
{
    const smla_kv_format_info *const format = block->format;
    const bool is_split = format->layout == SMLA_PAGE_SPLIT;
    const int bytes = is_split ? format->data_bytes : format->row_bytes;
    const int end = begin + 256 < bytes ? begin + 256 : bytes;
    for (int at = begin; at < end; at += 64) {
        __builtin_prefetch(block->keys[key].row + at, 0, 2);
    }
    if (is_split && begin == 0) {
        __builtin_prefetch(block->keys[key].scales, 0, 2);
    }
}

/* Prefetches the first block of a part. Each later block is prefetched during the one before. */
static inline void
prefetch_block(const key_block *block)
{
    for (int key = 0; key < block->count; key++) {
        for (int begin = 0; begin < block->format->row_bytes; begin += 256) {
            prefetch_key(block, key, begin);
        }
    }
}
