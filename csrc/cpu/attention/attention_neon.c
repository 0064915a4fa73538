/* attention_neon.c: the attention kernel on NEON without BF16 products. */
#define SMLA_SIMD_WIDTH 4

enum {
    /* Rows times vectors is the number of accumulators; there are 32 registers. */
    KEY_ROWS_1 = 16,   /* keys per step, if a group is one vector of heads */
    KEY_ROWS_2 = 8,    /* keys per step, if a group is two vectors of heads */
    VALUE_ROWS_1 = 16, /* dimensions per step, if a group is one vector */
    VALUE_ROWS_2 = 8,  /* dimensions per step, if a group is two vectors */
};

#include "cpu/attention/unit_fp32.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/attention/attention_finish.h"
#include "cpu/attention/attention_kernel.h"

static void
run_part(const smla_attention_params *params, int64_t token, int split, uint8_t *scratch,
         smla_attention_state state)
{
    (void)try_part(params, token, split, scratch, state); /* the fp32 unit refuses no part */
}

const smla_attention_isa smla_attention_neon = {
    .scratch_bytes = scratch_bytes,
    .run_part = run_part,
    .fold = fold,
    .finish = finish,
};
