/* tensor.c: makes objects of sparse_mla.Tensor, which own or view memory of any device.
 *
 * Callers get a Tensor where their framework cannot take a result over. A Tensor computes nothing.
 */
#include "python/arrays/tensor.h"

#include <string.h>

#include "python/arrays/array.h"

static smla_py_tensor *
new_tensor(const smla_py_state *state, const DLTensor *view)
{
    smla_py_tensor *tensor = (smla_py_tensor *)PyType_GenericAlloc(state->tensor_type, 0);
    if (tensor == NULL) {
        return NULL;
    }
    tensor->view = (DLTensor){.data = view->data,
                              .device = view->device,
                              .ndim = view->ndim,
                              .dtype = view->dtype,
                              .shape = tensor->shape,
                              .strides = tensor->strides,
                              .byte_offset = view->byte_offset};
    int64_t compact = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        tensor->shape[i] = view->shape[i];
        tensor->strides[i] = view->strides == NULL ? compact : view->strides[i];
        compact *= view->shape[i];
    }
    return tensor;
}

PyObject *
smla_py_tensor_new(const smla_py_state *state, const smla_backend *backend, DLDevice device,
                   DLDataType dtype, int ndim, const int64_t *shape)
{
    const DLTensor view = {.device = device,
                           .ndim = ndim,
                           .dtype = dtype,
                           .shape = (int64_t *)shape};
    const bool is_empty = smla_is_empty(&view);
    int64_t bytes = smla_element_bytes(&view);
    for (int i = 0; !is_empty && i < ndim; i++) {
        if (__builtin_mul_overflow(bytes, shape[i], &bytes) || bytes > INT64_MAX / 2) {
            return PyErr_NoMemory();
        }
    }
    smla_py_tensor *tensor = new_tensor(state, &view);
    if (tensor == NULL) {
        return NULL;
    }
    tensor->backend = backend;
    if (smla_py_is_on_host(tensor)) {
        tensor->memory = backend->allocate(device.device_id, is_empty ? 1 : bytes);
    } else { /* this may wait for the device, and device callbacks for the GIL */
        Py_BEGIN_ALLOW_THREADS
        tensor->memory = backend->allocate(device.device_id, is_empty ? 1 : bytes);
        Py_END_ALLOW_THREADS
    }
    if (tensor->memory == NULL) {
        Py_DECREF((PyObject *)tensor);
        return PyErr_NoMemory();
    }
    tensor->view.data = tensor->memory;
    return (PyObject *)tensor;
}

PyObject *
smla_py_tensor_view(const smla_py_state *state, PyObject *base, const DLTensor *view,
                    PyObject *event, bool is_read_only)
{
    smla_py_tensor *tensor = new_tensor(state, view);
    if (tensor != NULL) {
        tensor->base = Py_NewRef(base);
        tensor->event = Py_XNewRef(event);
        tensor->is_read_only = is_read_only;
    }
    return (PyObject *)tensor;
}

PyObject **
smla_py_tensor_event(PyObject *self)
{
    smla_py_tensor *tensor = (smla_py_tensor *)self;
    while (tensor->base != NULL && Py_TYPE(tensor->base) == Py_TYPE(self)) {
        tensor = (smla_py_tensor *)tensor->base;
    }
    return &tensor->event;
}
