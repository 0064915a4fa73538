/* exchange.h: how the files of array.c share the work: one reader per kind of producer. */
#ifndef SMLA_PYTHON_EXCHANGE_H
#define SMLA_PYTHON_EXCHANGE_H

#include "array.h"

enum { SMLA_PY_NOT_THIS = 1 }; /* a reader's third answer: the object does not speak its protocol */

/* Fills view, shape and strides; strides come in bytes, NULL = compact. -1 with an exception for a
 * rank or a stride that cannot be expressed. */
int smla_py_set_view(const char *op, const char *name, void *data, DLDataType dtype, int ndim,
                     const int64_t *shape, const int64_t *strides_bytes, smla_py_array *array);

/* Copies a producer's DLTensor into the struct's own storage. */
int smla_py_copy_view(const char *op, const char *name, const DLTensor *source,
                      smla_py_array *array);

/* numpy.c */
int smla_py_init_numpy(smla_py_state *state);
bool smla_py_is_ndarray(PyObject *object);
bool smla_py_is_numpy_scalar(PyObject *object);
int smla_py_read_ndarray(const smla_py_state *state, const char *op, const char *name,
                         PyObject *object, smla_py_array *array);
int smla_py_new_ndarray(const smla_py_state *state, DLDataType dtype, int ndim,
                        const int64_t *shape, smla_py_array *array);

/* dlpack.c */
int smla_py_read_exchange_api(const smla_py_state *state, const char *op, const char *name,
                              smla_py_role role, PyObject *object, smla_py_array *array);
int smla_py_read_dlpack(const smla_py_state *state, const char *op, const char *name,
                        smla_py_role role, PyObject *object, smla_py_array *array);

#endif /* SMLA_PYTHON_EXCHANGE_H */
