/* rotate_base.c: RoPE on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_ROTATE     smla_rotate_base
#define SMLA_SIMD_WIDTH 4

#include "cpu/rope/rotate_kernel.h"
