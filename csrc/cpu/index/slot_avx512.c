/* slot_avx512.c: the slots of positions on AVX-512. */
#define SMLA_SIMD_WIDTH 16
#define SMLA_SLOTS      smla_slots_avx512

#include "cpu/index/slot_kernel.h"
