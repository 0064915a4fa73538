/* run.c: runs an operator as its table says, for calls from Python; see operator.h. */
#include <stdalign.h>
#include <stdlib.h>

#include "python/call/operator.h"
#include "python/call/scratch.h"
#include "python/call/unlocked.h"
#include "python/step/step.h"

/* ---- Operators ----------------------------------------------------------------------------- */

const smla_py_operator *
smla_py_find_operator(const char *name, size_t length)
{
    static const smla_py_operator *const lists[] = {
        smla_py_cache_operators,  smla_py_attention_operators,  smla_py_index_operators,
        smla_py_topk_operators,   smla_py_indexer_operators,    smla_py_norm_operators,
        smla_py_rope_operators,   smla_py_compressor_operators, smla_py_projection_operators,
        smla_py_varlen_operators,
    };
    for (int i = 0; i < SMLA_PY_COUNT(lists); i++) {
        for (const smla_py_operator *op = lists[i]; op->name != NULL; op++) {
            if (strlen(op->name) == length && memcmp(op->name, name, length) == 0) {
                return op;
            }
        }
    }
    return NULL;
}

/* ---- Arguments ----------------------------------------------------------------------------- */

static int
parse_floats(const smla_py_call *call, const char *name, PyObject *object, DLDataType *dtype)
{
    PyObject *text = smla_py_dtype_name(call->state, object);
    if (text == NULL) {
        return -1;
    }
    Py_ssize_t length = 0;
    const char *const letters = PyUnicode_AsUTF8AndSize(text, &length);
    const bool is_known = letters != NULL && smla_py_find_floats(letters, (size_t)length, dtype);
    Py_DECREF(text);
    if (is_known) {
        return 0;
    }
    if (letters != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be " SMLA_PY_FLOATS_NAMES ", got %R",
                     call->op, name, object);
    }
    return -1;
}

static int
parse_scales(const char *op, const char *name, PyObject *object, int32_t *layout)
{
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : "";
    if (text == NULL) {
        return -1;
    }
    *layout = smla_py_find_scale_layout(text, strlen(text));
    if (*layout != SMLA_SCALES_INFER) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s: `%s` must be " SMLA_PY_SCALE_LAYOUT_NAMES ", got %R", op,
                 name, object);
    return -1;
}

static int
parse_flag(PyObject *object, bool unless, int32_t *field)
{
    bool is_true = false;
    const int status = smla_py_parse_flag(object, &is_true);
    *field = is_true != unless;
    return status;
}

/* Reads an integer, or a tuple of them, as the kind's row says. */
static int
parse_integers(const char *op, const char *name, const smla_py_kind_row *kind, PyObject *object,
               void *field)
{
    if (kind->may_be_none && object == Py_None) {
        smla_py_fill_none(kind, field);
        return 0;
    }
    if (kind->count > 1) {
        return smla_py_parse_ints(op, name, object, kind->count, field);
    }
    return kind->is_int32 ? smla_py_parse_int32(op, name, object, field)
                          : smla_py_parse_least(op, name, object, kind->least, field);
}

/* Fills the field of an option, in `args` or in the call. */
static int
read_option(smla_py_call *call, const smla_py_param *param, PyObject *object, void *args)
{
    const char *const op = call->op;
    void *const field = (char *)args + param->offset;
    switch (param->kind) {
    case SMLA_PY_FLAG: return parse_flag(object, false, field);
    case SMLA_PY_UNLESS: return parse_flag(object, true, field);
    case SMLA_PY_FLOAT: return smla_py_parse_float(op, param->name, object, field);
    case SMLA_PY_KV_FORMAT: return smla_py_parse_kv_format(op, param->name, object, field);
    case SMLA_PY_FLOATS: return parse_floats(call, param->name, object, field);
    case SMLA_PY_SCALES: return parse_scales(op, param->name, object, field);
    case SMLA_PY_DEVICE: return smla_py_parse_device(op, param->name, object, field);
    case SMLA_PY_ASK: return smla_py_parse_flag(object, &call->asks);
    case SMLA_PY_STEP: return smla_py_take_step(call, object, field);
    case SMLA_PY_GENERATION: return smla_py_check_generation(call->op, call->step, object);
    case SMLA_PY_STREAM: return smla_py_take_stream(call, object);
    case SMLA_PY_ARRAYS_STREAM: return 0;
    default: return parse_integers(op, param->name, &smla_py_kinds[param->kind], object, field);
    }
}

/* A scale is an array, or else a number, which goes to its field of `args`. */
static int
add_scale(smla_py_call *call, const smla_py_param *param, PyObject *object, void *args)
{
    const int is_number = smla_py_is_number(object);
    if (is_number < 0) {
        return -1;
    }
    if (is_number == 0) {
        return smla_py_add(call, param->name, SMLA_PY_INPUT, object);
    }
    smla_scale_arg *const scale = (void *)((char *)args + param->offset);
    return smla_py_parse_scale(call->op, param->name, object, &scale->value) < 0
               ? -1
               : smla_py_add_absent(call, param->name);
}

static int
add_array(smla_py_call *call, const smla_py_param *param, PyObject *object, void *args)
{
    switch (param->kind) {
    case SMLA_PY_PAIR: return smla_py_add_pair(call, param->name, object);
    case SMLA_PY_SECOND: return 0; /* added together with the first */
    case SMLA_PY_PARTS: return smla_py_add_parts(call, param->name, object);
    case SMLA_PY_ASKING:
        call->asks = object != Py_None;
        return smla_py_add(call, param->name, SMLA_PY_OPTIONAL, object);
    case SMLA_PY_NULLABLE: return smla_py_add(call, param->name, SMLA_PY_OPTIONAL, object);
    case SMLA_PY_SCALE: return add_scale(call, param, object, args);
    case SMLA_PY_SCALE_OR_NONE:
        return object == Py_None ? smla_py_add_absent(call, param->name)
                                 : add_scale(call, param, object, args);
    case SMLA_PY_RESULT:
    case SMLA_PY_ASKED_RESULT: return smla_py_add_absent(call, param->name);
    case SMLA_PY_ASKED_OUTPUT:
    case SMLA_PY_OUTPUT_OR_NONE:
    case SMLA_PY_OVER_FIRST:
    case SMLA_PY_WORKSPACE: return smla_py_add(call, param->name, SMLA_PY_OUTPUT, object);
    default: return smla_py_add(call, param->name, (smla_py_role)param->kind, object);
    }
}

/* Adds what the lists of an operator have behind their first items. */
static int
add_later_parts(smla_py_call *call, const smla_py_operator *op, PyObject *const *values)
{
    for (int i = 0; i < op->num_params; i++) {
        if (op->params[i].kind == SMLA_PY_PARTS &&
            smla_py_add_later_parts(call, op->params[i].name, i, values[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Reads the options first, because after a wrong option there is no array to release. */
static int
read_arguments(smla_py_call *call, const smla_py_operator *op, PyObject *const *values, void *args)
{
    const int num_arrays = smla_py_count_arrays(op);
    for (int i = num_arrays; i < op->num_params; i++) {
        if (read_option(call, &op->params[i], values[i], args) < 0) {
            return -1;
        }
    }
    const bool maybe_writes = op->maybe_writes != NULL && op->maybe_writes(values);
    if (op->params[0].kind == SMLA_PY_PARTS && smla_py_make_list_room(call) < 0) {
        return -1;
    }
    int i = 0;
    if (op->writes_first != NULL && op->writes_first(values)) {
        if (smla_py_add(call, op->params[i].name, SMLA_PY_INOUT, values[i]) < 0) {
            return -1;
        }
        i++;
    }
    for (; i < num_arrays; i++) {
        const bool is_maybe = op->params[i].kind == SMLA_PY_MAYBE_INOUT;
        const smla_py_role role = maybe_writes ? SMLA_PY_INOUT : SMLA_PY_INPUT;
        if ((is_maybe ? smla_py_add(call, op->params[i].name, role, values[i])
                      : add_array(call, &op->params[i], values[i], args)) < 0) {
            return -1;
        }
    }
    return add_later_parts(call, op, values);
}

/* ---- Results ------------------------------------------------------------------------------- */

/* Fills the fields of all arrays, and lists the arrays that the call returns: those that are only
 * written, then those that are read, too. An absent one is returned as None. */
static int
set_arrays(smla_py_call *call, const smla_py_operator *op, void *args, int *results)
{
    int num_results = 0;
    const int num_rows = smla_py_count_arrays(op);
    for (int i = 0; i < num_rows; i++) {
        const smla_py_param *const param = &op->params[i];
        const DLTensor *const view = smla_py_view(&call->arrays[i]);
        if (param->kind == SMLA_PY_PARTS) {
            smla_py_set_parts(call, i, (void *)((char *)args + param->offset));
            continue;
        }
        smla_py_set_pointer(args, param, view);
        if (param->kind == SMLA_PY_OUTPUT_OR_NONE || (view != NULL && smla_py_is_result(param))) {
            results[num_results++] = i;
        } else if (param->kind == SMLA_PY_OVER_FIRST) {
            results[num_results++] = 0;
        }
    }
    for (int i = 0; i < num_rows; i++) {
        if (op->params[i].kind == SMLA_PY_INOUT) {
            results[num_results++] = i;
        }
    }
    return num_results;
}

/* The workspace of a call on the CPU: plain memory, NULL if the call needs none. */
typedef struct plain_workspace {
    DLTensor tensor;
    int64_t bytes;
} plain_workspace;

/* Takes the workspace if the caller gave none: `scratch` on the CPU, an array like the results on
 * CUDA. */
static int
allocate_workspace(smla_py_call *call, const smla_py_operator *op, void *args,
                   plain_workspace *scratch)
{
    const smla_py_param *const param = smla_py_find_workspace(op);
    const int index = (int)(param - op->params);
    smla_py_array *const workspace = &call->arrays[index];
    scratch->bytes = workspace->object != NULL ? 0 : op->workspace_bytes(args);
    if (scratch->bytes == 0) {
        return 0;
    }
    const DLTensor *view = NULL;
    if (call->arrays[0].view.device.device_type == kDLCUDA) {
        if (smla_py_allocate_bytes(call, index, &scratch->bytes) < 0) {
            return -1;
        }
        view = smla_py_view(workspace);
    } else {
        void *const memory = smla_py_allocate_scratch(scratch->bytes);
        if (memory == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        scratch->tensor =
            smla_py_view_scratch(memory, call->arrays[0].view.device, &scratch->bytes);
        view = &scratch->tensor;
    }
    smla_py_set_pointer(args, param, view);
    return 0;
}

/* ---- Run ----------------------------------------------------------------------------------- */

/* Settles the stream, allocates the missing arrays, computes and returns the call's answer. */
static PyObject *
compute(smla_py_call *call, const smla_py_operator *op, void *args)
{
    void *stream = NULL;
    int results[SMLA_MAX_ARRAYS];
    smla_error error;
    smla_status status;
    plain_workspace scratch = {.bytes = 0};
    smla_py_unlocked unlocked;
    if (smla_py_resolve_stream(call, &stream) < 0) {
        return NULL;
    }
    smla_py_set_pointer(args, &op->params[op->num_params - 1], stream);
    if (op->check_options != NULL && op->check_options(call, args) < 0) {
        return NULL;
    }
    if ((op->allocate != NULL ? op->allocate(call, args)
                              : smla_py_allocate_results(call, op, args)) < 0) {
        return NULL;
    }
    smla_py_set_fills(op, args, call->fills);
    const int num_results = set_arrays(call, op, args, results);
    if (op->workspace_bytes != NULL && allocate_workspace(call, op, args, &scratch) < 0) {
        return NULL;
    }
    smla_py_unlock(&unlocked);
    status = op->compute(args, &error);
    free(scratch.tensor.data);
    if (smla_py_lock(&unlocked) < 0) {
        return NULL;
    }
    return smla_py_finish(call, status, &error, results, num_results);
}

PyObject *
smla_py_run(const smla_py_state *state, const smla_py_operator *op, PyObject *const *values)
{
    alignas(max_align_t) unsigned char args[SMLA_PY_MAX_ARGS_BYTES];
    smla_py_call call;
    PyObject *answer = NULL;
    smla_py_clear_args(op, args);
    smla_py_open(&call, state, op->title == NULL ? op->name : op->title);
    if (read_arguments(&call, op, values, args) == 0) {
        answer = op->answer != NULL ? op->answer(args) : compute(&call, op, args);
    }
    smla_py_close(&call);
    return answer;
}
