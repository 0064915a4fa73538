/* arena.h: arrays of one int32 buffer, one behind another. A table lists them, so the same places
 * are found on the host, where a build fills them, and on the device, where kernels read them.
 */
#pragma once

#include <stdint.h>
#include <string.h>

typedef struct smla_arena_row {
    size_t field;  /* offset of the array's `int32_t *` in a struct of such pointers */
    int64_t count; /* entries; 0 for an array that this plan does not need */
} smla_arena_row;

static inline int64_t
smla_arena_bytes(const smla_arena_row *rows, int num_rows)
{
    int64_t count = 0;
    for (int i = 0; i < num_rows; i++) {
        count += rows[i].count;
    }
    return count * (int64_t)sizeof(int32_t);
}

/* Sets the pointers in `arrays` to their places in `memory`. */
static inline void
smla_cut_arena(const smla_arena_row *rows, int num_rows, int32_t *memory, void *arrays)
{
    for (int i = 0; i < num_rows; i++) {
        memcpy((char *)arrays + rows[i].field, &memory, sizeof memory);
        memory += rows[i].count;
    }
}
