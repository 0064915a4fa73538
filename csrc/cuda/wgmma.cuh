/* wgmma.cuh: the warpgroup MMA of Hopper with A in registers: D[64][N] += A[64][16] * B[16][N].
 *
 * Warp w of the warpgroup has rows 16w to 16w + 15 of A and D. With g = lane / 4, c = lane % 4:
 *   A   a[0] row g, columns 2c, 2c+1      a[1] row g + 8, the same
 *       a[2] row g, columns 2c+8, 2c+9    a[3] row g + 8, the same
 *   D   d[4j], d[4j+1] row g, columns 8j+2c, 8j+2c+1; d[4j+2], d[4j+3] row g + 8, the same
 * B is in shared memory, named by a descriptor. Registers of a product under way must not be
 * touched: fence, multiply, commit, wait.
 */
#ifndef SMLA_CUDA_WGMMA_CUH
#define SMLA_CUDA_WGMMA_CUH

#include <stdint.h>

enum { /* swizzle of B in shared memory: the span in which 16-byte chunks are permuted */
       WGMMA_SWIZZLE_128 = 1,
       WGMMA_SWIZZLE_64 = 2,
       WGMMA_SWIZZLE_32 = 3,
};

/* stride_bytes: between groups of eight rows. The address is a multiple of 16; adding n to a
 * descriptor moves it by 16 n bytes. Every lane must ask for the same: the lower half comes from a
 * reduction, so that it is known to be the warp's and stays in uniform registers, where products
 * want it. */
static __device__ __forceinline__ uint64_t
wgmma_descriptor(uint32_t address, int stride_bytes, int swizzle)
{
    const uint32_t low = (address & 0x3FFFF) >> 4 | (uint32_t)(stride_bytes >> 4) << 16;
    const uint32_t high = (uint32_t)(stride_bytes >> 4) | (uint32_t)swizzle << 30;
    return (uint64_t)high << 32 | __reduce_max_sync(0xFFFFFFFFu, low);
}

/* Registers written before are seen by products after. */
static __device__ __forceinline__ void
wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

/* Closes a group of products. */
static __device__ __forceinline__ void
wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

/* Waits until at most PENDING groups are under way. */
template <int PENDING>
static __device__ __forceinline__ void
wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

/* B_ROWS_FIRST: B is stored with its N columns contiguous. is_sum: else D is overwritten. */
template <bool B_ROWS_FIRST>
static __device__ __forceinline__ void
wgmma_f16(float (&d)[8], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %13, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, sum, 1, 1, %14;\n\t"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)is_sum),
                   "n"((int)B_ROWS_FIRST));
}

static __device__ __forceinline__ void
wgmma_bf16(float (&d)[8], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %13, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, sum, 1, 1, 0;\n\t"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)is_sum));
}

template <bool B_ROWS_FIRST>
static __device__ __forceinline__ void
wgmma_f16(float (&d)[16], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %21, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, sum, 1, 1, %22;\n\t"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)is_sum),
                   "n"((int)B_ROWS_FIRST));
}

static __device__ __forceinline__ void
wgmma_bf16(float (&d)[16], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %21, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, sum, 1, 1, 0;\n\t"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)is_sum));
}

template <bool B_ROWS_FIRST>
static __device__ __forceinline__ void
wgmma_f16(float (&d)[32], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, sum, 1, 1, %38;\n\t"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)is_sum),
                   "n"((int)B_ROWS_FIRST));
}

static __device__ __forceinline__ void
wgmma_bf16(float (&d)[32], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, sum, 1, 1, 0;\n\t"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)is_sum));
}

#endif /* SMLA_CUDA_WGMMA_CUH */
