/* projection_avx512.c: the projection kernel on AVX-512. */
#define SMLA_PROJECTION      smla_projection_avx512
#define SMLA_PROJECTION_FP32 smla_projection_avx512
#define SMLA_SIMD_WIDTH      16

enum { VECTORS = 4 }; /* vectors of outputs per step, which has 4 * VECTORS accumulators */

#include "cpu/projection/projection_fp32.h"

#include "cpu/projection/projection_kernel.h"

#include "cpu/projection/absorb_kernel.h"
