/* score_tiles.h: the kernels of logits.c. One text, logits_kernel.c, is compiled once per
 * instruction set into a smla_logits_isa.
 */
#pragma once

#include "core/backend.h"

enum {
    SMLA_LOGITS_KEYS = 64, /* keys of a tile */
    SMLA_LOGITS_HEADS = 4, /* heads that are scored together */
};

typedef struct smla_logits_isa {
    /* Keys [SMLA_LOGITS_KEYS][128] -> panel [128][SMLA_LOGITS_KEYS]. Both are aligned to 64
     * bytes. */
    void (*pack_keys)(const float *keys, float *panel);
    /* sums[n] += sum_h weights[h] relu(q[h] . key n) for `count` heads, at most SMLA_LOGITS_HEADS.
     * q is [count][128], and `sums` is aligned to 64 bytes. */
    void (*add_heads)(const float *q, const float *weights, int count, const float *panel,
                      float *sums);
} smla_logits_isa;
