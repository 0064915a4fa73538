/* result.c: results in the caller's framework, and host integers.
 *
 * NumPy, CuPy and frameworks with the exchange API allocate results themselves. For the others a
 * result is written into a Tensor of ours, which the framework's from_dlpack takes over after the
 * call. The Tensor itself is the result where no framework takes it over. jax on a device is such a
 * case, because taking over would cost more than the call.
 */
#include <stdlib.h>
#include <string.h>

#include "python/arrays/exchange.h"
#include "python/arrays/tensor.h"

static bool
is_host(DLDevice device)
{
    return device.device_type == kDLCPU || device.device_type == kDLCUDAHost ||
           device.device_type == kDLCUDAManaged;
}

/* ---- Allocate ------------------------------------------------------------------------------ */

/* The exchange API's allocator calls this on failure, possibly without the GIL. */
static void
set_allocator_error(void *context, const char *kind, const char *message)
{
    (void)kind;
    const PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Format(PyExc_MemoryError, "%s: its framework could not allocate a result: %s",
                 (const char *)context, message);
    PyGILState_Release(gil);
}

static int
allocate_by_exchange_api(const char *op, const DLPackExchangeAPI *api, smla_py_array *array)
{
    DLManagedTensorVersioned *managed = NULL;
    if (api->managed_tensor_allocator(&array->view, &managed, (void *)op, set_allocator_error) !=
        0) {
        if (PyErr_Occurred() == NULL) {
            PyErr_Format(PyExc_MemoryError, "%s: its framework could not allocate a result", op);
        }
        return -1;
    }
    array->view.data = managed->dl_tensor.data;
    array->view.byte_offset = managed->dl_tensor.byte_offset;
    void *object = NULL;
    if (api->managed_tensor_to_py_object_no_sync(managed, &object) != 0) { /* steals */
        return -1;
    }
    array->object = object;
    return 0;
}

/* Says which result found no memory. Formatting the text may raise a MemoryError of its own. */
static int
fail_memory(const char *op, const smla_py_array *array)
{
    PyErr_Format(PyExc_MemoryError, "%s: `%s` must fit in memory, got none", op, array->name);
    return -1;
}

/* No device memory is allocated while a graph is captured: its address would go into the graph, but
 * nobody would keep the memory. */
static int
allocate_tensor(const smla_py_state *state, const char *op, smla_py_stream *stream,
                smla_py_array *array)
{
    const DLDevice device = array->view.device;
    const smla_backend *backend = NULL;
    smla_error error;
    if (device.device_type == kDLCUDA) {
        if (smla_py_find_backend(op, stream) < 0) {
            return -1;
        }
        backend = stream->backend;
    } else if (smla_find_backend(op, device, &backend, &error) != SMLA_OK) {
        smla_py_raise(&error);
        return -1;
    }
    if (stream->is_capturing) {
        PyErr_Format(
            PyExc_ValueError,
            "%s: `%s` must be given inside a capture (%lld bytes), got None: the framework "
            "of its arrays has no allocator",
            op, array->name, (long long)smla_py_bytes(&array->view));
        return -1;
    }
    array->object = smla_py_tensor_new(state, backend, device, array->view.dtype, array->view.ndim,
                                       array->view.shape);
    if (array->object == NULL) {
        return fail_memory(op, array);
    }
    array->view.data = ((smla_py_tensor *)array->object)->view.data;
    return 0;
}

int
smla_py_allocate(const smla_py_state *state, const char *op, const char *name,
                 const smla_py_array *like, smla_py_stream *stream, DLDataType dtype, int ndim,
                 const int64_t *shape, smla_py_array *array)
{
    const DLDevice cpu = {.device_type = kDLCPU, .device_id = 0};
    *array = (smla_py_array){.name = name,
                             .framework = like->framework,
                             .importer = like->importer,
                             .exchange_api = like->exchange_api,
                             .is_new = true,
                             .is_written = true};
    array->view = (DLTensor){.device = is_host(like->view.device) ? cpu : like->view.device,
                             .ndim = ndim,
                             .dtype = dtype,
                             .shape = array->shape,
                             .strides = array->strides};
    int64_t compact = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        array->shape[i] = shape[i];
        array->strides[i] = compact;
        if (shape[i] != 0 && __builtin_mul_overflow(compact, shape[i], &compact)) {
            return fail_memory(op, array);
        }
    }
    switch (like->framework) {
    case SMLA_PY_NUMPY: return smla_py_new_ndarray(state, dtype, ndim, shape, array);
    case SMLA_PY_EXCHANGE:
        array->is_foreign = like->is_foreign;
        return allocate_by_exchange_api(op, like->exchange_api, array);
    case SMLA_PY_CUPY:
        array->is_foreign = like->is_foreign;
        return smla_py_new_cupy(state, op, array);
    default: return allocate_tensor(state, op, stream, array);
    }
}

/* ---- Other orders of dimensions ------------------------------------------------------------ */

/* Results of frameworks with immutable arrays are contiguous, because such a framework copies other
 * arrays when it takes them over, or refuses them. */
bool
smla_py_has_ordered_views(const smla_py_array *like)
{
    switch (like->framework) {
    case SMLA_PY_IMPORTER: return !like->importer->is_immutable;
    case SMLA_PY_EXCHANGE: return PyObject_HasAttrString(like->object, "swapaxes") != 0;
    default: return true;
    }
}

/* Replaces `object` by the result of a call, unless that failed. */
static int
replace_object(PyObject **object, PyObject *by)
{
    if (by == NULL) {
        return -1;
    }
    Py_DECREF(*object);
    *object = by;
    return 0;
}

/* The view of an array with a method `swapaxes`: NumPy's, CuPy's or PyTorch's. */
static int
order_object(PyObject **object, const int order[3], int64_t rows, bool is_part)
{
    int now[3] = {0, 1, 2}; /* the dimension of the storage that each dimension is */
    for (int to = 0; to < 2; to++) {
        int from = to;
        while (now[from] != order[to]) {
            from++;
        }
        if (from == to) {
            continue;
        }
        now[from] = now[to];
        now[to] = order[to];
        if (replace_object(object, PyObject_CallMethod(*object, "swapaxes", "ii", to, from)) < 0) {
            return -1;
        }
    }
    return is_part ? replace_object(object, PySequence_GetSlice(*object, 0, (Py_ssize_t)rows)) : 0;
}

int
smla_py_order(const smla_py_state *state, smla_py_array *array, const int order[3], int64_t rows)
{
    int64_t shape[3];
    int64_t strides[3];
    for (int k = 0; k < 3; k++) {
        shape[k] = array->shape[order[k]];
        strides[k] = array->strides[order[k]];
    }
    memcpy(array->shape, shape, sizeof shape);
    memcpy(array->strides, strides, sizeof strides);
    if (Py_TYPE(array->object) != state->tensor_type) {
        return order_object(&array->object, order, rows, rows != shape[0]);
    }
    DLTensor view = array->view;
    shape[0] = rows;
    view.shape = shape;
    view.strides = strides;
    return replace_object(&array->object,
                          smla_py_tensor_view(state, array->object, &view, NULL, false));
}

/* ---- Hand out ------------------------------------------------------------------------------ */

/* Lets a framework take our Tensor over. Returns the Tensor itself if `module` is not imported. */
static PyObject *
import_tensor(const smla_py_importer *importer, PyObject *tensor)
{
    PyObject *name = PyUnicode_FromString(importer->module);
    PyObject *module = name == NULL ? NULL : PyImport_GetModule(name);
    Py_XDECREF(name);
    if (module == NULL) { /* the framework is imported, but not this module of it */
        return PyErr_Occurred() == NULL ? Py_NewRef(tensor) : NULL;
    }
    PyObject *function = PyObject_GetAttrString(module, importer->function);
    PyObject *result =
        function == NULL ? NULL : PyObject_CallFunctionObjArgs(function, tensor, NULL);
    Py_XDECREF(function);
    Py_DECREF(module);
    return result;
}

PyObject *
smla_py_result(smla_py_array *array)
{
    const bool is_on_host = array->view.device.device_type == kDLCPU;
    if (array->object == NULL) {
        Py_RETURN_NONE;
    }
    if (array->is_new && array->framework == SMLA_PY_IMPORTER &&
        (is_on_host || !array->importer->is_immutable)) {
        return import_tensor(array->importer, array->object);
    }
    return Py_NewRef(array->object);
}

/* ---- Host integers ------------------------------------------------------------------------- */

/* The element at an offset of an integer array. A uint64 value beyond int64 comes out negative. */
static int64_t
read_int(const smla_py_array *array, int64_t offset)
{
    const DLTensor *view = &array->view;
    const int64_t bytes = view->dtype.bits / 8;
    const char *at = (const char *)view->data + view->byte_offset + offset * bytes;
    const bool is_signed = view->dtype.code == kDLInt;
    switch (bytes) {
    case 1: return is_signed ? (int64_t)*(const int8_t *)at : (int64_t)*(const uint8_t *)at;
    case 2: return is_signed ? (int64_t)*(const int16_t *)at : (int64_t)*(const uint16_t *)at;
    case 4: return is_signed ? (int64_t)*(const int32_t *)at : (int64_t)*(const uint32_t *)at;
    default: return *(const int64_t *)at;
    }
}

static int
check_host_array(const char *op, const char *name, const smla_py_array *array, int ndim)
{
    const DLDataType dtype = array->view.dtype;
    if (!is_host(array->view.device)) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be in host memory, got a device array", op,
                     name);
        return -1;
    }
    const bool is_integer =
        (dtype.code == kDLInt || dtype.code == kDLUInt) && dtype.lanes == 1 &&
        (dtype.bits == 8 || dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64);
    if (!is_integer) {
        const smla_py_dtype *known = smla_py_find_dtype(dtype);
        PyErr_Format(PyExc_TypeError, "%s: `%s` must hold integers, got %s", op, name,
                     known == NULL ? "another dtype" : known->name);
        return -1;
    }
    if (array->view.ndim != ndim) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must have %d dimension%s, got %d", op, name, ndim,
                     ndim == 1 ? "" : "s", (int)array->view.ndim);
        return -1;
    }
    const bool has_elements = array->shape[0] > 0 && array->shape[ndim - 1] > 0;
    const uintptr_t address = (uintptr_t)array->view.data + array->view.byte_offset;
    if (has_elements && (array->view.data == NULL || address % (dtype.bits / 8) != 0)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `%s` must be aligned to its elements, got another address", op, name);
        return -1;
    }
    return 0;
}

static int
fail_int32(const char *op, const char *name, int64_t value, bool is_signed)
{
    static const char *const texts[] = {
        "%s: `%s` must hold values that fit int32, got %llu",
        "%s: `%s` must hold values that fit int32, got %lld",
    };
    PyErr_Format(PyExc_ValueError, texts[is_signed], op, name, (long long)value);
    return -1;
}

/* Copies `count` elements from the one at `offset` on, each `stride` behind the last one. */
static int
copy_elements(const char *op, const char *name, const smla_py_array *array, int64_t offset,
              int64_t stride, int64_t count, int32_t *values)
{
    const bool is_signed = array->view.dtype.code == kDLInt;
    for (int64_t i = 0; i < count; i++) {
        const int64_t value = read_int(array, offset + i * stride);
        if (value < (is_signed ? INT32_MIN : 0) || value > INT32_MAX) {
            return fail_int32(op, name, value, is_signed);
        }
        values[i] = (int32_t)value;
    }
    return 0;
}

static int
copy_sequence(const char *op, const char *name, PyObject *sequence, int32_t *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, (Py_ssize_t)i);
        int64_t value = 0;
        const int status = item == NULL ? -1 : smla_py_parse_int(op, name, item, &value);
        Py_XDECREF(item);
        if (status < 0) {
            return -1;
        }
        if (value < INT32_MIN || value > INT32_MAX) {
            return fail_int32(op, name, value, true);
        }
        values[i] = (int32_t)value;
    }
    return 0;
}

int
smla_py_host_ints(const smla_py_state *state, const char *op, const char *name, PyObject *object,
                  int32_t **values, int64_t *count)
{
    const bool is_sequence = PyList_Check(object) || PyTuple_Check(object);
    smla_py_array array = {.object = NULL};
    if (!is_sequence && (smla_py_acquire(state, op, name, SMLA_PY_INPUT, object, &array) < 0 ||
                         check_host_array(op, name, &array, 1) < 0)) {
        smla_py_release_array(&array);
        return -1;
    }
    *count = is_sequence ? PySequence_Size(object) : array.shape[0];
    int status = -1;
    *values = malloc((size_t)(*count > 0 ? *count : 1) * sizeof **values);
    if (*values == NULL) {
        PyErr_NoMemory();
    } else if (is_sequence) {
        status = copy_sequence(op, name, object, *values, *count);
    } else {
        status = copy_elements(op, name, &array, 0, array.strides[0], *count, *values);
    }
    smla_py_release_array(&array);
    if (status < 0) {
        free(*values);
        *values = NULL;
    }
    return status;
}

static int
copy_table(const char *op, const char *name, const smla_py_array *array, int32_t *values)
{
    for (int64_t row = 0; row < array->shape[0]; row++) {
        if (copy_elements(op, name, array, row * array->strides[0], array->strides[1],
                          array->shape[1], values + row * array->shape[1]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Copies row `row` of a table. The first one decides how many columns there are. */
static int
copy_row(const char *op, const char *name, int64_t row, const int32_t *numbers, int64_t count,
         smla_py_table *table)
{
    if (row == 0) {
        table->columns = count;
        table->values = malloc((size_t)(table->rows * count + 1) * sizeof *table->values);
        if (table->values == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    if (count != table->columns) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must have rows of one length, got %lld after %lld",
                     op, name, (long long)count, (long long)table->columns);
        return -1;
    }
    memcpy(table->values + row * count, numbers, (size_t)count * sizeof *numbers);
    return 0;
}

/* Copies a list or tuple of rows, each of which is a list, tuple or array. */
static int
copy_rows(const smla_py_state *state, const char *op, const char *name, PyObject *sequence,
          smla_py_table *table)
{
    int status = 0;
    for (int64_t row = 0; status == 0 && row < table->rows; row++) {
        int32_t *numbers = NULL;
        int64_t count = 0;
        PyObject *const item = PySequence_GetItem(sequence, (Py_ssize_t)row);
        status = item == NULL ? -1 : smla_py_host_ints(state, op, name, item, &numbers, &count);
        Py_XDECREF(item);
        status = status < 0 ? -1 : copy_row(op, name, row, numbers, count, table);
        free(numbers);
    }
    return status;
}

int
smla_py_host_table(const smla_py_state *state, const char *op, const char *name, PyObject *object,
                   smla_py_table *table)
{
    smla_py_array array = {.object = NULL};
    int status = -1;
    *table = (smla_py_table){.values = NULL};
    if (PyList_Check(object) || PyTuple_Check(object)) {
        table->rows = PySequence_Size(object);
        status = copy_rows(state, op, name, object, table);
    } else if (smla_py_acquire(state, op, name, SMLA_PY_INPUT, object, &array) == 0 &&
               check_host_array(op, name, &array, 2) == 0) {
        table->rows = array.shape[0];
        table->columns = array.shape[1];
        const int64_t count = table->rows * table->columns;
        table->values = malloc((size_t)(count + 1) * sizeof *table->values);
        if (table->values == NULL) {
            PyErr_NoMemory();
        } else {
            status = copy_table(op, name, &array, table->values);
        }
    }
    smla_py_release_array(&array);
    if (status < 0) {
        free(table->values);
        table->values = NULL;
    }
    return status;
}
