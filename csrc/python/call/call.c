/* call.c: opens, fills and finishes operator calls; see call.h. */
#include "python/call/call.h"

#include <string.h>

#include "python/arrays/exchange.h"

void
smla_py_open(smla_py_call *call, const smla_py_state *state, const char *op)
{
    call->state = state;
    call->op = op;
    call->stream = (smla_py_stream){.backend = NULL};
    call->asks = false;
    call->fills = 0;
    call->step = NULL;
    call->is_busy = NULL;
    call->num_arrays = 0;
    call->arrays = call->own;
    call->room = NULL;
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
    if (call->num_arrays == SMLA_MAX_ARRAYS && call->room == NULL) { /* a mistake in a table */
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
smla_py_add_pair(smla_py_call *call, const char *name, PyObject *object)
{
    static const pair_names pairs[] = {
        {"q", {"q[0]", "q[1]"}, "q_pe", "(NoPE part, RoPE part)"},
        {"k", {"k[0]", "k[1]"}, "k_pe", "(k_nope, k_pe)"},
        {"k_cache", {"k_cache[0]", "k_cache[1]"}, "k_scale", "(k, scale)"},
    };
    const pair_names *names = pairs;
    while (strcmp(names->whole, name) != 0) {
        names++;
    }
    return add_pair(call, names, object);
}

/* ---- Lists of parts ------------------------------------------------------------------------ */

static bool
is_list(PyObject *object)
{
    return PyTuple_Check(object) || PyList_Check(object);
}

int
smla_py_make_list_room(smla_py_call *call)
{
    call->room = PyMem_Malloc(sizeof *call->room);
    if (call->room == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    call->room->num_items = 0;
    call->room->num_lists = 0;
    call->arrays = call->room->arrays;
    return 0;
}

/* New reference: the items of a list, which another thread may change. */
static PyObject *
take_items(const smla_py_call *call, const char *name, PyObject *object)
{
    PyObject *items = PySequence_Tuple(object);
    const Py_ssize_t count = items == NULL ? 1 : PyTuple_Size(items);
    if (count < 1 || count > SMLA_MAX_PARTS) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must have 1 to %d parts, got %zd", call->op, name,
                     SMLA_MAX_PARTS, count);
        Py_CLEAR(items);
    }
    return items;
}

/* Appends items number `start` to `end` - 1, each under its own name. */
static int
add_items(smla_py_call *call, const char *name, PyObject *items, Py_ssize_t start, Py_ssize_t end)
{
    for (Py_ssize_t i = start; i < end; i++) {
        char *const item = call->room->names[call->room->num_items++];
        PyOS_snprintf(item, sizeof call->room->names[0], "%s[%d]", name, (int)i);
        if (smla_py_add(call, item, SMLA_PY_INPUT, PyTuple_GetItem(items, i)) < 0) {
            return -1;
        }
    }
    return 0;
}

int
smla_py_add_parts(smla_py_call *call, const char *name, PyObject *object)
{
    if (!is_list(object)) {
        return smla_py_add(call, name, SMLA_PY_INPUT, object);
    }
    PyObject *items = take_items(call, name, object);
    const int status = items == NULL ? -1 : add_items(call, name, items, 0, 1);
    Py_XDECREF(items);
    return status;
}

int
smla_py_add_later_parts(smla_py_call *call, const char *name, int row, PyObject *object)
{
    smla_py_list_room *const room = call->room;
    if (!is_list(object)) {
        return 0;
    }
    PyObject *items = take_items(call, name, object);
    if (items == NULL) {
        return -1;
    }
    const int count = (int)PyTuple_Size(items);
    const int list = room->num_lists++;
    room->lists[list].row = row;
    room->lists[list].later = call->num_arrays;
    room->lists[list].first_view = list * SMLA_MAX_PARTS;
    room->lists[list].count = count;
    const int status = add_items(call, name, items, 1, count);
    Py_DECREF(items);
    return status;
}

void
smla_py_set_parts(smla_py_call *call, int row, smla_parts_arg *parts)
{
    *parts = (smla_parts_arg){.stacked = smla_py_view(&call->arrays[row])};
    for (int list = 0; call->room != NULL && list < call->room->num_lists; list++) {
        if (call->room->lists[list].row != row) {
            continue;
        }
        const DLTensor **const views = call->room->views + call->room->lists[list].first_view;
        const int later = call->room->lists[list].later;
        const int count = call->room->lists[list].count;
        for (int i = 0; i < count; i++) {
            views[i] = smla_py_view(&call->arrays[i == 0 ? row : later + i - 1]);
        }
        *parts = (smla_parts_arg){.list = views, .count = count};
    }
}

/* ---- The call's end ------------------------------------------------------------------------ */

void
smla_py_close(smla_py_call *call)
{
    while (call->num_arrays > 0) {
        smla_py_release_array(&call->arrays[--call->num_arrays]);
    }
    PyMem_Free(call->room);
    if (call->is_busy != NULL) {
        atomic_flag_clear(call->is_busy);
    }
}

static bool
is_on_cuda(const smla_py_array *array)
{
    return array->object != NULL && array->view.device.device_type == kDLCUDA;
}

/* The output on a GPU that says where a call with a list of parts runs, because the first part may
 * be on another GPU. NULL: the call has no list or no such output, and its first array says it. */
static const smla_py_array *
find_home(const smla_py_call *call)
{
    const bool begins_with_list =
        call->room != NULL && call->room->num_lists > 0 && call->room->lists[0].row == 0;
    if (!begins_with_list || !is_on_cuda(&call->arrays[0])) {
        return NULL;
    }
    for (int i = 1; i < call->num_arrays; i++) {
        if (call->arrays[i].is_written && is_on_cuda(&call->arrays[i])) {
            return &call->arrays[i];
        }
    }
    return NULL;
}

int
smla_py_resolve_stream(smla_py_call *call, void **stream)
{
    const int status = smla_py_resolve_stream_of(call->state, call->op, call->arrays,
                                                 call->num_arrays, find_home(call), &call->stream);
    *stream = call->stream.at.handle;
    return status;
}

/* The array that results are like: the first one that the caller gave. Every operator with results
 * requires one. */
static const smla_py_array *
first_given(const smla_py_call *call)
{
    const smla_py_array *const home = find_home(call);
    const smla_py_array *array = home != NULL ? home : call->arrays;
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

/* A Tensor is marked foreign, because nothing else keeps it until the work is over. */
int
smla_py_allocate_bytes(smla_py_call *call, int i, const int64_t *bytes)
{
    static const DLDataType uint8 = {kDLUInt, 8, 1};
    smla_py_array *const array = &call->arrays[i];
    if (smla_py_allocate(call->state, call->op, array->name, first_given(call), &call->stream,
                         uint8, 1, bytes, array) < 0) {
        return -1;
    }
    array->is_foreign |= Py_TYPE(array->object) == call->state->tensor_type;
    return 0;
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

/* ---- Hints --------------------------------------------------------------------------------- */

/* What helps a caller of one framework after an error of the core, whose text knows none. */
typedef struct framework_hint {
    const char *rule;  /* a part of the core's text */
    const char *numpy; /* or NULL */
    const char *torch; /* or NULL */
    bool is_copy;      /* no help for an array that the call writes */
} framework_hint;

static const framework_hint framework_hints[] = {
    {": nothing is cast here, make it int32", NULL, NULL, false},
    {": nothing is cast here", " (bfloat16 in NumPy is ml_dtypes.bfloat16)", NULL, false},
    {": view the bits as bfloat16", " (ml_dtypes.bfloat16 in NumPy)", NULL, false},
    {"must have a contiguous last dimension", ": pass np.ascontiguousarray of it",
     ": pass its .contiguous()", true},
};

/* The array that the error's text names, "op: `argument` must ...", or NULL. */
static const smla_py_array *
find_blamed(const smla_py_call *call, const smla_error *error)
{
    const char *const quote = strchr(error->text, '`');
    for (int i = 0; quote != NULL && i < call->num_arrays; i++) {
        const size_t length = strlen(call->arrays[i].name);
        if (call->arrays[i].object != NULL &&
            strncmp(quote + 1, call->arrays[i].name, length) == 0 && quote[length + 1] == '`') {
            return &call->arrays[i];
        }
    }
    return NULL;
}

/* The text that goes behind the error's, or NULL. */
static const char *
find_hint(const smla_py_call *call, const smla_error *error)
{
    const smla_py_array *const array = find_blamed(call, error);
    const framework_hint *hint = framework_hints;
    const framework_hint *const end = hint + SMLA_PY_COUNT(framework_hints);
    while (hint < end && strstr(error->text, hint->rule) == NULL) {
        hint++;
    }
    if (array == NULL || hint == end || (array->is_written && hint->is_copy)) {
        return NULL;
    }
    if (array->framework == SMLA_PY_NUMPY) {
        return hint->numpy;
    }
    return smla_py_is_type_in_package(call->state, array->object, "torch") ? hint->torch : NULL;
}

/* Raises an error of the core, with a hint for the framework of the array that it is about. */
static void
raise_with_hint(const smla_py_call *call, const smla_error *error)
{
    const char *const hint = find_hint(call, error); /* before there is an exception to lose */
    smla_py_raise(error);
    if (hint != NULL) {
        PyErr_Format(PyErr_Occurred(), "%s%s", error->text, hint);
    }
}

PyObject *
smla_py_finish(smla_py_call *call, smla_status status, const smla_error *error, const int *results,
               int num_results)
{
    PyObject *answer = NULL;
    const int kept = keep_arrays(call, status);
    if (status != SMLA_OK) {
        raise_with_hint(call, error);
    } else if (kept < 0) {
        /* an exception is set */
    } else if (num_results == 1) {
        answer = smla_py_result(&call->arrays[results[0]]);
    } else {
        answer = PyTuple_New(num_results);
        for (int i = 0; answer != NULL && i < num_results; i++) {
            smla_py_put_item(&answer, i, smla_py_result(&call->arrays[results[i]]));
        }
    }
    return answer;
}
