/* ptx.cuh: one PTX instruction per function, for what C++ has no words for. All of it is sm_80
 * but the last part.
 *
 * Fragments, with g = lane / 4 and c = lane % 4:
 *   A of m16n8k16  a[0] row g,     columns 2c, 2c+1    a[1] row g + 8, the same columns
 *                  a[2] row g, columns 2c+8, 2c+9      a[3] row g + 8, the same columns
 *   B              b[0] rows 2c, 2c+1 of column g      b[1] rows 2c+8, 2c+9 of column g
 *   C, D           d[0], d[1] row g, columns 2c, 2c+1  d[2], d[3] row g + 8, the same columns
 * ldmatrix reads four 8 x 8 matrices of bf16: lane l gives the address of row l % 8 of matrix
 * l / 8, 16 bytes, and receives elements 2c, 2c+1 of row g of each; with .trans, elements g of rows
 * 2c, 2c+1.
 */
#ifndef SMLA_CUDA_PTX_CUH
#define SMLA_CUDA_PTX_CUH

#include <stdint.h>

/* Where shared memory lies in its own window: the address that the instructions below take. */
static __device__ __forceinline__ uint32_t
ptx_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* No instruction: the same value, but the compiler does not know it. What is computed from it in a
 * loop is computed there again, instead of being kept in registers that the loop needs. */
static __device__ __forceinline__ int
ptx_forget(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* The thread's number in its CTA, read anew: it keeps no register over a loop. */
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

/* d += a * b: bf16 products, subnormals kept, fp32 sums. */
static __device__ __forceinline__ void
ptx_mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* a * b + c of two bf16, one rounding, subnormals kept. */
static __device__ __forceinline__ uint32_t
ptx_fma_bf16x2(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* The larger of the absolute values, or NaN, of two bf16; the sign is anything's. */
static __device__ __forceinline__ uint32_t
ptx_max_abs_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

/* 2^x to two units in the last place; results below 2^-126 are 0; 2^-inf = 0. */
static __device__ __forceinline__ float
ptx_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* x = x * a + b if `is_on` is not 0. No branch. */
static __device__ __forceinline__ void
ptx_fma_if(float *x, float a, float b, uint32_t is_on)
{
    asm("{\n\t"
        ".reg .pred on;\n\t"
        "setp.ne.u32 on, %3, 0;\n\t"
        "@on fma.rn.f32 %0, %0, %1, %2;\n\t"
        "}"
        : "+f"(*x)
        : "f"(a), "f"(b), "r"(is_on));
}

/* x *= factor, in the order of other asm volatile: not before a wait for what writes x. */
static __device__ __forceinline__ void
ptx_scale(float *x, float factor)
{
    asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(*x) : "f"(factor));
}

/* sum += a * b if b is not 0: then `a` may be anything, even NaN. No branch. */
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

/* Global memory that no one writes meanwhile, read once: kept out of L1. Zeros unless `is_on`, and
 * then the address is not looked at. */
static __device__ __forceinline__ void
ptx_load_16(const void *from, bool is_on, uint32_t words[4])
{
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %5, 0;\n\t"
                 "mov.b32 %0, 0;\n\t"
                 "mov.b32 %1, 0;\n\t"
                 "mov.b32 %2, 0;\n\t"
                 "mov.b32 %3, 0;\n\t"
                 "@on ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
                 : "l"(from), "r"((int)is_on));
}

static __device__ __forceinline__ void
ptx_load_8(const void *from, bool is_on, uint32_t words[2])
{
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %3, 0;\n\t"
                 "mov.b32 %0, 0;\n\t"
                 "mov.b32 %1, 0;\n\t"
                 "@on ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];\n\t"
                 "}"
                 : "=&r"(words[0]), "=&r"(words[1])
                 : "l"(from), "r"((int)is_on));
}

/* The same of what other CTAs of the grid have written: from L2. */
static __device__ __forceinline__ void
ptx_load_16_of_grid(const void *from, bool is_on, uint32_t words[4])
{
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %5, 0;\n\t"
                 "mov.b32 %0, 0;\n\t"
                 "mov.b32 %1, 0;\n\t"
                 "mov.b32 %2, 0;\n\t"
                 "mov.b32 %3, 0;\n\t"
                 "@on ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "=&r"(words[0]), "=&r"(words[1]), "=&r"(words[2]), "=&r"(words[3])
                 : "l"(from), "r"((int)is_on)
                 : "memory");
}

/* `otherwise` in place of zero. */
static __device__ __forceinline__ void
ptx_load_4(const void *from, bool is_on, uint32_t otherwise, uint32_t *word)
{
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %2, 0;\n\t"
                 "@on ld.global.nc.L1::no_allocate.b32 %0, [%1];\n\t"
                 "}"
                 : "+r"(otherwise)
                 : "l"(from), "r"((int)is_on));
    *word = otherwise;
}

/* The same of what is read again soon: through L1. */
static __device__ __forceinline__ void
ptx_load_4_cached(const void *from, bool is_on, uint32_t otherwise, uint32_t *word)
{
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %2, 0;\n\t"
                 "@on ld.global.nc.b32 %0, [%1];\n\t"
                 "}"
                 : "+r"(otherwise)
                 : "l"(from), "r"((int)is_on));
    *word = otherwise;
}

/* 16 bytes from global to shared memory, past the registers. They are there for this thread after
 * its ptx_cp_async_wait_all, for others after a barrier that follows. */
static __device__ __forceinline__ void
ptx_cp_async_16(uint32_t to_shared, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(to_shared), "l"(from)
                 : "memory");
}

/* Zeros unless `is_on`, and then the address is not looked at. L2 gets the whole line. */
static __device__ __forceinline__ void
ptx_cp_async_16_or_zero(uint32_t to_shared, const void *from, bool is_on)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 :
                 : "r"(to_shared), "l"(from), "r"(is_on ? 16 : 0)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_cp_async_wait_all(void)
{
    asm volatile("cp.async.wait_all;" : : : "memory");
}

/* ---- Barriers ------------------------------------------------------------------------------ */

/* Named barrier `id`, of `num_threads` of the CTA: what they wrote before is visible to all. */
static __device__ __forceinline__ void
ptx_barrier(int id, int num_threads)
{
    asm volatile("barrier.sync.aligned %0, %1;" : : "r"(id), "r"(num_threads) : "memory");
}

/* As ptx_barrier; whether any thread's `is_set`. */
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

/* As ptx_barrier; how many threads' `is_set`. */
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

/* ---- sm_90 --------------------------------------------------------------------------------- */

/* The grids in front of this one in the stream are done, and what they wrote is visible:
 * smla_launch may start it earlier. No instruction where no grid starts early. */
static __device__ __forceinline__ void
ptx_wait_for_grids(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

/* Once every CTA has said so, or is done, the next grid of the stream may start early. It says
 * nothing about memory: the next grid waits for the end of this one. */
static __device__ __forceinline__ void
ptx_let_next_grid_start(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

/* Asks for the line to be in L2. Nothing is read: others may still write it. */
static __device__ __forceinline__ void
ptx_prefetch_l2(const void *from, bool is_on)
{
    if (is_on) {
        asm volatile("prefetch.global.L2 [%0];" : : "l"(from));
    }
}

/* Registers of a thread, for all warps of a warpgroup; the CTA's sum stays what it began with. */
template <int COUNT>
static __device__ __forceinline__ void
ptx_release_registers(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(COUNT));
}

template <int COUNT>
static __device__ __forceinline__ void
ptx_claim_registers(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(COUNT));
}

/* An mbarrier in shared memory: a phase is over when `arrivals` threads have arrived and all bytes
 * that were announced have come. */
static __device__ __forceinline__ void
ptx_mbarrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

/* Nobody uses the barrier any more: its place is memory like any other only after this, for an SM
 * keeps the state of barriers elsewhere and may write it back, as it does when contexts change. */
static __device__ __forceinline__ void
ptx_mbarrier_end(uint32_t barrier)
{
    asm volatile("mbarrier.inval.shared.b64 [%0];" : : "r"(barrier) : "memory");
}

/* Makes initialised barriers known to bulk copies. */
static __device__ __forceinline__ void
ptx_fence_mbarrier_init(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

/* Arrives if `is_on`: no branch. What the thread wrote before is visible to those that wait. */
static __device__ __forceinline__ void
ptx_mbarrier_arrive(uint32_t barrier, bool is_on)
{
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %1, 0;\n\t"
                 "@on mbarrier.arrive.shared.b64 _, [%0];\n\t"
                 "}"
                 :
                 : "r"(barrier), "r"((int)is_on)
                 : "memory");
}

/* Arrives and announces bytes of bulk copies that complete on the barrier. */
static __device__ __forceinline__ void
ptx_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :
                 : "r"(barrier), "r"(bytes)
                 : "memory");
}

/* Arrives when all cp.async of this thread so far have written: one of the barrier's arrivals. */
static __device__ __forceinline__ void
ptx_mbarrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(barrier) : "memory");
}

/* Waits until the phase of this parity is over; a fresh barrier counts as past phase 1. */
static __device__ __forceinline__ void
ptx_mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n\t"
                 ".reg .pred over;\n\t"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared.b64 over, [%0], %1;\n\t"
                 "@over bra done;\n\t"
                 "bra again;\n\t"
                 "done:\n\t"
                 "}"
                 :
                 : "r"(barrier), "r"(parity)
                 : "memory");
}

/* One thread of the warp, the same one every time. */
static __device__ __forceinline__ bool
ptx_elect(void)
{
    uint32_t is_elected;
    asm volatile("{\n\t"
                 ".reg .pred mine;\n\t"
                 "elect.sync _|mine, 0xffffffff;\n\t"
                 "selp.b32 %0, 1, 0, mine;\n\t"
                 "}"
                 : "=r"(is_elected));
    return is_elected != 0;
}

/* Copies global to shared memory, both aligned to 16 bytes, past registers and threads. */
static __device__ __forceinline__ void
ptx_bulk_copy(uint32_t to_shared, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :
                 : "r"(to_shared), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* The same to the same place in every CTA of `ctas`, a bit for each of the cluster; completes on
 * each one's barrier. */
static __device__ __forceinline__ void
ptx_bulk_copy_to_all(uint32_t to_shared, const void *from, uint32_t bytes, uint32_t barrier,
                     uint16_t ctas)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1], %2, [%3], %4;"
                 :
                 : "r"(to_shared), "l"(from), "r"(bytes), "r"(barrier), "h"(ctas)
                 : "memory");
}

/* The CTA's number in its cluster. */
static __device__ __forceinline__ uint32_t
ptx_cluster_rank(void)
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* A barrier of all threads of the cluster in two halves, for whole warps. Of what was written
 * before the first it orders nothing but initialised mbarriers, after ptx_fence_mbarrier_init: to
 * order all takes 250 cycles more. */
static __device__ __forceinline__ void
ptx_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

static __device__ __forceinline__ void
ptx_cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

/* What this thread wrote to shared memory is visible to wgmma and to later bulk copies. */
static __device__ __forceinline__ void
ptx_fence_async_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

/* Four 8 x 8 matrices of 16 bits, as ldmatrix reads them. */
static __device__ __forceinline__ void
ptx_stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_load_shared_16(uint32_t address, uint32_t words[4])
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

/* Zeros if not is_on. No branch. */
static __device__ __forceinline__ void
ptx_load_shared_16_if(uint32_t address, bool is_on, uint32_t words[4])
{
    words[0] = words[1] = words[2] = words[3] = 0;
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %5, 0;\n\t"
                 "@on ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
                 : "r"(address), "r"((int)is_on));
}

static __device__ __forceinline__ void
ptx_load_shared_8(uint32_t address, uint32_t words[2])
{
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address));
}

static __device__ __forceinline__ uint32_t
ptx_load_shared_4(uint32_t address)
{
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}

/* Four e4m3 to f16, exactly: bytes 0, 1 and bytes 2, 3. smla_e4m3x4_to_halves cuts the word with
 * instructions of its own: 3 % more of the FP8 kernel's. */
static __device__ __forceinline__ void
ptx_cvt_f16x4_e4m3x4(uint32_t bytes, uint32_t *low, uint32_t *high)
{
    asm("{\n\t"
        ".reg .b16 first, second;\n\t"
        "mov.b32 {first, second}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, first;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, second;\n\t"
        "}"
        : "=r"(*low), "=r"(*high)
        : "r"(bytes));
}

static __device__ __forceinline__ uint32_t
ptx_cvt_f16x2(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

static __device__ __forceinline__ uint32_t
ptx_mul_f16x2(uint32_t a, uint32_t b)
{
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/* Whether the size of one of two f16 is above its limit; NaN is not. */
static __device__ __forceinline__ bool
ptx_exceeds_f16x2(uint32_t pair, uint32_t limits)
{
    uint32_t is_large;
    asm("{\n\t"
        ".reg .pred low, high;\n\t"
        ".reg .b32 size;\n\t"
        "abs.f16x2 size, %1;\n\t"
        "setp.gt.f16x2 low|high, size, %2;\n\t"
        "or.pred low, low, high;\n\t"
        "selp.b32 %0, 1, 0, low;\n\t"
        "}"
        : "=r"(is_large)
        : "r"(pair), "r"(limits));
    return is_large != 0;
}

static __device__ __forceinline__ uint32_t
ptx_mul_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

/* No instruction: `word` is there from here on, and nothing that depends on it moves above. */
static __device__ __forceinline__ void
ptx_pin(uint32_t *word)
{
    asm volatile("" : "+r"(*word));
}

/* No branch. */
static __device__ __forceinline__ void
ptx_store_shared_1_if(uint32_t address, uint32_t byte, bool is_on)
{
    asm volatile("{\n\t"
                 ".reg .pred on;\n\t"
                 "setp.ne.b32 on, %2, 0;\n\t"
                 "@on st.shared.b8 [%0], %1;\n\t"
                 "}"
                 :
                 : "r"(address), "r"(byte), "r"((int)is_on)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_clear_shared_16(uint32_t address)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" : : "r"(address), "r"(0) : "memory");
}

static __device__ __forceinline__ void
ptx_store_shared_16(uint32_t address, const uint32_t words[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

static __device__ __forceinline__ void
ptx_store_shared_4(uint32_t address, uint32_t word)
{
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(address), "r"(word) : "memory");
}

static __device__ __forceinline__ void
ptx_store_shared_1(uint32_t address, uint32_t byte)
{
    asm volatile("st.shared.b8 [%0], %1;" : : "r"(address), "r"(byte) : "memory");
}

#endif /* SMLA_CUDA_PTX_CUH */
