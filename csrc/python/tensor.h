/* tensor.h: sparse_mla.Tensor, the array that we hand out where the caller's framework has none. */
#ifndef SMLA_PYTHON_TENSOR_H
#define SMLA_PYTHON_TENSOR_H

#include "glue.h"

/* Immutable but for its elements. `view` points into the struct. */
typedef struct smla_py_tensor {
    PyObject_HEAD DLTensor view;
    int64_t shape[SMLA_PY_MAX_RANK];
    int64_t strides[SMLA_PY_MAX_RANK];
    bool is_read_only;
    void *memory;   /* owned, or NULL */
    PyObject *base; /* owner of the memory, or NULL */
} smla_py_tensor;

/* New tensor in host memory of its own, aligned to 64 bytes, contents undefined. */
PyObject *smla_py_tensor_new(const smla_py_state *state, DLDataType dtype, int ndim,
                             const int64_t *shape);

/* New tensor over memory that lives as long as `base`. NULL strides = compact. */
PyObject *smla_py_tensor_view(const smla_py_state *state, PyObject *base, const DLTensor *view,
                              bool is_read_only);

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

/* The type's slots that hand its memory out. Defined in tensor_export.c. */
extern PyMethodDef smla_py_tensor_methods[];
int smla_py_tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags);
void smla_py_tensor_releasebuffer(PyObject *self, Py_buffer *buffer);

#endif /* SMLA_PYTHON_TENSOR_H */
