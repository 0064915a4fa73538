/* result_row.c: computes results by their rows and allocates them, and lists the rows for Python;
 * see result_row.h.
 */
#include "python/call/operator.h"

/* ---- Numbers ------------------------------------------------------------------------------- */

/* A number that the call does not tell, because the core refuses the call. */
enum { UNKNOWN = -1 };

/* A call as the rows see it. */
typedef struct row_reader {
    smla_py_call *call;
    const smla_py_operator *op;
    const void *args;
} row_reader;

static const void *
field_of(const row_reader *reader, int row)
{
    return (const char *)reader->args + reader->op->params[row].offset;
}

static int64_t
read_value(const row_reader *reader, int row)
{
    return *(const int64_t *)field_of(reader, row);
}

static const smla_kv_format_info *
format_of(const row_reader *reader, int cache, int option)
{
    return smla_format_of_cache(&reader->call->arrays[cache].view,
                                *(const int32_t *)field_of(reader, option));
}

/* A page has at least a byte per key. */
static int64_t
read_page_keys(const row_reader *reader, const smla_py_term *term)
{
    const int64_t keys = read_value(reader, term->row);
    return keys < 1 || keys > smla_py_call_dim(reader->call, term->number, 1) ? UNKNOWN : keys;
}

static int64_t
count_groups(const row_reader *reader, const smla_py_term *term)
{
    const int64_t size = ((const int64_t *)field_of(reader, term->row))[term->number];
    const int64_t axis = smla_py_call_dim(reader->call, 0, term->number);
    if (size == -1) {
        return 1;
    }
    return size < 1 || axis % size != 0 ? UNKNOWN : axis / size;
}

static int64_t
read_number(const row_reader *reader, const smla_py_term *term)
{
    const smla_py_call *const call = reader->call;
    switch (term->number_kind) {
    case SMLA_PY_CONSTANT: return term->number;
    case SMLA_PY_SIZE_OF:
        return smla_py_has_dim(call, term->row, term->number)
                   ? call->arrays[term->row].shape[term->number]
                   : UNKNOWN;
    case SMLA_PY_SIZE_OR_0: return smla_py_call_dim(call, term->row, term->number);
    case SMLA_PY_PAGE_KEYS: return read_page_keys(reader, term);
    case SMLA_PY_KEY_VALUES: return format_of(reader, term->row, term->number)->head_dim;
    case SMLA_PY_GROUPS_ALONG: return count_groups(reader, term);
    default: return read_value(reader, term->row);
    }
}

/* What a term makes of the value before it. Neither `value` nor `number` is negative. */
static int64_t
take_term(smla_py_term_kind kind, int64_t value, int64_t number)
{
    switch (kind) {
    case SMLA_PY_ADD: return __builtin_add_overflow(value, number, &value) ? UNKNOWN : value;
    case SMLA_PY_MULTIPLY: return __builtin_mul_overflow(value, number, &value) ? UNKNOWN : value;
    case SMLA_PY_DIVIDE: return number < 1 || value % number != 0 ? UNKNOWN : value / number;
    case SMLA_PY_ROUND_UP:
        return number < 1 || value > INT64_MAX - number ? UNKNOWN
                                                        : (value + number - 1) / number * number;
    default: return value > number ? value : number;
    }
}

static int64_t
compute_dim(const row_reader *reader, const smla_py_term *terms)
{
    int64_t value = read_number(reader, terms); /* the first term adds it to 0 */
    for (int i = 1; i < SMLA_PY_MAX_TERMS && terms[i].kind != SMLA_PY_NO_TERM && value >= 0; i++) {
        const int64_t number = read_number(reader, &terms[i]);
        value = number < 0 ? UNKNOWN : take_term(terms[i].kind, value, number);
    }
    return value;
}

/* ---- Rows ---------------------------------------------------------------------------------- */

static bool
is_within(int64_t value, const smla_py_limit *limit)
{
    return value >= limit->least && value <= limit->most;
}

static bool
keeps_limit(const row_reader *reader, const smla_py_limit *limit)
{
    const smla_py_array *const array = &reader->call->arrays[limit->row];
    switch (limit->kind) {
    case SMLA_PY_LIMIT_NDIM: return array->object == NULL || is_within(array->view.ndim, limit);
    case SMLA_PY_LIMIT_HEADS:
        return is_within(smla_py_call_dim(reader->call, limit->row, 1), limit);
    case SMLA_PY_LIMIT_COLUMNS:
        return read_value(reader, limit->row) <= smla_py_call_dim(reader->call, limit->least, 1);
    default: return is_within(read_value(reader, limit->row), limit);
    }
}

static bool
keeps_limits(const row_reader *reader)
{
    for (int i = 0; i < reader->op->num_limits; i++) {
        if (!keeps_limit(reader, &reader->op->limits[i])) {
            return false;
        }
    }
    return true;
}

/* A scale may be given as a number, which is not 0. */
static bool
is_given(const row_reader *reader, int row)
{
    const bool is_scale = reader->op->params[row].kind == SMLA_PY_SCALE_OR_NONE;
    return reader->call->arrays[row].object != NULL ||
           (is_scale && ((const smla_scale_arg *)field_of(reader, row))->value != 0);
}

static bool
is_asked(const row_reader *reader)
{
    for (int i = 0; i < smla_py_count_arrays(reader->op); i++) {
        if (reader->op->params[i].kind == SMLA_PY_ASKED_OUTPUT && is_given(reader, i)) {
            return true;
        }
    }
    return reader->call->asks;
}

static bool
holds(const row_reader *reader, const smla_py_condition *when)
{
    switch (when->kind) {
    case SMLA_PY_IF_GIVEN: return is_given(reader, when->row);
    case SMLA_PY_IF_ASKED: return is_asked(reader);
    case SMLA_PY_IF_NDIM: return smla_py_has_rank(reader->call, when->row, when->value);
    case SMLA_PY_IF_SPLIT_PAGES:
        return smla_py_has_rank(reader->call, when->row, 2) &&
               format_of(reader, when->row, when->value)->layout == SMLA_PAGE_SPLIT;
    case SMLA_PY_IF_SCALES: return *(const int32_t *)field_of(reader, when->row) == when->value;
    default: return true;
    }
}

static bool
is_float(DLDataType dtype)
{
    return dtype.lanes == 1 && ((dtype.code == kDLBfloat && dtype.bits == 16) ||
                                (dtype.code == kDLFloat && (dtype.bits == 16 || dtype.bits == 32)));
}

static bool
is_integer(DLDataType dtype)
{
    return dtype.lanes == 1 && dtype.code == kDLInt && (dtype.bits == 32 || dtype.bits == 64);
}

/* The dtype of attention's out for a query of `dtype`. The core refuses what is neither half. */
static DLDataType
halves_of(DLDataType dtype)
{
    const bool is_fp16 = dtype.lanes == 1 && dtype.code == kDLFloat && dtype.bits == 16;
    return is_fp16 ? dtype : smla_py_bf16;
}

/* false: the core refuses the dtype of the array that the result's follows. */
static bool
find_dtype(const row_reader *reader, const smla_py_result_dtype *dtype, DLDataType *found)
{
    switch (dtype->source) {
    case SMLA_PY_FLOATS_OF_ARRAY:
        *found = reader->call->arrays[dtype->row].view.dtype;
        return is_float(*found);
    case SMLA_PY_INTEGERS_OF_ARRAY:
        *found = reader->call->arrays[dtype->row].view.dtype;
        return is_integer(*found);
    case SMLA_PY_HALVES_OF_ARRAY:
        *found = halves_of(reader->call->arrays[dtype->row].view.dtype);
        return true;
    case SMLA_PY_DTYPE_OF_OPTION:
        *found = *(const DLDataType *)field_of(reader, dtype->row);
        return true;
    default: break;
    }
    *found = dtype->fixed;
    return true;
}

/* Whether the call makes the result, if the caller left it out. An OVER_FIRST result is not made
 * where the call writes its first array in place. */
static bool
is_made(const row_reader *reader, int result)
{
    switch (reader->op->params[result].kind) {
    case SMLA_PY_ASKED_OUTPUT:
    case SMLA_PY_ASKED_RESULT: return reader->call->asks;
    case SMLA_PY_OVER_FIRST: return !reader->call->arrays[0].is_written;
    default: return true;
    }
}

static int
allocate_stored(smla_py_call *call, const smla_py_result_row *row, DLDataType dtype,
                const int64_t shape[SMLA_PY_MAX_RESULT_DIMS])
{
    const int *const order = row->storage.order;
    int64_t storage[SMLA_PY_STORED_DIMS];
    for (int i = 0; i < SMLA_PY_STORED_DIMS; i++) {
        storage[order[i]] = shape[i];
    }
    storage[order[0]] = take_term(SMLA_PY_ROUND_UP, shape[0], row->storage.multiple);
    return smla_py_allocate_ordered(call, row->result, dtype, storage, order, shape[0]);
}

/* 1: the row's sizes or its dtype are unknown. */
static int
allocate_row(const row_reader *reader, const smla_py_result_row *row)
{
    const smla_py_term *const first = row->dims[0];
    int64_t shape[SMLA_PY_MAX_RESULT_DIMS] = {0};
    DLDataType dtype;
    int ndim = 0;
    if (!find_dtype(reader, &row->dtype, &dtype)) {
        return 1;
    }
    if (first->number_kind == SMLA_PY_WHOLE_SHAPE) {
        const smla_py_array *const array = &reader->call->arrays[first->row];
        return smla_py_allocate_result(reader->call, row->result, dtype, array->view.ndim,
                                       array->shape);
    }
    for (; ndim < SMLA_PY_MAX_RESULT_DIMS && row->dims[ndim]->kind != SMLA_PY_NO_TERM; ndim++) {
        shape[ndim] = compute_dim(reader, row->dims[ndim]);
        if (shape[ndim] < 0) {
            return 1;
        }
    }
    return row->storage.multiple > 0
               ? allocate_stored(reader->call, row, dtype, shape)
               : smla_py_allocate_result(reader->call, row->result, dtype, ndim, shape);
}

int
smla_py_allocate_results(smla_py_call *call, const smla_py_operator *op, const void *args)
{
    const row_reader reader = {.call = call, .op = op, .args = args};
    bool is_checked = false; /* no limit counts for a call that gives all results */
    for (int i = 0; i < op->num_results; i++) {
        const smla_py_result_row *const row = &op->results[i];
        if (call->arrays[row->result].object != NULL || !is_made(&reader, row->result) ||
            !holds(&reader, &row->when)) {
            continue;
        }
        if (!is_checked && !keeps_limits(&reader)) {
            return 0;
        }
        is_checked = true;
        const int status = allocate_row(&reader, row);
        if (status != 0) {
            return status < 0 ? -1 : 0;
        }
        call->fills |= row->fills;
    }
    return 0;
}

/* ---- Rows for Python ----------------------------------------------------------------------- */

static const char *
name_of(const smla_py_operator *op, int row)
{
    return op->params[row].name;
}

/* (term, number, *what the number is of) */
static PyObject *
list_term(const smla_py_operator *op, const smla_py_term *term)
{
    static const char *const kinds[] = {
        [SMLA_PY_ADD] = "add",           [SMLA_PY_MULTIPLY] = "multiply",
        [SMLA_PY_DIVIDE] = "divide",     [SMLA_PY_ROUND_UP] = "round up",
        [SMLA_PY_RAISE_TO] = "raise to",
    };
    const char *const kind = kinds[term->kind];
    const char *const name = name_of(op, term->row);
    switch (term->number_kind) {
    case SMLA_PY_CONSTANT: return Py_BuildValue("(ssi)", kind, "constant", term->number);
    case SMLA_PY_SIZE_OF: return Py_BuildValue("(sssi)", kind, "size", name, term->number);
    case SMLA_PY_SIZE_OR_0: return Py_BuildValue("(sssi)", kind, "size or 0", name, term->number);
    case SMLA_PY_VALUE_OF: return Py_BuildValue("(sss)", kind, "value", name);
    case SMLA_PY_PAGE_KEYS:
        return Py_BuildValue("(ssss)", kind, "page keys", name, name_of(op, term->number));
    case SMLA_PY_KEY_VALUES:
        return Py_BuildValue("(ssss)", kind, "key values", name, name_of(op, term->number));
    case SMLA_PY_GROUPS_ALONG:
        return Py_BuildValue("(sssis)", kind, "groups", name, term->number, name_of(op, 0));
    default: return Py_BuildValue("(sss)", kind, "whole shape", name);
    }
}

static PyObject *
list_terms(const smla_py_operator *op, const smla_py_term *terms)
{
    int count = 0;
    while (count < SMLA_PY_MAX_TERMS && terms[count].kind != SMLA_PY_NO_TERM) {
        count++;
    }
    PyObject *list = PyTuple_New(count);
    for (int i = 0; list != NULL && i < count; i++) {
        smla_py_put_item(&list, i, list_term(op, &terms[i]));
    }
    return list;
}

static PyObject *
list_dims(const smla_py_operator *op, const smla_py_result_row *row)
{
    int ndim = 0;
    while (ndim < SMLA_PY_MAX_RESULT_DIMS && row->dims[ndim]->kind != SMLA_PY_NO_TERM) {
        ndim++;
    }
    PyObject *dims = PyTuple_New(ndim);
    for (int i = 0; dims != NULL && i < ndim; i++) {
        smla_py_put_item(&dims, i, list_terms(op, row->dims[i]));
    }
    return dims;
}

static PyObject *
list_dtype(const smla_py_operator *op, const smla_py_result_dtype *dtype)
{
    switch (dtype->source) {
    case SMLA_PY_FLOATS_OF_ARRAY:
    case SMLA_PY_INTEGERS_OF_ARRAY: return Py_BuildValue("(ss)", "array", name_of(op, dtype->row));
    case SMLA_PY_HALVES_OF_ARRAY: return Py_BuildValue("(ss)", "halves", name_of(op, dtype->row));
    case SMLA_PY_DTYPE_OF_OPTION: return Py_BuildValue("(ss)", "option", name_of(op, dtype->row));
    default: return Py_BuildValue("(ss)", "fixed", smla_py_find_dtype(dtype->fixed)->name);
    }
}

static PyObject *
list_condition(const smla_py_operator *op, const smla_py_condition *when)
{
    const char *const name = name_of(op, when->row);
    switch (when->kind) {
    case SMLA_PY_IF_GIVEN: return Py_BuildValue("(ss)", "given", name);
    case SMLA_PY_IF_ASKED: return Py_BuildValue("(s)", "asked");
    case SMLA_PY_IF_NDIM: return Py_BuildValue("(ssi)", "ndim", name, when->value);
    case SMLA_PY_IF_SPLIT_PAGES:
        return Py_BuildValue("(sss)", "split pages", name, name_of(op, when->value));
    case SMLA_PY_IF_SCALES:
        return Py_BuildValue("(sss)", "scales", name, smla_py_scale_layout_name(when->value));
    default: return Py_BuildValue("(s)", "always");
    }
}

static PyObject *
list_row(const smla_py_operator *op, const smla_py_result_row *row)
{
    const smla_py_storage *const storage = &row->storage;
    return Py_BuildValue("(sNNN(iii)ii)", name_of(op, row->result), list_condition(op, &row->when),
                         list_dtype(op, &row->dtype), list_dims(op, row), storage->order[0],
                         storage->order[1], storage->order[2], storage->multiple, (int)row->fills);
}

PyObject *
smla_py_list_results(const smla_py_operator *op)
{
    PyObject *rows = PyTuple_New(op->num_results);
    for (int i = 0; rows != NULL && i < op->num_results; i++) {
        smla_py_put_item(&rows, i, list_row(op, &op->results[i]));
    }
    return rows;
}

PyObject *
smla_py_list_limits(const smla_py_operator *op)
{
    static const char *const kinds[] = {
        [SMLA_PY_LIMIT_NDIM] = "ndim",
        [SMLA_PY_LIMIT_VALUE] = "value",
        [SMLA_PY_LIMIT_HEADS] = "heads",
        [SMLA_PY_LIMIT_COLUMNS] = "columns",
    };
    PyObject *limits = PyTuple_New(op->num_limits);
    for (int i = 0; limits != NULL && i < op->num_limits; i++) {
        const smla_py_limit *const limit = &op->limits[i];
        smla_py_put_item(&limits, i,
                         Py_BuildValue("(ssii)", kinds[limit->kind], name_of(op, limit->row),
                                       limit->least, limit->most));
    }
    return limits;
}
