/* compose.c: what a layer that Python composes of operators needs of C: memory in the framework of
 * its arrays, and order between streams. sparse_mla/v4/ uses it.
 */
#include "python/step/step.h"

static const char op[] = "forward";

/* ---- Memory -------------------------------------------------------------------------------- */

/* Arrays of a call. */
enum { LIKE, MADE };

typedef struct new_array {
    const char *name;
    const char *dtype_name;
    PyObject *dims; /* a tuple */
    int zero;       /* whether the array is filled with zeros; a bool of Python */
    DLDataType dtype;
    int64_t shape[SMLA_PY_MAX_RANK];
} new_array;

static int
read_shape(new_array *made)
{
    const Py_ssize_t rank = PyTuple_Size(made->dims);
    const smla_py_dtype *const dtype = smla_py_find_dtype_name(made->dtype_name);
    if (rank < 1 || rank > SMLA_PY_MAX_RANK || dtype == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must have 1 to %d dimensions and a known dtype",
                     op, made->name, SMLA_PY_MAX_RANK);
        return -1;
    }
    made->dtype = dtype->dtype;
    return smla_py_parse_ints(op, "shape", made->dims, (int)rank, made->shape);
}

/* Memory that outlives a capture must not come from the capture's own pool. */
static int
refuse_capture(smla_py_call *call, const char *name)
{
    if (!call->stream.is_cuda) {
        return 0;
    }
    if (smla_py_find_backend(call->op, &call->stream) < 0) {
        return -1;
    }
    if (call->stream.is_capturing) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s: `%s` must exist before a capture: call forward once for this builder "
                     "before the graph is captured",
                     call->op, name);
        return -1;
    }
    return 0;
}

static PyObject *
make_array(smla_py_call *call, const new_array *made)
{
    const int rank = (int)PyTuple_Size(made->dims);
    smla_error error;
    if (smla_py_allocate_result(call, MADE, made->dtype, rank, made->shape) < 0) {
        return NULL;
    }
    const DLTensor *const view = smla_py_view(&call->arrays[MADE]);
    const int64_t bytes = smla_py_bytes(view);
    if (made->zero && bytes > 0 &&
        smla_py_fill_zero(call, view->device, smla_data(view), bytes) < 0) {
        return NULL;
    }
    static const int results[] = {MADE};
    return smla_py_finish(call, SMLA_OK, &error, results, SMLA_PY_COUNT(results));
}

static PyObject *
new_array_like(PyObject *module, PyObject *args)
{
    PyObject *like = NULL;
    PyObject *stream = NULL;
    void *handle = NULL;
    new_array made = {.name = NULL};
    smla_py_call call;
    if (!PyArg_ParseTuple(args, "sOO!sOp:new_array", &made.name, &like, &PyTuple_Type, &made.dims,
                          &made.dtype_name, &stream, &made.zero)) {
        return NULL;
    }
    smla_py_open(&call, PyModule_GetState(module), op);
    PyObject *answer = NULL;
    if (read_shape(&made) == 0 && smla_py_take_stream(&call, stream) == 0 &&
        smla_py_add(&call, "x", SMLA_PY_INPUT, like) == 0 &&
        smla_py_add(&call, made.name, SMLA_PY_OUTPUT, Py_None) == 0 &&
        smla_py_resolve_stream(&call, &handle) == 0 &&
        (made.zero || refuse_capture(&call, made.name) == 0)) {
        answer = make_array(&call, &made);
    }
    smla_py_close(&call);
    return answer;
}

/* ---- Streams ------------------------------------------------------------------------------- */

static PyObject *
find_stream(PyObject *module, PyObject *args)
{
    PyObject *array = NULL;
    PyObject *stream = NULL;
    void *handle = NULL;
    smla_py_call call;
    if (!PyArg_ParseTuple(args, "OO:find_stream", &array, &stream)) {
        return NULL;
    }
    smla_py_open(&call, PyModule_GetState(module), op);
    PyObject *answer = NULL;
    if (smla_py_take_stream(&call, stream) == 0 &&
        smla_py_add(&call, "x", SMLA_PY_INPUT, array) == 0 &&
        smla_py_resolve_stream(&call, &handle) == 0) {
        answer = Py_BuildValue("iN", call.stream.is_cuda ? (int)call.stream.at.device_id : -1,
                               PyLong_FromVoidPtr(handle));
    }
    smla_py_close(&call);
    return answer;
}

static PyObject *
read_stream(PyObject *Py_UNUSED(module), PyObject *stream)
{
    void *handle = NULL;
    return smla_py_parse_stream(op, stream, &handle) < 0 ? NULL : PyLong_FromVoidPtr(handle);
}

/* Makes `after` wait for what `before` has been given so far. */
static smla_status
order(smla_stream before, smla_stream after, smla_error *error)
{
    const DLDevice device = {.device_type = kDLCUDA, .device_id = before.device_id};
    const smla_backend *backend = NULL;
    smla_event *event = NULL;
    SMLA_TRY(smla_find_backend(op, device, &backend, error));
    SMLA_TRY(backend->streams->record(op, before, &event, error));
    const smla_status status = backend->streams->wait(op, after, event, error);
    backend->streams->destroy(event);
    return status;
}

static int
parse_handle(const char *name, PyObject *object, void **handle)
{
    if (!PyLong_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must be the int handle of a stream", op, name);
        return -1;
    }
    if (smla_py_parse_stream(op, object, handle) < 0) {
        return -1;
    }
    if ((intptr_t)*handle < 0) { /* a driver would follow it to nowhere */
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be at least 0, got %R", op, name, object);
        return -1;
    }
    return 0;
}

static PyObject *
order_streams(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args)
{
    int32_t device_id = 0;
    smla_stream first = {.handle = NULL};
    smla_stream then = {.handle = NULL};
    smla_error error;
    if (smla_py_check_count("order_streams", num_args, 3) < 0 ||
        smla_py_parse_int32(op, "device_id", args[0], &device_id) < 0 ||
        parse_handle("first", args[1], &first.handle) < 0 ||
        parse_handle("then", args[2], &then.handle) < 0) {
        return NULL;
    }
    first.device_id = then.device_id = device_id;
    if (first.handle != then.handle && smla_py_check(order(first, then, &error), &error) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- Functions ----------------------------------------------------------------------------- */

PyDoc_STRVAR(new_array_doc, "new_array($module, name, like, shape, dtype, stream, zero, /)\n--\n\n"
                            "A contiguous array in the framework of another. While a graph is "
                            "captured only zeros may be made.");
PyDoc_STRVAR(find_stream_doc, "find_stream($module, array, stream, /)\n--\n\n"
                              "(device number, handle) of the stream that a call with the array "
                              "uses; the number is -1 on the CPU.");
PyDoc_STRVAR(read_stream_doc, "read_stream($module, stream, /)\n--\n\nA stream's handle.");
PyDoc_STRVAR(order_streams_doc, "order_streams($module, device_id, first, then, /)\n--\n\n"
                                "Make what is given to stream `then` from now on wait for what "
                                "stream `first` has been given.");

PyMethodDef smla_py_compose_functions[] = {
    {"new_array", new_array_like, METH_VARARGS, new_array_doc},
    {"find_stream", find_stream, METH_VARARGS, find_stream_doc},
    {"read_stream", read_stream, METH_O, read_stream_doc},
    {"order_streams", (PyCFunction)(void (*)(void))order_streams, METH_FASTCALL, order_streams_doc},
    {NULL, NULL, 0, NULL},
};
