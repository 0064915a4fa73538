/* step_object.h: what the Python objects of the metadata builders share: a lock, their arguments,
 * the arrays that a step holds, views of persistent buffers, and results of which a call writes the
 * first rows.
 */
#pragma once

#include <stdatomic.h>

#include "python/arrays/tensor.h"
#include "python/call/call.h"

/* Admits one thread at a time: a build or a call of a layer runs, possibly without the GIL. A
 * second thread gets an exception, so that there is no race. */
int smla_py_enter_builder(atomic_flag *is_busy, const char *op);

static inline void
smla_py_leave_builder(atomic_flag *is_busy)
{
    atomic_flag_clear(is_busy);
}

/* New array of up to two dimensions over a persistent buffer, an ndarray on the CPU, else a Tensor
 * with `event`. NULL data gives None. The view is read-only, because only the builder may write
 * what kernels read. */
PyObject *smla_py_view_buffer(PyObject *owner, DLDevice device, PyObject *event, DLDataType dtype,
                              const void *data, int ndim, const int64_t *shape, int64_t row_stride);

/* Reads path=: None, or the name of one of `paths`, which ends with SMLA_PATH_AUTO. `choices` lists
 * the names for the error text. */
int smla_py_parse_path(const char *op, PyObject *object, const smla_path *paths,
                       const char *choices, int32_t *path);

/* Acquires workspace=, which a builder holds as long as it lives. */
int smla_py_take_workspace(const smla_py_state *state, const char *op, PyObject *object,
                           smla_py_array *workspace);

/* A batch that the caller gave, with copies of its host arrays. */
typedef struct smla_py_batch {
    int32_t *query_start_loc;
    int32_t *seq_lens;
    int64_t num_reqs;
    int64_t num_actual_tokens;
} smla_py_batch;

/* Reads a batch: `arrays` are query_start_loc_cpu and seq_lens_cpu, `counts` are num_reqs and
 * num_actual_tokens. Its caller then frees it, on success and on failure. */
int smla_py_read_batch(const smla_py_state *state, const char *op, PyObject *const arrays[2],
                       PyObject *const counts[2], smla_py_batch *batch);

void smla_py_free_batch(smla_py_batch *batch);

/* Checks that the step of a layer's metadata, build number `generation`, is the latest one. */
int smla_py_check_generation(const char *op, int64_t latest, int64_t generation);

/* Releases the arrays of the former step once the work submitted so far is over. `event` becomes a
 * new reference to the build's event, or stays NULL where views need none. */
int smla_py_replace_step(const smla_py_state *state, const char *op, smla_py_array *former,
                         const smla_py_array *next, int num_arrays, smla_py_stream *stream,
                         PyObject **event);

/* Allocates the results of attention, unless the caller gave them: array `out` [T, H, 512] bf16 and
 * the next one, lse [T, H] fp32, for array `q` [T, H, any]. Rows from `num_written` on are zeroed,
 * because the call does not write them. For a bad `q` it does nothing, because the core refuses it.
 */
int smla_py_allocate_rows(smla_py_call *call, int q, int out, int64_t num_written);

/* Zeroes bytes of the device of a call. */
int smla_py_fill_zero(smla_py_call *call, DLDevice device, void *memory, int64_t bytes);

/* The class method warm_up of the V4 builder. Defined in v4_warm_up.c. */
PyObject *smla_py_v4_warm_up(PyObject *type, PyObject *const *args, Py_ssize_t num_args);
