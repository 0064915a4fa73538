/* tensor_export.c: how a Tensor leaves: DLPack capsules, ndarrays, buffers. */
#include <stdlib.h>
#include <string.h>

#include "array.h"
#include "tensor.h"

/* ---- DLPack out ---------------------------------------------------------------------------- */

/* Any thread may call these, with or without the GIL. */
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

static void
destroy_legacy_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) { /* nobody consumed it */
        delete_legacy(PyCapsule_GetPointer(capsule, "dltensor"));
    }
}

static void
destroy_versioned_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
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
    PyObject *capsule = PyCapsule_New(managed, "dltensor", destroy_legacy_capsule);
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
    PyObject *capsule = PyCapsule_New(managed, "dltensor_versioned", destroy_versioned_capsule);
    if (capsule == NULL) {
        delete_versioned(managed);
    }
    return capsule;
}

/* Copies the elements of dimension `dim` and below; `to` is compact and returned advanced. */
static char *
copy_elements(const smla_py_tensor *tensor, int dim, const char *from, char *to)
{
    const int64_t element_bytes = smla_py_element_bytes(tensor->view.dtype);
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
    PyObject *copy = smla_py_tensor_new(smla_py_tensor_state((PyObject *)tensor),
                                        tensor->view.dtype, tensor->view.ndim, tensor->shape);
    if (copy != NULL) {
        copy_elements(tensor, 0, (const char *)tensor->view.data + tensor->view.byte_offset,
                      ((smla_py_tensor *)copy)->view.data);
    }
    return copy;
}

PyDoc_STRVAR(tensor_dlpack_doc,
             "__dlpack__($self, *, stream=None, max_version=None, dl_device=None, copy=None)\n"
             "--\n\n"
             "Export by DLPack: a capsule that shares this tensor's memory.\n\n"
             "Consumers call it: `torch.from_dlpack(tensor)`. BufferError where the tensor cannot\n"
             "be had as asked for: on another device, or read-only without a version.");

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
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream,
                                     &max_version, &dl_device, &copy) ||
        smla_py_parse_stream("__dlpack__", stream, &handle) < 0) {
        return NULL;
    }
    int major = 0;
    int minor = 0;
    if (max_version != Py_None && !PyArg_ParseTuple(max_version, "ii", &major, &minor)) {
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

/* ---- NumPy and buffers --------------------------------------------------------------------- */

PyDoc_STRVAR(tensor_array_doc,
             "__array__($self, dtype=None, copy=None)\n--\n\n"
             "The tensor as an ndarray without a copy; bfloat16 and float8_e4m3fn as ml_dtypes.\n\n"
             "`numpy.asarray(tensor)` calls it.");

static PyObject *
tensor_array(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dtype", "copy", NULL};
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    PyObject *dtype = Py_None;
    PyObject *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:__array__", names, &dtype, &copy)) {
        return NULL;
    }
    PyObject *ndarray =
        smla_py_numpy_view(smla_py_tensor_state(self), self, &tensor->view, !tensor->is_read_only);
    if (ndarray == NULL || (dtype == Py_None && copy != Py_True)) {
        return ndarray;
    }
    PyObject *converted = dtype == Py_None ? PyObject_CallMethod(ndarray, "copy", NULL)
                                           : PyObject_CallMethod(ndarray, "astype", "O", dtype);
    Py_DECREF(ndarray);
    return converted;
}

static bool
is_compact(const smla_py_tensor *tensor)
{
    int64_t compact = 1;
    for (int i = tensor->view.ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] > 1 && tensor->strides[i] != compact) {
            return false;
        }
        compact *= tensor->shape[i];
    }
    return true;
}

int
smla_py_tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags)
{
    smla_py_tensor *tensor = (smla_py_tensor *)self;
    const smla_py_dtype *dtype = smla_py_find_dtype(tensor->view.dtype);
    buffer->obj = NULL;
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
    if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES && !is_compact(tensor)) {
        PyErr_SetString(PyExc_BufferError, "the Tensor is not contiguous: ask for strides");
        return -1;
    }
    Py_ssize_t *sizes = malloc(2 * SMLA_PY_MAX_RANK * sizeof *sizes);
    if (sizes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int64_t element_bytes = smla_py_element_bytes(tensor->view.dtype);
    for (int i = 0; i < tensor->view.ndim; i++) {
        sizes[i] = (Py_ssize_t)tensor->shape[i];
        sizes[SMLA_PY_MAX_RANK + i] = (Py_ssize_t)(tensor->strides[i] * element_bytes);
    }
    *buffer = (Py_buffer){
        .buf = (char *)tensor->view.data + tensor->view.byte_offset,
        .obj = Py_NewRef(self),
        .len = (Py_ssize_t)smla_py_tensor_bytes(tensor),
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

PyMethodDef smla_py_tensor_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))tensor_dlpack, METH_VARARGS | METH_KEYWORDS,
     tensor_dlpack_doc},
    {"__dlpack_device__", tensor_dlpack_device, METH_NOARGS, tensor_dlpack_device_doc},
    {"__array__", (PyCFunction)(void (*)(void))tensor_array, METH_VARARGS | METH_KEYWORDS,
     tensor_array_doc},
    {NULL, NULL, 0, NULL},
};
