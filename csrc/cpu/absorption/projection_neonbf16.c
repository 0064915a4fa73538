/* projection_neonbf16.c: the projection kernel on NEON with BF16. */
#define SMLA_SIMD_WIDTH 4

enum { VECTORS = 4 }; /* vectors of outputs per step, which has 4 * VECTORS accumulators */

#include "cpu/absorption/projection_bf16.h"

#include "cpu/absorption/projection_kernel.h"

static void
run_block(const smla_projection_params *params, smla_projection_block block)
{
    redo_refused(params, block, project_block(params, &block), &smla_projection_neon);
}

const smla_projection_isa smla_projection_neonbf16 = {.run_block = run_block};
