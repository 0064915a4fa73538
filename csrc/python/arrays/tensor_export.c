/* tensor_export.c: exports Tensors by DLPack, as ndarrays, as buffers, by the CUDA interface. */
#include <stdlib.h>
#include <string.h>

#include "python/arrays/array.h"
#include "python/arrays/tensor.h"

/* ---- DLPack out ---------------------------------------------------------------------------- */

/* Any thread may call the deleters, with or without the GIL. */
static void
drop_context(void *context)
{
    if (Py_IsInitialized()) {
        const PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF((PyObject *)context);
        PyGILState_Release(gil);
    }
}

static void
delete_legacy(DLManagedTensor *managed)
{
    drop_context(managed->manager_ctx);
    free(managed);
}

static void
delete_versioned(DLManagedTensorVersioned *managed)
{
    drop_context(managed->manager_ctx);
    free(managed);
}

/* A capsule that was consumed has another name. */
static void
destroy_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        delete_legacy(PyCapsule_GetPointer(capsule, "dltensor"));
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    }
}

static PyObject *
export_legacy(smla_py_tensor *tensor)
{
    if (tensor->is_read_only) {
        PyErr_SetString(PyExc_BufferError, "a read-only Tensor needs DLPack 1.0 or later: ask for "
                                           "max_version=(1, 0)");
        return NULL;
    }
    DLManagedTensor *managed = calloc(1, sizeof *managed);
    if (managed == NULL) {
        return PyErr_NoMemory();
    }
    managed->dl_tensor = tensor->view;
    managed->manager_ctx = Py_NewRef((PyObject *)tensor);
    managed->deleter = delete_legacy;
    PyObject *capsule = PyCapsule_New(managed, "dltensor", destroy_capsule);
    if (capsule == NULL) {
        delete_legacy(managed);
    }
    return capsule;
}

static PyObject *
export_versioned(smla_py_tensor *tensor, bool is_copied)
{
    DLManagedTensorVersioned *managed = calloc(1, sizeof *managed);
    if (managed == NULL) {
        return PyErr_NoMemory();
    }
    managed->version = (DLPackVersion){DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed->flags = (tensor->is_read_only ? DLPACK_FLAG_BITMASK_READ_ONLY : 0) |
                     (is_copied ? DLPACK_FLAG_BITMASK_IS_COPIED : 0);
    managed->dl_tensor = tensor->view;
    managed->manager_ctx = Py_NewRef((PyObject *)tensor);
    managed->deleter = delete_versioned;
    PyObject *capsule = PyCapsule_New(managed, "dltensor_versioned", destroy_capsule);
    if (capsule == NULL) {
        delete_versioned(managed);
    }
    return capsule;
}

/* Copies dimension `dim` and all inner ones to the compact memory at `to`. Returns its end. */
static char *
copy_elements(const smla_py_tensor *tensor, int dim, const char *from, char *to)
{
    const int64_t element_bytes = smla_element_bytes(&tensor->view);
    if (dim == tensor->view.ndim) {
        memcpy(to, from, (size_t)element_bytes);
        return to + element_bytes;
    }
    for (int64_t i = 0; i < tensor->shape[dim]; i++) {
        to = copy_elements(tensor, dim + 1, from + i * tensor->strides[dim] * element_bytes, to);
    }
    return to;
}

static PyObject *
copy_tensor(const smla_py_tensor *tensor)
{
    if (!smla_py_is_on_host(tensor)) {
        PyErr_SetString(PyExc_BufferError, "a Tensor in device memory is exported without a copy "
                                           "only: let the consumer make one");
        return NULL;
    }
    PyObject *copy = smla_py_tensor_new(smla_py_type_state((PyObject *)tensor), &smla_cpu_backend,
                                        tensor->view.device, tensor->view.dtype, tensor->view.ndim,
                                        tensor->shape);
    if (copy != NULL) {
        copy_elements(tensor, 0, (const char *)tensor->view.data + tensor->view.byte_offset,
                      ((smla_py_tensor *)copy)->view.data);
    }
    return copy;
}

/* ---- Order --------------------------------------------------------------------------------- */

/* Makes a consumer's stream wait for the work that writes the tensor. */
static int
order_consumer(PyObject *self, const char *op, void *handle)
{
    const smla_py_state *state = smla_py_type_state(self);
    PyObject *event = smla_py_take_event(state, smla_py_tensor_event(self));
    if (event == NULL) {
        return 0;
    }
    smla_py_stream stream = {
        .at = {.device_id = ((smla_py_tensor *)self)->view.device.device_id, .handle = handle}};
    int status = smla_py_find_backend(op, &stream);
    if (status == 0 && !stream.is_capturing) {
        status = smla_py_wait(op, stream.backend, stream.at, event);
    } else if (status == 0 && !smla_py_is_done(event)) {
        PyErr_Format(
            PyExc_BufferError,
            "%s: `stream` must not be captured while the work that writes the Tensor still "
            "runs, got one that is: synchronize before the capture begins",
            op);
        status = -1;
    }
    Py_DECREF(event);
    return status;
}

/* The major version that a consumer asks for. None is 0: the consumer does not know versions. */
static int
parse_version(PyObject *object, int *major)
{
    int minor = 0;
    *major = 0;
    if (object == Py_None ||
        (PyTuple_Check(object) && PyArg_ParseTuple(object, "ii", major, &minor))) {
        return 0;
    }
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError,
                 "__dlpack__: `max_version` must be None or a pair of ints, got %R", object);
    return -1;
}

PyDoc_STRVAR(tensor_dlpack_doc,
             "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n"
             "--\n\n"
             "Export by DLPack: a capsule that shares this tensor's memory.\n\n"
             "Consumers call it: `torch.from_dlpack(tensor)`. On a CUDA device `stream` waits for\n"
             "the call that writes the tensor: None or 1 is the legacy default stream, -1 none.\n"
             "BufferError where the tensor cannot be had as asked for: on another device, or\n"
             "read-only without a version.");

static PyObject *
tensor_dlpack(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    smla_py_tensor *tensor = (smla_py_tensor *)self;
    PyObject *stream = Py_None;
    PyObject *max_version = Py_None;
    PyObject *dl_device = Py_None;
    PyObject *copy = Py_None;
    void *handle = NULL;
    int major = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream,
                                     &max_version, &dl_device, &copy) ||
        smla_py_parse_stream("__dlpack__", stream, &handle) < 0 ||
        parse_version(max_version, &major) < 0) {
        return NULL;
    }
    if (dl_device != Py_None) {
        DLDevice device;
        if (smla_py_parse_device("__dlpack__", "dl_device", dl_device, &device) < 0) {
            return NULL;
        }
        if (device.device_type != tensor->view.device.device_type ||
            device.device_id != tensor->view.device.device_id) {
            PyErr_SetString(PyExc_BufferError, "a Tensor is exported on its own device only");
            return NULL;
        }
    }
    const int is_copy = copy == Py_None ? 0 : PyObject_IsTrue(copy);
    if (is_copy < 0) {
        return NULL;
    }
    if (!smla_py_is_on_host(tensor) && handle != (void *)-1 &&
        order_consumer(self, "__dlpack__", handle) < 0) {
        return NULL;
    }
    PyObject *exported = is_copy ? copy_tensor(tensor) : Py_NewRef(self);
    if (exported == NULL) {
        return NULL;
    }
    PyObject *capsule = major < 1 ? export_legacy((smla_py_tensor *)exported)
                                  : export_versioned((smla_py_tensor *)exported, is_copy);
    Py_DECREF(exported);
    return capsule;
}

PyDoc_STRVAR(tensor_dlpack_device_doc,
             "__dlpack_device__($self)\n--\n\n"
             "The device as DLPack's pair (type, id): (1, 0) is the CPU.");

static PyObject *
tensor_dlpack_device(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const DLDevice device = ((smla_py_tensor *)self)->view.device;
    return Py_BuildValue("(ii)", (int)device.device_type, (int)device.device_id);
}

/* The keys of the CUDA array interface, version 3. */
static PyObject *
describe_memory(const smla_py_tensor *tensor, const char *typestr)
{
    const int ndim = tensor->view.ndim;
    int64_t strides_bytes[SMLA_PY_MAX_RANK];
    for (int i = 0; i < ndim; i++) {
        strides_bytes[i] = tensor->strides[i] * smla_element_bytes(&tensor->view);
    }
    void *data = (char *)tensor->view.data + tensor->view.byte_offset;
    return Py_BuildValue("{s:i,s:N,s:N,s:s,s:(NN),s:i}", "version", 3, "shape",
                         smla_py_int_tuple(tensor->shape, ndim), "strides",
                         smla_py_int_tuple(strides_bytes, ndim), "typestr", typestr, "data",
                         PyLong_FromVoidPtr(data), PyBool_FromLong(tensor->is_read_only), "stream",
                         1);
}

/* Makes the legacy default stream wait, and names that stream: so no stream handle is kept. */
PyObject *
smla_py_tensor_cuda_interface(PyObject *self, void *Py_UNUSED(closure))
{
    static const char letters[] = {[kDLInt] = 'i',
                                   [kDLUInt] = 'u',
                                   [kDLFloat] = 'f',
                                   [kDLBool] = 'b'};
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    const DLDataType dtype = tensor->view.dtype;
    const char letter = dtype.code < sizeof letters ? letters[dtype.code] : '\0';
    if (tensor->view.device.device_type != kDLCUDA) {
        PyErr_SetString(PyExc_AttributeError,
                        "a Tensor in host memory has no "
                        "__cuda_array_interface__: use numpy.asarray(tensor)");
        return NULL;
    }
    if (letter == '\0') {
        PyErr_SetString(PyExc_AttributeError,
                        "__cuda_array_interface__ has no name for this Tensor's dtype: use DLPack, "
                        "as in cupy.from_dlpack(tensor)");
        return NULL;
    }
    if (order_consumer(self, "__cuda_array_interface__", NULL) < 0) {
        return NULL;
    }
    const int bytes = dtype.bits / 8;
    const char typestr[] = {bytes == 1 ? '|' : '<', letter, (char)('0' + bytes), '\0'};
    return describe_memory(tensor, typestr);
}

/* ---- NumPy and buffers --------------------------------------------------------------------- */

/* -1 with an exception for a Tensor in device memory, which host code cannot read. */
static int
require_host(const smla_py_tensor *tensor, PyObject *exception)
{
    if (smla_py_is_on_host(tensor)) {
        return 0;
    }
    PyObject *device = smla_py_device_name(tensor->view.device);
    if (device != NULL) {
        PyErr_Format(exception,
                     "the Tensor is on %U, where the host cannot read it: take it over by DLPack "
                     "and copy it there, as in torch.from_dlpack(tensor).cpu()",
                     device);
        Py_DECREF(device);
    }
    return -1;
}

PyDoc_STRVAR(
    tensor_array_doc,
    "__array__($self, dtype=None, copy=None)\n--\n\n"
    "The tensor as an ndarray without a copy; bfloat16 and float8_e4m3fn as ml_dtypes.\n\n"
    "`numpy.asarray(tensor)` calls it. Another dtype or copy=True takes a copy: ValueError\n"
    "with copy=False. TypeError in device memory.");

static PyObject *
tensor_array(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dtype", "copy", NULL};
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    PyObject *dtype = Py_None;
    PyObject *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:__array__", names, &dtype, &copy) ||
        require_host(tensor, PyExc_TypeError) < 0) {
        return NULL;
    }
    PyObject *ndarray =
        smla_py_numpy_view(smla_py_type_state(self), self, &tensor->view, !tensor->is_read_only);
    if (ndarray == NULL || (dtype == Py_None && copy == Py_None)) {
        return ndarray;
    }
    /* ndarray.__array__ decides whether this takes a copy, and whether a copy is allowed. */
    PyObject *method = PyObject_GetAttrString(ndarray, "__array__");
    PyObject *positional = Py_BuildValue("(O)", dtype);
    PyObject *keywords = Py_BuildValue("{s:O}", "copy", copy);
    PyObject *converted = method == NULL || positional == NULL || keywords == NULL
                              ? NULL
                              : PyObject_Call(method, positional, keywords);
    Py_XDECREF(method);
    Py_XDECREF(positional);
    Py_XDECREF(keywords);
    Py_DECREF(ndarray);
    return converted;
}

/* Whether the elements are contiguous, with the last dimension innermost (C) or the first
 * (Fortran). */
static bool
is_compact(const smla_py_tensor *tensor, bool is_fortran)
{
    const int ndim = tensor->view.ndim;
    int64_t compact = 1;
    for (int i = 0; i < ndim; i++) {
        const int d = is_fortran ? i : ndim - 1 - i;
        if (tensor->shape[d] > 1 && tensor->strides[d] != compact) {
            return smla_is_empty(&tensor->view);
        }
        compact *= tensor->shape[d];
    }
    return true;
}

/* Whether the elements lie as a consumer with these flags expects them. */
static bool
has_asked_layout(const smla_py_tensor *tensor, int flags)
{
    if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES ||
        (flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS) {
        return is_compact(tensor, false);
    }
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS) {
        return is_compact(tensor, true);
    }
    return (flags & PyBUF_ANY_CONTIGUOUS) != PyBUF_ANY_CONTIGUOUS || is_compact(tensor, false) ||
           is_compact(tensor, true);
}

int
smla_py_tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags)
{
    smla_py_tensor *tensor = (smla_py_tensor *)self;
    const smla_py_dtype *dtype = smla_py_find_dtype(tensor->view.dtype);
    buffer->obj = NULL;
    if (require_host(tensor, PyExc_BufferError) < 0) {
        return -1;
    }
    if (dtype == NULL || dtype->format == NULL) {
        PyErr_Format(PyExc_BufferError,
                     "the buffer protocol has no format for %s: use numpy.asarray(tensor)",
                     dtype == NULL ? "this dtype" : dtype->name);
        return -1;
    }
    if (tensor->is_read_only && (flags & PyBUF_WRITABLE) == PyBUF_WRITABLE) {
        PyErr_SetString(PyExc_BufferError, "the Tensor is read-only");
        return -1;
    }
    if (!has_asked_layout(tensor, flags)) {
        PyErr_SetString(PyExc_BufferError, "the Tensor is not contiguous: ask for strides");
        return -1;
    }
    Py_ssize_t *sizes = malloc(2 * SMLA_PY_MAX_RANK * sizeof *sizes);
    if (sizes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int64_t element_bytes = smla_element_bytes(&tensor->view);
    for (int i = 0; i < tensor->view.ndim; i++) {
        sizes[i] = (Py_ssize_t)tensor->shape[i];
        sizes[SMLA_PY_MAX_RANK + i] = (Py_ssize_t)(tensor->strides[i] * element_bytes);
    }
    *buffer = (Py_buffer){
        .buf = (char *)tensor->view.data + tensor->view.byte_offset,
        .obj = Py_NewRef(self),
        .len = (Py_ssize_t)smla_py_bytes(&tensor->view),
        .itemsize = (Py_ssize_t)element_bytes,
        .readonly = tensor->is_read_only,
        .ndim = tensor->view.ndim,
        .format = (flags & PyBUF_FORMAT) == PyBUF_FORMAT ? (char *)dtype->format : NULL,
        .shape = (flags & PyBUF_ND) == PyBUF_ND ? sizes : NULL,
        .strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? sizes + SMLA_PY_MAX_RANK : NULL,
        .internal = sizes,
    };
    return 0;
}

void
smla_py_tensor_releasebuffer(PyObject *Py_UNUSED(self), Py_buffer *buffer)
{
    free(buffer->internal);
}

/* `copy` and `pickle` ask for this. */
static PyObject *
tensor_reduce(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    PyErr_Format(PyExc_TypeError,
                 "copy: `tensor` must be a framework's array, which its from_dlpack makes of this "
                 "memory, got %R",
                 Py_TYPE(self));
    return NULL;
}

PyMethodDef smla_py_tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS,
     tensor_dlpack_doc},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, tensor_dlpack_device_doc},
    {"__array__", (PyCFunction)(void (*)(void))tensor_array, METH_VARARGS | METH_KEYWORDS,
     tensor_array_doc},
    {"__reduce__", tensor_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
