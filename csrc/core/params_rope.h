/* params_rope.h: the params of RoPE: positions, angles, what rotates queries and keys and writes
 * the keys into the cache, and what rotates back and quantizes. */
#pragma once

#include "core/params_cache.h"

/* The positions of tokens, and the table of their angles. */
typedef struct smla_rope {
    const void *positions; /* [>= T] */
    int64_t positions_stride;
    bool positions_are_int64;
    int64_t max_pos;
    const float *cos_sin; /* [max_pos, 64]: 32 cosines, then 32 sines */
    int64_t cos_sin_stride_pos;
} smla_rope;

/* Heads that RoPE rotates, and where they go. */
typedef struct smla_rope_heads {
    const void *x; /* [T, heads, R] */
    void *out;     /* like x, or x itself */
    int64_t num_heads;
    int64_t stride_token;
    int64_t stride_head; /* 0 for one head, like out_stride_head: its number does not matter */
    int64_t out_stride_token;
    int64_t out_stride_head;
} smla_rope_heads;

typedef struct smla_apply_rope_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_pairs; /* R / 2 */
    smla_rope_heads q;
    smla_rope_heads k;          /* one head, or none */
    smla_float_type type;       /* the type of q and k: bf16 or fp32 */
    smla_rope rope;             /* its table has num_pairs cosines, then sines, of table_type */
    smla_float_type table_type; /* bf16 or fp32 */
    bool is_neox;
    bool is_inverse;
} smla_apply_rope_params;

/* rope_and_cache_mla */
typedef struct smla_rope_and_cache_params {
    smla_call call;
    smla_apply_rope_params queries; /* T tokens; 64 values per head, and no key */
    smla_cache_write_params insert; /* T tokens or fewer; k_pe, which is not rotated yet */
} smla_rope_and_cache_params;

enum {
    SMLA_OUTPUT_TILE = 128,   /* values per scale of fused_inv_rope_fp8_quant */
    SMLA_OUTPUT_SCALES = 4,   /* 512 / 128 */
    SMLA_SCALE_ROW_ALIGN = 4, /* rows of out_scale up to a multiple of this are written */
};

#define SMLA_OUTPUT_FLOOR 1e-10f /* the least amax of a tile of fused_inv_rope_fp8_quant */

typedef struct smla_inverse_rope_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t group_heads; /* H / G */
    const uint16_t *o;   /* [T, H, 512] bf16 */
    int64_t o_stride_token;
    int64_t o_stride_head;
    smla_rope rope;
    void *out; /* [T, G, group_heads * 512] e4m3; bf16 if out_scale is NULL */
    int64_t out_stride_token;
    int64_t out_stride_group;
    void *out_scale; /* [scale_rows, G, group_heads * 4] fp32, or [..., group_heads] int32; NULL */
    bool scales_are_packed; /* four exponents per int32 */
    int64_t scale_rows;     /* T, or more: then up to 3 rows of zeros follow */
    int64_t scale_stride_token;
    int64_t scale_stride_group;
    int64_t scale_stride_column;
} smla_inverse_rope_params;
