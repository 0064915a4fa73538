/* params_index.h: the params of the operators that make lists of keys. */
#pragma once

#include "core/attention/visible.h"
#include "core/params.h"

typedef struct smla_convert_params {
    smla_call call;
    int64_t num_tokens;
    int64_t topk;
    int64_t num_reqs;     /* rows of block_table */
    int64_t num_blocks;   /* W */
    int64_t num_prefills; /* entries of prefill_workspace_starts */
    int64_t block_size;
    const int32_t *req_id_per_token; /* [T] */
    int64_t req_id_stride;
    const int32_t *block_table; /* [R, W] */
    int64_t block_table_stride_req;
    int64_t block_table_stride_block;
    const int32_t *topk_indices; /* [T, K] */
    int64_t topk_indices_stride_token;
    const int32_t *prefill_request_ids; /* [T] or NULL */
    int64_t prefill_request_ids_stride;
    const int32_t *prefill_workspace_starts; /* [prefills] */
    int64_t prefill_workspace_starts_stride;
    int32_t *out; /* [T, K] */
    int64_t out_stride_token;
    int32_t *counts; /* [T] or NULL */
    int64_t counts_stride;
} smla_convert_params;

typedef struct smla_topk_slots_params {
    smla_call call;
    const char *table;
    int64_t num_tokens;
    int64_t topk;
    int64_t num_reqs;
    const int32_t *topk_indices; /* [T, K] */
    int64_t topk_indices_stride_token;
    const int32_t *req_id_per_token; /* [T] */
    int64_t req_id_stride;
    smla_page_table pages;
    const uint8_t *is_valid; /* [T] or NULL */
    int64_t is_valid_stride;
    int32_t *out; /* [T, K] */
    int64_t out_stride_token;
    int32_t *lens; /* [T] */
    int64_t lens_stride;
} smla_topk_slots_params;

/* The queries of a batch: query_start_loc [R + 1] and seq_lens [R]. */
typedef struct smla_query_batch {
    int64_t num_reqs;
    const int32_t *query_start_loc;
    int64_t query_start_loc_stride;
    const int32_t *seq_lens;
    int64_t seq_lens_stride;
} smla_query_batch;

typedef struct smla_combine_topk_swa_params {
    smla_call call;
    int64_t num_tokens;
    int64_t window;
    int64_t ratio;
    int64_t topk;
    int64_t request_rows; /* M: workspace rows per request */
    int64_t window_start; /* N: the first of them that holds a token of the window */
    int64_t width;        /* columns of out */
    smla_query_batch batch;
    const int32_t *gather_lens; /* [R] */
    int64_t gather_lens_stride;
    const int32_t *topk_indices; /* [T, >= topk] */
    int64_t topk_indices_stride_token;
    int32_t *out; /* [T, width] */
    int64_t out_stride_token;
    int32_t *lens; /* [T] */
    int64_t lens_stride;
} smla_combine_topk_swa_params;

typedef struct smla_mixed_indices_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_decode_tokens; /* Td */
    int64_t window;
    int64_t ratio;
    int64_t topk;
    int64_t decode_topk;           /* D */
    int64_t width;                 /* columns of out */
    bool decode_indices_are_local; /* positions; false: slots */
    smla_query_batch batch;
    const int32_t *req_id_per_token; /* [T] */
    int64_t req_id_stride;
    smla_page_table swa_pages;
    smla_page_table compressed_pages;
    const int32_t *decode_swa_indices; /* [Td, window] */
    int64_t decode_swa_stride_token;
    const int32_t *decode_indices; /* [Td, D] */
    int64_t decode_indices_stride_token;
    const int32_t *decode_lens; /* [Td] or NULL: D */
    int64_t decode_lens_stride;
    const int32_t *prefill_indices; /* [T - Td, >= topk] */
    int64_t prefill_indices_stride_token;
    const uint8_t *is_valid; /* [Td] or NULL */
    int64_t is_valid_stride;
    int32_t *out; /* [T, width] */
    int64_t out_stride_token;
    int32_t *lens; /* [T] */
    int64_t lens_stride;
} smla_mixed_indices_params;

/* Rows of positions, of which a rank keeps its own, or of lengths, of which it counts its own. An
 * array [N] is one row. */
typedef struct smla_rank_lists_params {
    smla_call call;
    smla_rank_share share; /* its size is at least 1 */
    int64_t num_rows;
    int64_t num_columns;
    bool are_int64; /* `in` and `out`, which else are int32 */
    const void *in; /* [rows, columns] */
    int64_t in_stride_row;
    int64_t in_stride_column;
    void *out; /* [rows, columns] */
    int64_t out_stride_row;
    int32_t *lens; /* [rows]; only where rows have no holes */
    int64_t lens_stride;
} smla_rank_lists_params;
