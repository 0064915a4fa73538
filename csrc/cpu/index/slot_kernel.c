/* slot_kernel.c: the slots of a list of positions, or their rows of a prefill's workspace, for one
 * instruction set.
 *
 * Computes     page = pages[position / block_size], slot = page * block_size + offset, or
 *              row = start + position; -1 where there is no page, or where int32 cannot hold it
 * Shapes       positions [count], slots or rows [count] int32; a row of a block table with any
 *              stride
 * Roofline     Instructions bind: eight bytes per entry. ns per entry on one core of a Zen 3, in
 *              memory, where a copy of the bytes takes 0.5: 1.9 with the stride as a variable, 0.77
 *              with a constant, 0.63 with one comparison less per loop (2026-11-25). Before the
 *              last, gathers by AVX2 took 0.69, but they are slow on many processors of Intel.
 *              On a Zen 4 with AVX-512, chunks of 64, 128 and 256 take 0.49, 0.44 and 0.43 in L2,
 *              0.52, 0.48 and 0.46 in memory: a vector of pages waits until the single stores
 *              before it are in the cache, once per chunk. Without the test of signs for powers of
 *              two 256 take 0.39 in L2, of which the loads of pages are 0.21. Shifts for products,
 *              and pages loaded or stored in pairs, change nothing.
 * Numerics     integers
 * Source       ours
 *
 * A list is taken in chunks, each in three loops: blocks, pages, slots. The first and the last have
 * vector instructions, and the second is one load per entry. In one loop the load keeps the
 * compiler from vectors.
 */
#define SMLA_SIMD_WIDTH SMLA_LANES

#include "cpu/index/slot.h"
#include "cpu/machine/narrow.h"

enum { CHUNK = 256 };

/* What a list of positions becomes. */
typedef struct goal {
    bool is_row;    /* a row of the workspace, else a slot of the cache */
    uint32_t start; /* the row of position 0 */
    bool is_power;  /* whether the page size is a power of two, 2^shift */
    int shift;      /* if not, position / page size = position * factor >> shift */
    uint32_t factor;
    int64_t stride; /* entries from one page of a block table's row to the next */
} goal;

/* Returns how many of up to CHUNK positions have a slot or a row. */
static inline __attribute__((always_inline)) int32_t
find_chunk(const smla_page_row *row, goal to, const int32_t *positions, int count, int32_t *out)
{
    const uint32_t block_size = (uint32_t)row->block_size;
    const uint32_t max_page = to.is_row ? INT32_MAX : INT32_MAX / block_size;
    const int64_t most_blocks = INT32_MAX / block_size + (int64_t)1; /* blocks that int32 reaches */
    const uint32_t num_blocks =
        (uint32_t)(row->num_blocks < most_blocks ? row->num_blocks : most_blocks);
    /* If pages have a power of two of slots, all slots up to the end of max_page fit int32, and no
     * negative position lies in one of `num_blocks`. */
    const bool needs_signs = to.is_row || !to.is_power;
    uint32_t blocks[CHUNK] __attribute__((aligned(64))); /* 0 where the row has none */
    uint32_t pages[CHUNK] __attribute__((aligned(64)));
    int32_t num_found = 0;
#pragma omp simd
    for (int i = 0; i < count; i++) {
        const uint32_t position = (uint32_t)positions[i];
        const uint32_t block = to.is_power ? position >> to.shift
                                           : (uint32_t)((uint64_t)position * to.factor >> to.shift);
        blocks[i] = block < num_blocks ? block : 0;
    }
    for (int i = 0; i < count; i++) {
        pages[i] = (uint32_t)row->pages[(int64_t)blocks[i] * to.stride];
    }
    /* A position that has no block lies behind the page of the block 0, or is negative. */
#pragma omp simd reduction(+ : num_found)
    for (int i = 0; i < count; i++) {
        const uint32_t position = (uint32_t)positions[i];
        const uint32_t offset = position - blocks[i] * block_size;
        const uint32_t index = to.is_row ? to.start + position : pages[i] * block_size + offset;
        const bool is_positive = !needs_signs || (int32_t)(position | index) >= 0;
        const bool fits = is_positive & (pages[i] <= max_page);
        const bool is_found = fits & (offset < block_size);
        out[i] = is_found ? (int32_t)index : -1;
        num_found += is_found;
    }
    return num_found;
}

static inline __attribute__((always_inline)) int64_t
find_list(const smla_page_row *row, goal to, const int32_t *positions, int64_t count, int32_t *out)
{
    int64_t num_found = 0;
    int64_t i = 0;
    for (; i + CHUNK <= count; i += CHUNK) {
        num_found += find_chunk(row, to, positions + i, CHUNK, out + i);
    }
    if (WIDTH == 4) { /* up to three entries are quicker one by one */
        return num_found + find_chunk(row, to, positions + i, (int)(count - i), out + i);
    }
    const int whole = (int)(count - i) / WIDTH * WIDTH;
    if (whole > 0) {
        num_found += find_chunk(row, to, positions + i, whole, out + i);
        i += whole;
    }
    if (i < count) { /* a vector, too: the loops of a chunk would take its entries one by one */
        const int64_t bytes = (count - i) * (int64_t)sizeof *out;
        int32_t last[WIDTH] __attribute__((aligned(64)));
        int32_t found[WIDTH] __attribute__((aligned(64)));
        *(vuint *)last = load_part_of_words(positions + i, bytes);
        for (int k = 0; k < WIDTH; k++) {
            last[k] = k < count - i ? last[k] : -1;
        }
        num_found += find_chunk(row, to, last, WIDTH, found);
        store_part_of_words(*(const vuint *)found, out + i, bytes);
    }
    return num_found;
}

static inline __attribute__((always_inline)) int64_t
find(const smla_page_row *row, goal to, const int32_t *positions, int64_t count, int32_t *out)
{
    const uint32_t block_size = (uint32_t)row->block_size;
    const bool is_power = (block_size & (block_size - 1)) == 0;
    if (row->num_blocks == 0) {
        smla_clear_columns(out, 0, count);
        return 0;
    }
    to.stride = row->stride;
    if (!is_power) {
        /* factor * block_size is above 2^shift by less than 2^(shift - 31), which changes the
         * quotient of no position below 2^31. */
        to.is_power = false; /* a constant, like the stride of 1 below: each has its own loop */
        to.shift = 31 + 32 - __builtin_clz(block_size);
        to.factor = (uint32_t)((UINT64_C(1) << to.shift) / block_size + 1);
        return find_list(row, to, positions, count, out);
    }
    to.is_power = true;
    to.shift = __builtin_ctz(block_size);
    if (row->stride == 1) {
        to.stride = 1;
        return find_list(row, to, positions, count, out);
    }
    return find_list(row, to, positions, count, out);
}

static int64_t
find_slots(const smla_page_row *row, const int32_t *positions, int64_t count, int32_t *slots)
{
    return find(row, (goal){.is_row = false}, positions, count, slots);
}

static int64_t
find_rows(const smla_page_row *row, int32_t start, const int32_t *positions, int64_t count,
          int32_t *rows)
{
    return find(row, (goal){.is_row = true, .start = (uint32_t)start}, positions, count, rows);
}

/* Most neighbours are all slots, or all holes. */
static void
close_holes(int32_t *slots, int64_t count)
{
    int64_t num_slots = 0;
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const vint some = (vint)load_words(slots + i, 0);
        if (!has_lane(some < 0)) {
            store_words((vuint)some, slots + num_slots, 0);
            num_slots += WIDTH;
        } else if (has_lane(some >= 0)) {
            for (int k = 0; k < WIDTH; k++) {
                slots[num_slots] = some[k];
                num_slots += some[k] >= 0;
            }
        }
    }
    for (; i < count; i++) {
        const int32_t slot = slots[i];
        slots[num_slots] = slot;
        num_slots += slot >= 0;
    }
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

const smla_slot_isa SMLA_OF_ISA(smla_slot) = {
    .find_slots = find_slots,
    .find_rows = find_rows,
    .close_holes = close_holes,
    .add_base = add_base,
};
