/* module.c: the module sparse_mla._C: its state, and introspection. */
#include <numpy/numpyconfig.h>
#include <string.h>

#include "core/fp_mode.h"
#include "core/kv_format.h"
#include "python/step/step.h"

/* ---- Introspection ------------------------------------------------------------------------- */

/* What smla_kernels reports, in memory that the caller frees; NULL with an exception set. */
static smla_kernel_info *
read_kernels(int64_t *num_rows)
{
    *num_rows = smla_kernels(NULL, 0);
    smla_kernel_info *const rows = PyMem_Calloc((size_t)*num_rows, sizeof *rows);
    if (rows == NULL) {
        (void)PyErr_NoMemory();
        return NULL;
    }
    (void)smla_kernels(rows, *num_rows);
    return rows;
}

PyDoc_STRVAR(kernels_doc, "kernels($module, /)\n--\n\nSee sparse_mla.kernels.");

static PyObject *
kernels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    int64_t num_rows = 0;
    smla_kernel_info *const rows = read_kernels(&num_rows);
    PyObject *list = rows == NULL ? NULL : PyList_New((Py_ssize_t)num_rows);
    for (int64_t i = 0; list != NULL && i < num_rows; i++) {
        const smla_kernel_info *row = &rows[i];
        PyObject *item =
            Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:N,s:N}", "device", row->device, "arch", row->arch,
                          "kv_format", row->kv_format, "heads", row->heads, "name", row->name,
                          "available", PyBool_FromLong(row->available), "selected",
                          PyBool_FromLong(row->selected));
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) { /* steals */
            Py_CLEAR(list);
        }
    }
    PyMem_Free(rows);
    return list;
}

/* New list: the names of the instruction sets that have a kernel which this machine can run. */
static PyObject *
list_cpu_features(void)
{
    int64_t num_rows = 0;
    smla_kernel_info *const rows = read_kernels(&num_rows);
    PyObject *features = rows == NULL ? NULL : PyList_New(0);
    for (int64_t i = 0; features != NULL && i < num_rows; i++) {
        if (!rows[i].available || strcmp(rows[i].device, "cpu") != 0) {
            continue;
        }
        PyObject *name = PyUnicode_FromString(rows[i].arch);
        const int is_there = name == NULL ? -1 : PySequence_Contains(features, name);
        if (is_there < 0 || (is_there == 0 && PyList_Append(features, name) < 0)) {
            Py_CLEAR(features);
        }
        Py_XDECREF(name);
    }
    PyMem_Free(rows);
    return features;
}

PyDoc_STRVAR(build_info_doc, "build_info($module, /)\n--\n\nSee sparse_mla.build_info.");

static PyObject *
build_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
#ifdef _OPENMP
    const long openmp = _OPENMP;
#else
    const long openmp = 0;
#endif
    const int version = smla_version();
    return Py_BuildValue(
        "{s:s,s:N,s:s,s:s,s:s,s:s,s:N,s:s,s:l,s:N}", "version", SMLA_VERSION_STRING, "core_version",
        PyUnicode_FromFormat("%d.%d.%d", version / 10000, version / 100 % 100, version % 100),
        "compiler", SMLA_BUILD_COMPILER, "flags", SMLA_BUILD_FLAGS, "cuda", SMLA_BUILD_CUDA,
        "cuda_archs", SMLA_BUILD_CUDA_ARCHS, "dlpack",
        PyUnicode_FromFormat("%d.%d", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION), "numpy_api",
        NPY_FEATURE_VERSION_STRING, "openmp", openmp, "cpu_features", list_cpu_features());
}

PyDoc_STRVAR(call_exactly_doc,
             "call_exactly($module, function, /)\n--\n\n"
             "function(), in the default floating-point mode whatever the caller's is.");

static PyObject *
call_exactly(PyObject *Py_UNUSED(module), PyObject *function)
{
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    PyObject *const answer = PyObject_CallNoArgs(function);
    (void)smla_fp_change(callers);
    return answer;
}

/* ---- Module -------------------------------------------------------------------------------- */

static PyMethodDef functions[] = {
    {"kernels", kernels, METH_NOARGS, kernels_doc},
    {"build_info", build_info, METH_NOARGS, build_info_doc},
    {"call_exactly", call_exactly, METH_O, call_exactly_doc},
    {NULL, NULL, 0, NULL},
};

/* Adds a new object, and drops the reference; NULL stands for an exception. */
static int
add_new(PyObject *module, const char *name, PyObject *object)
{
    const int status = object == NULL ? -1 : PyModule_AddObjectRef(module, name, object);
    Py_XDECREF(object);
    return status;
}

static int
add_kv_format(PyObject *formats, const smla_kv_format_info *row)
{
    PyObject *sizes = PyDict_GetItemString(formats, row->name); /* sizes of earlier rows */
    sizes = sizes == NULL ? PyDict_New() : Py_NewRef(sizes);
    PyObject *size = PyLong_FromLong(row->row_elements);
    PyObject *head_size = PyLong_FromLong(row->head_dim);
    const bool is_added = sizes != NULL && size != NULL && head_size != NULL &&
                          PyDict_SetItem(sizes, size, head_size) == 0 &&
                          PyDict_SetItemString(formats, row->name, sizes) == 0;
    Py_XDECREF(sizes);
    Py_XDECREF(size);
    Py_XDECREF(head_size);
    return is_added ? 0 : -1;
}

/* Adds KV_FORMATS: name of a cache format -> {last dimension of a cache array: head size}, from the
 * core's table. */
static int
add_kv_formats(PyObject *module)
{
    PyObject *formats = PyDict_New();
    for (int i = 0; formats != NULL && i < SMLA_NUM_KV_FORMATS; i++) {
        if (add_kv_format(formats, &smla_kv_formats[i]) < 0) {
            Py_CLEAR(formats);
        }
    }
    return add_new(module, "KV_FORMATS", formats);
}

/* Adds a tuple of the names of the formats in a set. */
static int
add_format_names(PyObject *module, const char *name, smla_kv_set rows)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names != NULL && i < SMLA_NUM_KV_FORMATS; i++) {
        const smla_kv_format_info *const row = &smla_kv_formats[i];
        if ((rows & SMLA_KV_SET(i)) == 0 || smla_find_kv_format((int32_t)row->format) != row) {
            continue; /* not in the set, or a second row of its name */
        }
        PyObject *text = PyUnicode_FromString(row->name);
        if (text == NULL || PyList_Append(names, text) < 0) {
            Py_CLEAR(names);
        }
        Py_XDECREF(text);
    }
    PyObject *const tuple = names == NULL ? NULL : PyList_AsTuple(names);
    Py_XDECREF(names);
    return add_new(module, name, tuple);
}

/* The formats in split pages. */
static smla_kv_set
find_split_formats(void)
{
    smla_kv_set rows = 0;
    for (int i = 0; i < SMLA_NUM_KV_FORMATS; i++) {
        rows |= smla_kv_formats[i].layout == SMLA_PAGE_SPLIT ? SMLA_KV_SET(i) : 0;
    }
    return rows;
}

/* Adds a type under the last part of its name. Keeps a reference in `slot`, unless that is NULL. */
static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    const int status = type == NULL ? -1 : PyModule_AddType(module, type);
    if (slot != NULL) {
        *slot = (PyTypeObject *)Py_XNewRef((PyObject *)type);
    }
    Py_XDECREF((PyObject *)type);
    return status;
}

static int
module_exec(PyObject *module)
{
    smla_py_state *state = PyModule_GetState(module);
    if (smla_py_init_shared(state) < 0 || smla_py_init_arrays(state) < 0 ||
        add_type(module, &smla_py_tensor_spec, &state->tensor_type) < 0 ||
        add_type(module, &smla_py_step_spec, NULL) < 0 ||
        add_type(module, &smla_py_operator_spec, NULL) < 0) {
        return -1;
    }
    if (add_kv_formats(module) < 0 ||
        add_new(module, "CONFIG_FIELDS", smla_py_config_fields()) < 0 ||
        add_new(module, "OPTION_KINDS", smla_py_option_kinds()) < 0 ||
        add_format_names(module, "SPLIT_KV_FORMATS", find_split_formats()) < 0 ||
        add_format_names(module, "CONCAT_KV_FORMATS", SMLA_KV_CONCAT) < 0 ||
        PyModule_AddFunctions(module, smla_py_xla_functions) < 0 ||
        PyModule_AddFunctions(module, smla_py_compose_functions) < 0 ||
        PyModule_AddFunctions(module, smla_py_planning_functions) < 0 ||
        PyModule_AddFunctions(module, functions) < 0) {
        return -1;
    }
    return PyModule_AddStringConstant(module, "__version__", SMLA_VERSION_STRING);
}

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    smla_py_state *state = PyModule_GetState(module);
    Py_VISIT((PyObject *)state->tensor_type);
    Py_VISIT(state->dlpack_kwargs);
    return 0;
}

#define NAME_SLOT(field, text) &state->field,

static int
module_clear(PyObject *module)
{
    smla_py_state *state = PyModule_GetState(module);
    smla_py_clear_shared(state);
    PyObject **const owned[] = {(PyObject **)&state->tensor_type, &state->max_version,
                                &state->dlpack_kwargs, &state->empty_tuple,
                                SMLA_PY_NAMES(NAME_SLOT)};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) {
        Py_CLEAR(*owned[i]);
    }
    return 0;
}

static void
module_free(void *module)
{
    module_clear(module);
    smla_py_free_shared(PyModule_GetState(module));
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "sparse_mla._C",
    .m_doc = "The compiled part of sparse_mla. Use the functions of the package sparse_mla.",
    .m_size = sizeof(smla_py_state),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void);

PyMODINIT_FUNC
PyInit__C(void)
{
    return PyModuleDef_Init(&module_definition);
}
