/* projection_avx512bf16.c: the projection kernel on AVX-512 BF16. */
#define SMLA_SIMD_WIDTH 16

enum { VECTORS = 4 }; /* of outputs per step; 4 times that is the number of accumulators */

#include "projection_bf16.h"

#include "projection_kernel.h"

/* Refused tokens are computed again on the fp32 unit. Whether one is depends on its own row and on
 * the weight, never on other tokens. */
static void
run_block(const smla_projection_params *params, smla_projection_block block)
{
    const uint64_t refused = project_block(params, &block);
    if (refused == 0) {
        return;
    }
    if (refused == UINT64_MAX) {
        smla_projection_avx512.run_block(params, block);
        return;
    }
    const int64_t first = block.token;
    const int num_tokens = block.num_tokens;
    block.num_tokens = 1;
    for (int t = 0; t < num_tokens; t++) {
        if (refused >> t & 1) {
            block.token = first + t;
            smla_projection_avx512.run_block(params, block);
        }
    }
}

const smla_projection_isa smla_projection_avx512bf16 = {.run_block = run_block};
