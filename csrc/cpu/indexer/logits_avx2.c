/* logits_avx2.c: the scores of the indexer on AVX2. */
#define SMLA_LOGITS     smla_logits_avx2
#define SMLA_SIMD_WIDTH 8

#include "cpu/indexer/logits_kernel.h"
