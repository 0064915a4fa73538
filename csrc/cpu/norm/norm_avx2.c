/* norm_avx2.c: norms on AVX2. */
#define SMLA_NORM       smla_norm_avx2
#define SMLA_SIMD_WIDTH 8

#include "cpu/norm/norm_kernel.h"
