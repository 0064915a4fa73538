/* top_k_avx512.c: the keys of a row on AVX-512. */
#define SMLA_SELECT smla_select_avx512

#include "cpu/topk/top_k_kernel.h"
