/* cache_avx512.c: the conversions of cache_avx2.c, with e2m1 rounded by instructions of AVX-512. */
#define SMLA_CACHE      smla_cache_avx512
#define SMLA_SIMD_WIDTH 8

#include "cpu/cache/cache_kernel.h"
