/* cache_base.c: the conversions on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_CACHE      smla_cache_base
#define SMLA_SIMD_WIDTH 4

#include "cpu/cache/cache_kernel.h"
