/* attention_amx.c: the attention kernel on AMX-BF16, and on AVX-512 BF16 for all but products. */
#define SMLA_SIMD_WIDTH 16

enum {
    /* A tile has 16 rows, and a tile of heads is multiplied with two tiles of rows. */
    KEY_ROWS_1 = 32,   /* keys per step, if a group is one vector of heads */
    KEY_ROWS_2 = 32,   /* keys per step, if a group is two vectors of heads */
    VALUE_ROWS_1 = 32, /* dimensions per step, if a group is one vector */
    VALUE_ROWS_2 = 32, /* dimensions per step, if a group is two vectors */
};

#include "cpu/attention/unit_bf16.h"

#include "cpu/attention/attention_tiles.h"

#include "cpu/attention/attention_finish.h"
#include "cpu/attention/attention_kernel.h"

/* The fp32 kernel has the same lanes and groups, so it runs the parts that are refused here. */
static void
run_part(const smla_attention_params *params, int64_t token, int split, uint8_t *scratch,
         smla_attention_state state)
{
    configure_tiles();
    const bool is_exact = try_part(params, token, split, scratch, state);
    release_tiles();
    if (!is_exact) {
        smla_attention_avx512.run_part(params, token, split, scratch, state);
    }
}

const smla_attention_isa smla_attention_amx = {
    .scratch_bytes = scratch_bytes,
    .run_part = run_part,
    .fold = fold,
    .finish = finish,
};
