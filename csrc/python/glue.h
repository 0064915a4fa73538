/* glue.h: what all files of the extension module use: module state, dtypes, errors, plain options.
 *
 * This is the only file that includes Python.h. The source compiles with the limited API of CPython
 * 3.11 and with the full API. array.h declares how arrays come in and results go out, tensor.h our
 * own Tensor type.
 */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "core/backend.h"
#include "sparse_mla.h"

enum { SMLA_PY_MAX_RANK = 8 };

/* ---- Module state -------------------------------------------------------------------------- */

typedef struct smla_py_shared smla_py_shared; /* state that changes after import: exchange.h */

/* The names that calls look up, interned once: X(field of the state, text). */
#define SMLA_PY_NAMES(X)                                                  \
    X(str_dlpack, "__dlpack__")                                           \
    X(str_dlpack_device, "__dlpack_device__")                             \
    X(str_exchange_api, "__dlpack_c_exchange_api__")                      \
    X(str_numpy_ma, "numpy.ma")                                           \
    X(str_masked_array, "MaskedArray")                                    \
    X(str_requires_grad, "requires_grad")                                 \
    X(str_torch, "torch")                                                 \
    X(str_is_grad_enabled, "is_grad_enabled")                             \
    X(str_is_neg, "is_neg")                                               \
    X(str_module, "__module__")                                           \
    X(str_block_until_ready, "block_until_ready")                         \
    X(str_jaxlib, "jaxlib._jax") /* module of the function named below */ \
    X(str_jaxlib_export, "buffer_to_dlpack_managed_tensor")               \
    X(str_sharding, "sharding")                                           \
    X(str_device_set, "device_set")                                       \
    X(str_data, "data")                                                   \
    X(str_ptr, "ptr")                                                     \
    X(str_device_id, "device_id")                                         \
    X(str_shape, "shape")                                                 \
    X(str_strides, "strides")                                             \
    X(str_dtype, "dtype")

#define SMLA_PY_NAME_FIELD(field, text) PyObject *field;

typedef struct smla_py_state {
    PyTypeObject *tensor_type;
    int bfloat16_type_num; /* NumPy's type numbers of the two ml_dtypes types */
    int float8_type_num;
    smla_py_shared *shared;
    PyObject *max_version;   /* (1, minor) */
    PyObject *dlpack_kwargs; /* {"max_version": max_version} */
    PyObject *empty_tuple;
    SMLA_PY_NAMES(SMLA_PY_NAME_FIELD)
} smla_py_state;

/* The state of the module that defines the object's type. */
static inline const smla_py_state *
smla_py_type_state(PyObject *object)
{
    return PyType_GetModuleState(Py_TYPE(object));
}

/* Each function sets up its part of a new module. 0, or -1 with an exception set. */
int smla_py_init_shared(smla_py_state *state);
int smla_py_init_arrays(smla_py_state *state);

/* The module's types. */
extern PyType_Spec smla_py_tensor_spec;
extern PyType_Spec smla_py_step_spec;
extern PyType_Spec smla_py_operator_spec;

/* Clear waits for pending work and releases the arrays that are kept for it. Free comes last. */
void smla_py_clear_shared(smla_py_state *state);
void smla_py_free_shared(smla_py_state *state);

/* xla_handlers(): capsules with the handlers of XLA custom calls, by platform, for jax.ffi. */
extern PyMethodDef smla_py_xla_functions[];

/* Memory and order between streams, for layers that Python composes: step/compose.c. */
extern PyMethodDef smla_py_compose_functions[];

/* A step's arithmetic on host integers: planning.c. */
extern PyMethodDef smla_py_planning_functions[];

/* ---- Dtypes -------------------------------------------------------------------------------- */

/* One element type under its names in DLPack, NumPy and the buffer protocol. */
typedef struct smla_py_dtype {
    DLDataType dtype;
    const char *name;   /* NumPy's name */
    const char *format; /* the buffer protocol's; NULL = it cannot express the type */
} smla_py_dtype;

/* The row of the dtype table, or NULL for a type that is not in the table. */
const smla_py_dtype *smla_py_find_dtype(DLDataType dtype);
const smla_py_dtype *smla_py_find_dtype_name(const char *name);

/* The bytes of all elements. */
static inline int64_t
smla_py_bytes(const DLTensor *view)
{
    int64_t bytes = smla_element_bytes(view);
    for (int i = 0; i < view->ndim; i++) {
        bytes *= view->shape[i];
    }
    return bytes;
}

/* ---- Errors -------------------------------------------------------------------------------- */

/* Sets the exception that the error's status stands for, with the error's text. Returns NULL. */
PyObject *smla_py_raise(const smla_error *error);

/* 0, or -1 with the exception set if `status` is an error. */
int smla_py_check(smla_status status, const smla_error *error);

/* Sets an exception of `type` with a formatted text. The current exception becomes its cause. */
void smla_py_raise_from(PyObject *type, const char *format, ...);

/* Drops a reference whose destructor may run Python code. The current exception stays set. */
void smla_py_drop(PyObject *object);

/* New string: the name of an object's type, "None" for None. */
PyObject *smla_py_type_name(PyObject *object);

/* Puts an item at its place in a new tuple, which takes over the reference. Without an item, or
 * where that fails, it drops the tuple. */
void smla_py_put_item(PyObject **tuple, Py_ssize_t i, PyObject *item);

/* New tuple of ints. */
PyObject *smla_py_int_tuple(const int64_t *values, int count);

/* 0, or -1 with a TypeError if a function got another number of arguments than `wanted`. */
int smla_py_check_count(const char *op, Py_ssize_t num_args, Py_ssize_t wanted);

/* ---- Options ------------------------------------------------------------------------------- */

/* Every parser returns 0, or -1 with the exception "op: `name` must be ..., got ..." set. */
int smla_py_parse_int(const char *op, const char *name, PyObject *object, int64_t *value);
/* Parses a tuple of `count` ints. */
int smla_py_parse_ints(const char *op, const char *name, PyObject *object, int count,
                       int64_t *values);
int smla_py_parse_int32(const char *op, const char *name, PyObject *object, int32_t *value);
int smla_py_parse_float(const char *op, const char *name, PyObject *object, double *value);
int smla_py_parse_flag(PyObject *object, bool *value);

/* An int of at least `least`. */
int smla_py_parse_least(const char *op, const char *name, PyObject *object, int64_t least,
                        int64_t *value);

/* Whether the argument of a scale is a number and no array: 1, 0, or -1 with an exception set. */
int smla_py_is_number(PyObject *object);

/* A scale that is a number, which must not be 0: a field of 0 is the scale 1. */
int smla_py_parse_scale(const char *op, const char *name, PyObject *object, double *value);

/* "auto" (a synonym of "bfloat16") or the name of a cache format -> smla_kv_format; SMLA_KV_INFER
 * for any other text. */
int32_t smla_py_find_kv_format(const char *text, size_t length);

enum { SMLA_PY_FORMATS_TEXT = 256 };

/* Writes the names that smla_py_find_kv_format knows, for errors, each in quotes. */
void smla_py_describe_kv_formats(char text[SMLA_PY_FORMATS_TEXT]);

/* The name of a scale layout -> smla_scale_layout; SMLA_SCALES_INFER for any other text. */
int32_t smla_py_find_scale_layout(const char *text, size_t length);

const char *smla_py_scale_layout_name(int32_t layout);

#define SMLA_PY_SCALE_LAYOUT_NAMES "\"fp32\" or \"ue8m0x4\""

/* The dtype that a name means; false for any other text. */
bool smla_py_find_floats(const char *text, size_t length, DLDataType *dtype);

#define SMLA_PY_FLOATS_NAMES "\"float32\" or \"bfloat16\""

/* None, "auto" or the name of a cache format -> smla_kv_format. */
int smla_py_parse_kv_format(const char *op, const char *name, PyObject *object, int32_t *format);

/* "cpu", "cuda", "cuda:1", or a DLPack pair (type, id). */
int smla_py_parse_device(const char *op, const char *name, PyObject *object, DLDevice *device);

/* New string with the name of a device, as smla_py_parse_device reads it. */
PyObject *smla_py_device_name(DLDevice device);

/* stream= of every operator: None, an int handle, or an object with `__cuda_stream__`,
 * `cuda_stream` or `ptr`. Defined in handle.c. */
int smla_py_parse_stream(const char *op, PyObject *object, void **stream);
