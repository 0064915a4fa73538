/* widen_e4m3.cuh: e4m3 to fp32. */
#pragma once

#include <stdint.h>

/* Converts the lower two e4m3 of a word to fp32 exactly. */
static __device__ __forceinline__ void
ptx_cvt_f32x2_e4m3x2(uint32_t bytes, float values[2])
{
    asm("{\n\t"
        ".reg .b16 first, second;\n\t"
        ".reg .b32 halves;\n\t"
        "mov.b32 {first, second}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 halves, first;\n\t"
        "mov.b32 {first, second}, halves;\n\t"
        "cvt.f32.f16 %0, first;\n\t"
        "cvt.f32.f16 %1, second;\n\t"
        "}"
        : "=f"(values[0]), "=f"(values[1])
        : "r"(bytes));
}
