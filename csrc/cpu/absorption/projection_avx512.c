/* projection_avx512.c: the projection kernel on AVX-512. */
#define SMLA_SIMD_WIDTH 16

enum { VECTORS = 4 }; /* vectors of outputs per step, which has 4 * VECTORS accumulators */

#include "cpu/absorption/projection_fp32.h"

#include "cpu/absorption/projection_kernel.h"

static void
run_block(const smla_projection_params *params, smla_projection_block block)
{
    (void)project_block(params, &block); /* the fp32 unit refuses no token */
}

const smla_projection_isa smla_projection_avx512 = {.run_block = run_block};
