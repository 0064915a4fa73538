/* norm_base.c: norms on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_NORM       smla_norm_base
#define SMLA_SIMD_WIDTH 4

#include "cpu/norm/norm_kernel.h"
