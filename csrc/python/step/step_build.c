/* step_build.c: builds a step from a batch of Python: reads its arguments by the plan's table,
 * keeps the arrays that layers read until the next build, and describes the step as a dict.
 */
#include <stdalign.h>
#include <stdlib.h>

#include "python/step/step.h"

enum { MAX_HOST_ARRAYS = 3 };

/* One build, whose args the table fills. */
typedef struct build_call {
    smla_py_step *step;
    const smla_py_state *state;
    const char *op;
    bool shows; /* the step as a dict; else its number alone */
    alignas(max_align_t) unsigned char args[SMLA_PY_MAX_ARGS_BYTES];
    int num_host; /* copies of host arrays */
    int32_t *host[MAX_HOST_ARRAYS];
    smla_py_stream stream;
    smla_py_array *arrays; /* the step's, for the next one */
    int num_arrays;
    size_t fields[SMLA_PY_MAX_STEP_ARRAYS]; /* offset in `args` of each array */
} build_call;

/* ---- Arguments ----------------------------------------------------------------------------- */

/* Reads a host array that has `num_more` entries more than the batch has requests. */
static int
read_host_array(build_call *call, const smla_py_param *param, PyObject *object, int num_more)
{
    const int64_t num_reqs = call->step->plan->core->read_batch(call->args).num_reqs;
    int64_t count = 0;
    int32_t **const values = &call->host[call->num_host];
    if (smla_py_host_ints(call->state, call->op, param->name, object, values, &count) < 0) {
        return -1;
    }
    call->num_host++;
    smla_py_set_pointer(call->args, param, *values);
    if (count - num_more == num_reqs) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: `%s` must be of the %lld requests of `num_reqs`, got those of %lld", call->op,
                 param->name, (long long)num_reqs, (long long)(count - num_more));
    return -1;
}

/* Acquires an array; None is an absent one if `is_optional`. */
static int
add_array(build_call *call, const char *name, size_t field, PyObject *object, bool is_optional)
{
    if (object == Py_None && is_optional) {
        return 0;
    }
    call->fields[call->num_arrays] = field;
    const int status = smla_py_acquire(call->state, call->op, name, SMLA_PY_RETAINED, object,
                                       &call->arrays[call->num_arrays]);
    call->num_arrays += status == 0;
    return status;
}

/* Acquires the tables in a tuple, which has one or None for each ratio. */
static int
add_tables(build_call *call, const smla_py_param *param, PyObject *object)
{
    if (!PyTuple_Check(object) || PyTuple_Size(object) > SMLA_V4_MAX_RATIOS) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be a tuple of at most %d tables, got %R",
                     call->op, param->name, SMLA_V4_MAX_RATIOS, object);
        return -1;
    }
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyTuple_Size(object); i++) {
        const size_t field = param->offset + (size_t)i * sizeof(void *);
        status = add_array(call, param->name, field, PyTuple_GetItem(object, i), true);
    }
    return status;
}

static int
read_argument(build_call *call, const smla_py_param *param, PyObject *object)
{
    switch (param->kind) {
    case SMLA_PY_INT:
        return smla_py_parse_int(call->op, param->name, object,
                                 (void *)(call->args + param->offset));
    case SMLA_PY_STARTS: return read_host_array(call, param, object, 1);
    case SMLA_PY_LENGTHS: return read_host_array(call, param, object, 0);
    case SMLA_PY_LENGTHS_OR_NONE:
        return object == Py_None ? 0 : read_host_array(call, param, object, 0);
    case SMLA_PY_INT32:
        return smla_py_parse_int32(call->op, param->name, object,
                                   (void *)(call->args + param->offset));
    case SMLA_PY_STREAM:
        call->stream.is_given = object != Py_None;
        return smla_py_parse_stream(call->op, object, &call->stream.at.handle);
    case SMLA_PY_TABLES: return add_tables(call, param, object);
    case SMLA_PY_TABLE: return add_array(call, param->name, param->offset, object, true);
    case SMLA_PY_RETAINED: return add_array(call, param->name, param->offset, object, false);
    default: return 0; /* the stream of the arrays */
    }
}

/* Reads the options, then acquires the arrays and settles their stream. */
static int
read_arguments(build_call *call, const smla_py_operator *op, PyObject *const *values)
{
    const int num_arrays = smla_py_count_arrays(op);
    for (int i = 0; i < op->num_params; i++) {
        const int row = (i + num_arrays) % op->num_params;
        if (values[row] != NULL && read_argument(call, &op->params[row], values[row]) < 0) {
            return -1;
        }
    }
    if (smla_py_resolve_stream_of(call->state, call->op, call->arrays, call->num_arrays, NULL,
                                  &call->stream) < 0) {
        return -1;
    }
    smla_py_set_pointer(call->args, &op->params[op->num_params - 1], call->stream.at.handle);
    for (int i = 0; i < call->num_arrays; i++) {
        const smla_py_param row = {NULL, SMLA_PY_RETAINED, call->fields[i]};
        smla_py_set_pointer(call->args, &row, smla_py_view(&call->arrays[i]));
    }
    return 0;
}

/* ---- Description --------------------------------------------------------------------------- */

/* Adds an item to a dict, and drops the reference; NULL stands for an exception. */
static int
add_item(PyObject *dict, const char *name, PyObject *item)
{
    const int status = item == NULL ? -1 : PyDict_SetItemString(dict, name, item);
    Py_XDECREF(item);
    return status;
}

/* New list of the numbers of a view's first column; of two dimensions, of its rows as tuples. */
static PyObject *
list_numbers(const smla_step_view *view)
{
    PyObject *list = PyList_New((Py_ssize_t)view->shape[0]);
    for (int64_t i = 0; list != NULL && i < view->shape[0]; i++) {
        const int64_t *const row = (const int64_t *)view->data + i * view->row_stride;
        PyObject *item = view->ndim == 1 ? PyLong_FromLongLong(*row)
                                         : smla_py_int_tuple(row, (int)view->shape[1]);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) { /* steals */
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
show(smla_py_step *step, PyObject *event, const smla_step_view *view)
{
    return view->is_list     ? list_numbers(view)
           : view->ndim == 0 ? PyLong_FromLongLong(view->shape[0])
                             : smla_py_view_buffer(step, event, view);
}

/* Adds views to the dict. A group's are in a dict of its own, under its number. */
static int
add_each_view(smla_py_step *step, PyObject *event, PyObject *dict, const smla_step_view *views,
              int num_views)
{
    PyObject *to = dict; /* borrowed */
    for (int i = 0; i < num_views; i++) {
        const smla_step_view *const view = &views[i];
        if (view->group >= 0 && (i == 0 || views[i - 1].group != view->group)) {
            PyObject *const number = PyLong_FromLong(view->group);
            to = PyDict_New();
            const int status = to == NULL || number == NULL ? -1 : PyDict_SetItem(dict, number, to);
            Py_XDECREF(number);
            Py_XDECREF(to);
            if (status < 0) {
                return -1;
            }
        }
        if (add_item(to, view->name, show(step, event, view)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Adds the views of the step to the dict. */
static int
add_views(smla_py_step *step, PyObject *event, PyObject *dict)
{
    smla_step_view *const views = malloc(SMLA_MAX_STEP_VIEWS * sizeof *views);
    if (views == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int num_views = step->core->plan->describe(step->core, views);
    const int status = add_each_view(step, event, dict, views, num_views);
    free(views);
    return status;
}

/* New dict of the engine's facts. A plan that sends nothing has none of a batch. */
static PyObject *
describe_facts(const smla_py_step *step)
{
    const smla_step_facts *const facts = &step->core->facts;
    return step->core->plan->fill == NULL
               ? Py_BuildValue("{s:L}", "generation", (long long)step->generation)
               : Py_BuildValue("{s:L,s:s,s:L,s:L,s:L,s:L,s:L}", "generation",
                               (long long)step->generation, "path", smla_path_name(facts->path),
                               "num_decodes", (long long)facts->split.num_decodes, "num_prefills",
                               (long long)facts->split.num_prefills, "num_decode_tokens",
                               (long long)facts->split.num_decode_tokens, "num_prefill_tokens",
                               (long long)facts->split.num_prefill_tokens, "decode_query_len",
                               (long long)facts->decode_query_len);
}

static PyObject *
describe_step(smla_py_step *step, PyObject *event)
{
    PyObject *dict = describe_facts(step);
    if (dict != NULL && add_views(step, event, dict) < 0) {
        Py_CLEAR(dict);
    }
    return dict;
}

/* ---- Build --------------------------------------------------------------------------------- */

static void
release_arrays(smla_py_array *arrays, int num_arrays)
{
    for (int i = 0; i < num_arrays; i++) {
        smla_py_release_array(&arrays[i]);
    }
}

/* Releases the arrays of the former step once the work submitted so far is over. `event` becomes a
 * new reference to the build's event, or stays NULL where views need none: in a capture, and where
 * the build shows none. */
static int
replace_step(build_call *call, smla_py_array *former, int num_former, PyObject **event)
{
    int status = 0;
    smla_py_stream *const stream = &call->stream;
    if (stream->is_cuda) {
        status = smla_py_find_backend(call->op, stream);
        if (status == 0 && !stream->is_capturing && call->shows) {
            *event = smla_py_record(call->op, stream);
            status = *event == NULL ? -1 : 0;
        }
        bool is_foreign = false;
        for (int i = 0; i < call->num_arrays; i++) {
            is_foreign |= call->arrays[i].is_foreign;
        }
        for (int i = 0; i < num_former; i++) {
            former[i].is_foreign |= is_foreign;
        }
        if (status == 0) {
            status = smla_py_keep(call->state, call->op, former, num_former, stream);
        }
    }
    release_arrays(former, num_former);
    return status;
}

/* Calls the core, which keeps the former step if it refuses this one. */
static PyObject *
run_build(build_call *call)
{
    smla_py_step *const step = call->step;
    smla_error error;
    smla_status status;
    Py_BEGIN_ALLOW_THREADS
    status = smla_build_step(step->core, call->args, &error);
    Py_END_ALLOW_THREADS
    if (status != SMLA_OK) {
        release_arrays(call->arrays, call->num_arrays);
        return smla_py_raise(&error);
    }
    PyObject *event = NULL;
    const int former = step->current;
    const int replaced =
        replace_step(call, step->kept[former].arrays, step->kept[former].num_arrays, &event);
    step->kept[former].num_arrays = 0;
    step->current = 1 - former;
    step->kept[step->current].num_arrays = call->num_arrays;
    step->generation++;
    PyObject *const result = replaced < 0  ? NULL
                             : call->shows ? describe_step(step, event)
                                           : PyLong_FromLongLong(step->generation);
    Py_XDECREF(event);
    return result;
}

/* Reads the arguments that a call does not give from the batch, whose attributes have their names.
 * With ... in place of a batch they are absent. `owned` holds the new references. */
static int
read_batch(const smla_py_operator *op, const smla_py_keywords *keywords, PyObject *batch,
           PyObject **values, PyObject **owned)
{
    for (int i = 0; batch != Py_Ellipsis && i < op->num_params; i++) {
        if (values[i] == NULL && keywords->names[i] != NULL) {
            owned[i] = PyObject_GetAttr(batch, keywords->names[i]);
            values[i] = owned[i];
            if (owned[i] == NULL) {
                return -1;
            }
        }
    }
    return 0;
}

static PyObject *
build(smla_py_step *step, const smla_py_operator *op, PyObject *const *values, bool shows)
{
    build_call call;
    call.step = step;
    call.shows = shows;
    call.state = smla_py_type_state((PyObject *)step);
    call.op = op->name;
    call.num_host = 0;
    call.stream = (smla_py_stream){.is_given = false};
    call.arrays = step->kept[1 - step->current].arrays;
    call.num_arrays = 0;
    smla_py_clear_args(op, call.args);
    PyObject *result = NULL;
    if (read_arguments(&call, op, values) == 0) {
        result = run_build(&call);
    } else {
        release_arrays(call.arrays, call.num_arrays);
    }
    while (call.num_host > 0) {
        free(call.host[--call.num_host]);
    }
    return result;
}

static PyObject *
call_build(PyObject *self, PyObject *const *args, Py_ssize_t num_args, PyObject *keywords,
           bool shows)
{
    smla_py_step *const step = (smla_py_step *)self;
    const smla_py_operator *const op = &step->plan->build;
    PyObject *values[SMLA_PY_MAX_PARAMS];
    PyObject *owned[SMLA_PY_MAX_PARAMS] = {NULL};
    PyObject *result = NULL;
    if (smla_py_check_count(op->name, num_args, 1) < 0 ||
        smla_py_bind_keywords(op, &step->build, args + 1, keywords, values) < 0) {
        return NULL;
    }
    if (read_batch(op, &step->build, args[0], values, owned) == 0 &&
        smla_py_enter_step(step, op->name) == 0) {
        result = build(step, op, values, shows);
        smla_py_leave_step(step);
    }
    for (int i = 0; i < op->num_params; i++) {
        Py_XDECREF(owned[i]);
    }
    return result;
}

PyObject *
smla_py_build_step(PyObject *self, PyObject *const *args, Py_ssize_t num_args, PyObject *keywords)
{
    return call_build(self, args, num_args, keywords, true);
}

PyObject *
smla_py_refresh_step(PyObject *self, PyObject *const *args, Py_ssize_t num_args, PyObject *keywords)
{
    return call_build(self, args, num_args, keywords, false);
}
