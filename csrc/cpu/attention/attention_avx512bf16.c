/* attention_avx512bf16.c: the attention kernel on AVX-512 BF16 and VBMI. */
#define SMLA_SIMD_WIDTH 16

enum {
    /* Rows times vectors is the number of accumulators; there are 32 registers. */
    KEY_ROWS_1 = 8,    /* keys per step, if a group is one vector of heads */
    KEY_ROWS_2 = 8,    /* keys per step, if a group is two vectors of heads */
    VALUE_ROWS_1 = 16, /* dimensions per step, if a group is one vector */
    VALUE_ROWS_2 = 8,  /* dimensions per step, if a group is two vectors */
};

#include "cpu/attention/unit_bf16.h"

#include "cpu/attention/attention_lanes.h"

#include "cpu/attention/attention_finish.h"
#include "cpu/attention/attention_kernel.h"

/* The fp32 kernel has the same lanes and groups, so it runs the parts that are refused here. */
static void
run_part(const smla_attention_params *params, int64_t token, int split, uint8_t *scratch,
         smla_attention_state state)
{
    if (!try_part(params, token, split, scratch, state)) {
        smla_attention_avx512.run_part(params, token, split, scratch, state);
    }
}

const smla_attention_isa smla_attention_avx512bf16 = {
    .scratch_bytes = scratch_bytes,
    .run_part = run_part,
    .fold = fold,
    .finish = finish,
};
