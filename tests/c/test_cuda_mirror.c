/* test_cuda_mirror.c: the ring of staging buffers of csrc/cuda/host/mirror.c and the order that it
 * keeps, on the fake runtime of runtime.h.
 */
#include "fake_cuda/mirrors.h"

enum { BYTES = 100 };

static smla_mirror *
create(int64_t bytes)
{
    smla_mirror *const mirror = smla_cuda_create_mirror(1, bytes);
    if (mirror == NULL) {
        printf("no mirror\n");
        exit(2);
    }
    forget_calls();
    return mirror;
}

/* One build on a stream, in which every byte is `value`; returns the staging buffer. */
static void *
write_all(smla_mirror *mirror, int stream, int value)
{
    void *host = NULL;
    EXPECT_OK(smla_cuda_begin_write(op, mirror, stream_at(stream), &host, &error));
    if (host != NULL) {
        memset(host, value, (size_t)mirror->bytes);
    }
    EXPECT_OK(smla_cuda_end_write(op, mirror, stream_at(stream), &error));
    for (int64_t i = 0; i < mirror->bytes; i++) {
        EXPECT_EQ(((const uint8_t *)mirror->device)[i], value);
    }
    return host;
}

/* Bytes past `used_bytes` are not sent, until the next write. */
static void
test_parts_of_a_mirror(void)
{
    void *host = NULL;
    smla_mirror *mirror = smla_cuda_create_mirror(0, 24);
    write_all(mirror, 0, 7);
    EXPECT_OK(smla_cuda_begin_write(op, mirror, stream_at(0), &host, &error));
    EXPECT_EQ(mirror->used_bytes, 24);
    memset(host, 9, 24);
    mirror->used_bytes = 8;
    EXPECT_OK(smla_cuda_end_write(op, mirror, stream_at(0), &error));
    for (int i = 0; i < 24; i++) {
        EXPECT_EQ(((const uint8_t *)mirror->device)[i], i < 8 ? 9 : 7);
    }
    write_all(mirror, 0, 5);
    destroy_all(mirror);
}

static int
count_buffers(const smla_mirror *mirror)
{
    const staging *const last = ((const cuda_mirror *)mirror)->last;
    int count = 1;
    for (const staging *at = last->next; at != last; at = at->next) {
        count++;
    }
    return count;
}

/* The event of the upload that is the k-th oldest in the ring. */
static cudaEvent_t
event_of(const smla_mirror *mirror, int k)
{
    const staging *at = ((const cuda_mirror *)mirror)->last->next;
    while (k-- > 0) {
        at = at->next;
    }
    return at->sent;
}

/* ---- Memory -------------------------------------------------------------------------------- */

static void
test_memory(void)
{
    begin();
    void *const memory = smla_cuda_allocate(1, BYTES);
    EXPECT(memory != NULL);
    EXPECT_CALLS("cuCtxPushCurrent cudaMalloc@1~ cuCtxPopCurrent@1 ");
    memset(memory, 1, BYTES);
    smla_cuda_release(1, memory);
    EXPECT_CALLS("cuCtxPushCurrent cudaFree@1~ cuCtxPopCurrent@1 ");
    smla_cuda_release(1, NULL);
    EXPECT_CALLS("");
    EXPECT_EQ(fake.num_memory, 0);
    smla_cuda_release(0, smla_cuda_allocate(0, 0)); /* 0 bytes have an address, too */
    EXPECT_CALLS("cudaMalloc~ cudaFree~ ");
    fail_call("cudaMalloc", 0, cudaErrorMemoryAllocation);
    EXPECT(smla_cuda_allocate(1, BYTES) == NULL);
    EXPECT_CALLS("cuCtxPushCurrent cudaMalloc@1~ cuCtxPopCurrent@1 ");
    EXPECT(smla_cuda_allocate(2, BYTES) == NULL); /* no such device */
    EXPECT_EQ(count_calls("cudaMalloc"), 0);
    fail_call("cuCtxPushCurrent", 0, cudaErrorUnknown);
    EXPECT(smla_cuda_allocate(1, BYTES) == NULL);
    EXPECT_EQ(count_calls("cudaMalloc") + count_calls("cuCtxPopCurrent"), 0);
    EXPECT_EQ(fake.current, 0);
}

static void
test_create(void)
{
    begin();
    smla_mirror *mirror = smla_cuda_create_mirror(1, BYTES);
    EXPECT(mirror != NULL && mirror->bytes == BYTES);
    EXPECT_CALLS("cuCtxPushCurrent cudaMalloc@1~ cudaStreamCreateWithFlags@1~ cudaMemsetAsync@1~ "
                 "cudaStreamSynchronize@1~ cudaStreamDestroy@1~ cudaEventCreateWithFlags@1~ "
                 "cudaHostAlloc@1~ cudaEventCreateWithFlags@1~ "
                 "cudaHostAlloc@1~ cudaEventCreateWithFlags@1~ "
                 "cudaHostAlloc@1~ cudaEventCreateWithFlags@1~ cuCtxPopCurrent@1 ");
    for (int i = 0; i < BYTES; i++) {
        EXPECT_EQ(((const uint8_t *)mirror->device)[i], 0);
    }
    EXPECT_EQ(count_buffers(mirror), FIRST_BUFFERS);
    EXPECT_EQ(fake.num_streams, 0);
    /* The block is freed first, and every upload is waited for. */
    smla_cuda_destroy_mirror(mirror);
    EXPECT_CALLS("cuCtxPushCurrent cudaFree@1~ cudaEventDestroy@1~ "
                 "cudaEventSynchronize@1~ cudaEventDestroy@1~ cudaFreeHost@1~ "
                 "cudaEventSynchronize@1~ cudaEventDestroy@1~ cudaFreeHost@1~ "
                 "cudaEventSynchronize@1~ cudaEventDestroy@1~ cudaFreeHost@1~ "
                 "cuCtxPopCurrent@1 ");
    destroy_all(NULL);
    mirror = create(0);
    EXPECT_EQ(mirror->bytes, 0);
    destroy_all(mirror);
}

/* The n-th call of CUDA or of malloc fails: there is no mirror, and nothing is left behind. */
static void
test_create_fails(void)
{
    int num_calls = 0;
    for (bool is_over = false; !is_over; num_calls++) {
        begin();
        fail_call(NULL, num_calls, cudaErrorMemoryAllocation);
        smla_mirror *const mirror = smla_cuda_create_mirror(1, BYTES);
        is_over = fake.num_good >= 0;
        fake.num_good = -1;
        /* errors of cudaStreamDestroy and cuCtxPopCurrent do not matter */
        EXPECT_EQ(mirror != NULL, is_over || num_calls == 5 || num_calls == 13);
        destroy_all(mirror);
    }
    EXPECT_EQ(num_calls, 15);
    for (int n = 0; n < 4; n++) {
        begin();
        num_good_allocations = n;
        EXPECT(smla_cuda_create_mirror(1, BYTES) == NULL);
        EXPECT_EQ(num_good_allocations, -1);
        destroy_all(NULL);
    }
    begin();
    EXPECT(smla_cuda_create_mirror(2, BYTES) == NULL);
    destroy_all(NULL);
}

/* A mirror whose device is lost can still be destroyed. */
static void
test_destroy_fails(void)
{
    begin();
    smla_mirror *const mirror = create(BYTES);
    (void)write_all(mirror, 0, 1);
    fail_call("cuCtxPushCurrent", 0, cudaErrorLaunchFailure);
    destroy_all(mirror);
}

/* ---- The ring ------------------------------------------------------------------------------ */

/* While the device keeps up, three buffers take turns. */
static void
test_wrap(void)
{
    begin();
    smla_mirror *const mirror = create(BYTES);
    void *buffers[10];
    for (int i = 0; i < 10; i++) {
        forget_calls();
        buffers[i] = write_all(mirror, 0, i);
        EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetDevice@1~ "
                     "cudaStreamIsCapturing@1 cudaEventQuery@1~ cuCtxPopCurrent@1 "
                     "cuCtxPushCurrent cudaStreamGetId@1 copy to device@1 cudaEventRecord@1 "
                     "cuCtxPopCurrent@1 ");
        EXPECT(i < 3 || buffers[i] == buffers[i - 3]);
        EXPECT(i < 1 || buffers[i] != buffers[i - 1]);
        EXPECT(i < 2 || buffers[i] != buffers[i - 2]);
    }
    EXPECT_EQ(count_buffers(mirror), 3);
    /* A buffer that was lent and not sent is lent again. */
    void *host[2] = {NULL};
    EXPECT_OK(smla_cuda_begin_write(op, mirror, stream_at(0), &host[0], &error));
    EXPECT_OK(smla_cuda_begin_write(op, mirror, stream_at(0), &host[1], &error));
    EXPECT(host[0] == buffers[7] && host[1] == buffers[7]);
    destroy_all(mirror);
}

/* While the device is behind, each build gets a new buffer, and no buffer on its way is touched. */
static void
test_growth(void)
{
    enum { NUM_BUILDS = 20 };
    void *buffers[NUM_BUILDS];
    begin();
    smla_mirror *const mirror = create(BYTES);
    fake.is_busy = true;
    for (int i = 0; i < NUM_BUILDS; i++) {
        buffers[i] = write_all(mirror, 0, i);
        EXPECT_EQ(count_buffers(mirror), i < 3 ? 3 : i + 1);
        for (int k = 0; k < i; k++) {
            EXPECT(buffers[k] != buffers[i]);
            EXPECT_EQ(*(const uint8_t *)buffers[k], k);
        }
    }
    EXPECT_EQ(count_calls("cudaHostAlloc"), NUM_BUILDS - 3);
    EXPECT_EQ(count_calls("cudaEventSynchronize") + count_calls("cudaStreamSynchronize"), 0);
    /* The oldest buffer is taken once it is done. While the next one is not, the ring grows. */
    event_of(mirror, 0)->is_pending = false;
    EXPECT(write_all(mirror, 0, 30) == buffers[0]);
    event_of(mirror, 1)->is_pending = false;
    void *const added = write_all(mirror, 0, 31);
    for (int k = 0; k < NUM_BUILDS; k++) {
        EXPECT(added != buffers[k]);
    }
    EXPECT_EQ(count_buffers(mirror), NUM_BUILDS + 1);
    EXPECT_EQ(*(const uint8_t *)buffers[1], 1);
    /* Once all are done, they are taken in the order in which they were sent. */
    EXPECT_EQ((int)cudaStreamSynchronize(&streams[0]), (int)cudaSuccess);
    for (int i = 1; i < NUM_BUILDS; i++) {
        EXPECT(write_all(mirror, 0, 40 + i) == buffers[i]);
    }
    EXPECT(write_all(mirror, 0, 61) == buffers[0]);
    EXPECT(write_all(mirror, 0, 62) == added);
    EXPECT_EQ(count_buffers(mirror), NUM_BUILDS + 1);
    destroy_all(mirror);
}

/* A ring that cannot grow reports an error, and works as before. */
static void
test_growth_fails(void)
{
    static const char *const calls[] = {"cudaHostAlloc", "cudaEventCreateWithFlags", "malloc"};
    for (int i = 0; i < 3; i++) {
        begin();
        void *host = NULL;
        smla_mirror *const mirror = create(BYTES);
        fake.is_busy = true;
        for (int k = 0; k < 3; k++) {
            (void)write_all(mirror, 0, k);
        }
        fail_call(calls[i], 0, cudaErrorMemoryAllocation);
        num_good_allocations = i == 2 ? 0 : -1;
        EXPECT_FAIL(smla_cuda_begin_write(op, mirror, stream_at(0), &host, &error),
                    SMLA_ERROR_MEMORY,
                    "MetadataBuilder.build: cudaHostAlloc failed: out of memory (code 2)");
        EXPECT_EQ(count_buffers(mirror), 3);
        EXPECT_EQ(fake.num_host, 3);
        EXPECT_EQ(fake.num_events, 4);
        EXPECT_EQ(fake.current, 0);
        fake.num_good = -1;
        (void)write_all(mirror, 0, 9);
        EXPECT_EQ(count_buffers(mirror), 4);
        destroy_all(mirror);
    }
}

static void
test_write_fails(void)
{
    static const struct {
        const char *call, *text;
    } begins[] = {
        {"cuCtxPushCurrent", "cuCtxPushCurrent failed: a text (code 719): an earlier kernel"},
        {"cudaStreamIsCapturing", "cudaStreamIsCapturing failed"},
        {"cudaStreamGetDevice", "cudaStreamGetDevice failed"},
        {"cudaEventQuery", "cudaEventQuery failed"},
    };
    static const struct {
        const char *call, *text;
        bool is_sent; /* the buffer is on its way without an event, so its stream is waited for */
    } ends[] = {
        {"cuCtxPushCurrent", "cuCtxPushCurrent failed", false},
        {"cudaStreamGetId", "cudaStreamGetId failed", false},
        {"cudaStreamWaitEvent", "cudaStreamWaitEvent failed", false},
        {"copy to device", "cudaMemcpyAsync failed", false},
        {"cudaEventRecord", "cudaEventRecord failed", true},
    };
    begin();
    void *host = NULL;
    smla_mirror *const mirror = create(BYTES);
    void *const former = write_all(mirror, 1, 5);
    for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
        fail_call(begins[i].call, 0, cudaErrorLaunchFailure);
        EXPECT_FAIL(smla_cuda_begin_write(op, mirror, stream_at(0), &host, &error),
                    SMLA_ERROR_RUNTIME, begins[i].text);
        EXPECT_EQ(fake.current, 0);
    }
    EXPECT_OK(smla_cuda_begin_write(op, mirror, stream_at(0), &host, &error));
    EXPECT(host != former);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        void *again = NULL;
        forget_calls();
        fail_call(ends[i].call, 0, cudaErrorLaunchFailure);
        EXPECT_FAIL(smla_cuda_end_write(op, mirror, stream_at(0), &error), SMLA_ERROR_RUNTIME,
                    ends[i].text);
        EXPECT_EQ(count_calls("cudaStreamSynchronize"), ends[i].is_sent);
        EXPECT_EQ(count_calls("copy to device"), i >= 3);
        EXPECT_EQ(fake.current, 0);
        /* The buffer is still the next one. */
        EXPECT_OK(smla_cuda_begin_write(op, mirror, stream_at(0), &again, &error));
        EXPECT(again == host);
    }
    EXPECT(write_all(mirror, 0, 6) == host);
    destroy_all(mirror);
}

static void
test_refused_streams(void)
{
    begin();
    void *host = NULL;
    smla_mirror *const mirror = create(BYTES);
    streams[0].is_capturing = true;
    EXPECT_FAIL(smla_cuda_begin_write(op, mirror, stream_at(0), &host, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `stream` must not be capturing a CUDA graph, got one");
    EXPECT_EQ(count_calls("cudaEventQuery"), 0);
    EXPECT_FAIL(smla_cuda_begin_write(op, mirror, stream_at(3), &host, &error), SMLA_ERROR_VALUE,
                "MetadataBuilder.build: `stream` must be a stream of the arrays' device, cuda:1, "
                "got one of cuda:0");
    EXPECT_EQ(count_calls("cudaEventQuery"), 0);
    EXPECT_EQ(fake.current, 0);
    destroy_all(mirror);
}

/* ---- Order --------------------------------------------------------------------------------- */

static bool
waits_for(int stream, const smla_mirror *mirror)
{
    return streams[stream].waits_for == ((const cuda_mirror *)mirror)->newest;
}

/* Builds and uses on one stream need no waits. On another stream they wait for the newest event. */
static void
test_order(void)
{
    begin();
    smla_mirror *const mirror = create(BYTES);
    const cuda_mirror *const m = (const cuda_mirror *)mirror;
    EXPECT_OK(smla_cuda_begin_use(op, mirror, stream_at(2), &error)); /* before the first build */
    EXPECT_EQ(count_calls("cudaStreamWaitEvent"), 0);
    (void)write_all(mirror, 0, 1);
    forget_calls();
    EXPECT_OK(smla_cuda_begin_use(op, mirror, stream_at(0), &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetId@1 cuCtxPopCurrent@1 ");
    EXPECT(m->newest == m->last->sent);
    EXPECT_OK(smla_cuda_end_use(op, mirror, stream_at(0), &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaEventRecord@1 cuCtxPopCurrent@1 ");
    EXPECT(m->newest == m->used && m->used->stream == &streams[0]);
    (void)write_all(mirror, 0, 2);
    EXPECT_EQ(count_calls("cudaStreamWaitEvent"), 0);
    EXPECT(m->newest == m->last->sent);
    /* A use on another stream waits for the upload. */
    const cudaEvent_t upload = m->newest;
    forget_calls();
    EXPECT_OK(smla_cuda_begin_use(op, mirror, stream_at(1), &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetId@1 "
                 "cudaStreamWaitEvent@1 cuCtxPopCurrent@1 ");
    EXPECT(streams[1].waits_for == upload && waits_for(1, mirror));
    EXPECT_OK(smla_cuda_end_use(op, mirror, stream_at(1), &error));
    EXPECT(m->newest == m->used && m->used->stream == &streams[1]);
    /* The next upload waits for that use, before its copy. */
    forget_calls();
    const cudaEvent_t use = m->newest;
    (void)write_all(mirror, 0, 3);
    EXPECT(streams[0].waits_for == use);
    const char *const wait = strstr(fake.calls, "cudaStreamWaitEvent@1 ");
    EXPECT(wait != NULL && strstr(wait, "copy to device@1 ") != NULL);
    EXPECT_EQ(count_calls("cudaStreamWaitEvent"), 1);
    /* Two uploads on two streams. */
    const cudaEvent_t second = m->newest;
    (void)write_all(mirror, 2, 4);
    EXPECT(streams[2].waits_for == second);
    /* A stream is known by its id: the same handle with another id is another stream. */
    streams[2].id = 99;
    streams[2].waits_for = NULL;
    EXPECT_OK(smla_cuda_begin_use(op, mirror, stream_at(2), &error));
    EXPECT(waits_for(2, mirror));
    destroy_all(mirror);
}

/* A use on the legacy stream records its event only when another stream has to wait for it, because
 * that stream never goes away. */
static void
test_legacy_stream(void)
{
    const smla_stream legacy = {.device_id = 1, .handle = NULL};
    begin();
    smla_mirror *const mirror = create(BYTES);
    const cuda_mirror *const m = (const cuda_mirror *)mirror;
    EXPECT_OK(smla_cuda_begin_use(op, mirror, legacy, &error));
    EXPECT_CALLS("cuCtxPushCurrent cuCtxPopCurrent@1 ");
    EXPECT_OK(smla_cuda_end_use(op, mirror, legacy, &error));
    EXPECT_CALLS("");
    EXPECT_OK(smla_cuda_begin_use(op, mirror, legacy, &error));
    EXPECT_OK(smla_cuda_end_use(op, mirror, legacy, &error));
    EXPECT_EQ(count_calls("cudaEventRecord") + count_calls("cudaStreamWaitEvent"), 0);
    forget_calls();
    /* A record that fails is tried again. */
    fail_call("cudaEventRecord", 0, cudaErrorInvalidResourceHandle);
    EXPECT_FAIL(smla_cuda_begin_use(op, mirror, stream_at(0), &error), SMLA_ERROR_RUNTIME,
                "cudaEventRecord failed");
    EXPECT_EQ(count_calls("cudaStreamWaitEvent"), 0);
    forget_calls();
    EXPECT_OK(smla_cuda_begin_use(op, mirror, stream_at(0), &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cudaStreamGetId@1 cudaEventRecord@1 "
                 "cudaStreamWaitEvent@1 cuCtxPopCurrent@1 ");
    EXPECT(streams[0].waits_for == m->used && m->used->stream == &fake_default_stream);
    EXPECT_OK(smla_cuda_begin_use(op, mirror, stream_at(1), &error)); /* it is recorded now */
    EXPECT_EQ(count_calls("cudaEventRecord"), 0);
    EXPECT(streams[1].waits_for == m->used);
    /* A build waits for a use on the legacy stream, too. */
    EXPECT_OK(smla_cuda_begin_use(op, mirror, legacy, &error));
    EXPECT_OK(smla_cuda_end_use(op, mirror, legacy, &error));
    forget_calls();
    (void)write_all(mirror, 2, 5);
    EXPECT(streams[2].waits_for == m->used && streams[2].follows == &fake_default_stream);
    const char *const wait = strstr(fake.calls, "cudaEventRecord@1 cudaStreamWaitEvent@1 ");
    EXPECT(wait != NULL && strstr(wait, "copy to device@1 ") != NULL);
    destroy_all(mirror);
}

/* A use that is captured neither waits nor is waited for. */
static void
test_captured_use(void)
{
    begin();
    smla_mirror *const mirror = create(BYTES);
    (void)write_all(mirror, 0, 1);
    const cudaEvent_t upload = ((const cuda_mirror *)mirror)->newest;
    streams[1].is_capturing = true;
    forget_calls();
    EXPECT_OK(smla_cuda_begin_use(op, mirror, stream_at(1), &error));
    EXPECT_OK(smla_cuda_end_use(op, mirror, stream_at(1), &error));
    EXPECT_CALLS("cuCtxPushCurrent cudaStreamIsCapturing@1 cuCtxPopCurrent@1 ");
    EXPECT(((const cuda_mirror *)mirror)->newest == upload);
    destroy_all(mirror);
}

static void
test_use_fails(void)
{
    static const struct {
        bool is_over;
        const char *call, *text;
    } cases[] = {
        {false, "cuCtxPushCurrent", "cuCtxPushCurrent failed"},
        {false, "cudaStreamIsCapturing", "cudaStreamIsCapturing failed"},
        {false, "cudaStreamGetId", "cudaStreamGetId failed: a text (code 400): is `stream` a"},
        {false, "cudaStreamWaitEvent", "cudaStreamWaitEvent failed"},
        {true, "cuCtxPushCurrent", "cuCtxPushCurrent failed"},
        {true, "cudaEventRecord", "cudaEventRecord failed"},
    };
    begin();
    smla_mirror *const mirror = create(BYTES);
    (void)write_all(mirror, 0, 1);
    const cuda_mirror *const m = (const cuda_mirror *)mirror;
    const cuda_mirror before = *m;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].is_over) {
            EXPECT_OK(smla_cuda_begin_use("sparse_attention", mirror, stream_at(1), &error));
        }
        fail_call(cases[i].call, 0, cudaErrorInvalidResourceHandle);
        EXPECT_FAIL(cases[i].is_over
                        ? smla_cuda_end_use("sparse_attention", mirror, stream_at(1), &error)
                        : smla_cuda_begin_use("sparse_attention", mirror, stream_at(1), &error),
                    SMLA_ERROR_RUNTIME, cases[i].text);
        EXPECT(strncmp(error.text, "sparse_attention: ", 18) == 0);
        EXPECT_EQ(fake.current, 0);
        EXPECT(m->newest == before.newest && m->newest_stream == before.newest_stream);
    }
    destroy_all(mirror);
}

int
main(void)
{
    RUN(test_memory);
    RUN(test_create);
    RUN(test_create_fails);
    RUN(test_parts_of_a_mirror);
    RUN(test_destroy_fails);
    RUN(test_wrap);
    RUN(test_growth);
    RUN(test_growth_fails);
    RUN(test_write_fails);
    RUN(test_refused_streams);
    RUN(test_order);
    RUN(test_legacy_stream);
    RUN(test_captured_use);
    RUN(test_use_fails);
    return report("test_cuda_mirror");
}
