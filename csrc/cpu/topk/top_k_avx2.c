/* top_k_avx2.c: the keys of a row on AVX2. */
#define SMLA_SELECT smla_select_avx2

#include "cpu/topk/top_k_kernel.h"
