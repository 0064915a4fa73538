/* logit.cuh: one PTX instruction per function for logits and their sums. Masks are not C++, because
 * the compiler makes a choice between floats one between integers, and moves accumulators of wgmma
 * to other registers while products are still under way. */
#pragma once

#include <stdint.h>

/* Makes a logit -inf unless key < end. */
static __device__ __forceinline__ void
ptx_keep_below(int key, int end, float *logit)
{
    asm("{\n\t"
        ".reg .pred hidden;\n\t"
        "setp.ge.s32 hidden, %1, %2;\n\t"
        "@hidden mov.f32 %0, 0fFF800000;\n\t"
        "}"
        : "+f"(*logit)
        : "r"(key), "r"(end));
}

static __device__ __forceinline__ void
ptx_hide(float *logit)
{
    asm("mov.f32 %0, 0fFF800000;" : "=f"(*logit));
}

/* The logarithm to base 2, off by 2^-22.6 for x between 1/2 and 2. */
static __device__ __forceinline__ float
ptx_log2(float x)
{
    float log2;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(x));
    return log2;
}
