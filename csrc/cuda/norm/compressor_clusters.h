/* compressor_clusters.h: the launcher of compressor_sm90.cu, for compressor.cu. */
#pragma once

#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Compresses long groups of 512 channels on clusters of CTAs. All vectors are aligned. */
cudaError_t smla_cuda_launch_compress_clusters(const smla_compress_params *params,
                                               const smla_cuda_device *device);

#ifdef __cplusplus
}
#endif
