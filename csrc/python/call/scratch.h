/* scratch.h: the workspace of an attention call whose caller gave none. */
#pragma once

#include <stdlib.h>

#include "core/backend.h"
#include "core/dltensor.h"

/* Bytes of workspace that a call needs, once its other arrays are set. 0 if it needs none or if its
 * arrays are malformed: the call itself words that error better. */
static inline int64_t
smla_py_workspace_bytes(const smla_sparse_attention_args *a)
{
    if (a->workspace != NULL || a->out == NULL) {
        return 0;
    }
    const smla_attention_workspace_args needs = {
        .struct_size = sizeof needs,
        .num_tokens = smla_size(a->q, 0),
        .num_heads = smla_size(a->q, 1),
        .topk = smla_size(a->indices, 1),
        .extra_topk = a->extra_indices == NULL ? 0 : smla_size(a->extra_indices, 1),
        .num_splits = a->num_splits,
        .device = a->out->device,
    };
    int64_t bytes = 0;
    return smla_attention_workspace_size(&needs, &bytes, NULL) == SMLA_OK ? bytes : 0;
}

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
