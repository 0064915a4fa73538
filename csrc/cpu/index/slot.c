/* slot.c: the slots of neighbouring positions. */
#include "cpu/index/slot.h"

void
smla_write_slots(int32_t *out, const smla_page_row *row, int64_t first, int64_t count)
{
    int64_t block = first / row->block_size; /* once: a page may have one slot */
    int64_t offset = first % row->block_size;
    for (; count > 0; block++, offset = 0) {
        const int64_t left = row->block_size - offset;
        const int64_t run = left < count ? left : count;
        const int64_t page = block < row->num_blocks ? row->pages[block * row->stride] : -1;
        if (page < 0) {
            smla_clear_columns(out, 0, run);
        } else {
            smla_write_run(out, page * row->block_size + offset, run);
        }
        count -= run;
        out += run;
    }
}
