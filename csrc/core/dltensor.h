/* dltensor.h: reads the dtypes, sizes, strides and memory of DLTensors, and makes views of them.
 * Every call of an operator reads a dozen arrays several times, so the small functions are inline.
 *
 * Arrays are read leniently, as DLPack allows. Strides may be NULL, which means compact. The stride
 * of a dimension of one element has no meaning. An empty array may have any pointer.
 */
#pragma once

#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SMLA_MAX_RANK = 8 };

enum {
    SMLA_DTYPE_BF16 = 1 << 0,
    SMLA_DTYPE_FP16 = 1 << 1,
    SMLA_DTYPE_FP32 = 1 << 2,
    SMLA_DTYPE_INT32 = 1 << 3,
    SMLA_DTYPE_INT64 = 1 << 4,
    SMLA_DTYPE_UINT8 = 1 << 5,
    SMLA_DTYPE_INT8 = 1 << 6,
    SMLA_DTYPE_E4M3 = 1 << 7,
    SMLA_DTYPE_BOOL = 1 << 8,

    SMLA_DTYPE_FLOATS = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP16 | SMLA_DTYPE_FP32,
    SMLA_DTYPE_BYTES = SMLA_DTYPE_UINT8 | SMLA_DTYPE_INT8 | SMLA_DTYPE_E4M3,
};

typedef struct smla_dtype_info {
    unsigned dtype; /* SMLA_DTYPE_... */
    uint8_t code;   /* DLPack's type code */
    uint8_t bits;
    const char *name;
} smla_dtype_info;

enum { SMLA_NUM_DTYPES = 9 };

extern const smla_dtype_info smla_dtypes[];

enum { SMLA_ANY = -1 }; /* a dimension of any size */

/* The data pointer with byte_offset applied; NULL for an absent array. */
static inline void *
smla_data(const DLTensor *tensor)
{
    /* An empty array may have a NULL pointer, which byte_offset must not be added to. */
    if (tensor == NULL || tensor->data == NULL) {
        return NULL;
    }
    return (uint8_t *)tensor->data + tensor->byte_offset;
}

/* Size of dimension `dim`, or SMLA_ANY where the array is absent or has no such dimension. */
static inline int64_t
smla_size(const DLTensor *tensor, int dim)
{
    const int64_t any = SMLA_ANY;
    return tensor != NULL && dim >= 0 && dim < tensor->ndim ? tensor->shape[dim] : any;
}

/* Whether a dimension has size 0. */
static inline bool
smla_is_empty(const DLTensor *tensor)
{
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 0) {
            return true;
        }
    }
    return false;
}

/* Whether an array has one value, in any number of dimensions. */
static inline bool
smla_has_one_value(const DLTensor *tensor)
{
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] != 1) {
            return false;
        }
    }
    return true;
}

/* The address `bytes` after the start of the data. An empty array gives its data pointer, because
 * that may be any number, and adding to it could overflow. */
static inline void *
smla_data_at(const DLTensor *tensor, int64_t bytes)
{
    uint8_t *const data = (uint8_t *)smla_data(tensor);
    return data == NULL || smla_is_empty(tensor) ? data : data + bytes;
}

/* The stride in elements, computed if strides are NULL. It is 0 for absent and empty arrays and for
 * sizes up to 1, because nobody uses it there and producers leave nonsense in it. */
static inline int64_t
smla_stride(const DLTensor *tensor, int dim)
{
    if (tensor == NULL || tensor->shape[dim] <= 1 || smla_is_empty(tensor)) {
        return 0;
    }
    if (tensor->strides != NULL) {
        return tensor->strides[dim];
    }
    int64_t stride = 1;
    for (int i = dim + 1; i < tensor->ndim; i++) {
        stride *= tensor->shape[i];
    }
    return stride;
}

static inline int64_t
smla_element_bytes(const DLTensor *tensor)
{
    return ((int64_t)tensor->dtype.bits * tensor->dtype.lanes + 7) / 8;
}

/* The SMLA_DTYPE_ bit of an array's type; 0 for a type that has none. */
unsigned smla_dtype(const DLTensor *tensor);

/* ---- Memory -------------------------------------------------------------------------------- */

/* All bytes from an array's lowest to its highest, gaps included. Both pointers are NULL if the
 * array is empty or has no memory. */
typedef struct smla_byte_range {
    const uint8_t *low;
    const uint8_t *high; /* one past the last byte */
    bool is_compact;     /* not empty, with the strides that NULL would mean */
} smla_byte_range;

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

/* smla_find_byte_range of an array that is not compact. */
bool smla_find_strided_range(const DLTensor *tensor, smla_byte_range *range);

/* Whether sizes, strides and addresses are so far inside int64 that sums and products of them need
 * no further check; if so, fills `range`. A size of 0 counts as 1 here, so that the other sizes of
 * an empty array are checked too. */
static inline bool
smla_find_byte_range(const DLTensor *tensor, smla_byte_range *range)
{
    const int64_t compact = smla_compact_bytes(tensor);
    return compact != 0 ? smla_place_bytes(tensor, 0, compact, true, range)
                        : smla_find_strided_range(tensor, range);
}

static inline bool
smla_is_apart(smla_byte_range a, smla_byte_range b)
{
    return a.high <= b.low || b.high <= a.low;
}

/* ---- Views --------------------------------------------------------------------------------- */

/* A DLTensor together with the memory of its shape and strides. */
typedef struct smla_view {
    DLTensor tensor;
    int64_t shape[3];
    int64_t strides[3];
} smla_view;

/* Fills `view` with a contiguous array of up to three dimensions. */
void smla_make_view(smla_view *view, void *data, DLDataType dtype, DLDevice device, int ndim,
                    const int64_t *shape);

/* Fills `view` with rows [start, end) of a tensor of up to three dimensions. */
const DLTensor *smla_slice_rows(smla_view *view, const DLTensor *tensor, int64_t start,
                                int64_t end);

/* Fills `view` with columns [start, end) of a tensor of two dimensions. */
const DLTensor *smla_slice_columns(smla_view *view, const DLTensor *tensor, int64_t start,
                                   int64_t end);
