/* overlap.h: finds whether two arrays, or two elements of one array, share a byte.
 *
 * The work depends on the number of dimensions, never on the sizes. The answer is exact for views
 * of one buffer that slices, splits, transposes, repeats and reversals make, whatever the two
 * views' dtypes and steps. Strides without such an order may leave it open.
 */
#pragma once

#include "core/dltensor.h"

typedef enum smla_overlap {
    SMLA_OVERLAP_NONE = 0,
    SMLA_OVERLAP_SOME = 1,
    SMLA_OVERLAP_UNKNOWN = 2, /* the search was given up, or the sizes exceed memory */
} smla_overlap;

/* Whether two arrays share a byte. */
smla_overlap smla_find_overlap(const DLTensor *a, const DLTensor *b);

/* Whether two different index tuples name the same element. The array must fit in memory. */
smla_overlap smla_find_own_overlap(const DLTensor *tensor);

/* What an error says that it got: `some`, or that nobody knows. */
static inline const char *
smla_describe_overlap(smla_overlap found, const char *some)
{
    return found == SMLA_OVERLAP_SOME ? some : "strides by which they cannot be told apart";
}
