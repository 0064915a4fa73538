/* xla_ffi.c: the operators as XLA custom calls, for JAX inside jit on the CPU.
 *
 * One handler serves all operators: the attribute `operator` names the function of the C API that a
 * call site is for. Arrays come in the order of that function's list below, arguments before
 * results; bit i of the attribute `present` says whether the i-th one is there. Options are
 * attributes under their names in ops.py. integrations/jax.py writes such calls.
 *
 * The handler runs on XLA's threads, possibly several at once, without the GIL; it keeps nothing.
 */
#include <fenv.h>
#include <string.h>

#include "glue.h"
#include "scratch.h"
#include "xla_abi.h"

enum { MAX_ARRAYS = 12 };

typedef struct xla_call {
    const char *op;
    const smla_xla_frame *frame;
    smla_error *error;
    DLTensor tensors[MAX_ARRAYS];
} xla_call;

/* ---- Attributes ------------------------------------------------------------------------------ */

static bool
spells(const smla_xla_span *span, const char *text)
{
    return span->length == strlen(text) && memcmp(span->text, text, span->length) == 0;
}

/* The value, NULL where there is none of this name and kind. */
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
        return smla_fail(call->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must be a 64-bit scalar attribute, got none", call->op, name);
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
read_float(const xla_call *call, const char *name, double *value)
{
    return read_scalar(call, name, SMLA_XLA_F64, value, sizeof *value);
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
        return smla_fail(call->error, SMLA_ERROR_VALUE,
                         "%s: `%s` must be \"auto\", \"bfloat16\" or \"fp8_ds_mla\", got \"%.*s\"",
                         call->op, name, (int)span->length, span->text);
    }
    return SMLA_OK;
}

/* ---- Arrays ---------------------------------------------------------------------------------- */

/* DLPack's name of an element type; for the rest an opaque one, which every operator refuses. */
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

/* Fills *slots[i], a field of the operator's args, with the i-th array of its list. NULL ends the
 * list. */
static smla_status
take_arrays(xla_call *call, const DLTensor **const *slots)
{
    const int64_t num_given = call->frame->arguments.size + call->frame->results.size;
    int64_t present = 0;
    SMLA_TRY(read_int(call, "present", &present));
    bool fits = true;
    int64_t k = 0;
    int i = 0;
    for (; fits && slots[i] != NULL; i++) {
        if ((present >> i & 1) == 0) {
            continue;
        }
        const smla_xla_buffer *buffer = find_buffer(call->frame, k++);
        fits = buffer != NULL;
        if (fits) {
            call->tensors[i] = (DLTensor){
                .data = buffer->data,
                .device = {.device_type = kDLCPU, .device_id = 0},
                .ndim = (int32_t)buffer->rank,
                .dtype = dtype_of(buffer->type),
                .shape = buffer->dims,
            };
            *slots[i] = &call->tensors[i];
        }
    }
    fits = fits && present >> i == 0 && k == num_given;
    if (!fits) {
        return smla_fail(call->error, SMLA_ERROR_VALUE,
                         "%s: `present` must name the %lld arrays of the call, got bits %#llx",
                         call->op, (long long)num_given, (unsigned long long)present);
    }
    return SMLA_OK;
}

/* ---- Operators ------------------------------------------------------------------------------- */

/* The cache comes twice, as an argument and as the result, which has its place. */
static smla_status
concat_and_cache_mla(xla_call *call)
{
    smla_concat_and_cache_mla_args a = {.struct_size = sizeof a};
    const DLTensor *before = NULL;
    const DLTensor **const slots[] = {&a.kv_c,         &a.k_pe,     &before,
                                      &a.slot_mapping, &a.kv_cache, NULL};
    SMLA_TRY(take_arrays(call, slots));
    SMLA_TRY(read_kv_format(call, "kv_cache_dtype", &a.kv_format));
    return smla_concat_and_cache_mla(&a, call->error);
}

/* So does the workspace, which keeps the rows that are not gathered. */
static smla_status
gather_kv_cache(xla_call *call)
{
    smla_gather_kv_cache_args a = {.struct_size = sizeof a};
    const DLTensor *before = NULL;
    const DLTensor **const slots[] = {&a.kv_cache,   &a.block_table,
                                      &a.seq_lens,   &a.workspace_starts,
                                      &a.seq_starts, &before,
                                      &a.out,        NULL};
    SMLA_TRY(take_arrays(call, slots));
    return smla_gather_kv_cache(&a, call->error);
}

static smla_status
dequantize_kv_cache(xla_call *call)
{
    smla_dequantize_kv_cache_args a = {.struct_size = sizeof a};
    const DLTensor **const slots[] = {&a.kv_cache, &a.out, NULL};
    SMLA_TRY(take_arrays(call, slots));
    SMLA_TRY(read_kv_format(call, "kv_format", &a.kv_format));
    return smla_dequantize_kv_cache(&a, call->error);
}

static smla_status
convert_req_index_to_global_index(xla_call *call)
{
    smla_convert_req_index_args a = {.struct_size = sizeof a};
    const DLTensor **const slots[] = {
        &a.req_id_per_token,         &a.block_table, &a.topk_indices, &a.prefill_request_ids,
        &a.prefill_workspace_starts, &a.out,         &a.counts,       NULL};
    SMLA_TRY(take_arrays(call, slots));
    SMLA_TRY(read_int(call, "block_size", &a.block_size));
    return smla_convert_req_index_to_global_index(&a, call->error);
}

static smla_status
sparse_attention(xla_call *call)
{
    smla_sparse_attention_args a = {.struct_size = sizeof a};
    const DLTensor **const slots[] = {&a.q,        &a.q_pe,          &a.kv,
                                      &a.indices,  &a.topk_length,   &a.attn_sink,
                                      &a.extra_kv, &a.extra_indices, &a.extra_topk_length,
                                      &a.out,      &a.lse,           &a.max_logits,
                                      NULL};
    int64_t num_splits = 0;
    SMLA_TRY(take_arrays(call, slots));
    SMLA_TRY(read_float(call, "softmax_scale", &a.softmax_scale));
    SMLA_TRY(read_int(call, "num_splits", &num_splits));
    SMLA_TRY(read_kv_format(call, "kv_format", &a.kv_format));
    a.num_splits = (int32_t)num_splits;
    if (a.num_splits != num_splits) {
        return smla_fail(call->error, SMLA_ERROR_VALUE,
                         "%s: `num_splits` must be 0 to 64, got %lld", call->op,
                         (long long)num_splits);
    }
    const int64_t bytes = smla_py_workspace_bytes(&a);
    smla_py_scratch scratch = {.bytes = 0};
    if (bytes > 0) {
        a.workspace = smla_py_take_scratch(&scratch, bytes);
        if (a.workspace == NULL) {
            return smla_fail(call->error, SMLA_ERROR_MEMORY,
                             "%s: no memory for a workspace of %lld bytes", call->op,
                             (long long)bytes);
        }
    }
    const smla_status status = smla_sparse_attention(&a, call->error);
    free(scratch.tensor.data);
    return status;
}

static smla_status
merge_attn_states(xla_call *call)
{
    smla_merge_attn_states_args a = {.struct_size = sizeof a};
    const DLTensor **const slots[] = {&a.out_a, &a.lse_a, &a.out_b, &a.lse_b, &a.out, &a.lse, NULL};
    SMLA_TRY(take_arrays(call, slots));
    return smla_merge_attn_states(&a, call->error);
}

static smla_status
k_up_proj(xla_call *call)
{
    smla_k_up_proj_args a = {.struct_size = sizeof a};
    const DLTensor **const slots[] = {&a.q_nope, &a.w_uk, &a.out, NULL};
    SMLA_TRY(take_arrays(call, slots));
    return smla_k_up_proj(&a, call->error);
}

static smla_status
v_up_proj(xla_call *call)
{
    smla_v_up_proj_args a = {.struct_size = sizeof a};
    const DLTensor **const slots[] = {&a.x, &a.w_uv, &a.out, NULL};
    SMLA_TRY(take_arrays(call, slots));
    return smla_v_up_proj(&a, call->error);
}

static smla_status
dynamic_per_tensor_quant(xla_call *call)
{
    smla_dynamic_per_tensor_quant_args a = {.struct_size = sizeof a};
    const DLTensor **const slots[] = {&a.x, &a.out, &a.scale, NULL};
    SMLA_TRY(take_arrays(call, slots));
    return smla_dynamic_per_tensor_quant(&a, call->error);
}

static const struct {
    const char *name;
    smla_status (*run)(xla_call *call);
} operators[] = {
    {"concat_and_cache_mla", concat_and_cache_mla},
    {"gather_kv_cache", gather_kv_cache},
    {"dequantize_kv_cache", dequantize_kv_cache},
    {"convert_req_index_to_global_index", convert_req_index_to_global_index},
    {"sparse_attention", sparse_attention},
    {"merge_attn_states", merge_attn_states},
    {"k_up_proj", k_up_proj},
    {"v_up_proj", v_up_proj},
    {"dynamic_per_tensor_quant", dynamic_per_tensor_quant},
};

/* ---- Handler --------------------------------------------------------------------------------- */

static smla_status
run_operator(const smla_xla_frame *frame, smla_error *error)
{
    if (frame->arguments.struct_size != sizeof frame->arguments ||
        frame->results.struct_size != sizeof frame->results ||
        frame->attributes.struct_size != sizeof frame->attributes) {
        return smla_fail(error, SMLA_ERROR_RUNTIME,
                         "sparse_mla: XLA's call frame must be that of version %d.%d, got another",
                         SMLA_XLA_MAJOR, SMLA_XLA_MINOR);
    }
    const smla_xla_span *name = find_attribute(frame, "operator", SMLA_XLA_IS_STRING);
    for (size_t i = 0; name != NULL && i < sizeof operators / sizeof operators[0]; i++) {
        if (spells(name, operators[i].name)) {
            xla_call call = {.op = operators[i].name, .frame = frame, .error = error};
            return operators[i].run(&call);
        }
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
handle(smla_xla_frame *frame)
{
    if (frame->extensions != NULL && frame->extensions->type == SMLA_XLA_EXTENSION_METADATA) {
        smla_xla_metadata *metadata = ((smla_xla_metadata_extension *)frame->extensions)->metadata;
        metadata->version.major = SMLA_XLA_MAJOR;
        metadata->version.minor = SMLA_XLA_MINOR;
        return NULL;
    }
    /* XLA flushes subnormal numbers to zero on its threads. A call is to have the bits of any
     * other, and threads that it starts inherit what it finds. */
    fenv_t environment;
    smla_error error;
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    const smla_status status = run_operator(frame, &error);
    fesetenv(&environment);
    if (status == SMLA_OK) {
        return NULL;
    }
    return frame->api->create_error(&(smla_xla_error_args){
        .struct_size = sizeof(smla_xla_error_args),
        .message = error.text,
        .code = code_of(error.status),
    });
}

static PyObject *
xla_handler(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    smla_xla_handler *const handler = handle;
    void *pointer = NULL;
    memcpy(&pointer, &handler, sizeof pointer); /* C has no cast from functions to objects */
    return PyCapsule_New(pointer, NULL, NULL);
}

PyMethodDef smla_py_xla_functions[] = {
    {"xla_handler", xla_handler, METH_NOARGS,
     "xla_handler($module, /)\n--\n\nSee sparse_mla.integrations.jax."},
    {NULL, NULL, 0, NULL},
};
