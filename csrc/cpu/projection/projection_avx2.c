/* projection_avx2.c: the projection kernel on AVX2 and FMA. */
#define SMLA_PROJECTION      smla_projection_avx2
#define SMLA_PROJECTION_FP32 smla_projection_avx2
#define SMLA_SIMD_WIDTH      8

enum { VECTORS = 2 }; /* vectors of outputs per step, which has 4 * VECTORS accumulators */

#include "cpu/projection/projection_fp32.h"

#include "cpu/projection/projection_kernel.h"

#include "cpu/projection/absorb_kernel.h"
