/* ptx_sm90.cuh: one PTX instruction of sm_90 per function. On an older GPU, functions for the order
 * of grids do nothing. */
#pragma once

#include "cuda/ptx/ptx.cuh"

/* Waits until earlier grids of the stream are done and what they wrote is visible, because
 * smla_launch may start a grid before that. It is no instruction where no grid starts early. */
static __device__ __forceinline__ void
ptx_wait_for_grids(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

/* Lets the next grid of the stream start early, once every CTA has called this or is done. It makes
 * no memory visible: the next grid waits for the end of this one. */
static __device__ __forceinline__ void
ptx_let_next_grid_start(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
#endif
}

/* Brings a line to L2 if `is_on`. The thread reads nothing, so others may still write the line. */
static __device__ __forceinline__ void
ptx_prefetch_l2(const void *from, bool is_on)
{
    if (is_on) {
        asm volatile("prefetch.global.L2 [%0];" : : "l"(from));
    }
}

/* Sets the registers per thread for all warps of a warpgroup; the CTA's total stays the same. */
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

/* Initialises an mbarrier in shared memory. A phase ends when `arrivals` threads have arrived and
 * all announced bytes have been written. */
static __device__ __forceinline__ void
ptx_mbarrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" : : "r"(barrier), "r"(arrivals) : "memory");
}

/* Ends a barrier that nobody uses any more. Its memory may be used again only after this, because
 * an SM keeps the state of barriers elsewhere and may write it back when contexts change. */
static __device__ __forceinline__ void
ptx_mbarrier_end(uint32_t barrier)
{
    asm volatile("mbarrier.inval.shared.b64 [%0];" : : "r"(barrier) : "memory");
}

/* Makes initialised barriers visible to bulk copies. */
static __device__ __forceinline__ void
ptx_fence_mbarrier_init(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

/* Arrives if `is_on`, without a branch. Waiting threads then see what the thread wrote before. */
static __device__ __forceinline__ void
ptx_mbarrier_arrive(uint32_t barrier, bool is_on)
{
    asm volatile(PTX_IF("%1", "mbarrier.arrive.shared.b64 _, [%0]")
                 :
                 : "r"(barrier), "r"((int)is_on)
                 : "memory");
}

/* ptx_mbarrier_arrive as `count` of the arrivals. */
static __device__ __forceinline__ void
ptx_mbarrier_arrive_times(uint32_t barrier, uint32_t count, bool is_on)
{
    asm volatile(PTX_IF("%2", "mbarrier.arrive.shared.b64 _, [%0], %1")
                 :
                 : "r"(barrier), "r"(count), "r"((int)is_on)
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

/* Arrives, as one of the `arrivals`, when all earlier cp.async of this thread have written their
 * bytes. */
static __device__ __forceinline__ void
ptx_mbarrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" : : "r"(barrier) : "memory");
}

/* Waits until the phase of this parity has ended. On a new barrier, parity 1 counts as ended. */
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

/* True in one thread of the warp, the same one every time. */
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

/* Copies from global to shared memory without registers or threads; both addresses are multiples of
 * 16. */
static __device__ __forceinline__ void
ptx_bulk_copy(uint32_t to_shared, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :
                 : "r"(to_shared), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* ptx_bulk_copy to the same address in every CTA of `ctas`, which has a bit per CTA of the cluster.
 * The copy completes on the barrier of each of these CTAs. */
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

/* The index of the CTA in its cluster. */
static __device__ __forceinline__ uint32_t
ptx_cluster_rank(void)
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Arrives at a barrier of all threads of the cluster; ptx_cluster_wait waits there. Whole warps
 * call both. This arrival makes no writes visible but initialised mbarriers, after
 * ptx_fence_mbarrier_init. To make all writes visible takes 250 cycles more. */
static __device__ __forceinline__ void
ptx_cluster_arrive(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

/* ptx_cluster_arrive after all earlier accesses of the thread. It is needed where CTAs read each
 * other's memory before the barrier and may end after it: with a relaxed arrival a load could still
 * be under way, and would fail. */
static __device__ __forceinline__ void
ptx_cluster_arrive_release(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

static __device__ __forceinline__ void
ptx_cluster_wait(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

/* Synchronises all threads of the cluster, by whole warps. Each sees what the others wrote
 * before. */
static __device__ __forceinline__ void
ptx_cluster_sync(void)
{
    ptx_cluster_arrive_release();
    ptx_cluster_wait();
}

/* The address, for the cluster, of the shared memory at `address` in CTA `rank`. */
PTX_BINARY(ptx_cluster_address, "mapa.shared::cluster.u32", r, r)

/* Load from shared memory of any CTA of the cluster. */
static __device__ __forceinline__ uint32_t
ptx_load_cluster_4(uint32_t address)
{
    uint32_t word;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}

static __device__ __forceinline__ void
ptx_load_cluster_8(uint32_t address, uint32_t words[2])
{
    asm volatile("ld.shared::cluster.v2.b32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
}

/* Stores to shared memory of any CTA of the cluster, and completes the bytes on an mbarrier there,
 * which counts them like those of a bulk copy. No fence is needed. */
static __device__ __forceinline__ void
ptx_send_4(uint32_t address, uint32_t word, uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :
                 : "r"(address), "r"(word), "r"(barrier)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_send_16(uint32_t address, const uint32_t words[4], uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]),
                   "r"(barrier)
                 : "memory");
}

/* Adds 1 to a counter in shared memory. */
static __device__ __forceinline__ void
ptx_count_shared(uint32_t counter)
{
    asm volatile("red.shared.add.u32 [%0], 1;" : : "r"(counter) : "memory");
}

/* Makes what this thread wrote to shared memory visible to wgmma and to later bulk copies. */
static __device__ __forceinline__ void
ptx_fence_async_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

/* Stores four 8 x 8 matrices of 16-bit elements in the layout that ldmatrix reads. */
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

/* ptx_load_shared_16 if `is_on`, else zeros, without a branch. */
static __device__ __forceinline__ void
ptx_load_shared_16_if(uint32_t address, bool is_on, uint32_t words[4])
{
    words[0] = words[1] = words[2] = words[3] = 0;
    asm volatile(PTX_IF("%5", "ld.shared.v4.b32 {%0, %1, %2, %3}, [%4]")
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

static __device__ __forceinline__ uint32_t
ptx_load_shared_2(uint32_t address)
{
    uint32_t word;
    asm volatile("{\n\t"
                 ".reg .b16 half;\n\t"
                 "ld.shared.b16 half, [%1];\n\t"
                 "cvt.u32.u16 %0, half;\n\t"
                 "}"
                 : "=r"(word)
                 : "r"(address));
    return word;
}

static __device__ __forceinline__ uint32_t
ptx_load_shared_1(uint32_t address)
{
    uint32_t byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address));
    return byte;
}

/* Converts four e4m3 to f16 exactly: bytes 0, 1 to `low`, bytes 2, 3 to `high`.
 * smla_e4m3x4_to_halves cuts the word by extra instructions, which cost the FP8 kernel 3 %. */
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

PTX_BINARY(ptx_mul_f16x2, "mul.rn.f16x2", r, r)

/* Doubles the low half of a pair, and the high half, for ptx_mul_f16x2. ptxas makes this a modifier
 * of the multiplication, where a byte permutation would be an instruction. */
static __device__ __forceinline__ void
ptx_double_halves(uint32_t pair, uint32_t *low, uint32_t *high)
{
    asm("{\n\t"
        ".reg .b16 low, high;\n\t"
        "mov.b32 {low, high}, %2;\n\t"
        "mov.b32 %0, {low, low};\n\t"
        "mov.b32 %1, {high, high};\n\t"
        "}"
        : "=r"(*low), "=r"(*high)
        : "r"(pair));
}

/* Whether the absolute value of either f16 is above its limit, which is never true of a NaN. */
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

PTX_BINARY(ptx_mul_bf16x2, "mul.rn.bf16x2", r, r)

/* Pins a value without an instruction: `word` is computed by here, and nothing that depends on it
 * is moved further up. */
static __device__ __forceinline__ void
ptx_pin(uint32_t *word)
{
    asm volatile("" : "+r"(*word));
}

/* Stores a byte if `is_on`, without a branch. */
static __device__ __forceinline__ void
ptx_store_shared_1_if(uint32_t address, uint32_t byte, bool is_on)
{
    asm volatile(PTX_IF("%2", "st.shared.b8 [%0], %1")
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

/* Stores the halves of a pair 4 bytes apart. */
static __device__ __forceinline__ void
ptx_store_shared_halves(uint32_t address, uint32_t pair)
{
    asm volatile("{\n\t"
                 ".reg .b16 low, high;\n\t"
                 "mov.b32 {low, high}, %1;\n\t"
                 "st.shared.b16 [%0], low;\n\t"
                 "st.shared.b16 [%0 + 4], high;\n\t"
                 "}"
                 :
                 : "r"(address), "r"(pair)
                 : "memory");
}

static __device__ __forceinline__ void
ptx_store_shared_4(uint32_t address, uint32_t word)
{
    asm volatile("st.shared.b32 [%0], %1;" : : "r"(address), "r"(word) : "memory");
}

static __device__ __forceinline__ void
ptx_store_shared_2(uint32_t address, uint16_t half)
{
    asm volatile("st.shared.b16 [%0], %1;" : : "r"(address), "h"(half) : "memory");
}

static __device__ __forceinline__ void
ptx_store_shared_1(uint32_t address, uint32_t byte)
{
    asm volatile("st.shared.b8 [%0], %1;" : : "r"(address), "r"(byte) : "memory");
}
