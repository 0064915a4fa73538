/* ops_cache.c: write tokens to a cache, gather them back, look at them. */
#include <string.h>

#include "call.h"

static const smla_py_param concat_and_cache_mla_params[] = {
    {"kv_c", SMLA_PY_INPUT},         {"k_pe", SMLA_PY_INPUT},    {"kv_cache", SMLA_PY_INOUT},
    {"slot_mapping", SMLA_PY_INPUT}, {.name = "kv_cache_dtype"}, {.name = "stream"},
};

static PyObject *
concat_and_cache_mla(const smla_py_state *state, PyObject *const *args)
{
    enum { KV_C, K_PE, KV_CACHE, SLOT_MAPPING, NUM_ARRAYS };
    static const char op[] = "concat_and_cache_mla";
    smla_concat_and_cache_mla_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    smla_py_open(&call, state, op);
    if (smla_py_parse_kv_format(op, "kv_cache_dtype", args[NUM_ARRAYS], &a.kv_format) < 0 ||
        smla_py_take_stream(&call, args[NUM_ARRAYS + 1]) < 0 ||
        smla_py_add(&call, concat_and_cache_mla_params, NUM_ARRAYS, args) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    a.kv_c = smla_py_call_view(&call, KV_C);
    a.k_pe = smla_py_call_view(&call, K_PE);
    a.kv_cache = smla_py_call_view(&call, KV_CACHE);
    a.slot_mapping = smla_py_call_view(&call, SLOT_MAPPING);
    Py_BEGIN_ALLOW_THREADS
    status = smla_concat_and_cache_mla(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){KV_CACHE}, 1);
}

static const smla_py_param gather_kv_cache_params[] = {
    {"kv_cache", SMLA_PY_INPUT},
    {"block_table", SMLA_PY_INPUT},
    {"seq_lens", SMLA_PY_INPUT},
    {"workspace_starts", SMLA_PY_INPUT},
    {"seq_starts", SMLA_PY_OPTIONAL},
    {"out", SMLA_PY_INOUT},
    {.name = "stream"},
};

static PyObject *
gather_kv_cache(const smla_py_state *state, PyObject *const *args)
{
    enum { KV_CACHE, BLOCK_TABLE, SEQ_LENS, WORKSPACE_STARTS, SEQ_STARTS, OUT, NUM_ARRAYS };
    static const char op[] = "gather_kv_cache";
    smla_gather_kv_cache_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    smla_py_open(&call, state, op);
    if (smla_py_take_stream(&call, args[NUM_ARRAYS]) < 0 ||
        smla_py_add(&call, gather_kv_cache_params, NUM_ARRAYS, args) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    a.kv_cache = smla_py_call_view(&call, KV_CACHE);
    a.block_table = smla_py_call_view(&call, BLOCK_TABLE);
    a.seq_lens = smla_py_call_view(&call, SEQ_LENS);
    a.workspace_starts = smla_py_call_view(&call, WORKSPACE_STARTS);
    a.seq_starts = smla_py_call_view(&call, SEQ_STARTS);
    a.out = smla_py_call_view(&call, OUT);
    Py_BEGIN_ALLOW_THREADS
    status = smla_gather_kv_cache(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){OUT}, 1);
}

static const smla_py_param dequantize_kv_cache_params[] = {
    {"kv_cache", SMLA_PY_INPUT},
    {.name = "kv_format"},
    {.name = "dtype"},
};

static PyObject *
dequantize_kv_cache(const smla_py_state *state, PyObject *const *args)
{
    enum { KV_CACHE, OUT, NUM_INPUTS = OUT };
    static const char op[] = "dequantize_kv_cache";
    smla_dequantize_kv_cache_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    smla_py_open(&call, state, op);
    if (smla_py_parse_kv_format(op, "kv_format", args[NUM_INPUTS], &a.kv_format) < 0) {
        return NULL;
    }
    PyObject *name = args[NUM_INPUTS + 1];
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, NULL) : "";
    if (text == NULL || (strcmp(text, "float32") != 0 && strcmp(text, "bfloat16") != 0)) {
        if (text != NULL) {
            PyErr_Format(PyExc_ValueError,
                         "%s: `dtype` must be \"float32\" or \"bfloat16\", got %R", op, name);
        }
        return NULL;
    }
    if (smla_py_add(&call, dequantize_kv_cache_params, NUM_INPUTS, args) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    smla_py_add_absent(&call, "out");
    const int ndim = call.arrays[KV_CACHE].view.ndim;
    const bool is_flat = ndim == 2;
    if (is_flat || ndim == 3 || ndim == 4) {
        int64_t shape[3] = {smla_py_call_dim(&call, KV_CACHE, 0),
                            smla_py_call_dim(&call, KV_CACHE, 1), SMLA_HEAD_DIM};
        shape[1] = is_flat ? SMLA_HEAD_DIM : shape[1];
        if (smla_py_allocate_result(&call, OUT, smla_py_find_dtype_by_name(text)->dtype,
                                    is_flat ? 2 : 3, shape) < 0) {
            return smla_py_fail(&call);
        }
    }
    a.kv_cache = smla_py_call_view(&call, KV_CACHE);
    a.out = smla_py_call_view(&call, OUT);
    Py_BEGIN_ALLOW_THREADS
    status = smla_dequantize_kv_cache(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){OUT}, 1);
}

/* ---- Table --------------------------------------------------------------------------------- */

const smla_py_operator smla_py_cache_operators[] = {
    SMLA_PY_OPERATOR(concat_and_cache_mla),
    SMLA_PY_OPERATOR(gather_kv_cache),
    SMLA_PY_OPERATOR(dequantize_kv_cache),
    {.name = NULL},
};
