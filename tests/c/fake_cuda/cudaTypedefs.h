/* cudaTypedefs.h: the part of CUDA's driver that csrc/cuda calls; see cuda_runtime_api.h. */
#pragma once

#include "cuda_runtime_api.h"

typedef enum cudaError_enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
} CUresult;

typedef enum CUstreamCaptureStatus_enum {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
} CUstreamCaptureStatus;

typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUstream_st *CUstream;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;

typedef struct CUDA_KERNEL_NODE_PARAMS {
    CUfunction func;
    unsigned gridDimX;
    unsigned gridDimY;
    unsigned gridDimZ;
    unsigned blockDimX;
    unsigned blockDimY;
    unsigned blockDimZ;
    unsigned sharedMemBytes;
    void **kernelParams;
    void **extra;
} CUDA_KERNEL_NODE_PARAMS;

typedef CUresult (*PFN_cuDeviceGet_v2000)(CUdevice *device, int ordinal);
typedef CUresult (*PFN_cuDevicePrimaryCtxRetain_v7000)(CUcontext *context, CUdevice device);
typedef CUresult (*PFN_cuCtxPushCurrent_v4000)(CUcontext context);
typedef CUresult (*PFN_cuCtxPopCurrent_v4000)(CUcontext *context);
typedef CUresult (*PFN_cuStreamIsCapturing_v10000)(CUstream stream, CUstreamCaptureStatus *status);
typedef CUresult (*PFN_cuStreamGetId_v12000)(CUstream stream, unsigned long long *id);
typedef CUresult (*PFN_cuStreamGetCtx_v9020)(CUstream stream, CUcontext *context);
typedef CUresult (*PFN_cuStreamGetGreenCtx_v12040)(CUstream stream, CUgreenCtx *context);
typedef CUresult (*PFN_cuGraphExecKernelNodeSetParams_v12000)(
    CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params);
