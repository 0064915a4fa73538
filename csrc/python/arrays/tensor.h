/* tensor.h: sparse_mla.Tensor, the array that we hand out where the caller's framework has none. */
#ifndef SMLA_PYTHON_TENSOR_H
#define SMLA_PYTHON_TENSOR_H

#include "python/glue.h"

/* Immutable but for its elements. `view` points into the struct. */
typedef struct smla_py_tensor {
    PyObject_HEAD DLTensor view;
    int64_t shape[SMLA_PY_MAX_RANK];
    int64_t strides[SMLA_PY_MAX_RANK];
    bool is_read_only;
    void *memory;                /* owned, or NULL */
    const smla_backend *backend; /* of owned memory */
    PyObject *base;              /* owner of the memory, or NULL */
    PyObject *event;             /* of the work that writes the contents; NULL = they are there */
} smla_py_tensor;

/* New tensor in memory of its own on the backend's device, aligned to 64 bytes, contents
 * undefined. */
PyObject *smla_py_tensor_new(const smla_py_state *state, const smla_backend *backend,
                             DLDevice device, DLDataType dtype, int ndim, const int64_t *shape);

/* New tensor over memory that lives as long as `base`. NULL strides = compact; NULL event = the
 * contents are there. */
PyObject *smla_py_tensor_view(const smla_py_state *state, PyObject *base, const DLTensor *view,
                              PyObject *event, bool is_read_only);

/* Where the event of a tensor is kept: views share that of their tensor. */
PyObject **smla_py_tensor_event(PyObject *self);

static inline const smla_py_state *
smla_py_tensor_state(PyObject *tensor)
{
    return PyType_GetModuleState(Py_TYPE(tensor));
}

static inline int64_t
smla_py_tensor_bytes(const smla_py_tensor *tensor)
{
    int64_t bytes = smla_py_element_bytes(tensor->view.dtype);
    for (int i = 0; i < tensor->view.ndim; i++) {
        bytes *= tensor->shape[i];
    }
    return bytes;
}

static inline bool
smla_py_is_on_host(const smla_py_tensor *tensor)
{
    return tensor->view.device.device_type == kDLCPU;
}

/* The type's slots that hand its memory out. Defined in tensor_export.c. */
extern PyMethodDef smla_py_tensor_methods[];
PyObject *smla_py_tensor_cuda_interface(PyObject *self, void *closure);
int smla_py_tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags);
void smla_py_tensor_releasebuffer(PyObject *self, Py_buffer *buffer);

#endif /* SMLA_PYTHON_TENSOR_H */
