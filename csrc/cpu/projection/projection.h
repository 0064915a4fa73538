/* projection.h: what the projections' files share. There is one scheduler (projection.c) and one
 * kernel (projection_kernel.c), which is compiled into a smla_projection_isa per instruction set.
 */
#pragma once

#include "core/backend.h"
#include "core/params_projection.h"

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
    int num_tokens; /* 1...SMLA_PROJECTION_TOKENS; absorb.c has blocks of its own size */
} smla_projection_block;

static inline int64_t
smla_count_blocks(int64_t size, int64_t block)
{
    return (size + block - 1) / block;
}

/* How tokens and outputs are cut into blocks. A task is one block of a head. */
typedef struct smla_projection_cut {
    int64_t num_tokens;
    int64_t num_outer;
    int64_t block_tokens;
} smla_projection_cut;

static inline int64_t
smla_count_projection_tasks(const smla_projection_cut *cut, int64_t num_heads)
{
    return num_heads * smla_count_blocks(cut->num_tokens, cut->block_tokens) *
           smla_count_blocks(cut->num_outer, SMLA_PROJECTION_OUTER);
}

/* Blocks of tokens that share outputs follow each other. */
static inline smla_projection_block
smla_find_projection_block(const smla_projection_cut *cut, int64_t task)
{
    const int64_t token_blocks = smla_count_blocks(cut->num_tokens, cut->block_tokens);
    const int64_t outer_blocks = smla_count_blocks(cut->num_outer, SMLA_PROJECTION_OUTER);
    const int64_t token = task % token_blocks * cut->block_tokens;
    const int64_t outer = task / token_blocks % outer_blocks * SMLA_PROJECTION_OUTER;
    const int64_t tokens_left = cut->num_tokens - token, outer_left = cut->num_outer - outer;
    return (smla_projection_block){
        .head = task / token_blocks / outer_blocks,
        .outer = outer,
        .token = token,
        .num_outer = (int)(outer_left < SMLA_PROJECTION_OUTER ? outer_left : SMLA_PROJECTION_OUTER),
        .num_tokens = (int)(tokens_left < cut->block_tokens ? tokens_left : cut->block_tokens),
    };
}

enum {
    SMLA_PROJECTION_PANEL_BYTES = 32 << 10,                /* an unpacked piece of the weight */
    SMLA_PROJECTION_SUM_BYTES = 4 * SMLA_PROJECTION_OUTER, /* the sums of a token */
};

/* The scratch of a block of tokens. */
static inline int64_t
smla_projection_scratch_bytes(int64_t num_tokens)
{
    const int64_t block = num_tokens < SMLA_PROJECTION_TOKENS ? num_tokens : SMLA_PROJECTION_TOKENS;
    return SMLA_PROJECTION_PANEL_BYTES + block * SMLA_PROJECTION_SUM_BYTES;
}

/* The kernel of one instruction set. */
typedef struct smla_projection_isa {
    /* `scratch` is aligned to 64 bytes. */
    void (*run_block)(const smla_projection_params *params, smla_projection_block block,
                      void *scratch);
    /* The same with subnormal numbers kept. Units of bf16 cannot, and call an fp32 unit's. */
    void (*run_block_exactly)(const smla_projection_params *params, smla_projection_block block,
                              void *scratch);
    /* A block of the product of two weights, whose rows are the block's tokens; absorb.c. Units of
     * bf16 call an fp32 unit's. */
    void (*absorb_block)(const smla_absorb_params *params, smla_projection_block block,
                         void *scratch);
} smla_projection_isa;

/* Whether dimension n of the weight is contiguous (v_up_proj), or n is one value and k is not; else
 * k is (k_up_proj), or neither (kv_up_proj alone). */
static inline bool
smla_outer_is_contiguous(const smla_projection_params *params)
{
    return params->outer_dim > 1 ? params->w_stride_outer == 1 : params->w_stride_inner != 1;
}
