/* prefetch.cuh: many bytes on their way into L2 by one PTX instruction, which an older GPU than
 * sm_90 lacks: there nothing happens.
 */
#pragma once

#include <stdint.h>

/* Brings `bytes` from an address on into L2, both multiples of 16. Nothing is read, so others may
 * still write them. */
static __device__ __forceinline__ void
ptx_bulk_prefetch_l2(const void *from, uint32_t bytes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes));
#endif
}
