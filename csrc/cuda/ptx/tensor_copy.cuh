/* tensor_copy.cuh: copies of boxes of arrays, which Hopper's copy engine makes by a tensor map
 * (cuda/host/tensor_map.h). */
#pragma once

#include <stdint.h>

/* Prefetches a CUtensorMap of the kernel's parameters, for later copies. */
static __device__ __forceinline__ void
ptx_prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

/* Copies a box of an array to shared memory, by `map`, a CUtensorMap in the kernel's parameters.
 * The box begins at the given indices, the fastest first. Elements outside the array become zeros,
 * and their bytes count as written. */
static __device__ __forceinline__ void
ptx_tensor_copy_2d(uint32_t to_shared, const void *map, int i, int j, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :
                 : "r"(to_shared), "l"(map), "r"(i), "r"(j), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_tensor_copy_3d(uint32_t to_shared, const void *map, int i, int j, int k, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 :
                 : "r"(to_shared), "l"(map), "r"(i), "r"(j), "r"(k), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_tensor_copy_4d(uint32_t to_shared, const void *map, int i, int j, int k, int l,
                   uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 :
                 : "r"(to_shared), "l"(map), "r"(i), "r"(j), "r"(k), "r"(l), "r"(barrier)
                 : "memory");
}
