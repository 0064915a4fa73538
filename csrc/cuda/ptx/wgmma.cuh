/* wgmma.cuh: the warpgroup MMA of Hopper: D[64][N] += A[64][16] * B[16][N], or 32 of e4m3.
 *
 * Warp w of the warpgroup has rows 16w to 16w + 15 of A and D. With g = lane / 4, c = lane % 4:
 *   A   a[0] row g, columns 2c, 2c+1      a[1] row g + 8, same columns
 *       a[2] row g, columns 2c+8, 2c+9    a[3] row g + 8, same columns
 *   D   d[4j], d[4j+1] row g, columns 8j+2c, 8j+2c+1; d[4j+2], d[4j+3] row g + 8, same columns
 * B is in shared memory, at the address in a descriptor. No code may touch the registers of a
 * product that is under way. The order of calls is fence, multiply, commit, wait.
 */
#pragma once

#include <stdint.h>

enum { /* swizzle of B in shared memory: the span in which 16-byte chunks are permuted */
       WGMMA_SWIZZLE_128 = 1,
       WGMMA_SWIZZLE_64 = 2,
       WGMMA_SWIZZLE_32 = 3,
};

/* Makes the descriptor of an operand. Groups of eight rows are `stride_bytes` apart. The address is
 * a multiple of 16; adding n to a descriptor moves it by 16 n bytes. Every lane must pass the same
 * arguments. The lower half comes from a reduction. So the compiler knows it to be uniform in the
 * warp, and keeps it in uniform registers, where products want it. */
static __device__ __forceinline__ uint64_t
wgmma_descriptor(uint32_t address, int stride_bytes, int swizzle)
{
    const uint32_t low = (address & 0x3FFFF) >> 4 | (uint32_t)(stride_bytes >> 4) << 16;
    const uint32_t high = (uint32_t)(stride_bytes >> 4) | (uint32_t)swizzle << 30;
    return (uint64_t)high << 32 | __reduce_max_sync(0xFFFFFFFFu, low);
}

/* Products after this fence see the registers that were written before it. */
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

/* ---- Operands of the products, as asm wants them --------------------------------------------- */

#define WGMMA_A(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

#define WGMMA_SUMS_8(d, i)                                                                \
    "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), \
        "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define WGMMA_SUMS_16(d, i)  WGMMA_SUMS_8(d, i), WGMMA_SUMS_8(d, (i) + 8)
#define WGMMA_SUMS_32(d, i)  WGMMA_SUMS_16(d, i), WGMMA_SUMS_16(d, (i) + 16)
#define WGMMA_SUMS_64(d, i)  WGMMA_SUMS_32(d, i), WGMMA_SUMS_32(d, (i) + 32)
#define WGMMA_SUMS_128(d, i) WGMMA_SUMS_64(d, i), WGMMA_SUMS_64(d, (i) + 64)

#define WGMMA_NAMES_8        "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_16       WGMMA_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_32 \
    WGMMA_NAMES_16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_64                                                                 \
    WGMMA_NAMES_32                                                                     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_128                                                                \
    WGMMA_NAMES_64                                                                     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109" \
    ", %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121"         \
    ", %122, %123, %124, %125, %126, %127"

/* ---- Products ------------------------------------------------------------------------------- */

/* D += A * B, or D = A * B unless `is_sum`. With B_ROWS_FIRST the N columns of B are contiguous. */
template <bool B_ROWS_FIRST>
static __device__ __forceinline__ void
wgmma_f16(float (&d)[8], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %13, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
                 "{" WGMMA_NAMES_8 "}, "
                 "{%8, %9, %10, %11}, %12, sum, 1, 1, %14;\n\t"
                 "}"
                 : WGMMA_SUMS_8(d, 0)
                 : WGMMA_A(a), "l"(b), "r"((int)is_sum), "n"((int)B_ROWS_FIRST));
}

static __device__ __forceinline__ void
wgmma_bf16(float (&d)[8], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %13, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_8 "}, "
                 "{%8, %9, %10, %11}, %12, sum, 1, 1, 0;\n\t"
                 "}"
                 : WGMMA_SUMS_8(d, 0)
                 : WGMMA_A(a), "l"(b), "r"((int)is_sum));
}

template <bool B_ROWS_FIRST>
static __device__ __forceinline__ void
wgmma_f16(float (&d)[16], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %21, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{" WGMMA_NAMES_16 "}, "
                 "{%16, %17, %18, %19}, %20, sum, 1, 1, %22;\n\t"
                 "}"
                 : WGMMA_SUMS_16(d, 0)
                 : WGMMA_A(a), "l"(b), "r"((int)is_sum), "n"((int)B_ROWS_FIRST));
}

static __device__ __forceinline__ void
wgmma_bf16(float (&d)[16], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %21, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_16 "}, "
                 "{%16, %17, %18, %19}, %20, sum, 1, 1, 0;\n\t"
                 "}"
                 : WGMMA_SUMS_16(d, 0)
                 : WGMMA_A(a), "l"(b), "r"((int)is_sum));
}

template <bool B_ROWS_FIRST>
static __device__ __forceinline__ void
wgmma_f16(float (&d)[32], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{" WGMMA_NAMES_32 "}, "
                 "{%32, %33, %34, %35}, %36, sum, 1, 1, %38;\n\t"
                 "}"
                 : WGMMA_SUMS_32(d, 0)
                 : WGMMA_A(a), "l"(b), "r"((int)is_sum), "n"((int)B_ROWS_FIRST));
}

static __device__ __forceinline__ void
wgmma_bf16(float (&d)[32], const uint32_t a[4], uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_32 "}, "
                 "{%32, %33, %34, %35}, %36, sum, 1, 1, 0;\n\t"
                 "}"
                 : WGMMA_SUMS_32(d, 0)
                 : WGMMA_A(a), "l"(b), "r"((int)is_sum));
}

/* ---- Rows of 64 bf16 as they lie in tiles of [rows][128 bytes], swizzled by 128 bytes -------- */

/* The descriptor of B with contiguous N columns, 64 per tile. Tiles are `tile_bytes` apart, groups
 * of eight rows 1024 bytes. */
static __device__ __forceinline__ uint64_t
wgmma_descriptor_of_tiles(uint32_t address, int tile_bytes)
{
    const uint32_t low = (address & 0x3FFFF) >> 4 | (uint32_t)(tile_bytes >> 4) << 16;
    const uint32_t high = 1024 >> 4 | (uint32_t)WGMMA_SWIZZLE_128 << 30;
    return (uint64_t)high << 32 | __reduce_max_sync(0xFFFFFFFFu, low);
}

/* D += A * B, where A and B are both in shared memory, in rows of 16 contiguous bf16. */
static __device__ __forceinline__ void
wgmma_bf16_tiles(float (&d)[32], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_32 "}, "
                 "%32, %33, sum, 1, 1, 0, 0;\n\t"
                 "}"
                 : WGMMA_SUMS_32(d, 0)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}

/* D += A * B with contiguous N columns of B. A is in registers, or in shared memory. */
static __device__ __forceinline__ void
wgmma_bf16_rows_first(float (&d)[128], const uint32_t a[4], uint64_t b)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.eq.b32 sum, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_128 "}, "
                 "{%128, %129, %130, %131}, %132, sum, 1, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_128(d, 0)
                 : WGMMA_A(a), "l"(b));
}

static __device__ __forceinline__ void
wgmma_bf16_rows_first(float (&d)[128], uint64_t a, uint64_t b)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.eq.b32 sum, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_128 "}, "
                 "%128, %129, sum, 1, 1, 0, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_128(d, 0)
                 : "l"(a), "l"(b));
}

/* wgmma_bf16_rows_first for 128 columns, whose sums are d[FIRST] to d[FIRST + 63]. */
template <int FIRST>
static __device__ __forceinline__ void
wgmma_bf16_rows_first_128(float (&d)[128], const uint32_t a[4], uint64_t b)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.eq.b32 sum, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_64 "}, "
                 "{%64, %65, %66, %67}, %68, sum, 1, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_64(d, FIRST)
                 : WGMMA_A(a), "l"(b));
}

template <int FIRST>
static __device__ __forceinline__ void
wgmma_bf16_rows_first_128(float (&d)[128], uint64_t a, uint64_t b)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.eq.b32 sum, 0, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                 "{" WGMMA_NAMES_64 "}, "
                 "%64, %65, sum, 1, 1, 0, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_64(d, FIRST)
                 : "l"(a), "l"(b));
}

/* ---- e4m3 ----------------------------------------------------------------------------------- */

/* D[64][128] += A[64][32] * B[32][128]: A and B are both in shared memory, in rows of 32 contiguous
 * e4m3. The sums of products have about 14 bits. */
static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %66, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                 "{" WGMMA_NAMES_64 "}, "
                 "%64, %65, sum, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_64(d, 0)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}

/* wgmma_e4m3 for 64 and for 32 columns. */
static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[32], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
                 "{" WGMMA_NAMES_32 "}, "
                 "%32, %33, sum, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_32(d, 0)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}

static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[16], uint64_t a, uint64_t b, bool is_sum)
{
    asm volatile("{\n\t"
                 ".reg .pred sum;\n\t"
                 "setp.ne.b32 sum, %18, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
                 "{" WGMMA_NAMES_16 "}, "
                 "%16, %17, sum, 1, 1;\n\t"
                 "}"
                 : WGMMA_SUMS_16(d, 0)
                 : "l"(a), "l"(b), "r"((int)is_sum));
}
