/* glue.h: what the files of the extension module share: module state, dtypes, errors, plain
 * options.
 *
 * Python.h is included here and in no other folder. The source compiles with the limited API of
 * 3.11 and with the full one. Arrays in and results out are in array.h, our own Tensor type in
 * tensor.h.
 */
#ifndef SMLA_PYTHON_GLUE_H
#define SMLA_PYTHON_GLUE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "core/backend.h"

enum { SMLA_PY_MAX_RANK = 8 };

/* ---- Module state -------------------------------------------------------------------------- */

typedef struct smla_py_shared smla_py_shared; /* what changes after the import: pending.c */

typedef struct smla_py_state {
    PyTypeObject *tensor_type;
    PyTypeObject *builder_type;
    int bfloat16_type_num; /* NumPy's numbers of the two ml_dtypes types */
    int float8_type_num;
    smla_py_shared *shared;
    PyObject *max_version;   /* (1, minor) */
    PyObject *dlpack_kwargs; /* {"max_version": max_version} */
    PyObject *empty_tuple;
    PyObject *str_dlpack; /* interned attribute names */
    PyObject *str_dlpack_device;
    PyObject *str_exchange_api;
    PyObject *str_requires_grad;
    PyObject *str_is_neg;
    PyObject *str_module;
    PyObject *str_block_until_ready;
    PyObject *str_jaxlib; /* the module that has the function named below */
    PyObject *str_jaxlib_export;
    PyObject *str_sharding;
    PyObject *str_device_set;
    PyObject *str_data;
    PyObject *str_ptr;
    PyObject *str_device_id;
    PyObject *str_shape;
    PyObject *str_strides;
    PyObject *str_dtype;
} smla_py_state;

smla_py_state *smla_py_state_of(PyObject *module);

/* Each adds its part to a new module; -1 with an exception set on failure. */
int smla_py_init_shared(smla_py_state *state);
int smla_py_init_arrays(smla_py_state *state);
int smla_py_init_tensor(PyObject *module, smla_py_state *state);
int smla_py_init_builder(PyObject *module, smla_py_state *state);
int smla_py_init_operator(PyObject *module, smla_py_state *state);

/* Clear waits for what is pending and gives it back; free comes last. */
void smla_py_clear_shared(smla_py_state *state);
void smla_py_free_shared(smla_py_state *state);

/* xla_handler(): a capsule with the handler of XLA custom calls, for jax.ffi. */
extern PyMethodDef smla_py_xla_functions[];

/* ---- Dtypes -------------------------------------------------------------------------------- */

/* One element type, as each of the four worlds calls it. */
typedef struct smla_py_dtype {
    DLDataType dtype;
    const char *name;   /* NumPy's name */
    const char *format; /* of the buffer protocol, NULL = it has none */
} smla_py_dtype;

/* The table's row, NULL for a type that is not in it. */
const smla_py_dtype *smla_py_find_dtype(DLDataType dtype);
const smla_py_dtype *smla_py_find_dtype_by_name(const char *name);

static inline int64_t
smla_py_element_bytes(DLDataType dtype)
{
    return ((int64_t)dtype.bits * dtype.lanes + 7) / 8;
}

/* ---- Errors -------------------------------------------------------------------------------- */

/* Sets the exception that a status stands for, with the error's text. Always returns NULL. */
PyObject *smla_py_raise(const smla_error *error);

/* Sets `type` with a formatted text, the current exception being its cause. */
void smla_py_raise_from(PyObject *type, const char *format, ...);

/* Gives a reference up whose destructor may run Python code; a current exception survives it. */
void smla_py_drop(PyObject *object);

/* New string: the name of an object's type, "None" for None. */
PyObject *smla_py_type_name(PyObject *object);

/* TypeError unless a METH_FASTCALL function got exactly `wanted` arguments. */
int smla_py_check_count(const char *op, Py_ssize_t num_args, Py_ssize_t wanted);

/* ---- Options ------------------------------------------------------------------------------- */

/* Every parser: 0, or -1 with "op: `name` must be ..., got ..." set. */
int smla_py_parse_int(const char *op, const char *name, PyObject *object, int64_t *value);
int smla_py_parse_int32(const char *op, const char *name, PyObject *object, int32_t *value);
int smla_py_parse_float(const char *op, const char *name, PyObject *object, double *value);
int smla_py_parse_flag(PyObject *object, bool *value);

/* "auto" (a synonym of "bfloat16") or the name of a cache format -> smla_kv_format; SMLA_KV_INFER
 * for any other text. */
int32_t smla_py_find_kv_format(const char *text, size_t length);

/* None, "auto" or the name of a cache format -> smla_kv_format. */
int smla_py_parse_kv_format(const char *op, const char *name, PyObject *object, int32_t *format);

/* "cpu", "cuda", "cuda:1", or a DLPack pair (type, id). */
int smla_py_parse_device(const char *op, const char *name, PyObject *object, DLDevice *device);

/* New string, the inverse of the former. */
PyObject *smla_py_device_name(DLDevice device);

/* stream= of every operator: None, an int handle, or an object with `__cuda_stream__`,
 * `cuda_stream` or `ptr`. Defined in handle.c. */
int smla_py_parse_stream(const char *op, PyObject *object, void **stream);

#endif /* SMLA_PYTHON_GLUE_H */
