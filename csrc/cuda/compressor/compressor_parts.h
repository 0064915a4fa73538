/* compressor_parts.h: the launcher of compressor_sm90.cu, for compressor.cu. */
#pragma once

#include "core/params_compressor.h"
#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Compresses long groups of 512 channels, each by two CTAs. On Hopper only. */
cudaError_t smla_cuda_launch_compress_in_parts(const smla_compress_params *params,
                                               const smla_cuda_device *device, bool is_aligned);

#ifdef __cplusplus
}
#endif
