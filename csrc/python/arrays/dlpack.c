/* dlpack.c: reads arrays through __dlpack__, with either kind of capsule.
 *
 * A producer that tells its current stream exports without ordering; stream.c orders its stream.
 * Any other producer gets the call's stream as an explicit integer: None means the legacy stream to
 * some producers and no order to others. Its export is deferred until the call's stream is known.
 *
 * A capsule is renamed as soon as its name is known. From then on we must call its deleter once,
 * whatever happens next; smla_py_release_array does so.
 */
#include "python/arrays/exchange.h"

/* ---- Frameworks known by name -------------------------------------------------------------- */

static const smla_py_importer importers[] = {
    {.package = "jax",
     .package_alt = "jaxlib",
     .module = "jax.dlpack",
     .function = "from_dlpack",
     .is_immutable = true},
    {.package = "torch", /* versions without the exchange API */
     .package_alt = "torch",
     .module = "torch.utils.dlpack",
     .function = "from_dlpack",
     .stream_module = "torch.cuda",
     .stream_function = "current_stream",
     .stream_attribute = "cuda_stream"},
};

static const smla_py_importer *
find_importer(const smla_py_state *state, PyObject *object)
{
    for (size_t i = 0; i < sizeof importers / sizeof importers[0]; i++) {
        if (smla_py_is_type_in_package(state, object, importers[i].package_alt) ||
            smla_py_is_type_in_package(state, object, importers[i].package)) {
            return &importers[i];
        }
    }
    return NULL;
}

/* 1 for a jax tracer, which stands for an array that does not exist yet. Concrete arrays have a
 * jaxlib type, and looking for that is faster than isinstance of Tracer, an abstract base class. */
static int
is_tracer(const smla_py_state *state, PyObject *object)
{
    if (smla_py_is_type_in_package(state, object, "jaxlib")) {
        return 0;
    }
    PyObject *name = PyUnicode_FromString("jax.core");
    PyObject *module = name == NULL ? NULL : PyImport_GetModule(name);
    PyObject *tracer = module == NULL ? NULL : PyObject_GetAttrString(module, "Tracer");
    int result = 0;
    if (tracer != NULL) {
        result = PyObject_IsInstance(object, tracer);
    } else {
        PyErr_Clear();
    }
    Py_XDECREF(name);
    Py_XDECREF(module);
    Py_XDECREF(tracer);
    return result;
}

/* For jax: refuses tracers and arrays to be written, then waits until `object` is computed. */
static int
prepare_immutable(const smla_py_state *state, const char *op, smla_py_role role,
                  const smla_py_array *array)
{
    const int traced = is_tracer(state, array->object);
    if (traced < 0) {
        return -1;
    }
    if (traced) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must be a concrete array, got a jax tracer: inside jax.jit call "
                     "sparse_mla.integrations.jax, else call it outside",
                     op, array->name);
        return -1;
    }
    if (role == SMLA_PY_OUTPUT) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must be writable, got a jax array, which is immutable: leave `%s` "
                     "out and use the array that the call returns",
                     op, array->name, array->name);
        return -1;
    }
    if (role == SMLA_PY_INOUT || role == SMLA_PY_RETAINED_OUTPUT) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must be writable, got a jax array, which is immutable: keep it in "
                     "a NumPy array",
                     op, array->name);
        return -1;
    }
    PyObject *ready = PyObject_CallMethodObjArgs(array->object, state->str_block_until_ready, NULL);
    Py_XDECREF(ready);
    return ready == NULL ? -1 : 0;
}

/* ---- Capsules ------------------------------------------------------------------------------ */

/* Takes a capsule over: from here on we call its deleter. */
static int
consume(const char *op, PyObject *capsule, smla_py_array *array)
{
    const bool is_versioned = PyCapsule_IsValid(capsule, "dltensor_versioned");
    if (is_versioned) {
        array->owner.versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        array->owner.legacy = PyCapsule_GetPointer(capsule, "dltensor");
    } else {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must give a fresh DLPack capsule from __dlpack__, got %R%s", op,
                     array->name, capsule,
                     PyCapsule_CheckExact(capsule) ? ", which was consumed before" : "");
        return -1;
    }
    const char *const name = is_versioned ? "used_dltensor_versioned" : "used_dltensor";
    if (PyCapsule_SetName(capsule, name) < 0) {
        return -1;
    }
    array->release = is_versioned ? SMLA_PY_RELEASE_VERSIONED : SMLA_PY_RELEASE_LEGACY;
    if (!is_versioned) {
        return smla_py_copy_view(op, &array->owner.legacy->dl_tensor, array);
    }
    const DLManagedTensorVersioned *managed = array->owner.versioned;
    if (managed->version.major != DLPACK_MAJOR_VERSION) {
        PyErr_Format(PyExc_BufferError, "%s: `%s` must come by DLPack version %d, got %u.%u", op,
                     array->name, DLPACK_MAJOR_VERSION, (unsigned)managed->version.major,
                     (unsigned)managed->version.minor);
        return -1;
    }
    array->is_read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
    return smla_py_copy_view(op, &managed->dl_tensor, array);
}

static bool
is_fatal(void)
{
    return !PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError);
}

static PyObject *
export_capsule(const smla_py_state *state, PyObject *method)
{
    PyObject *capsule = PyObject_Call(method, state->empty_tuple, state->dlpack_kwargs);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear(); /* an older producer, which does not know max_version */
        capsule = PyObject_CallNoArgs(method);
    }
    return capsule;
}

/* Calls what jax's __dlpack__ calls for an array on one device, without its microseconds of Python.
 * NULL if jaxlib no longer has it or it fails; __dlpack__ then words the error. */
static PyObject *
export_from_jaxlib(const smla_py_state *state, PyObject *object)
{
    PyObject *sharding = PyObject_GetAttr(object, state->str_sharding);
    PyObject *devices = sharding == NULL ? NULL : PyObject_GetAttr(sharding, state->str_device_set);
    const bool is_single = devices != NULL && PyObject_Size(devices) == 1;
    PyObject *module = is_single ? PyImport_GetModule(state->str_jaxlib) : NULL;
    PyObject *function = module == NULL ? NULL : PyObject_GetAttr(module, state->str_jaxlib_export);
    PyObject *capsule =
        function == NULL ? NULL : PyObject_CallFunctionObjArgs(function, object, NULL);
    Py_XDECREF(sharding);
    Py_XDECREF(devices);
    Py_XDECREF(module);
    Py_XDECREF(function);
    if (capsule == NULL && PyErr_Occurred() != NULL && !is_fatal()) {
        PyErr_Clear();
    }
    return capsule;
}

static PyObject *
export_immutable(const smla_py_state *state, PyObject *object, PyObject *method)
{
    PyObject *capsule = export_from_jaxlib(state, object);
    return capsule != NULL || PyErr_Occurred() != NULL ? capsule : export_capsule(state, method);
}

/* `number` is DLPack's: -1 = no order, 1 = the legacy default stream, 2 = the default stream of the
 * thread, else a handle. */
static PyObject *
export_for_stream(const smla_py_state *state, PyObject *method, PyObject *number)
{
    PyObject *kwargs =
        Py_BuildValue("{s:O,s:O}", "stream", number, "max_version", state->max_version);
    PyObject *capsule = kwargs == NULL ? NULL : PyObject_Call(method, state->empty_tuple, kwargs);
    if (capsule == NULL && kwargs != NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear(); /* an older producer: drop max_version, but never the stream */
        if (PyDict_DelItemString(kwargs, "max_version") == 0) {
            capsule = PyObject_Call(method, state->empty_tuple, kwargs);
        }
    }
    Py_XDECREF(kwargs);
    return capsule;
}

/* Raises the producer's error text as a BufferError about the argument. */
static void
raise_export_error(const char *op, const smla_py_array *array)
{
    const smla_py_importer *const importer = array->importer;
    const bool is_torch = importer != NULL && !importer->is_immutable;
    PyObject *type = NULL;
    PyObject *value = NULL;
    PyObject *traceback = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    smla_py_raise_from(PyExc_BufferError,
                       "%s: `%s` must be exportable by DLPack, got from its __dlpack__: %V%s", op,
                       array->name, text, "an error", is_torch ? SMLA_PY_TORCH_HINT : "");
    Py_XDECREF(text);
}

/* Takes over what __dlpack__ returned: a capsule, or NULL with an exception set. */
static int
finish_export(const char *op, PyObject *capsule, smla_py_array *array)
{
    if (capsule == NULL) {
        if (!is_fatal()) {
            raise_export_error(op, array);
        }
        return -1;
    }
    const int status = consume(op, capsule, array);
    smla_py_drop(capsule);
    return status;
}

int
smla_py_export_deferred(const smla_py_state *state, const char *op, smla_stream stream,
                        smla_py_array *array)
{
    PyObject *method = PyObject_GetAttr(array->object, state->str_dlpack);
    /* -1 is "no order", for an array on another device than the stream. */
    PyObject *number = array->view.device.device_id != stream.device_id
                           ? PyLong_FromLong(-1)
                           : PyLong_FromVoidPtr(stream.handle == NULL ? (void *)1 : stream.handle);
    PyObject *capsule =
        method == NULL || number == NULL ? NULL : export_for_stream(state, method, number);
    Py_XDECREF(method);
    Py_XDECREF(number);
    array->is_deferred = false;
    return finish_export(op, capsule, array);
}

/* 1 and the device for an array in CUDA memory, 0 for all others, -1 with an exception. A malformed
 * __dlpack_device__ counts as 0, because __dlpack__ words the error better. */
static int
is_on_cuda(const smla_py_state *state, PyObject *object, DLDevice *device)
{
    PyObject *pair = PyObject_CallMethodObjArgs(object, state->str_dlpack_device, NULL);
    int type = 0;
    int id = 0;
    const bool is_read =
        pair != NULL && PyTuple_Check(pair) && PyArg_ParseTuple(pair, "ii", &type, &id);
    Py_XDECREF(pair);
    if (!is_read && PyErr_Occurred() != NULL) {
        if (is_fatal()) {
            return -1;
        }
        PyErr_Clear();
    }
    *device = (DLDevice){.device_type = (DLDeviceType)type, .device_id = id};
    return is_read && type == kDLCUDA;
}

/* Exports an array of a framework whose arrays are mutable, at once or deferred. */
static int
export_mutable(const smla_py_state *state, const char *op, PyObject *method, smla_py_array *array)
{
    DLDevice device;
    const int on_cuda = is_on_cuda(state, array->object, &device);
    if (on_cuda < 0) {
        return -1;
    }
    if (!on_cuda) {
        return finish_export(op, export_capsule(state, method), array);
    }
    if (array->importer == NULL || array->importer->stream_module == NULL) {
        array->is_deferred = true;
        array->view = (DLTensor){.device = device, .shape = array->shape};
        return 0;
    }
    PyObject *no_order = PyLong_FromLong(-1);
    PyObject *capsule = no_order == NULL ? NULL : export_for_stream(state, method, no_order);
    Py_XDECREF(no_order);
    return finish_export(op, capsule, array);
}

int
smla_py_read_dlpack(const smla_py_state *state, const char *op, smla_py_role role,
                    smla_py_array *array)
{
    PyObject *const object = array->object;
    PyObject *method = PyObject_GetAttr(object, state->str_dlpack);
    if (method == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return SMLA_PY_NOT_THIS;
    }
    array->importer = find_importer(state, object);
    array->framework = array->importer == NULL ? SMLA_PY_UNKNOWN : SMLA_PY_IMPORTER;
    int status = -1;
    const bool is_torch = array->importer != NULL && !array->importer->is_immutable;
    if (is_torch && smla_py_check_sign(state, op, array) < 0) {
        Py_DECREF(method);
        return -1;
    }
    if (array->importer == NULL || is_torch) {
        status = export_mutable(state, op, method, array);
    } else if (prepare_immutable(state, op, role, array) == 0) {
        status = finish_export(op, export_immutable(state, object, method), array);
    } else if (!PyErr_ExceptionMatches(PyExc_BufferError) && !is_fatal()) {
        raise_export_error(op, array);
    }
    Py_DECREF(method);
    return status;
}
