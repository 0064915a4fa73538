/* cache_avx512.c: the conversions on AVX-512. */
#define SMLA_CACHE      smla_cache_avx512
#define SMLA_SIMD_WIDTH 16

#include "cpu/cache/cache_kernel.h"
