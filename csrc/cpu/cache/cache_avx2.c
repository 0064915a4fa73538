/* cache_avx2.c: the conversions on AVX2 and FMA. */
#define SMLA_SIMD_WIDTH 8

#include "cpu/cache/cache_kernel.h"

const smla_cache_isa smla_cache_avx2 = {
    .write_row = write_row,
    .read_row = read_row,
    .find_amax = find_amax,
    .quantize = quantize,
};
