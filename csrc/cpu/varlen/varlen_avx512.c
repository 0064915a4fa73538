/* varlen_avx512.c: the kernel of varlen_attention on AVX-512. */
#define SMLA_VARLEN      smla_varlen_avx512
#define SMLA_VARLEN_FP32 smla_varlen_avx512
#define SMLA_SIMD_WIDTH  16

/* Rows times vectors is the number of accumulators; there are 32 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 4, VALUE_ROWS_1 = 16, VALUE_ROWS_2 = 8 };

#include "cpu/varlen/rows_fp32.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/varlen/varlen_kernel.h"
