/* cache_avx512.c: the conversions on AVX-512. */
#define SMLA_SIMD_WIDTH 16

#include "cpu/cache/cache_kernel.h"

const smla_cache_isa smla_cache_avx512 = {
    .write_row = write_row,
    .read_row = read_row,
    .find_amax = find_amax,
    .quantize = quantize,
};
