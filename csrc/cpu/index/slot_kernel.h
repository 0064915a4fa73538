/* slot_kernel.h: the slots of a list of positions, for one instruction set.
 *
 * Computes     page = pages[position / block_size], slot = page * block_size + offset; -1 where the
 *              row has no page, or where int32 cannot hold the slot
 * Shapes       positions [count], slots [count] int32; a row of a block table with any stride
 * Roofline     Instructions bind: eight bytes per entry. ns per entry on one core of a Zen 3, in
 *              memory, where a copy of the bytes takes 0.5: 1.9 with the stride as a variable, 0.77
 *              with a constant, 0.63 with one comparison less per loop (2026-11-25). Before the
 *              last, gathers by AVX2 took 0.69, but they are slow on many processors of Intel.
 * Numerics     integers
 * Source       ours
 *
 * A list is taken in chunks, each in three loops: blocks, pages, slots. The first and the last have
 * vector instructions, and the second is one load per entry. In one loop the load keeps the
 * compiler from vectors.
 *
 * The including file names its table of functions (SMLA_SLOTS).
 */
#pragma once

#include "cpu/index/slot.h"

enum { CHUNK = 64 };

/* The slots of up to CHUNK positions. A page size that is a power of two has a shift; others have
 * shift < 0, and cost a division. Returns how many positions have a slot. */
static inline __attribute__((always_inline)) int32_t
find_chunk(const smla_page_row *row, const int32_t *positions, int count, int32_t *slots, int shift,
           int64_t stride)
{
    const uint32_t block_size = (uint32_t)row->block_size;
    const uint32_t max_page = INT32_MAX / block_size;
    const uint32_t num_blocks =
        row->num_blocks <= INT32_MAX ? (uint32_t)row->num_blocks : (uint32_t)INT32_MAX + 1;
    uint32_t blocks[CHUNK] __attribute__((aligned(64))); /* 0 where the row has none */
    uint32_t pages[CHUNK] __attribute__((aligned(64)));
    int32_t num_slots = 0;
#pragma omp simd
    for (int i = 0; i < count; i++) {
        const uint32_t position = (uint32_t)positions[i];
        const uint32_t block = shift >= 0 ? position >> shift : position / block_size;
        blocks[i] = block < num_blocks ? block : 0;
    }
    for (int i = 0; i < count; i++) {
        pages[i] = (uint32_t)row->pages[(int64_t)blocks[i] * stride];
    }
    /* A position that has no block lies behind the page of the block 0, or is negative. */
#pragma omp simd reduction(+ : num_slots)
    for (int i = 0; i < count; i++) {
        const uint32_t position = (uint32_t)positions[i];
        const uint32_t offset = position - blocks[i] * block_size;
        const uint32_t slot = pages[i] * block_size + offset;
        const bool fits = ((int32_t)(position | slot) >= 0) & (pages[i] <= max_page);
        const bool is_slot = fits & (offset < block_size);
        slots[i] = is_slot ? (int32_t)slot : -1;
        num_slots += is_slot;
    }
    return num_slots;
}

static inline __attribute__((always_inline)) int64_t
find_slots_with(const smla_page_row *row, const int32_t *positions, int64_t count, int32_t *slots,
                int shift, int64_t stride)
{
    int64_t num_slots = 0;
    int64_t i = 0;
    for (; i + CHUNK <= count; i += CHUNK) {
        num_slots += find_chunk(row, positions + i, CHUNK, slots + i, shift, stride);
    }
    return num_slots + find_chunk(row, positions + i, (int)(count - i), slots + i, shift, stride);
}

static int64_t
find_slots(const smla_page_row *row, const int32_t *positions, int64_t count, int32_t *slots)
{
    const uint32_t block_size = (uint32_t)row->block_size;
    const bool is_power = (block_size & (block_size - 1)) == 0;
    if (row->num_blocks == 0) {
        smla_clear_columns(slots, 0, count);
        return 0;
    }
    if (!is_power) {
        return find_slots_with(row, positions, count, slots, -1, row->stride);
    }
    const int shift = __builtin_ctz(block_size);
    return row->stride == 1 ? find_slots_with(row, positions, count, slots, shift, 1)
                            : find_slots_with(row, positions, count, slots, shift, row->stride);
}

static void
add_base(const int32_t *indices, int64_t count, int64_t base, int32_t *out)
{
    const int32_t most = base > INT32_MAX ? -1 : (int32_t)(INT32_MAX - base);
    const int32_t start = base > INT32_MAX ? 0 : (int32_t)base;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const int32_t index = indices[i];
        const bool is_row = (index >= 0) & (index <= most);
        out[i] = is_row ? (int32_t)((uint32_t)index + (uint32_t)start) : -1;
    }
}

const smla_slot_isa SMLA_SLOTS = {
    .find_slots = find_slots,
    .add_base = add_base,
};
