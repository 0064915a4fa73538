/* cupy.c: CuPy's arrays, its current stream and its allocator.
 *
 * CuPy has no exchange API, and its __dlpack__ asks the driver about the pointer each time. Reading
 * five attributes of an array gives the same facts in a fifth of the time. CuPy is never imported:
 * what we use of it is looked up when the first CuPy array comes, and kept.
 */
#include <stdlib.h>

#include "python/arrays/exchange.h"

/* What we use of CuPy. It never changes once smla_py_shared points to it. */
typedef struct smla_py_cupy {
    PyObject *type;               /* cupy.ndarray */
    PyObject *empty;              /* cupy.empty */
    PyObject *device;             /* cupy.cuda.Device */
    PyObject *get_current_stream; /* cupy.cuda.get_current_stream */
} smla_py_cupy;

static void
free_cupy(smla_py_cupy *cupy)
{
    if (cupy != NULL) {
        Py_XDECREF(cupy->type);
        Py_XDECREF(cupy->empty);
        Py_XDECREF(cupy->device);
        Py_XDECREF(cupy->get_current_stream);
        free(cupy);
    }
}

void
smla_py_clear_cupy(smla_py_shared *shared)
{
    free_cupy(atomic_exchange(&shared->cupy, NULL));
}

/* NULL, with or without an exception set, if any of the objects is missing. */
static smla_py_cupy *
look_up_cupy(PyObject *module)
{
    PyObject *cuda = PyObject_GetAttrString(module, "cuda");
    smla_py_cupy *cupy = cuda == NULL ? NULL : calloc(1, sizeof *cupy);
    bool is_whole = cupy != NULL;
    if (cupy != NULL) {
        const struct {
            PyObject **slot;
            PyObject *owner;
            const char *name;
        } names[] = {
            {&cupy->type, module, "ndarray"},
            {&cupy->empty, module, "empty"},
            {&cupy->device, cuda, "Device"},
            {&cupy->get_current_stream, cuda, "get_current_stream"},
        };
        for (size_t i = 0; is_whole && i < sizeof names / sizeof names[0]; i++) {
            *names[i].slot = PyObject_GetAttrString(names[i].owner, names[i].name);
            is_whole = *names[i].slot != NULL; /* stop: a next look-up may clear the exception */
        }
    }
    Py_XDECREF(cuda);
    if (!is_whole) {
        free_cupy(cupy);
        return NULL;
    }
    return cupy;
}

bool
smla_py_is_cupy(const smla_py_state *state, PyObject *object)
{
    const smla_py_cupy *cupy = atomic_load_explicit(&state->shared->cupy, memory_order_acquire);
    return cupy != NULL && (PyObject *)Py_TYPE(object) == cupy->type;
}

int
smla_py_find_cupy(const smla_py_state *state, PyObject *object)
{
    PyObject *name = PyObject_GetAttr((PyObject *)Py_TYPE(object), state->str_module);
    PyObject *module = NULL;
    if (name != NULL && PyUnicode_Check(name) &&
        PyUnicode_CompareWithASCIIString(name, "cupy") == 0) {
        module = PyImport_GetModule(name);
    }
    Py_XDECREF(name);
    smla_py_cupy *cupy = module == NULL ? NULL : look_up_cupy(module);
    Py_XDECREF(module);
    PyErr_Clear(); /* __dlpack__ may still be able to read the object */
    if (cupy == NULL) {
        return SMLA_PY_NOT_THIS;
    }
    smla_py_cupy *none = NULL;
    if (!atomic_compare_exchange_strong(&state->shared->cupy, &none, cupy)) {
        free_cupy(cupy); /* another thread was first, or this is another type of the package */
    }
    return smla_py_is_cupy(state, object) ? 0 : SMLA_PY_NOT_THIS;
}

/* ---- In ------------------------------------------------------------------------------------ */

static int
read_ints(PyObject *tuple, int count, int64_t *values)
{
    for (int i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    }
    return PyErr_Occurred() == NULL ? 0 : -1;
}

static int
read_memory(const smla_py_state *state, PyObject *object, void **data, DLDevice *device)
{
    PyObject *memory = PyObject_GetAttr(object, state->str_data);
    PyObject *address = memory == NULL ? NULL : PyObject_GetAttr(memory, state->str_ptr);
    PyObject *device_id = address == NULL ? NULL : PyObject_GetAttr(memory, state->str_device_id);
    if (device_id != NULL) {
        *data = PyLong_AsVoidPtr(address);
        *device =
            (DLDevice){.device_type = kDLCUDA, .device_id = (int32_t)PyLong_AsLong(device_id)};
    }
    Py_XDECREF(memory);
    Py_XDECREF(address);
    Py_XDECREF(device_id);
    return PyErr_Occurred() == NULL ? 0 : -1;
}

int
smla_py_read_cupy(const smla_py_state *state, const char *op, smla_py_array *array)
{
    PyObject *const object = array->object;
    void *data = NULL;
    DLDevice device;
    DLDataType dtype;
    int64_t sizes[SMLA_PY_MAX_RANK];
    int64_t strides_bytes[SMLA_PY_MAX_RANK];
    PyObject *descr = PyObject_GetAttr(object, state->str_dtype);
    PyObject *shape = descr == NULL ? NULL : PyObject_GetAttr(object, state->str_shape);
    PyObject *strides = shape == NULL ? NULL : PyObject_GetAttr(object, state->str_strides);
    int status = -1;
    if (strides != NULL && smla_py_read_descr(state, op, array->name, descr, &dtype) == 0 &&
        read_memory(state, object, &data, &device) == 0) {
        const int ndim = (int)PyTuple_Size(shape);
        const int num_read = ndim < SMLA_PY_MAX_RANK ? ndim : SMLA_PY_MAX_RANK;
        if (read_ints(shape, num_read, sizes) == 0 &&
            read_ints(strides, num_read, strides_bytes) == 0) {
            status = smla_py_set_view(op, data, dtype, ndim, sizes, strides_bytes, array);
        }
    }
    Py_XDECREF(descr);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    if (status == 0) {
        array->framework = SMLA_PY_CUPY;
        array->view.device = device;
    }
    return status;
}

int
smla_py_cupy_stream(const smla_py_state *state, int32_t device_id, void **handle)
{
    const smla_py_cupy *cupy = atomic_load_explicit(&state->shared->cupy, memory_order_acquire);
    PyObject *id = PyLong_FromLong(device_id);
    PyObject *stream =
        id == NULL ? NULL : PyObject_CallFunctionObjArgs(cupy->get_current_stream, id, NULL);
    PyObject *number = stream == NULL ? NULL : PyObject_GetAttr(stream, state->str_ptr);
    const int status = number == NULL ? -1 : smla_py_read_handle(number, handle);
    Py_XDECREF(id);
    Py_XDECREF(stream);
    Py_XDECREF(number);
    return status;
}

/* ---- Out ----------------------------------------------------------------------------------- */

static PyObject *
call_empty(const smla_py_state *state, const smla_py_cupy *cupy, const smla_py_array *array)
{
    PyObject *shape = smla_py_int_tuple(array->shape, array->view.ndim);
    PyObject *descr = shape == NULL ? NULL : smla_py_new_descr(state, array->view.dtype);
    PyObject *made =
        descr == NULL ? NULL : PyObject_CallFunctionObjArgs(cupy->empty, shape, descr, NULL);
    Py_XDECREF(shape);
    Py_XDECREF(descr);
    return made;
}

/* Calls cupy.empty with another current device, as inside `with cupy.cuda.Device(device_id):`. */
static PyObject *
call_empty_on(const smla_py_state *state, const smla_py_cupy *cupy, const smla_py_array *array,
              int32_t device_id)
{
    PyObject *device = PyObject_CallFunction(cupy->device, "i", (int)device_id);
    PyObject *entered = device == NULL ? NULL : PyObject_CallMethod(device, "__enter__", NULL);
    PyObject *made = NULL;
    if (entered != NULL) {
        made = call_empty(state, cupy, array);
        PyObject *type = NULL;
        PyObject *value = NULL;
        PyObject *traceback = NULL;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *left = PyObject_CallMethod(device, "__exit__", "OOO", Py_None, Py_None, Py_None);
        if (left == NULL) {
            Py_CLEAR(made);
        }
        Py_XDECREF(left);
        if (type != NULL) { /* the first error counts */
            PyErr_Restore(type, value, traceback);
        }
    }
    Py_XDECREF(entered);
    Py_XDECREF(device);
    return made;
}

/* CuPy allocates on its current device, which is nearly always the device of the call's arrays.
 * Checking the new array's device costs less than asking for the current device first. */
int
smla_py_new_cupy(const smla_py_state *state, const char *op, smla_py_array *array)
{
    const smla_py_cupy *cupy = atomic_load_explicit(&state->shared->cupy, memory_order_acquire);
    const int32_t device_id = array->view.device.device_id;
    if (array->view.dtype.code == kDLFloat8_e4m3fn) { /* CuPy lacks e4m3: use uint8 */
        array->view.dtype = (DLDataType){kDLUInt, 8, 1};
    }
    array->object = call_empty(state, cupy, array);
    if (array->object == NULL || smla_py_read_cupy(state, op, array) < 0) {
        return -1;
    }
    if (array->view.device.device_id == device_id) {
        return 0;
    }
    Py_CLEAR(array->object);
    array->object = call_empty_on(state, cupy, array, device_id);
    return array->object == NULL ? -1 : smla_py_read_cupy(state, op, array);
}
