/* logits_avx512.c: the scores of the indexer on AVX-512. */
#define SMLA_LOGITS     smla_logits_avx512
#define SMLA_SIMD_WIDTH 16

#include "cpu/indexer/logits_kernel.h"
