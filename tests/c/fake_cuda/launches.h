/* launches.h: launch.c on the fake runtime and driver of runtime.h, grids to launch, and
 * expectations of how each was started. Included once in a program.
 */
#pragma once

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

#include "runtime.h"

static bool has_memory = true;
static bool has_mutexes = true;
static int num_live; /* live allocations */

static inline void *
test_calloc(size_t count, size_t size)
{
    num_live += has_memory;
    return has_memory ? calloc(count, size) : NULL;
}

static inline void
test_free(void *memory)
{
    num_live -= memory != NULL;
    free(memory);
}

static inline int
test_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes)
{
    return has_mutexes ? pthread_mutex_init(mutex, attributes) : 1;
}

/* The one environment variable that is set. */
static const char *env_name;
static char env_text[8];

static inline char *
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
static inline const void *
kernel_at(int i)
{
    return &kernels[i * 1024];
}

static struct CUstream_st streams[256];
static int value; /* the argument of the next kernel */

static inline smla_cuda_grid
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
static inline void
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
static inline void
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
static inline void
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

static inline void
expect_graph(const smla_cuda_grid *grid)
{
    expect_started(grid, true);
}

static inline void
expect_launch(const smla_cuda_grid *grid)
{
    expect_started(grid, false);
}

/* The calls for a stream that has not been seen. They do not disturb other threads' captures. */
static const char first_asked[] =
    ASKED "cudaStreamGetPriority~ policy~ domain~ cudaGetDriverEntryPointByVersion~ "
          "cuStreamGetGreenCtx~ cuStreamGetCtx~ cudaGraphCreate~ cudaGraphAddKernelNode~ "
          "cudaGraphInstantiate~ ";

/* The driver's calls leave cudaGetLastError as it is. */
static inline bool
is_of_runtime(const char *call)
{
    return strncmp(call, "cuda", 4) == 0;
}
