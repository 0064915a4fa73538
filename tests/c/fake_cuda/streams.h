/* streams.h: streams, events and captures of the fake runtime of runtime.h. */
#pragma once

#include "state.h"

static inline struct CUstream_st *
find_fake_stream(cudaStream_t stream)
{
    const bool is_default =
        stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return is_default ? &fake_default_stream : stream;
}

cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    const cudaError_t code = answer("cudaStreamCreateWithFlags");
    EXPECT_EQ(flags, (unsigned)cudaStreamNonBlocking);
    if (code == cudaSuccess) {
        *stream = calloc(1, sizeof **stream);
        (*stream)->id = ++fake.num_ids;
        (*stream)->device_id = fake.current;
        fake.num_streams++;
    }
    return code;
}

cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    fake.num_streams--;
    free(stream);
    return answer("cudaStreamDestroy");
}

cudaError_t
cudaStreamSynchronize(cudaStream_t stream)
{
    const cudaError_t code = answer("cudaStreamSynchronize");
    for (int i = 0; i < FAKE_EVENTS && code == cudaSuccess; i++) {
        if (fake.events[i] != NULL && fake.events[i]->stream == find_fake_stream(stream)) {
            fake.events[i]->is_pending = false;
        }
    }
    return code;
}

cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    const cudaError_t code = answer("cudaStreamWaitEvent");
    EXPECT_EQ(flags, (unsigned)cudaEventWaitDefault);
    if (code == cudaSuccess) {
        find_fake_stream(stream)->waits_for = event;
        find_fake_stream(stream)->follows = event->stream;
    }
    return code;
}

cudaError_t
cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    const cudaError_t code = answer("cudaStreamIsCapturing");
    if (code == cudaSuccess) {
        *status = find_fake_stream(stream)->is_capturing ? cudaStreamCaptureStatusActive
                                                         : cudaStreamCaptureStatusNone;
    }
    return code;
}

static inline CUresult
fake_is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    const CUresult result = (CUresult)answer("cuStreamIsCapturing");
    if (result == CUDA_SUCCESS) {
        *status = find_fake_stream(stream)->is_capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                                         : CU_STREAM_CAPTURE_STATUS_NONE;
    }
    return result;
}

cudaError_t
cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
    *id = find_fake_stream(stream)->id;
    return answer("cudaStreamGetId");
}

static inline CUresult
fake_get_id(CUstream stream, unsigned long long *id)
{
    *id = find_fake_stream(stream)->id;
    return (CUresult)answer("cuStreamGetId");
}

static inline CUresult
fake_get_context(CUstream stream, CUcontext *context)
{
    *context = find_fake_stream(stream)->context;
    return (CUresult)answer("cuStreamGetCtx");
}

static inline CUresult
fake_get_own_sms(CUstream stream, CUgreenCtx *context)
{
    *context = find_fake_stream(stream)->own_sms;
    return (CUresult)answer("cuStreamGetGreenCtx");
}

cudaError_t
cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    *device = find_fake_stream(stream)->device_id;
    return answer("cudaStreamGetDevice");
}

cudaError_t
cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = find_fake_stream(stream)->priority;
    return answer("cudaStreamGetPriority");
}

cudaError_t
cudaStreamGetAttribute(cudaStream_t stream, cudaLaunchAttributeID name,
                       cudaLaunchAttributeValue *value)
{
    memset(value, POISON, sizeof *value);
    if (name == cudaLaunchAttributeAccessPolicyWindow) {
        value->accessPolicyWindow.num_bytes = find_fake_stream(stream)->policy_bytes;
        return answer("policy");
    }
    EXPECT_EQ(name, cudaLaunchAttributeMemSyncDomain);
    value->memSyncDomain = find_fake_stream(stream)->is_remote ? cudaLaunchMemSyncDomainRemote
                                                               : cudaLaunchMemSyncDomainDefault;
    return answer("domain");
}

cudaError_t
cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    const enum cudaStreamCaptureMode former = fake_mode;
    fake_mode = *mode;
    *mode = former;
    return cudaSuccess;
}

cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    const cudaError_t code = answer("cudaEventCreateWithFlags");
    EXPECT_EQ(flags, (unsigned)cudaEventDisableTiming);
    for (int i = 0; i < FAKE_EVENTS && code == cudaSuccess; i++) {
        if (fake.events[i] == NULL) {
            *event = fake.events[i] = calloc(1, sizeof **event);
            fake.num_events++;
            return cudaSuccess;
        }
    }
    return code == cudaSuccess ? cudaErrorUnknown : code;
}

cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    const cudaError_t code = answer("cudaEventRecord");
    if (code == cudaSuccess) {
        event->stream = find_fake_stream(stream);
        event->is_pending = fake.is_busy;
    }
    return code;
}

cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    const cudaError_t code = answer("cudaEventQuery");
    return code == cudaSuccess && event->is_pending ? cudaErrorNotReady : code;
}

cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    event->is_pending = false;
    return answer("cudaEventSynchronize");
}

cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    for (int i = 0; i < FAKE_EVENTS; i++) {
        if (fake.events[i] == event) {
            fake.events[i] = NULL;
            fake.num_events--;
            free(event);
            return answer("cudaEventDestroy");
        }
    }
    EXPECT(!"an event that is alive");
    return cudaErrorInvalidResourceHandle;
}
