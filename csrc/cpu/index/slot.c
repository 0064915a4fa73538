/* slot.c: the slots of a list of positions.
 *
 * A list is taken in chunks, each in three loops: blocks, pages, slots. The first and the last have
 * vector instructions, and the second is one load per entry. In one loop the load keeps the
 * compiler from vectors, and an entry took twice as long (2.6 ns for 1.3, Zen 5).
 */
#include "cpu/index/slot.h"

enum { CHUNK = 64 };

/* The slots of up to CHUNK positions. A page size that is a power of two has a shift; others have
 * shift < 0, and cost a division. Returns how many positions have a slot. */
static inline __attribute__((always_inline)) int32_t
find_chunk(const smla_page_row *row, const int32_t *positions, int count, int32_t *slots, int shift)
{
    const uint32_t block_size = (uint32_t)row->block_size;
    const uint32_t max_page = INT32_MAX / block_size;
    const uint32_t num_blocks =
        row->num_blocks < INT32_MAX ? (uint32_t)row->num_blocks : (uint32_t)INT32_MAX + 1;
    int32_t blocks[CHUNK]; /* -1 where the row has none */
    uint32_t pages[CHUNK];
    int32_t num_slots = 0;
#pragma omp simd
    for (int i = 0; i < count; i++) {
        const uint32_t position = (uint32_t)positions[i];
        const uint32_t block = shift >= 0 ? position >> shift : position / block_size;
        const bool is_inside = (positions[i] >= 0) & (block < num_blocks);
        blocks[i] = is_inside ? (int32_t)block : -1;
    }
    for (int i = 0; i < count; i++) {
        const int64_t block = blocks[i] < 0 ? 0 : blocks[i];
        pages[i] = (uint32_t)row->pages[block * row->stride];
    }
#pragma omp simd reduction(+ : num_slots)
    for (int i = 0; i < count; i++) {
        const uint32_t offset = (uint32_t)positions[i] - (uint32_t)blocks[i] * block_size;
        const uint32_t slot = pages[i] * block_size + offset;
        const bool is_slot = (blocks[i] >= 0) & (pages[i] <= max_page) & ((int32_t)slot >= 0);
        slots[i] = is_slot ? (int32_t)slot : -1;
        num_slots += is_slot;
    }
    return num_slots;
}

static inline __attribute__((always_inline)) int64_t
find_slots_with(const smla_page_row *row, const int32_t *positions, int64_t count, int32_t *slots,
                int shift)
{
    int64_t num_slots = 0;
    int64_t i = 0;
    for (; i + CHUNK <= count; i += CHUNK) {
        num_slots += find_chunk(row, positions + i, CHUNK, slots + i, shift);
    }
    return num_slots + find_chunk(row, positions + i, (int)(count - i), slots + i, shift);
}

int64_t
smla_find_slots(const smla_page_row *row, const int32_t *positions, int64_t count, int32_t *slots)
{
    const uint32_t block_size = (uint32_t)row->block_size;
    const bool is_power = (block_size & (block_size - 1)) == 0;
    if (row->num_blocks == 0) {
        for (int64_t i = 0; i < count; i++) {
            slots[i] = -1;
        }
        return 0;
    }
    return is_power ? find_slots_with(row, positions, count, slots, __builtin_ctz(block_size))
                    : find_slots_with(row, positions, count, slots, -1);
}

void
smla_write_slots(int32_t *out, const smla_page_row *row, int64_t first, int64_t count)
{
    while (count > 0) {
        const int64_t offset = first % row->block_size;
        const int64_t left = row->block_size - offset;
        const int64_t run = left < count ? left : count;
        const int64_t page = smla_find_page(row, first);
        if (page < 0) {
            smla_clear_columns(out, 0, run);
        } else {
            smla_write_run(out, page * row->block_size + offset, run);
        }
        first += run;
        count -= run;
        out += run;
    }
}
