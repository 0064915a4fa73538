/* mirror.c: memory that the CUDA backend owns: a builder's buffers, and its mirror.
 *
 * A mirror is a block of device memory and a ring of pinned staging buffers. A build fills the
 * oldest buffer and sends it in one copy. The event recorded after this copy tells when the buffer
 * may be filled again. A build queries the event and never waits for it: if the oldest buffer is
 * still being copied, the ring grows by one.
 *
 * Order. Each upload and each use of the block comes after the one before it. Within one stream
 * this holds by itself. Another stream is told to wait for the event of the upload or use before.
 * So events complete in the order of the ring, the oldest buffer is the first to be free, and the
 * newest event stands for all uploads and uses before it. Streams are told apart by their ids,
 * which are never given out twice. No stream handle is kept after the call that passed it.
 * Recording an event costs the host 1 us. The legacy stream never goes away, so the event after a
 * use on that stream is recorded only when another stream has to wait.
 *
 * Captures. A use that is being captured is part of a graph. It runs when the graph is replayed, in
 * the order of the stream that replays it, so a use does nothing in a capture. The caller must
 * replay on the stream of the builds, or order the replay by an event. A build cannot be captured,
 * because its staging buffer would hold another build's data by the time of the replay.
 *
 * A mirror is used by one thread at a time, as its builder is.
 */
#include <limits.h>
#include <stdlib.h>

#include "cuda/host/cuda.h"

/* ---- Plain device memory ------------------------------------------------------------------- */

static const char memory_op[] = "CUDA memory";

static void *
allocate_here(int64_t bytes)
{
    void *memory = NULL;
    const cudaError_t code = cudaMalloc(&memory, bytes > 0 ? (size_t)bytes : 1);
    return code == cudaSuccess ? memory : NULL;
}

/* Zeros memory before anybody can use it. A new stream does this, because it waits for no other
 * stream, and no other stream needs to wait for it. */
static cudaError_t
clear(void *memory, int64_t bytes)
{
    cudaStream_t stream = NULL;
    cudaError_t code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (code != cudaSuccess) {
        return code;
    }
    code = cudaMemsetAsync(memory, 0, (size_t)bytes, stream);
    if (code == cudaSuccess) {
        code = cudaStreamSynchronize(stream);
    }
    (void)cudaStreamDestroy(stream);
    return code;
}

static void *
allocate(int32_t device_id, int64_t bytes, bool clears)
{
    smla_cuda_guard guard;
    if (smla_cuda_enter(memory_op, device_id, &guard, NULL) != SMLA_OK) {
        return NULL;
    }
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    void *memory = allocate_here(bytes);
    if (memory != NULL && clears && clear(memory, bytes) != cudaSuccess) {
        (void)cudaFree(memory);
        memory = NULL;
    }
    smla_cuda_restore_captures(former);
    smla_cuda_leave(&guard);
    return memory;
}

void *
smla_cuda_allocate(int32_t device_id, int64_t bytes)
{
    return allocate(device_id, bytes, false);
}

void *
smla_cuda_allocate_zeros(int32_t device_id, int64_t bytes)
{
    return allocate(device_id, bytes, true);
}

/* Frees device memory, even if its device cannot be made current, because cudaFree finds the device
 * by the address. It waits for the work that uses the memory. It fails if the driver was shut down
 * before, at the interpreter's exit; then nothing is left to free. */
void
smla_cuda_release(int32_t device_id, void *memory)
{
    smla_cuda_guard guard;
    if (memory == NULL) {
        return;
    }
    (void)smla_cuda_enter(memory_op, device_id, &guard, NULL);
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    (void)cudaFree(memory);
    smla_cuda_restore_captures(former);
    smla_cuda_leave(&guard);
}

/* ---- The ring ------------------------------------------------------------------------------ */

typedef struct staging {
    struct staging *next; /* circular: the oldest buffer follows the newest */
    void *host;
    cudaEvent_t sent;
} staging;

typedef struct cuda_mirror {
    smla_mirror base; /* first member, so that both structs have the same address */
    int32_t device_id;
    staging *last;      /* the buffer sent last; the next build fills the one after it */
    cudaEvent_t used;   /* event after the last use */
    cudaEvent_t newest; /* event of the last upload or use; NULL before the first */
    /* Whether `newest` is recorded; if not, it is still to be recorded, on the legacy stream. */
    bool is_recorded;
    unsigned long long newest_stream; /* id of the newest event's stream */
    /* Results of begin_use, for end_use. */
    bool use_is_captured;
    unsigned long long use_stream;
} cuda_mirror;

enum { FIRST_BUFFERS = 3 }; /* one to fill, one that is being copied, one to spare */

static void
free_staging(staging *buffer)
{
    if (buffer->sent != NULL) {
        (void)cudaEventSynchronize(buffer->sent);
        (void)cudaEventDestroy(buffer->sent);
    }
    if (buffer->host != NULL) {
        (void)cudaFreeHost(buffer->host);
    }
    free(buffer);
}

/* Inserts a new buffer after the one sent last, where the next build looks for the oldest. */
static cudaError_t
grow_ring(cuda_mirror *m)
{
    staging *buffer = calloc(1, sizeof *buffer);
    if (buffer == NULL) {
        return cudaErrorMemoryAllocation;
    }
    const size_t bytes = m->base.bytes > 0 ? (size_t)m->base.bytes : 1;
    cudaError_t code = cudaHostAlloc(&buffer->host, bytes, cudaHostAllocDefault);
    if (code == cudaSuccess) {
        code = cudaEventCreateWithFlags(&buffer->sent, cudaEventDisableTiming);
    }
    if (code != cudaSuccess) {
        free_staging(buffer);
        return code;
    }
    buffer->next = buffer;
    if (m->last != NULL) {
        buffer->next = m->last->next;
        m->last->next = buffer;
    } else {
        m->last = buffer;
    }
    return cudaSuccess;
}

static bool
fill_mirror(cuda_mirror *m)
{
    m->base.device = allocate_here(m->base.bytes);
    bool good = m->base.device != NULL && clear(m->base.device, m->base.bytes) == cudaSuccess &&
                cudaEventCreateWithFlags(&m->used, cudaEventDisableTiming) == cudaSuccess;
    for (int i = 0; good && i < FIRST_BUFFERS; i++) {
        good = grow_ring(m) == cudaSuccess;
    }
    return good;
}

/* Frees all that a mirror has. The block comes first: cudaFree waits for the uploads, so later
 * calls need not wait. */
static void
empty_mirror(cuda_mirror *m)
{
    if (m->base.device != NULL) {
        (void)cudaFree(m->base.device);
    }
    if (m->used != NULL) {
        (void)cudaEventDestroy(m->used);
    }
    staging *buffer = m->last == NULL ? NULL : m->last->next;
    if (m->last != NULL) {
        m->last->next = NULL;
    }
    while (buffer != NULL) {
        staging *next = buffer->next;
        free_staging(buffer);
        buffer = next;
    }
}

smla_mirror *
smla_cuda_create_mirror(int32_t device_id, int64_t bytes)
{
    smla_cuda_guard guard;
    cuda_mirror *m = calloc(1, sizeof *m);
    if (m == NULL || smla_cuda_enter(memory_op, device_id, &guard, NULL) != SMLA_OK) {
        free(m);
        return NULL;
    }
    m->base.bytes = bytes;
    m->device_id = device_id;
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    const bool good = fill_mirror(m);
    if (!good) {
        empty_mirror(m);
    }
    smla_cuda_restore_captures(former);
    smla_cuda_leave(&guard);
    if (!good) {
        free(m);
        return NULL;
    }
    return &m->base;
}

void
smla_cuda_destroy_mirror(smla_mirror *mirror)
{
    cuda_mirror *m = (cuda_mirror *)mirror;
    if (m == NULL) {
        return;
    }
    /* If the device is gone (driver shut down, or lost), the calls fail and do no harm. */
    smla_cuda_guard guard = {0};
    (void)smla_cuda_enter(memory_op, m->device_id, &guard, NULL);
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    empty_mirror(m);
    smla_cuda_restore_captures(former);
    smla_cuda_leave(&guard);
    free(m);
}

/* ---- Order --------------------------------------------------------------------------------- */

#define LEGACY_ID ULLONG_MAX /* no stream has this id, because CUDA counts ids up */

static smla_status
find_id(const char *op, smla_stream stream, unsigned long long *id, smla_error *error)
{
    if (stream.handle == NULL) { /* there is one legacy stream in the block's context */
        *id = LEGACY_ID;
        return SMLA_OK;
    }
    return smla_cuda_status(op, "cudaStreamGetId", cudaStreamGetId((cudaStream_t)stream.handle, id),
                            error);
}

/* Makes later work on the stream wait for the newest upload or use. */
static smla_status
wait_for_newest(const char *op, cuda_mirror *m, smla_stream stream, unsigned long long id,
                smla_error *error)
{
    if (m->newest == NULL || m->newest_stream == id) {
        return SMLA_OK;
    }
    if (!m->is_recorded) {
        SMLA_TRY(smla_cuda_status(op, "cudaEventRecord", cudaEventRecord(m->newest, NULL), error));
        m->is_recorded = true;
    }
    return smla_cuda_status(op, "cudaStreamWaitEvent",
                            cudaStreamWaitEvent((cudaStream_t)stream.handle, m->newest,
                                                cudaEventWaitDefault),
                            error);
}

static smla_status
record_newest(const char *op, cuda_mirror *m, smla_stream stream, unsigned long long id,
              cudaEvent_t event, smla_error *error)
{
    SMLA_TRY(smla_cuda_status(op, "cudaEventRecord",
                              cudaEventRecord(event, (cudaStream_t)stream.handle), error));
    m->newest = event;
    m->is_recorded = true;
    m->newest_stream = id;
    return SMLA_OK;
}

/* ---- Write --------------------------------------------------------------------------------- */

static smla_status
refuse_capture(const char *op, smla_stream stream, smla_error *error)
{
    bool is_capturing = false;
    SMLA_TRY(smla_cuda_is_capturing(op, stream, &is_capturing, error));
    if (is_capturing) {
        return smla_fail_value(
            error, op,
            "`stream` must not be capturing a CUDA graph, got one that is: build before the "
            "capture, and again before each replay, which reads what the last build wrote");
    }
    return SMLA_OK;
}

/* Ensures that the buffer after the one sent last is free to be filled. */
static smla_status
find_free_buffer(const char *op, cuda_mirror *m, smla_error *error)
{
    const cudaError_t code = cudaEventQuery(m->last->next->sent);
    if (code != cudaErrorNotReady) {
        return smla_cuda_status(op, "cudaEventQuery", code, error);
    }
    return smla_cuda_status(op, "cudaHostAlloc", grow_ring(m), error);
}

smla_status
smla_cuda_begin_write(const char *op, smla_mirror *mirror, smla_stream stream, void **host,
                      smla_error *error)
{
    cuda_mirror *m = (cuda_mirror *)mirror;
    smla_cuda_guard guard;
    SMLA_TRY(smla_cuda_enter(op, m->device_id, &guard, error));
    smla_status status = smla_cuda_check_stream(op, stream, error);
    if (status == SMLA_OK) {
        status = refuse_capture(op, stream, error);
    }
    if (status == SMLA_OK) {
        const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
        status = find_free_buffer(op, m, error);
        smla_cuda_restore_captures(former);
    }
    smla_cuda_leave(&guard);
    m->base.used_bytes = m->base.bytes;
    *host = m->last->next->host;
    return status;
}

static smla_status
send_buffer(const char *op, cuda_mirror *m, smla_stream stream, smla_error *error)
{
    staging *buffer = m->last->next;
    cudaStream_t handle = (cudaStream_t)stream.handle;
    unsigned long long id = 0;
    SMLA_TRY(find_id(op, stream, &id, error));
    SMLA_TRY(wait_for_newest(op, m, stream, id, error));
    SMLA_TRY(
        smla_cuda_status(op, "cudaMemcpyAsync",
                         cudaMemcpyAsync(m->base.device, buffer->host, (size_t)m->base.used_bytes,
                                         cudaMemcpyHostToDevice, handle),
                         error));
    const smla_status status = record_newest(op, m, stream, id, buffer->sent, error);
    if (status != SMLA_OK) { /* no event will tell when the copy is done, so wait here */
        (void)cudaStreamSynchronize(handle);
        return status;
    }
    m->last = buffer;
    return SMLA_OK;
}

smla_status
smla_cuda_end_write(const char *op, smla_mirror *mirror, smla_stream stream, smla_error *error)
{
    cuda_mirror *m = (cuda_mirror *)mirror;
    smla_cuda_guard guard;
    SMLA_TRY(smla_cuda_enter(op, m->device_id, &guard, error));
    const smla_status status = send_buffer(op, m, stream, error);
    smla_cuda_leave(&guard);
    return status;
}

/* ---- Use ----------------------------------------------------------------------------------- */

static smla_status
begin_use(const char *op, cuda_mirror *m, smla_stream stream, smla_error *error)
{
    SMLA_TRY(smla_cuda_is_capturing(op, stream, &m->use_is_captured, error));
    if (m->use_is_captured) {
        return SMLA_OK;
    }
    SMLA_TRY(find_id(op, stream, &m->use_stream, error));
    return wait_for_newest(op, m, stream, m->use_stream, error);
}

smla_status
smla_cuda_begin_use(const char *op, smla_mirror *mirror, smla_stream stream, smla_error *error)
{
    cuda_mirror *m = (cuda_mirror *)mirror;
    smla_cuda_guard guard;
    SMLA_TRY(smla_cuda_enter(op, m->device_id, &guard, error));
    const smla_status status = begin_use(op, m, stream, error);
    smla_cuda_leave(&guard);
    return status;
}

smla_status
smla_cuda_end_use(const char *op, smla_mirror *mirror, smla_stream stream, smla_error *error)
{
    cuda_mirror *m = (cuda_mirror *)mirror;
    smla_cuda_guard guard;
    if (m->use_is_captured) {
        return SMLA_OK;
    }
    /* The legacy stream exists for ever, so the event can be recorded later. */
    if (stream.handle == NULL) {
        m->newest = m->used;
        m->is_recorded = false;
        m->newest_stream = m->use_stream;
        return SMLA_OK;
    }
    SMLA_TRY(smla_cuda_enter(op, m->device_id, &guard, error));
    const smla_status status = record_newest(op, m, stream, m->use_stream, m->used, error);
    smla_cuda_leave(&guard);
    return status;
}
