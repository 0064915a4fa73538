/* wgmma_128.cuh: wgmma products with 128 columns of B and with A in registers, of bf16 and of fp16.
 * wgmma.cuh says which lane has which elements. */
#pragma once

#include "cuda/ptx/wgmma.cuh"

/* D[64][128] += A[64][16] * B[16][128], or D = A * B unless `is_sum`. HALF: A and B are fp16, else
 * bf16. With B_ROWS_FIRST the 128 columns of B are contiguous, else its 16 rows. */
template <bool HALF, bool B_ROWS_FIRST>
static __device__ __forceinline__ void
wgmma_128(float (&d)[64], const uint32_t *a, uint64_t b, bool is_sum)
{
    if constexpr (HALF) {
        asm volatile("{\n\t"
                     ".reg .pred sum;\n\t"
                     "setp.ne.b32 sum, %69, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                     "{" WGMMA_NAMES_64 "}, "
                     "{%64, %65, %66, %67}, %68, sum, 1, 1, %70;\n\t"
                     "}"
                     : WGMMA_SUMS_64(d, 0)
                     : WGMMA_A(a), "l"(b), "r"((int)is_sum), "n"((int)B_ROWS_FIRST));
    } else {
        asm volatile("{\n\t"
                     ".reg .pred sum;\n\t"
                     "setp.ne.b32 sum, %69, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                     "{" WGMMA_NAMES_64 "}, "
                     "{%64, %65, %66, %67}, %68, sum, 1, 1, %70;\n\t"
                     "}"
                     : WGMMA_SUMS_64(d, 0)
                     : WGMMA_A(a), "l"(b), "r"((int)is_sum), "n"((int)B_ROWS_FIRST));
    }
}
