/* library_types.h: the part of CUDA's header that projection_cublas.c in csrc/cuda/projection uses;
 * see cuda_runtime_api.h. */
#pragma once

typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_16BF = 14,
} cudaDataType_t;
