/* test_cuda_launch.c: how csrc/cuda/host/launch.c chooses between a stream's graph and a launch, on
 * the fake runtime and driver of runtime.h.
 */
#include <stdlib.h>

static void *test_calloc(size_t count, size_t size);
static void test_free(void *memory);
static char *test_getenv(const char *name);

#define getenv      test_getenv
#define driver      device_driver /* both files have them */
#define find_driver find_device_driver
#include "cuda/host/device.c" // NOLINT(bugprone-suspicious-include)
#undef driver
#undef find_driver
#define calloc             test_calloc
#define free               test_free
#define pthread_mutex_init test_mutex_init
#include <pthread.h>
static int test_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes);
#include "cuda/host/launch.c" // NOLINT(bugprone-suspicious-include)
#undef calloc
#undef free
#undef pthread_mutex_init
#undef getenv

#include "fake_cuda/runtime.h"

static bool has_memory = true;
static bool has_mutexes = true;
static int num_live; /* live allocations */

static void *
test_calloc(size_t count, size_t size)
{
    num_live += has_memory;
    return has_memory ? calloc(count, size) : NULL;
}

static void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}

static int
test_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes)
{
    return has_mutexes ? pthread_mutex_init(mutex, attributes) : 1;
}

/* The one environment variable that is set. */
static const char *env_name;
static char env_text[8];

static char *
test_getenv(const char *name)
{
    return env_name != NULL && strcmp(name, env_name) == 0 ? env_text : NULL;
}

/* The calls that look for a stream's graph, and those of a start through a known graph. */
#define ASKED   "cuStreamIsCapturing cuStreamGetId "
#define STARTED ASKED "cuGraphExecKernelNodeSetParams cudaGraphLaunch "

enum { NUM_TEST_KERNELS = 8 };

static char kernels[NUM_TEST_KERNELS * 2048]; /* addresses of kernels */

/* The address of kernel i. */
static const void *
kernel_at(int i)
{
    return &kernels[i * 1024];
}

static struct CUstream_st streams[256];
static int value; /* the argument of the next kernel */

static smla_cuda_grid
make_grid(struct CUstream_st *stream)
{
    return (smla_cuda_grid){.kernel = kernel_at(0),
                            .args = &value,
                            .args_bytes = sizeof value,
                            .num_blocks = 7,
                            .block_threads = 96,
                            .shared_bytes = 1234,
                            .stream = {.device_id = 0, .handle = stream}};
}

/* Resets the state to that of a new process: no graphs, and new streams. */
static void
begin(void)
{
    static unsigned long long num_ids = 5000;
    for (int d = 0; d < SMLA_CUDA_MAX_DEVICES; d++) {
        stream_graph *next = NULL;
        for (stream_graph *at = atomic_load(&graphs_of[d].first); at != NULL; at = next) {
            next = at->next;
            pthread_mutex_destroy(&at->lock);
            test_free(at);
        }
    }
    EXPECT_EQ(num_live, 0);
    memset(graphs_of, 0, sizeof graphs_of);
    memset(&driver, 0, sizeof driver);
    reset_fake();
    prepare_graphs();
    EXPECT(driver.set_params != NULL);
    for (int i = 0; i < 256; i++) {
        streams[i] = (struct CUstream_st){.id = ++num_ids, .context = &fake_contexts[0]};
    }
    forget_calls();
}

/* Expects that a kernel was started as the grid says, with this argument. */
static void
expect_start(const fake_start *start, const smla_cuda_grid *grid, int argument)
{
    EXPECT(start->kernel == grid->kernel);
    EXPECT_EQ(start->value, argument);
    EXPECT_EQ(start->num_blocks, grid->num_blocks);
    EXPECT_EQ(start->block_threads, grid->block_threads);
    EXPECT_EQ(start->shared_bytes, grid->shared_bytes);
    EXPECT(start->stream == find_fake_stream(grid->stream.handle));
}

/* Launches the grid, and expects that its kernel was started once, as the grid says. */
static void
expect_started(const smla_cuda_grid *grid, bool is_graph)
{
    const int former = fake.num_starts;
    value++;
    EXPECT_EQ((int)smla_cuda_launch(grid, NULL), (int)cudaSuccess);
    EXPECT_EQ(fake.num_starts, former + 1);
    if (fake.num_starts != former + 1) {
        return;
    }
    const fake_start *const start = &fake.starts[former];
    expect_start(start, grid, value);
    EXPECT_EQ(start->is_graph, is_graph);
    EXPECT_EQ(start->starts_early, !is_graph && grid->starts_early);
}

static void
expect_graph(const smla_cuda_grid *grid)
{
    expect_started(grid, true);
}

static void
expect_launch(const smla_cuda_grid *grid)
{
    expect_started(grid, false);
}

/* The calls for a stream that has not been seen. They do not disturb other threads' captures. */
static const char first_asked[] =
    ASKED "cudaStreamGetPriority~ policy~ domain~ cudaGetDriverEntryPointByVersion~ "
          "cuStreamGetGreenCtx~ cuStreamGetCtx~ cudaGraphCreate~ cudaGraphAddKernelNode~ "
          "cudaGraphInstantiate~ ";

/* ---- Graphs -------------------------------------------------------------------------------- */

static void
test_first_and_next(void)
{
    begin();
    smla_cuda_grid grid = make_grid(&streams[0]);
    expect_graph(&grid);
    EXPECT_EQ(count_calls("cudaGraphInstantiate"), MAX_GRAPHS + MAX_PAIR_GRAPHS);
    EXPECT_EQ(count_calls("cudaGetLastError"), 0); /* an error there may be somebody else's */
    EXPECT(strncmp(fake.calls, first_asked, sizeof first_asked - 1) == 0);
    const char *const end = strstr(fake.calls, "cudaGetFuncBySymbol");
    EXPECT(end != NULL && strcmp(end, "cudaGetFuncBySymbol~ cuGraphExecKernelNodeSetParams "
                                      "cudaGraphLaunch ") == 0);
    forget_calls();
    grid.num_blocks = 8;
    grid.block_threads = 128;
    grid.shared_bytes = 0;
    grid.starts_early = true; /* graphs ignore this */
    expect_graph(&grid);
    EXPECT_CALLS(STARTED);
    EXPECT_EQ(count_calls("cudaLaunchKernelExC"), 0);
}

/* A stream's first kernels have a graph each, the others share the stream's graph. A kernel is
 * looked up once, unless it shares the last place with others. */
static void
test_many_kernels(void)
{
    begin();
    smla_cuda_grid grid = make_grid(&streams[0]);
    for (int i = 0; i < 2 * KNOWN_KERNELS; i++) {
        grid.kernel = &kernels[i % KNOWN_KERNELS * 16];
        expect_graph(&grid);
    }
    EXPECT_EQ(count_calls("cudaGetFuncBySymbol"), KNOWN_KERNELS);
    EXPECT_EQ(graphs_of[0].num_left, MAX_GRAPHS - 1 - MAX_KERNEL_GRAPHS);
    EXPECT_EQ(graphs_of[0].num_kernels_left, 0);
    const stream_graph *const stream = atomic_load(&graphs_of[0].first);
    bool is_taken[MAX_GRAPHS] = {false};
    for (int i = 0; i < KNOWN_KERNELS; i++) {
        const struct known_kernel *const known = &stream->known[i];
        EXPECT(known->kernel == &kernels[i * 16]);
        EXPECT(known->exec == stream->exec || !is_taken[known->exec - fake.execs]);
        EXPECT_EQ(known->exec == stream->exec, i == 0 || i > MAX_KERNEL_GRAPHS);
        is_taken[known->exec - fake.execs] = true;
    }
    for (int i = 0; i < 4; i++) { /* two kernels take turns in the last place */
        forget_calls();
        grid.kernel = &kernels[(KNOWN_KERNELS + i % 2) * 16];
        expect_graph(&grid);
        EXPECT_EQ(count_calls("cudaGetFuncBySymbol"), 1);
        EXPECT(stream->known[KNOWN_KERNELS - 1].exec == stream->exec);
    }
    /* Another stream gets a graph of those left, and no graphs for its kernels. */
    grid = make_grid(&streams[1]);
    expect_graph(&grid);
    grid.kernel = &kernels[16];
    expect_graph(&grid);
    EXPECT_EQ(graphs_of[0].num_left, MAX_GRAPHS - 2 - MAX_KERNEL_GRAPHS);
}

/* Each stream gets a graph as long as there are some. Kernels on the others are launched. */
static void
test_many_streams(void)
{
    begin();
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 256; i++) {
            const smla_cuda_grid grid = make_grid(&streams[i]);
            expect_started(&grid, i < MAX_GRAPHS);
        }
        EXPECT_EQ(count_calls("cudaGraphCreate"), round == 0 ? 2 : 0);
        /* Streams past the limit are not remembered, and nothing is asked about them. */
        EXPECT_EQ(count_calls("cudaStreamGetPriority"), round == 0 ? 200 : 0);
        forget_calls();
    }
    EXPECT_EQ(graphs_of[0].num_streams, 200);
    bool is_taken[MAX_GRAPHS] = {false};
    for (stream_graph *at = atomic_load(&graphs_of[0].first); at != NULL; at = at->next) {
        if (at->exec != NULL) {
            EXPECT(!is_taken[at->exec - fake.execs]);
            is_taken[at->exec - fake.execs] = true;
        }
    }
}

/* Where streams have taken all graphs, a stream's further kernels share the stream's. */
static void
test_kernels_without_a_graph_left(void)
{
    for (int num_streams = MAX_GRAPHS - 2; num_streams <= MAX_GRAPHS; num_streams++) {
        begin();
        for (int i = 0; i < num_streams; i++) {
            const smla_cuda_grid grid = make_grid(&streams[i]);
            expect_graph(&grid);
        }
        smla_cuda_grid grid = make_grid(&streams[0]);
        stream_graph *stream = atomic_load(&graphs_of[0].first);
        while (stream->next != NULL) { /* the first one is the last in the list */
            stream = stream->next;
        }
        for (int i = 1; i < 5; i++) {
            grid.kernel = kernel_at(i);
            expect_graph(&grid);
            const bool has_own = i <= MAX_GRAPHS - num_streams;
            EXPECT_EQ(stream->known[i].exec != stream->exec, has_own);
        }
        EXPECT_EQ(graphs_of[0].num_left, 0);
        EXPECT_EQ(graphs_of[0].num_kernels_left, MAX_KERNEL_GRAPHS - (MAX_GRAPHS - num_streams));
    }
}

/* CUDA may use a stream's handle again, but never its id. */
static void
test_handles(void)
{
    begin();
    const smla_cuda_grid grid = make_grid(&streams[0]);
    expect_graph(&grid);
    streams[0].id = 77;
    streams[0].priority = -1;
    expect_launch(&grid);
    smla_cuda_grid legacy = make_grid(NULL);
    legacy.starts_early = true;
    expect_graph(&legacy);
}

static void
test_devices(void)
{
    begin();
    smla_cuda_grid grid = make_grid(&streams[0]);
    expect_graph(&grid);
    grid = make_grid(&streams[1]);
    grid.stream.device_id = SMLA_CUDA_MAX_DEVICES - 1;
    streams[1].context = &fake_contexts[3];
    expect_graph(&grid);
    EXPECT_EQ(count_calls("cudaGraphCreate"), 4);
    EXPECT_EQ(graphs_of[0].num_left, MAX_GRAPHS - 1);
    EXPECT_EQ(graphs_of[SMLA_CUDA_MAX_DEVICES - 1].num_left, MAX_GRAPHS - 1);
    /* A stream of another context than that of the device's first stream. */
    grid = make_grid(&streams[2]);
    streams[2].context = &fake_contexts[1];
    expect_launch(&grid);
    grid = make_grid(&streams[3]);
    expect_graph(&grid);
    EXPECT_EQ(count_calls("cudaGraphCreate"), 4);
}

/* ---- Launches ------------------------------------------------------------------------------ */

/* Kernels on a stream that is not ordinary are launched; the stream is asked about once. */
static void
expect_plain_stream(struct CUstream_st *stream)
{
    const smla_cuda_grid grid = make_grid(stream);
    expect_launch(&grid);
    EXPECT_EQ(count_calls("cudaStreamGetPriority"), 1);
    EXPECT_EQ(count_calls("cudaGraphCreate"), 0);
    forget_calls();
    expect_launch(&grid);
    EXPECT_CALLS(ASKED "cudaLaunchKernelExC ");
    const smla_cuda_grid other = make_grid(&streams[255]);
    expect_graph(&other);
}

static void
test_streams_of_their_own(void)
{
    for (int kind = 0; kind < 5; kind++) {
        begin();
        struct CUstream_st *const stream = &streams[0];
        stream->priority = kind == 0 ? -1 : kind == 1 ? 1 : 0;
        stream->policy_bytes = kind == 2 ? 1 : 0;
        stream->is_remote = kind == 3;
        stream->own_sms = kind == 4 ? (void *)stream : NULL;
        expect_plain_stream(stream);
    }
}

/* Where a question fails, the stream gets no graph. */
static void
test_questions_that_fail(void)
{
    static const char *const calls[] = {"cudaStreamGetPriority", "policy", "domain",
                                        "cuStreamGetGreenCtx", "cuStreamGetCtx"};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        begin();
        fail_call(calls[i], 0, cudaErrorUnknown);
        expect_plain_stream(&streams[0]);
    }
    /* These two questions are asked again by each call, so the stream gets its graph later. */
    static const char *const again[] = {"cuStreamIsCapturing", "cuStreamGetId"};
    for (size_t i = 0; i < 2; i++) {
        begin();
        const smla_cuda_grid grid = make_grid(&streams[0]);
        fail_call(again[i], 0, cudaErrorUnknown);
        expect_launch(&grid);
        expect_graph(&grid);
    }
    /* A driver that lacks the function for streams with their own SMs lacks such streams. */
    begin();
    smla_cuda_grid grid = make_grid(&streams[0]);
    fake.lacks = "cuStreamGetGreenCtx";
    expect_graph(&grid);
    begin();
    grid = make_grid(&streams[0]);
    fail_call("cudaGetDriverEntryPointByVersion", 0, cudaErrorUnknown);
    expect_graph(&grid);
}

static void
test_captures(void)
{
    begin();
    smla_cuda_grid grid = make_grid(&streams[0]);
    streams[0].is_capturing = true;
    for (int early = 0; early < 2; early++) {
        grid.starts_early = early;
        expect_launch(&grid);
        EXPECT_CALLS("cuStreamIsCapturing cudaLaunchKernelExC ");
    }
    streams[0].is_capturing = false;
    expect_graph(&grid);
    streams[0].is_capturing = true;
    expect_launch(&grid);
}

/* A kernel with clusters has a graph of its own, or it is launched. */
static void
test_clusters(void)
{
    begin();
    smla_cuda_grid grid = make_grid(&streams[0]);
    smla_cuda_grid clusters = make_grid(&streams[0]);
    clusters.has_clusters = true;
    clusters.kernel = &kernels[16];
    for (int early = 0; early < 2; early++) { /* no graph may begin with it */
        forget_calls();
        clusters.starts_early = early;
        expect_launch(&clusters);
        EXPECT_CALLS(ASKED "cudaLaunchKernelExC ");
    }
    expect_graph(&grid);
    expect_graph(&clusters);
    forget_calls();
    expect_graph(&clusters);
    EXPECT_CALLS(STARTED);
    const stream_graph *const stream = atomic_load(&graphs_of[0].first);
    const cudaGraphExec_t own = stream->known[1].exec;
    for (int i = 2; i < 2 * KNOWN_KERNELS; i++) {
        grid.kernel = &kernels[i * 16];
        expect_graph(&grid);
    }
    for (int i = 0; i < KNOWN_KERNELS; i++) {
        EXPECT_EQ(stream->known[i].exec == own, i == 1);
    }
    /* There is no place and no graph left. The last place may have a graph of its own, too. */
    clusters.kernel = &kernels[15];
    expect_launch(&clusters);
    stream_graph *const writable = atomic_load(&graphs_of[0].first);
    writable->known[KNOWN_KERNELS - 1].exec = graphs_of[0].execs[0];
    expect_launch(&clusters);
    expect_graph(&grid);
    /* A place, but no graph. */
    grid = make_grid(&streams[1]);
    expect_graph(&grid);
    clusters.stream = grid.stream;
    expect_launch(&clusters);
    expect_launch(&clusters);
    EXPECT_EQ(count_calls("cudaGetLastError"), 0); /* nothing has failed */
    /* The stream's first place, which has no kernel after a failure. */
    begin();
    grid = make_grid(&streams[0]);
    fail_call("cudaGetFuncBySymbol", 0, cudaErrorInvalidValue);
    expect_launch(&grid);
    clusters.stream = grid.stream;
    expect_graph(&clusters);
    EXPECT(atomic_load(&graphs_of[0].first)->known[0].exec !=
           atomic_load(&graphs_of[0].first)->exec);
}

/* ---- Pairs --------------------------------------------------------------------------------- */

/* Launches both grids as a pair, and expects that each kernel was started once, with the argument
 * that it had then. The second one starts early if pairs do. */
static void
expect_pair(const smla_cuda_grid *first, const smla_cuda_grid *second, bool is_pair)
{
    const int former = fake.num_starts;
    smla_cuda_deferred deferred;
    smla_cuda_begin_deferred(&deferred);
    const int argument = ++value;
    EXPECT_EQ((int)smla_cuda_launch(first, &deferred), (int)cudaSuccess);
    EXPECT_EQ(fake.num_starts, former);
    value++;
    EXPECT_EQ((int)smla_cuda_launch(second, &deferred), (int)cudaSuccess);
    EXPECT_EQ(fake.num_starts, former + 2);
    if (fake.num_starts != former + 2) {
        return;
    }
    const fake_start *const starts = &fake.starts[former];
    expect_start(&starts[0], first, argument);
    expect_start(&starts[1], second, value);
    EXPECT_EQ(starts[1].is_graph && starts[1].starts_early, is_pair && second->starts_early);
}

#define PAIRED \
    ASKED "cuGraphExecKernelNodeSetParams cuGraphExecKernelNodeSetParams cudaGraphLaunch "

static void
test_pairs(void)
{
    for (int early = 0; early < 2; early++) {
        begin();
        smla_cuda_grid first = make_grid(&streams[0]);
        smla_cuda_grid second = make_grid(&streams[0]);
        first.starts_early = second.starts_early = early;
        second.kernel = kernel_at(1);
        second.num_blocks = 33;
        expect_pair(&first, &second, true); /* the stream's first call */
        EXPECT_EQ(count_calls("cudaGetFuncBySymbol"), 2);
        EXPECT_EQ(count_calls("cudaGetLastError"), 0);
        forget_calls();
        first.has_clusters = true; /* nothing else ever starts through this graph */
        expect_pair(&first, &second, true);
        EXPECT_CALLS(PAIRED);
        expect_pair(&second, &first, true); /* another pair */
        EXPECT_EQ(count_calls("cudaGetFuncBySymbol"), 2);
        EXPECT_EQ(graphs_of[0].num_pairs_left, MAX_PAIR_GRAPHS - 2);
        first.has_clusters = false;
        expect_graph(&first);
        expect_graph(&second);
    }
}

/* Pairs without a place, or without a graph, start one by one. */
static void
test_many_pairs(void)
{
    begin();
    for (int s = 0; s < 4; s++) {
        for (int i = 0; i < 2 * KNOWN_PAIRS; i++) {
            smla_cuda_grid first = make_grid(&streams[s]);
            smla_cuda_grid second = make_grid(&streams[s]);
            first.kernel = &kernels[i * 16];
            second.kernel = &kernels[(i + 100) * 16];
            second.starts_early = true;
            const bool is_pair = i < KNOWN_PAIRS && s < MAX_PAIR_GRAPHS / KNOWN_PAIRS;
            forget_calls();
            expect_pair(&first, &second, is_pair);
            EXPECT_EQ(count_calls("cudaGraphLaunch"), is_pair ? 1 : 2);
            EXPECT_EQ(count_calls("cudaLaunchKernelExC"), 0);
            EXPECT_EQ(count_calls("cudaGetLastError"), 0); /* nothing has failed */
        }
    }
    EXPECT_EQ(graphs_of[0].num_pairs_left, 0);
}

/* In a capture, and on streams without graphs, each kernel is launched. */
static void
test_pairs_launched(void)
{
    begin();
    const smla_cuda_grid grid = make_grid(&streams[0]);
    streams[0].is_capturing = true;
    expect_pair(&grid, &grid, false);
    EXPECT_EQ(count_calls("cudaLaunchKernelExC"), 2);
    streams[0].is_capturing = false;
    streams[0].priority = 1;
    expect_pair(&grid, &grid, false);
    EXPECT_EQ(count_calls("cudaLaunchKernelExC"), 4);
    begin();
    fake.lacks = "cuGraphAddDependencies"; /* a driver of CUDA 12.2 or earlier */
    expect_pair(&grid, &grid, false);
    EXPECT_EQ(count_calls("cudaGraphLaunch"), 2);
    EXPECT_EQ(graphs_of[0].num_pairs_left, 0);
}

/* The driver's calls leave cudaGetLastError as it is. */
static bool
is_of_runtime(const char *call)
{
    return strncmp(call, "cuda", 4) == 0;
}

/* Where a graph refuses a pair, each kernel still starts once. */
static void
test_refused_pairs(void)
{
    static const struct {
        const char *call;
        int num_good;
    } cases[] = {{"cudaGetFuncBySymbol", 0},
                 {"cudaGetFuncBySymbol", 1},
                 {"cuGraphExecKernelNodeSetParams", 0},
                 {"cuGraphExecKernelNodeSetParams", 1},
                 {"cudaGraphLaunch", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin();
        const smla_cuda_grid first = make_grid(&streams[0]);
        smla_cuda_grid second = make_grid(&streams[0]);
        second.kernel = kernel_at(1);
        fail_call(cases[i].call, cases[i].num_good, cudaErrorInvalidValue);
        expect_pair(&first, &second, false);
        EXPECT_EQ(count_calls("cudaGetLastError"), is_of_runtime(cases[i].call));
        forget_calls();
        expect_pair(&first, &second, true); /* the next call tries again */
        EXPECT_EQ(count_calls("cudaGraphLaunch"), 1);
    }
    /* The error of the first launch is returned, and the second kernel is not started. */
    begin();
    const smla_cuda_grid grid = make_grid(&streams[0]);
    smla_cuda_deferred deferred;
    smla_cuda_begin_deferred(&deferred);
    streams[0].is_capturing = true;
    fail_call("cudaLaunchKernelExC", 0, cudaErrorLaunchFailure);
    EXPECT_EQ((int)smla_cuda_launch(&grid, &deferred), (int)cudaSuccess);
    EXPECT_EQ((int)smla_cuda_launch(&grid, &deferred), (int)cudaErrorLaunchFailure);
    EXPECT_EQ(fake.num_starts, 0);
}

/* Variables of the environment, and drivers that lack a function. */
static void
test_prepare(void)
{
    static const struct {
        const char *name, *text;
        bool has_graphs;
    } cases[] = {
        {"SPARSE_MLA_LAUNCH", "plain", false},  {"SPARSE_MLA_LAUNCH", "graph", true},
        {"SPARSE_MLA_LAUNCH", "", true},        {"CUDA_LAUNCH_BLOCKING", "1", false},
        {"CUDA_LAUNCH_BLOCKING", "0", true},    {"CUDA_LAUNCH_BLOCKING", "", true},
        {"CUDA_INJECTION64_PATH", "/x", false}, {"CUDA_INJECTION64_PATH", "", true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin();
        env_name = cases[i].name;
        snprintf(env_text, sizeof env_text, "%s", cases[i].text);
        prepare_graphs();
        env_name = NULL;
        const smla_cuda_grid grid = make_grid(&streams[0]);
        expect_started(&grid, cases[i].has_graphs);
    }
    static const char *const lacks[] = {"cuStreamIsCapturing", "cuStreamGetId", "cuStreamGetCtx",
                                        "cuGraphExecKernelNodeSetParams"};
    for (size_t i = 0; i < 4; i++) {
        begin();
        fake.lacks = lacks[i];
        prepare_graphs();
        const smla_cuda_grid grid = make_grid(&streams[0]);
        forget_calls();
        expect_launch(&grid);
        EXPECT_CALLS("cudaLaunchKernelExC ");
    }
}

/* ---- Keys ---------------------------------------------------------------------------------- */

/* Launches in turns that differ in one field, or in two whose sum is the same. */
static void
test_fields_of_a_launch(void)
{
    begin();
    const smla_cuda_grid base = make_grid(&streams[0]);
    smla_cuda_grid others[9];
    for (int i = 0; i < 9; i++) {
        others[i] = base;
    }
    int other_value = 100000;
    others[0].kernel = kernel_at(1);
    others[1].num_blocks++;
    others[2].block_threads += 32;
    others[3].shared_bytes++;
    others[4].stream.handle = &streams[1];
    others[5].num_blocks++;
    others[5].block_threads--;
    others[6].num_blocks--;
    others[6].shared_bytes++;
    others[7].block_threads += 4;
    others[7].shared_bytes -= 4;
    others[8].num_blocks = base.block_threads; /* swapped */
    others[8].block_threads = base.num_blocks;
    for (int i = 0; i < 9; i++) {
        for (int k = 0; k < 2; k++) {
            expect_graph(&base);
            expect_graph(&others[i]);
        }
    }
    /* The arguments alone, at another address and at the same one. */
    smla_cuda_grid grid = base;
    grid.args = &other_value;
    for (int k = 0; k < 3; k++) {
        const int former = fake.num_starts;
        EXPECT_EQ((int)smla_cuda_launch(&grid, NULL), (int)cudaSuccess);
        EXPECT_EQ(fake.num_starts, former + 1);
        expect_start(&fake.starts[former], &grid, other_value);
        expect_graph(&base);
        other_value += k;
    }
}

/* Pairs whose kernels are the same first, the same second, swapped, the same twice, or of equal sum
 * have graphs of their own, and every field of both grids is set each time. */
static void
test_keys_of_pairs(void)
{
    static const int keys[KNOWN_PAIRS][2] = {{1, 4}, {1, 3}, {2, 4}, {4, 1},
                                             {2, 3}, {1, 1}, {4, 4}, {3, 2}};
    begin();
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < KNOWN_PAIRS; i++) {
            smla_cuda_grid first = make_grid(&streams[0]);
            smla_cuda_grid second = make_grid(&streams[0]);
            first.kernel = kernel_at(keys[i][0]);
            second.kernel = kernel_at(keys[i][1]);
            if (round > 0) { /* one field of one of the two, by turns */
                smla_cuda_grid *const changed = i % 2 == 0 ? &first : &second;
                changed->num_blocks += round == 1;
                changed->block_threads += round == 2 ? 32 : 0;
                changed->shared_bytes += round == 3;
            }
            forget_calls();
            expect_pair(&first, &second, true);
            EXPECT_EQ(count_calls("cudaGraphLaunch"), 1);
            EXPECT_EQ(count_calls("cudaGetFuncBySymbol"), round == 0 ? 2 : 0);
            const int used = round == 0 ? i + 1 : KNOWN_PAIRS;
            EXPECT_EQ(graphs_of[0].num_pairs_left, MAX_PAIR_GRAPHS - used);
        }
    }
    const stream_graph *const stream = atomic_load(&graphs_of[0].first);
    for (int i = 0; i < KNOWN_PAIRS; i++) {
        EXPECT(stream->pairs[i].kernels[0] == kernel_at(keys[i][0]));
        EXPECT(stream->pairs[i].kernels[1] == kernel_at(keys[i][1]));
        for (int k = 0; k < i; k++) {
            EXPECT(stream->pairs[i].exec != stream->pairs[k].exec);
        }
    }
}

/* Streams are known by all bits of their ids, and for each device apart. */
static void
test_keys_of_streams(void)
{
    static const unsigned long long ids[] = {7, 7 + (1ull << 32), 7 + (1ull << 16), 6,
                                             8, 1ull << 63};
    enum { NUM_IDS = sizeof ids / sizeof ids[0] };
    begin();
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < NUM_IDS; i++) {
            streams[i].id = ids[i];
            streams[i].priority = i % 2; /* every other one must not get a neighbour's graph */
            const smla_cuda_grid grid = make_grid(&streams[i]);
            expect_started(&grid, i % 2 == 0);
        }
        EXPECT_EQ(graphs_of[0].num_streams, NUM_IDS);
    }
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < NUM_IDS; i++) { /* the same ids on another device */
            streams[10 + i].id = ids[i];
            streams[10 + i].priority = 1 - i % 2;
            streams[10 + i].context = &fake_contexts[1];
            smla_cuda_grid grid = make_grid(&streams[10 + i]);
            grid.stream.device_id = 1;
            expect_started(&grid, i % 2 == 1);
        }
        EXPECT_EQ(graphs_of[1].num_streams, NUM_IDS);
    }
    const int num_left = MAX_GRAPHS - NUM_IDS / 2;
    EXPECT_EQ(graphs_of[0].num_left, num_left);
    EXPECT_EQ(graphs_of[1].num_left, num_left);
    for (const stream_graph *at = atomic_load(&graphs_of[1].first); at != NULL; at = at->next) {
        for (int i = 0; at->exec != NULL && i < MAX_GRAPHS; i++) {
            EXPECT(at->exec != graphs_of[0].execs[i]);
        }
    }
}

/* A pair's kernels, parameters and places are those of its own stream and device. */
static void
test_pairs_of_streams(void)
{
    begin();
    for (int round = 0; round < 2; round++) {
        for (int s = 0; s < 4; s++) {
            streams[s].context = &fake_contexts[s / 2];
            smla_cuda_grid first = make_grid(&streams[s]);
            first.stream.device_id = s / 2;
            smla_cuda_grid second = first;
            second.kernel = kernel_at(1);
            second.num_blocks = 20 + (unsigned)s;
            forget_calls();
            expect_pair(&first, &second, true);
            EXPECT_EQ(count_calls("cudaGetFuncBySymbol"), round == 0 ? 2 : 0);
        }
        for (int d = 0; d < 2; d++) {
            EXPECT_EQ(graphs_of[d].num_pairs_left, MAX_PAIR_GRAPHS - 2);
            EXPECT_EQ(graphs_of[d].num_left, MAX_GRAPHS - 2);
        }
    }
}

/* ---- Failures ------------------------------------------------------------------------------ */

/* A kernel that a graph refuses is launched, the runtime's last error is cleared if the runtime
 * failed, and the next call tries the graph again. */
static void
test_refused_graphs(void)
{
    static const char *const calls[] = {"cudaGetFuncBySymbol", "cuGraphExecKernelNodeSetParams",
                                        "cudaGraphLaunch"};
    for (size_t i = 0; i < 3; i++) {
        begin();
        const smla_cuda_grid other = make_grid(&streams[0]);
        expect_graph(&other);
        smla_cuda_grid grid = make_grid(&streams[0]);
        grid.kernel = kernel_at(1);
        forget_calls();
        fail_call(calls[i], 0, cudaErrorInvalidValue);
        expect_launch(&grid);
        EXPECT_EQ(count_calls("cudaGetLastError"), is_of_runtime(calls[i]));
        expect_graph(&grid);
        expect_graph(&other);
    }
    /* The error of a launch that fails as well is returned. */
    begin();
    const smla_cuda_grid grid = make_grid(&streams[0]);
    expect_graph(&grid);
    fail_call(NULL, 2, cudaErrorInvalidValue); /* set_params */
    expect_launch(&grid);
    const int former = fake.num_starts;
    fail_call("cudaLaunchKernelExC", 0, cudaErrorLaunchFailure);
    fake.lacks = "all";
    streams[0].is_capturing = true;
    EXPECT_EQ((int)smla_cuda_launch(&grid, NULL), (int)cudaErrorLaunchFailure);
    EXPECT_EQ(fake.num_starts, former);
}

/* Where not all graphs can be made, those that could be made serve the first streams. */
static void
test_few_graphs(void)
{
    static const struct {
        const char *call;
        int num_good, num_graphs;
    } cases[] = {
        {"cudaGraphCreate", 0, 0},
        {"cudaGraphAddKernelNode", 0, 0},
        {"cudaGraphInstantiate", 0, 0},
        {"cudaGraphInstantiate", 1, 1},
        {"cudaGraphInstantiate", MAX_GRAPHS - 1, MAX_GRAPHS - 1},
        {"cudaGraphInstantiate", MAX_GRAPHS + 1, MAX_GRAPHS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin();
        fail_call(cases[i].call, cases[i].num_good, cudaErrorMemoryAllocation);
        for (int s = 0; s < MAX_GRAPHS; s++) {
            const smla_cuda_grid grid = make_grid(&streams[s]);
            expect_started(&grid, s < cases[i].num_graphs);
        }
        EXPECT_EQ(count_calls("cudaGetLastError"), 1);
    }
}

/* Without memory to remember the stream, this call is launched, and the next one tries again. */
static void
test_no_memory(void)
{
    begin();
    const smla_cuda_grid grid = make_grid(&streams[0]);
    has_memory = false;
    expect_launch(&grid);
    EXPECT_EQ(graphs_of[0].num_streams, 0);
    has_memory = true;
    has_mutexes = false;
    expect_launch(&grid);
    EXPECT_EQ(graphs_of[0].num_streams, 0);
    EXPECT_EQ(num_live, 0);
    has_mutexes = true;
    expect_graph(&grid);
}

/* ---- One device ---------------------------------------------------------------------------- */

/* With one device no stream is of another one, so streams are not asked. */
static void
test_one_device(void)
{
    begin();
    for (int i = 0; i < 2; i++) {
        streams[i].device_id = 1;
        EXPECT_OK(smla_cuda_check_stream("some_op", (smla_stream){0, &streams[i]}, &error));
        EXPECT_CALLS(i == 0 ? "cudaGetDeviceCount " : "");
    }
}

/* ---- Threads ------------------------------------------------------------------------------- */

enum { NUM_THREADS = 8, NUM_SHARED_STREAMS = 3, NUM_CALLS = 200 };

static void *
launch_many(void *arg)
{
    const int me = *(const int *)arg;
    for (int i = 0; i < NUM_CALLS; i++) {
        int argument = me * NUM_CALLS + i;
        smla_cuda_grid grid = make_grid(&streams[(me + i) % NUM_SHARED_STREAMS]);
        grid.args = &argument;
        grid.kernel = kernel_at(argument % 3);
        if (smla_cuda_launch(&grid, NULL) != cudaSuccess) {
            return arg;
        }
    }
    return NULL;
}

/* Streams are added under one lock. */
static void
expect_locked(const char *call)
{
    if (strcmp(call, "cudaStreamGetPriority") == 0) {
        expect_held(&streams_lock);
    }
}

/* Every kernel is started once, on the stream that it was for, with its own arguments. */
static void
test_threads(void)
{
    static int numbers[NUM_THREADS];
    static int counts[NUM_THREADS * NUM_CALLS];
    pthread_t threads[NUM_THREADS];
    begin();
    fake_watch = expect_locked;
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < NUM_THREADS; i++) {
        numbers[i] = i;
        EXPECT_EQ(pthread_create(&threads[i], NULL, launch_many, &numbers[i]), 0);
    }
    for (int i = 0; i < NUM_THREADS; i++) {
        void *result = NULL;
        EXPECT_EQ(pthread_join(threads[i], &result), 0);
        EXPECT(result == NULL);
    }
    fake_watch = NULL;
    EXPECT_EQ(fake.num_starts, NUM_THREADS * NUM_CALLS);
    for (int i = 0; i < fake.num_starts; i++) {
        const fake_start *const start = &fake.starts[i];
        const int me = start->value / NUM_CALLS;
        EXPECT(start->is_graph);
        EXPECT(start->kernel == kernel_at(start->value % 3));
        EXPECT(start->stream == &streams[(me + start->value % NUM_CALLS) % NUM_SHARED_STREAMS]);
        counts[start->value]++;
    }
    for (int i = 0; i < NUM_THREADS * NUM_CALLS; i++) {
        EXPECT_EQ(counts[i], 1);
    }
    EXPECT_EQ(graphs_of[0].num_streams, NUM_SHARED_STREAMS);
}

/* The process's first call looks up the driver's functions, so this test comes first in main. */
static void
test_first_call(void)
{
    reset_fake();
    const smla_cuda_grid grid = make_grid(NULL);
    expect_graph(&grid);
    EXPECT_EQ(count_calls("cudaGetDriverEntryPointByVersion"), 6);
    expect_graph(&grid);
    EXPECT_EQ(count_calls("cudaGetDriverEntryPointByVersion"), 6);
}

int
main(void)
{
    RUN(test_first_call);
    RUN(test_first_and_next);
    RUN(test_many_kernels);
    RUN(test_many_streams);
    RUN(test_kernels_without_a_graph_left);
    RUN(test_handles);
    RUN(test_devices);
    RUN(test_streams_of_their_own);
    RUN(test_questions_that_fail);
    RUN(test_captures);
    RUN(test_clusters);
    RUN(test_pairs);
    RUN(test_many_pairs);
    RUN(test_pairs_launched);
    RUN(test_refused_pairs);
    RUN(test_fields_of_a_launch);
    RUN(test_keys_of_pairs);
    RUN(test_keys_of_streams);
    RUN(test_pairs_of_streams);
    RUN(test_prepare);
    RUN(test_refused_graphs);
    RUN(test_few_graphs);
    RUN(test_no_memory);
    RUN(test_one_device);
    RUN(test_threads);
    begin();
    return report("test_cuda_launch");
}
