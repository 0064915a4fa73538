/* projection_bf16.h: the multiply unit of AVX-512 BF16 and of NEON with BF16: two values of the sum
 * per step.
 *
 * Both machines take subnormal inputs as zero and flush subnormal results to zero. Neither happens
 * with values that this unit accepts. A bf16 of at least 2^-56 is a multiple of 2^-63 (8
 * significant bits), so all products and sums, rounded or not, are multiples of 2^-126, the
 * smallest normal number. Zeros are accepted too. A token's row or a block of the weight that holds
 * any other value below 2^-56 is refused, and is computed on the fp32 unit.
 */
#pragma once

#include "cpu/machine/bf16_pairs.h"

enum { INNER_BLOCK = 128 }; /* values per chain: 32 KiB of bf16 for 128 outputs */

/* Stores 2 * WIDTH values of a token. */
SMLA_INLINE void
store_tokens(vuint words, unit_scalar *x)
{
    *(vuint *)x = words;
}

SMLA_INLINE bool
is_exact(vuint smallest)
{
    return !any_half_below(smallest, 0x2380 - 1); /* 2^-56 */
}
