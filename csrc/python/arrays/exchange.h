/* exchange.h: what array.c and its readers share. There is one reader per kind of producer.
 * It reads `array->object`, and its errors call that `array->name`. */
#pragma once

#include "python/arrays/array.h"

#include <pthread.h>
#include <stdatomic.h>

enum { SMLA_PY_EXCHANGES = 4 };

/* Where an object of PyTorch keeps its negative bit: this bit of the word at that distance from its
 * shape, or bit 0 if that is not known. */
typedef struct smla_py_sign {
    int word;
    uint64_t bit;
} smla_py_sign;

/* A type and its exchange API, which is NULL for JAX's array type: that one has none. */
typedef struct smla_py_exchange {
    PyTypeObject *type;
    const DLPackExchangeAPI *api;
    bool is_always_writable; /* true of PyTorch's tensors */
    PyObject *requires_grad; /* the type's descriptor if it decides for all objects, else NULL */
    descrgetfunc ask;        /* __get__ of that descriptor */
    bool has_sign;           /* its objects may have PyTorch's negative bit: they have is_neg() */
    smla_py_sign sign;       /* how to see that bit without a call */
} smla_py_exchange;

/* The state that changes after the import, one struct per module object. */
struct smla_py_shared {
    pthread_mutex_t lock;        /* the holder neither runs Python code nor waits for anything */
    struct smla_py_batch *first; /* oldest batch, see pending.c */
    struct smla_py_batch **end;  /* where the next batch is linked */
    atomic_int num_batches;      /* read without the lock */
    _Atomic(struct smla_py_cupy *) cupy; /* NULL until the first CuPy array comes */
    /* The first types that came, filled from the front: exchange_api.c */
    _Atomic(smla_py_exchange *) exchanges[SMLA_PY_EXCHANGES];
};

enum { SMLA_PY_NOT_THIS = 1 }; /* a reader's third result: it cannot read this type */

/* view.c: fills view, shape and strides. `strides_bytes` NULL = compact. -1 with an exception for a
 * rank above SMLA_PY_MAX_RANK or a stride that is no multiple of the element size. */
int smla_py_set_view(const char *op, void *data, DLDataType dtype, int ndim, const int64_t *shape,
                     const int64_t *strides_bytes, smla_py_array *array);

/* Copies a producer's DLTensor into the storage of `array`. */
int smla_py_copy_view(const char *op, const DLTensor *source, smla_py_array *array);

/* numpy.c */
int smla_py_init_numpy(smla_py_state *state);
bool smla_py_is_ndarray(PyObject *object);
bool smla_py_is_numpy_scalar(PyObject *object);
int smla_py_read_ndarray(const smla_py_state *state, const char *op, smla_py_array *array);
int smla_py_new_ndarray(const smla_py_state *state, DLDataType dtype, int ndim,
                        const int64_t *shape, smla_py_array *array);

/* Translates a NumPy dtype object; 0, or -1 with an exception. */
int smla_py_read_descr(const smla_py_state *state, const char *op, const char *name,
                       PyObject *descr, DLDataType *dtype);

/* New NumPy dtype object. */
PyObject *smla_py_new_descr(const smla_py_state *state, DLDataType dtype);

/* cupy.c */
bool smla_py_is_cupy(const smla_py_state *state, PyObject *object);

/* Looks up what we use of CuPy, if `object` is CuPy's. Returns 0 for a CuPy array, else
 * SMLA_PY_NOT_THIS. */
int smla_py_find_cupy(const smla_py_state *state, PyObject *object);
int smla_py_read_cupy(const smla_py_state *state, const char *op, smla_py_array *array);
int smla_py_new_cupy(const smla_py_state *state, const char *op, smla_py_array *array);
int smla_py_cupy_stream(const smla_py_state *state, int32_t device_id, void **handle);
void smla_py_clear_cupy(smla_py_shared *shared);
void smla_py_clear_exchanges(smla_py_shared *shared);

/* Returns the facts of the object's type, or NULL for a type that was not seen before. */
static inline const smla_py_exchange *
smla_py_look_up_exchange(const smla_py_shared *shared, PyObject *object)
{
    PyTypeObject *const type = Py_TYPE(object);
    for (int i = 0; i < SMLA_PY_EXCHANGES; i++) {
        const smla_py_exchange *known =
            atomic_load_explicit(&shared->exchanges[i], memory_order_acquire);
        if (known == NULL || known->type == type) {
            return known;
        }
    }
    return NULL;
}

/* exchange_api.c: `known` is what smla_py_look_up_exchange returns for the array's object. */
int smla_py_read_exchange_api(const smla_py_state *state, const char *op, smla_py_role role,
                              const smla_py_exchange *known, smla_py_array *array);

/* negative.c: finds where the objects of a type of PyTorch keep their negative bit. */
smla_py_sign smla_py_find_sign(const smla_py_state *state, const DLPackExchangeAPI *api);

/* Whether a tensor has the bit, by its borrowed view. SMLA_PY_UNSEEN: it has to be asked. */
enum { SMLA_PY_UNSEEN = 2 };
int smla_py_see_sign(const smla_py_sign *sign, const DLTensor *borrowed);

/* Asks the object for the bit: 0, or -1 with a BufferError or another exception. An object without
 * is_neg() passes. */
int smla_py_check_sign(const smla_py_state *state, const char *op, const smla_py_array *array);
int smla_py_refuse_sign(const char *op, const smla_py_array *array);

/* dlpack.c */
int smla_py_read_dlpack(const smla_py_state *state, const char *op, smla_py_role role,
                        smla_py_array *array);

/* Reads a deferred array. Its producer makes `stream` wait for the work it has still to do. */
int smla_py_export_deferred(const smla_py_state *state, const char *op, smla_stream stream,
                            smla_py_array *array);

/* view.c: whether the module of the object's type is in this package. */
bool smla_py_is_type_in_package(const smla_py_state *state, PyObject *object, const char *package);

/* view.c: whether PyTorch's autograd records what is done now. True if that cannot be known. */
bool smla_py_records_gradients(const smla_py_state *state);

/* Ends an error about a tensor of PyTorch that has no memory of its own. */
#define SMLA_PY_TORCH_HINT \
    ": inside torch.compile, torch.export or torch.func call sparse_mla.integrations.torch"

/* view.c: 0, or -1 with a BufferError for a read-only array that the call writes. */
int smla_py_check_writable(const char *op, const smla_py_array *array);

/* handle.c: reads a stream handle from an int. 0, -1 with an exception, or SMLA_PY_NOT_THIS for an
 * object that is no int. */
int smla_py_read_handle(PyObject *object, void **handle);
