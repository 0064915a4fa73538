/* attention_avx512.c: the attention kernel on AVX-512 without BF16 products. */
#define SMLA_ATTENTION      smla_attention_avx512
#define SMLA_ATTENTION_FP32 smla_attention_avx512
#define SMLA_SIMD_WIDTH     16

/* Rows times vectors is the number of accumulators; there are 32 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 4, VALUE_ROWS_1 = 16, VALUE_ROWS_2 = 8 };

#include "cpu/attention/unit_fp32.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/attention/attention_finish.h"
