/* cache_base.c: the conversions on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_SIMD_WIDTH 4

#include "cpu/cache/cache_kernel.h"

const smla_cache_isa smla_cache_base = {
    .write_row = write_row,
    .read_row = read_row,
    .find_amax = find_amax,
    .quantize = quantize,
};
