/* call.c: opens, fills and finishes operator calls; see call.h. */
#include "python/call/call.h"

void
smla_py_open(smla_py_call *call, const smla_py_state *state, const char *op)
{
    call->state = state;
    call->op = op;
    call->stream = (smla_py_stream){.backend = NULL};
    call->asks = false;
    call->num_arrays = 0;
}

int
smla_py_take_stream(smla_py_call *call, PyObject *object)
{
    call->stream.is_given = object != Py_None;
    return smla_py_parse_stream(call->op, object, &call->stream.at.handle);
}

int
smla_py_add(smla_py_call *call, const char *name, smla_py_role role, PyObject *object)
{
    if (call->num_arrays == SMLA_MAX_ARRAYS) { /* a mistake in an operator's table */
        PyErr_Format(PyExc_SystemError, "%s: a call has at most %d arrays", call->op,
                     SMLA_MAX_ARRAYS);
        return -1;
    }
    const int status =
        smla_py_acquire(call->state, call->op, name, role, object, &call->arrays[call->num_arrays]);
    call->num_arrays += status == 0;
    return status;
}

int
smla_py_add_absent(smla_py_call *call, const char *name)
{
    return smla_py_add(call, name, SMLA_PY_OPTIONAL, Py_None);
}

/* The names of a pair's arrays. */
typedef struct pair_names {
    const char *whole;
    const char *items[2];
    const char *second; /* while it is absent */
    const char *meaning;
} pair_names;

static int
add_pair(smla_py_call *call, const pair_names *names, PyObject *object)
{
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        const int status = smla_py_add(call, names->whole, SMLA_PY_INPUT, object);
        return status < 0 ? -1 : smla_py_add_absent(call, names->second);
    }
    PyObject *items = PySequence_Tuple(object); /* another thread may change a list */
    if (items == NULL) {
        return -1;
    }
    int status = -1;
    if (PyTuple_Size(items) == 2) {
        status = smla_py_add(call, names->items[0], SMLA_PY_INPUT, PyTuple_GetItem(items, 0));
        if (status == 0) {
            status = smla_py_add(call, names->items[1], SMLA_PY_INPUT, PyTuple_GetItem(items, 1));
        }
    } else {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must be an array or the pair %s, got %zd items",
                     call->op, names->whole, names->meaning, PyTuple_Size(items));
    }
    Py_DECREF(items);
    return status;
}

int
smla_py_add_query(smla_py_call *call, PyObject *query)
{
    static const pair_names names = {"q", {"q[0]", "q[1]"}, "q_pe", "(ql_nope, q_pe)"};
    return add_pair(call, &names, query);
}

int
smla_py_add_keys(smla_py_call *call, PyObject *keys)
{
    static const pair_names names = {"k_cache",
                                     {"k_cache[0]", "k_cache[1]"},
                                     "k_scale",
                                     "(k, scale)"};
    return add_pair(call, &names, keys);
}

void
smla_py_close(smla_py_call *call)
{
    while (call->num_arrays > 0) {
        smla_py_release_array(&call->arrays[--call->num_arrays]);
    }
}

int
smla_py_settle(smla_py_call *call, void **stream)
{
    const int status =
        smla_py_settle_arrays(call->state, call->op, call->arrays, call->num_arrays, &call->stream);
    *stream = call->stream.at.handle;
    return status;
}

/* The first array that the caller gave. Every operator with results requires one. */
static const smla_py_array *
first_given(const smla_py_call *call)
{
    const smla_py_array *array = call->arrays;
    while (array->object == NULL) {
        array++;
    }
    return array;
}

int
smla_py_allocate_result(smla_py_call *call, int i, DLDataType dtype, int ndim, const int64_t *shape)
{
    if (call->arrays[i].object != NULL) {
        return 0;
    }
    return smla_py_allocate(call->state, call->op, call->arrays[i].name, first_given(call),
                            &call->stream, dtype, ndim, shape, &call->arrays[i]);
}

int
smla_py_allocate_ordered(smla_py_call *call, int i, DLDataType dtype, const int64_t storage[3],
                         const int order[3], int64_t rows)
{
    if (call->arrays[i].object != NULL) {
        return 0;
    }
    if (!smla_py_has_ordered_views(&call->arrays[0])) {
        const int64_t shape[3] = {rows, storage[order[1]], storage[order[2]]};
        return smla_py_allocate_result(call, i, dtype, 3, shape);
    }
    return smla_py_allocate_result(call, i, dtype, 3, storage) < 0
               ? -1
               : smla_py_order(call->state, &call->arrays[i], order, rows);
}

/* Keeps the arrays alive until the work is over. */
static int
keep_arrays(smla_py_call *call, smla_status status)
{
    if (status != SMLA_OK && status != SMLA_ERROR_RUNTIME) { /* no work was submitted */
        return 0;
    }
    const int kept =
        smla_py_keep(call->state, call->op, call->arrays, call->num_arrays, &call->stream);
    if (kept < 0 && status != SMLA_OK) {
        PyErr_Clear(); /* the core's error counts */
    }
    return kept;
}

PyObject *
smla_py_finish(smla_py_call *call, smla_status status, const smla_error *error, const int *results,
               int num_results)
{
    PyObject *answer = NULL;
    const int kept = keep_arrays(call, status);
    if (status != SMLA_OK) {
        smla_py_raise(error);
    } else if (kept < 0) {
        /* an exception is set */
    } else if (num_results == 1) {
        answer = smla_py_result(&call->arrays[results[0]]);
    } else {
        answer = PyTuple_New(num_results);
        for (int i = 0; answer != NULL && i < num_results; i++) {
            PyObject *item = smla_py_result(&call->arrays[results[i]]);
            if (item == NULL || PyTuple_SetItem(answer, i, item) < 0) { /* steals */
                Py_CLEAR(answer);
            }
        }
    }
    return answer;
}
