/* scratch.h: the workspace of a call whose caller gave none. */
#pragma once

#include <stdlib.h>

#include "core/dltensor.h"

/* Plain memory for calls on the CPU, which the caller frees. Allocating it costs nothing until it
 * is touched. NULL without memory. */
static inline void *
smla_py_allocate_scratch(int64_t bytes)
{
    return aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);
}

/* The memory as an array, which keeps the pointer to its size. */
static inline DLTensor
smla_py_view_scratch(void *memory, DLDevice device, int64_t *bytes)
{
    return (DLTensor){
        .data = memory,
        .device = device,
        .ndim = 1,
        .dtype = {.code = kDLUInt, .bits = 8, .lanes = 1},
        .shape = bytes,
    };
}
