/* graphs.h: launches and graphs of the fake runtime of runtime.h, which write down every start of a
 * kernel.
 */
#pragma once

#include <sched.h>

#include "state.h"
#include "streams.h"

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
