/* ptx.cuh: one PTX instruction per function, for what C++ cannot express. All are of sm_80; those
 * of sm_90 are in ptx_sm90.cuh.
 *
 * Fragments, with g = lane / 4 and c = lane % 4:
 *   A of m16n8k16  a[0] row g,     columns 2c, 2c+1    a[1] row g + 8, the same columns
 *                  a[2] row g, columns 2c+8, 2c+9      a[3] row g + 8, the same columns
 *   B              b[0] rows 2c, 2c+1 of column g      b[1] rows 2c+8, 2c+9 of column g
 *   C, D           d[0], d[1] row g, columns 2c, 2c+1  d[2], d[3] row g + 8, the same columns
 * ldmatrix reads four 8 x 8 matrices of bf16. Lane l passes the address of row l % 8 (16 bytes) of
 * matrix l / 8. From each matrix it receives elements 2c, 2c+1 of row g, or with .trans element g
 * of rows 2c and 2c+1.
 */
#pragma once

#include <stdint.h>

/* The text of an instruction that runs where operand `flag` is not 0, without a branch. The results
 * of `otherwise` stay where it does not run. */
#define PTX_IF_ELSE(flag, instruction, otherwise)                           \
    "{\n\t"                                                                 \
    ".reg .pred on;\n\t"                                                    \
    "setp.ne.b32 on, " flag ", 0;\n\t" otherwise "@on " instruction ";\n\t" \
    "}"

#define PTX_IF(flag, instruction) PTX_IF_ELSE(flag, instruction, "")

/* Zeros as the first two or four operands. */
#define PTX_ZEROS_2 "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
#define PTX_ZEROS_4 PTX_ZEROS_2 "mov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"

/* Functions of one instruction, of one operand or two of one type. Types are those of asm. */
#define PTX_TYPE_r uint32_t
#define PTX_TYPE_h uint16_t
#define PTX_TYPE_f float

#define PTX_UNARY(name, instruction, result, operand)                              \
    static __device__ __forceinline__ PTX_TYPE_##result name(PTX_TYPE_##operand a) \
    {                                                                              \
        PTX_TYPE_##result d;                                                       \
        asm(instruction " %0, %1;" : "=" #result(d) : #operand(a));                \
        return d;                                                                  \
    }

#define PTX_BINARY(name, instruction, result, operand)                               \
    static __device__ __forceinline__ PTX_TYPE_##result name(PTX_TYPE_##operand a,   \
                                                             PTX_TYPE_##operand b)   \
    {                                                                                \
        PTX_TYPE_##result d;                                                         \
        asm(instruction " %0, %1, %2;" : "=" #result(d) : #operand(a), #operand(b)); \
        return d;                                                                    \
    }

/* The address in the shared memory window, which the instructions below take. */
static __device__ __forceinline__ uint32_t
ptx_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* Returns x without an instruction, but hides from the compiler that it is x. So a loop computes
 * again what depends on it, instead of keeping results in registers that the loop needs. */
static __device__ __forceinline__ int
ptx_forget(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* Reads the thread index again at each call, so that it occupies no register across a loop. */
static __device__ __forceinline__ uint32_t
ptx_thread(void)
{
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

static __device__ __forceinline__ void
ptx_ldmatrix_x4(uint32_t address, uint32_t r[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_ldmatrix_x4_trans(uint32_t address, uint32_t r[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* d += a * b: products of bf16 or of f16, subnormals included; sums in fp32. */
#define PTX_MMA(name, type)                                                      \
    static __device__ __forceinline__ void name(float d[4], const uint32_t a[4], \
                                                const uint32_t b[2])             \
    {                                                                            \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "       \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                     \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }

PTX_MMA(ptx_mma_bf16, "bf16")
PTX_MMA(ptx_mma_f16, "f16")

/* Returns a * b + c of two pairs of bf16, rounded once; subnormals are kept. */
static __device__ __forceinline__ uint32_t
ptx_fma_bf16x2(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* Rounds both values to fp16; a NaN becomes the positive one. */
static __device__ __forceinline__ uint32_t
ptx_cvt_f16x2(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Returns the larger of two fp16 in each half. A number is chosen over a NaN. */
PTX_BINARY(ptx_max_f16x2, "max.f16x2", r, r)

/* The larger absolute value in each half, or NaN. The sign bits mean nothing. */
PTX_BINARY(ptx_max_abs_bf16x2, "max.NaN.xorsign.abs.bf16x2", r, r)

/* The larger value, or NaN if either is NaN. */
PTX_BINARY(ptx_max_nan, "max.NaN.f32", f, f)

/* 2^x, off by at most two units in the last place. Results below 2^-126 are 0, and so is 2^-inf. */
PTX_UNARY(ptx_exp2, "ex2.approx.ftz.f32", f, f)

/* Sets x = x * a + b if `is_on` is not 0, without a branch. */
static __device__ __forceinline__ void
ptx_fma_if(float *x, float a, float b, uint32_t is_on)
{
    asm(PTX_IF("%3", "fma.rn.f32 %0, %0, %1, %2") : "+f"(*x) : "f"(a), "f"(b), "r"(is_on));
}

/* x *= factor. The asm is volatile, so it stays after an earlier wait for the instruction that
 * writes x. */
static __device__ __forceinline__ void
ptx_scale(float *x, float factor)
{
    asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(*x) : "f"(factor));
}

/* sum += a * b if b is not 0, without a branch. If b is 0, `a` may be anything, even NaN. */
static __device__ __forceinline__ void
ptx_fma_unless_zero(float *sum, float a, float b)
{
    asm("{\n\t"
        ".reg .pred on;\n\t"
        "setp.neu.f32 on, %2, 0f00000000;\n\t"
        "@on fma.rn.f32 %0, %1, %2, %0;\n\t"
        "}"
        : "+f"(*sum)
        : "f"(a), "f"(b));
}

/* Loads global memory that nobody writes meanwhile and that is read once, so L1 does not keep it.
 * Unless `is_on`, the result is zeros and the address is not used. */
static __device__ __forceinline__ void
ptx_load_16(const void *from, bool is_on, uint32_t words[4])
{
    asm volatile(PTX_IF_ELSE("%5", "ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]",
                             PTX_ZEROS_4)
                 : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
                 : "l"(from), "r"((int)is_on));
}

static __device__ __forceinline__ void
ptx_load_8(const void *from, bool is_on, uint32_t words[2])
{
    asm volatile(PTX_IF_ELSE("%3", "ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2]",
                             PTX_ZEROS_2)
                 : "=&r"(words[0]), "=&r"(words[1])
                 : "l"(from), "r"((int)is_on));
}

/* ptx_load_16 for memory that other CTAs of the grid have written: it comes from L2. */
static __device__ __forceinline__ void
ptx_load_16_of_grid(const void *from, bool is_on, uint32_t words[4])
{
    asm volatile(PTX_IF_ELSE("%5", "ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4]", PTX_ZEROS_4)
                 : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
                 : "l"(from), "r"((int)is_on)
                 : "memory");
}

/* ptx_load_16 for 4 bytes, with `otherwise` in place of zero. */
static __device__ __forceinline__ void
ptx_load_4(const void *from, bool is_on, uint32_t otherwise, uint32_t *word)
{
    asm volatile(PTX_IF("%2", "ld.global.nc.L1::no_allocate.b32 %0, [%1]")
                 : "+r"(otherwise)
                 : "l"(from), "r"((int)is_on));
    *word = otherwise;
}

/* ptx_load_4 for memory that is read again soon: it goes through L1. */
static __device__ __forceinline__ void
ptx_load_4_cached(const void *from, bool is_on, uint32_t otherwise, uint32_t *word)
{
    asm volatile(PTX_IF("%2", "ld.global.nc.b32 %0, [%1]")
                 : "+r"(otherwise)
                 : "l"(from), "r"((int)is_on));
    *word = otherwise;
}

/* Copies 16 bytes from global to shared memory, without registers. The bytes are visible to this
 * thread after its ptx_cp_async_wait_all, and to other threads after a later barrier. */
static __device__ __forceinline__ void
ptx_cp_async_16(uint32_t to_shared, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(to_shared), "l"(from)
                 : "memory");
}

/* ptx_cp_async_16, but writes zeros and does not use `from` unless `is_on`. L2 gets the whole
 * line. */
static __device__ __forceinline__ void
ptx_cp_async_16_or_zero(uint32_t to_shared, const void *from, bool is_on)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to_shared), "l"(from), "r"(is_on ? 16 : 0)
                 : "memory");
}

/* ptx_cp_async_16_or_zero for 4 bytes, which go through L1. */
static __device__ __forceinline__ void
ptx_cp_async_4_or_zero(uint32_t to_shared, const void *from, bool is_on)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(to_shared), "l"(from), "r"(is_on ? 4 : 0)
                 : "memory");
}

/* ptx_cp_async_16_or_zero for 8 bytes, which go through L1. */
static __device__ __forceinline__ void
ptx_cp_async_8_or_zero(uint32_t to_shared, const void *from, bool is_on)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :
                 : "r"(to_shared), "l"(from), "r"(is_on ? 8 : 0)
                 : "memory");
}

/* Closes a group of copies, which may be empty. */
static __device__ __forceinline__ void
ptx_cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

/* Waits until at most PENDING of this thread's groups are under way. */
template <int PENDING>
static __device__ __forceinline__ void
ptx_cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

static __device__ __forceinline__ void
ptx_cp_async_wait_all(void)
{
    asm volatile("cp.async.wait_all;" : : : "memory");
}

/* ---- Barriers ------------------------------------------------------------------------------ */

/* Waits at named barrier `id` for `num_threads` threads. What they wrote before is then visible to
 * all of them. */
static __device__ __forceinline__ void
ptx_barrier(int id, int num_threads)
{
    asm volatile("barrier.sync.aligned %0, %1;" : : "r"(id), "r"(num_threads) : "memory");
}

/* Arrives at a named barrier, and does not wait. */
static __device__ __forceinline__ void
ptx_barrier_arrive(int id, int num_threads)
{
    asm volatile("barrier.arrive.aligned %0, %1;" : : "r"(id), "r"(num_threads) : "memory");
}

/* ptx_barrier, which returns whether `is_set` holds in any thread. */
static __device__ __forceinline__ bool
ptx_barrier_or(int id, int num_threads, bool is_set)
{
    int any;
    asm volatile("{\n\t"
                 ".reg .pred mine, all;\n\t"
                 "setp.ne.b32 mine, %3, 0;\n\t"
                 "barrier.red.or.pred.aligned all, %1, %2, mine;\n\t"
                 "selp.b32 %0, 1, 0, all;\n\t"
                 "}"
                 : "=r"(any)
                 : "r"(id), "r"(num_threads), "r"((int)is_set)
                 : "memory");
    return any != 0;
}

/* ptx_barrier, which returns in how many threads `is_set` holds. */
static __device__ __forceinline__ int
ptx_barrier_count(int id, int num_threads, bool is_set)
{
    int count;
    asm volatile("{\n\t"
                 ".reg .pred mine;\n\t"
                 "setp.ne.b32 mine, %3, 0;\n\t"
                 "barrier.red.popc.aligned.u32 %0, %1, %2, mine;\n\t"
                 "}"
                 : "=r"(count)
                 : "r"(id), "r"(num_threads), "r"((int)is_set)
                 : "memory");
    return count;
}
