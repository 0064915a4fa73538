/* stream.c: which stream a call's work goes to, and what that work waits for.
 *
 * If the caller gives no stream, the first array whose producer tells its current stream decides.
 * The call waits for the work of other producers on the device; the host waits for nothing. Calls
 * on the CPU need none of this. Arrays on another GPU, which only a merge of listed parts takes,
 * are read as they are: whoever wrote them, often another process, must be done.
 */
#include "python/arrays/exchange.h"
#include "python/arrays/tensor.h"

/* The legacy default stream has two handles, 0 and 1: use 0. */
static void *
normal_handle(void *handle)
{
    return handle == (void *)1 ? NULL : handle;
}

/* A handle as the number that callers pass as stream=. */
static unsigned long long
handle_number(void *handle)
{
    return (unsigned long long)(uintptr_t)handle;
}

/* ---- The streams of producers -------------------------------------------------------------- */

/* Asks an importer's framework for its current stream on a device. */
static int
ask_importer(const smla_py_importer *importer, int32_t device_id, void **handle)
{
    PyObject *name = PyUnicode_FromString(importer->stream_module);
    PyObject *module = name == NULL ? NULL : PyImport_GetModule(name);
    PyObject *stream = NULL;
    int result = SMLA_PY_NOT_THIS;
    if (module != NULL) {
        stream = PyObject_CallMethod(module, importer->stream_function, "i", (int)device_id);
    }
    if (stream != NULL) {
        PyObject *number = PyObject_GetAttrString(stream, importer->stream_attribute);
        result = number == NULL ? -1 : smla_py_read_handle(number, handle);
        Py_XDECREF(number);
    }
    Py_XDECREF(name);
    Py_XDECREF(module);
    Py_XDECREF(stream);
    return PyErr_Occurred() == NULL ? result : -1;
}

/* The current stream of an array's producer: 0 = found, SMLA_PY_NOT_THIS = the producer does not
 * tell it. */
static int
find_producer_stream(const smla_py_state *state, const char *op, const smla_py_array *array,
                     void **handle)
{
    const int32_t device_id = array->view.device.device_id;
    int result = SMLA_PY_NOT_THIS;
    if (array->framework == SMLA_PY_EXCHANGE) {
        result = array->exchange_api->current_work_stream(kDLCUDA, device_id, handle) == 0 ? 0 : -1;
        if (result < 0 && PyErr_Occurred() == NULL) {
            PyErr_Format(PyExc_RuntimeError,
                         "%s: `%s` must come from a framework that knows its current stream, got "
                         "an error",
                         op, array->name);
        }
    } else if (array->framework == SMLA_PY_CUPY) {
        result = smla_py_cupy_stream(state, device_id, handle);
    } else if (array->importer != NULL && array->importer->stream_module != NULL) {
        result = ask_importer(array->importer, device_id, handle);
    }
    if (result == 0) {
        *handle = normal_handle(*handle);
    }
    return result;
}

/* ---- Order --------------------------------------------------------------------------------- */

/* Makes the call wait for the work that is on another stream of its device now. A captured call
 * runs later, when its graph is replayed, so it cannot wait for work that is not captured: whoever
 * starts a replay must order it. */
static int
order_behind(const char *op, const char *name, void *producer, smla_py_stream *stream)
{
    const smla_stream other = {.device_id = stream->at.device_id, .handle = producer};
    const smla_stream_ops *ops = stream->backend->streams;
    smla_event *event = NULL;
    smla_error error;
    bool is_captured = false;
    if (stream->is_capturing && producer == NULL) { /* the legacy stream is never captured, and
                                                     * must not be asked during a capture */
        return 0;
    }
    smla_status status = ops->is_capturing(op, other, &is_captured, &error);
    if (status == SMLA_OK && is_captured && !stream->is_capturing) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `stream` must be the stream whose work is captured, since `%s` is made "
                     "on that (%llu), got %llu",
                     op, name, handle_number(producer), handle_number(stream->at.handle));
        return -1;
    }
    if (status == SMLA_OK && is_captured == stream->is_capturing) {
        status = ops->record(op, other, &event, &error);
    }
    if (event != NULL) {
        status = ops->wait(op, stream->at, event, &error);
        ops->destroy(event);
    }
    return smla_py_check(status, &error);
}

static int
fail_mixed(const char *op, const smla_py_array *leader, const smla_py_array *array, void *first,
           void *second)
{
    PyErr_Format(
        PyExc_ValueError,
        "%s: `%s` must come from the current stream of `%s` (%llu), got one whose producer "
        "works on another (%llu): pass stream=, or make the two equal",
        op, array->name, leader->name, handle_number(first), handle_number(second));
    return -1;
}

/* The producer asked last: consecutive arrays of one producer cause only one question. */
typedef struct producer {
    const smla_py_array *asked;
    int result;
    void *handle;
} producer;

static int
ask_producer(const smla_py_state *state, const char *op, const smla_py_array *array, producer *p)
{
    const smla_py_array *asked = p->asked;
    if (asked == NULL || asked->framework != array->framework ||
        asked->importer != array->importer || asked->exchange_api != array->exchange_api) {
        p->asked = array;
        p->result = find_producer_stream(state, op, array, &p->handle);
    }
    return p->result;
}

static bool
is_in_place(const smla_py_array *array, const smla_py_stream *stream)
{
    return array->object != NULL && array->view.device.device_type == kDLCUDA &&
           array->view.device.device_id == stream->at.device_id;
}

static bool
is_elsewhere(const smla_py_array *array, const smla_py_stream *stream)
{
    return array->object != NULL && array->view.device.device_type == kDLCUDA &&
           array->view.device.device_id != stream->at.device_id;
}

/* If the caller gave no stream, the first producer that tells its stream decides. Otherwise, the
 * call waits for producers on other streams. Arrays that are not freed in the order of the call's
 * stream are marked as foreign, except Tensors: their memory outlives all work on the device. */
static int
follow_producers(const smla_py_state *state, const char *op, smla_py_array *arrays, int num_arrays,
                 smla_py_stream *stream)
{
    const smla_py_array *leader = NULL;
    const smla_py_array *last_ordered = NULL;
    producer p = {.asked = NULL};
    for (int i = 0; i < num_arrays; i++) {
        smla_py_array *array = &arrays[i];
        if (!is_in_place(array, stream)) {
            array->is_foreign = is_elsewhere(array, stream);
            continue;
        }
        const int result = ask_producer(state, op, array, &p);
        if (result < 0) {
            return -1;
        }
        if (result == SMLA_PY_NOT_THIS) {
            array->is_foreign = Py_TYPE(array->object) != state->tensor_type;
            continue;
        }
        if (leader == NULL && !stream->is_given) {
            leader = array;
            stream->at.handle = p.handle;
        }
        if (p.handle == stream->at.handle) {
            continue;
        }
        if (!stream->is_given) {
            return fail_mixed(op, leader, array, stream->at.handle, p.handle);
        }
        array->is_foreign = true;
        if (last_ordered != p.asked) { /* else the call waits for it already */
            last_ordered = p.asked;
            if (smla_py_find_backend(op, stream) < 0 ||
                order_behind(op, array->name, p.handle, stream) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

/* Makes the stream wait for the call that writes the Tensor, unless the stream is captured. */
static int
wait_for_tensor(const smla_py_state *state, const char *op, const smla_py_array *array,
                smla_py_stream *stream)
{
    PyObject *event = smla_py_take_event(state, smla_py_tensor_event(array->object));
    if (event == NULL) {
        return 0;
    }
    int status = smla_py_find_backend(op, stream);
    if (status == 0 && !stream->is_capturing) {
        status = smla_py_wait(op, stream->backend, stream->at, event);
    }
    Py_DECREF(event);
    return status;
}

int
smla_py_resolve_stream_of(const smla_py_state *state, const char *op, smla_py_array *arrays,
                          int num_arrays, const smla_py_array *home, smla_py_stream *stream)
{
    for (int i = 0; home == NULL && i < num_arrays; i++) {
        const bool is_on_gpu =
            arrays[i].object != NULL && arrays[i].view.device.device_type == kDLCUDA;
        home = is_on_gpu ? &arrays[i] : NULL;
    }
    if (home == NULL) {
        return 0;
    }
    if (stream->at.handle == (void *)-1) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `stream` must be a stream's handle, got -1, which is only DLPack's word "
                     "for no order",
                     op);
        return -1;
    }
    stream->is_cuda = true;
    stream->at.device_id = home->view.device.device_id;
    stream->at.handle = normal_handle(stream->at.handle);
    smla_py_release_pending(state);
    if (follow_producers(state, op, arrays, num_arrays, stream) < 0) {
        return -1;
    }
    for (int i = 0; i < num_arrays; i++) {
        smla_py_array *array = &arrays[i];
        if (array->object == NULL) {
            continue;
        }
        if (array->is_deferred && (smla_py_export_deferred(state, op, stream->at, array) < 0 ||
                                   smla_py_check_writable(op, array) < 0)) {
            return -1;
        }
        if (Py_TYPE(array->object) == state->tensor_type && is_in_place(array, stream) &&
            wait_for_tensor(state, op, array, stream) < 0) {
            return -1;
        }
    }
    return 0;
}
