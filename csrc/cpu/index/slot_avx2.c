/* slot_avx2.c: the slots of positions on AVX2. */
#define SMLA_SIMD_WIDTH 8
#define SMLA_SLOTS      smla_slots_avx2

#include "cpu/index/slot_kernel.h"
