/* logits_base.c: the scores of the indexer on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_LOGITS     smla_logits_base
#define SMLA_SIMD_WIDTH 4

#include "cpu/indexer/logits_kernel.h"
