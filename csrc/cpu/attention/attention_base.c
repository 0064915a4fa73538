/* attention_base.c: the attention kernel on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_ATTENTION      smla_attention_base
#define SMLA_ATTENTION_FP32 smla_attention_base
#define SMLA_SIMD_WIDTH     4

enum {
    /* Rows times vectors is the number of accumulators; SSE2 has 16 registers. */
    KEY_ROWS_1 = 8,   /* keys per step, if a group is one vector of heads */
    KEY_ROWS_2 = 4,   /* keys per step, if a group is two vectors of heads */
    VALUE_ROWS_1 = 8, /* dimensions per step, if a group is one vector */
    VALUE_ROWS_2 = 4, /* dimensions per step, if a group is two vectors */
};

#include "cpu/attention/unit_fp32.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/attention/attention_finish.h"
