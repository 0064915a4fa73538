/* view.c: what all readers of arrays share: a producer's memory as a DLTensor, and its release. */
#include <string.h>

#include "python/arrays/exchange.h"

/* ---- Views ---------------------------------------------------------------------------------- */

int
smla_py_set_view(const char *op, void *data, DLDataType dtype, int ndim, const int64_t *shape,
                 const int64_t *strides_bytes, smla_py_array *array)
{
    if (ndim > SMLA_PY_MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must have at most %d dimensions, got %d", op,
                     array->name, SMLA_PY_MAX_RANK, ndim);
        return -1;
    }
    array->view = (DLTensor){.data = data,
                             .device = {.device_type = kDLCPU, .device_id = 0},
                             .ndim = ndim,
                             .dtype = dtype,
                             .shape = array->shape,
                             .strides = array->strides};
    const int64_t element_bytes = smla_element_bytes(&array->view);
    int64_t compact = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        array->shape[i] = shape[i];
        array->strides[i] = strides_bytes == NULL ? compact : strides_bytes[i] / element_bytes;
        compact *= shape[i];
    }
    for (int i = 0; compact != 0 && strides_bytes != NULL && i < ndim; i++) {
        if (shape[i] > 1 && strides_bytes[i] % element_bytes != 0) {
            PyErr_Format(PyExc_ValueError,
                         "%s: `%s` must have strides in multiples of its %lld-byte elements, got "
                         "%lld bytes in dimension %d",
                         op, array->name, (long long)element_bytes, (long long)strides_bytes[i], i);
            return -1;
        }
    }
    return 0;
}

int
smla_py_copy_view(const char *op, const DLTensor *source, smla_py_array *array)
{
    if (source->ndim < 0 || source->ndim > SMLA_PY_MAX_RANK ||
        (source->ndim > 0 && source->shape == NULL)) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must have at most %d dimensions, got %d", op,
                     array->name, SMLA_PY_MAX_RANK, (int)source->ndim);
        return -1;
    }
    array->view = *source;
    array->view.shape = array->shape;
    array->view.strides = array->strides;
    if (source->strides != NULL) {
        for (int i = 0; i < source->ndim; i++) {
            array->shape[i] = source->shape[i];
            array->strides[i] = source->strides[i];
        }
        return 0;
    }
    int64_t compact = 1;
    for (int i = source->ndim - 1; i >= 0; i--) {
        array->shape[i] = source->shape[i];
        array->strides[i] = compact;
        compact *= source->shape[i];
    }
    return 0;
}

/* ---- Producers by the name of their package ------------------------------------------------- */

static bool
is_in_package(const char *module, const char *package)
{
    const size_t length = strlen(package);
    return strncmp(module, package, length) == 0 &&
           (module[length] == '\0' || module[length] == '.');
}

bool
smla_py_is_type_in_package(const smla_py_state *state, PyObject *object, const char *package)
{
    PyObject *module = PyObject_GetAttr((PyObject *)Py_TYPE(object), state->str_module);
    const char *text = NULL;
    if (module != NULL && PyUnicode_Check(module)) {
        text = PyUnicode_AsUTF8AndSize(module, NULL);
    }
    const bool result = text != NULL && is_in_package(text, package);
    Py_XDECREF(module);
    PyErr_Clear();
    return result;
}

bool
smla_py_records_gradients(const smla_py_state *state)
{
    PyObject *torch = PyImport_GetModule(state->str_torch);
    PyObject *flag =
        torch == NULL ? NULL : PyObject_CallMethodObjArgs(torch, state->str_is_grad_enabled, NULL);
    const bool records = flag != Py_False;
    Py_XDECREF(torch);
    Py_XDECREF(flag);
    PyErr_Clear();
    return records;
}

/* ---- Check and release ---------------------------------------------------------------------- */

int
smla_py_check_writable(const char *op, const smla_py_array *array)
{
    if (!array->is_read_only || !array->is_written) {
        return 0;
    }
    PyObject *got = smla_py_type_name(array->object);
    PyErr_Format(PyExc_BufferError, "%s: `%s` must be writable, got a read-only %V", op,
                 array->name, got, "array");
    Py_XDECREF(got);
    return -1;
}

void
smla_py_release_array(smla_py_array *array)
{
    if (array->object == NULL) {
        return;
    }
    if (array->release == SMLA_PY_RELEASE_NOTHING) {
        Py_CLEAR(array->object);
        return;
    }
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    const bool is_failing = PyErr_Occurred() != NULL;
    if (is_failing) { /* deleters may run Python code */
        PyErr_Fetch(&type, &value, &traceback);
    }
    switch (array->release) {
    case SMLA_PY_RELEASE_LEGACY:
        if (array->owner.legacy->deleter != NULL) {
            array->owner.legacy->deleter(array->owner.legacy);
        }
        break;
    case SMLA_PY_RELEASE_VERSIONED:
        if (array->owner.versioned->deleter != NULL) {
            array->owner.versioned->deleter(array->owner.versioned);
        }
        break;
    case SMLA_PY_RELEASE_BUFFER: PyBuffer_Release(&array->owner.buffer); break;
    case SMLA_PY_RELEASE_NOTHING: break;
    }
    array->release = SMLA_PY_RELEASE_NOTHING;
    Py_CLEAR(array->object);
    if (is_failing) {
        PyErr_Restore(type, value, traceback);
    }
}
