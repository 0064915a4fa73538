/* local_plan.c: the virtual requests of local attention, for Python. */
#include <stdlib.h>

#include "python/arrays/array.h"

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

/* Reads the arrays, whose numbers of requests must agree, and plans. */
static PyObject *
read_batches(const smla_py_state *state, const char *op, PyObject *const *args,
             smla_local_attention_args *plan)
{
    int32_t *starts = NULL, *lens = NULL;
    smla_py_table table = {.values = NULL};
    int64_t num_starts = 0;
    PyObject *answer = NULL;
    if (smla_py_host_ints(state, op, "query_start_loc", args[0], &starts, &num_starts) < 0 ||
        smla_py_host_ints(state, op, "seq_lens", args[1], &lens, &plan->num_reqs) < 0 ||
        smla_py_host_table(state, op, "block_table", args[2], &table) < 0) {
        /* the exception is set */
    } else if (num_starts != plan->num_reqs + 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `query_start_loc` must have %lld entries, one more than `seq_lens`, got "
                     "%lld",
                     op, (long long)plan->num_reqs + 1, (long long)num_starts);
    } else if (table.rows != plan->num_reqs) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `block_table` must have a row for each of %lld requests, got %lld", op,
                     (long long)plan->num_reqs, (long long)table.rows);
    } else {
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

PyMethodDef smla_py_local_functions[] = {
    {"local_attention_batches", (PyCFunction)(void (*)(void))local_attention_batches, METH_FASTCALL,
     local_attention_batches_doc},
    {NULL, NULL, 0, NULL},
};
