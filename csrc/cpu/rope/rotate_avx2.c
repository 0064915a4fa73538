/* rotate_avx2.c: RoPE on AVX2. */
#define SMLA_ROTATE     smla_rotate_avx2
#define SMLA_SIMD_WIDTH 8

#include "cpu/rope/rotate_kernel.h"
