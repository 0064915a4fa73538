/* prefetch.cuh: one PTX instruction that brings many bytes to L2. GPUs older than sm_90 lack it,
 * and there nothing happens. */
#pragma once

#include <stdint.h>

/* Brings `bytes` bytes to L2, from an address on; both are multiples of 16. The thread reads
 * nothing, so others may still write these bytes. */
static __device__ __forceinline__ void
ptx_bulk_prefetch_l2(const void *from, uint32_t bytes)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes));
#endif
}
