/* module.c: the module sparse_mla._C: its state, planning on host integers, and introspection. */
#include <numpy/numpyconfig.h>
#include <stdlib.h>
#include <string.h>

#include "core/fp_mode.h"
#include "core/kv_format.h"
#include "python/step/step.h"

/* ---- Planning ------------------------------------------------------------------------------ */

/* A new list of `count` pairs of neighbouring numbers, each `step` behind the one before it. */
static PyObject *
list_pairs(const int64_t *numbers, int64_t step, int64_t count)
{
    PyObject *pairs = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; pairs != NULL && i < count; i++) {
        PyObject *pair =
            Py_BuildValue("(LL)", (long long)numbers[i * step], (long long)numbers[i * step + 1]);
        if (pair == NULL || PyList_SetItem(pairs, (Py_ssize_t)i, pair) < 0) { /* steals */
            Py_CLEAR(pairs);
        }
    }
    return pairs;
}

PyDoc_STRVAR(split_decodes_and_prefills_doc,
             "split_decodes_and_prefills($module, query_start_loc, num_actual_tokens, "
             "decode_threshold, require_uniform, /)\n--\n\n"
             "See sparse_mla.split_decodes_and_prefills.");

static PyObject *
split_decodes_and_prefills(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "split_decodes_and_prefills";
    int64_t num_tokens = 0;
    int64_t decode_threshold = 0;
    bool require_uniform = false;
    int32_t *query_start_loc = NULL;
    int64_t count = 0;
    if (smla_py_check_count(op, num_args, 4) < 0 ||
        smla_py_parse_int(op, "num_actual_tokens", args[1], &num_tokens) < 0 ||
        smla_py_parse_int(op, "decode_threshold", args[2], &decode_threshold) < 0 ||
        smla_py_parse_flag(args[3], &require_uniform) < 0 ||
        smla_py_host_ints(PyModule_GetState(module), op, "query_start_loc", args[0],
                          &query_start_loc, &count) < 0) {
        return NULL;
    }
    if (count == 0) {
        free(query_start_loc);
        PyErr_Format(PyExc_ValueError,
                     "%s: `query_start_loc` must have one entry more than requests, got 0", op);
        return NULL;
    }
    smla_error error;
    smla_batch_split split;
    const smla_status status =
        smla_split_decodes_and_prefills(query_start_loc, count - 1, num_tokens, decode_threshold,
                                        require_uniform, &split, &error);
    free(query_start_loc);
    if (status != SMLA_OK) {
        return smla_py_raise(&error);
    }
    return Py_BuildValue("(LLLL)", (long long)split.num_decodes, (long long)split.num_prefills,
                         (long long)split.num_decode_tokens, (long long)split.num_prefill_tokens);
}

PyDoc_STRVAR(reorder_batch_doc,
             "reorder_batch($module, num_scheduled_tokens, decode_threshold, /)\n--\n\n"
             "See sparse_mla.reorder_batch.");

static PyObject *
reorder_batch(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "reorder_batch";
    int64_t decode_threshold = 0;
    int32_t *num_tokens = NULL;
    int64_t num_reqs = 0;
    if (smla_py_check_count(op, num_args, 2) < 0 ||
        smla_py_parse_int(op, "decode_threshold", args[1], &decode_threshold) < 0 ||
        smla_py_host_ints(PyModule_GetState(module), op, "num_scheduled_tokens", args[0],
                          &num_tokens, &num_reqs) < 0) {
        return NULL;
    }
    PyObject *pairs = NULL;
    int64_t num_swaps = 0;
    smla_batch_split split;
    smla_error error;
    int64_t *swaps = malloc((size_t)(num_reqs + 1) * sizeof *swaps);
    if (swaps == NULL) {
        PyErr_NoMemory();
    } else if (smla_reorder_batch(num_tokens, num_reqs, decode_threshold, swaps, &num_swaps, &split,
                                  &error) != SMLA_OK) {
        smla_py_raise(&error);
    } else {
        pairs = list_pairs(swaps, 2, num_swaps);
    }
    free(swaps);
    free(num_tokens);
    return pairs == NULL
               ? NULL
               : Py_BuildValue("(NLLLL)", pairs, (long long)split.num_decodes,
                               (long long)split.num_prefills, (long long)split.num_decode_tokens,
                               (long long)split.num_prefill_tokens);
}

PyDoc_STRVAR(split_prefill_chunks_doc,
             "split_prefill_chunks($module, seq_lens, workspace_tokens, /)\n--\n\n"
             "See sparse_mla.split_prefill_chunks.");

static PyObject *
split_prefill_chunks(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "split_prefill_chunks";
    int64_t workspace_tokens = 0;
    int32_t *seq_lens = NULL;
    int64_t count = 0;
    if (smla_py_check_count(op, num_args, 2) < 0 ||
        smla_py_parse_int(op, "workspace_tokens", args[1], &workspace_tokens) < 0 ||
        smla_py_host_ints(PyModule_GetState(module), op, "seq_lens", args[0], &seq_lens, &count) <
            0) {
        return NULL;
    }
    PyObject *chunks = NULL;
    int64_t num_chunks = 0;
    smla_error error;
    int64_t *bounds = malloc((size_t)(count + 1) * sizeof *bounds);
    if (bounds == NULL) {
        PyErr_NoMemory();
    } else if (smla_split_prefill_chunks(seq_lens, count, workspace_tokens, bounds + 1, &num_chunks,
                                         &error) != SMLA_OK) {
        smla_py_raise(&error);
    } else {
        bounds[0] = 0; /* a chunk begins where the one before it ends */
        chunks = list_pairs(bounds, 1, num_chunks);
    }
    free(bounds);
    free(seq_lens);
    return chunks;
}

static PyObject *
list_int32(const int32_t *numbers, int64_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        PyObject *const number = PyLong_FromLong(numbers[i]);
        if (number == NULL || PyList_SetItem(list, (Py_ssize_t)i, number) < 0) { /* steals */
            Py_CLEAR(list);
        }
    }
    return list;
}

/* New list of (first prefill, last + 1, starts, lens). */
static PyObject *
list_context(const smla_context_chunk *chunks, int64_t num_chunks, const int32_t *starts,
             const int32_t *lens)
{
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < num_chunks; i++) {
        const smla_context_chunk *const chunk = &chunks[i];
        const int64_t count = chunk->req_end - chunk->req_start;
        PyObject *const row =
            Py_BuildValue("(LLNN)", (long long)chunk->req_start, (long long)chunk->req_end,
                          list_int32(starts + chunk->first, count),
                          list_int32(lens + chunk->first, count));
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    return list;
}

/* Counts, then plans. */
static PyObject *
plan_context(const smla_context_args *args)
{
    int64_t num_chunks = 0;
    int64_t num_entries = 0;
    smla_error error;
    if (smla_split_context_chunks(args, NULL, NULL, NULL, &num_chunks, &num_entries, &error) !=
        SMLA_OK) {
        return smla_py_raise(&error);
    }
    PyObject *list = NULL;
    smla_context_chunk *chunks = malloc((size_t)(num_chunks + 1) * sizeof *chunks);
    int32_t *starts = malloc((size_t)(num_entries + 1) * sizeof *starts);
    int32_t *lens = malloc((size_t)(num_entries + 1) * sizeof *lens);
    if (chunks == NULL || starts == NULL || lens == NULL) {
        PyErr_NoMemory();
    } else if (smla_split_context_chunks(args, chunks, starts, lens, &num_chunks, &num_entries,
                                         &error) == SMLA_OK) {
        list = list_context(chunks, num_chunks, starts, lens);
    }
    free(lens);
    free(starts);
    free(chunks);
    return list;
}

PyDoc_STRVAR(split_context_chunks_doc,
             "split_context_chunks($module, context_lens, workspace_tokens, block_size, packed, "
             "/)\n--\n\nSee sparse_mla.split_context_chunks. The chunks of either plan: first "
             "prefill, last + 1, starts, lengths.");

static PyObject *
split_context_chunks(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "split_context_chunks";
    smla_context_args context = {.struct_size = sizeof context};
    int32_t *lens = NULL;
    bool is_packed = false;
    if (smla_py_check_count(op, num_args, 4) < 0 ||
        smla_py_parse_int(op, "workspace_tokens", args[1], &context.workspace_tokens) < 0 ||
        smla_py_parse_int(op, "block_size", args[2], &context.block_size) < 0 ||
        smla_py_parse_flag(args[3], &is_packed) < 0 ||
        smla_py_host_ints(PyModule_GetState(module), op, "context_lens", args[0], &lens,
                          &context.num_prefills) < 0) {
        return NULL;
    }
    context.context_lens = lens;
    context.plan = is_packed ? SMLA_CONTEXT_PACKED : SMLA_CONTEXT_EQUAL;
    PyObject *const chunks = plan_context(&context);
    free(lens);
    return chunks;
}

PyDoc_STRVAR(get_context_workspace_size_doc,
             "get_context_workspace_size($module, max_model_len, max_num_seqs, block_size, "
             "/)\n--\n\nSee sparse_mla.get_context_workspace_size.");

static PyObject *
get_context_workspace_size(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "get_context_workspace_size";
    static const char *const names[] = {"max_model_len", "max_num_seqs", "block_size"};
    int64_t values[3] = {0, 0, 0};
    if (smla_py_check_count(op, num_args, 3) < 0) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        if (smla_py_parse_int(op, names[i], args[i], &values[i]) < 0) {
            return NULL;
        }
        if (values[i] < 1 || values[i] > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "%s: `%s` must be 1 to %d, got %lld", op, names[i],
                         INT32_MAX, (long long)values[i]);
            return NULL;
        }
    }
    return PyLong_FromLongLong(smla_context_workspace_size(values[0], values[1], values[2]));
}

PyDoc_STRVAR(get_prefill_workspace_size_doc,
             "get_prefill_workspace_size($module, max_model_len, /)\n--\n\n"
             "See sparse_mla.get_prefill_workspace_size.");

static PyObject *
get_prefill_workspace_size(PyObject *Py_UNUSED(module), PyObject *max_model_len)
{
    static const char op[] = "get_prefill_workspace_size";
    int64_t value = 0;
    if (smla_py_parse_int(op, "max_model_len", max_model_len, &value) < 0) {
        return NULL;
    }
    if (value < 0 || value > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: `max_model_len` must be 0 to %d, got %lld", op,
                     INT32_MAX, (long long)value);
        return NULL;
    }
    return PyLong_FromLongLong(smla_prefill_workspace_size(value));
}

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
    {"split_decodes_and_prefills", (PyCFunction)(void (*)(void))split_decodes_and_prefills,
     METH_FASTCALL, split_decodes_and_prefills_doc},
    {"reorder_batch", (PyCFunction)(void (*)(void))reorder_batch, METH_FASTCALL, reorder_batch_doc},
    {"split_prefill_chunks", (PyCFunction)(void (*)(void))split_prefill_chunks, METH_FASTCALL,
     split_prefill_chunks_doc},
    {"split_context_chunks", (PyCFunction)(void (*)(void))split_context_chunks, METH_FASTCALL,
     split_context_chunks_doc},
    {"get_context_workspace_size", (PyCFunction)(void (*)(void))get_context_workspace_size,
     METH_FASTCALL, get_context_workspace_size_doc},
    {"get_prefill_workspace_size", get_prefill_workspace_size, METH_O,
     get_prefill_workspace_size_doc},
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
        add_format_names(module, "SPLIT_KV_FORMATS", find_split_formats()) < 0 ||
        add_format_names(module, "CONCAT_KV_FORMATS", SMLA_KV_CONCAT) < 0 ||
        PyModule_AddFunctions(module, smla_py_xla_functions) < 0 ||
        PyModule_AddFunctions(module, smla_py_compose_functions) < 0 ||
        PyModule_AddFunctions(module, smla_py_local_functions) < 0 ||
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
