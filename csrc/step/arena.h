/* arena.h: arrays of one int32 buffer, one behind another. A table lists them, so the same places
 * are found on the host, where a build fills them, and on the device, where kernels read them.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { SMLA_MAX_ARENA_ROWS = 128 };

/* The rows of a table refer to one struct of pointers. */
typedef struct smla_arena {
    int num_rows;
    struct {
        size_t field;  /* offset of the array's `int32_t *` in the struct */
        int64_t count; /* entries; 0 for an array that this plan does not need */
    } rows[SMLA_MAX_ARENA_ROWS];
} smla_arena;

/* Adds an array, a field of the struct `arrays`. */
#define SMLA_ADD_ARRAY(arena, arrays, field, count) \
    smla_add_array(arena, offsetof(arrays, field), count)

static inline void
smla_add_array(smla_arena *arena, size_t field, int64_t count)
{
    arena->rows[arena->num_rows].field = field;
    arena->rows[arena->num_rows++].count = count;
}

/* The bytes of the arrays in front of one, in an arena whose bytes are an int64_t. */
static inline int64_t
smla_arena_bytes_before(const smla_arena *arena, size_t field)
{
    int64_t count = 0;
    for (int i = 0; i < arena->num_rows && arena->rows[i].field != field; i++) {
        count += arena->rows[i].count;
    }
    return count * (int64_t)sizeof(int32_t);
}

/* The bytes of all arrays; -1 if they are more than int64_t can say. */
static inline int64_t
smla_arena_bytes(const smla_arena *arena)
{
    int64_t bytes = 0;
    for (int i = 0; i < arena->num_rows; i++) {
        int64_t more;
        if (__builtin_mul_overflow(arena->rows[i].count, (int64_t)sizeof(int32_t), &more) ||
            __builtin_add_overflow(bytes, more, &bytes)) {
            return -1;
        }
    }
    return bytes;
}

/* Sets the pointers in `arrays` to their places in `memory`. Defined in engine.c. */
void smla_cut_arena(const smla_arena *arena, int32_t *memory, void *arrays);
