/* dlpack.c: arrays in through DLPack: the C exchange API, then __dlpack__ with either capsule.
 *
 * A capsule is renamed as soon as its name is known, so from there on its deleter is ours to call,
 * once, whatever happens next: smla_py_release_array does it.
 */
#include <string.h>

#include "exchange.h"

int
smla_py_copy_view(const char *op, const char *name, const DLTensor *source, smla_py_array *array)
{
    if (source->ndim < 0 || source->ndim > SMLA_PY_MAX_RANK ||
        (source->ndim > 0 && source->shape == NULL)) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must have at most %d dimensions, got %d", op, name,
                     SMLA_PY_MAX_RANK, (int)source->ndim);
        return -1;
    }
    array->view = *source;
    array->view.shape = array->shape;
    array->view.strides = array->strides;
    int64_t compact = 1;
    for (int i = source->ndim - 1; i >= 0; i--) {
        array->shape[i] = source->shape[i];
        array->strides[i] = source->strides == NULL ? compact : source->strides[i];
        compact *= source->shape[i];
    }
    return 0;
}

/* ---- The exchange API ---------------------------------------------------------------------- */

/* The table of the object's type, of a major version that we know; NULL without an exception where
 * there is none, NULL with one when the look-up failed. */
static const DLPackExchangeAPI *
find_exchange_api(const smla_py_state *state, PyObject *object)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)Py_TYPE(object), state->str_exchange_api);
    if (capsule == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
        }
        return NULL;
    }
    const DLPackExchangeAPIHeader *header = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    }
    Py_DECREF(capsule); /* the table is static: it lives as long as the process */
    while (header != NULL && header->version.major != DLPACK_MAJOR_VERSION) {
        header = header->prev_api;
    }
    return (const DLPackExchangeAPI *)header;
}

/* The exchange API passes tensors that __dlpack__ refuses; refuse them in the same way. */
static int
check_plain(const smla_py_state *state, const char *op, const char *name, PyObject *object,
            const DLTensor *view)
{
    PyObject *flag = PyObject_GetAttr(object, state->str_requires_grad);
    if (flag == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0; /* not PyTorch */
    }
    const bool requires_grad = flag == Py_True;
    Py_DECREF(flag);
    if (requires_grad) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must not require gradients, got a tensor with requires_grad=True: "
                     "pass its .detach()",
                     op, name);
        return -1;
    }
    if (view->dtype.code != kDLFloat) { /* imaginary parts, the carriers of the negative bit */
        return 0;
    }
    flag = PyObject_CallMethodObjArgs(object, state->str_is_neg, NULL);
    const bool is_neg = flag == Py_True;
    Py_XDECREF(flag);
    if (is_neg) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must hold its values as they are, got a tensor with the negative "
                     "bit: pass its .resolve_neg()",
                     op, name);
    }
    return flag == NULL || is_neg ? -1 : 0;
}

/* Lends the tensor for this call, or takes a share of its memory when it is kept for longer. */
static int
borrow(const DLPackExchangeAPI *api, smla_py_role role, PyObject *object, DLTensor *view,
       smla_py_array *array)
{
    const bool is_retained = role == SMLA_PY_RETAINED || role == SMLA_PY_RETAINED_OUTPUT;
    if (!is_retained && api->dltensor_from_py_object_no_sync != NULL) {
        return api->dltensor_from_py_object_no_sync(object, view);
    }
    DLManagedTensorVersioned *managed = NULL;
    const int status = api->managed_tensor_from_py_object_no_sync(object, &managed);
    if (status == 0) {
        array->release = SMLA_PY_RELEASE_VERSIONED;
        array->owner.versioned = managed;
        array->is_read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
        *view = managed->dl_tensor;
    }
    return status;
}

int
smla_py_read_exchange_api(const smla_py_state *state, const char *op, const char *name,
                          smla_py_role role, PyObject *object, smla_py_array *array)
{
    const DLPackExchangeAPI *api = find_exchange_api(state, object);
    if (api == NULL) {
        return PyErr_Occurred() == NULL ? SMLA_PY_NOT_THIS : -1;
    }
    DLTensor view;
    if (borrow(api, role, object, &view, array) != 0) {
        PyErr_Clear(); /* __dlpack__ has the better words */
        return SMLA_PY_NOT_THIS;
    }
    array->framework = SMLA_PY_EXCHANGE;
    array->exchange_api = api;
    if (check_plain(state, op, name, object, &view) < 0) {
        return -1;
    }
    return smla_py_copy_view(op, name, &view, array);
}

/* ---- Frameworks known by name -------------------------------------------------------------- */

static const smla_py_importer importers[] = {
    {"jax", "jaxlib", "jax.dlpack", "from_dlpack", true},
    {"torch", "torch", "torch.utils.dlpack", "from_dlpack", false},
};

static bool
is_in_package(const char *module, const char *package)
{
    const size_t length = strlen(package);
    return strncmp(module, package, length) == 0 &&
           (module[length] == '\0' || module[length] == '.');
}

/* By the module of the object's type. */
static const smla_py_importer *
find_importer(const smla_py_state *state, PyObject *object)
{
    const smla_py_importer *found = NULL;
    PyObject *module = PyObject_GetAttr((PyObject *)Py_TYPE(object), state->str_module);
    const char *text = NULL;
    if (module != NULL && PyUnicode_Check(module)) {
        text = PyUnicode_AsUTF8AndSize(module, NULL);
    }
    for (size_t i = 0; text != NULL && i < sizeof importers / sizeof importers[0]; i++) {
        if (is_in_package(text, importers[i].package) ||
            is_in_package(text, importers[i].package_alt)) {
            found = &importers[i];
            break;
        }
    }
    Py_XDECREF(module);
    PyErr_Clear();
    return found;
}

/* 1 for a tracer: it stands for an array that does not exist yet. */
static int
is_tracer(PyObject *object)
{
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

/* jax: refuse what has no memory or must not be written, and wait for what is still computed. */
static int
prepare_immutable(const smla_py_state *state, const char *op, const char *name, smla_py_role role,
                  PyObject *object)
{
    const int traced = is_tracer(object);
    if (traced < 0) {
        return -1;
    }
    if (traced) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must be a concrete array, got a jax tracer: the call cannot be "
                     "traced; call it outside jax.jit, or through jax.pure_callback",
                     op, name);
        return -1;
    }
    if (role == SMLA_PY_OUTPUT) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must be writable, got a jax array, which is immutable: leave `%s` "
                     "out and use the array that the call returns",
                     op, name, name);
        return -1;
    }
    if (role == SMLA_PY_INOUT || role == SMLA_PY_RETAINED_OUTPUT) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must be writable, got a jax array, which is immutable: keep it in "
                     "a NumPy array",
                     op, name);
        return -1;
    }
    PyObject *ready = PyObject_CallMethodObjArgs(object, state->str_block_until_ready, NULL);
    Py_XDECREF(ready);
    return ready == NULL ? -1 : 0;
}

/* ---- Capsules ------------------------------------------------------------------------------ */

/* From here on the deleter is ours. */
static int
consume(const char *op, const char *name, PyObject *capsule, smla_py_array *array)
{
    const DLTensor *view = NULL;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        array->owner.versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        array->release = SMLA_PY_RELEASE_VERSIONED;
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) {
            array->release = SMLA_PY_RELEASE_NOTHING;
            return -1;
        }
        const DLManagedTensorVersioned *managed = array->owner.versioned;
        if (managed->version.major != DLPACK_MAJOR_VERSION) {
            PyErr_Format(PyExc_BufferError, "%s: `%s` must come by DLPack version %d, got %u.%u",
                         op, name, DLPACK_MAJOR_VERSION, (unsigned)managed->version.major,
                         (unsigned)managed->version.minor);
            return -1;
        }
        array->is_read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
        view = &managed->dl_tensor;
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        array->owner.legacy = PyCapsule_GetPointer(capsule, "dltensor");
        array->release = SMLA_PY_RELEASE_LEGACY;
        if (PyCapsule_SetName(capsule, "used_dltensor") < 0) {
            array->release = SMLA_PY_RELEASE_NOTHING;
            return -1;
        }
        view = &array->owner.legacy->dl_tensor;
    } else {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must give a fresh DLPack capsule from __dlpack__, got %R%s", op,
                     name, capsule,
                     PyCapsule_CheckExact(capsule) ? ", which was consumed before" : "");
        return -1;
    }
    return smla_py_copy_view(op, name, view, array);
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
        PyErr_Clear(); /* a producer from before max_version */
        capsule = PyObject_CallNoArgs(method);
    }
    return capsule;
}

int
smla_py_read_dlpack(const smla_py_state *state, const char *op, const char *name, smla_py_role role,
                    PyObject *object, smla_py_array *array)
{
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
    PyObject *capsule = NULL;
    bool is_ours = false; /* whose exception it is */
    if (array->importer != NULL && array->importer->is_immutable &&
        prepare_immutable(state, op, name, role, object) < 0) {
        is_ours = PyErr_ExceptionMatches(PyExc_BufferError);
    } else {
        capsule = export_capsule(state, method);
    }
    Py_DECREF(method);
    if (capsule == NULL) {
        if (!is_ours && !is_fatal()) {
            PyObject *type = NULL;
            PyObject *value = NULL;
            PyObject *traceback = NULL;
            PyErr_Fetch(&type, &value, &traceback);
            PyObject *text = value == NULL ? NULL : PyObject_Str(value);
            PyErr_Clear();
            PyErr_Restore(type, value, traceback);
            smla_py_raise_from(PyExc_BufferError,
                               "%s: `%s` must be exportable by DLPack, got from its __dlpack__: %V",
                               op, name, text, "an error");
            Py_XDECREF(text);
        }
        return -1;
    }
    const int status = consume(op, name, capsule, array);
    smla_py_drop(capsule);
    return status;
}
