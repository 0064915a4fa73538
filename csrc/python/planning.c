/* planning.c: a step's arithmetic on host integers, for Python: csrc/step computes. */
#include <stdlib.h>

#include "python/arrays/array.h"

/* ---- Batches ------------------------------------------------------------------------------- */

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

/* ---- Context ------------------------------------------------------------------------------- */

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

/* ---- Local attention ------------------------------------------------------------------------ */

/* New bytearray with room for `count` int32. */
static PyObject *
new_ints(int64_t count)
{
    return PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(count * (int64_t)sizeof(int32_t)));
}

static int32_t *
ints_of(PyObject *bytes)
{
    return (int32_t *)(void *)PyByteArray_AsString(bytes);
}

/* Counts, then plans. */
static PyObject *
plan_batches(const smla_local_attention_args *args)
{
    int64_t count = 0;
    smla_error error;
    if (smla_local_attention_batches(args, NULL, &count, &error) != SMLA_OK) {
        return smla_py_raise(&error);
    }
    PyObject *const lens = new_ints(count);
    PyObject *const starts = new_ints(count + 1);
    PyObject *const keys = new_ints(count);
    PyObject *const table = new_ints(count * (args->attention_chunk / args->block_size));
    PyObject *answer = NULL;
    if (lens != NULL && starts != NULL && keys != NULL && table != NULL) {
        const smla_local_batches out = {ints_of(lens), ints_of(starts), ints_of(keys),
                                        ints_of(table)};
        if (smla_local_attention_batches(args, &out, &count, &error) == SMLA_OK) {
            answer = PyTuple_Pack(4, lens, starts, keys, table);
        } else {
            smla_py_raise(&error);
        }
    }
    Py_XDECREF(table);
    Py_XDECREF(keys);
    Py_XDECREF(starts);
    Py_XDECREF(lens);
    return answer;
}

/* Whether the arrays are of as many requests; else an exception is set. */
static bool
are_requests_equal(const char *op, int64_t num_starts, int64_t num_reqs, int64_t num_rows)
{
    if (num_starts != num_reqs + 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `query_start_loc` must have %lld entries, one more than `seq_lens`, got "
                     "%lld",
                     op, (long long)num_reqs + 1, (long long)num_starts);
        return false;
    }
    if (num_rows != num_reqs) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `block_table` must have a row for each of %lld requests, got %lld", op,
                     (long long)num_reqs, (long long)num_rows);
        return false;
    }
    return true;
}

/* Reads the arrays, and plans. */
static PyObject *
read_batches(const smla_py_state *state, const char *op, PyObject *const *args,
             smla_local_attention_args *plan)
{
    int32_t *starts = NULL, *lens = NULL;
    smla_py_table table = {.values = NULL};
    int64_t num_starts = 0;
    PyObject *answer = NULL;
    if (smla_py_host_ints(state, op, "query_start_loc", args[0], &starts, &num_starts) == 0 &&
        smla_py_host_ints(state, op, "seq_lens", args[1], &lens, &plan->num_reqs) == 0 &&
        smla_py_host_table(state, op, "block_table", args[2], &table) == 0 &&
        are_requests_equal(op, num_starts, plan->num_reqs, table.rows)) {
        plan->query_start_loc = starts;
        plan->seq_lens = lens;
        plan->block_table = table.values;
        plan->table_width = table.columns;
        answer = plan_batches(plan);
    }
    free(table.values);
    free(lens);
    free(starts);
    return answer;
}

PyDoc_STRVAR(local_attention_batches_doc,
             "local_attention_batches($module, query_start_loc, seq_lens, block_table, "
             "attention_chunk, block_size, /)\n--\n\n"
             "See sparse_mla.local_attention_batches. Results are int32 in bytearrays.");

static PyObject *
local_attention_batches(PyObject *module, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "local_attention_batches";
    smla_local_attention_args plan = {.struct_size = sizeof plan};
    if (smla_py_check_count(op, num_args, 5) < 0 ||
        smla_py_parse_int(op, "attention_chunk", args[3], &plan.attention_chunk) < 0 ||
        smla_py_parse_int(op, "block_size", args[4], &plan.block_size) < 0) {
        return NULL;
    }
    return read_batches(PyModule_GetState(module), op, args, &plan);
}

/* ---- List ---------------------------------------------------------------------------------- */

PyMethodDef smla_py_planning_functions[] = {
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
    {"local_attention_batches", (PyCFunction)(void (*)(void))local_attention_batches, METH_FASTCALL,
     local_attention_batches_doc},
    {NULL, NULL, 0, NULL},
};
