/* operator.c: the type of the operators that sparse_mla/ops/ declares and Python calls.
 *
 * A declaration is a Python function with names, defaults, a docstring and an empty body. An
 * operator binds arguments as the declaration would, and passes them to C in the order of its
 * table. The interpreter takes twice as long, because it fills in one by one the keywords that a
 * call leaves out: a dozen for attention. A call that does not fit is passed to the declaration, so
 * that the interpreter raises its own error.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "python/call/operator.h"
/* must come after Python.h */
#include <structmember.h>

/* The limited API has these since 3.12. They are the same in 3.11. */
#ifndef Py_TPFLAGS_HAVE_VECTORCALL
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
typedef PyObject *(*vectorcallfunc)(PyObject *, PyObject *const *, size_t, PyObject *);
#define PyVectorcall_NARGS(n) ((Py_ssize_t)((n) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))
#endif

/* A parameter of the declaration. */
typedef struct declared_param {
    PyObject *name; /* interned */
    int index;      /* row in the operator's table */
} declared_param;

typedef struct operator_object {
    PyObject_HEAD vectorcallfunc vectorcall;
    const smla_py_state *state;
    const smla_py_operator *in_c;
    PyObject *declaration;
    PyObject *dict; /* an operator has a dict and weak references, as functions do */
    PyObject *weak_references;
    atomic_bool is_known_to_dynamo;
    int num_params;
    int num_positional;
    int num_required;
    declared_param params[SMLA_PY_MAX_PARAMS];
    /* One per row of the table; NULL = a call must give a value. */
    PyObject *defaults[SMLA_PY_MAX_PARAMS];
} operator_object;

/* ---- Calls --------------------------------------------------------------------------------- */

/* Position of a keyword in the declaration, from `start` on, or -1. Pointers are compared first,
 * because the keywords of a call are nearly always interned. */
static int
find_param(const operator_object *op, PyObject *name, int start)
{
    for (int i = start; i < op->num_params; i++) {
        if (op->params[i].name == name) {
            return i;
        }
    }
    for (int i = start; i < op->num_params; i++) {
        if (PyUnicode_Compare(op->params[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

/* find_param for keyword `i` of a call. A cache's format has two names, and operators take either,
 * as sparse_mla/_format_names.py says; -1 where the call has both. */
static int
find_keyword(const operator_object *op, PyObject *keywords, Py_ssize_t i, int start)
{
    static const char *const names[] = {"kv_format", "kv_cache_dtype"};
    PyObject *const name = PyTuple_GetItem(keywords, i);
    int param = find_param(op, name, start);
    for (int k = 0; k < 2 && param < 0; k++) {
        if (PyUnicode_CompareWithASCIIString(name, names[k]) == 0) {
            PyObject *other = PyUnicode_FromString(names[1 - k]);
            const int is_given = other == NULL ? -1 : PySequence_Contains(keywords, other);
            param = is_given == 0 ? find_param(op, other, start) : -1;
            Py_XDECREF(other);
            break;
        }
    }
    return param;
}

/* Whether the call fits. `values` are borrowed, in table order. A keyword never comes twice. */
static bool
bind(const operator_object *op, PyObject *const *args, Py_ssize_t num_args, PyObject *keywords,
     PyObject **values)
{
    const Py_ssize_t num_keywords = keywords == NULL ? 0 : PyTuple_Size(keywords);
    Py_ssize_t num_required = num_args;
    if (num_args > op->num_positional) {
        return false;
    }
    memcpy(values, op->defaults, sizeof op->defaults);
    for (int i = 0; i < num_args; i++) {
        values[op->params[i].index] = args[i];
    }
    for (Py_ssize_t i = 0; i < num_keywords; i++) {
        const int param = find_keyword(op, keywords, i, (int)num_args);
        if (param < 0) { /* unknown, or given by position, too */
            return false;
        }
        PyObject **const value = &values[op->params[param].index];
        num_required += *value == NULL;
        *value = args[num_args + i];
    }
    return num_required == op->num_required;
}

/* Calls the declaration, which raises the TypeError of a call that does not fit. */
static PyObject *
refuse(const operator_object *op, PyObject *const *args, Py_ssize_t num_args, PyObject *keywords)
{
    PyObject *positional = PyTuple_New(num_args);
    PyObject *named = positional == NULL ? NULL : PyDict_New();
    const Py_ssize_t num_keywords = keywords == NULL ? 0 : PyTuple_Size(keywords);
    int status = named == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; status == 0 && i < num_args; i++) {
        status = PyTuple_SetItem(positional, i, Py_NewRef(args[i])); /* steals */
    }
    for (Py_ssize_t i = 0; status == 0 && i < num_keywords; i++) {
        const int param = find_keyword(op, keywords, i, (int)num_args);
        PyObject *const name = param < 0 ? PyTuple_GetItem(keywords, i) : op->params[param].name;
        status = PyDict_SetItem(named, name, args[num_args + i]);
    }
    PyObject *none = status == 0 ? PyObject_Call(op->declaration, positional, named) : NULL;
    Py_XDECREF(positional);
    Py_XDECREF(named);
    if (none != NULL) {
        Py_DECREF(none);
        PyErr_Format(PyExc_SystemError, "%s: the declaration takes a call that C does not",
                     op->in_c->name);
    }
    return NULL;
}

static PyObject *
operator_vectorcall(PyObject *self, PyObject *const *args, size_t num_args_and_flag,
                    PyObject *keywords)
{
    const operator_object *const op = (const operator_object *)self;
    const Py_ssize_t num_args = PyVectorcall_NARGS(num_args_and_flag);
    PyObject *values[SMLA_PY_MAX_PARAMS];
    return bind(op, args, num_args, keywords, values) ? smla_py_run(op->state, op->in_c, values)
                                                      : refuse(op, args, num_args, keywords);
}

/* ---- Declarations -------------------------------------------------------------------------- */

/* The table row of a parameter, or -1 with an exception. */
static int
find_index(const smla_py_operator *in_c, PyObject *name)
{
    for (int i = 0; i < in_c->num_params; i++) {
        if (smla_py_is_argument(&in_c->params[i]) &&
            PyUnicode_CompareWithASCIIString(name, in_c->params[i].name) == 0) {
            return i;
        }
    }
    PyErr_Format(PyExc_ValueError, "Operator: `declaration` must have the parameters of %s, got %R",
                 in_c->name, name);
    return -1;
}

static int
count_arguments(const smla_py_operator *in_c)
{
    int count = 0;
    for (int i = 0; i < in_c->num_params; i++) {
        count += smla_py_is_argument(&in_c->params[i]);
    }
    return count;
}

static int
read_count(PyObject *code, const char *name)
{
    PyObject *number = PyObject_GetAttrString(code, name);
    const long count = number == NULL ? -1 : PyLong_AsLong(number);
    Py_XDECREF(number);
    return (int)count;
}

/* New reference to the default of a parameter, or NULL, with an exception set if the look-up
 * failed. A borrowed reference would not do, because another thread may change the dict. */
static PyObject *
find_default(PyObject *defaults, PyObject *name)
{
    PyObject *value = PyObject_GetItem(defaults, name);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
    }
    return value;
}

/* Reads names and defaults. Only keyword-only parameters have defaults. */
static int
read_params(operator_object *op, PyObject *names, PyObject *defaults)
{
    for (int i = 0; i < op->num_params; i++) {
        declared_param *const param = &op->params[i];
        PyObject *name = PySequence_GetItem(names, i);
        if (name == NULL) {
            return -1;
        }
        PyUnicode_InternInPlace(&name);
        param->name = name;
        param->index = find_index(op->in_c, name);
        if (param->index < 0) {
            return -1;
        }
        PyObject **const value = &op->defaults[param->index];
        if (i >= op->num_positional && PyDict_Check(defaults)) {
            *value = find_default(defaults, name);
            if (*value == NULL && PyErr_Occurred() != NULL) {
                return -1;
            }
        }
        op->num_required += *value == NULL;
    }
    return 0;
}

static int
read_declaration(operator_object *op)
{
    PyObject *code = PyObject_GetAttrString(op->declaration, "__code__");
    PyObject *names = code == NULL ? NULL : PyObject_GetAttrString(code, "co_varnames");
    PyObject *defaults =
        names == NULL ? NULL : PyObject_GetAttrString(op->declaration, "__kwdefaults__");
    int status = -1;
    if (defaults != NULL) {
        op->num_positional = read_count(code, "co_argcount");
        op->num_params = op->num_positional + read_count(code, "co_kwonlyargcount");
        if (PyErr_Occurred() == NULL && op->num_params == count_arguments(op->in_c)) {
            status = read_params(op, names, defaults);
        } else if (PyErr_Occurred() == NULL) {
            PyErr_Format(PyExc_ValueError,
                         "Operator: `declaration` must have the %d parameters of %s, got %d",
                         count_arguments(op->in_c), op->in_c->name, op->num_params);
        }
    }
    Py_XDECREF(code);
    Py_XDECREF(names);
    Py_XDECREF(defaults);
    return status;
}

/* ---- Type ---------------------------------------------------------------------------------- */

PyDoc_STRVAR(operator_doc, "Operator(declaration, name, /)\n--\n\n"
                           "An operator of C that is called as `declaration`, a function, says.");

static PyObject *
operator_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *declaration = NULL;
    const char *name = NULL;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Operator: takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "Os:Operator", &declaration, &name)) {
        return NULL;
    }
    const smla_py_operator *const in_c = smla_py_find_operator(name, strlen(name));
    if (in_c == NULL) {
        PyErr_Format(PyExc_ValueError, "Operator: `name` must be an operator of C, got \"%s\"",
                     name);
        return NULL;
    }
    operator_object *op = (operator_object *)PyType_GenericAlloc(type, 0);
    if (op == NULL) {
        return NULL;
    }
    op->vectorcall = operator_vectorcall;
    op->state = PyType_GetModuleState(type);
    op->in_c = in_c;
    op->declaration = Py_NewRef(declaration);
    if (read_declaration(op) < 0) {
        Py_CLEAR(op);
    }
    return (PyObject *)op;
}

static int
operator_traverse(PyObject *self, visitproc visit, void *arg)
{
    const operator_object *const op = (const operator_object *)self;
    Py_VISIT(op->declaration);
    Py_VISIT(op->dict);
    for (int i = 0; i < SMLA_PY_MAX_PARAMS; i++) {
        Py_VISIT(op->defaults[i]);
    }
    Py_VISIT((PyObject *)Py_TYPE(self));
    return 0;
}

static int
operator_clear(PyObject *self)
{
    operator_object *const op = (operator_object *)self;
    Py_CLEAR(op->declaration);
    Py_CLEAR(op->dict);
    return 0;
}

static void
operator_dealloc(PyObject *self)
{
    operator_object *const op = (operator_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    PyObject_ClearWeakRefs(self);
    operator_clear(self);
    for (int i = 0; i < SMLA_PY_MAX_PARAMS; i++) {
        Py_XDECREF(op->params[i].name);
        Py_XDECREF(op->defaults[i]);
    }
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *
operator_repr(PyObject *self)
{
    return PyUnicode_FromFormat("<operator sparse_mla.%s>",
                                ((const operator_object *)self)->in_c->name);
}

/* Calls sparse_mla.integrations._dynamo.mark(op). If this PyTorch knows no such marks, its compiler
 * goes without them, and its own error is all that a user sees. */
static void
mark_for_dynamo(PyObject *op)
{
    PyObject *module = PyImport_ImportModule("sparse_mla.integrations._dynamo");
    PyObject *const none = module == NULL ? NULL : PyObject_CallMethod(module, "mark", "O", op);
    Py_XDECREF(none);
    Py_XDECREF(module);
    PyErr_Clear();
}

/* The address, as of any object. PyTorch's compiler hashes a callable before it looks whether the
 * callable is marked as one that it cannot trace. */
static Py_hash_t
operator_hash(PyObject *self)
{
    operator_object *const op = (operator_object *)self;
    if (!atomic_load_explicit(&op->is_known_to_dynamo, memory_order_relaxed)) {
        PyObject *name = PyUnicode_FromString("torch._dynamo.trace_rules");
        PyObject *const rules = name == NULL ? NULL : PyImport_GetModule(name);
        Py_XDECREF(name);
        PyErr_Clear();
        /* set before the mark, which hashes the operator, too */
        if (rules != NULL && !atomic_exchange(&op->is_known_to_dynamo, true)) {
            mark_for_dynamo(self);
        }
        Py_XDECREF(rules);
    }
    const Py_hash_t hash = (Py_hash_t)((uintptr_t)self >> 4);
    return hash == -1 ? -2 : hash;
}

/* __get__ makes help() and inspect see a routine. It makes no bound method of an operator. */
static PyObject *
operator_get(PyObject *self, PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(type))
{
    return Py_NewRef(self);
}

/* Operators are pickled by name, as functions are. */
static PyObject *
operator_reduce(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return PyObject_GetAttrString(self, "__qualname__");
}

static PyObject *
operator_table(PyObject *self, void *Py_UNUSED(closure))
{
    const smla_py_operator *const in_c = ((const operator_object *)self)->in_c;
    PyObject *table = PyTuple_New(in_c->num_params);
    for (int i = 0; table != NULL && i < in_c->num_params; i++) {
        const smla_py_param *const param = &in_c->params[i];
        const char *const kind = smla_py_kinds[param->kind].name;
        smla_py_put_item(&table, i, Py_BuildValue("(ss)", param->name, kind));
    }
    return table;
}

static PyObject *
operator_results(PyObject *self, void *Py_UNUSED(closure))
{
    return smla_py_list_results(((const operator_object *)self)->in_c);
}

static PyObject *
operator_limits(PyObject *self, void *Py_UNUSED(closure))
{
    return smla_py_list_limits(((const operator_object *)self)->in_c);
}

static PyMethodDef operator_methods[] = {
    {"__reduce__", operator_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef operator_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(operator_object, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(operator_object, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(operator_object, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef operator_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {"table", operator_table, NULL, "Name and kind of each row of its table (operator.h).", NULL},
    {"results", operator_results, NULL, "The rows of its results (result_row.h).", NULL},
    {"limits", operator_limits, NULL, "What those rows need of a call (result_row.h).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot operator_slots[] = {
    {Py_tp_doc, (void *)operator_doc},
    {Py_tp_new, operator_new},
    {Py_tp_dealloc, operator_dealloc},
    {Py_tp_traverse, operator_traverse},
    {Py_tp_clear, operator_clear},
    {Py_tp_call, PyObject_Call},
    {Py_tp_repr, operator_repr},
    {Py_tp_descr_get, operator_get},
    {Py_tp_hash, operator_hash},
    {Py_tp_methods, operator_methods},
    {Py_tp_members, operator_members},
    {Py_tp_getset, operator_getset},
    {0, NULL},
};

PyType_Spec smla_py_operator_spec = {
    .name = "sparse_mla._C.Operator",
    .basicsize = sizeof(operator_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = operator_slots,
};
