/* array.h: arrays of any framework as DLTensors, and results in the caller's framework.
 *
 * What acquire or allocate took is given back by smla_py_release_array, exactly once. call.h holds
 * the arrays of one operator call together.
 */
#ifndef SMLA_PYTHON_ARRAY_H
#define SMLA_PYTHON_ARRAY_H

#include "glue.h"

/* What the operator does with an argument. */
typedef enum smla_py_role {
    SMLA_PY_INPUT = 1,           /* required, read */
    SMLA_PY_OPTIONAL = 2,        /* None or read */
    SMLA_PY_OUTPUT = 3,          /* None (then allocated) or written */
    SMLA_PY_INOUT = 4,           /* required, written */
    SMLA_PY_RETAINED = 5,        /* required, read until its release some calls later */
    SMLA_PY_RETAINED_OUTPUT = 6, /* None or written until its release some calls later */
} smla_py_role;

/* Where an array comes from, which is where results go. */
typedef enum smla_py_framework {
    SMLA_PY_NUMPY = 1,
    SMLA_PY_EXCHANGE = 2, /* DLPack's exchange API: PyTorch */
    SMLA_PY_IMPORTER = 3, /* a module with a from_dlpack for our Tensor: JAX, older PyTorch */
    SMLA_PY_UNKNOWN = 4,  /* results are our Tensor */
} smla_py_framework;

/* A module that can take our Tensor over, looked up in sys.modules and never imported. */
typedef struct smla_py_importer {
    const char *package;     /* of the array's type */
    const char *package_alt; /* another package of the same framework */
    const char *module;
    const char *function;
    bool is_immutable; /* its arrays are never written */
} smla_py_importer;

typedef enum smla_py_release {
    SMLA_PY_RELEASE_NOTHING = 0,
    SMLA_PY_RELEASE_LEGACY = 1,    /* DLManagedTensor */
    SMLA_PY_RELEASE_VERSIONED = 2, /* DLManagedTensorVersioned */
    SMLA_PY_RELEASE_BUFFER = 3,    /* Py_buffer */
} smla_py_release;

/* One array of a call. `view` points into this struct and into the owner's memory: do not copy
 * it. */
typedef struct smla_py_array {
    PyObject *object; /* strong; NULL = absent */
    DLTensor view;
    int64_t shape[SMLA_PY_MAX_RANK];
    int64_t strides[SMLA_PY_MAX_RANK];
    smla_py_framework framework;
    const smla_py_importer *importer;
    const DLPackExchangeAPI *exchange_api;
    bool is_read_only;
    bool is_new; /* allocated by this call: `object` still has to become the framework's array */
    smla_py_release release;
    union {
        DLManagedTensor *legacy;
        DLManagedTensorVersioned *versioned;
        Py_buffer buffer;
    } owner;
} smla_py_array;

/* ---- One array ----------------------------------------------------------------------------- */

/* Reads any object that holds an array. 0, or -1 with an exception and nothing held. */
int smla_py_acquire(const smla_py_state *state, const char *op, const char *name, smla_py_role role,
                    PyObject *object, smla_py_array *array);

/* Gives back what acquire or allocate took; a current exception survives. Safe on absent arrays. */
void smla_py_release_array(smla_py_array *array);

/* Makes an array in the framework and on the device of `like`, strides compact. */
int smla_py_allocate(const smla_py_state *state, const char *op, const smla_py_array *like,
                     DLDataType dtype, int ndim, const int64_t *shape, smla_py_array *array);

/* New reference: the caller's own object, or the allocated array as its framework's type. */
PyObject *smla_py_result(smla_py_array *array);

static inline const DLTensor *
smla_py_view(const smla_py_array *array)
{
    return array->object == NULL ? NULL : &array->view;
}

static inline int64_t
smla_py_dim(const smla_py_array *array, int dim)
{
    return array->object != NULL && dim < array->view.ndim ? array->shape[dim] : 0;
}

/* A list, tuple or array of integers as int32 values in host memory (malloc); values that do not
 * fit are ValueErrors. */
int smla_py_host_ints(const smla_py_state *state, const char *op, const char *name,
                      PyObject *object, int32_t **values, int64_t *count);

/* New ndarray that views `data`, compact, and keeps `owner` alive. */
PyObject *smla_py_numpy_view(const smla_py_state *state, PyObject *owner, const DLTensor *view,
                             bool is_writable);

#endif /* SMLA_PYTHON_ARRAY_H */
