/* tensor_map.h: tensor maps, which describe an array and its boxes to Hopper's copy engine. A map
 * is made on the host and becomes part of a kernel's parameters. cuda/ptx/tensor_copy.cuh has the
 * copies. */
#pragma once

#include <cudaTypedefs.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An array, and the box of it that one copy brings. The fastest dimension comes first; its elements
 * are contiguous. */
typedef struct smla_cuda_array {
    const void *base;
    int element_bytes; /* bytes per element: 1, 2 or 4 */
    int rank;          /* number of dimensions: 2 to 4 */
    uint64_t sizes[4];
    uint64_t stride_bytes[3]; /* strides of the other dimensions */
    uint32_t box[4];
} smla_cuda_array;

/* Makes the map for copies by ptx_tensor_copy_2d to _4d, which swizzle 128 bytes for wgmma if
 * is_swizzled. Returns false if the driver has no such maps, or the array's alignment forbids
 * one. */
bool smla_cuda_make_tensor_map(const smla_cuda_array *array, bool is_swizzled, CUtensorMap *map);

#ifdef __cplusplus
}
#endif
