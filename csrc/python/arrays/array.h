/* array.h: arrays of any framework as DLTensors, and results in the caller's framework.
 *
 * smla_py_release_array gives back what smla_py_acquire or smla_py_allocate took, exactly once.
 * call.h groups the arrays of one operator call.
 */
#pragma once

#include "python/glue.h"

/* What the operator does with an argument. */
typedef enum smla_py_role {
    SMLA_PY_NO_ARRAY = 0,
    SMLA_PY_INPUT = 1,           /* required, read */
    SMLA_PY_OPTIONAL = 2,        /* None or read */
    SMLA_PY_OUTPUT = 3,          /* None (then allocated) or written */
    SMLA_PY_INOUT = 4,           /* required, written */
    SMLA_PY_RETAINED = 5,        /* required, read until it is released some calls later */
    SMLA_PY_RETAINED_OUTPUT = 6, /* None, or written until it is released some calls later */
    SMLA_PY_NUM_ROLES,
} smla_py_role;

/* The framework that an array comes from. Results are made in the framework of the inputs. */
typedef enum smla_py_framework {
    SMLA_PY_NUMPY = 1,
    SMLA_PY_EXCHANGE = 2, /* DLPack's exchange API: PyTorch */
    SMLA_PY_IMPORTER = 3, /* its from_dlpack can take our Tensor over: JAX, older PyTorch */
    SMLA_PY_UNKNOWN = 4,  /* results are our Tensor */
    SMLA_PY_CUPY = 5,
} smla_py_framework;

/* A framework with a function that takes our Tensor over. */
typedef struct smla_py_importer {
    const char *package;     /* package of the array type */
    const char *package_alt; /* another package of the same framework */
    const char *module;      /* is looked up in sys.modules and never imported */
    const char *function;
    /* stream_module.stream_function(id).stream_attribute is its current stream on a device. NULL =
     * the framework does not tell its stream. */
    const char *stream_module;
    const char *stream_function;
    const char *stream_attribute;
    bool is_immutable; /* its arrays are never written; a device Tensor is not converted to one */
} smla_py_importer;

typedef enum smla_py_release {
    SMLA_PY_RELEASE_NOTHING = 0,
    SMLA_PY_RELEASE_LEGACY = 1,    /* DLManagedTensor */
    SMLA_PY_RELEASE_VERSIONED = 2, /* DLManagedTensorVersioned */
    SMLA_PY_RELEASE_BUFFER = 3,    /* Py_buffer */
} smla_py_release;

/* One array of a call. `view` points into this struct and into the owner's memory, so do not copy
 * the struct. */
typedef struct smla_py_array {
    const char *name;
    PyObject *object; /* strong reference; NULL = absent */
    DLTensor view;    /* while the array is deferred, only its device is set */
    int64_t shape[SMLA_PY_MAX_RANK];
    int64_t strides[SMLA_PY_MAX_RANK];
    smla_py_framework framework;
    const smla_py_importer *importer;
    const DLPackExchangeAPI *exchange_api;
    bool is_read_only;
    bool is_new; /* allocated by this call; its framework may still have to take `object` over */
    bool is_written;
    bool is_deferred; /* not exported yet: the producer must be told the call's stream first */
    bool is_foreign;  /* its memory is not freed in the order of the call's stream */
    smla_py_release release;
    union {
        DLManagedTensor *legacy;
        DLManagedTensorVersioned *versioned;
        Py_buffer buffer;
    } owner;
} smla_py_array;

/* ---- Where and when ------------------------------------------------------------------------ */

/* The stream that a call's work goes to. All zeros = the legacy default stream, not given. */
typedef struct smla_py_stream {
    smla_stream at;              /* device and handle */
    bool is_given;               /* the caller gave it; else stream.c takes it from a producer */
    bool is_cuda;                /* an array of the call is in CUDA memory */
    bool is_capturing;           /* valid once `backend` is set */
    const smla_backend *backend; /* NULL = not looked up yet */
} smla_py_stream;

/* ---- One array ----------------------------------------------------------------------------- */

/* Reads any object that holds an array. Returns 0, or -1 with an exception set and nothing to
 * release. An array in device memory may be deferred; smla_py_resolve_stream_of then reads it. */
int smla_py_acquire(const smla_py_state *state, const char *op, const char *name, smla_py_role role,
                    PyObject *object, smla_py_array *array);

/* Decides the stream of a call by its arrays, and makes that stream wait for the work that their
 * producers have still to do. Then all device arrays can be used on the stream. The device is that
 * of `home`, or if that is NULL of the first array in CUDA memory. 0, or -1 with an exception set;
 * in both cases the caller still has to release the arrays. */
int smla_py_resolve_stream_of(const smla_py_state *state, const char *op, smla_py_array *arrays,
                              int num_arrays, const smla_py_array *home, smla_py_stream *stream);

/* Sets `backend` and `is_capturing` of a CUDA stream, unless they are set already. */
int smla_py_find_backend(const char *op, smla_py_stream *stream);

/* Call this once the work is submitted. It keeps the foreign arrays until the work is over, and
 * gives the work's event to each Tensor that was written. During a capture it does nothing. */
int smla_py_keep(const smla_py_state *state, const char *op, smla_py_array *arrays, int num_arrays,
                 smla_py_stream *stream);

/* Releases the arrays that smla_py_keep kept for work that is over by now. */
void smla_py_release_pending(const smla_py_state *state);

/* New event, which passes when all work that was submitted to the stream so far is over. */
PyObject *smla_py_record(const char *op, const smla_py_stream *stream);

/* Makes the work that is submitted to the stream from now on wait for the event. */
int smla_py_wait(const char *op, const smla_backend *backend, smla_stream stream, PyObject *event);

/* Whether the work before the event is over. */
bool smla_py_is_done(PyObject *event);

/* Another thread may replace an event meanwhile, so a slot is read and written under a lock. `take`
 * returns a new reference, or NULL without an exception. */
PyObject *smla_py_take_event(const smla_py_state *state, PyObject *const *slot);
void smla_py_set_event(const smla_py_state *state, PyObject **slot, PyObject *event);

/* Gives back what acquire or allocate took, if anything. The current exception stays set. */
void smla_py_release_array(smla_py_array *array);

/* Makes a compact array in the framework and on the device of `like`. A framework that lacks
 * `dtype` may choose another dtype of the same size. */
int smla_py_allocate(const smla_py_state *state, const char *op, const char *name,
                     const smla_py_array *like, smla_py_stream *stream, DLDataType dtype, int ndim,
                     const int64_t *shape, smla_py_array *array);

/* Whether results in the framework of `like` can be views as smla_py_order makes them. */
bool smla_py_has_ordered_views(const smla_py_array *like);

/* Gives a new array of three dimensions another order: dimension k becomes what dimension order[k]
 * is. The object that is handed out has the first `rows` rows only. 0, or -1 with an exception. */
int smla_py_order(const smla_py_state *state, smla_py_array *array, const int order[3],
                  int64_t rows);

/* New reference: the caller's own object, or the allocated array in its framework's type; None for
 * an absent array. */
PyObject *smla_py_result(smla_py_array *array);

static inline const DLTensor *
smla_py_view(const smla_py_array *array)
{
    return array->object == NULL ? NULL : &array->view;
}

/* Copies a list, tuple or array of integers to new int32 values in host memory, which the caller
 * frees. A value that does not fit is a ValueError. */
int smla_py_host_ints(const smla_py_state *state, const char *op, const char *name,
                      PyObject *object, int32_t **values, int64_t *count);

/* Rows of integers in host memory. */
typedef struct smla_py_table {
    int32_t *values; /* [rows, columns], which the caller frees; NULL without rows */
    int64_t rows;
    int64_t columns;
} smla_py_table;

/* The same for a 2-D array, or a list or tuple of rows. */
int smla_py_host_table(const smla_py_state *state, const char *op, const char *name,
                       PyObject *object, smla_py_table *table);

/* New string: the name of a dtype, which is a name already or a dtype object of NumPy, ml_dtypes,
 * JAX or PyTorch. "" for any other object, NULL with an exception set. */
PyObject *smla_py_dtype_name(const smla_py_state *state, PyObject *object);

/* New ndarray over the memory of `view`. The ndarray keeps `owner` alive. */
PyObject *smla_py_numpy_view(const smla_py_state *state, PyObject *owner, const DLTensor *view,
                             bool is_writable);
