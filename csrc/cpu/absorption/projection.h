/* projection.h: what the projections' files share. There is one scheduler (projection.c) and one
 * kernel (projection_kernel.h), which is compiled into a smla_projection_isa per instruction set.
 */
#pragma once

#include "core/backend.h"

enum {
    SMLA_PROJECTION_TOKENS = 64, /* tokens that share one unpacking of the weight */
    /* Outputs of one head. A task then reads 256 bytes of a weight row at a time; with 128 bytes
     * the v_up_proj of a decode is a fifth slower. */
    SMLA_PROJECTION_OUTER = 128,
};

/* A task: a block of outputs of one head, for some tokens. */
typedef struct smla_projection_block {
    int64_t head;
    int64_t outer;  /* first output */
    int64_t token;  /* first token */
    int num_outer;  /* 1...SMLA_PROJECTION_OUTER */
    int num_tokens; /* 1...SMLA_PROJECTION_TOKENS */
} smla_projection_block;

/* The kernel of one instruction set. */
typedef struct smla_projection_isa {
    void (*run_block)(const smla_projection_params *params, smla_projection_block block);
} smla_projection_isa;

extern const smla_projection_isa smla_projection_base;
#if defined(SMLA_HAVE_X86_ISA)
extern const smla_projection_isa smla_projection_avx2;
extern const smla_projection_isa smla_projection_avx512;
extern const smla_projection_isa smla_projection_avx512bf16;
#elif defined(SMLA_HAVE_ARM_ISA)
extern const smla_projection_isa smla_projection_neon;
extern const smla_projection_isa smla_projection_neonbf16;
#endif

/* Whether dimension n of the weight is contiguous (v_up_proj); else k is (k_up_proj). */
static inline bool
smla_outer_is_contiguous(const smla_projection_params *params)
{
    return params->w_stride_outer == 1 || params->outer_dim <= 1;
}
