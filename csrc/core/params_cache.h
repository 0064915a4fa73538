/* params_cache.h: the params of the operators that write, gather and convert cache rows. */
#pragma once

#include "core/params.h"

/* concat_and_cache_mla, quantize_and_insert_k_cache and indexer_k_quant_and_cache. In the latter
 * two the NoPE and RoPE values of a token are parts of one row. */
typedef struct smla_cache_write_params {
    smla_call call;
    const char *cache_name; /* the cache argument's name, for errors */
    const char *slots_name; /* the name of slot_mapping, for errors */
    int64_t num_tokens;
    const void *kv_c; /* [T, NoPE values] */
    const void *k_pe; /* [T, RoPE values] */
    int64_t kv_c_stride_token;
    int64_t k_pe_stride_token;
    smla_float_type input_type;
    const void *slot_mapping; /* [T] */
    int64_t slot_stride;
    bool slots_are_int64;
    smla_kv_view kv;
    smla_given_scale kv_scale; /* 1 where the format has none for the whole cache */
} smla_cache_write_params;

/* Keys or values of KV heads, and the pages that they go to. Strides are in elements. */
typedef struct smla_head_write {
    const void *rows; /* [>= T, Hk, D] */
    int64_t stride_token;
    int64_t stride_head;
    void *cache; /* [P, ps, Hk, D] */
    int64_t cache_stride_page;
    int64_t cache_stride_token;
    int64_t cache_stride_head;
    int64_t dim;               /* D, a multiple of 8 */
    smla_given_scale scale;    /* what values are divided by: one, or [Hk]; 1 for copies */
    int64_t scale_stride_head; /* 0: one for all heads */
} smla_head_write;

static inline float
smla_read_head_scale(const smla_head_write *part, int64_t head)
{
    return part->scale.pointer == NULL ? part->scale.value
                                       : part->scale.pointer[head * part->scale_stride_head];
}

enum { SMLA_WRITTEN_PARTS = 2 };

typedef struct smla_reshape_params {
    smla_call call;
    /* The slots, and the pages of both caches, which have no format; its rows are not read. */
    smla_cache_write_params slots;
    int64_t num_heads;                         /* Hk */
    smla_float_type input_type;                /* bf16, fp16 or fp32 */
    bool quantizes;                            /* the caches are e4m3; else copies of the rows */
    smla_head_write parts[SMLA_WRITTEN_PARTS]; /* keys, values */
} smla_reshape_params;

enum { SMLA_TRANSFER_SRC, SMLA_TRANSFER_DST, SMLA_TRANSFER_SIDES };

typedef struct smla_transfer_params {
    smla_call call;
    /* Both caches and their slots, as those of a write without rows. */
    smla_cache_write_params sides[SMLA_TRANSFER_SIDES];
    /* All bytes of a cache that is in host memory while the slots are on a device; else NULL. */
    smla_byte_range host_memory[SMLA_TRANSFER_SIDES];
} smla_transfer_params;

/* gather_kv_cache, whose requests share the rows of out, and dequantize_and_gather_k_cache, where
 * each request has rows of its own. */
typedef struct smla_gather_params {
    smla_call call;
    int64_t num_reqs;
    int64_t num_blocks;         /* W: columns of block_table */
    const int32_t *block_table; /* [R, W] */
    int64_t block_table_stride_req;
    int64_t block_table_stride_block;
    const int32_t *seq_lens; /* [R] */
    int64_t seq_lens_stride;
    const int32_t *workspace_starts; /* [R] or NULL: each request starts at row `offset` */
    int64_t workspace_starts_stride;
    int64_t offset;
    const int32_t *seq_starts; /* [R] or NULL */
    int64_t seq_starts_stride;
    const int32_t *gather_lens; /* [R] or NULL: only so many positions, those before seq_lens[r] */
    int64_t gather_lens_stride;
    smla_kv_view kv;
    smla_given_scale kv_scale; /* 1 where the format has none for the whole cache */
    uint16_t *out;             /* [out_tokens, D] bf16, or [R, out_tokens, D] */
    int64_t out_tokens;        /* rows that a request may be written to */
    int64_t out_stride_req;    /* 0 where requests share the rows */
    int64_t out_stride_token;
} smla_gather_params;

typedef struct smla_dequantize_params {
    smla_call call;
    smla_kv_view kv;
    smla_given_scale kv_scale; /* 1 where the format has none for the whole cache */
    void *out;                 /* [pages, block_size, 576] */
    smla_float_type out_type;
    int64_t out_stride_page;
    int64_t out_stride_token;
} smla_dequantize_params;
