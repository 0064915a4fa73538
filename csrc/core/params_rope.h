/* params_rope.h: the positions of tokens and the angles that RoPE rotates by. */
#pragma once

#include "core/params.h"

/* The positions of tokens, and the table of their angles. */
typedef struct smla_rope {
    const void *positions; /* [>= T] */
    int64_t positions_stride;
    bool positions_are_int64;
    int64_t max_pos;
    const float *cos_sin; /* [max_pos, 64]: 32 cosines, then 32 sines */
    int64_t cos_sin_stride_pos;
} smla_rope;
