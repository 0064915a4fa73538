/* byte_range.h: the bytes of compact arrays, inline: the check of every array asks for them.
 * dltensor.c has the other arrays (smla_find_byte_range).
 */
#pragma once

#include "core/dltensor.h"

enum { SMLA_MOST_BYTES_LOG2 = 57 }; /* no machine has 2^57 bytes */

/* The bytes of a non-empty compact array, the usual kind; 0 for every other array. */
static inline int64_t
smla_compact_bytes(const DLTensor *tensor)
{
    const int64_t *const strides = tensor->strides;
    int64_t count = 1;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        const int64_t size = tensor->shape[i];
        const bool is_next = size == 1 || strides == NULL || strides[i] == count;
        if (size < 1 || !is_next || __builtin_mul_overflow(count, size, &count)) {
            return 0;
        }
    }
    return __builtin_mul_overflow(count, smla_element_bytes(tensor), &count) ? 0 : count;
}

/* Fills `range` with the bytes around the first element. False if no memory has such addresses. */
static inline bool
smla_place_bytes(const DLTensor *tensor, int64_t below, int64_t above, bool is_compact,
                 smla_byte_range *range)
{
    const uint64_t most = UINT64_C(1) << SMLA_MOST_BYTES_LOG2;
    const uint64_t data = (uint64_t)(uintptr_t)tensor->data;
    const uint64_t first = data + tensor->byte_offset;
    range->low = NULL;
    range->high = NULL;
    range->is_compact = is_compact;
    if ((uint64_t)above > most) {
        return false;
    }
    if (data == 0) {
        return true;
    }
    if (tensor->byte_offset > most || first < data || first < (uint64_t)below ||
        UINTPTR_MAX - first < (uint64_t)above) {
        return false;
    }
    if (is_compact || !smla_is_empty(tensor)) {
        const uint8_t *const from = (const uint8_t *)tensor->data + tensor->byte_offset;
        range->low = from - below;
        range->high = from + above;
    }
    return true;
}
