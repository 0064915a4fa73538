/* launch.c: how kernels are started.
 *
 * A launch costs the host 2.5 to 4 us. Most of this time passes until the command has left for the
 * GPU. The command of a graph of one kernel is there already: to set new parameters and start it
 * costs 1.6 us, and an idle device is done 1.7 us sooner. A graph that changes its kernel takes
 * 2.4 us more. So every stream has a graph, and the first kernels of a stream have a graph each,
 * while graphs are left. Graphs have a price: a kernel waits for the previous grid to end, where an
 * early start would save 1 us, and a graph takes 100 KiB of device memory. Taking memory may need
 * an idle device, so the first call on a device makes all graphs.
 *
 * Two kernels that one call starts are a pair. Pairs have their own graphs of two kernels: one
 * start takes 1.2 us less than two, and the second kernel starts early, which saves the device
 * 1.6 us. Where no such graph is left, each kernel starts by itself.
 *
 * Where a graph would not do the same as a launch, the kernel is launched:
 * - in a capture, which is to contain the kernel itself;
 * - on streams with a priority, an access policy, a memory domain or reserved SMs, which a graph
 *   ignores;
 * - where a kernel has clusters and no graph of its own, because the graph would start other
 *   kernels in clusters, too;
 * - where a tool or the user watches single launches.
 */
#include <cudaTypedefs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/host/cuda.h"

enum { KNOWN_KERNELS = 32, KNOWN_PAIRS = 8 };

typedef struct known_pair {
    const void *kernels[2]; /* NULL if the entry is free */
    cudaFunction_t functions[2];
    cudaGraphExec_t exec;
} known_pair;

typedef struct stream_graph {
    struct stream_graph *next;
    unsigned long long stream_id; /* id of the stream; unlike handles, ids are never used again */
    cudaGraphNode_t node;
    cudaGraphExec_t exec; /* NULL if kernels on this stream are launched */
    pthread_mutex_t lock; /* taken from new parameters to the start; guards `known` and `pairs` */
    struct known_kernel {
        const void *kernel;
        cudaFunction_t function; /* the kernel's function in the stream's context */
        cudaGraphExec_t exec;    /* the kernel's own graph, or the stream's */
    } known[KNOWN_KERNELS];
    known_pair pairs[KNOWN_PAIRS];
} stream_graph;

enum {
    /* Graphs of one kernel per device; PyTorch has 32 streams and reuses them. */
    MAX_GRAPHS = 64,
    MAX_KERNEL_GRAPHS = 24, /* as many of MAX_GRAPHS are for a stream's later kernels */
    MAX_PAIR_GRAPHS = 16,   /* graphs of pairs per device, besides MAX_GRAPHS */
    MAX_STREAMS = 200,      /* streams that are known per device; on others kernels are launched */
};

static struct device_graphs {
    _Atomic(stream_graph *) first; /* newest stream; streams are never removed */
    /* Number of streams; streams_lock guards this and the fields below. */
    int num_streams;
    CUcontext context;    /* the graphs' context; NULL until they are made */
    cudaGraphNode_t node; /* node of the kernel, the same in each graph */
    cudaGraphExec_t execs[MAX_GRAPHS];
    int num_left;         /* number of graphs that are not taken yet */
    int num_kernels_left; /* number of kernels that may still take one */
    cudaGraphNode_t pair_nodes[2];
    cudaGraphExec_t pair_execs[MAX_PAIR_GRAPHS];
    int num_pairs_left;
} graphs_of[SMLA_CUDA_MAX_DEVICES];

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- Launches ------------------------------------------------------------------------------ */

static cudaError_t
launch(const smla_cuda_grid *grid)
{
    cudaLaunchAttribute early = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                                 .val.programmaticStreamSerializationAllowed = 1};
    cudaLaunchConfig_t config = {.gridDim = {grid->num_blocks, 1, 1},
                                 .blockDim = {grid->block_threads, 1, 1},
                                 .dynamicSmemBytes = grid->shared_bytes,
                                 .stream = grid->stream.handle,
                                 .attrs = &early,
                                 .numAttrs = grid->starts_early};
    return cudaLaunchKernelExC(&config, grid->kernel, (void *[]){grid->args});
}

/* ---- Graphs -------------------------------------------------------------------------------- */

/* Functions of the driver. The runtime's functions take longer, 0.04 us for a query and 0.2 us for
 * parameters, because they look the kernel up. But the runtime starts graphs, because profilers
 * watch it. */
static struct {
    PFN_cuStreamIsCapturing_v10000 is_capturing;
    PFN_cuStreamGetId_v12000 get_id;
    PFN_cuStreamGetCtx_v9020 get_context;
    PFN_cuGraphExecKernelNodeSetParams_v12000 set_params; /* NULL if graphs are not used */
} driver;

static cudaError_t
find_driver(void)
{
    const smla_cuda_symbol calls[] = {
        {"cuStreamIsCapturing", (void *)&driver.is_capturing},
        {"cuStreamGetId", (void *)&driver.get_id},
        {"cuStreamGetCtx", (void *)&driver.get_context},
        {"cuGraphExecKernelNodeSetParams", (void *)&driver.set_params},
    };
    return smla_cuda_find_driver_calls(calls, 4, 12000);
}

/* Turns graphs off, by set_params = NULL, where the user or a tool wants plain launches:
 * SPARSE_MLA_LAUNCH=plain serves to compare, and an injected profiler would show a graph as one
 * item without a name. */
static void
prepare_graphs(void)
{
    const char *const wish = getenv("SPARSE_MLA_LAUNCH");
    if ((wish != NULL && strcmp(wish, "plain") == 0) || smla_cuda_is_set("CUDA_LAUNCH_BLOCKING") ||
        smla_cuda_is_set("CUDA_INJECTION64_PATH") || find_driver() != cudaSuccess) {
        driver.set_params = NULL;
    }
}

/* Whether SMs are reserved for the stream. A driver without this query has no such streams. */
static bool
has_own_sms(cudaStream_t stream)
{
    PFN_cuStreamGetGreenCtx_v12040 get_context = NULL;
    const smla_cuda_symbol call = {"cuStreamGetGreenCtx", (void *)&get_context};
    CUgreenCtx context = NULL;
    return smla_cuda_find_driver_calls(&call, 1, 12040) == cudaSuccess &&
           (get_context(stream, &context) != CUDA_SUCCESS || context != NULL);
}

/* Whether a kernel in a graph runs on this stream as a launched kernel does. */
static bool
is_ordinary(cudaStream_t stream)
{
    int priority = -1;
    cudaLaunchAttributeValue policy;
    cudaLaunchAttributeValue domain;
    return cudaStreamGetPriority(stream, &priority) == cudaSuccess && priority == 0 &&
           cudaStreamGetAttribute(stream, cudaLaunchAttributeAccessPolicyWindow, &policy) ==
               cudaSuccess &&
           policy.accessPolicyWindow.num_bytes == 0 &&
           cudaStreamGetAttribute(stream, cudaLaunchAttributeMemSyncDomain, &domain) ==
               cudaSuccess &&
           domain.memSyncDomain == cudaLaunchMemSyncDomainDefault && !has_own_sms(stream);
}

/* Adds a node with the caller's kernel to a graph. */
static bool
add_node(const smla_cuda_grid *grid, cudaGraph_t graph, cudaGraphNode_t *node)
{
    const struct cudaKernelNodeParams params = {.func = (void *)grid->kernel,
                                                .gridDim = {grid->num_blocks, 1, 1},
                                                .blockDim = {grid->block_threads, 1, 1},
                                                .sharedMemBytes = grid->shared_bytes,
                                                .kernelParams = (void *[]){grid->args}};
    return cudaGraphAddKernelNode(node, graph, NULL, 0, &params) == cudaSuccess;
}

/* Makes the second node follow the first. The second starts early if kernels here can, because each
 * kernel waits for earlier grids by itself. */
static bool
order_nodes(const smla_cuda_grid *grid, cudaGraph_t graph, const cudaGraphNode_t nodes[2])
{
    PFN_cuGraphAddDependencies_v12030 add = NULL;
    const smla_cuda_symbol call = {"cuGraphAddDependencies", (void *)&add};
    const CUgraphEdgeData early = {.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC,
                                   .type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC};
    const CUgraphEdgeData late = {.type = CU_GRAPH_DEPENDENCY_TYPE_DEFAULT};
    return smla_cuda_find_driver_calls(&call, 1, 12030) == cudaSuccess &&
           add(graph, &nodes[0], &nodes[1], grid->starts_early ? &early : &late, 1) == CUDA_SUCCESS;
}

/* Instantiates `count` graphs, or fewer if that fails, and returns their number. */
static int
instantiate(cudaGraph_t graph, cudaGraphExec_t *execs, int count)
{
    int made = 0;
    while (made < count && cudaGraphInstantiate(&execs[made], graph, 0) == cudaSuccess) {
        made++;
    }
    return made;
}

/* Makes all graphs, in the current context. They begin with the caller's kernel, though any kernel
 * would do. The template graphs are kept, because their nodes name the kernels in the executable
 * graphs. */
static void
make_graphs(const smla_cuda_grid *grid, struct device_graphs *made)
{
    cudaGraph_t graph = NULL;
    cudaGraph_t pair = NULL;
    made->num_kernels_left = MAX_KERNEL_GRAPHS;
    if (cudaGraphCreate(&graph, 0) == cudaSuccess && add_node(grid, graph, &made->node)) {
        made->num_left = instantiate(graph, made->execs, MAX_GRAPHS);
    }
    if (made->num_left == MAX_GRAPHS && cudaGraphCreate(&pair, 0) == cudaSuccess &&
        add_node(grid, pair, &made->pair_nodes[0]) && add_node(grid, pair, &made->pair_nodes[1]) &&
        order_nodes(grid, pair, made->pair_nodes)) {
        made->num_pairs_left = instantiate(pair, made->pair_execs, MAX_PAIR_GRAPHS);
    }
    if (made->num_pairs_left < MAX_PAIR_GRAPHS) {
        (void)cudaGetLastError();
    }
}

/* Gives an ordinary stream a graph. The caller holds streams_lock. Contexts do not share functions,
 * so only streams of the first stream's context get a graph. */
static void
take_graph(const smla_cuda_grid *grid, struct device_graphs *graphs, stream_graph *taker)
{
    CUcontext context = NULL;
    if (driver.get_context(grid->stream.handle, &context) != CUDA_SUCCESS) {
        return;
    }
    if (graphs->context == NULL) {
        graphs->context = context;
        make_graphs(grid, graphs);
    }
    if (context == graphs->context && graphs->num_left > 0) {
        taker->node = graphs->node;
        taker->exec = graphs->execs[--graphs->num_left];
    }
}

/* Returns the graph for a kernel that is not the stream's first: a new graph if any is left, else
 * the stream's. */
static cudaGraphExec_t
take_kernel_graph(const smla_cuda_grid *grid, const stream_graph *stream)
{
    struct device_graphs *const graphs = &graphs_of[grid->stream.device_id];
    cudaGraphExec_t taken = stream->exec;
    pthread_mutex_lock(&streams_lock);
    if (graphs->num_kernels_left > 0 && graphs->num_left > 0) {
        graphs->num_kernels_left--;
        taken = graphs->execs[--graphs->num_left];
    }
    pthread_mutex_unlock(&streams_lock);
    return taken;
}

static stream_graph *
find_stream(int32_t device_id, unsigned long long stream_id)
{
    stream_graph *at = atomic_load_explicit(&graphs_of[device_id].first, memory_order_acquire);
    while (at != NULL && at->stream_id != stream_id) {
        at = at->next;
    }
    return at;
}

/* Adds the stream, if no other thread has added it. Returns NULL if there are too many streams. The
 * caller holds streams_lock. */
static stream_graph *
add_stream(const smla_cuda_grid *grid, unsigned long long stream_id)
{
    struct device_graphs *const graphs = &graphs_of[grid->stream.device_id];
    stream_graph *added = find_stream(grid->stream.device_id, stream_id);
    if (added != NULL || graphs->num_streams == MAX_STREAMS) {
        return added;
    }
    added = calloc(1, sizeof *added);
    if (added == NULL || pthread_mutex_init(&added->lock, NULL) != 0) {
        free(added);
        return NULL;
    }
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    if (is_ordinary(grid->stream.handle)) {
        take_graph(grid, graphs, added);
    }
    smla_cuda_restore_captures(former);
    added->stream_id = stream_id;
    added->next = atomic_load_explicit(&graphs->first, memory_order_relaxed);
    atomic_store_explicit(&graphs->first, added, memory_order_release);
    graphs->num_streams++;
    return added;
}

/* Whether nothing captures the stream's work. The legacy stream is never captured. */
static bool
is_free(CUstream stream)
{
    CUstreamCaptureStatus capture;
    return stream == NULL || (driver.is_capturing(stream, &capture) == CUDA_SUCCESS &&
                              capture == CU_STREAM_CAPTURE_STATUS_NONE);
}

/* Returns the graph of the grid's stream, or NULL where the kernel must be launched. */
static stream_graph *
find_graph(const smla_cuda_grid *grid)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    unsigned long long stream_id;
    (void)pthread_once(&once, prepare_graphs);
    if (driver.set_params == NULL || !is_free(grid->stream.handle) ||
        driver.get_id(grid->stream.handle, &stream_id) != CUDA_SUCCESS) {
        return NULL;
    }
    stream_graph *found = find_stream(grid->stream.device_id, stream_id);
    if (found == NULL && !grid->has_clusters) { /* the kernel that adds a stream is in its graph */
        pthread_mutex_lock(&streams_lock);
        found = add_stream(grid, stream_id);
        pthread_mutex_unlock(&streams_lock);
    }
    return found == NULL || found->exec == NULL ? NULL : found;
}

/* Returns the kernel's entry, a free one, or else the last, which such kernels share. A stream
 * seldom has that many kernels. */
static struct known_kernel *
find_entry(stream_graph *graph, const void *kernel)
{
    int index = 0;
    while (index < KNOWN_KERNELS - 1 && graph->known[index].kernel != NULL &&
           graph->known[index].kernel != kernel) {
        index++;
    }
    return &graph->known[index];
}

/* Whether the kernel may start by the graph of this entry. A graph that has once contained a kernel
 * with clusters starts every kernel in clusters. So such a kernel needs a graph that no other
 * kernel will have: neither the stream's graph, nor that of the last entry, which kernels share. */
static bool
may_start(const stream_graph *graph, const struct known_kernel *known, const smla_cuda_grid *grid)
{
    return !grid->has_clusters ||
           (known->exec != graph->exec && known != &graph->known[KNOWN_KERNELS - 1]);
}

/* Whether a call of the runtime succeeded. If it failed, a launch follows, so its error is not left
 * for whoever asks cudaGetLastError next. Earlier errors there may be somebody else's, and stay. */
static bool
has_succeeded(cudaError_t code)
{
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return code == cudaSuccess;
}

/* Returns the kernel's function in the current context, or NULL after an error. */
static cudaFunction_t
find_function(const void *kernel)
{
    cudaFunction_t function = NULL;
    /* This may load code, which a capture forbids. */
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    const cudaError_t code = cudaGetFuncBySymbol(&function, kernel);
    smla_cuda_restore_captures(former);
    return has_succeeded(code) ? function : NULL;
}

/* Finds or fills the kernel's entry. Returns NULL where the kernel must be launched. The caller
 * holds the graph's lock. */
static const struct known_kernel *
find_known(stream_graph *graph, const smla_cuda_grid *grid)
{
    struct known_kernel *const known = find_entry(graph, grid->kernel);
    if (known->kernel != grid->kernel) {
        const cudaFunction_t function = find_function(grid->kernel);
        if (function == NULL) {
            return NULL;
        }
        known->kernel = grid->kernel;
        known->function = function;
        if (known->exec == NULL) {
            const bool is_first = known == graph->known && !grid->has_clusters;
            known->exec = is_first ? graph->exec : take_kernel_graph(grid, graph);
        }
    }
    return may_start(graph, known, grid) ? known : NULL;
}

static bool
set_params(cudaGraphExec_t exec, cudaGraphNode_t node, cudaFunction_t function,
           const smla_cuda_grid *grid)
{
    const CUDA_KERNEL_NODE_PARAMS params = {.func = function,
                                            .gridDimX = grid->num_blocks,
                                            .gridDimY = 1,
                                            .gridDimZ = 1,
                                            .blockDimX = grid->block_threads,
                                            .blockDimY = 1,
                                            .blockDimZ = 1,
                                            .sharedMemBytes = grid->shared_bytes,
                                            .kernelParams = (void *[]){grid->args}};
    return driver.set_params(exec, node, &params) == CUDA_SUCCESS;
}

static bool
start_graph(const smla_cuda_grid *grid, stream_graph *graph)
{
    const struct known_kernel *const known = find_known(graph, grid);
    return known != NULL && set_params(known->exec, graph->node, known->function, grid) &&
           has_succeeded(cudaGraphLaunch(known->exec, grid->stream.handle));
}

/* Starts a kernel by its stream's graph. If that fails, a launch starts it or returns the error. */
static cudaError_t
start(const smla_cuda_grid *grid)
{
    stream_graph *const graph = find_graph(grid);
    if (graph != NULL) {
        pthread_mutex_lock(&graph->lock);
        const bool is_started = start_graph(grid, graph);
        pthread_mutex_unlock(&graph->lock);
        if (is_started) {
            return cudaSuccess;
        }
    }
    return launch(grid);
}

/* ---- Pairs --------------------------------------------------------------------------------- */

/* Returns the entry of a pair: its own, or a free one. NULL if other pairs have all entries. */
static known_pair *
find_pair_entry(stream_graph *graph, const smla_cuda_grid *first, const smla_cuda_grid *second)
{
    for (int i = 0; i < KNOWN_PAIRS; i++) {
        known_pair *const pair = &graph->pairs[i];
        if (pair->kernels[0] == NULL ||
            (pair->kernels[0] == first->kernel && pair->kernels[1] == second->kernel)) {
            return pair;
        }
    }
    return NULL;
}

/* Takes one of the device's graphs for a new pair. */
static bool
take_pair_graph(const smla_cuda_grid *first, const smla_cuda_grid *second, known_pair *taker)
{
    struct device_graphs *const graphs = &graphs_of[second->stream.device_id];
    pthread_mutex_lock(&streams_lock);
    if (graphs->num_pairs_left > 0) {
        const cudaFunction_t functions[2] = {find_function(first->kernel),
                                             find_function(second->kernel)};
        if (functions[0] != NULL && functions[1] != NULL) {
            *taker = (known_pair){{first->kernel, second->kernel},
                                  {functions[0], functions[1]},
                                  graphs->pair_execs[--graphs->num_pairs_left]};
        }
    }
    pthread_mutex_unlock(&streams_lock);
    return taker->kernels[0] != NULL;
}

/* Starts a pair by a graph; returns whether it did. The caller holds the stream graph's lock. */
static bool
start_pair_graph(const smla_cuda_grid *first, const smla_cuda_grid *second, stream_graph *graph)
{
    known_pair *const pair = find_pair_entry(graph, first, second);
    const cudaGraphNode_t *const nodes = graphs_of[second->stream.device_id].pair_nodes;
    return pair != NULL && (pair->kernels[0] != NULL || take_pair_graph(first, second, pair)) &&
           set_params(pair->exec, nodes[0], pair->functions[0], first) &&
           set_params(pair->exec, nodes[1], pair->functions[1], second) &&
           has_succeeded(cudaGraphLaunch(pair->exec, second->stream.handle));
}

/* Starts both kernels by one graph, or each by itself. */
static cudaError_t
start_pair(const smla_cuda_grid *first, const smla_cuda_grid *second)
{
    stream_graph *const graph = find_graph(second);
    if (graph != NULL) {
        pthread_mutex_lock(&graph->lock);
        const bool is_started = start_pair_graph(first, second, graph);
        pthread_mutex_unlock(&graph->lock);
        if (is_started) {
            return cudaSuccess;
        }
    }
    const cudaError_t code = start(first);
    return code == cudaSuccess ? start(second) : code;
}

cudaError_t
smla_cuda_launch(const smla_cuda_grid *grid, smla_cuda_deferred *deferred)
{
    if (deferred == NULL) {
        return start(grid);
    }
    if (deferred->is_full) {
        return start_pair(&deferred->grid, grid);
    }
    deferred->is_full = true;
    deferred->grid = *grid;
    deferred->grid.args = deferred->args;
    memcpy(deferred->args, grid->args, grid->args_bytes);
    return cudaSuccess;
}
