/* step_arrays.c: what builds and layers share: keywords, the lock of a step, views of its buffers,
 * and results of which a call writes the first rows.
 */
#include <string.h>

#include "python/step/step.h"

/* ---- Keywords ------------------------------------------------------------------------------ */

/* The keyword of a row: its name, or the end of one as "caches.swa". */
static const char *
keyword_of(const smla_py_param *param)
{
    const char *const dot = strrchr(param->name, '.');
    return dot == NULL ? param->name : dot + 1;
}

int
smla_py_intern_keywords(const smla_py_operator *op, smla_py_keywords *keywords)
{
    for (int i = 0; i < op->num_params; i++) {
        if (smla_py_is_argument(&op->params[i])) {
            keywords->names[i] = PyUnicode_InternFromString(keyword_of(&op->params[i]));
            if (keywords->names[i] == NULL) {
                return -1;
            }
        }
    }
    return 0;
}

void
smla_py_drop_keywords(smla_py_keywords *keywords)
{
    for (int i = 0; i < SMLA_PY_MAX_PARAMS; i++) {
        Py_CLEAR(keywords->names[i]);
    }
}

/* The row of a keyword, or -1. Pointers are compared first, from `start` on, because the keywords
 * of a call are nearly always interned and in the table's order. */
static int
find_row(const smla_py_keywords *keywords, int num_rows, PyObject *name, int start)
{
    for (int row = start; row < num_rows; row++) {
        if (keywords->names[row] == name) {
            return row;
        }
    }
    for (int row = 0; row < num_rows; row++) {
        if (keywords->names[row] != NULL && PyUnicode_Compare(keywords->names[row], name) == 0) {
            return row;
        }
    }
    return -1;
}

int
smla_py_bind_keywords(const smla_py_operator *op, const smla_py_keywords *keywords,
                      PyObject *const *args, PyObject *given, PyObject **values)
{
    const Py_ssize_t num_given = given == NULL ? 0 : PyTuple_Size(given);
    int row = -1;
    for (int i = 0; i < op->num_params; i++) {
        values[i] = NULL;
    }
    for (Py_ssize_t i = 0; i < num_given; i++) {
        PyObject *const name = PyTuple_GetItem(given, i);
        row = find_row(keywords, op->num_params, name, row + 1);
        if (row < 0) {
            PyErr_Format(PyExc_TypeError, "%s: takes no argument %R", op->name, name);
            return -1;
        }
        values[row] = args[i];
    }
    return 0;
}

bool
smla_py_has_keyword(PyObject *given, PyObject *name)
{
    const Py_ssize_t num_given = given == NULL ? 0 : PyTuple_Size(given);
    for (Py_ssize_t i = 0; i < num_given; i++) {
        PyObject *const item = PyTuple_GetItem(given, i);
        if (item == name || PyUnicode_Compare(item, name) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- Steps --------------------------------------------------------------------------------- */

int
smla_py_enter_step(smla_py_step *step, const char *op)
{
    if (!atomic_flag_test_and_set(&step->is_busy)) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "%s: `builder` must be used by one thread at a time, got a second one", op);
    return -1;
}

int
smla_py_take_step(smla_py_call *call, PyObject *object, void *builder)
{
    smla_py_step *const step = (smla_py_step *)object;
    if (smla_py_enter_step(step, call->op) < 0) {
        return -1;
    }
    call->step = step;
    call->is_busy = &step->is_busy;
    memcpy(builder, &step->core, sizeof(void *));
    return 0;
}

int
smla_py_check_generation(const char *op, const void *step, PyObject *object)
{
    const int64_t latest = ((const smla_py_step *)step)->generation;
    int64_t generation = 0;
    if (smla_py_parse_int(op, "generation", object, &generation) < 0) {
        return -1;
    }
    if (generation == latest) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: `metadata` must come from its builder's latest build (number %lld), got that "
                 "of build %lld",
                 op, (long long)latest, (long long)generation);
    return -1;
}

/* ---- Arrays -------------------------------------------------------------------------------- */

PyObject *
smla_py_view_buffer(smla_py_step *step, PyObject *event, const smla_step_view *view)
{
    const smla_py_state *const state = smla_py_type_state((PyObject *)step);
    if (view->data == NULL) {
        return Py_NewRef(Py_None);
    }
    int64_t sizes[2] = {view->shape[0], view->ndim == 2 ? view->shape[1] : 1};
    int64_t strides[2] = {view->row_stride, 1};
    const DLTensor array = {.data = (void *)(uintptr_t)view->data,
                            .device = step->core->device,
                            .ndim = view->ndim,
                            .dtype = view->dtype,
                            .shape = sizes,
                            .strides = strides};
    return array.device.device_type == kDLCPU
               ? smla_py_numpy_view(state, (PyObject *)step, &array, false)
               : smla_py_tensor_view(state, (PyObject *)step, &array, event, true);
}

int
smla_py_fill_zero(smla_py_call *call, DLDevice device, void *memory, int64_t bytes)
{
    if (device.device_type == kDLCPU) {
        memset(memory, 0, (size_t)bytes);
        return 0;
    }
    smla_error error;
    if (smla_py_find_backend(call->op, &call->stream) < 0) {
        return -1;
    }
    const smla_stream_ops *const ops = call->stream.backend->streams;
    return smla_py_check(ops->fill_zero(call->op, call->stream.at, memory, bytes, &error), &error);
}

/* Zeroes the rows of a new result from row `num_written` on. */
static int
fill_rest(smla_py_call *call, const smla_py_array *array, int64_t num_written)
{
    const int64_t row_bytes = smla_py_bytes(&array->view) / array->shape[0];
    char *const rest = (char *)smla_data(&array->view) + num_written * row_bytes;
    return smla_py_fill_zero(call, array->view.device, rest,
                             (array->shape[0] - num_written) * row_bytes);
}

static int
allocate_result(smla_py_call *call, int i, DLDataType dtype, int ndim, const int64_t *shape,
                int64_t num_written)
{
    if (call->arrays[i].object != NULL) {
        return 0;
    }
    if (smla_py_allocate_result(call, i, dtype, ndim, shape) < 0) {
        return -1;
    }
    return num_written < shape[0] ? fill_rest(call, &call->arrays[i], num_written) : 0;
}

int
smla_py_allocate_rows(smla_py_call *call, int out, int ndim, int64_t num_heads, int64_t values,
                      int64_t num_written)
{
    const int64_t heads = ndim == 3 ? smla_py_call_dim(call, 0, 1) : num_heads;
    const int64_t lse_shape[2] = {smla_py_call_dim(call, 0, 0), heads};
    const int64_t out_shape[3] = {lse_shape[0], ndim == 3 ? heads : values, values};
    if (!smla_py_has_rank(call, 0, ndim) || heads > SMLA_MAX_HEADS) {
        return 0;
    }
    if (allocate_result(call, out, smla_py_bf16, ndim, out_shape, num_written) < 0) {
        return -1;
    }
    return call->asks ? allocate_result(call, out + 1, smla_py_fp32, 2, lse_shape, num_written) : 0;
}
