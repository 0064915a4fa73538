/* test_cuda_events.c: csrc/cuda/host/events.c on the fake runtime of runtime.h: events, captures,
 * and fills of zero.
 */
#include "fake_cuda/mirrors.h"

static void
test_events(void)
{
    const smla_stream_ops *const ops = &smla_cuda_stream_ops;
    smla_event *event = NULL;
    bool is_capturing_now = true;
    begin();
    EXPECT_OK(ops->is_capturing(op, stream_at(0), &is_capturing_now, &error));
    EXPECT(!is_capturing_now);
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cuCtxPopCurrent@1 ");
    streams[0].is_capturing = true;
    EXPECT_OK(ops->is_capturing(op, stream_at(0), &is_capturing_now, &error));
    EXPECT(is_capturing_now);
    fake.is_busy = true;
    forget_calls();
    EXPECT_OK(ops->record(op, stream_at(0), &event, &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaEventCreateWithFlags@1 cudaEventRecord@1 "
                 "cuCtxPopCurrent@1 ");
    EXPECT(event->handle->stream == &streams[0]);
    EXPECT(!ops->is_done(event));
    EXPECT_CALLS("cudaEventQuery~ ");
    EXPECT_OK(ops->wait(op, stream_at(1), event, &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamWaitEvent@1 cuCtxPopCurrent@1 ");
    EXPECT(streams[1].waits_for == event->handle);
    fail_call("cudaEventQuery", 0, cudaErrorLaunchFailure);
    EXPECT(ops->is_done(event)); /* the device has failed, so nothing more will come */
    forget_calls();
    ops->finish(event);
    EXPECT_CALLS("cudaEventSynchronize~ ");
    EXPECT(ops->is_done(event));
    forget_calls();
    ops->destroy(event);
    EXPECT_CALLS("cudaEventDestroy~ ");
    uint8_t memory[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    EXPECT_OK(ops->fill_zero(op, stream_at(0), memory, 7, &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaMemsetAsync@1 cuCtxPopCurrent@1 ");
    EXPECT(memory[0] == 0 && memory[6] == 0 && memory[7] == 1);
    EXPECT_OK(ops->fill_zero(op, stream_at(0), NULL, 0, &error));
    EXPECT_CALLS("");
    destroy_all(NULL);
}

static void
test_events_fail(void)
{
    const smla_stream_ops *const ops = &smla_cuda_stream_ops;
    smla_event *event = NULL;
    smla_event *none = NULL;
    bool is_capturing_now = false;
    uint8_t memory[1] = {1};
    begin();
    EXPECT_OK(ops->record(op, stream_at(0), &event, &error));
    static const char *const calls[] = {"cuCtxPushCurrent", "cudaEventCreateWithFlags",
                                        "cudaEventRecord"};
    for (int i = 0; i < 3; i++) {
        char text[64];
        snprintf(text, sizeof text, "%s: %s failed", op, calls[i]);
        fail_call(calls[i], 0, cudaErrorUnknown);
        EXPECT_FAIL(ops->record(op, stream_at(0), &none, &error), SMLA_ERROR_RUNTIME, text);
        EXPECT(none == NULL);
        EXPECT_EQ(fake.num_events, 1);
        EXPECT_EQ(fake.current, 0);
    }
    num_good_allocations = 0;
    EXPECT_FAIL(ops->record(op, stream_at(0), &none, &error), SMLA_ERROR_MEMORY,
                "an event must fit in memory, got none");
    for (int i = 0; i < 2; i++) {
        const char *const at = i == 0 ? "cuCtxPushCurrent" : NULL;
        const int later = i; /* first the guard's call fails, then the call behind it */
        fail_call(at, later, cudaErrorUnknown);
        EXPECT_FAIL(ops->wait(op, stream_at(0), event, &error), SMLA_ERROR_RUNTIME,
                    i == 0 ? "cuCtxPushCurrent" : "cudaStreamWaitEvent");
        fail_call(at, later, cudaErrorUnknown);
        EXPECT_FAIL(ops->fill_zero(op, stream_at(0), memory, 1, &error), SMLA_ERROR_RUNTIME,
                    i == 0 ? "cuCtxPushCurrent" : "cudaMemsetAsync");
        fail_call(at, later, cudaErrorUnknown);
        EXPECT_FAIL(ops->is_capturing(op, stream_at(0), &is_capturing_now, &error),
                    SMLA_ERROR_RUNTIME, i == 0 ? "cuCtxPushCurrent" : "cudaStreamIsCapturing");
        EXPECT_EQ(fake.current, 0);
    }
    EXPECT_EQ(memory[0], 1);
    ops->destroy(event);
    destroy_all(NULL);
}

int
main(void)
{
    RUN(test_events);
    RUN(test_events_fail);
    return report("test_cuda_events");
}
