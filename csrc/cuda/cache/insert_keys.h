/* insert_keys.h: the kernels of cache_insert.cu, for the launchers of cache_write.cu. */
#pragma once

#include "core/params_cache.h"
#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes keys that are quantised whole. SMLA_NO_KERNEL says that the format is none of these. */
cudaError_t smla_cuda_insert_keys(const smla_cache_write_params *params);

#ifdef __cplusplus
}
#endif
