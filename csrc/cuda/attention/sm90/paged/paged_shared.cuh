#pragma once
#include "cuda/attention/partials/softmax.cuh"
#include "cuda/attention/table/kernels.h"
#include "cuda/ptx/logit.cuh"
#include "cuda/ptx/wgmma.cuh"
extern "C" smla_attention_launcher smla_attend_sm90_paged;
/* ptx_mbarrier_arrive as `count` of the arrivals. */
static __device__ __forceinline__ void
ptx_mbarrier_arrive_times(uint32_t barrier, uint32_t count, bool is_on)
{
    asm volatile(PTX_IF("%2", "mbarrier.arrive.shared.b64 _, [%0], %1")
                 :
                 : "r"(barrier), "r"(count), "r"((int)is_on)
                 : "memory");
}

/* WGMMA of fp16 or bf16, where A and B are both in shared memory, in rows of 16 contiguous values. */
#define WGMMA_16_TILES(shape, count, operands, sum)                                           \
    if constexpr (IS_HALF) {                                                                  \
        WGMMA(shape ".f32.f16.f16", count, d, 0, operands ", sum, 1, 1, 0, 0", sum, "l"(a),   \
              "l"(b), "r"((int)is_sum));                                                      \
    } else {                                                                                  \
        WGMMA(shape ".f32.bf16.bf16", count, d, 0, operands ", sum, 1, 1, 0, 0", sum, "l"(a), \
              "l"(b), "r"((int)is_sum));                                                      \
    }

/* D[64][2 COUNT] += A[64][16] * B[16][2 COUNT], or D = A * B unless `is_sum`. */
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

template <bool IS_HALF, int COUNT>
static __device__ __forceinline__ void
wgmma_16_values(float (&d)[COUNT], const uint32_t *a, uint64_t b)
{
    constexpr bool B_ROWS_FIRST = true, is_sum = true;
    if constexpr (COUNT == 128) {
        WGMMA_16("m64n256k16", 128, "{%128, %129, %130, %131}, %132, sum, 1, 1, %134", "%133")
    } else {
        wgmma_16<IS_HALF, true>(d, a, b, true);
    }
}
