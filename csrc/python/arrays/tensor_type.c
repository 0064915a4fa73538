/* tensor_type.c: sparse_mla.Tensor as Python sees it: attributes, slices and the type itself. */
#include "python/arrays/tensor.h"

#include <string.h>

#include "python/arrays/array.h"

static void
tensor_dealloc(PyObject *self)
{
    smla_py_tensor *tensor = (smla_py_tensor *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (tensor->memory != NULL && smla_py_is_on_host(tensor)) {
        tensor->backend->release(tensor->view.device.device_id, tensor->memory);
    } else if (tensor->memory != NULL) { /* without the GIL, as in smla_py_tensor_new */
        Py_BEGIN_ALLOW_THREADS
        tensor->backend->release(tensor->view.device.device_id, tensor->memory);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(tensor->event);
    Py_XDECREF(tensor->base);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* ---- Attributes and slices ----------------------------------------------------------------- */

static PyObject *
get_shape(PyObject *self, void *Py_UNUSED(closure))
{
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    return smla_py_int_tuple(tensor->shape, tensor->view.ndim);
}

static PyObject *
get_strides(PyObject *self, void *Py_UNUSED(closure))
{
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    return smla_py_int_tuple(tensor->strides, tensor->view.ndim);
}

static PyObject *
get_dtype(PyObject *self, void *Py_UNUSED(closure))
{
    const DLDataType dtype = ((smla_py_tensor *)self)->view.dtype;
    const smla_py_dtype *known = smla_py_find_dtype(dtype);
    return known != NULL ? PyUnicode_FromString(known->name)
                         : PyUnicode_FromFormat("dlpack:%d:%d", dtype.code, dtype.bits);
}

static PyObject *
get_device(PyObject *self, void *Py_UNUSED(closure))
{
    return smla_py_device_name(((smla_py_tensor *)self)->view.device);
}

static PyObject *
get_ndim(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((smla_py_tensor *)self)->view.ndim);
}

static PyObject *
get_nbytes(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(smla_py_bytes(&((smla_py_tensor *)self)->view));
}

static Py_ssize_t
tensor_length(PyObject *self)
{
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    if (tensor->view.ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "a Tensor of no dimensions has no length");
        return -1;
    }
    return (Py_ssize_t)tensor->shape[0];
}

/* Reads the slice of tensor[a:b:c]: its start, its length and its step. */
static int
read_slice(PyObject *key, Py_ssize_t length, Py_ssize_t *start, Py_ssize_t *count, Py_ssize_t *step)
{
    Py_ssize_t stop = 0;
    if (PySlice_Unpack(key, start, &stop, step) < 0) {
        return -1;
    }
    *count = PySlice_AdjustIndices(length, start, &stop, *step);
    return 0;
}

static int
read_index(PyObject *key, Py_ssize_t length, Py_ssize_t *start)
{
    *start = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (*start == -1 && PyErr_Occurred() != NULL) {
        return -1;
    }
    *start += *start < 0 ? length : 0;
    if (*start < 0 || *start >= length) {
        PyErr_Format(PyExc_IndexError, "Tensor index must be below %zd, got %R", length, key);
        return -1;
    }
    return 0;
}

/* tensor[i] and tensor[a:b:c]: views along the first dimension. */
static PyObject *
tensor_subscript(PyObject *self, PyObject *key)
{
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    const Py_ssize_t length = tensor_length(self);
    const bool is_slice = PySlice_Check(key);
    Py_ssize_t start = 0;
    Py_ssize_t count = 0;
    Py_ssize_t step = 1;
    if (length < 0 || (is_slice ? read_slice(key, length, &start, &count, &step)
                                : read_index(key, length, &start)) < 0) {
        return NULL;
    }
    PyObject *result = smla_py_tensor_view(smla_py_type_state(self), self, &tensor->view, NULL,
                                           tensor->is_read_only);
    if (result == NULL) {
        return NULL;
    }
    smla_py_tensor *part = (smla_py_tensor *)result;
    if (count > 0 || !is_slice) {
        const int64_t element_bytes = smla_element_bytes(&tensor->view);
        part->view.data = (char *)part->view.data + start * tensor->strides[0] * element_bytes;
    }
    if (is_slice) {
        part->shape[0] = count;
        part->strides[0] *= step;
    } else {
        part->view.ndim--;
        memmove(part->shape, part->shape + 1, sizeof part->shape - sizeof part->shape[0]);
        memmove(part->strides, part->strides + 1, sizeof part->strides - sizeof part->strides[0]);
    }
    return result;
}

static PyObject *
tensor_repr(PyObject *self)
{
    const smla_py_tensor *tensor = (smla_py_tensor *)self;
    PyObject *shape = get_shape(self, NULL);
    PyObject *dtype = get_dtype(self, NULL);
    PyObject *device = get_device(self, NULL);
    PyObject *values = NULL;
    if (smla_py_is_on_host(tensor)) {
        values = smla_py_numpy_view(smla_py_type_state(self), self, &tensor->view, false);
        if (values == NULL) {
            PyErr_Clear(); /* no NumPy dtype: the values are left out */
        }
    }
    PyObject *text = NULL;
    if (shape != NULL && dtype != NULL && device != NULL) {
        text = values == NULL ? PyUnicode_FromFormat("Tensor(shape=%S, dtype=%U, device=%U)", shape,
                                                     dtype, device)
                              : PyUnicode_FromFormat("Tensor(%S, shape=%S, dtype=%U, device=%U)",
                                                     values, shape, dtype, device);
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(device);
    Py_XDECREF(values);
    return text;
}

/* ---- Type ---------------------------------------------------------------------------------- */

static PyGetSetDef tensor_getset[] = {
    {"shape", get_shape, NULL, "Sizes, a tuple of ints.", NULL},
    {"strides", get_strides, NULL, "Steps between neighbours, in elements, a tuple of ints.", NULL},
    {"dtype", get_dtype, NULL, "Name of the element type: \"bfloat16\", \"int32\".", NULL},
    {"device", get_device, NULL, "Where the elements are: \"cpu\" or \"cuda:0\".", NULL},
    {"ndim", get_ndim, NULL, "Number of dimensions.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of all elements.", NULL},
    {"__cuda_array_interface__", smla_py_tensor_cuda_interface, NULL,
     "The CUDA array interface, version 3; for CUDA memory and NumPy's own dtypes only.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(
    tensor_doc,
    "An array that an operator returns where the caller's framework cannot take one.\n\n"
    "Any consumer of DLPack reads it without a copy; numpy.asarray(tensor) does on the\n"
    "CPU. Indexing and slicing the first dimension gives views. On a CUDA device, whoever\n"
    "takes the memory over is made to wait, on the device, for the call that writes it;\n"
    "giving the memory back waits for the device. Tensors are not made by hand.\n\n"
    "Attributes\n"
    "----------\n"
    "shape, strides : tuple of int\n"
    "    Sizes, and steps between neighbours, in elements.\n"
    "dtype, device : str\n"
    "    \"bfloat16\", \"int32\", ...; \"cpu\" or \"cuda:0\".\n"
    "ndim, nbytes : int\n"
    "    Number of dimensions, and bytes of all elements.\n\n"
    "Raises\n"
    "------\n"
    "TypeError, BufferError\n"
    "    Made by hand; NumPy asked for memory of a device; an export that cannot be had.\n\n"
    "Examples\n"
    "--------\n"
    ">>> import numpy as np, sparse_mla\n"
    ">>> from types import SimpleNamespace as Unknown  # an array of no framework known here\n"
    ">>> x = np.ones((2, 3), np.float32)\n"
    ">>> x = Unknown(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)\n"
    ">>> tensor, scale = sparse_mla.dynamic_per_tensor_quant(x)\n"
    ">>> tensor.shape, tensor.strides, tensor.dtype, tensor.device, tensor.ndim, tensor.nbytes\n"
    "((2, 3), (3, 1), 'float8_e4m3fn', 'cpu', 2, 6)\n"
    ">>> np.asarray(tensor[0]).tolist()\n"
    "[448.0, 448.0, 448.0]\n");

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, (void *)tensor_doc},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_repr, tensor_repr},
    {Py_tp_methods, smla_py_tensor_methods},
    {Py_tp_getset, tensor_getset},
    {Py_mp_length, tensor_length},
    {Py_mp_subscript, tensor_subscript},
    {Py_bf_getbuffer, smla_py_tensor_getbuffer},
    {Py_bf_releasebuffer, smla_py_tensor_releasebuffer},
    {0, NULL},
};

PyType_Spec smla_py_tensor_spec = {
    .name = "sparse_mla.Tensor",
    .basicsize = sizeof(smla_py_tensor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = tensor_slots,
};
