/* array.h: arrays of any framework as DLTensors, and results in the caller's framework.
 *
 * What acquire or allocate took is given back by smla_py_release_array, exactly once. call.h holds
 * the arrays of one operator call together.
 */
#ifndef SMLA_PYTHON_ARRAY_H
#define SMLA_PYTHON_ARRAY_H

#include "python/glue.h"

/* What the operator does with an argument. */
typedef enum smla_py_role {
    SMLA_PY_NO_ARRAY = 0,
    SMLA_PY_INPUT = 1,           /* required, read */
    SMLA_PY_OPTIONAL = 2,        /* None or read */
    SMLA_PY_OUTPUT = 3,          /* None (then allocated) or written */
    SMLA_PY_INOUT = 4,           /* required, written */
    SMLA_PY_RETAINED = 5,        /* required, read until its release some calls later */
    SMLA_PY_RETAINED_OUTPUT = 6, /* None or written until its release some calls later */
    SMLA_PY_NUM_ROLES,
} smla_py_role;

/* Where an array comes from, which is where results go. */
typedef enum smla_py_framework {
    SMLA_PY_NUMPY = 1,
    SMLA_PY_EXCHANGE = 2, /* DLPack's exchange API: PyTorch */
    SMLA_PY_IMPORTER = 3, /* a module with a from_dlpack for our Tensor: JAX, older PyTorch */
    SMLA_PY_UNKNOWN = 4,  /* results are our Tensor */
    SMLA_PY_CUPY = 5,
} smla_py_framework;

/* A module that can take our Tensor over, looked up in sys.modules and never imported. */
typedef struct smla_py_importer {
    const char *package;     /* of the array's type */
    const char *package_alt; /* another package of the same framework */
    const char *module;
    const char *function;
    /* Its current stream on a device: stream_module.stream_function(id).stream_attribute; NULL
     * where it does not tell. */
    const char *stream_module;
    const char *stream_function;
    const char *stream_attribute;
    bool is_immutable; /* its arrays are never written, and on a device not made from a Tensor */
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
    const char *name;
    PyObject *object; /* strong; NULL = absent */
    DLTensor view;    /* a device and nothing else as long as the array is deferred */
    int64_t shape[SMLA_PY_MAX_RANK];
    int64_t strides[SMLA_PY_MAX_RANK];
    smla_py_framework framework;
    const smla_py_importer *importer;
    const DLPackExchangeAPI *exchange_api;
    bool is_read_only;
    bool is_new; /* allocated by this call: `object` still has to become the framework's array */
    bool is_written;
    bool is_deferred; /* its producer orders for a stream, and waits to be told which */
    bool is_foreign;  /* its memory is freed in another order than that of the call's stream */
    smla_py_release release;
    union {
        DLManagedTensor *legacy;
        DLManagedTensorVersioned *versioned;
        Py_buffer buffer;
    } owner;
} smla_py_array;

/* ---- Where and when ------------------------------------------------------------------------ */

/* The stream that a call's work goes to. All zeros is the legacy default stream, not given. */
typedef struct smla_py_stream {
    smla_stream at;              /* device and handle */
    bool is_given;               /* by the caller; else the first producer's that tells its own */
    bool is_cuda;                /* there are arrays in CUDA memory */
    bool is_capturing;           /* known when `backend` is */
    const smla_backend *backend; /* NULL: not looked up yet */
} smla_py_stream;

/* ---- One array ----------------------------------------------------------------------------- */

/* Reads any object that holds an array. 0, or -1 with an exception and nothing held. An array in
 * device memory may be deferred: smla_py_settle_arrays finishes it. */
int smla_py_acquire(const smla_py_state *state, const char *op, const char *name, smla_py_role role,
                    PyObject *object, smla_py_array *array);

/* Decides the stream of a call by its arrays, and puts its work behind what their producers have
 * still to do. Arrays that are not the CPU's are ready to be used after it. 0, or -1 with an
 * exception; the arrays are still to be released. */
int smla_py_settle_arrays(const smla_py_state *state, const char *op, smla_py_array *arrays,
                          int num_arrays, smla_py_stream *stream);

/* Sets `backend` and `is_capturing` of a stream in use. */
int smla_py_find_backend(const char *op, smla_py_stream *stream);

/* When the work is on its way: arrays that could vanish under it are kept until it is over, and our
 * Tensors learn when their contents are there. Nothing is kept for a graph that is captured. */
int smla_py_keep(const smla_py_state *state, const char *op, smla_py_array *arrays, int num_arrays,
                 smla_py_stream *stream);

/* Gives back what was kept for work that is over by now. */
void smla_py_release_pending(const smla_py_state *state);

/* New event behind the work that a stream has been given. */
PyObject *smla_py_record(const char *op, const smla_py_stream *stream);

/* Puts the work of a stream from now on behind an event. */
int smla_py_wait(const char *op, const smla_backend *backend, smla_stream stream, PyObject *event);

/* Whether the work before the event is over. */
bool smla_py_is_done(PyObject *event);

/* Events may be replaced while others look: a slot is read and written under a lock. `take` gives a
 * new reference or NULL without an exception. */
PyObject *smla_py_take_event(const smla_py_state *state, PyObject *const *slot);
void smla_py_set_event(const smla_py_state *state, PyObject **slot, PyObject *event);

/* Gives back what acquire or allocate took; a current exception survives. Safe on absent arrays. */
void smla_py_release_array(smla_py_array *array);

/* Makes an array in the framework and on the device of `like`, strides compact. The framework may
 * choose a dtype of the same size where it has no such one. */
int smla_py_allocate(const smla_py_state *state, const char *op, const char *name,
                     const smla_py_array *like, smla_py_stream *stream, DLDataType dtype, int ndim,
                     const int64_t *shape, smla_py_array *array);

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
