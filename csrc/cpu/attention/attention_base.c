/* attention_base.c: the attention kernel on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_ATTENTION      smla_attention_base
#define SMLA_ATTENTION_FP32 smla_attention_base
#define SMLA_SIMD_WIDTH     4

/* Rows times vectors is the number of accumulators; SSE2 has 16 registers. */
enum { KEY_ROWS_1 = 8, KEY_ROWS_2 = 4, VALUE_ROWS_1 = 8, VALUE_ROWS_2 = 4 };

#include "cpu/attention/unit_fp32.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/attention/attention_finish.h"
