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

#define WGMMA_A(a)           "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

#define WGMMA_SUMS_4(d, i)   "+f"(d[(i)]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define WGMMA_SUMS_8(d, i)   WGMMA_SUMS_4(d, i), WGMMA_SUMS_4(d, (i) + 4)
#define WGMMA_SUMS_16(d, i)  WGMMA_SUMS_8(d, i), WGMMA_SUMS_8(d, (i) + 8)
#define WGMMA_SUMS_32(d, i)  WGMMA_SUMS_16(d, i), WGMMA_SUMS_16(d, (i) + 16)
#define WGMMA_SUMS_64(d, i)  WGMMA_SUMS_32(d, i), WGMMA_SUMS_32(d, (i) + 32)
#define WGMMA_SUMS_128(d, i) WGMMA_SUMS_64(d, i), WGMMA_SUMS_64(d, (i) + 64)
#define WGMMA_SUMS_20(d, i)  WGMMA_SUMS_16(d, i), WGMMA_SUMS_4(d, (i) + 16)
#define WGMMA_SUMS_36(d, i)  WGMMA_SUMS_32(d, i), WGMMA_SUMS_4(d, (i) + 32)
#define WGMMA_SUMS_68(d, i)  WGMMA_SUMS_64(d, i), WGMMA_SUMS_4(d, (i) + 64)
#define WGMMA_SUMS_72(d, i)  WGMMA_SUMS_64(d, i), WGMMA_SUMS_8(d, (i) + 64)

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
#define WGMMA_NAMES_20 WGMMA_NAMES_16 ", %16, %17, %18, %19"
#define WGMMA_NAMES_36 WGMMA_NAMES_32 ", %32, %33, %34, %35"
#define WGMMA_NAMES_68 WGMMA_NAMES_64 ", %64, %65, %66, %67"
#define WGMMA_NAMES_72 WGMMA_NAMES_68 ", %68, %69, %70, %71"

/* A product whose sums are `count` floats of `d` from number `first` on. `operands` are A and B,
 * and what follows them in the instruction. They have the numbers of the last arguments, which
 * follow those of the sums. D's former value counts if operand `is_sum` is not 0. */
#define WGMMA(shape, count, d, first, operands, is_sum, ...)    \
    asm volatile("{\n\t"                                        \
                 ".reg .pred sum;\n\t"                          \
                 "setp.ne.b32 sum, " is_sum ", 0;\n\t"          \
                 "wgmma.mma_async.sync.aligned." shape " "      \
                 "{" WGMMA_NAMES_##count "}, " operands ";\n\t" \
                                         "}"                    \
                 : WGMMA_SUMS_##count(d, first)                 \
                 : __VA_ARGS__)

/* WGMMA of A in registers and B, of fp16 or of bf16. */
#define WGMMA_16(shape, count, operands, sum)                                         \
    if constexpr (IS_HALF) {                                                          \
        WGMMA(shape ".f32.f16.f16", count, d, 0, operands, sum, WGMMA_A(a), "l"(b),   \
              "r"((int)is_sum), "n"((int)B_ROWS_FIRST));                              \
    } else {                                                                          \
        WGMMA(shape ".f32.bf16.bf16", count, d, 0, operands, sum, WGMMA_A(a), "l"(b), \
              "r"((int)is_sum), "n"((int)B_ROWS_FIRST));                              \
    }

/* ---- Products ------------------------------------------------------------------------------- */

/* D[64][2 COUNT] += A[64][16] * B[16][2 COUNT], or D = A * B unless `is_sum`. A is in registers.
 * IS_HALF: A and B are fp16, else bf16. With B_ROWS_FIRST the columns of B are contiguous, else its
 * 16 rows. */
template <bool IS_HALF, bool B_ROWS_FIRST, int COUNT>
static __device__ __forceinline__ void
wgmma_16(float (&d)[COUNT], const uint32_t *a, uint64_t b, bool is_sum)
{
    static_assert(COUNT == 8 || COUNT == 16 || COUNT == 32 || COUNT == 64 || COUNT == 128,
                  "16 to 256 columns");
    if constexpr (COUNT == 8) {
        WGMMA_16("m64n16k16", 8, "{%8, %9, %10, %11}, %12, sum, 1, 1, %14", "%13")
    } else if constexpr (COUNT == 16) {
        WGMMA_16("m64n32k16", 16, "{%16, %17, %18, %19}, %20, sum, 1, 1, %22", "%21")
    } else if constexpr (COUNT == 32) {
        WGMMA_16("m64n64k16", 32, "{%32, %33, %34, %35}, %36, sum, 1, 1, %38", "%37")
    } else if constexpr (COUNT == 64) {
        WGMMA_16("m64n128k16", 64, "{%64, %65, %66, %67}, %68, sum, 1, 1, %70", "%69")
    } else {
        WGMMA_16("m64n256k16", 128, "{%128, %129, %130, %131}, %132, sum, 1, 1, %134", "%133")
    }
}

template <bool B_ROWS_FIRST, int COUNT>
static __device__ __forceinline__ void
wgmma_f16(float (&d)[COUNT], const uint32_t a[4], uint64_t b, bool is_sum)
{
    wgmma_16<true, B_ROWS_FIRST>(d, a, b, is_sum);
}

template <int COUNT>
static __device__ __forceinline__ void
wgmma_bf16(float (&d)[COUNT], const uint32_t a[4], uint64_t b, bool is_sum)
{
    wgmma_16<false, false>(d, a, b, is_sum);
}

/* ---- Rows of 64 values as they lie in tiles of [rows][128 bytes], swizzled by 128 bytes ------ */

/* The descriptor of B with contiguous N columns, 64 per tile. Tiles are `tile_bytes` apart, groups
 * of eight rows 1024 bytes. */
static __device__ __forceinline__ uint64_t
wgmma_descriptor_of_tiles(uint32_t address, int tile_bytes)
{
    const uint32_t low = (address & 0x3FFFF) >> 4 | (uint32_t)(tile_bytes >> 4) << 16;
    const uint32_t high = 1024 >> 4 | (uint32_t)WGMMA_SWIZZLE_128 << 30;
    return (uint64_t)high << 32 | __reduce_max_sync(0xFFFFFFFFu, low);
}

#define WGMMA_16_TILES(shape, count, operands, sum)                                           \
    if constexpr (IS_HALF) {                                                                  \
        WGMMA(shape ".f32.f16.f16", count, d, 0, operands ", sum, 1, 1, 0, 0", sum, "l"(a),   \
              "l"(b), "r"((int)is_sum));                                                      \
    } else {                                                                                  \
        WGMMA(shape ".f32.bf16.bf16", count, d, 0, operands ", sum, 1, 1, 0, 0", sum, "l"(a), \
              "l"(b), "r"((int)is_sum));                                                      \
    }

/* D += A * B, or D = A * B unless `is_sum`. A and B are both in shared memory, in rows of 16
 * contiguous values, fp16 if IS_HALF, else bf16. */
template <bool IS_HALF, int COUNT>
static __device__ __forceinline__ void
wgmma_16_tiles(float (&d)[COUNT], uint64_t a, uint64_t b, bool is_sum)
{
    static_assert(COUNT == 32 || COUNT == 64, "64 or 128 columns");
    if constexpr (COUNT == 32) {
        WGMMA_16_TILES("m64n64k16", 32, "%32, %33", "%34")
    } else {
        WGMMA_16_TILES("m64n128k16", 64, "%64, %65", "%66")
    }
}

/* D += A * B with contiguous N columns of B, fp16 if IS_HALF, else bf16. A is in registers, or in
 * shared memory. */
template <bool IS_HALF>
static __device__ __forceinline__ void
wgmma_16_rows_first(float (&d)[128], const uint32_t a[4], uint64_t b)
{
    if constexpr (IS_HALF) {
        WGMMA("m64n256k16.f32.f16.f16", 128, d, 0, "{%128, %129, %130, %131}, %132, sum, 1, 1, 1",
              "1", WGMMA_A(a), "l"(b));
    } else {
        WGMMA("m64n256k16.f32.bf16.bf16", 128, d, 0, "{%128, %129, %130, %131}, %132, sum, 1, 1, 1",
              "1", WGMMA_A(a), "l"(b));
    }
}

template <bool IS_HALF>
static __device__ __forceinline__ void
wgmma_16_rows_first(float (&d)[128], uint64_t a, uint64_t b)
{
    if constexpr (IS_HALF) {
        WGMMA("m64n256k16.f32.f16.f16", 128, d, 0, "%128, %129, sum, 1, 1, 0, 1", "1", "l"(a),
              "l"(b));
    } else {
        WGMMA("m64n256k16.f32.bf16.bf16", 128, d, 0, "%128, %129, sum, 1, 1, 0, 1", "1", "l"(a),
              "l"(b));
    }
}

/* wgmma_16_rows_first of bf16 for 128 columns, whose sums are d[FIRST] to d[FIRST + 63]. */
template <int FIRST>
static __device__ __forceinline__ void
wgmma_bf16_rows_first_128(float (&d)[128], const uint32_t a[4], uint64_t b)
{
    WGMMA("m64n128k16.f32.bf16.bf16", 64, d, FIRST, "{%64, %65, %66, %67}, %68, sum, 1, 1, 1", "1",
          WGMMA_A(a), "l"(b));
}

template <int FIRST>
static __device__ __forceinline__ void
wgmma_bf16_rows_first_128(float (&d)[128], uint64_t a, uint64_t b)
{
    WGMMA("m64n128k16.f32.bf16.bf16", 64, d, FIRST, "%64, %65, sum, 1, 1, 0, 1", "1", "l"(a),
          "l"(b));
}

/* ---- e4m3 ----------------------------------------------------------------------------------- */

/* WGMMA of A and B in shared memory. */
#define WGMMA_E4M3(shape, count, operands, sum)                                             \
    WGMMA(shape ".f32.e4m3.e4m3", count, d, 0, operands ", sum, 1, 1", sum, "l"(a), "l"(b), \
          "r"((int)is_sum))

/* D[64][2 COUNT] += A[64][32] * B[32][2 COUNT]: A and B are both in shared memory, in rows of 32
 * contiguous e4m3. The sums of products have about 14 bits. */
template <int COUNT>
static __device__ __forceinline__ void
wgmma_e4m3(float (&d)[COUNT], uint64_t a, uint64_t b, bool is_sum)
{
    if constexpr (COUNT == 16) {
        WGMMA_E4M3("m64n32k32", 16, "%16, %17", "%18");
    } else if constexpr (COUNT == 20) {
        WGMMA_E4M3("m64n40k32", 20, "%20, %21", "%22");
    } else if constexpr (COUNT == 32) {
        WGMMA_E4M3("m64n64k32", 32, "%32, %33", "%34");
    } else if constexpr (COUNT == 36) {
        WGMMA_E4M3("m64n72k32", 36, "%36, %37", "%38");
    } else if constexpr (COUNT == 64) {
        WGMMA_E4M3("m64n128k32", 64, "%64, %65", "%66");
    } else if constexpr (COUNT == 68) {
        WGMMA_E4M3("m64n136k32", 68, "%68, %69", "%70");
    } else {
        static_assert(COUNT == 72, "a number of sums from this list");
        WGMMA_E4M3("m64n144k32", 72, "%72, %73", "%74");
    }
}
