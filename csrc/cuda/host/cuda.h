/* cuda.h: what the host files of the CUDA backend share, and the launchers that they call.
 *
 * A launcher stands at the foot of the .cu file of its kernel: it is plain C to its callers, starts
 * work on params->stream.handle and returns the launch's own code. The device is current when it is
 * called (backend.c guards it). It never allocates, synchronises or reads array values back.
 */
#ifndef SMLA_CUDA_H
#define SMLA_CUDA_H

#include <cuda_runtime_api.h>

#include "core/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Devices, errors, captures: device.c --------------------------------------------------- */

enum { SMLA_CUDA_MAX_DEVICES = 64 };

/* What never changes about a device. */
typedef struct smla_cuda_device {
    int32_t compute_capability; /* major * 10 + minor */
    int32_t num_sms;
    int32_t max_shared_bytes; /* of one block, opted in */
} smla_cuda_device;

/* Whether a variable of the environment is there, and neither empty nor 0. */
bool smla_cuda_is_set(const char *name);

/* The facts of a device, read once a process; NULL for one that does not exist. */
const smla_cuda_device *smla_cuda_find_device(int32_t device_id);

/* SMLA_OK, or why this device cannot be used. */
smla_status smla_cuda_check_device(const char *op, int32_t device_id, smla_error *error);

/* Fills `error` with "op: call failed: text (name)" unless `code` is success; a hint where the code
 * has a usual cause. */
smla_status smla_cuda_status(const char *op, const char *call, cudaError_t code, smla_error *error);

/* Makes a device current and remembers which one was. Every enter that returned SMLA_OK is left. */
typedef struct smla_cuda_guard {
    bool is_pushed; /* false: it was current already, there is nothing to restore */
} smla_cuda_guard;

smla_status smla_cuda_enter(const char *op, int32_t device_id, smla_cuda_guard *guard,
                            smla_error *error);
void smla_cuda_leave(const smla_cuda_guard *guard);

/* SMLA_OK, or a ValueError for a stream of another device: some drivers would launch there, on
 * memory that it cannot reach. */
smla_status smla_cuda_check_stream(const char *op, smla_stream stream, smla_error *error);

/* Whether work given to the stream is being captured into a graph. */
smla_status smla_cuda_is_capturing(const char *op, smla_stream stream, bool *is_capturing,
                                   smla_error *error);

/* While any thread captures a graph in the default mode, calls that allocate or ask about events
 * would break its capture. Between these two they do not. */
enum cudaStreamCaptureMode smla_cuda_relax_captures(void);
void smla_cuda_restore_captures(enum cudaStreamCaptureMode former);

/* An entry point of the driver; `function` points to a pointer to the function. */
typedef struct smla_cuda_driver_call {
    const char *name;
    void *function;
} smla_cuda_driver_call;

/* Finds them as CUDA `version` (12040 = 12.4) has them, or says why one is not to be had. */
cudaError_t smla_cuda_find_driver_calls(const smla_cuda_driver_call *calls, int count,
                                        unsigned version);

/* ---- Launches: launch.c -------------------------------------------------------------------- */

/* A kernel that takes one struct by value, and its blocks, all in a row. */
typedef struct smla_cuda_grid {
    const void *kernel;
    void *args;
    unsigned num_blocks;
    unsigned block_threads;
    unsigned shared_bytes;
    bool has_clusters; /* of more than one block, as the kernel's type says */
    bool starts_early; /* it may be started before the grid in front of it in the stream is done */
    smla_stream stream;
} smla_cuda_grid;

cudaError_t smla_cuda_launch(const smla_cuda_grid *grid);

/* ---- Launchers ----------------------------------------------------------------------------- */

/* cache_write.cu and cache_read.cu */
cudaError_t smla_cuda_launch_cache_write(const smla_cache_write_params *params);
cudaError_t smla_cuda_launch_gather(const smla_gather_params *params,
                                    const smla_cuda_device *device);
cudaError_t smla_cuda_launch_dequantize(const smla_dequantize_params *params);

/* index.cu */
cudaError_t smla_cuda_launch_convert(const smla_convert_params *params);

/* merge.cu */
cudaError_t smla_cuda_launch_merge(const smla_merge_params *params);

/* quant.cu */
cudaError_t smla_cuda_launch_quant(const smla_quant_params *params, const smla_cuda_device *device);
cudaError_t smla_cuda_launch_split_weight(const smla_split_weight_params *params);

/* projection.cu: the up projections of arrays whose strides cuBLAS cannot express. */
cudaError_t smla_cuda_launch_up_proj(const smla_projection_params *params);

/* ---- Operators that are more than one launcher --------------------------------------------- */

/* kernels.c: the kernels; schedule.c: plans and the workspace; run_attention.c: the run. */
void smla_cuda_plan_attention(const smla_attention_shape *shape, smla_attention_plan *plan);
bool smla_cuda_prefers_direct(const smla_attention_shape *prefills, int64_t num_rows,
                              int64_t num_chunks);
int64_t smla_cuda_attention_workspace_size(const smla_attention_shape *shape);
smla_status smla_cuda_sparse_attention(const smla_attention_params *params,
                                       const smla_attention_plan *plan, smla_error *error);
int64_t smla_cuda_kernels(smla_kernel_info *rows, int64_t capacity);

/* projection.c: cuBLAS. */
smla_status smla_cuda_up_proj(const smla_projection_params *params, smla_error *error);

/* checked.c: SPARSE_MLA_CHECK=1 in the environment, a debugging aid. Calls then wait for the device
 * before and after their work, and read the arrays that hold slots, pages, lengths and request ids:
 * values that a kernel would mask are the ValueErrors that they are on the CPU. */
bool smla_cuda_is_checked(void);
smla_status smla_cuda_begin_checked(const char *op, smla_stream stream, smla_error *error);
smla_status smla_cuda_end_checked(const char *op, smla_stream stream, smla_error *error);
smla_status smla_cuda_check_cache_write(const smla_cache_write_params *params, smla_error *error);
smla_status smla_cuda_check_gather(const smla_gather_params *params, smla_error *error);
smla_status smla_cuda_check_convert(const smla_convert_params *params, smla_error *error);

/* events.c: order between streams. */
extern const smla_stream_ops smla_cuda_stream_ops;

/* mirror.c: persistent metadata of a builder; see smla_mirror. */
void *smla_cuda_allocate(int32_t device_id, int64_t bytes);
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

#endif /* SMLA_CUDA_H */
