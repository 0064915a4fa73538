/* thread_scratch.c: takes the scratch of a call from the heap. */
#include "cpu/machine/thread_scratch.h"

#include <stdlib.h>

enum { LINE_BYTES = 64 };

smla_status
smla_open_scratch(smla_thread_scratch *scratch, const char *op, smla_scratch_size size,
                  smla_error *error)
{
    *scratch = (smla_thread_scratch){
        .num_parts = size.num_parts,
        .part_bytes = (size.part_bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES,
    };
    if (size.part_bytes == 0) {
        return SMLA_OK;
    }
    const int64_t wanted = size.num_parts * scratch->part_bytes + LINE_BYTES;
    scratch->block = malloc((size_t)wanted);
    if (scratch->block == NULL) {
        return smla_fail(error, SMLA_ERROR_MEMORY,
                         "%s: %lld bytes of scratch must fit in memory, got none", op,
                         (long long)wanted);
    }
    /* Not aligned_alloc: until glibc 2.38 it does not find the aligned blocks that were freed. */
    scratch->first = (uint8_t *)scratch->block + (-(uintptr_t)scratch->block % LINE_BYTES);
    return SMLA_OK;
}

void
smla_close_scratch(const smla_thread_scratch *scratch)
{
    free(scratch->block);
}
