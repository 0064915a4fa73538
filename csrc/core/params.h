/* params.h: the params of every operator, which kernels read. Compiles as C and as CUDA.
 *
 * A check turns the caller's args into params; the layers below it validate nothing again. Sizes
 * are counts. Strides are in elements of the pointed-to type unless the name ends in _bytes. Sizes
 * and strides are int64. Shapes use the letters of sparse_mla.h.
 */
#pragma once

#include <stdbool.h>

#include "core/dltensor.h"
#include "core/kv_format.h"
#include "core/numeric.h"

/* Where an operator runs: the device of its arrays, and the caller's stream on it. */
typedef struct smla_stream {
    int32_t device_id;
    void *handle; /* cudaStream_t; unused on the CPU */
} smla_stream;

/* A call of an operator: what its errors, its log and its launches need, whatever it computes.
 * Every params struct but attention's begins with it, and kernels do not read it. */
typedef struct smla_call {
    const char *op; /* the operator's name */
    smla_stream stream;
    const smla_kv_format_info *kv_format; /* the format of its cache; NULL: it has none */
} smla_call;

/* A paged cache. The token at `offset` of `page` has its row at base + page * page_stride_bytes +
 * offset * token_stride_bytes, and its scales at scales + page * page_stride_bytes + offset *
 * scale_token_stride_bytes. The format decides whether scales lie inside the row or after all rows
 * of the page. A flat array is one page. */
typedef struct smla_kv_view {
    uint8_t *base;
    int64_t num_pages;
    int64_t block_size;
    int64_t page_stride_bytes;
    int64_t token_stride_bytes;
    const smla_kv_format_info *format;
    uint8_t *scales; /* not used in formats without scales */
    int64_t scale_token_stride_bytes;
} smla_kv_view;

/* The cache row of a token, and its scales. */
typedef struct smla_kv_token {
    uint8_t *row;
    uint8_t *scales;
} smla_kv_token;

SMLA_HOST_DEVICE static inline smla_kv_token
smla_kv_token_at(const smla_kv_view *kv, int64_t page, int64_t offset)
{
    const int64_t start = page * kv->page_stride_bytes;
    return (smla_kv_token){kv->base + start + offset * kv->token_stride_bytes,
                           kv->scales + start + offset * kv->scale_token_stride_bytes};
}

static inline smla_kv_token
smla_kv_slot(const smla_kv_view *kv, int64_t slot)
{
    return smla_kv_token_at(kv, slot / kv->block_size, slot % kv->block_size);
}

static inline int64_t
smla_kv_num_slots(const smla_kv_view *kv)
{
    return kv->num_pages * kv->block_size;
}

typedef enum smla_float_type {
    SMLA_FLOAT_BF16 = 1,
    SMLA_FLOAT_FP16 = 2,
    SMLA_FLOAT_FP32 = 3,
    SMLA_FLOAT_E4M3 = 4,
} smla_float_type;

/* A scale that a caller gives as a number, or as one fp32 in memory of the device. */
typedef struct smla_given_scale {
    const float *pointer; /* NULL: the scale is `value` */
    float value;
} smla_given_scale;

/* The scale, where its memory can be read. */
static inline float
smla_read_scale(const smla_given_scale *scale)
{
    return scale->pointer == NULL ? scale->value : *scale->pointer;
}

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

/* A block table, and the page size of the cache that it belongs to. */
typedef struct smla_page_table {
    const int32_t *block_table; /* [R, W] */
    int64_t stride_req;
    int64_t stride_block;
    int64_t num_blocks; /* W */
    int64_t block_size;
} smla_page_table;

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

enum { SMLA_MAX_STEP_GROUPS = 5 }; /* four ratios, and the indexer's cache */

/* A compressed cache of a step: one row per `ratio` tokens. Vectors have num_rows entries. */
typedef struct smla_step_group {
    int64_t ratio;
    smla_page_table pages;       /* block_size: compressed rows per page */
    smla_page_table state_pages; /* read if there is state_slot_mapping */
    int64_t width;               /* columns of `indices` in use */
    int32_t *slot_mapping;       /* where a token that ends a group has its row, else -1 */
    int32_t *state_slot_mapping; /* where a token has its state, or NULL */
    int32_t *context_lens;       /* complete groups that a token sees */
    int32_t *lens;               /* those of them that `indices` has room for */
    int32_t *indices;            /* [T, width] or NULL: slots of a decode, numbers of a prefill */
    int64_t indices_stride_token;
} smla_step_group;

/* What a step's lists need of block tables and of slot_mapping, which the host cannot read. */
typedef struct smla_step_lists_params {
    smla_call call;
    int64_t num_rows;                /* entries of the vectors; those from T on become -1 or 0 */
    int64_t num_tokens;              /* T, with padding */
    int64_t num_query_tokens;        /* tokens of requests; all others are padding */
    int64_t num_decode_tokens;       /* they come first */
    const int32_t *req_id_per_token; /* [T] */
    const int32_t *positions;        /* [T] */
    const void *slot_mapping;        /* [T]; a token without slot is not valid */
    int64_t slot_stride;
    bool slots_are_int64;
    int64_t window;
    smla_page_table swa_pages;
    uint8_t *is_valid;    /* [num_rows] */
    int32_t *swa_indices; /* [T, window] */
    int32_t *swa_lens;    /* [num_rows] */
    int num_groups;
    smla_step_group groups[SMLA_MAX_STEP_GROUPS];
} smla_step_lists_params;

/* With this map, attention itself turns positions inside a request into slots, by the rules of
 * convert_req_index_to_global_index. This saves a call of that operator and the memory of its
 * output. R and W are as in smla_convert_params. */
typedef struct smla_index_map {
    const int32_t *block_table; /* [R, W]; NULL: indices are slots already */
    int64_t block_table_stride_req;
    int64_t block_table_stride_block;
    int64_t num_reqs;                /* R */
    int64_t num_blocks;              /* W */
    const int32_t *req_id_per_token; /* [T], contiguous */
} smla_index_map;

/* A list of keys. Attention takes a main list and an optional extra list. The keys of token t are
 * in columns begin[t] to end[t] - 1 of its row of `indices`. A negative index is no key. */
typedef struct smla_key_list {
    smla_kv_view kv;
    const int32_t *indices; /* [T, K]; NULL: column j has index j (dense attention) */
    int64_t indices_stride_token;
    int64_t topk;       /* K */
    const int32_t *end; /* topk_length: [T], clamped to 0...K; NULL: K */
    int64_t end_stride;
    smla_index_map map;   /* turns positions into slots; the page size is kv.block_size */
    const int32_t *begin; /* [T], clamped to 0...K; NULL: 0 */
    int64_t begin_stride;
    /* Columns of the main list, if end[t] counts them too (sparse_mla_dsv4); 0 in a main list. They
     * are subtracted before end[t] is clamped. */
    int64_t end_offset;
} smla_key_list;

/* Whether a list needs a kernel that serves dense columns and `begin`. */
static inline bool
smla_has_ranges(const smla_key_list *list)
{
    return list->indices == NULL || list->begin != NULL;
}

/* The call stands last, because launches copy this struct, and Hopper's kernels fetch all that they
 * read of it in 64-byte lines. */
typedef struct smla_attention_params {
    int64_t num_tokens;
    int64_t num_heads;
    int num_splits;         /* 1...64 */
    int num_lists;          /* 1 or 2 */
    const uint16_t *q_nope; /* [T, H, 512] bf16 */
    int64_t q_nope_stride_token;
    int64_t q_nope_stride_head;
    const uint16_t *q_pe; /* [T, H, 64] bf16 */
    int64_t q_pe_stride_token;
    int64_t q_pe_stride_head;
    smla_key_list lists[2]; /* main, extra */
    const float *attn_sink; /* [H] or NULL */
    int64_t attn_sink_stride;
    float softmax_scale;
    uint16_t *out; /* [T, H, 512] bf16 */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse; /* [T, H] or NULL */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    float *max_logits; /* [T, H] or NULL */
    int64_t max_logits_stride_token;
    int64_t max_logits_stride_head;
    bool empty_lse_is_plus_inf; /* lse of a row without keys: +inf, not -inf */
    /* Hopper's kernels for FP8 rows read nothing from here on. attention_fp8_sm90.cu fetches the
     * rest of their arguments early. */
    smla_given_scale kv_scale[2]; /* main, extra: of formats with a scale of the cache, else 1 */
    smla_given_scale q_scale; /* multiplies logits; 1 for a bf16 query, but in sparse_mla_dsv4 */
    smla_given_scale logit_divisor; /* divides logits; 1 but in sparse_mla_dsv4 */
    const uint8_t *q_e4m3;          /* [T, H, 512] e4m3 with the strides of q_nope; NULL: bf16 */
    void *workspace;
    int64_t workspace_bytes;
    const char *workspace_name; /* the workspace argument's name, for errors */
    smla_call call;
} smla_attention_params;

/* What q . k is multiplied with, besides the kv_scale of the key's cache, where the scales' memory
 * can be read. CUDA's find_scale_log2 computes the same. */
static inline float
smla_read_logit_scale(const smla_attention_params *params)
{
    return params->softmax_scale * smla_read_scale(&params->q_scale) /
           smla_read_scale(&params->logit_divisor);
}

/* The shape of attention: all that the workspace size and the number of splits depend on. */
typedef struct smla_attention_shape {
    int64_t num_tokens;
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
    int num_splits; /* 0 = the plan chooses */
    int32_t device_id;
    /* The formats of the main and the extra list. The main format is NULL while it is not known:
     * the choice of a split count does not need it, and the workspace size covers all formats. */
    const smla_kv_format_info *formats[2];
    bool has_ranges;      /* smla_has_ranges of at least one list */
    bool has_query_scale; /* an e4m3 query, or a scale of logits on the device */
} smla_attention_shape;

/* A launch of attention for all tokens of a call, or for some of them. */
typedef struct smla_attention_run {
    const struct smla_attention_kernel *kernel; /* NULL on the CPU, and if no kernel fits */
    int64_t num_tokens;
    int num_splits;
    /* Bytes of workspace for the partial rows of a launch that cuts long works by itself. Every
     * caller that asked for the workspace size has them. 0: the launch cuts no works. */
    int64_t cut_bytes;
    /* Splits take chunks of columns in turn, so a short list gives all of them as much. Where the
     * caller says how many splits there are, each has a range of columns. */
    bool interleaves;
} smla_attention_run;

/* How a backend runs attention of a shape. The check asks the backend for the plan once per call,
 * and sparse_attention of the backend takes it as an argument. */
typedef struct smla_attention_plan {
    int64_t workspace_bytes; /* what attention_workspace_size returns */
    int num_runs;            /* 1, or 2: the first tokens and the rest */
    smla_attention_run runs[2];
} smla_attention_plan;

/* Columns per split range: ceil(ceil(K / n) / 64) * 64, as the batch-invariance contract says. */
static inline int64_t
smla_split_columns(int64_t topk, int num_splits)
{
    const int64_t columns = (topk + num_splits - 1) / num_splits;
    return (columns + SMLA_SPLIT_ALIGN - 1) / SMLA_SPLIT_ALIGN * SMLA_SPLIT_ALIGN;
}

typedef struct smla_merge_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t value_dim;
    smla_float_type type;  /* element type of out_a, out_b and out: bf16 or fp32 */
    const void *out_in[2]; /* [T, H, V] */
    int64_t out_in_stride_token[2];
    int64_t out_in_stride_head[2];
    const float *lse_in[2]; /* [T, H] */
    int64_t lse_in_stride_token[2];
    int64_t lse_in_stride_head[2];
    const float *attn_sink; /* [H] or NULL */
    int64_t attn_sink_stride;
    void *out; /* [T, H, V] */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse; /* [T, H] */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
} smla_merge_params;

typedef struct smla_split_kv_b_proj_params {
    smla_call call;
    int64_t num_heads;
    int64_t nope_dim;   /* Pn */
    int64_t value_dim;  /* Pv */
    const void *weight; /* element (l, o) of [512, H * (Pn + Pv)] */
    smla_float_type type;
    int64_t stride_in;  /* along l */
    int64_t stride_out; /* along o */
    const float *scale; /* one per 128 x 128 block, or NULL */
    int64_t scale_stride_in;
    int64_t scale_stride_out;
    uint16_t *w_uk; /* [512, H, Pn] bf16 */
    int64_t w_uk_stride_in;
    int64_t w_uk_stride_head;
    uint16_t *w_uv; /* [512, H, Pv] bf16 */
    int64_t w_uv_stride_in;
    int64_t w_uv_stride_head;
} smla_split_kv_b_proj_params;

/* The scales of two e4m3 operands. A sum over 128 values of k is multiplied in fp32 by
 * x_scale * w_scale, a product that is rounded first. */
typedef struct smla_projection_scales {
    const void *x;    /* [T, H, k / 128] fp32, or [T, H, k / 512] int32 */
    bool x_is_packed; /* four exponents per int32, the first in its low byte */
    int64_t x_stride_token;
    int64_t x_stride_head;
    int64_t x_stride_column;
    const float *w; /* [H, n / 128, k / 128] */
    int64_t w_stride_head;
    int64_t w_stride_outer;
    int64_t w_stride_inner;
} smla_projection_scales;

/* out[t,h,n] = sum_k x[t,h,k] * w(k,h,n): the up projections, which differ in the strides of w, and
 * the output projection, whose heads are groups and whose rows of w are contiguous. */
typedef struct smla_projection_params {
    smla_call call;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t inner_dim; /* k */
    int64_t outer_dim; /* n */
    bool is_e4m3;  /* x and w are e4m3 with `scales`, k is a multiple of 128, w_stride_inner 1 */
    const void *x; /* [T, H, k] bf16 | e4m3 */
    int64_t x_stride_token;
    int64_t x_stride_head;
    const void *w; /* bf16 | e4m3 */
    int64_t w_stride_inner;
    int64_t w_stride_head;
    int64_t w_stride_outer;
    smla_projection_scales scales;
    uint16_t *out; /* [T, H, n] bf16 */
    int64_t out_stride_token;
    int64_t out_stride_head;
} smla_projection_params;

typedef struct smla_quant_params {
    smla_call call;
    int ndim;
    int64_t shape[SMLA_MAX_RANK];
    int64_t x_strides[SMLA_MAX_RANK];
    int64_t out_strides[SMLA_MAX_RANK];
    const void *x;
    smla_float_type type;
    uint8_t *out;
    float *scale;
} smla_quant_params;

enum {
    SMLA_V4_HEAD_DIM = 512,   /* values of a head of DeepSeek V4; RoPE turns the last 64 */
    SMLA_OUTPUT_TILE = 128,   /* values per scale of fused_inv_rope_fp8_quant */
    SMLA_OUTPUT_SCALES = 4,   /* 512 / 128 */
    SMLA_NORM_SUMS = 256,     /* partial sums of a row's squares: value i goes to sum i % 256 */
    SMLA_SCALE_ROW_ALIGN = 4, /* rows of out_scale up to a multiple of this are written */
};

#define SMLA_OUTPUT_FLOOR 1e-10f /* the least amax of a tile of fused_inv_rope_fp8_quant */

/* Rows for RMSNorm. x and out may be one array. */
typedef struct smla_norm_rows {
    int64_t size;
    const uint16_t *x; /* [T, size] bf16 */
    int64_t x_stride_token;
    const void *weight; /* [size] */
    smla_float_type weight_type;
    uint16_t *out; /* [T, size] bf16 */
    int64_t out_stride_token;
} smla_norm_rows;

/* Every backend adds the squares of a row in the same order. First value i is added to partial sum
 * i % 256. Then eight neighbouring partial sums become one, as ((0 + 1) + (2 + 3)) +
 * ((4 + 5) + (6 + 7)). Of these 32 sums, sum l is added to sum l + 16 of the upper half, then the
 * halves of 16, 8, 4 and 2 sums are. */
typedef struct smla_q_kv_norm_params {
    smla_call call;
    int64_t num_tokens;
    smla_norm_rows rows[2]; /* q, kv */
    float eps;
} smla_q_kv_norm_params;

/* The positions of tokens, and the table of their angles. */
typedef struct smla_rope {
    const void *positions; /* [>= T] */
    int64_t positions_stride;
    bool positions_are_int64;
    int64_t max_pos;
    const float *cos_sin; /* [max_pos, 64]: 32 cosines, then 32 sines */
    int64_t cos_sin_stride_pos;
} smla_rope;

/* fused_qnorm_rope_kv_insert. A row's squares are added in the order above. */
typedef struct smla_qnorm_insert_params {
    smla_call call;
    int64_t num_tokens; /* T: those of q. `insert` has as many tokens or fewer */
    int64_t num_heads;  /* H */
    int64_t out_heads;  /* heads of q_out, H or more: those from H on become 0 */
    const uint16_t *q;  /* [T, H, 512] bf16 */
    int64_t q_stride_token;
    int64_t q_stride_head;
    void *q_out;                /* [T, out_heads, 512]; may be q */
    smla_float_type q_out_type; /* bf16 or e4m3 */
    int64_t q_out_stride_token;
    int64_t q_out_stride_head;
    smla_given_scale q_scale_inv; /* 1 for bf16 */
    float eps;
    smla_rope rope;
    smla_cache_write_params insert; /* kv: keys of bf16 that are not turned yet */
} smla_qnorm_insert_params;

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
