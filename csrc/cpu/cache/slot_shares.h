/* slot_shares.h: the slots of new cache rows, and which thread writes a row. */
#pragma once

#include "core/backend.h"
#include "cpu/machine/threads.h"

enum {
    SLOT_NEIGHBOURS = 8,       /* slots that are always in one share */
    PARALLEL_WRITE_TOKENS = 64 /* fewer tokens are one share */
};

static inline int64_t
read_slot(const smla_cache_write_params *p, int64_t token)
{
    const int64_t at = token * p->slot_stride;
    return p->slots_are_int64 ? ((const int64_t *)p->slot_mapping)[at]
                              : ((const int32_t *)p->slot_mapping)[at];
}

/* A share is written by one thread, its tokens in order. */
static inline int
count_shares(const smla_cache_write_params *p)
{
    return p->num_tokens < PARALLEL_WRITE_TOKENS ? 1 : smla_max_threads();
}

/* Whether a token of this slot is written, and by this share. All tokens of a slot are in the same
 * share, so the last token of a slot wins, for any number of shares. Neighbouring slots are in one
 * share, too, because they have cache lines in common. */
static inline bool
is_in_share(int64_t slot, int share, int num_shares)
{
    const uint32_t group = (uint32_t)((uint64_t)slot / SLOT_NEIGHBOURS);
    return (slot >= 0) & (group % (uint32_t)num_shares == (uint32_t)share); /* no branch */
}
