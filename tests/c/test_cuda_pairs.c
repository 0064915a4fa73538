/* test_cuda_pairs.c: pairs of kernels that csrc/cuda/host/launch.c starts by one graph, and what
 * tells the graphs of a stream apart, on the fake runtime and driver of runtime.h.
 */
#include "fake_cuda/launches.h"

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

/* Every pair of kernels has a graph of its own, and every field of both grids is set each time.
 * Pairs here share the first kernel, share the second, are swapped, have one kernel twice, or have
 * addresses of the same sum. */
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

int
main(void)
{
    RUN(test_pairs);
    RUN(test_many_pairs);
    RUN(test_pairs_launched);
    RUN(test_refused_pairs);
    RUN(test_keys_of_pairs);
    RUN(test_keys_of_streams);
    RUN(test_pairs_of_streams);
    begin();
    return report("test_cuda_pairs");
}
