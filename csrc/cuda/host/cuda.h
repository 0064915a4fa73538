/* cuda.h: what the host files of the CUDA backend share, and the launchers that they call.
 *
 * A launcher stands at the foot of its kernel's .cu file and is plain C to its callers. It starts
 * work on the call's stream and returns the launch's error code. cuda_backend.c has made the device
 * current. A launcher never allocates, synchronises or reads array values back.
 */
#pragma once

#include <cuda_runtime_api.h>

#include "core/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Parts of at most `part` that a size is cut into. Sizes of 32 bits are divided as such, which is
 * quicker. */
static inline int64_t
smla_count_parts(int64_t size, int64_t part)
{
    return (size | part) >> 31 == 0 ? ((uint32_t)size + (uint32_t)part - 1) / (uint32_t)part
                                    : size / part + (size % part != 0);
}

/* ---- Devices, errors, captures: device.c --------------------------------------------------- */

enum { SMLA_CUDA_MAX_DEVICES = 64 };

/* The facts about a device that never change. */
typedef struct smla_cuda_device {
    int32_t compute_capability; /* major * 10 + minor */
    int32_t num_sms;
    int32_t max_shared_bytes; /* shared memory of a block that opts in */
} smla_cuda_device;

/* Whether the device runs kernels of sm_90a, which no other architecture does. */
static inline bool
smla_cuda_is_hopper(const smla_cuda_device *device)
{
    return device->compute_capability == 90;
}

/* Whether an environment variable is set, and is neither empty nor 0. */
bool smla_cuda_is_set(const char *name);

/* The facts of a device, read once per process; NULL where the device does not exist. */
const smla_cuda_device *smla_cuda_find_device(int32_t device_id);

/* SMLA_OK, or the error that says why this device cannot be used. */
smla_status smla_cuda_check_device(const char *op, int32_t device_id, smla_error *error);

/* The code that a launcher returns if its table has no kernel for the call. CUDA itself does not
 * return it any more. */
#define SMLA_NO_KERNEL cudaErrorMissingConfiguration

/* Returns SMLA_OK if `code` is success. Otherwise it fills `error` with "op: call failed: text
 * (name)", and with a hint where the code has a usual cause. */
smla_status smla_cuda_status(const char *op, const char *call, cudaError_t code, smla_error *error);

/* smla_cuda_enter makes a device current. Every enter that returned SMLA_OK needs a leave. */
typedef struct smla_cuda_guard {
    bool is_pushed; /* false if the device was current already, so that leave restores nothing */
} smla_cuda_guard;

smla_status smla_cuda_enter(const char *op, int32_t device_id, smla_cuda_guard *guard,
                            smla_error *error);
void smla_cuda_leave(const smla_cuda_guard *guard);

/* Returns SMLA_OK, or a ValueError for a stream of another device. Some drivers would launch on
 * that device, which cannot reach the arrays. */
smla_status smla_cuda_check_stream(const char *op, smla_stream stream, smla_error *error);

/* Finds whether the stream is being captured into a graph. */
smla_status smla_cuda_is_capturing(const char *op, smla_stream stream, bool *is_capturing,
                                   smla_error *error);

/* While any thread captures a graph in the default mode, calls that allocate memory or query events
 * break its capture, except between relax_captures and restore_captures. */
enum cudaStreamCaptureMode smla_cuda_relax_captures(void);
void smla_cuda_restore_captures(enum cudaStreamCaptureMode former);

/* A function of a library; `function` is the address of the function pointer to fill. */
typedef struct smla_cuda_symbol {
    const char *name;
    void *function;
} smla_cuda_symbol;

/* Fills the function pointers with the driver's functions as of CUDA `version` (12040 = 12.4), or
 * returns an error. */
cudaError_t smla_cuda_find_driver_calls(const smla_cuda_symbol *calls, int count, unsigned version);

/* ---- Launches: launch.c -------------------------------------------------------------------- */

/* A launch of a kernel that takes one struct by value. The grid has one dimension. */
typedef struct smla_cuda_grid {
    const void *kernel;
    void *args;
    size_t args_bytes;
    unsigned num_blocks;
    unsigned block_threads;
    unsigned shared_bytes;
    bool has_clusters; /* whether the kernel is declared with clusters of more than one block */
    bool starts_early; /* whether the grid may start before the previous grid of the stream ends */
    smla_stream stream;
} smla_cuda_grid;

/* The first launch of a pair, kept until the second comes, so that both start together. */
enum { SMLA_CUDA_MAX_ARGS = 4096 }; /* what CUDA allows on each device */
typedef struct smla_cuda_deferred {
    bool is_full;
    smla_cuda_grid grid; /* its args are those below */
    uint64_t args[SMLA_CUDA_MAX_ARGS / sizeof(uint64_t)];
} smla_cuda_deferred;

static inline void
smla_cuda_begin_deferred(smla_cuda_deferred *deferred)
{
    deferred->is_full = false;
}

/* Starts a kernel. Where `deferred` is not NULL, it keeps the first launch, and the second starts
 * both, in their order, which costs the host and the device 1 us less than two starts. */
cudaError_t smla_cuda_launch(const smla_cuda_grid *grid, smla_cuda_deferred *deferred);

/* ---- Launchers ----------------------------------------------------------------------------- */

/* Each starts the kernels of its operator on the call's stream, whose device is current. */
#define SMLA_DECLARE_LAUNCHER(name, args_type, params_type, family) \
    cudaError_t smla_cuda_launch_##name(const params_type *params, const smla_cuda_device *device);

SMLA_LAUNCHED_OPERATORS(SMLA_DECLARE_LAUNCHER)
SMLA_DECLARE_LAUNCHER(fill_step_lists, smla_v4_build_args, smla_step_lists_params, step)
SMLA_DECLARE_LAUNCHER(fill_paged_lists, smla_paged_build_args, smla_paged_step_params, paged_step)

cudaError_t smla_cuda_launch_key_ranges(const smla_key_ranges_params *params,
                                        const smla_cuda_device *device);

/* projection.cu: arrays whose strides neither cuBLAS nor a fast kernel of e4m3 can express. */
cudaError_t smla_cuda_launch_projection(const smla_projection_params *params);

/* projection_e4m3.cu: projections of e4m3 with scales, by the kernel that suits the arrays. */
cudaError_t smla_cuda_launch_projection_e4m3(const smla_projection_params *params);

/* ---- Operators that are more than one launcher --------------------------------------------- */

/* kernels.c lists kernels, schedule.c and widen.c plan calls, run_attention.c runs a plan. */
const char *smla_cuda_kernel_name(const smla_attention_run *run);
void smla_cuda_plan_attention(const smla_attention_shape *shape, smla_attention_plan *plan);
bool smla_cuda_prefers_direct(const smla_attention_shape *prefills, int64_t num_rows,
                              int64_t num_chunks);
int64_t smla_cuda_attention_workspace_size(const smla_attention_shape *shape);
smla_status smla_cuda_attend_lists(const smla_attention_params *params, smla_error *error);
cudaError_t smla_cuda_attend_mha(const smla_attention_params *params,
                                 const smla_cuda_device *device);
int64_t smla_cuda_kernels(smla_kernel_info *rows, int64_t capacity);

/* projection_cublas.c: the projections of bf16, through cuBLAS where it can express them. */
smla_status smla_cuda_projection(const smla_projection_params *params, smla_error *error);

/* checked.c: checked mode (SPARSE_MLA_CHECK=1 in the environment), a debugging aid. A call waits
 * for its stream before and after its work, and reads the arrays that hold slots, pages, lengths,
 * request ids and positions. Values that a kernel would mask become ValueErrors, as on the CPU. */
smla_status smla_cuda_begin_checked(const char *op, smla_stream stream, smla_error *error);
smla_status smla_cuda_end_checked(const char *op, smla_stream stream, smla_error *error);
smla_status smla_cuda_check_cache_write(const smla_cache_write_params *params, smla_error *error);
smla_status smla_cuda_check_gather(const smla_gather_params *params, smla_error *error);
smla_status smla_cuda_check_convert(const smla_convert_params *params, smla_error *error);
smla_status smla_cuda_check_logits(const smla_logits_params *params, smla_error *error);
smla_status smla_cuda_check_positions(const smla_call *call, const smla_rope *rope,
                                      int64_t num_tokens, smla_error *error);
smla_status smla_cuda_check_global_topk(const smla_topk_slots_params *params, smla_error *error);
smla_status smla_cuda_check_combine_topk_swa(const smla_combine_topk_swa_params *params,
                                             smla_error *error);
smla_status smla_cuda_check_partial_states(const smla_partial_states_params *params,
                                           smla_error *error);
smla_status smla_cuda_check_compress(const smla_compress_params *params, smla_error *error);
smla_status smla_cuda_check_mixed_indices(const smla_mixed_indices_params *params,
                                          smla_error *error);

/* events.c: order between streams. */
extern const smla_stream_ops smla_cuda_stream_ops;

/* mirror.c: device memory, and the persistent metadata of a builder; see smla_mirror. */
void *smla_cuda_allocate(int32_t device_id, int64_t bytes);
void *smla_cuda_allocate_zeros(int32_t device_id, int64_t bytes);
void smla_cuda_release(int32_t device_id, void *memory);
smla_mirror *smla_cuda_create_mirror(int32_t device_id, int64_t bytes);
void smla_cuda_destroy_mirror(smla_mirror *mirror);
smla_status smla_cuda_begin_write(const char *op, smla_mirror *mirror, smla_stream stream,
                                  void **host, smla_error *error);
smla_status smla_cuda_end_write(const char *op, smla_mirror *mirror, smla_stream stream,
                                smla_error *error);
smla_status smla_cuda_begin_use(const char *op, smla_mirror *mirror, smla_stream stream,
                                smla_error *error);
smla_status smla_cuda_end_use(const char *op, smla_mirror *mirror, smla_stream stream,
                              smla_error *error);

#ifdef __cplusplus
}
#endif
