/* slot.h: from the position of a token in its request to the slot of its cache row. Whatever maps
 * positions on the CPU does so here.
 */
#pragma once

#include "core/backend.h"

/* A request's row of a block table. */
typedef struct smla_page_row {
    const int32_t *pages;
    int64_t stride;
    int64_t num_blocks;
    int64_t block_size;
} smla_page_row;

static inline smla_page_row
smla_page_row_of(const smla_page_table *table, int64_t req)
{
    return (smla_page_row){table->block_table + req * table->stride_req, table->stride_block,
                           table->num_blocks, table->block_size};
}

/* The page of a position; negative where the row has none. */
static inline int64_t
smla_find_page(const smla_page_row *row, int64_t position)
{
    const int64_t block = position / row->block_size;
    return position < 0 || block >= row->num_blocks ? -1 : row->pages[block * row->stride];
}

/* The slot of a position; -1 where the row has no page for it, or where int32 cannot hold it. */
static inline int64_t
smla_find_slot(const smla_page_row *row, int64_t position)
{
    const int64_t page = smla_find_page(row, position);
    const int64_t slot = page * row->block_size + position % row->block_size;
    return page < 0 || slot > INT32_MAX ? -1 : slot;
}

/* The kernel of one instruction set; slot_kernel.c. */
typedef struct smla_slot_isa {
    /* smla_find_slot of each position of a list. Returns how many have a slot. The page size must
     * fit int32. */
    int64_t (*find_slots)(const smla_page_row *row, const int32_t *positions, int64_t count,
                          int32_t *slots);
    /* start + position of each position that has a page, for start >= 0. Returns how many have. */
    int64_t (*find_rows)(const smla_page_row *row, int32_t start, const int32_t *positions,
                         int64_t count, int32_t *rows);
    /* Moves the slots among `count` entries left. */
    void (*close_holes)(int32_t *slots, int64_t count);
    /* out = index + base. Negative indices, and sums that int32 cannot hold, become -1. */
    void (*add_base)(const int32_t *indices, int64_t count, int64_t base, int32_t *out);
} smla_slot_isa;

/* ---- Columns of a list --------------------------------------------------------------------- */

/* Writes -1 to columns begin...end - 1. */
static inline void
smla_clear_columns(int32_t *out, int64_t begin, int64_t end)
{
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        out[i] = -1;
    }
}

/* Writes first, first + 1, ..., and -1 for what int32 cannot hold and for negative numbers. */
static inline void
smla_write_run(int32_t *out, int64_t first, int64_t count)
{
    if (first >= 0 && first <= INT32_MAX - count) {
#pragma omp simd
        for (int32_t i = 0; i < (int32_t)count; i++) {
            out[i] = (int32_t)first + i;
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t index = first + i;
        out[i] = index < 0 || index > INT32_MAX ? -1 : (int32_t)index;
    }
}

/* Writes the slots of `count` positions from `first` on, which is not negative if there are any,
 * page by page. */
void smla_write_slots(int32_t *out, const smla_page_row *row, int64_t first, int64_t count);
