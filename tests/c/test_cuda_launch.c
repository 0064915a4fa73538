/* test_cuda_launch.c: how csrc/cuda/host/launch.c chooses between a stream's graph and a launch, on
 * the fake runtime and driver of runtime.h.
 */
#include "fake_cuda/launches.h"

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
    RUN(test_fields_of_a_launch);
    RUN(test_prepare);
    RUN(test_refused_graphs);
    RUN(test_few_graphs);
    RUN(test_no_memory);
    RUN(test_one_device);
    RUN(test_threads);
    begin();
    return report("test_cuda_launch");
}
