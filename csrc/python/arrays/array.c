/* array.c: acquires one array of a call, whichever framework made it.
 *
 * The readers are tried from the cheapest to the most general: types whose exchange API is known,
 * NumPy, our Tensor, CuPy, DLPack's exchange API, __dlpack__, the buffer protocol. numpy.c, cupy.c,
 * exchange_api.c and dlpack.c are readers, view.c is common to all readers. stream.c puts the
 * arrays of a call in order, result.c makes new ones.
 */
#include "python/arrays/exchange.h"

#include <stdlib.h>
#include <string.h>

#include "python/arrays/tensor.h"

#define NAME_SLOT(field, text) {&state->field, text},

int
smla_py_init_arrays(smla_py_state *state)
{
    const struct {
        PyObject **slot;
        const char *text;
    } names[] = {SMLA_PY_NAMES(NAME_SLOT)};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        *names[i].slot = PyUnicode_InternFromString(names[i].text);
        if (*names[i].slot == NULL) {
            return -1;
        }
    }
    state->empty_tuple = PyTuple_New(0);
    state->max_version = Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
    if (state->empty_tuple == NULL || state->max_version == NULL) {
        return -1;
    }
    state->dlpack_kwargs = Py_BuildValue("{s:O}", "max_version", state->max_version);
    return state->dlpack_kwargs == NULL ? -1 : smla_py_init_numpy(state);
}

/* ---- Our Tensor and the buffer protocol ---------------------------------------------------- */

static int
read_tensor(const char *op, smla_py_array *array)
{
    const smla_py_tensor *tensor = (const smla_py_tensor *)array->object;
    array->is_read_only = tensor->is_read_only;
    return smla_py_copy_view(op, &tensor->view, array);
}

static bool
read_buffer_format(const Py_buffer *buffer, DLDataType *dtype)
{
    static const struct {
        const char *letters;
        uint8_t code;
    } formats[] = {{"bhilqn", kDLInt}, {"BHILQN", kDLUInt}, {"efd", kDLFloat}, {"?", kDLBool}};
    const char *format = buffer->format == NULL ? "B" : buffer->format;
    if (format[0] == '@' || format[0] == '=' || format[0] == (PY_LITTLE_ENDIAN ? '<' : '>')) {
        format++;
    }
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        if (format[0] != '\0' && format[1] == '\0' && strchr(formats[i].letters, format[0])) {
            *dtype = (DLDataType){formats[i].code, (uint8_t)(8 * buffer->itemsize), 1};
            return true;
        }
    }
    return false;
}

static int
read_buffer(const char *op, smla_py_array *array)
{
    if (!PyObject_CheckBuffer(array->object) || smla_py_is_numpy_scalar(array->object)) {
        return SMLA_PY_NOT_THIS;
    }
    Py_buffer *buffer = &array->owner.buffer;
    if (PyObject_GetBuffer(array->object, buffer, PyBUF_RECORDS_RO) < 0) {
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            PyObject *got = smla_py_type_name(array->object);
            smla_py_raise_from(PyExc_BufferError,
                               "%s: `%s` must give a strided buffer, got a refusal from %V", op,
                               array->name, got, "its type");
            Py_XDECREF(got);
        }
        return -1;
    }
    array->release = SMLA_PY_RELEASE_BUFFER;
    array->is_read_only = buffer->readonly;
    DLDataType dtype;
    if (!read_buffer_format(buffer, &dtype)) {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must have a plain numeric format, got \"%s\"", op,
                     array->name, buffer->format);
        return -1;
    }
    _Static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "sizes are passed as they are");
    return smla_py_set_view(op, buffer->buf, dtype, buffer->ndim, (const int64_t *)buffer->shape,
                            (const int64_t *)buffer->strides, array);
}

/* ---- Acquire and release ------------------------------------------------------------------- */

/* Reads arrays whose type is recognised without looking up an attribute. */
static int
read_by_type(const smla_py_state *state, const char *op, smla_py_array *array)
{
    if (smla_py_is_ndarray(array->object)) {
        return smla_py_read_ndarray(state, op, array);
    }
    if (Py_TYPE(array->object) == state->tensor_type) {
        return read_tensor(op, array);
    }
    if (smla_py_is_cupy(state, array->object)) {
        return smla_py_read_cupy(state, op, array);
    }
    return SMLA_PY_NOT_THIS;
}

static int
read_any(const smla_py_state *state, const char *op, smla_py_role role, smla_py_array *array)
{
    PyObject *const object = array->object;
    const smla_py_exchange *const known = smla_py_look_up_exchange(state->shared, object);
    int status = SMLA_PY_NOT_THIS;
    if (known == NULL || known->api == NULL) {
        status = read_by_type(state, op, array);
    }
    if (status == SMLA_PY_NOT_THIS) {
        status = smla_py_read_exchange_api(state, op, role, known, array);
    }
    if (status == SMLA_PY_NOT_THIS) {
        status = smla_py_find_cupy(state, object);
        if (status == 0) {
            return smla_py_read_cupy(state, op, array);
        }
    }
    if (status == SMLA_PY_NOT_THIS) {
        status = smla_py_read_dlpack(state, op, role, array);
    }
    if (status == SMLA_PY_NOT_THIS) {
        status = read_buffer(op, array);
    }
    if (status == SMLA_PY_NOT_THIS) {
        PyObject *got = smla_py_type_name(object);
        if (got != NULL) {
            const bool is_data =
                PyList_Check(object) || PyTuple_Check(object) || PyNumber_Check(object);
            PyErr_Format(
                PyExc_TypeError,
                "%s: `%s` must be an array that speaks DLPack (or a NumPy array), got %U%s", op,
                array->name, got, is_data ? ": make an array of it" : "");
            Py_DECREF(got);
        }
        return -1;
    }
    return status;
}

static bool
is_written(smla_py_role role)
{
    return role == SMLA_PY_OUTPUT || role == SMLA_PY_INOUT || role == SMLA_PY_RETAINED_OUTPUT;
}

int
smla_py_acquire(const smla_py_state *state, const char *op, const char *name, smla_py_role role,
                PyObject *object, smla_py_array *array)
{
    array->name = name;
    array->object = NULL;
    array->framework = SMLA_PY_UNKNOWN;
    array->importer = NULL;
    array->exchange_api = NULL;
    array->is_read_only = false;
    array->is_new = false;
    array->is_written = is_written(role);
    array->is_deferred = false;
    array->is_foreign = false;
    array->release = SMLA_PY_RELEASE_NOTHING;
    const bool may_be_absent =
        role == SMLA_PY_OPTIONAL || role == SMLA_PY_OUTPUT || role == SMLA_PY_RETAINED_OUTPUT;
    if (object == Py_None && may_be_absent) {
        return 0;
    }
    array->object = Py_NewRef(object);
    int status = read_any(state, op, role, array);
    if (status == 0) {
        status = smla_py_check_writable(op, array);
    }
    if (status < 0) {
        smla_py_release_array(array);
    }
    return status;
}
