/* top_k_launch.cuh: how top_k.cuh's kernels are started: their shared memory and their grid. */
#pragma once

#include "cuda/topk/top_k.cuh"

namespace {

/* ---- Launch -------------------------------------------------------------------------------- */

enum {
    MAX_LAUNCH_ROWS = 1 << 24, /* rows that get clusters of their own */
    STEP_BYTES = BLOCK_THREADS * VECTOR_BYTES,
};

static inline int
select_memory_bytes(int64_t steps)
{
    return (int)(sizeof(select_memory) + steps * STEP_BYTES);
}

/* The number of steps of each warp, for rows of num_columns columns that begin anywhere in a
 * vector. */
static inline int64_t
count_steps(const smla_top_k_params *p, int ctas)
{
    const int64_t elements = VECTOR_BYTES / (p->is_bf16 ? 2 : 4);
    const int64_t num_vectors = smla_count_parts(p->num_columns + elements - 1, elements);
    return smla_count_parts(num_vectors, (int64_t)ctas * BLOCK_THREADS);
}

/* How many steps of keys a CTA keeps in shared memory. A CTA that has an SM to itself keeps as many
 * as fit. Otherwise it keeps as many as leave room for a second CTA on the SM. */
static inline int64_t
choose_memory_steps(const smla_top_k_params *p, const smla_cuda_device *device, int ctas)
{
    enum { RESERVED_BYTES = 1024 }; /* shared memory per CTA that the driver takes */
    const bool has_own_sms = p->num_tokens * ctas <= device->num_sms;
    const int64_t room =
        has_own_sms ? device->max_shared_bytes : (device->max_shared_bytes - RESERVED_BYTES) / 2;
    const int64_t most = (room - select_memory_bytes(0)) / STEP_BYTES;
    const int64_t steps = count_steps(p, ctas);
    return steps < most ? steps : most < 0 ? 0 : most;
}

/* Starts a kernel whose clusters have `ctas` CTAs. */
template <auto KERNEL>
static cudaError_t
launch_top_k(const smla_top_k_params *p, int ctas)
{
    static uint64_t allowed;
    const smla_cuda_device *const device = smla_cuda_find_device(p->call.stream.device_id);
    const int64_t steps = choose_memory_steps(p, device, ctas);
    const int64_t most = MAX_LAUNCH_ROWS;
    const int64_t rows = p->num_tokens < most ? p->num_tokens : most;
    return smla_launch_large(KERNEL, make_top_k_args(p, (uint32_t)steps), rows * ctas,
                             BLOCK_THREADS, select_memory_bytes(steps), device->max_shared_bytes,
                             p->call.stream, &allowed, ctas > 1);
}

} // namespace
