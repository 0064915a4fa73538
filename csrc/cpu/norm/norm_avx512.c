/* norm_avx512.c: norms on AVX-512. */
#define SMLA_NORM       smla_norm_avx512
#define SMLA_SIMD_WIDTH 16

#include "cpu/norm/norm_kernel.h"
