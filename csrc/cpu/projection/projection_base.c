/* projection_base.c: the projection kernel on any machine: 128-bit vectors (SSE2, NEON). */
#define SMLA_PROJECTION      smla_projection_base
#define SMLA_PROJECTION_FP32 smla_projection_base
#define SMLA_SIMD_WIDTH      4

enum { VECTORS = 2 }; /* vectors of outputs per step, which has 4 * VECTORS accumulators */

#include "cpu/projection/projection_fp32.h"

#include "cpu/projection/projection_kernel.h"

#include "cpu/projection/absorb_kernel.h"
