/* slot_base.c: the slots of positions on any machine. */
#define SMLA_SIMD_WIDTH 4
#define SMLA_SLOTS      smla_slots_base

#include "cpu/index/slot_kernel.h"
