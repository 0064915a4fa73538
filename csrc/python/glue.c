/* glue.c: dtypes, errors and plain options. Arrays are in array.c, streams in handle.c. */
#include "python/glue.h"

#include <stdio.h>
#include <string.h>

#include "core/kv_format.h"

/* ---- Dtypes -------------------------------------------------------------------------------- */

static const smla_py_dtype dtypes[] = {
    {{kDLBfloat, 16, 1}, "bfloat16", NULL}, {{kDLFloat, 32, 1}, "float32", "f"},
    {{kDLInt, 32, 1}, "int32", "i"},        {{kDLFloat8_e4m3fn, 8, 1}, "float8_e4m3fn", NULL},
    {{kDLUInt, 8, 1}, "uint8", "B"},        {{kDLInt, 64, 1}, "int64", "q"},
    {{kDLFloat, 16, 1}, "float16", "e"},    {{kDLFloat, 64, 1}, "float64", "d"},
    {{kDLInt, 8, 1}, "int8", "b"},          {{kDLInt, 16, 1}, "int16", "h"},
    {{kDLUInt, 16, 1}, "uint16", "H"},      {{kDLUInt, 32, 1}, "uint32", "I"},
    {{kDLUInt, 64, 1}, "uint64", "Q"},      {{kDLBool, 8, 1}, "bool", "?"},
};

const smla_py_dtype *
smla_py_find_dtype(DLDataType dtype)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (dtypes[i].dtype.code == dtype.code && dtypes[i].dtype.bits == dtype.bits &&
            dtypes[i].dtype.lanes == dtype.lanes) {
            return &dtypes[i];
        }
    }
    return NULL;
}

const smla_py_dtype *
smla_py_find_dtype_name(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(dtypes[i].name, name) == 0) {
            return &dtypes[i];
        }
    }
    return NULL;
}

/* ---- Errors -------------------------------------------------------------------------------- */

PyObject *
smla_py_raise(const smla_error *error)
{
    static PyObject *const *const exceptions[] = {
        [SMLA_ERROR_TYPE] = &PyExc_TypeError,     [SMLA_ERROR_VALUE] = &PyExc_ValueError,
        [SMLA_ERROR_BUFFER] = &PyExc_BufferError, [SMLA_ERROR_RUNTIME] = &PyExc_RuntimeError,
        [SMLA_ERROR_MEMORY] = &PyExc_MemoryError,
    };
    PyErr_SetString(*exceptions[error->status], error->text);
    return NULL;
}

int
smla_py_check(smla_status status, const smla_error *error)
{
    if (status == SMLA_OK) {
        return 0;
    }
    smla_py_raise(error);
    return -1;
}

void
smla_py_raise_from(PyObject *type, const char *format, ...)
{
    PyObject *cause_type = NULL;
    PyObject *cause = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&cause_type, &cause, &traceback);
    PyErr_NormalizeException(&cause_type, &cause, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(cause, traceback);
    }
    va_list values;
    va_start(values, format);
    PyErr_FormatV(type, format, values);
    va_end(values);
    PyObject *new_type = NULL;
    PyObject *error = NULL;
    PyObject *new_traceback = NULL;
    PyErr_Fetch(&new_type, &error, &new_traceback);
    PyErr_NormalizeException(&new_type, &error, &new_traceback);
    if (error != NULL && cause != NULL) {
        PyException_SetContext(error, Py_NewRef(cause));
        PyException_SetCause(error, Py_NewRef(cause));
    }
    PyErr_Restore(new_type, error, new_traceback);
    Py_XDECREF(cause_type);
    Py_XDECREF(cause);
    Py_XDECREF(traceback);
}

void
smla_py_drop(PyObject *object)
{
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    Py_DECREF(object);
    PyErr_Restore(type, value, traceback);
}

PyObject *
smla_py_type_name(PyObject *object)
{
    return object == Py_None ? PyUnicode_FromString("None") : PyType_GetName(Py_TYPE(object));
}

void
smla_py_put_item(PyObject **tuple, Py_ssize_t i, PyObject *item)
{
    if (item == NULL || PyTuple_SetItem(*tuple, i, item) < 0) { /* steals */
        Py_CLEAR(*tuple);
    }
}

PyObject *
smla_py_int_tuple(const int64_t *values, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++) {
        smla_py_put_item(&tuple, i, PyLong_FromLongLong(values[i]));
    }
    return tuple;
}

int
smla_py_check_count(const char *op, Py_ssize_t num_args, Py_ssize_t wanted)
{
    if (num_args == wanted) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s: takes %zd positional arguments, got %zd", op, wanted,
                 num_args);
    return -1;
}

static int
fail_type(const char *op, const char *name, const char *wanted, PyObject *object)
{
    PyObject *got = smla_py_type_name(object);
    if (got != NULL) {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must be %s, got %U", op, name, wanted, got);
        Py_DECREF(got);
    }
    return -1;
}

/* ---- Options ------------------------------------------------------------------------------- */

int
smla_py_parse_int(const char *op, const char *name, PyObject *object, int64_t *value)
{
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        return fail_type(op, name, "an int", object);
    }
    int overflow = 0;
    *value = PyLong_AsLongLongAndOverflow(index, &overflow);
    if (overflow != 0) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must fit int64, got %S", op, name, index);
    }
    Py_DECREF(index);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

int
smla_py_parse_ints(const char *op, const char *name, PyObject *object, int count, int64_t *values)
{
    PyObject *tuple =
        PyTuple_Check(object) || PyList_Check(object) ? PySequence_Tuple(object) : NULL;
    if (tuple == NULL && PyErr_Occurred() != NULL) {
        return -1;
    }
    if (tuple == NULL || PyTuple_Size(tuple) != count) {
        Py_XDECREF(tuple);
        PyErr_Format(tuple == NULL ? PyExc_TypeError : PyExc_ValueError,
                     "%s: `%s` must be a tuple of %d ints, got %R", op, name, count, object);
        return -1;
    }
    int status = 0;
    for (int i = 0; i < count && status == 0; i++) {
        status = smla_py_parse_int(op, name, PyTuple_GetItem(tuple, i), &values[i]);
    }
    Py_DECREF(tuple);
    return status;
}

int
smla_py_parse_int32(const char *op, const char *name, PyObject *object, int32_t *value)
{
    int64_t wide = 0;
    if (smla_py_parse_int(op, name, object, &wide) < 0) {
        return -1;
    }
    if (wide < INT32_MIN || wide > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must fit int32, got %lld", op, name,
                     (long long)wide);
        return -1;
    }
    *value = (int32_t)wide;
    return 0;
}

int
smla_py_parse_float(const char *op, const char *name, PyObject *object, double *value)
{
    *value = PyFloat_AsDouble(object);
    if (*value == -1.0 && PyErr_Occurred() != NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        return fail_type(op, name, "a float", object);
    }
    return 0;
}

int
smla_py_parse_flag(PyObject *object, bool *value)
{
    const int is_true = PyObject_IsTrue(object);
    *value = is_true > 0;
    return is_true < 0 ? -1 : 0;
}

int
smla_py_parse_least(const char *op, const char *name, PyObject *object, int64_t least,
                    int64_t *value)
{
    if (smla_py_parse_int(op, name, object, value) < 0) {
        return -1;
    }
    if (*value < least) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be at least %lld, got %lld", op, name,
                     (long long)least, (long long)*value);
        return -1;
    }
    return 0;
}

/* 1 or 0, or -1 with an exception set that is not AttributeError. */
static int
has_attribute(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return 0;
    }
    Py_XDECREF(value);
    return value == NULL ? -1 : 1;
}

int
smla_py_is_number(PyObject *object)
{
    if (PyFloat_Check(object) || PyLong_Check(object)) {
        return 1;
    }
    /* Arrays of one value often have __float__, too. */
    const int is_array = has_attribute(object, "__dlpack__");
    return is_array == 0 ? has_attribute(object, "__float__") : is_array < 0 ? -1 : 0;
}

int
smla_py_parse_scale(const char *op, const char *name, PyObject *object, double *value)
{
    if (smla_py_parse_float(op, name, object, value) < 0) {
        return -1;
    }
    if (*value == 0.0) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be a positive normal float32, got 0", op,
                     name);
        return -1;
    }
    return 0;
}

void
smla_py_describe_kv_formats(char text[SMLA_PY_FORMATS_TEXT])
{
    size_t length = (size_t)snprintf(text, SMLA_PY_FORMATS_TEXT, "\"auto\"");
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if (smla_find_kv_format((int32_t)row->format) == row && length < SMLA_PY_FORMATS_TEXT) {
            const bool is_last = i + 1 == SMLA_NUM_KV_FORMATS;
            length += (size_t)snprintf(text + length, SMLA_PY_FORMATS_TEXT - length, "%s\"%s\"",
                                       is_last ? " or " : ", ", row->name);
        }
    }
}

int32_t
smla_py_find_kv_format(const char *text, size_t length)
{
    if (length == strlen("auto") && memcmp(text, "auto", length) == 0) {
        return SMLA_KV_BFLOAT16;
    }
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        const char *name = smla_kv_formats[i].name;
        if (length == strlen(name) && memcmp(text, name, length) == 0) {
            return smla_kv_formats[i].format;
        }
    }
    return SMLA_KV_INFER;
}

const char *
smla_py_scale_layout_name(int32_t layout)
{
    return layout == SMLA_SCALES_FP32 ? "fp32" : "ue8m0x4";
}

int32_t
smla_py_find_scale_layout(const char *text, size_t length)
{
    for (int32_t i = SMLA_SCALES_FP32; i <= SMLA_SCALES_UE8M0X4; i++) {
        const char *const name = smla_py_scale_layout_name(i);
        if (length == strlen(name) && memcmp(text, name, length) == 0) {
            return i;
        }
    }
    return SMLA_SCALES_INFER;
}

bool
smla_py_find_floats(const char *text, size_t length, DLDataType *dtype)
{
    static const struct {
        const char *name;
        DLDataType dtype;
    } known[] = {{"float32", {kDLFloat, 32, 1}}, {"bfloat16", {kDLBfloat, 16, 1}}};
    for (int i = 0; i < 2; i++) {
        if (length == strlen(known[i].name) && memcmp(text, known[i].name, length) == 0) {
            *dtype = known[i].dtype;
            return true;
        }
    }
    return false;
}

int
smla_py_parse_kv_format(const char *op, const char *name, PyObject *object, int32_t *format)
{
    *format = SMLA_KV_INFER;
    if (object == Py_None) {
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        return fail_type(op, name, "None or the name of a cache format", object);
    }
    const char *text = PyUnicode_AsUTF8AndSize(object, NULL);
    if (text == NULL) {
        return -1;
    }
    *format = smla_py_find_kv_format(text, strlen(text));
    if (*format != SMLA_KV_INFER) {
        return 0;
    }
    char names[SMLA_PY_FORMATS_TEXT];
    smla_py_describe_kv_formats(names);
    PyErr_Format(PyExc_ValueError, "%s: `%s` must be %s, got %R", op, name, names, object);
    return -1;
}

static bool
read_device_name(const char *text, DLDevice *device)
{
    if (strcmp(text, "cpu") == 0) {
        *device = (DLDevice){.device_type = kDLCPU, .device_id = 0};
        return true;
    }
    if (strncmp(text, "cuda", 4) != 0) {
        return false;
    }
    *device = (DLDevice){.device_type = kDLCUDA, .device_id = 0};
    if (text[4] == '\0') {
        return true;
    }
    const char *digits = text + 5;
    const size_t num_digits = strspn(digits, "0123456789");
    if (text[4] != ':' || num_digits < 1 || num_digits > 4 || digits[num_digits] != '\0') {
        return false;
    }
    for (size_t i = 0; i < num_digits; i++) {
        device->device_id = device->device_id * 10 + (digits[i] - '0');
    }
    return true;
}

int
smla_py_parse_device(const char *op, const char *name, PyObject *object, DLDevice *device)
{
    int type = 0;
    if (PyTuple_Check(object)) { /* what __dlpack_device__ gives */
        if (!PyArg_ParseTuple(object, "ii", &type, &device->device_id)) {
            PyErr_Clear();
            return fail_type(op, name, "a pair of ints", object);
        }
        device->device_type = (DLDeviceType)type;
        return 0;
    }
    PyObject *text = PyObject_Str(object); /* a torch.device prints as such a name */
    if (text == NULL) {
        return -1;
    }
    const char *bytes = PyUnicode_AsUTF8AndSize(text, NULL);
    const bool is_known = bytes != NULL && read_device_name(bytes, device);
    if (bytes != NULL && !is_known) {
        PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                     "%s: `%s` must be \"cpu\", \"cuda\" or \"cuda:N\", got %R", op, name, object);
    }
    Py_DECREF(text);
    return is_known ? 0 : -1;
}

PyObject *
smla_py_device_name(DLDevice device)
{
    switch (device.device_type) {
    case kDLCPU: return PyUnicode_FromString("cpu");
    case kDLCUDA: return PyUnicode_FromFormat("cuda:%d", (int)device.device_id);
    default:
        return PyUnicode_FromFormat("dlpack:%d:%d", (int)device.device_type, (int)device.device_id);
    }
}
