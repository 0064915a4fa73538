/* varlen_neonbf16.c: the kernel of varlen_attention on NEON with BF16. */
#define SMLA_VARLEN      smla_varlen_neonbf16
#define SMLA_VARLEN_FP32 smla_varlen_neon
#define SMLA_SIMD_WIDTH  4

/* Rows times vectors is the number of accumulators; there are 32 registers. */
enum { KEY_ROWS_1 = 16, KEY_ROWS_2 = 8, VALUE_ROWS_1 = 16, VALUE_ROWS_2 = 8 };

#include "cpu/varlen/rows_bf16.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/varlen/varlen_kernel.h"
