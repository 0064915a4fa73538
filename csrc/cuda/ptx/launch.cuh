/* launch.cuh: how kernels are started, and what they share: sums over lanes, index arithmetic,
 * access to vectors. */
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "cuda/host/cuda.h"
#include "cuda/ptx/ptx_sm90.cuh"

enum { SMLA_WARP_LANES = 32 };

/* ---- Launch -------------------------------------------------------------------------------- */

/* Whether kernels can wait for earlier grids of the stream, and so start early. Only code compiled
 * for exactly this device, sm_90 or later, can: PTX of sm_80, which a newer device compiles, lacks
 * the instruction. */
static inline bool
can_start_early(int32_t compute_capability)
{
    static const int32_t archs[] = {__CUDA_ARCH_LIST__};
    bool can = false;
    for (const int32_t arch : archs) {
        can = can || (arch >= 900 && arch == 10 * compute_capability);
    }
    return can;
}

/* A kernel that takes one struct by value. */
template <typename Args> using smla_kernel = void (*)(Args);

/* Starts a kernel that takes one struct by value; NULL is no kernel. The grid has at most as many
 * blocks as the hardware can number; kernels loop over the others. With no blocks nothing is
 * launched. `deferred` is as in smla_cuda_launch.
 *
 * Where the device can, the grid starts before the one in front of it in the stream is done. So
 * every thread of every kernel must pass ptx_wait_for_grids before it reads what other grids wrote,
 * writes what they read, or ends. Without the wait, later grids could overtake earlier ones. */
template <typename Args>
static cudaError_t
smla_launch(void (*kernel)(Args), const Args &args, int64_t num_blocks, int block_threads,
            int shared_bytes, smla_stream stream, bool has_clusters = false,
            smla_cuda_deferred *deferred = NULL)
{
    static_assert(sizeof args <= SMLA_CUDA_MAX_ARGS, "deferred launches keep them");
    if (kernel == NULL) {
        return SMLA_NO_KERNEL;
    }
    if (num_blocks <= 0) {
        return cudaSuccess;
    }
    smla_cuda_grid grid = {};
    grid.kernel = (const void *)kernel;
    grid.args = const_cast<Args *>(&args);
    grid.args_bytes = sizeof args;
    grid.num_blocks = (unsigned)(num_blocks < INT32_MAX ? num_blocks : INT32_MAX);
    grid.block_threads = (unsigned)block_threads;
    grid.shared_bytes = (unsigned)shared_bytes;
    grid.has_clusters = has_clusters;
    grid.starts_early =
        can_start_early(smla_cuda_find_device(stream.device_id)->compute_capability);
    grid.stream = stream;
    return smla_cuda_launch(&grid, deferred);
}

/* Allows a kernel more than 48 KiB of shared memory, once per kernel and device: `allowed` has a
 * bit per device. Two threads may both do this without harm. The driver divides an SM's memory into
 * shared memory and L1. With all of it shared, the portable kernels, which read rows through L1,
 * took up to 12 % longer, and no other kernel gained. */
static inline cudaError_t
allow_shared_bytes(const void *kernel, int shared_bytes, int32_t device_id, uint64_t *allowed)
{
    const uint64_t bit = device_id < 64 ? (uint64_t)1 << device_id : 0;
    if (__atomic_load_n(allowed, __ATOMIC_ACQUIRE) & bit) {
        return cudaSuccess;
    }
    /* This may load the kernel, which a capture in the default mode forbids. */
    const enum cudaStreamCaptureMode former = smla_cuda_relax_captures();
    const cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    smla_cuda_restore_captures(former);
    if (code == cudaSuccess) {
        __atomic_fetch_or(allowed, bit, __ATOMIC_RELEASE);
    }
    return code;
}

/* smla_launch for a kernel of which some launch needs `most_bytes` of shared memory, more than
 * 48 KiB; `allowed` is that of allow_shared_bytes. */
template <typename Args>
static cudaError_t
smla_launch_large(void (*kernel)(Args), const Args &args, int64_t num_blocks, int block_threads,
                  int shared_bytes, int most_bytes, smla_stream stream, uint64_t *allowed,
                  bool has_clusters = false, smla_cuda_deferred *deferred = NULL)
{
    const cudaError_t code =
        allow_shared_bytes((const void *)kernel, most_bytes, stream.device_id, allowed);
    return code != cudaSuccess ? code
                               : smla_launch(kernel, args, num_blocks, block_threads, shared_bytes,
                                             stream, has_clusters, deferred);
}

/* The same for a kernel whose launches all need as much. */
template <auto KERNEL, typename Args>
static inline cudaError_t
smla_launch_large(const Args &args, int64_t num_blocks, int block_threads, int shared_bytes,
                  smla_stream stream, bool has_clusters = false,
                  smla_cuda_deferred *deferred = NULL)
{
    static uint64_t allowed;
    return smla_launch_large(KERNEL, args, num_blocks, block_threads, shared_bytes, shared_bytes,
                             stream, &allowed, has_clusters, deferred);
}

/* ---- Lanes --------------------------------------------------------------------------------- */

enum { SMLA_QUAD_LANES = 4 }; /* neighbouring lanes that have a row of a tensor core's fragment */

constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

/* Returns the sum of the values of this lane and of all lower lanes, for the first LANES lanes of a
 * warp. All lanes call this; other lanes get an arbitrary result. */
template <int LANES = SMLA_WARP_LANES, typename T>
static __device__ __forceinline__ T
smla_scan_lanes(T value, int lane)
{
    T sum = value;
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        const T below = __shfl_up_sync(ALL_LANES, sum, distance);
        sum += lane >= distance ? below : 0;
    }
    return sum;
}

/* The sum of the values of LANES neighbouring lanes, in each of them, along a fixed tree. */
template <int LANES = SMLA_WARP_LANES, typename T>
static __device__ __forceinline__ T
smla_sum_of_lanes(T value)
{
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    }
    return value;
}

/* The largest of the values of LANES neighbouring lanes; a NaN counts as none. */
template <int LANES = SMLA_WARP_LANES>
static __device__ __forceinline__ float
smla_max_of_lanes(float value)
{
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    }
    return value;
}

/* Transposes four words of four neighbouring lanes: word i of lane c becomes word c of lane i.
 * `column` is c, or a number of which c is the last two bits. */
static __device__ __forceinline__ void
smla_turn_words(int column, uint32_t words[4])
{
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool is_upper = column & step;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int low = step == 1 ? 2 * i : i;
            const uint32_t give = is_upper ? words[low] : words[low + step];
            const uint32_t take = __shfl_xor_sync(ALL_LANES, give, step);
            words[low] = is_upper ? take : words[low];
            words[low + step] = is_upper ? words[low + step] : take;
        }
    }
}

/* ---- Values -------------------------------------------------------------------------------- */

/* Element `at` of a read-only array of int64 or int32. */
static __device__ __forceinline__ int64_t
smla_read_integer(const void *array, bool are_int64, int64_t at)
{
    return are_int64 ? (int64_t)__ldg((const long long *)array + at)
                     : (int64_t)__ldg((const int32_t *)array + at);
}

/* Loads a scale that the caller gave as a number or as an address on the device. */
static __device__ __forceinline__ float
smla_load_given_scale(const smla_given_scale &scale)
{
    return scale.pointer == NULL ? scale.value : __ldg(scale.pointer);
}

/* ---- Counts -------------------------------------------------------------------------------- */

/* Whether an address and a stride in bytes are multiples of `bytes`. */
static inline bool
smla_is_multiple(const void *address, int64_t stride_bytes, int64_t bytes)
{
    return (uintptr_t)address % (uintptr_t)bytes == 0 && stride_bytes % bytes == 0;
}

/* Whether every row of an array [tokens][heads] begins at a multiple of `bytes`. */
static inline bool
smla_are_rows_aligned(const void *rows, int64_t stride_token, int64_t stride_head, int64_t bytes,
                      int64_t element_bytes = 2)
{
    return smla_is_multiple(rows, stride_token * element_bytes, bytes) &&
           stride_head * element_bytes % bytes == 0;
}

/* ---- Division ------------------------------------------------------------------------------ */

/* A divisor known at launch. magic = ceil(2^64 / divisor), so that for every n below 2^32 the upper
 * half of n * magic is n / divisor (Lemire, Kaser, Kurz, 2019). Divisor 1 has magic 0. */
typedef struct smla_divisor {
    int64_t divisor;
    uint64_t magic;
} smla_divisor;

static inline smla_divisor
smla_make_divisor(int64_t divisor)
{
    return smla_divisor{divisor, divisor == 1 ? 0 : UINT64_MAX / (uint64_t)divisor + 1};
}

static __device__ __forceinline__ uint32_t
smla_divide_uint32(uint32_t n, const smla_divisor &by)
{
    const uint32_t high = (uint32_t)(by.magic >> 32);
    const uint32_t low = (uint32_t)by.magic;
    const uint64_t sum = (uint64_t)high * n + ((uint64_t)low * n >> 32);
    return by.magic == 0 ? n : (uint32_t)(sum >> 32);
}

/* Not inlined, because it takes a hundred instructions and is hardly ever needed. */
static __device__ __noinline__ int64_t
smla_divide_large(int64_t n, int64_t divisor)
{
    return n / divisor;
}

/* Returns n / by.divisor for n >= 0. It divides only if n does not fit in 32 bits. */
static __device__ __forceinline__ int64_t
smla_divide(int64_t n, const smla_divisor &by)
{
    return n >> 32 == 0 ? smla_divide_uint32((uint32_t)n, by) : smla_divide_large(n, by.divisor);
}

/* ---- Vectors ------------------------------------------------------------------------------- */

/* Each function is one instruction, which the compiler keeps in its order. Otherwise the compiler
 * would move loads behind the branch of their only use, and might split a store of a vector into
 * stores of its parts. */
static __device__ __forceinline__ void
smla_load_vector_4(const void *from, uint32_t *words)
{
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
}

/* smla_load_vector_4 for memory that the thread may write later, which is not read-only data. */
static __device__ __forceinline__ void
smla_load_own_vector_4(const void *from, uint32_t *words)
{
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
}

static __device__ __forceinline__ void
smla_load_vector_2(const void *from, uint32_t *words)
{
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(from));
}

static __device__ __forceinline__ void
smla_load_vector_1(const void *from, uint32_t *words)
{
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
}

static __device__ __forceinline__ void
smla_store_vector_4(void *to, const uint32_t *words)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

/* Stores to global or shared memory if `is_on`, without a branch. */
static __device__ __forceinline__ void
smla_store_vector_4_if(void *to, const uint32_t *words, bool is_on)
{
    asm volatile(PTX_IF("%5", "st.v4.u32 [%0], {%1, %2, %3, %4}")
                 :
                 : "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
                   "r"((int)is_on)
                 : "memory");
}

static __device__ __forceinline__ void
smla_store_vector_2(void *to, const uint32_t *words)
{
    asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(to), "r"(words[0]), "r"(words[1])
                 : "memory");
}

static __device__ __forceinline__ void
smla_store_vector_1(void *to, const uint32_t *words)
{
    asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(words[0]) : "memory");
}

/* Load and store BYTES bytes as 32-bit words. If ALIGNED, this is one instruction of 4, 8 or 16
 * bytes. Otherwise it moves units of UNIT bytes, 1, 2 or 4, and the address must be a multiple of
 * UNIT. */
template <int BYTES, bool ALIGNED, int UNIT = 2>
static __device__ __forceinline__ void
smla_load_words(const void *from, uint32_t *words)
{
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "a vector is 4, 8 or 16 bytes");
    if constexpr (ALIGNED && BYTES == 16) {
        smla_load_vector_4(from, words);
    } else if constexpr (ALIGNED && BYTES == 8) {
        smla_load_vector_2(from, words);
    } else if constexpr (ALIGNED) {
        smla_load_vector_1(from, words);
    } else if constexpr (UNIT == 4) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) {
            words[i] = __ldg((const uint32_t *)from + i);
        }
    } else if constexpr (UNIT == 2) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) {
            const uint32_t low = __ldg((const uint16_t *)from + 2 * i);
            const uint32_t high = __ldg((const uint16_t *)from + 2 * i + 1);
            words[i] = low | high << 16;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) {
            words[i] = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                words[i] |= (uint32_t)__ldg((const uint8_t *)from + 4 * i + k) << 8 * k;
            }
        }
    }
}

template <int BYTES, bool ALIGNED, int UNIT = 2>
static __device__ __forceinline__ void
smla_store_words(void *to, const uint32_t *words)
{
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "a vector is 4, 8 or 16 bytes");
    if constexpr (ALIGNED && BYTES == 16) {
        smla_store_vector_4(to, words);
    } else if constexpr (ALIGNED && BYTES == 8) {
        smla_store_vector_2(to, words);
    } else if constexpr (ALIGNED || UNIT == 4) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) {
            smla_store_vector_1((uint32_t *)to + i, words + i);
        }
    } else if constexpr (UNIT == 2) {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i++) {
            ((uint16_t *)to)[2 * i] = (uint16_t)words[i];
            ((uint16_t *)to)[2 * i + 1] = (uint16_t)(words[i] >> 16);
        }
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; i++) {
            ((uint8_t *)to)[i] = (uint8_t)(words[i / 4] >> 8 * (i % 4));
        }
    }
}
