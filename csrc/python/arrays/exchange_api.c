/* exchange_api.c: reads arrays through DLPack's exchange API, a table of C functions that the type
 * of a producer's arrays carries. Exports through it run no Python code.
 */
#include <stdlib.h>
#include <string.h>

#include "python/arrays/exchange.h"

/* ---- The exchange API ---------------------------------------------------------------------- */

static void
clear_exchange(smla_py_exchange *known)
{
    if (known != NULL) {
        Py_DECREF((PyObject *)known->type);
        Py_XDECREF(known->requires_grad);
        free(known);
    }
}

void
smla_py_clear_exchanges(smla_py_shared *shared)
{
    for (int i = 0; i < SMLA_PY_EXCHANGES; i++) {
        clear_exchange(atomic_exchange(&shared->exchanges[i], NULL));
    }
}

/* A descriptor with a setter takes precedence over an attribute of the object itself. Calling its
 * __get__ therefore replaces the look-up and takes a third of the time. A type with its own
 * tp_getattro is excepted. */
static void
find_requires_grad(const smla_py_state *state, smla_py_exchange *met)
{
    PyObject *found = PyObject_GetAttr((PyObject *)met->type, state->str_requires_grad);
    if (found == NULL) {
        PyErr_Clear();
        return;
    }
    if (PyType_GetSlot(met->type, Py_tp_getattro) == (void *)PyObject_GenericGetAttr &&
        PyType_GetSlot(Py_TYPE(found), Py_tp_descr_set) != NULL) {
        met->ask = (descrgetfunc)PyType_GetSlot(Py_TYPE(found), Py_tp_descr_get);
        met->requires_grad = Py_NewRef(found);
    }
    Py_DECREF(found);
}

/* Types of other packages may keep the bit elsewhere, so their objects are asked. */
static void
find_has_sign(const smla_py_state *state, smla_py_exchange *met)
{
    PyObject *method = PyObject_GetAttr((PyObject *)met->type, state->str_is_neg);
    met->has_sign = method != NULL;
    Py_XDECREF(method);
    PyErr_Clear();
    if (met->has_sign && met->is_always_writable && met->api != NULL) {
        met->sign = smla_py_find_sign(state, met->api);
    }
}

static PyObject *
ask_requires_grad(const smla_py_state *state, const smla_py_exchange *known, PyObject *object)
{
    return known != NULL && known->ask != NULL
               ? known->ask(known->requires_grad, object, (PyObject *)known->type)
               : PyObject_GetAttr(object, state->str_requires_grad);
}

static void
refuse_traced(const char *op, const smla_py_array *array)
{
    PyObject *got = smla_py_type_name(array->object);
    PyErr_Format(PyExc_BufferError,
                 "%s: `%s` must have values, got a %V of a traced program" SMLA_PY_TORCH_HINT, op,
                 array->name, got, "tensor");
    Py_XDECREF(got);
}

/* Remembers a type, unless another thread was first. Without memory or a free place, the type is
 * looked up again the next time. */
static void
remember_exchange(const smla_py_state *state, PyObject *object, const DLPackExchangeAPI *api)
{
    PyTypeObject *type = Py_TYPE(object);
    smla_py_exchange *met = malloc(sizeof *met);
    if (met == NULL) {
        return;
    }
    *met = (smla_py_exchange){.type = type,
                              .api = api,
                              .is_always_writable =
                                  smla_py_is_type_in_package(state, object, "torch")};
    find_requires_grad(state, met);
    find_has_sign(state, met);
    Py_INCREF((PyObject *)type); /* before other threads see `met` */
    for (int i = 0; i < SMLA_PY_EXCHANGES; i++) {
        smla_py_exchange *known = NULL;
        if (atomic_compare_exchange_strong(&state->shared->exchanges[i], &known, met)) {
            return;
        }
        if (known->type == type) {
            break;
        }
    }
    clear_exchange(met);
}

/* The exchange API of a type that is not known yet, in the major version that we know. NULL without
 * an exception if there is none, NULL with an exception if the look-up failed. Types that stand for
 * tensors without values are refused before their export, because PyTorch would print a warning
 * about it. They are never remembered. */
static const DLPackExchangeAPI *
find_exchange_api(const smla_py_state *state, const char *op, const smla_py_array *array)
{
    PyObject *const object = array->object;
    if (smla_py_is_type_in_package(state, object, "torch._subclasses") ||
        smla_py_is_type_in_package(state, object, "torch.fx")) {
        refuse_traced(op, array);
        return NULL;
    }
    PyObject *capsule = PyObject_GetAttr((PyObject *)Py_TYPE(object), state->str_exchange_api);
    if (capsule == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            if (smla_py_is_type_in_package(state, object, "jaxlib")) {
                remember_exchange(state, object, NULL);
            }
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
    if (header != NULL) {
        remember_exchange(state, object, (const DLPackExchangeAPI *)header);
    }
    return (const DLPackExchangeAPI *)header;
}

/* Refuses a tensor whose gradient would be lost. Integers have none. */
static int
check_gradient(const smla_py_state *state, const char *op, const smla_py_exchange *known,
               const smla_py_array *array, const DLTensor *view)
{
    if (view->dtype.code == kDLInt || view->dtype.code == kDLUInt) {
        return 0;
    }
    PyObject *flag = ask_requires_grad(state, known, array->object);
    if (flag == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0; /* not PyTorch */
    }
    const bool requires_grad = flag == Py_True;
    Py_DECREF(flag);
    if (requires_grad && smla_py_records_gradients(state)) {
        PyErr_Format(PyExc_BufferError,
                     "%s: `%s` must not require gradients, got a tensor with requires_grad=True: "
                     "call under torch.no_grad(), or pass its .detach()",
                     op, array->name);
        return -1;
    }
    return 0;
}

/* Refuses tensors that __dlpack__ refuses but the exchange API passes. */
static int
check_plain(const smla_py_state *state, const char *op, const smla_py_exchange *known,
            const smla_py_array *array, const DLTensor *view)
{
    if (check_gradient(state, op, known, array, view) < 0) {
        return -1;
    }
    if (known != NULL && !known->has_sign) {
        return 0;
    }
    const bool is_borrowed = array->release == SMLA_PY_RELEASE_NOTHING;
    const int sign =
        known != NULL && is_borrowed ? smla_py_see_sign(&known->sign, view) : SMLA_PY_UNSEEN;
    return sign == SMLA_PY_UNSEEN ? smla_py_check_sign(state, op, array)
           : sign != 0            ? smla_py_refuse_sign(op, array)
                                  : 0;
}

/* Whether it is enough to borrow the tensor for this call, without a share of its memory. */
static bool
may_lend(const smla_py_state *state, smla_py_role role, const smla_py_exchange *known,
         PyObject *object)
{
    if (role == SMLA_PY_RETAINED || role == SMLA_PY_RETAINED_OUTPUT) {
        return false;
    }
    if (role != SMLA_PY_OUTPUT && role != SMLA_PY_INOUT) {
        return true;
    }
    return known != NULL ? known->is_always_writable
                         : smla_py_is_type_in_package(state, object, "torch");
}

/* Borrows the tensor for this call. Takes a share of its memory instead if the tensor is kept for
 * longer, or is written and may be read-only, because a borrowed DLTensor has no such flag. */
static int
borrow(const smla_py_state *state, const DLPackExchangeAPI *api, smla_py_role role,
       const smla_py_exchange *known, DLTensor *view, smla_py_array *array)
{
    if (may_lend(state, role, known, array->object) &&
        api->dltensor_from_py_object_no_sync != NULL) {
        return api->dltensor_from_py_object_no_sync(array->object, view);
    }
    DLManagedTensorVersioned *managed = NULL;
    const int status = api->managed_tensor_from_py_object_no_sync(array->object, &managed);
    if (status == 0) {
        array->release = SMLA_PY_RELEASE_VERSIONED;
        array->owner.versioned = managed;
        array->is_read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
        *view = managed->dl_tensor;
    }
    return status;
}

static bool
has_elements(const DLTensor *view)
{
    bool has = true;
    for (int i = 0; i < view->ndim; i++) {
        has = has && view->shape[i] != 0;
    }
    return has;
}

int
smla_py_read_exchange_api(const smla_py_state *state, const char *op, smla_py_role role,
                          const smla_py_exchange *known, smla_py_array *array)
{
    const DLPackExchangeAPI *api = known != NULL ? known->api : find_exchange_api(state, op, array);
    if (api == NULL) {
        return PyErr_Occurred() == NULL ? SMLA_PY_NOT_THIS : -1;
    }
    DLTensor view;
    if (borrow(state, api, role, known, &view, array) != 0) {
        PyErr_Clear(); /* __dlpack__ words the error better */
        return SMLA_PY_NOT_THIS;
    }
    array->framework = SMLA_PY_EXCHANGE;
    array->exchange_api = api;
    if (view.data == NULL && has_elements(&view) &&
        smla_py_is_type_in_package(state, array->object, "torch")) {
        refuse_traced(op, array); /* a wrapper of torch.func */
        return -1;
    }
    if (check_plain(state, op, known, array, &view) < 0) {
        return -1;
    }
    return smla_py_copy_view(op, &view, array);
}
