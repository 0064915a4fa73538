/* wgmma_e4m3.cuh: products of e4m3 whose number of columns is 8 or 16 more than a power of two. */
#pragma once

#include "cuda/ptx/wgmma.cuh"

#define WGMMA_SUMS_4(d, i) "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])

/* D[64][N] += A[64][32] * B[32][N] for N of 136, 144, 72 and 40: A and B are both in shared memory,
 * in rows of 32 contiguous e4m3. The sums of products have about 14 bits. */
static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[68], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %70, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 "
                 "{" WGMMA_NAMES_64 ", %64, %65, %66, %67"
                 "}, "
                 "%68, %69, sum, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_64(d, 0), WGMMA_SUMS_4(d, 64)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}

static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[72], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %74, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n144k32.f32.e4m3.e4m3 "
                 "{" WGMMA_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
                 "}, "
                 "%72, %73, sum, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_64(d, 0), WGMMA_SUMS_8(d, 64)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}

static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[36], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %38, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n72k32.f32.e4m3.e4m3 "
                 "{" WGMMA_NAMES_32 ", %32, %33, %34, %35"
                 "}, "
                 "%36, %37, sum, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_32(d, 0), WGMMA_SUMS_4(d, 32)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}

static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[20], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %22, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n40k32.f32.e4m3.e4m3 "
                 "{" WGMMA_NAMES_16 ", %16, %17, %18, %19"
                 "}, "
                 "%20, %21, sum, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_16(d, 0), WGMMA_SUMS_4(d, 16)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}
