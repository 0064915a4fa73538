/* slot.c: the slots of neighbouring positions. */
#include "cpu/index/slot.h"

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
