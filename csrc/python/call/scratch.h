/* scratch.h: the workspace of a call whose caller gave none. */
#pragma once

#include <stdlib.h>

#include "core/dltensor.h"

/* Plain memory for calls on the CPU. Allocating it costs nothing until it is touched. */
typedef struct smla_py_scratch {
    DLTensor tensor; /* the caller frees tensor.data */
    int64_t bytes;
} smla_py_scratch;

/* Allocates the scratch and returns it as an array; NULL without memory. */
static inline const DLTensor *
smla_py_take_scratch(smla_py_scratch *scratch, int64_t bytes)
{
    scratch->bytes = bytes;
    scratch->tensor = (DLTensor){
        .data = aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64),
        .device = {.device_type = kDLCPU, .device_id = 0},
        .ndim = 1,
        .dtype = {.code = kDLUInt, .bits = 8, .lanes = 1},
        .shape = &scratch->bytes,
    };
    return scratch->tensor.data == NULL ? NULL : &scratch->tensor;
}
