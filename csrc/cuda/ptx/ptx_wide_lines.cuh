/* ptx_wide_lines.cuh: cp.async for rows that are read from end to end, but a line at a time. */
#pragma once

#include "cuda/ptx/ptx.cuh"

/* ptx_cp_async_16_or_zero that brings two lines to L2, an aligned 256 bytes. So memory reads the
 * next line of the row, which another step will ask for, while its page is open. */
static __device__ __forceinline__ void
ptx_cp_async_16_of_256(uint32_t to_shared, const void *from, bool is_on)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 :
                 : "r"(to_shared), "l"(from), "r"(is_on ? 16 : 0)
                 : "memory");
}
