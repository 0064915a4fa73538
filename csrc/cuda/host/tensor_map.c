/* tensor_map.c: asks the driver for tensor maps, which it makes on the host. */
#include "cuda/host/tensor_map.h"

#include <cudaTypedefs.h>
#include <pthread.h>

#include "cuda/host/cuda.h"

static PFN_cuTensorMapEncodeTiled_v12000 encode; /* NULL if this driver has no tensor maps */

static void
find_encode(void)
{
    const smla_cuda_symbol call = {"cuTensorMapEncodeTiled", (void *)&encode};
    if (smla_cuda_find_driver_calls(&call, 1, 12000) != cudaSuccess) {
        encode = NULL;
    }
}

static CUtensorMapDataType
type_of(int element_bytes)
{
    switch (element_bytes) {
    case 1: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case 2: return CU_TENSOR_MAP_DATA_TYPE_UINT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT32;
    }
}

bool
smla_cuda_make_tensor_map(const smla_cuda_array *array, bool is_swizzled, CUtensorMap *map)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const cuuint64_t sizes[4] = {array->sizes[0], array->sizes[1], array->sizes[2],
                                 array->sizes[3]};
    const cuuint64_t strides[3] = {array->stride_bytes[0], array->stride_bytes[1],
                                   array->stride_bytes[2]};
    const cuuint32_t box[4] = {array->box[0], array->box[1], array->box[2], array->box[3]};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    (void)pthread_once(&once, find_encode);
    return encode != NULL &&
           encode(map, type_of(array->element_bytes), (cuuint32_t)array->rank, (void *)array->base,
                  sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
