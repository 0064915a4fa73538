/* stream.c: the caller's stream, in whichever form it comes. The CPU has no use for it. */
#include "glue.h"

enum { NOT_THERE = 1 }; /* beside 0 = found and -1 = an exception is set */

/* An int, but no bool; OverflowError for one that no pointer holds. */
static int
read_handle(PyObject *object, void **stream)
{
    if (!PyLong_Check(object) || PyBool_Check(object)) {
        return NOT_THERE;
    }
    *stream = PyLong_AsVoidPtr(object);
    return *stream == NULL && PyErr_Occurred() != NULL ? -1 : 0;
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
    int result = NOT_THERE;
    if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
        result = read_handle(PyTuple_GetItem(pair, 1), stream);
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
        {"cuda_stream", read_handle}, /* PyTorch */
        {"ptr", read_handle},         /* CuPy */
    };
    *stream = NULL;
    if (object == Py_None) {
        return 0;
    }
    int result = read_handle(object, stream);
    for (int i = 0; result == NOT_THERE && i < 3; i++) {
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
    if (result == NOT_THERE) {
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
