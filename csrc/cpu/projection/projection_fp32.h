/* projection_fp32.h: the multiply unit of instruction sets without a bf16 product: fp32 FMA, one
 * value of the sum per step.
 *
 * A unit decides how values of x and w lie in scratch. Its input is words of two bf16, k and k + 1.
 */
#pragma once

#include "cpu/machine/fp32_values.h"
#include "cpu/machine/narrow.h"
#include "cpu/projection/projection.h"

enum { INNER_BLOCK = 64 }; /* values per chain: 32 KiB of fp32 for 128 outputs */

/* Stores 2 * WIDTH values of a token. */
SMLA_INLINE void
store_tokens(vuint words, unit_scalar *x)
{
    const vuint even = words << 16;
    const vuint odd = words & 0xFFFF0000u;
    *(vuint *)x = interleave_first(even, odd);
    *(vuint *)(x + WIDTH) = interleave_second(even, odd);
}

/* Converts 4 * WIDTH e4m3 to bf16, in order. */
SMLA_INLINE void
widen_e4m3(const uint8_t *bytes, uint32_t *out)
{
    store_bf16(load_e4m3(bytes, 1.0f), out);
}

/* Defined in absorb_kernel.h. The bf16 unit passes the call on to this one. */
static void absorb_block(const smla_absorb_params *params, smla_projection_block block,
                         void *scratch);
