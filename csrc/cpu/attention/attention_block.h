/* attention_block.h: which keys a part reads, block by block.
 *
 * The cursor walks a split's columns of the main list, then of the extra list, and drops every
 * entry that is masked: past topk_length, negative, or past the last slot. Rows of dropped entries
 * are never touched, not even by a prefetch. A block holds rows of one list, in column order.
 */
#ifndef SMLA_CPU_ATTENTION_BLOCK_H
#define SMLA_CPU_ATTENTION_BLOCK_H

#include <assert.h>
#include <string.h>

#include "core/backend.h"

enum { MAX_BLOCK_KEYS = 128 };

typedef struct key_block {
    const uint8_t *rows[MAX_BLOCK_KEYS];
    const smla_kv_format_info *format;
    int count;
} key_block;

typedef struct key_cursor {
    const smla_attention_params *params;
    int64_t token;
    int split;
    int list;
    int64_t column; /* next one of the current list */
    int64_t end;
} key_cursor;

static inline void
enter_list(key_cursor *cursor, int list)
{
    assert(list >= 0 && cursor->params->num_lists <= 2);
    cursor->list = list;
    if (list >= cursor->params->num_lists) {
        return;
    }
    const smla_key_list *const keys = &cursor->params->lists[list];
    int64_t length = keys->topk;
    if (keys->topk_length != NULL) {
        const int64_t given = keys->topk_length[cursor->token * keys->topk_length_stride];
        length = given < 0 ? 0 : given < length ? given : length;
    }
    const int64_t columns = smla_split_columns(keys->topk, cursor->params->num_splits);
    cursor->column = cursor->split * columns;
    cursor->end = cursor->column + columns < length ? cursor->column + columns : length;
}

static inline key_cursor
start_cursor(const smla_attention_params *params, int64_t token, int split)
{
    key_cursor cursor = {.params = params, .token = token, .split = split};
    enter_list(&cursor, 0);
    return cursor;
}

/* Takes up to `capacity` keys; a block of 0 keys is the end. */
static inline void
next_block(key_cursor *cursor, int capacity, key_block *block)
{
    block->count = 0;
    while (cursor->list < cursor->params->num_lists) {
        const smla_key_list *const keys = &cursor->params->lists[cursor->list];
        const int32_t *const indices = keys->indices + cursor->token * keys->indices_stride_token;
        const int64_t num_slots = smla_kv_num_slots(&keys->kv);
        int64_t column = cursor->column;
        int count = 0;
        for (; column < cursor->end && count < capacity; column++) {
            const int64_t slot = indices[column];
            if (slot >= 0 && slot < num_slots) {
                block->rows[count++] = smla_kv_row(&keys->kv, slot);
            }
        }
        cursor->column = column;
        block->format = keys->kv.format;
        block->count = count;
        if (column >= cursor->end) {
            enter_list(cursor, cursor->list + 1);
        }
        if (count > 0) {
            return;
        }
    }
}

/* Scales of one key, {tile 0, ..., tile 3}: 1 for a format without scales. */
typedef uint32_t scale_bits __attribute__((vector_size(4 * SMLA_NUM_SCALE_TILES)));

static inline scale_bits
load_scales(const smla_kv_format_info *format, const uint8_t *row)
{
    scale_bits bits = (scale_bits){0} + 0x3F800000u;
    if (format->num_scales != 0) {
        memcpy(&bits, row + format->scale_offset, sizeof bits);
    }
    return bits;
}

/* Puts them where the kernel reads them: scales[tile][key], and 1 for the RoPE part. */
static inline void
store_scales(scale_bits bits, int key, int stride, float *scales)
{
    float row[SMLA_NUM_SCALE_TILES];
    memcpy(row, &bits, sizeof row);
    for (int tile = 0; tile < SMLA_NUM_SCALE_TILES; tile++) {
        scales[tile * stride + key] = row[tile];
    }
    scales[SMLA_NUM_SCALE_TILES * stride + key] = 1.0f;
}

/* Bytes [begin, begin + 256) of a row, into L2: a block does not fit L1. */
static inline void
prefetch_row(const uint8_t *row, int begin, int row_bytes)
{
    const int end = begin + 256 < row_bytes ? begin + 256 : row_bytes;
    for (int at = begin; at < end; at += 64) {
        __builtin_prefetch(row + at, 0, 2);
    }
}

/* For the first block of a part, which no block before it has prefetched. */
static inline void
prefetch_block(const key_block *block)
{
    for (int key = 0; key < block->count; key++) {
        for (int begin = 0; begin < block->format->row_bytes; begin += 256) {
            prefetch_row(block->rows[key], begin, block->format->row_bytes);
        }
    }
}

#endif /* SMLA_CPU_ATTENTION_BLOCK_H */
