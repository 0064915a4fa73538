/* cache_avx2.c: the conversions on AVX2 and FMA. */
#define SMLA_CACHE      smla_cache_avx2
#define SMLA_SIMD_WIDTH 8

#include "cpu/cache/cache_kernel.h"
