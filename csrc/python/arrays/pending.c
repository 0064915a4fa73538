/* pending.c: events behind the work of calls, and arrays kept alive until their event has passed.
 *
 * A call returns while the device still works. Most producers free memory in the order of the
 * call's stream, so that nothing is reused too early. Arrays of the other producers are kept in a
 * list, together with an event. A later call that finds the event passed releases them. Clearing
 * the module waits for the events that are left and releases their arrays.
 *
 * As a Python object an event is a capsule. The Tensors that a call wrote and the batch of arrays
 * that it kept share the capsule; the last owner destroys the event.
 */
#include <stdlib.h>

#include "python/arrays/exchange.h"
#include "python/arrays/tensor.h"

/* ---- Events -------------------------------------------------------------------------------- */

static const char event_name[] = "sparse_mla.event";

static const smla_backend *
backend_of(PyObject *event)
{
    return PyCapsule_GetContext(event);
}

static smla_event *
event_of(PyObject *event)
{
    return PyCapsule_GetPointer(event, event_name);
}

static void
destroy_event(PyObject *capsule)
{
    backend_of(capsule)->streams->destroy(event_of(capsule));
}

PyObject *
smla_py_record(const char *op, const smla_py_stream *stream)
{
    const smla_stream_ops *ops = stream->backend->streams;
    smla_event *event = NULL;
    smla_error error;
    if (ops->record(op, stream->at, &event, &error) != SMLA_OK) {
        return smla_py_raise(&error);
    }
    PyObject *capsule = PyCapsule_New(event, event_name, NULL);
    if (capsule == NULL || PyCapsule_SetContext(capsule, (void *)stream->backend) < 0 ||
        PyCapsule_SetDestructor(capsule, destroy_event) < 0) {
        ops->destroy(event);
        Py_CLEAR(capsule);
    }
    return capsule;
}

int
smla_py_wait(const char *op, const smla_backend *backend, smla_stream stream, PyObject *event)
{
    smla_error error;
    return smla_py_check(backend->streams->wait(op, stream, event_of(event), &error), &error);
}

bool
smla_py_is_done(PyObject *event)
{
    return backend_of(event)->streams->is_done(event_of(event));
}

PyObject *
smla_py_take_event(const smla_py_state *state, PyObject *const *slot)
{
    pthread_mutex_lock(&state->shared->lock);
    PyObject *event = Py_XNewRef(*slot);
    pthread_mutex_unlock(&state->shared->lock);
    return event;
}

void
smla_py_set_event(const smla_py_state *state, PyObject **slot, PyObject *event)
{
    pthread_mutex_lock(&state->shared->lock);
    PyObject *former = *slot;
    *slot = Py_XNewRef(event);
    pthread_mutex_unlock(&state->shared->lock);
    Py_XDECREF(former);
}

/* ---- The list ------------------------------------------------------------------------------ */

/* The arrays kept for one call. Only those of their fields that the release needs are valid. */
typedef struct smla_py_batch {
    struct smla_py_batch *next;
    PyObject *event;
    int num_arrays;
    smla_py_array arrays[];
} smla_py_batch;

int
smla_py_init_shared(smla_py_state *state)
{
    state->shared = calloc(1, sizeof *state->shared);
    if (state->shared == NULL || pthread_mutex_init(&state->shared->lock, NULL) != 0) {
        free(state->shared);
        state->shared = NULL;
        PyErr_NoMemory();
        return -1;
    }
    state->shared->end = &state->shared->first;
    return 0;
}

static void
add_batch(smla_py_shared *shared, smla_py_batch *batch)
{
    pthread_mutex_lock(&shared->lock);
    *shared->end = batch;
    shared->end = &batch->next;
    atomic_fetch_add(&shared->num_batches, 1);
    pthread_mutex_unlock(&shared->lock);
}

/* Takes the oldest batch off the list. NULL if there is none, or it must be done and is not. */
static smla_py_batch *
remove_batch(smla_py_shared *shared, bool must_be_done)
{
    pthread_mutex_lock(&shared->lock);
    smla_py_batch *batch = shared->first;
    if (batch != NULL && must_be_done && !smla_py_is_done(batch->event)) {
        batch = NULL;
    }
    if (batch != NULL) {
        shared->first = batch->next;
        shared->end = batch->next == NULL ? &shared->first : shared->end;
        atomic_fetch_sub(&shared->num_batches, 1);
    }
    pthread_mutex_unlock(&shared->lock);
    return batch;
}

static void
free_batch(smla_py_batch *batch)
{
    for (int i = 0; i < batch->num_arrays; i++) {
        smla_py_release_array(&batch->arrays[i]);
    }
    smla_py_drop(batch->event);
    free(batch);
}

void
smla_py_release_pending(const smla_py_state *state)
{
    smla_py_shared *shared = state->shared;
    while (atomic_load_explicit(&shared->num_batches, memory_order_relaxed) > 0) {
        smla_py_batch *batch = remove_batch(shared, true);
        if (batch == NULL) { /* the oldest is in use; a later call looks at the rest */
            return;
        }
        free_batch(batch);
    }
}

void
smla_py_clear_shared(smla_py_state *state)
{
    smla_py_shared *shared = state->shared;
    if (shared == NULL) {
        return;
    }
    for (;;) {
        smla_py_batch *batch = remove_batch(shared, false);
        if (batch == NULL) {
            break;
        }
        Py_BEGIN_ALLOW_THREADS
        backend_of(batch->event)->streams->finish(event_of(batch->event));
        Py_END_ALLOW_THREADS
        free_batch(batch);
    }
    smla_py_clear_cupy(shared);
    smla_py_clear_exchanges(shared);
}

void
smla_py_free_shared(smla_py_state *state)
{
    if (state->shared != NULL) {
        pthread_mutex_destroy(&state->shared->lock);
        free(state->shared);
        state->shared = NULL;
    }
}

/* ---- After the work ------------------------------------------------------------------------ */

static bool
is_written_tensor(const smla_py_state *state, const smla_py_array *array)
{
    return array->object != NULL && array->is_written &&
           Py_TYPE(array->object) == state->tensor_type;
}

/* Moves the memory of the foreign arrays to a batch. Their objects stay, as they may be results. */
static int
keep_foreign(const smla_py_state *state, smla_py_array *arrays, int num_arrays, int num_foreign,
             PyObject *event)
{
    smla_py_batch *batch = malloc(sizeof *batch + (size_t)num_foreign * sizeof batch->arrays[0]);
    if (batch == NULL) {
        Py_BEGIN_ALLOW_THREADS
        backend_of(event)->streams->finish(event_of(event));
        Py_END_ALLOW_THREADS
        PyErr_NoMemory();
        return -1;
    }
    batch->next = NULL;
    batch->event = Py_NewRef(event);
    batch->num_arrays = 0;
    for (int i = 0; i < num_arrays; i++) {
        if (arrays[i].object != NULL && arrays[i].is_foreign) {
            batch->arrays[batch->num_arrays++] = arrays[i];
            Py_INCREF(arrays[i].object);
            arrays[i].release = SMLA_PY_RELEASE_NOTHING;
        }
    }
    add_batch(state->shared, batch);
    return 0;
}

int
smla_py_keep(const smla_py_state *state, const char *op, smla_py_array *arrays, int num_arrays,
             smla_py_stream *stream)
{
    int num_tensors = 0;
    int num_foreign = 0;
    for (int i = 0; stream->is_cuda && i < num_arrays; i++) {
        num_tensors += is_written_tensor(state, &arrays[i]);
        num_foreign += arrays[i].object != NULL && arrays[i].is_foreign;
    }
    if (num_tensors + num_foreign == 0) {
        return 0;
    }
    if (smla_py_find_backend(op, stream) < 0) {
        return -1;
    }
    if (stream->is_capturing) {
        return 0;
    }
    PyObject *event = smla_py_record(op, stream);
    if (event == NULL) {
        return -1;
    }
    for (int i = 0; num_tensors > 0 && i < num_arrays; i++) {
        if (is_written_tensor(state, &arrays[i])) {
            smla_py_set_event(state, smla_py_tensor_event(arrays[i].object), event);
        }
    }
    const int status =
        num_foreign == 0 ? 0 : keep_foreign(state, arrays, num_arrays, num_foreign, event);
    Py_DECREF(event);
    return status;
}
