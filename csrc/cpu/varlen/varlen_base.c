/* varlen_base.c: the kernel of varlen_attention on any machine. */
#define SMLA_VARLEN      smla_varlen_base
#define SMLA_VARLEN_FP32 smla_varlen_base
#define SMLA_SIMD_WIDTH  4

/* Rows times vectors is the number of accumulators; SSE2 has 16 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 4, VALUE_ROWS_1 = 8, VALUE_ROWS_2 = 4 };

#include "cpu/varlen/rows_fp32.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/varlen/varlen_kernel.h"
