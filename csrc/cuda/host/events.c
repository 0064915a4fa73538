/* events.c: the functions of smla_stream_ops: order between streams, and whether work is done.
 *
 * Events have no timing and are recorded once. A caller may query or destroy an event at any
 * moment, even while another thread captures a graph, so these calls relax captures.
 */
#include <stdlib.h>

#include "cuda/host/cuda.h"

struct smla_event {
    cudaEvent_t handle;
};

static smla_status
is_capturing(const char *op, smla_stream stream, bool *answer, smla_error *error)
{
    smla_cuda_guard guard;
    SMLA_TRY(smla_cuda_enter(op, stream.device_id, &guard, error));
    const smla_status status = smla_cuda_is_capturing(op, stream, answer, error);
    smla_cuda_leave(&guard);
    return status;
}

static smla_status
record_here(const char *op, smla_stream stream, smla_event *event, smla_error *error)
{
    SMLA_TRY(smla_cuda_status(op, "cudaEventCreateWithFlags",
                              cudaEventCreateWithFlags(&event->handle, cudaEventDisableTiming),
                              error));
    const smla_status status =
        smla_cuda_status(op, "cudaEventRecord", cudaEventRecord(event->handle, stream.handle),
                         error);
    if (status != SMLA_OK) {
        (void)cudaEventDestroy(event->handle);
    }
    return status;
}

static smla_status
record(const char *op, smla_stream stream, smla_event **event, smla_error *error)
{
    smla_cuda_guard guard;
    smla_event *made = malloc(sizeof *made);
    if (made == NULL) {
        return smla_fail(error, SMLA_ERROR_MEMORY, "%s: an event must fit in memory, got none", op);
    }
    smla_status status = smla_cuda_enter(op, stream.device_id, &guard, error);
    if (status == SMLA_OK) {
        status = record_here(op, stream, made, error);
        smla_cuda_leave(&guard);
    }
    if (status != SMLA_OK) {
        free(made);
        return status;
    }
    *event = made;
    return SMLA_OK;
}

static smla_status
wait_for(const char *op, smla_stream stream, const smla_event *event, smla_error *error)
{
    smla_cuda_guard guard;
    SMLA_TRY(smla_cuda_enter(op, stream.device_id, &guard, error));
    const cudaError_t code = cudaStreamWaitEvent(stream.handle, event->handle, 0);
    smla_cuda_leave(&guard);
    return smla_cuda_status(op, "cudaStreamWaitEvent", code, error);
}

static bool
is_done(const smla_event *event)
{
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    const cudaError_t code = cudaEventQuery(event->handle);
    smla_cuda_restore_captures(former);
    return code != cudaErrorNotReady;
}

static void
finish(const smla_event *event)
{
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    (void)cudaEventSynchronize(event->handle);
    smla_cuda_restore_captures(former);
}

static void
destroy(smla_event *event)
{
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    (void)cudaEventDestroy(event->handle);
    smla_cuda_restore_captures(former);
    free(event);
}

static smla_status
fill_zero(const char *op, smla_stream stream, void *memory, int64_t bytes, smla_error *error)
{
    smla_cuda_guard guard;
    if (bytes == 0) {
        return SMLA_OK;
    }
    SMLA_TRY(smla_cuda_enter(op, stream.device_id, &guard, error));
    const cudaError_t code = cudaMemsetAsync(memory, 0, (size_t)bytes, stream.handle);
    smla_cuda_leave(&guard);
    return smla_cuda_status(op, "cudaMemsetAsync", code, error);
}

const smla_stream_ops smla_cuda_stream_ops = {
    .is_capturing = is_capturing,
    .record = record,
    .wait = wait_for,
    .is_done = is_done,
    .finish = finish,
    .destroy = destroy,
    .fill_zero = fill_zero,
};
