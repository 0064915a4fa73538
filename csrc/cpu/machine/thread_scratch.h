/* thread_scratch.h: memory of a call for the threads of its parallel loops. It comes from the heap,
 * in one block per call, because a caller's thread may have a stack of 64 KiB.
 */
#pragma once

#include "core/error.h"
#include "cpu/machine/threads.h"

/* A part per thread. */
typedef struct smla_scratch_size {
    int num_parts;
    int64_t part_bytes; /* 0: no memory is needed */
} smla_scratch_size;

typedef struct smla_thread_scratch {
    void *block;    /* what is given back to the heap; NULL: there is no memory */
    uint8_t *first; /* the part of thread 0, aligned to 64 bytes */
    int num_parts;
    int64_t part_bytes;
} smla_thread_scratch;

/* Threads of a loop over so many items, at least 1. */
static inline int
smla_count_threads(int64_t num_items)
{
    const int64_t most = smla_max_threads();
    return num_items < 1 ? 1 : num_items < most ? (int)num_items : (int)most;
}

/* Threads of a loop over so many items, each of which has a part. */
static inline int
smla_divide_scratch(const smla_thread_scratch *scratch, int64_t num_items)
{
    return smla_count_threads(num_items < scratch->num_parts ? num_items : scratch->num_parts);
}

/* The contents of the parts are undefined. */
smla_status smla_open_scratch(smla_thread_scratch *scratch, const char *op, smla_scratch_size size,
                              smla_error *error);

void smla_close_scratch(const smla_thread_scratch *scratch);

static inline void *
smla_scratch_part(const smla_thread_scratch *scratch, int64_t part)
{
    return scratch->first == NULL ? NULL : scratch->first + part * scratch->part_bytes;
}

/* The part of the calling thread, inside a parallel loop of at most num_parts threads. */
static inline void *
smla_own_scratch(const smla_thread_scratch *scratch)
{
    return smla_scratch_part(scratch, smla_thread_idx());
}
