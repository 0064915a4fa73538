/* slot_shares.h: the slots of new cache rows, and which thread writes a row. */
#pragma once

#include "core/backend.h"
#include "cpu/machine/threads.h"

enum {
    PARALLEL_WRITE_TOKENS = 64, /* fewer tokens are one share */
    LONG_WRITE_ROWS = 1024,     /* so many rows per share are divided page by page */
};

/* How slots are divided. A share is written by one thread, its tokens in order. */
typedef struct slot_shares {
    int count;
    int log2_neighbours; /* 2^this slots in a row are always in one share */
} slot_shares;

static inline int64_t
read_slot(const smla_cache_write_params *p, int64_t token)
{
    const int64_t at = token * p->slot_stride;
    return p->slots_are_int64 ? ((const int64_t *)p->slot_mapping)[at]
                              : ((const int32_t *)p->slot_mapping)[at];
}

/* `num_rows` is how many of the tokens have a row, about. Neighbouring slots are in one share,
 * because they have cache lines in common. Where there are many, the 64 slots of a usual page are:
 * threads that each write a page took 0.7 of the time of threads that share it (Zen 3). */
static inline slot_shares
divide_slots(const smla_cache_write_params *p, int64_t num_rows)
{
    const int count = p->num_tokens < PARALLEL_WRITE_TOKENS ? 1 : smla_max_threads();
    return (slot_shares){.count = count,
                         .log2_neighbours = num_rows / count >= LONG_WRITE_ROWS ? 6 : 3};
}

/* Whether a token of this slot is written, and by this share. All tokens of a slot are in the same
 * share, so the last token of a slot wins, for any number of shares. */
static inline bool
is_in_share(int64_t slot, int share, slot_shares shares)
{
    const uint32_t group = (uint32_t)((uint64_t)slot >> shares.log2_neighbours);
    return (slot >= 0) & (group % (uint32_t)shares.count == (uint32_t)share); /* no branch */
}
