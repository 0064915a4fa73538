/* dltensor.c: implements dltensor.h. It is integer arithmetic on shapes and strides only. */
#include "core/dltensor.h"

const smla_dtype_info smla_dtypes[] = {
    {SMLA_DTYPE_BF16, kDLBfloat, 16, "bfloat16"},
    {SMLA_DTYPE_FP16, kDLFloat, 16, "float16"},
    {SMLA_DTYPE_FP32, kDLFloat, 32, "float32"},
    {SMLA_DTYPE_INT32, kDLInt, 32, "int32"},
    {SMLA_DTYPE_INT64, kDLInt, 64, "int64"},
    {SMLA_DTYPE_UINT8, kDLUInt, 8, "uint8"},
    {SMLA_DTYPE_INT8, kDLInt, 8, "int8"},
    {SMLA_DTYPE_E4M3, kDLFloat8_e4m3fn, 8, "float8_e4m3fn"},
    {SMLA_DTYPE_BOOL, kDLBool, 8, "bool"},
};

_Static_assert(sizeof smla_dtypes / sizeof smla_dtypes[0] == SMLA_NUM_DTYPES, "the table is whole");

unsigned
smla_dtype(const DLTensor *tensor)
{
    const DLDataType dtype = tensor->dtype;
    if (dtype.lanes != 1) {
        return 0;
    }
#pragma GCC unroll 32
    for (int i = 0; i < SMLA_NUM_DTYPES; i++) {
        if (dtype.code == smla_dtypes[i].code && dtype.bits == smla_dtypes[i].bits) {
            return smla_dtypes[i].dtype;
        }
    }
    return 0;
}

/* ---- Memory -------------------------------------------------------------------------------- */

/* Counts bytes below the first element's address, and from it on. False if they exceed memory. */
static bool
count_strided_bytes(const DLTensor *tensor, int64_t *below, int64_t *above)
{
    const int64_t element_bytes = smla_element_bytes(tensor);
    const int64_t most = INT64_C(1) << SMLA_MOST_BYTES_LOG2;
    const bool empty = smla_is_empty(tensor);
    int64_t total = element_bytes;
    *below = 0;
    *above = element_bytes;
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        const int64_t size = tensor->shape[i] > 0 ? tensor->shape[i] : 1;
        int64_t reach = total; /* the stride, if the array is contiguous */
        if (__builtin_mul_overflow(total, size, &total) || total > most) {
            return false;
        }
        if (size == 1 || empty) {
            continue;
        }
        if (tensor->strides != NULL &&
            __builtin_mul_overflow(tensor->strides[i], element_bytes, &reach)) {
            return false;
        }
        if (__builtin_mul_overflow(reach, size - 1, &reach) || reach < -most || reach > most) {
            return false;
        }
        *below += reach < 0 ? -reach : 0;
        *above += reach > 0 ? reach : 0;
    }
    return true;
}

bool
smla_find_strided_range(const DLTensor *tensor, smla_byte_range *range)
{
    int64_t below = 0;
    int64_t above = 0;
    return count_strided_bytes(tensor, &below, &above) &&
           smla_place_bytes(tensor, below, above, false, range);
}

/* ---- Views --------------------------------------------------------------------------------- */

void
smla_make_view(smla_view *view, void *data, DLDataType dtype, DLDevice device, int ndim,
               const int64_t *shape)
{
    view->tensor = (DLTensor){.data = data,
                              .device = device,
                              .ndim = ndim,
                              .dtype = dtype,
                              .shape = view->shape,
                              .strides = view->strides};
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        view->shape[i] = shape[i];
        view->strides[i] = stride;
        stride *= shape[i];
    }
}

/* Fills `view` with indices [start, end) of dimension `dim`. */
static const DLTensor *
slice(smla_view *view, const DLTensor *tensor, int dim, int64_t start, int64_t end)
{
    view->tensor = *tensor;
    view->tensor.shape = view->shape;
    view->tensor.strides = view->strides;
    for (int i = 0; i < tensor->ndim; i++) {
        view->shape[i] = tensor->shape[i];
        view->strides[i] = smla_stride(tensor, i);
    }
    view->shape[dim] = end - start;
    /* Move `data`, because the unsigned byte_offset cannot follow an input's negative stride. */
    if (start != 0 && tensor->data != NULL) {
        view->tensor.data =
            (uint8_t *)smla_data(tensor) + start * view->strides[dim] * smla_element_bytes(tensor);
        view->tensor.byte_offset = 0;
    }
    return &view->tensor;
}

const DLTensor *
smla_slice_rows(smla_view *view, const DLTensor *tensor, int64_t start, int64_t end)
{
    return slice(view, tensor, 0, start, end);
}

const DLTensor *
smla_slice_columns(smla_view *view, const DLTensor *tensor, int64_t start, int64_t end)
{
    return slice(view, tensor, 1, start, end);
}
