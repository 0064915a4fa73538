/* call.h: one operator call: its arrays, its results, its answer.
 *
 * The call lives on its caller's stack. The steps are: open it, take its stream, add its arrays,
 * resolve its stream, allocate the missing results, run the core without the GIL, finish. Its
 * caller then closes it, on success and on failure: that releases whatever was borrowed. What a
 * device still uses is released after the work. run.c does this for operators and
 * layers.
 */
#pragma once

#include <stdatomic.h>

#include "core/kv_format.h"
#include "core/params_merge.h"
#include "core/rule.h"
#include "python/arrays/array.h"

#define SMLA_PY_COUNT(table) ((int)(sizeof(table) / sizeof(table)[0]))

static const DLDataType smla_py_bf16 = {kDLBfloat, 16, 1};
static const DLDataType smla_py_fp32 = {kDLFloat, 32, 1};

enum { SMLA_PY_MAX_LISTS = 2 }; /* arguments of one call that are lists of parts */

/* Memory of a call that has lists of parts, which no stack has room for. */
typedef struct smla_py_list_room {
    smla_py_array arrays[SMLA_MAX_ARRAYS + SMLA_PY_MAX_LISTS * SMLA_MAX_PARTS];
    char names[SMLA_PY_MAX_LISTS * SMLA_MAX_PARTS][16]; /* "outs[12]" */
    const DLTensor *views[SMLA_PY_MAX_LISTS * SMLA_MAX_PARTS];
    int num_items; /* names and views in use */
    int num_lists;
    struct {
        int row;        /* the first item is array `row` */
        int later;      /* the others are arrays `later` and on */
        int first_view; /* view number of the first item */
        int count;      /* number of items */
    } lists[SMLA_PY_MAX_LISTS];
} smla_py_list_room;

typedef struct smla_py_call {
    const smla_py_state *state;
    const char *op;
    smla_py_stream stream;
    bool asks;            /* the caller wants the optional result */
    int32_t fills;        /* the sum of `fills` of the results that the call has made */
    const void *step;     /* a layer: its smla_py_step, which the call has for itself */
    atomic_flag *is_busy; /* the step's lock, or NULL */
    int num_arrays;       /* arrays of the table's rows, then items of lists */
    smla_py_array *arrays;
    smla_py_list_room *room; /* NULL: the call has no list, and its arrays are `own` */
    smla_py_array own[SMLA_MAX_ARRAYS];
} smla_py_call;

/* Starts a call without arrays. */
void smla_py_open(smla_py_call *call, const smla_py_state *state, const char *op);

/* Reads the argument stream= of the caller. */
int smla_py_take_stream(smla_py_call *call, PyObject *object);

/* Appends an array. */
int smla_py_add(smla_py_call *call, const char *name, smla_py_role role, PyObject *object);

/* Appends two arrays: `object` and an absent array, or the two items of a tuple or list. The names
 * of pairs are "q", "k" and "k_cache". */
int smla_py_add_pair(smla_py_call *call, const char *name, PyObject *object);

/* Makes room for lists. Comes before the call's first array. */
int smla_py_make_list_room(smla_py_call *call);

/* Appends an array: `object`, or the first item of a list or tuple. */
int smla_py_add_parts(smla_py_call *call, const char *name, PyObject *object);

/* Appends the other items of the list or tuple whose first item is array `row`. */
int smla_py_add_later_parts(smla_py_call *call, const char *name, int row, PyObject *object);

/* Fills the field of the argument that is array `row`, or is a list that begins with it. */
void smla_py_set_parts(smla_py_call *call, int row, smla_parts_arg *parts);

void smla_py_close(smla_py_call *call);

/* Decides the stream of a call, and makes it wait for the arrays' producers. It is called when all
 * arrays of the caller are added. Before, only an array's framework and device are known. */
int smla_py_resolve_stream(smla_py_call *call, void **stream);

/* Appends an absent array. */
int smla_py_add_absent(smla_py_call *call, const char *name);

/* Allocates array `i` in the framework and on the device of the first array that the caller gave,
 * unless the caller gave array `i`, too. */
int smla_py_allocate_result(smla_py_call *call, int i, DLDataType dtype, int ndim,
                            const int64_t *shape);

/* Allocates array `i`, which the caller did not give and will not get: so many bytes. */
int smla_py_allocate_bytes(smla_py_call *call, int i, const int64_t *bytes);

/* Allocates array `i` of three dimensions with a storage of its own order: dimension k of the array
 * is dimension order[k] of `storage`. The call returns its first `rows` rows; the core gets all.
 * Frameworks whose arrays have no such views get a compact array of `rows` rows. */
int smla_py_allocate_ordered(smla_py_call *call, int i, DLDataType dtype, const int64_t storage[3],
                             const int order[3], int64_t rows);

/* Call this once the core has returned `status`. It keeps the arrays alive until the work is over,
 * and returns the call's answer: NULL with an exception, one result, or a tuple. */
PyObject *smla_py_finish(smla_py_call *call, smla_status status, const smla_error *error,
                         const int *results, int num_results);

static inline bool
smla_py_has_dim(const smla_py_call *call, int i, int dim)
{
    return call->arrays[i].object != NULL && dim < call->arrays[i].view.ndim;
}

/* The size of a dimension of array `i`; 0 where there is none. */
static inline int64_t
smla_py_call_dim(const smla_py_call *call, int i, int dim)
{
    return smla_py_has_dim(call, i, dim) ? call->arrays[i].shape[dim] : 0;
}

static inline bool
smla_py_has_rank(const smla_py_call *call, int i, int ndim)
{
    return call->arrays[i].object != NULL && call->arrays[i].view.ndim == ndim;
}
