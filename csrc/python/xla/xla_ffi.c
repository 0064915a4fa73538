/* xla_ffi.c: the operators as XLA custom calls, for JAX inside jit on CPUs and NVIDIA GPUs.
 *
 * One handler per platform serves all operators: the attribute `operator` names a call site's
 * operator. Arrays come in the order of the operator's table (operator.h), without the workspace.
 * Arrays that are read and written come once more at the end, because XLA gives them as argument
 * and as result. Bit i of the attribute `present` says whether the i-th array is there. Options
 * that are fields of the core's args are attributes under their Python names. integrations/jax.py
 * writes the calls.
 *
 * A handler runs on XLA's threads, possibly on several at once, without the GIL. It has no state.
 * On a GPU it puts the operator's work on XLA's stream, takes scratch from XLA, and waits for
 * nothing.
 */
#include <stdalign.h>
#include <stdio.h>
#include <string.h>

#include "python/call/operator.h"
#include "python/call/scratch.h"
#include "python/xla/xla_abi.h"

typedef struct xla_call {
    const char *op;
    const smla_xla_frame *frame;
    smla_error *error;
    DLDevice device;
    void *stream; /* NULL on the CPU */
    DLTensor tensors[SMLA_MAX_ARRAYS];
} xla_call;

/* ---- Attributes ------------------------------------------------------------------------------ */

static bool
spells(const smla_xla_span *span, const char *text)
{
    return span->length == strlen(text) && memcmp(span->text, text, span->length) == 0;
}

/* The value of an attribute; NULL if there is none of this name and kind. */
static const void *
find_attribute(const smla_xla_frame *frame, const char *name, int kind)
{
    const smla_xla_attributes *attributes = &frame->attributes;
    for (int64_t i = 0; i < attributes->size; i++) {
        if (attributes->kinds[i] == kind && spells(attributes->names[i], name)) {
            return attributes->items[i];
        }
    }
    return NULL;
}

static smla_status
read_scalar(const xla_call *call, const char *name, int type, void *value, size_t bytes)
{
    const smla_xla_scalar *scalar = find_attribute(call->frame, name, SMLA_XLA_IS_SCALAR);
    if (scalar == NULL || scalar->type != type) {
        return smla_fail_value(call->error, call->op,
                               "`%s` must be a 64-bit scalar attribute, got none", name);
    }
    memcpy(value, scalar->value, bytes);
    return SMLA_OK;
}

static smla_status
read_int(const xla_call *call, const char *name, int64_t *value)
{
    return read_scalar(call, name, SMLA_XLA_S64, value, sizeof *value);
}

static smla_status
read_int32(const xla_call *call, const char *name, int32_t *value)
{
    int64_t wide = 0;
    SMLA_TRY(read_int(call, name, &wide));
    *value = (int32_t)wide;
    return *value == wide ? SMLA_OK
                          : smla_fail_value(call->error, call->op, "`%s` must fit int32, got %lld",
                                            name, (long long)wide);
}

/* Reads an integer, or the integers of a tuple: attributes `name`[0], `name`[1], and so on. The
 * kind's row says whether they may be left out, which is None. */
static smla_status
read_integers(const xla_call *call, const char *option, const smla_py_kind_row *kind, void *field)
{
    int64_t *const values = field;
    if (kind->is_int32) {
        return read_int32(call, option, field);
    }
    for (int i = 0; i < kind->count; i++) {
        char item[64];
        snprintf(item, sizeof item, "%s[%d]", option, i);
        const char *const name = kind->count == 1 ? option : item;
        if (kind->may_be_none && i == 0 &&
            find_attribute(call->frame, name, SMLA_XLA_IS_SCALAR) == NULL) {
            smla_py_fill_none(kind, values);
            return SMLA_OK;
        }
        SMLA_TRY(read_int(call, name, &values[i]));
        if (values[i] < kind->least) {
            return smla_fail_value(call->error, call->op, "`%s` must be at least %lld, got %lld",
                                   name, (long long)kind->least, (long long)values[i]);
        }
    }
    return SMLA_OK;
}

/* Reads a scale that is a number. One that is an array is not an attribute. 0 is refused, because
 * the core reads it as "left out". */
static smla_status
read_scale(const xla_call *call, const char *name, smla_scale_arg *scale)
{
    if (find_attribute(call->frame, name, SMLA_XLA_IS_SCALAR) == NULL) {
        return SMLA_OK;
    }
    SMLA_TRY(read_scalar(call, name, SMLA_XLA_F64, &scale->value, sizeof scale->value));
    return scale->value != 0.0
               ? SMLA_OK
               : smla_fail_value(call->error, call->op,
                                 "`%s` must be a positive normal float32, got 0", name);
}

static smla_status
read_kv_format(const xla_call *call, const char *name, int32_t *format)
{
    const smla_xla_span *span = find_attribute(call->frame, name, SMLA_XLA_IS_STRING);
    if (span == NULL) {
        return SMLA_OK;
    }
    *format = smla_py_find_kv_format(span->text, span->length);
    if (*format == SMLA_KV_INFER) {
        char names[SMLA_PY_FORMATS_TEXT];
        smla_py_describe_kv_formats(names);
        return smla_fail_value(call->error, call->op, "`%s` must be %s, got \"%.*s\"", name, names,
                               (int)span->length, span->text);
    }
    return SMLA_OK;
}

static smla_status
read_scales(const xla_call *call, const char *name, int32_t *layout)
{
    const smla_xla_span *span = find_attribute(call->frame, name, SMLA_XLA_IS_STRING);
    *layout =
        span == NULL ? SMLA_SCALES_INFER : smla_py_find_scale_layout(span->text, span->length);
    return span == NULL || *layout != SMLA_SCALES_INFER
               ? SMLA_OK
               : smla_fail_value(call->error, call->op,
                                 "`%s` must be " SMLA_PY_SCALE_LAYOUT_NAMES ", got \"%.*s\"", name,
                                 (int)span->length, span->text);
}

static smla_status
read_floats(const xla_call *call, const char *name, DLDataType *dtype)
{
    const smla_xla_span *span = find_attribute(call->frame, name, SMLA_XLA_IS_STRING);
    return span == NULL || smla_py_find_floats(span->text, span->length, dtype)
               ? SMLA_OK
               : smla_fail_value(call->error, call->op,
                                 "`%s` must be " SMLA_PY_FLOATS_NAMES ", got \"%.*s\"", name,
                                 (int)span->length, span->text);
}

/* ---- Arrays ---------------------------------------------------------------------------------- */

/* An element type in DLPack's terms. An unlisted type becomes opaque: every operator refuses it. */
static DLDataType
dtype_of(int type)
{
    switch (type) {
    case SMLA_XLA_PRED: return (DLDataType){kDLBool, 8, 1};
    case SMLA_XLA_S8: return (DLDataType){kDLInt, 8, 1};
    case SMLA_XLA_S16: return (DLDataType){kDLInt, 16, 1};
    case SMLA_XLA_S32: return (DLDataType){kDLInt, 32, 1};
    case SMLA_XLA_S64: return (DLDataType){kDLInt, 64, 1};
    case SMLA_XLA_U8: return (DLDataType){kDLUInt, 8, 1};
    case SMLA_XLA_U16: return (DLDataType){kDLUInt, 16, 1};
    case SMLA_XLA_U32: return (DLDataType){kDLUInt, 32, 1};
    case SMLA_XLA_U64: return (DLDataType){kDLUInt, 64, 1};
    case SMLA_XLA_F16: return (DLDataType){kDLFloat, 16, 1};
    case SMLA_XLA_F32: return (DLDataType){kDLFloat, 32, 1};
    case SMLA_XLA_F64: return (DLDataType){kDLFloat, 64, 1};
    case SMLA_XLA_BF16: return (DLDataType){kDLBfloat, 16, 1};
    case SMLA_XLA_F8E4M3FN: return (DLDataType){kDLFloat8_e4m3fn, 8, 1};
    default: return (DLDataType){kDLOpaqueHandle, 8, 1};
    }
}

/* The k-th array of a call, counting arguments before results; NULL where there is none. */
static const smla_xla_buffer *
find_buffer(const smla_xla_frame *frame, int64_t k)
{
    const bool is_argument = k < frame->arguments.size;
    const smla_xla_buffers *part = is_argument ? &frame->arguments : &frame->results;
    k -= is_argument ? 0 : frame->arguments.size;
    return k < part->size && part->kinds[k] == SMLA_XLA_IS_BUFFER ? part->items[k] : NULL;
}

static int64_t
count_given(const xla_call *call)
{
    return call->frame->arguments.size + call->frame->results.size;
}

static smla_status
fail_present(const xla_call *call, int64_t present)
{
    return smla_fail_value(call->error, call->op,
                           "`present` must name the %lld arrays of the call, got bits %#llx",
                           (long long)count_given(call), (unsigned long long)present);
}

/* The state of a walk over the arrays of an operator. */
typedef struct array_walk {
    int64_t present; /* bit i: whether the call has array i */
    int num_seen;
    int64_t num_taken; /* arrays that were taken so far */
} array_walk;

/* Takes the next array of the call, if `present` says that it is there. */
static smla_status
take_array(xla_call *call, array_walk *walk, const smla_py_param *param, void *args)
{
    const int i = walk->num_seen++;
    if ((walk->present >> i & 1) == 0) {
        return SMLA_OK;
    }
    const smla_xla_buffer *const buffer = find_buffer(call->frame, walk->num_taken++);
    if (buffer == NULL || i >= SMLA_MAX_ARRAYS) {
        return fail_present(call, walk->present);
    }
    call->tensors[i] = (DLTensor){
        .data = buffer->data,
        .device = call->device,
        .ndim = (int32_t)buffer->rank,
        .dtype = dtype_of(buffer->type),
        .shape = buffer->dims,
    };
    smla_py_set_pointer(args, param, &call->tensors[i]);
    return SMLA_OK;
}

/* Takes arrays that are read and written twice: the second, XLA's result, replaces the first. */
static smla_status
take_arrays(xla_call *call, const smla_py_operator *op, void *args)
{
    const int num_arrays = smla_py_count_arrays(op);
    array_walk walk = {.present = 0};
    SMLA_TRY(read_int(call, "present", &walk.present));
    for (int i = 0; i < num_arrays; i++) {
        if (op->params[i].kind != SMLA_PY_WORKSPACE) {
            SMLA_TRY(take_array(call, &walk, &op->params[i], args));
        }
    }
    for (int i = 0; i < num_arrays; i++) {
        if (op->params[i].kind == SMLA_PY_INOUT || op->params[i].kind == SMLA_PY_MAYBE_INOUT) {
            SMLA_TRY(take_array(call, &walk, &op->params[i], args));
        }
    }
    return walk.num_taken == count_given(call) && walk.present >> walk.num_seen == 0
               ? SMLA_OK
               : fail_present(call, walk.present);
}

/* ---- What a call asks XLA for --------------------------------------------------------------- */

/* Destroys an error that one of XLA's functions returned. */
static void
destroy_error(const xla_call *call, smla_xla_error *from_xla)
{
    call->frame->api->destroy_error(
        &(smla_xla_own_error_args){.struct_size = offsetof(smla_xla_own_error_args, message),
                                   .error = from_xla});
}

/* Turns an error that one of XLA's functions returned into this call's. */
static smla_status
fail_in_xla(const xla_call *call, smla_status status, const char *what, smla_xla_error *from_xla)
{
    smla_xla_own_error_args own = {.struct_size = sizeof own, .error = from_xla};
    call->frame->api->get_message(&own);
    smla_fail(call->error, status, "%s: XLA has no %s: %s", call->op, what, own.message);
    destroy_error(call, from_xla);
    return status;
}

/* Finds the GPU and the stream that XLA runs the call on. */
static smla_status
find_stream(xla_call *call)
{
    const smla_xla_api *const api = call->frame->api;
    smla_xla_device_args device = {.struct_size = sizeof device, .context = call->frame->context};
    smla_xla_stream_args stream = {.struct_size = sizeof stream, .context = call->frame->context};
    if (api->struct_size < sizeof *api) {
        return smla_fail(call->error, SMLA_ERROR_RUNTIME,
                         "%s: XLA must tell the device of a call, as newer versions of JAX do",
                         call->op);
    }
    smla_xla_error *failure = api->get_device(&device);
    if (failure != NULL) {
        return fail_in_xla(call, SMLA_ERROR_RUNTIME, "device", failure);
    }
    failure = api->get_stream(&stream);
    if (failure != NULL) {
        return fail_in_xla(call, SMLA_ERROR_RUNTIME, "stream", failure);
    }
    call->device = (DLDevice){.device_type = kDLCUDA, .device_id = device.device};
    call->stream = stream.stream;
    return SMLA_OK;
}

/* Allocates `*bytes` of workspace: plain memory on the CPU, else XLA's, which is aligned to 256
 * bytes though XLA promises no more than 16. */
static smla_status
take_workspace(const xla_call *call, int64_t *bytes, DLTensor *workspace)
{
    smla_xla_allocate_args from_xla = {.struct_size = sizeof from_xla,
                                       .context = call->frame->context,
                                       .size = (size_t)*bytes,
                                       .alignment = 16};
    if (call->device.device_type == kDLCPU) {
        from_xla.data = smla_py_allocate_scratch(*bytes);
    } else {
        smla_xla_error *const failure = call->frame->api->allocate(&from_xla);
        if (failure != NULL) {
            return fail_in_xla(call, SMLA_ERROR_MEMORY, "memory for a workspace", failure);
        }
    }
    *workspace = smla_py_view_scratch(from_xla.data, call->device, bytes);
    return from_xla.data != NULL ? SMLA_OK
                                 : smla_fail(call->error, SMLA_ERROR_MEMORY,
                                             "%s: no memory for a workspace of %lld bytes",
                                             call->op, (long long)*bytes);
}

static void
give_workspace_back(const xla_call *call, const DLTensor *workspace)
{
    if (call->device.device_type == kDLCPU) {
        free(workspace->data);
        return;
    }
    smla_xla_free_args args = {.struct_size = sizeof args,
                               .context = call->frame->context,
                               .size = (size_t)workspace->shape[0],
                               .data = workspace->data};
    smla_xla_error *const failure = call->frame->api->free(&args);
    if (failure != NULL) { /* the memory is lost to XLA, the results are right */
        destroy_error(call, failure);
    }
}

/* ---- Operators ------------------------------------------------------------------------------- */

/* Reads the options. Those that are no field of the core's args have no meaning in XLA's calls. */
static smla_status
read_options(const xla_call *call, const smla_py_operator *op, void *args)
{
    for (int i = 0; i < op->num_params; i++) {
        const smla_py_param *const param = &op->params[i];
        void *const field = (char *)args + param->offset;
        if (param->offset >= op->core_bytes) {
            continue;
        }
        const smla_py_kind_row *const kind = &smla_py_kinds[param->kind];
        if (kind->count > 0) {
            SMLA_TRY(read_integers(call, param->name, kind, field));
            continue;
        }
        switch (param->kind) {
        case SMLA_PY_FLAG: SMLA_TRY(read_int32(call, param->name, field)); break;
        case SMLA_PY_UNLESS:
            SMLA_TRY(read_int32(call, param->name, field));
            *(int32_t *)field = *(int32_t *)field == 0;
            break;
        case SMLA_PY_SCALE_OR_NONE:
        case SMLA_PY_SCALE: SMLA_TRY(read_scale(call, param->name, field)); break;
        case SMLA_PY_FLOAT:
            SMLA_TRY(read_scalar(call, param->name, SMLA_XLA_F64, field, sizeof(double)));
            break;
        case SMLA_PY_KV_FORMAT: SMLA_TRY(read_kv_format(call, param->name, field)); break;
        case SMLA_PY_FLOATS: SMLA_TRY(read_floats(call, param->name, field)); break;
        case SMLA_PY_SCALES: SMLA_TRY(read_scales(call, param->name, field)); break;
        default: break;
        }
    }
    return SMLA_OK;
}

/* Runs the operator, with a workspace if it needs one. */
static smla_status
compute(const xla_call *call, const smla_py_operator *op, void *args)
{
    int64_t bytes = op->workspace_bytes == NULL ? 0 : op->workspace_bytes(args);
    DLTensor workspace;
    if (bytes > 0) {
        SMLA_TRY(take_workspace(call, &bytes, &workspace));
        smla_py_set_pointer(args, smla_py_find_workspace(op), &workspace);
    }
    smla_py_set_pointer(args, &op->params[op->num_params - 1], call->stream);
    const smla_status status = op->compute(args, call->error);
    if (bytes > 0) {
        give_workspace_back(call, &workspace);
    }
    return status;
}

static smla_status
run_table(xla_call *call, const smla_py_operator *op)
{
    alignas(max_align_t) unsigned char args[SMLA_PY_MAX_ARGS_BYTES];
    int32_t fills = 0; /* XLA makes all results, and returns what memory they had */
    for (int i = 0; i < op->num_results; i++) {
        fills |= op->results[i].fills;
    }
    smla_py_clear_args(op, args);
    smla_py_set_fills(op, args, fills);
    SMLA_TRY(take_arrays(call, op, args));
    SMLA_TRY(read_options(call, op, args));
    return compute(call, op, args);
}

/* ---- Handler --------------------------------------------------------------------------------- */

static smla_status
run_operator(const smla_xla_frame *frame, bool is_on_gpu, smla_error *error)
{
    if (frame->arguments.struct_size != sizeof frame->arguments ||
        frame->results.struct_size != sizeof frame->results ||
        frame->attributes.struct_size != sizeof frame->attributes) {
        return smla_fail(error, SMLA_ERROR_RUNTIME,
                         "sparse_mla: XLA's call frame must be that of version %d.%d, got another",
                         SMLA_XLA_MAJOR, SMLA_XLA_MINOR);
    }
    const smla_xla_span *const name = find_attribute(frame, "operator", SMLA_XLA_IS_STRING);
    const smla_py_operator *const op =
        name == NULL ? NULL : smla_py_find_operator(name->text, name->length);
    if (op != NULL && op->compute != NULL) {
        xla_call call = {.op = op->name,
                         .frame = frame,
                         .error = error,
                         .device = {.device_type = kDLCPU}};
        SMLA_TRY(is_on_gpu ? find_stream(&call) : SMLA_OK);
        return run_table(&call, op);
    }
    return smla_fail(error, SMLA_ERROR_VALUE,
                     "sparse_mla: the attribute `operator` must name an operator");
}

static smla_xla_code
code_of(smla_status status)
{
    switch (status) {
    case SMLA_ERROR_RUNTIME: return SMLA_XLA_INTERNAL;
    case SMLA_ERROR_MEMORY: return SMLA_XLA_RESOURCE_EXHAUSTED;
    default: return SMLA_XLA_INVALID_ARGUMENT;
    }
}

static smla_xla_error *
handle(smla_xla_frame *frame, bool is_on_gpu)
{
    if (frame->extensions != NULL && frame->extensions->type == SMLA_XLA_EXTENSION_METADATA) {
        smla_xla_metadata *metadata = ((smla_xla_metadata_extension *)frame->extensions)->metadata;
        metadata->version.major = SMLA_XLA_MAJOR;
        metadata->version.minor = SMLA_XLA_MINOR;
        return NULL;
    }
    smla_error error;
    const smla_status status = run_operator(frame, is_on_gpu, &error);
    if (status == SMLA_OK) {
        return NULL;
    }
    return frame->api->create_error(&(smla_xla_error_args){
        .struct_size = sizeof(smla_xla_error_args),
        .message = error.text,
        .code = code_of(error.status),
    });
}

static smla_xla_error *
handle_on_cpu(smla_xla_frame *frame)
{
    return handle(frame, false);
}

static smla_xla_error *
handle_on_gpu(smla_xla_frame *frame)
{
    return handle(frame, true);
}

static PyObject *
make_capsule(smla_xla_handler *handler)
{
    void *pointer = NULL;
    memcpy(&pointer, &handler, sizeof pointer); /* C cannot cast a function pointer to void * */
    return PyCapsule_New(pointer, NULL, NULL);
}

static PyObject *
xla_handlers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return Py_BuildValue("{s:N,s:N}", "cpu", make_capsule(handle_on_cpu), "CUDA",
                         make_capsule(handle_on_gpu));
}

PyMethodDef smla_py_xla_functions[] = {
    {"xla_handlers", xla_handlers, METH_NOARGS,
     "xla_handlers($module, /)\n--\n\nSee sparse_mla.integrations.jax."},
    {NULL, NULL, 0, NULL},
};
