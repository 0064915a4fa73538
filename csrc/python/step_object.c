/* step_object.c: what the Python objects of the metadata builders share. */
#include "python/step_object.h"

#include <stdlib.h>
#include <string.h>

int
smla_py_enter_builder(atomic_flag *is_busy, const char *op)
{
    if (!atomic_flag_test_and_set(is_busy)) {
        return 0;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "%s: `builder` must be used by one thread at a time, got a second one", op);
    return -1;
}

PyObject *
smla_py_view_buffer(PyObject *owner, DLDevice device, PyObject *event, DLDataType dtype,
                    const void *data, int ndim, const int64_t *shape, int64_t row_stride)
{
    if (data == NULL) {
        return Py_NewRef(Py_None);
    }
    int64_t sizes[2] = {shape[0], ndim == 2 ? shape[1] : 1};
    int64_t strides[2] = {row_stride, 1};
    const DLTensor view = {.data = (void *)(uintptr_t)data,
                           .device = device,
                           .ndim = ndim,
                           .dtype = dtype,
                           .shape = sizes,
                           .strides = strides};
    return device.device_type == kDLCPU
               ? smla_py_numpy_view(smla_py_type_state(owner), owner, &view, false)
               : smla_py_tensor_view(smla_py_type_state(owner), owner, &view, event, true);
}

/* ---- Arguments ----------------------------------------------------------------------------- */

int
smla_py_parse_path(const char *op, PyObject *object, const smla_path *paths, const char *choices,
                   int32_t *path)
{
    *path = SMLA_PATH_AUTO;
    if (object == Py_None) {
        return 0;
    }
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : "";
    if (text == NULL) {
        return -1;
    }
    for (int i = 0; paths[i] != SMLA_PATH_AUTO; i++) {
        if (strcmp(text, smla_path_name(paths[i])) == 0) {
            *path = paths[i];
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s: `path` must be None, %s, got %R", op, choices, object);
    return -1;
}

int
smla_py_take_workspace(const smla_py_state *state, const char *op, PyObject *object,
                       smla_py_array *workspace)
{
    smla_py_stream stream = {.backend = NULL};
    if (smla_py_acquire(state, op, "workspace", SMLA_PY_RETAINED_OUTPUT, object, workspace) < 0) {
        return -1;
    }
    return smla_py_resolve_stream_of(state, op, workspace, 1, &stream);
}

/* Reads a host array that has `num_more` entries more than the batch has requests. */
static int
read_host_array(const smla_py_state *state, const char *op, const char *name, PyObject *object,
                int64_t num_reqs, int64_t num_more, int32_t **values)
{
    int64_t count = 0;
    if (smla_py_host_ints(state, op, name, object, values, &count) < 0) {
        return -1;
    }
    if (count - num_more == num_reqs) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: `%s` must be of the %lld requests of `num_reqs`, got those of %lld", op, name,
                 (long long)num_reqs, (long long)(count - num_more));
    return -1;
}

int
smla_py_read_batch(const smla_py_state *state, const char *op, PyObject *const arrays[2],
                   PyObject *const counts[2], smla_py_batch *batch)
{
    *batch = (smla_py_batch){.num_reqs = 0};
    if (smla_py_parse_int(op, "num_reqs", counts[0], &batch->num_reqs) < 0 ||
        smla_py_parse_int(op, "num_actual_tokens", counts[1], &batch->num_actual_tokens) < 0 ||
        read_host_array(state, op, "query_start_loc_cpu", arrays[0], batch->num_reqs, 1,
                        &batch->query_start_loc) < 0) {
        return -1;
    }
    return read_host_array(state, op, "seq_lens_cpu", arrays[1], batch->num_reqs, 0,
                           &batch->seq_lens);
}

void
smla_py_free_batch(smla_py_batch *batch)
{
    free(batch->query_start_loc);
    free(batch->seq_lens);
}

int
smla_py_check_generation(const char *op, int64_t latest, int64_t generation)
{
    if (generation == latest) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: `metadata` must come from its builder's latest build (number %lld), got that "
                 "of build %lld",
                 op, (long long)latest, (long long)generation);
    return -1;
}

/* ---- Steps --------------------------------------------------------------------------------- */

int
smla_py_replace_step(const smla_py_state *state, const char *op, smla_py_array *former,
                     const smla_py_array *next, int num_arrays, smla_py_stream *stream,
                     PyObject **event)
{
    int status = 0;
    if (stream->is_cuda) {
        status = smla_py_find_backend(op, stream);
        if (status == 0 && !stream->is_capturing) {
            *event = smla_py_record(op, stream);
            status = *event == NULL ? -1 : 0;
        }
        bool is_foreign = false;
        for (int i = 0; i < num_arrays; i++) {
            is_foreign |= next[i].is_foreign;
        }
        for (int i = 0; i < num_arrays; i++) {
            former[i].is_foreign |= is_foreign;
        }
        if (status == 0) {
            status = smla_py_keep(state, op, former, num_arrays, stream);
        }
    }
    for (int i = 0; i < num_arrays; i++) {
        smla_py_release_array(&former[i]);
    }
    return status;
}

int
smla_py_fill_zero(smla_py_call *call, DLDevice device, void *memory, int64_t bytes)
{
    if (device.device_type == kDLCPU) {
        memset(memory, 0, (size_t)bytes);
        return 0;
    }
    smla_error error;
    if (smla_py_find_backend(call->op, &call->stream) < 0) {
        return -1;
    }
    const smla_stream_ops *const ops = call->stream.backend->streams;
    return smla_py_check(ops->fill_zero(call->op, call->stream.at, memory, bytes, &error), &error);
}

/* Zeroes the rows of a new result from row `num_written` on. */
static int
fill_rest(smla_py_call *call, const smla_py_array *array, int64_t num_written)
{
    const int64_t row_bytes = smla_py_bytes(&array->view) / array->shape[0];
    char *const rest = (char *)smla_data(&array->view) + num_written * row_bytes;
    return smla_py_fill_zero(call, array->view.device, rest,
                             (array->shape[0] - num_written) * row_bytes);
}

static int
allocate_result(smla_py_call *call, int i, DLDataType dtype, int ndim, const int64_t *shape,
                int64_t num_written)
{
    if (call->arrays[i].object != NULL) {
        return 0;
    }
    if (smla_py_allocate_result(call, i, dtype, ndim, shape) < 0) {
        return -1;
    }
    return num_written < shape[0] ? fill_rest(call, &call->arrays[i], num_written) : 0;
}

int
smla_py_allocate_rows(smla_py_call *call, int q, int out, int64_t num_written)
{
    const int64_t shape[3] = {smla_py_call_dim(call, q, 0), smla_py_call_dim(call, q, 1),
                              SMLA_KV_LORA_RANK};
    if (!smla_py_has_rank(call, q, 3) || shape[1] > SMLA_MAX_HEADS) {
        return 0;
    }
    if (allocate_result(call, out, smla_py_bf16, 3, shape, num_written) < 0) {
        return -1;
    }
    return allocate_result(call, out + 1, smla_py_fp32, 2, shape, num_written);
}
