/* runtime.h: a CUDA runtime and driver made of plain memory, for tests of the host files of
 * csrc/cuda. Included once in a program, behind the files that it tests.
 *
 * Every call is recorded as its name, with "@1" behind it where device 1 is current and "~" where
 * captures are relaxed; EXPECT_CALLS compares the record. A call that fail_call names fails. The
 * test sets the state of streams. A pending event becomes ready when the test says so, or when the
 * host waits for it. Memory holds POISON before it is written.
 */
#pragma once

#include <cudaTypedefs.h>
#include <pthread.h>
#include <sched.h>

#include "../testing.h"

enum {
    FAKE_DEVICES = 4,
    FAKE_EVENTS = 512,
    FAKE_EXECS = 512,
    FAKE_GRAPHS = 64,
    FAKE_NODES = 2,
    FAKE_STARTS = 8192
};

struct CUctx_st {
    int device_id;
};

struct CUstream_st {
    unsigned long long id;
    int device_id;
    int priority;
    size_t policy_bytes;
    bool is_remote; /* the memory domain is the remote one */
    bool is_capturing;
    struct CUctx_st *context;
    struct CUgreenCtx_st *own_sms;
    struct CUevent_st *waits_for;      /* the last event that it was told to wait for */
    const struct CUstream_st *follows; /* the stream where that event was recorded */
};

struct CUevent_st {
    const struct CUstream_st *stream; /* the stream where the event was recorded last */
    bool is_pending;
};

/* A kernel's launch, or the parameters of a graph's node. */
typedef struct fake_start {
    bool is_graph;
    const void *kernel;
    int value; /* the int that its argument struct starts with */
    unsigned num_blocks;
    unsigned block_threads;
    unsigned shared_bytes;
    const struct CUstream_st *stream;
    bool starts_early;
} fake_start;

/* A node is its number in the graph, which is a chain. */
struct CUgraphNode_st {
    int number;
};

struct CUgraph_st {
    struct CUgraphNode_st nodes[FAKE_NODES];
    int num_nodes;
    bool is_chain;     /* the second node follows the first */
    bool starts_early; /* before the first is done */
};

struct CUgraphExec_st {
    const struct CUgraph_st *graph;
    fake_start starts[FAKE_NODES];
};

static struct {
    int num_devices;
    int current;    /* the current device */
    int older;      /* the number of a device of capability 80; 0: none */
    int capability; /* facts of every other device: this and those below */
    int num_sms;
    int shared_bytes;
    int driver_version;
    const char *lacks;   /* a call that the driver does not have */
    bool has_no_address; /* the driver says that it has that call, at address NULL */

    const char *fails;  /* the call that fails; NULL: any call */
    int num_good;       /* calls of it before one fails; negative: none fails */
    bool keeps_failing; /* all later ones fail, too */
    const char *failed; /* the call that has failed last; NULL: none since fail_call */
    int code;           /* its cudaError_t, or a status of cuBLAS */

    bool is_busy; /* events are not ready when they are recorded */
    int num_memory, num_host, num_events, num_streams; /* alive */
    struct CUevent_st *events[FAKE_EVENTS];            /* alive */
    unsigned long long num_ids;                        /* ids given to streams so far */

    struct CUgraph_st graphs[FAKE_GRAPHS];
    int num_graphs;
    struct CUgraphExec_st execs[FAKE_EXECS];
    int num_execs;
    fake_start starts[FAKE_STARTS];
    int num_starts;

    char calls[65536];
    size_t calls_length;
} fake;

static struct CUctx_st fake_contexts[FAKE_DEVICES] = {{0}, {1}, {2}, {3}};
static struct CUstream_st fake_default_stream = {.id = 1, .context = &fake_contexts[0]};
static _Thread_local enum cudaStreamCaptureMode fake_mode;
static pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
static void (*fake_watch)(const char *call); /* NULL, or a function that sees every call */

/* Resets everything: one H200, and no call has been made. */
static inline void
reset_fake(void)
{
    EXPECT_EQ(fake_mode, cudaStreamCaptureModeGlobal);
    memset(&fake, 0, sizeof fake);
    fake.num_devices = 1;
    fake.capability = 90;
    fake.num_sms = 132;
    fake.shared_bytes = 232448;
    fake.driver_version = 13000;
    fake.num_good = -1;
    fake.num_ids = 1000;
    fake_default_stream.is_capturing = false;
}

static inline void
fail_call(const char *name, int num_good, int code)
{
    fake.fails = name;
    fake.num_good = num_good;
    fake.code = code;
    fake.failed = NULL;
}

static inline void
forget_calls(void)
{
    fake.calls_length = 0;
    fake.calls[0] = '\0';
}

static inline int
count_calls(const char *name)
{
    int count = 0;
    const size_t length = strlen(name);
    for (const char *at = strstr(fake.calls, name); at != NULL; at = strstr(at + length, name)) {
        count += strchr("@~ ", at[length]) != NULL && (at == fake.calls || at[-1] == ' ');
    }
    return count;
}

/* Compares the calls since the last comparison, each followed by a space. */
#define EXPECT_CALLS(expected)                                                     \
    do {                                                                           \
        if (strcmp(fake.calls, expected) != 0) {                                   \
            fail_at(__FILE__, __LINE__, "calls", 0.0, 1.0);                        \
            printf("    got \"%s\"\n    expected \"%s\"\n", fake.calls, expected); \
        }                                                                          \
        forget_calls();                                                            \
    } while (0)

/* For fake_watch: expects that a thread holds the lock. */
static inline void
expect_held(pthread_mutex_t *lock)
{
    const bool is_free = pthread_mutex_trylock(lock) == 0;
    EXPECT(!is_free);
    if (is_free) {
        pthread_mutex_unlock(lock);
    }
}

static inline cudaError_t
answer(const char *name)
{
    cudaError_t code = cudaSuccess;
    if (fake_watch != NULL) {
        fake_watch(name);
    }
    pthread_mutex_lock(&fake_lock);
    char device[16] = "";
    if (fake.current != 0) {
        snprintf(device, sizeof device, "@%d", fake.current);
    }
    const size_t room = sizeof fake.calls - fake.calls_length;
    const int length = snprintf(fake.calls + fake.calls_length, room, "%s%s%s ", name, device,
                                fake_mode == cudaStreamCaptureModeRelaxed ? "~" : "");
    if (length > 0 && (size_t)length < room) {
        fake.calls_length += (size_t)length;
    }
    if (fake.num_good >= 0 && (fake.fails == NULL || strcmp(fake.fails, name) == 0)) {
        code = fake.num_good == 0 ? (cudaError_t)fake.code : cudaSuccess;
        fake.failed = fake.num_good == 0 ? name : fake.failed;
        fake.num_good -= fake.num_good > 0 || !fake.keeps_failing;
    }
    pthread_mutex_unlock(&fake_lock);
    return code;
}

/* ---- Errors and devices -------------------------------------------------------------------- */

const char *
cudaGetErrorName(cudaError_t code)
{
    static _Thread_local char name[32];
    snprintf(name, sizeof name, "code %d", (int)code);
    return name;
}

const char *
cudaGetErrorString(cudaError_t code)
{
    return code == cudaErrorMemoryAllocation ? "out of memory" : "a text";
}

cudaError_t
cudaGetLastError(void)
{
    return answer("cudaGetLastError");
}

cudaError_t
cudaDriverGetVersion(int *version)
{
    *version = fake.driver_version;
    return cudaSuccess;
}

cudaError_t
cudaGetDeviceCount(int *count)
{
    const cudaError_t code = answer("cudaGetDeviceCount");
    *count = code == cudaSuccess ? fake.num_devices : 0;
    return code;
}

cudaError_t
cudaGetDevice(int *device)
{
    /* Recorded only where it may fail, because it is called everywhere. */
    const bool may_fail =
        fake.num_good >= 0 && fake.fails != NULL && strcmp(fake.fails, "cudaGetDevice") == 0;
    const cudaError_t code = may_fail ? answer("cudaGetDevice") : cudaSuccess;
    if (code == cudaSuccess) {
        *device = fake.current;
    }
    return code;
}

cudaError_t
cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device)
{
    const cudaError_t code =
        device >= fake.num_devices ? cudaErrorInvalidDevice : answer("cudaDeviceGetAttribute");
    if (code == cudaSuccess) {
        const int capability = device == fake.older && device > 0 ? 80 : fake.capability;
        *value = name == cudaDevAttrComputeCapabilityMajor         ? capability / 10
                 : name == cudaDevAttrComputeCapabilityMinor       ? capability % 10
                 : name == cudaDevAttrMultiProcessorCount          ? fake.num_sms
                 : name == cudaDevAttrMaxSharedMemoryPerBlockOptin ? fake.shared_bytes
                                                                   : -1;
    }
    return code;
}

static inline CUresult
fake_get_device(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return (CUresult)answer("cuDeviceGet");
}

static inline CUresult
fake_retain_primary(CUcontext *context, CUdevice device)
{
    const CUresult result = (CUresult)answer("cuDevicePrimaryCtxRetain");
    if (result == CUDA_SUCCESS) {
        *context = &fake_contexts[device];
    }
    return result;
}

static int fake_former; /* the device that was current before the push; pushes do not nest */

static inline CUresult
fake_push_context(CUcontext context)
{
    const CUresult result = (CUresult)answer("cuCtxPushCurrent");
    if (result == CUDA_SUCCESS) {
        fake_former = fake.current;
        fake.current = context->device_id;
    }
    return result;
}

static inline CUresult
fake_pop_context(CUcontext *context)
{
    const CUresult result = (CUresult)answer("cuCtxPopCurrent");
    *context = &fake_contexts[fake.current];
    fake.current = fake_former;
    return result;
}

/* ---- Streams and events -------------------------------------------------------------------- */

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

/* ---- Memory -------------------------------------------------------------------------------- */

static inline void *
get_memory(size_t bytes, int *num_alive)
{
    void *memory = malloc(bytes);
    EXPECT(memory != NULL && bytes > 0);
    memset(memory, POISON, bytes);
    (*num_alive)++;
    return memory;
}

cudaError_t
cudaMalloc(void **memory, size_t bytes)
{
    const cudaError_t code = answer("cudaMalloc");
    if (code == cudaSuccess) {
        *memory = get_memory(bytes, &fake.num_memory);
    }
    return code;
}

cudaError_t
cudaFree(void *memory)
{
    fake.num_memory--;
    free(memory);
    return answer("cudaFree");
}

cudaError_t
cudaHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    const cudaError_t code = answer("cudaHostAlloc");
    EXPECT_EQ(flags, (unsigned)cudaHostAllocDefault);
    if (code == cudaSuccess) {
        *memory = get_memory(bytes, &fake.num_host);
    }
    return code;
}

cudaError_t
cudaFreeHost(void *memory)
{
    fake.num_host--;
    free(memory);
    return answer("cudaFreeHost");
}

cudaError_t
cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    const cudaError_t code = answer("cudaMemsetAsync");
    EXPECT(find_fake_stream(stream) != &fake_default_stream);
    if (code == cudaSuccess) {
        memset(memory, value, bytes);
    }
    return code;
}

cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                cudaStream_t stream)
{
    const cudaError_t code =
        answer(kind == cudaMemcpyHostToDevice ? "copy to device" : "copy to host");
    (void)stream;
    EXPECT(to != NULL && from != NULL);
    if (code == cudaSuccess && from != NULL) {
        memcpy(to, from, bytes);
    }
    return code;
}

/* ---- Launches and graphs ------------------------------------------------------------------- */

static inline void
write_start(const fake_start *start)
{
    pthread_mutex_lock(&fake_lock);
    if (fake.num_starts < FAKE_STARTS) {
        fake.starts[fake.num_starts++] = *start;
    }
    pthread_mutex_unlock(&fake_lock);
}

cudaError_t
cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    const cudaError_t code = answer("cudaLaunchKernelExC");
    const fake_start start = {
        .kernel = kernel,
        .value = *(const int *)args[0],
        .num_blocks = config->gridDim.x,
        .block_threads = config->blockDim.x,
        .shared_bytes = (unsigned)config->dynamicSmemBytes,
        .stream = find_fake_stream(config->stream),
        .starts_early = config->numAttrs == 1 &&
                        config->attrs[0].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                        config->attrs[0].val.programmaticStreamSerializationAllowed == 1,
    };
    EXPECT(config->gridDim.y == 1 && config->gridDim.z == 1);
    EXPECT(config->blockDim.y == 1 && config->blockDim.z == 1);
    if (code == cudaSuccess) {
        write_start(&start);
    }
    return code;
}

cudaError_t
cudaGetFuncBySymbol(cudaFunction_t *function, const void *kernel)
{
    const cudaError_t code = answer("cudaGetFuncBySymbol");
    if (code == cudaSuccess) { /* not the kernel's own address */
        *function = (cudaFunction_t)((uintptr_t)kernel + 1);
    }
    return code;
}

cudaError_t
cudaGraphCreate(cudaGraph_t *graph, unsigned flags)
{
    EXPECT_EQ(flags, 0u);
    EXPECT(fake.num_graphs < FAKE_GRAPHS);
    *graph = &fake.graphs[fake.num_graphs++];
    return answer("cudaGraphCreate");
}

cudaError_t
cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph,
                       const cudaGraphNode_t *dependencies, size_t num_dependencies,
                       const struct cudaKernelNodeParams *params)
{
    EXPECT(graph->num_nodes < FAKE_NODES && dependencies == NULL && num_dependencies == 0);
    EXPECT(params->func != NULL && params->gridDim.x > 0 && params->blockDim.x > 0);
    EXPECT(params->gridDim.y == 1 && params->gridDim.z == 1);
    EXPECT(params->blockDim.y == 1 && params->blockDim.z == 1);
    EXPECT(params->kernelParams[0] != NULL);
    *node = &graph->nodes[graph->num_nodes];
    (*node)->number = graph->num_nodes++;
    return answer("cudaGraphAddKernelNode");
}

static inline CUresult
fake_add_dependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                      const CUgraphEdgeData *edges, size_t count)
{
    const bool is_early = edges->type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    EXPECT(count == 1 && *from == &graph->nodes[0] && *to == &graph->nodes[1]);
    EXPECT_EQ(edges->from_port, is_early ? CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
                                         : CU_GRAPH_KERNEL_NODE_PORT_DEFAULT);
    EXPECT_EQ(edges->to_port, 0);
    graph->is_chain = true;
    graph->starts_early = is_early;
    return (CUresult)answer("cuGraphAddDependencies");
}

cudaError_t
cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    const cudaError_t code = answer("cudaGraphInstantiate");
    EXPECT(graph->is_chain == (graph->num_nodes == 2) && flags == 0);
    if (code != cudaSuccess || fake.num_execs == FAKE_EXECS) {
        return code == cudaSuccess ? cudaErrorMemoryAllocation : code;
    }
    *exec = &fake.execs[fake.num_execs++];
    (*exec)->graph = graph;
    return cudaSuccess;
}

static inline CUresult
fake_set_params(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    const CUresult result = (CUresult)answer("cuGraphExecKernelNodeSetParams");
    EXPECT(node == &exec->graph->nodes[node->number]);
    EXPECT(params->gridDimY == 1 && params->gridDimZ == 1);
    EXPECT(params->blockDimY == 1 && params->blockDimZ == 1 && params->extra == NULL);
    if (result == CUDA_SUCCESS) {
        exec->starts[node->number] =
            (fake_start){.is_graph = true,
                         .kernel = (const void *)((uintptr_t)params->func - 1),
                         .value = *(const int *)params->kernelParams[0],
                         .num_blocks = params->gridDimX,
                         .block_threads = params->blockDimX,
                         .shared_bytes = params->sharedMemBytes,
                         .starts_early = node->number > 0 && exec->graph->starts_early};
        sched_yield(); /* lets another thread come in between */
    }
    return result;
}

cudaError_t
cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    const cudaError_t code = answer("cudaGraphLaunch");
    const int num_nodes = code == cudaSuccess ? exec->graph->num_nodes : 0;
    for (int i = 0; i < FAKE_NODES && i < num_nodes; i++) {
        fake_start start = exec->starts[i];
        start.stream = find_fake_stream(stream);
        write_start(&start);
    }
    return code;
}

/* ---- The driver's entry points ------------------------------------------------------------- */

cudaError_t
cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                 unsigned long long flags,
                                 enum cudaDriverEntryPointQueryResult *result)
{
    static const struct {
        const char *name;
        unsigned version; /* the first version of CUDA with this signature */
        void *function;
    } calls[] = {
        {"cuDeviceGet", 2000, (void *)fake_get_device},
        {"cuDevicePrimaryCtxRetain", 7000, (void *)fake_retain_primary},
        {"cuCtxPushCurrent", 4000, (void *)fake_push_context},
        {"cuCtxPopCurrent", 4000, (void *)fake_pop_context},
        {"cuStreamIsCapturing", 10000, (void *)fake_is_capturing},
        {"cuStreamGetId", 12000, (void *)fake_get_id},
        {"cuStreamGetCtx", 9020, (void *)fake_get_context},
        {"cuGraphExecKernelNodeSetParams", 12000, (void *)fake_set_params},
        {"cuStreamGetGreenCtx", 12040, (void *)fake_get_own_sms},
        {"cuGraphAddDependencies", 12030, (void *)fake_add_dependencies},
    };
    const cudaError_t code = answer("cudaGetDriverEntryPointByVersion");
    *result = cudaDriverEntryPointSymbolNotFound;
    EXPECT_EQ(flags, 0u);
    for (size_t i = 0; i < sizeof calls / sizeof calls[0] && code == cudaSuccess; i++) {
        const bool is_missing = fake.lacks != NULL && strcmp(fake.lacks, name) == 0;
        if (strcmp(calls[i].name, name) == 0 && version >= calls[i].version) {
            *function = is_missing && fake.has_no_address ? NULL : calls[i].function;
            *result = is_missing && !fake.has_no_address ? cudaDriverEntryPointSymbolNotFound
                                                         : cudaDriverEntryPointSuccess;
        }
    }
    return code;
}
