/* projection_bf16.h: the multiply unit of AVX-512 BF16 and of NEON with BF16: two values of the sum
 * per step.
 *
 * Both machines take subnormal inputs as zero and flush subnormal results to zero, as SMLA_FP_FLUSH
 * makes the fp32 unit do.
 */
#pragma once

#include "cpu/machine/bf16_pairs.h"
#include "cpu/projection/projection.h"

enum { INNER_BLOCK = 128 }; /* values per chain: 32 KiB of bf16 for 128 outputs */

/* Stores 2 * WIDTH values of a token. */
SMLA_INLINE void
store_tokens(vuint words, unit_scalar *x)
{
    *(vuint *)x = words;
}

/* Weights are multiplied as fp32. */
static void
absorb_block(const smla_absorb_params *params, smla_projection_block block, void *scratch)
{
    SMLA_OF_FP32_ISA(smla_projection).absorb_block(params, block, scratch);
}
