/* tensor.h: sparse_mla.Tensor, our array type, for frameworks that cannot take a result over. */
#pragma once

#include "python/glue.h"

/* Only the elements and `event` ever change. `view` points into the struct. */
typedef struct smla_py_tensor {
    PyObject_HEAD DLTensor view;
    int64_t shape[SMLA_PY_MAX_RANK];
    int64_t strides[SMLA_PY_MAX_RANK];
    bool is_read_only;
    void *memory;                /* owned, or NULL */
    const smla_backend *backend; /* allocated `memory` */
    PyObject *base;              /* owner of the memory, or NULL */
    PyObject *event;             /* passes when the contents are written; NULL = they are */
} smla_py_tensor;

/* New tensor that owns new memory on `device`, aligned to 64 bytes, with undefined contents. */
PyObject *smla_py_tensor_new(const smla_py_state *state, const smla_backend *backend,
                             DLDevice device, DLDataType dtype, int ndim, const int64_t *shape);

/* New tensor over memory that `base` keeps alive. NULL strides = compact; NULL event = the contents
 * are written. */
PyObject *smla_py_tensor_view(const smla_py_state *state, PyObject *base, const DLTensor *view,
                              PyObject *event, bool is_read_only);

/* The slot of a tensor's event. A view shares the slot of the tensor that it views. */
PyObject **smla_py_tensor_event(PyObject *self);

static inline bool
smla_py_is_on_host(const smla_py_tensor *tensor)
{
    return tensor->view.device.device_type == kDLCPU;
}

/* The methods and slots of the type that export a tensor's memory. Defined in tensor_export.c. */
extern PyMethodDef smla_py_tensor_methods[];
PyObject *smla_py_tensor_cuda_interface(PyObject *self, void *closure);
int smla_py_tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags);
void smla_py_tensor_releasebuffer(PyObject *self, Py_buffer *buffer);
