/* handle.c: reads a stream in any of the forms that callers give, and finds its backend. */
#include "python/arrays/exchange.h"

/* Accepts an int but no bool. OverflowError for an int that does not fit a pointer. */
int
smla_py_read_handle(PyObject *object, void **handle)
{
    if (!PyLong_Check(object) || PyBool_Check(object)) {
        return SMLA_PY_NOT_THIS;
    }
    *handle = PyLong_AsVoidPtr(object);
    return *handle == NULL && PyErr_Occurred() != NULL ? -1 : 0;
}

/* CUDA's stream protocol: a method, or a plain attribute, that gives (version, handle). */
static int
read_protocol(PyObject *attribute, void **stream)
{
    PyObject *pair =
        PyCallable_Check(attribute) ? PyObject_CallNoArgs(attribute) : Py_NewRef(attribute);
    if (pair == NULL) {
        return -1;
    }
    int result = SMLA_PY_NOT_THIS;
    if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
        result = smla_py_read_handle(PyTuple_GetItem(pair, 1), stream);
    }
    Py_DECREF(pair);
    return result;
}

int
smla_py_parse_stream(const char *op, PyObject *object, void **stream)
{
    static const struct {
        const char *name;
        int (*read)(PyObject *, void **);
    } attributes[] = {
        {"__cuda_stream__", read_protocol},
        {"cuda_stream", smla_py_read_handle}, /* PyTorch */
        {"ptr", smla_py_read_handle},         /* CuPy */
    };
    *stream = NULL;
    if (object == Py_None) {
        return 0;
    }
    int result = smla_py_read_handle(object, stream);
    for (int i = 0; result == SMLA_PY_NOT_THIS && i < 3; i++) {
        PyObject *attribute = PyObject_GetAttrString(object, attributes[i].name);
        if (attribute == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
                return -1;
            }
            PyErr_Clear();
            continue;
        }
        result = attributes[i].read(attribute, stream);
        Py_DECREF(attribute);
    }
    if (result == SMLA_PY_NOT_THIS) {
        PyObject *got = smla_py_type_name(object);
        if (got != NULL) {
            PyErr_Format(PyExc_TypeError,
                         "%s: `stream` must be None, an int handle or an object with "
                         "__cuda_stream__, .cuda_stream or .ptr, got %U",
                         op, got);
            Py_DECREF(got);
        }
    }
    if (result == -1 && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: `stream` must be a handle of at most 64 bits, got %R",
                     op, object);
    }
    return result == 0 ? 0 : -1;
}

int
smla_py_find_backend(const char *op, smla_py_stream *stream)
{
    const DLDevice device = {.device_type = kDLCUDA, .device_id = stream->at.device_id};
    const smla_backend *backend = NULL;
    smla_error error;
    if (stream->backend != NULL) {
        return 0;
    }
    if (smla_find_backend(op, device, &backend, &error) != SMLA_OK ||
        backend->streams->is_capturing(op, stream->at, &stream->is_capturing, &error) != SMLA_OK) {
        smla_py_raise(&error);
        return -1;
    }
    stream->backend = backend;
    return 0;
}
