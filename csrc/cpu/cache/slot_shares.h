/* slot_shares.h: the slots of new cache rows, and which thread writes a row. */
#pragma once

#include "core/backend.h"
#include "core/params_cache.h"
#include "cpu/machine/threads.h"

enum {
    PARALLEL_WRITE_TOKENS = 64, /* fewer tokens are one share */
    LONG_WRITE_ROWS = 1024,     /* a write of so many rows per share is worth looking at */
};

/* How the tokens of a write are divided. A share is written by one thread, its tokens in order, and
 * all tokens of a slot are in the same share. So the last token of a slot wins, for any number of
 * shares. */
typedef struct slot_shares {
    int count;
    bool are_ranges;     /* a share is a range of tokens, else the tokens of some slots */
    int log2_neighbours; /* 2^this slots in a row are always in one share of slots */
} slot_shares;

/* The tokens among which a share's are. */
typedef struct token_range {
    int64_t first;
    int64_t end;
} token_range;

static inline int64_t
read_slot(const smla_cache_write_params *p, int64_t token)
{
    const int64_t at = token * p->slot_stride;
    return p->slots_are_int64 ? ((const int64_t *)p->slot_mapping)[at]
                              : ((const int32_t *)p->slot_mapping)[at];
}

/* Divides the slots. `num_rows` is how many of the tokens have a row, about. Neighbouring slots are
 * in one share, because they have cache lines in common. Where there are many, the 64 slots of a
 * usual page are: threads that each write a page took 0.7 of the time of threads that share it
 * (Zen 3). */
static inline slot_shares
divide_slots(const smla_cache_write_params *p, int64_t num_rows)
{
    const int count = p->num_tokens < PARALLEL_WRITE_TOKENS ? 1 : smla_max_threads();
    return (slot_shares){.count = count,
                         .log2_neighbours = num_rows / count >= LONG_WRITE_ROWS ? 6 : 3};
}

/* Divides the tokens of a long write into ranges if no two ranges have a slot in common, else the
 * slots. slot_shares.c */
slot_shares smla_cpu_divide_tokens(const smla_cache_write_params *params);

static inline token_range
range_of_share(const smla_cache_write_params *p, int share, slot_shares shares)
{
    if (!shares.are_ranges) {
        return (token_range){0, p->num_tokens};
    }
    return (token_range){p->num_tokens * share / shares.count,
                         p->num_tokens * (share + 1) / shares.count};
}

/* Whether a token of this slot is written, and by this share, which has the token in its range. */
static inline bool
is_in_share(int64_t slot, int share, slot_shares shares)
{
    const uint32_t group = (uint32_t)((uint64_t)slot >> shares.log2_neighbours);
    const bool is_own = group % (uint32_t)shares.count == (uint32_t)share;
    return (slot >= 0) & (shares.are_ranges | is_own); /* no branch */
}
