/* state.h: what the fake runtime of runtime.h knows: its devices, streams, events and graphs, the
 * record of calls, and which call fails.
 */
#pragma once

#include <cudaTypedefs.h>
#include <pthread.h>

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

    const uint8_t *pinned; /* host memory that is pinned, and where the device has it */
    int64_t pinned_bytes;
    uint8_t *reached_at;
    const uint8_t *mapped; /* memory of device mapped_device that all devices can read */
    int64_t mapped_bytes;
    int mapped_device; /* other memory is this device's, too, and no other device can read it */

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
