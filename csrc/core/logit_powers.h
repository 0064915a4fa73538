/* logit_powers.h: powers of two that the indexer takes out of queries, weights and keys, and with
 * which it multiplies logits again. Scales, and weights, may be so large or small that scores leave
 * fp32 where logits do not.
 *
 * FP4 queries whose scales are above 2^19 or below 2^-74 are shifted, and the power becomes a part
 * of their head's weight. If a token's largest weight is 2^60 or more, or below 2^-64, all of its
 * weights are divided by a power of 2^64. Keys whose scales are below 2^-74 are 2^64 times as
 * large, and keys with a scale above 2^90 so many times smaller.
 */
#pragma once

#include <limits.h>

#include "core/numeric.h"

enum {
    SMLA_LOGIT_SHIFT = 64,
    SMLA_SMALL_SCALE = -74,
    SMLA_LARGE_KEY = 90,
    SMLA_LARGE_QUERY = 19,
    SMLA_LARGE_WEIGHT = 60,
    SMLA_SMALL_WEIGHT = -64,
};

/* UE8M0 scales times 2^power. NaN stays NaN, and what would be smaller than 2^-127 is that. */
SMLA_HOST_DEVICE static inline void
smla_shift_ue8m0(const uint8_t *scales, int count, int power, uint8_t *shifted)
{
    for (int i = 0; i < count; i++) {
        const int byte = scales[i] + power;
        shifted[i] = scales[i] == 255 ? 255 : (uint8_t)(byte < 0 ? 0 : byte);
    }
}

/* The exponent of the largest of some UE8M0 scales, without NaN. */
SMLA_HOST_DEVICE static inline int
smla_largest_exponent(const uint8_t *scales, int count)
{
    int largest = 0;
    for (int i = 0; i < count; i++) {
        largest = scales[i] > largest && scales[i] != 255 ? scales[i] : largest;
    }
    return largest - 127;
}

/* The power that a key is multiplied with, and its logits divided by, given the exponent of its
 * largest scale. */
SMLA_HOST_DEVICE static inline int
smla_key_power(int exponent)
{
    return exponent < SMLA_SMALL_SCALE ? SMLA_LOGIT_SHIFT
           : exponent > SMLA_LARGE_KEY ? -SMLA_LOGIT_SHIFT
                                       : 0;
}

/* The power that goes from a head's FP4 query to its weight. */
SMLA_HOST_DEVICE static inline int
smla_query_power(const uint8_t *scales, int count)
{
    const int exponent = smla_largest_exponent(scales, count);
    return exponent > SMLA_LARGE_QUERY   ? exponent - SMLA_LARGE_QUERY
           : exponent < SMLA_SMALL_SCALE ? -SMLA_LOGIT_SHIFT
                                         : 0;
}

/* The exponent of a weight with the power of its query. Zeros, infinities and NaN need no power,
 * and have the least int. */
SMLA_HOST_DEVICE static inline int
smla_weight_exponent(float weight, int query_power)
{
    const int bits = (int)(smla_float_bits(weight) >> 23 & 255u);
    return bits == 0 || bits == 255 ? INT_MIN : bits - 127 + query_power;
}

/* The power that all weights of a token are divided by, given the largest smla_weight_exponent. */
SMLA_HOST_DEVICE static inline int
smla_weight_power(int largest)
{
    if (largest >= SMLA_LARGE_WEIGHT) {
        return ((largest - SMLA_LARGE_WEIGHT) / SMLA_LOGIT_SHIFT + 1) * SMLA_LOGIT_SHIFT;
    }
    if (largest == INT_MIN || largest >= SMLA_SMALL_WEIGHT) {
        return 0;
    }
    return -((SMLA_SMALL_WEIGHT - largest - 1) / SMLA_LOGIT_SHIFT + 1) * SMLA_LOGIT_SHIFT;
}
