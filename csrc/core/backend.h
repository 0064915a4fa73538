/* backend.h: what kernels read. Params of every operator, and the table a backend fills. Compiles
 * as C and as CUDA.
 *
 * check.c turns the caller's args into these structs; below this line nothing is validated again.
 * Sizes are counts, strides are in elements of the pointed-to type unless the name ends in _bytes,
 * and every one of them is int64. Shapes use the letters of sparse_mla.h.
 */
#pragma once

#include <stdbool.h>

#include "core/dltensor.h"
#include "core/error.h"
#include "core/kv_format.h"
#include "sparse_mla.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Params -------------------------------------------------------------------------------- */

/* Where an operator runs: the device of its arrays, and the caller's stream on it. */
typedef struct smla_stream {
    int32_t device_id;
    void *handle; /* cudaStream_t; unused on the CPU */
} smla_stream;

/* A paged cache. The token at `offset` of `page` has its row at base + page * page_stride_bytes +
 * offset * token_stride_bytes, and its scales at scales + page * page_stride_bytes + offset *
 * scale_token_stride_bytes: inside the row, or behind all rows of the page, as the format says. A
 * flat array is one page. */
typedef struct smla_kv_view {
    uint8_t *base;
    int64_t num_pages;
    int64_t block_size;
    int64_t page_stride_bytes;
    int64_t token_stride_bytes;
    const smla_kv_format_info *format;
    uint8_t *scales; /* of no meaning in formats without scales */
    int64_t scale_token_stride_bytes;
} smla_kv_view;

/* A token's row in the cache, and its scales. */
typedef struct smla_kv_token {
    uint8_t *row; /* NULL: no such token */
    uint8_t *scales;
} smla_kv_token;

static inline smla_kv_token
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

typedef struct smla_cache_write_params {
    int64_t num_tokens;
    const void *kv_c; /* [T, 512] */
    const void *k_pe; /* [T, 64] */
    int64_t kv_c_stride_token;
    int64_t k_pe_stride_token;
    smla_float_type input_type;
    const void *slot_mapping; /* [T] */
    int64_t slot_stride;
    bool slots_are_int64;
    smla_kv_view kv;
    smla_stream stream;
} smla_cache_write_params;

typedef struct smla_gather_params {
    int64_t num_reqs;
    int64_t num_blocks;         /* W: columns of block_table */
    const int32_t *block_table; /* [R, W] */
    int64_t block_table_stride_req;
    int64_t block_table_stride_block;
    const int32_t *seq_lens; /* [R] */
    int64_t seq_lens_stride;
    const int32_t *workspace_starts; /* [R] */
    int64_t workspace_starts_stride;
    const int32_t *seq_starts; /* [R] or NULL */
    int64_t seq_starts_stride;
    smla_kv_view kv;
    uint16_t *out; /* [out_tokens, 576] bf16 */
    int64_t out_tokens;
    int64_t out_stride_token;
    smla_stream stream;
} smla_gather_params;

typedef struct smla_dequantize_params {
    smla_kv_view kv;
    void *out; /* [pages, block_size, 576] */
    smla_float_type out_type;
    int64_t out_stride_page;
    int64_t out_stride_token;
    smla_stream stream;
} smla_dequantize_params;

typedef struct smla_convert_params {
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
    smla_stream stream;
} smla_convert_params;

/* Maps positions inside a request to slots where attention reads them, by the rules of
 * convert_req_index_to_global_index: this saves a call of that operator, and its output's memory.
 * Rows and columns are those of smla_convert_params. */
typedef struct smla_index_map {
    const int32_t *block_table; /* [R, W]; NULL = indices are slots already */
    int64_t block_table_stride_req;
    int64_t block_table_stride_block;
    int64_t num_reqs;                /* R */
    int64_t num_blocks;              /* W */
    const int32_t *req_id_per_token; /* [T], contiguous */
} smla_index_map;

/* One list of keys: attention takes a main one and an optional extra one. Token t's keys stand in
 * columns begin[t] to end[t] - 1 of its row of `indices`. A negative index is no key. */
typedef struct smla_key_list {
    smla_kv_view kv;
    const int32_t *indices; /* [T, K]; NULL: column j has index j (dense attention) */
    int64_t indices_stride_token;
    int64_t topk;       /* K */
    const int32_t *end; /* [T], clamped to 0...K; NULL: K. The operator's topk_length */
    int64_t end_stride;
    smla_index_map map;   /* of positions; kv.block_size is the page size */
    const int32_t *begin; /* [T], clamped to 0...K; NULL: 0 */
    int64_t begin_stride;
} smla_key_list;

/* Whether a list needs a kernel that serves dense columns and `begin`. */
static inline bool
smla_has_ranges(const smla_key_list *list)
{
    return list->indices == NULL || list->begin != NULL;
}

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
    float *lse; /* [T, H] */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    float *max_logits; /* [T, H] or NULL */
    int64_t max_logits_stride_token;
    int64_t max_logits_stride_head;
    bool empty_lse_is_plus_inf; /* a row without keys gets +inf, not -inf */
    void *workspace;
    int64_t workspace_bytes;
    smla_stream stream;
} smla_attention_params;

/* Attention's shape, all that a workspace and a split-KV schedule depend on. */
typedef struct smla_attention_shape {
    int64_t num_tokens;
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
    int num_splits; /* 0 = the plan chooses */
    int32_t device_id;
    /* Of the main and the extra list. While the main one is not known yet, NULL: the choice of a
     * split count does not need it, and a workspace size then covers every format. */
    const smla_kv_format_info *formats[2];
    bool has_ranges; /* smla_has_ranges of any list */
} smla_attention_shape;

/* A launch of attention, of some of a call's tokens. */
typedef struct smla_attention_run {
    const struct smla_attention_kernel *kernel; /* CUDA's; NULL where none fits */
    int64_t num_tokens;
    int num_splits;
    /* Bytes of the workspace in which the launch may leave parts of rows that it cuts by itself,
     * which any caller has who has asked for the size; 0: it cuts none. */
    int64_t cut_bytes;
} smla_attention_run;

/* How a backend runs attention of a shape. It is asked for it once a call, by the check, and is
 * given it again with the call. */
typedef struct smla_attention_plan {
    int64_t workspace_bytes; /* as attention_workspace_size says */
    int num_runs;            /* 1 or 2: of the first tokens and of the rest */
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
    int64_t num_tokens;
    int64_t num_heads;
    int64_t value_dim;
    smla_float_type type;  /* of out_a, out_b and out: bf16 or fp32 */
    const void *out_in[2]; /* [T, H, V] */
    int64_t out_in_stride_token[2];
    int64_t out_in_stride_head[2];
    const float *lse_in[2]; /* [T, H] */
    int64_t lse_in_stride_token[2];
    int64_t lse_in_stride_head[2];
    void *out; /* [T, H, V] */
    int64_t out_stride_token;
    int64_t out_stride_head;
    float *lse; /* [T, H] */
    int64_t lse_stride_token;
    int64_t lse_stride_head;
    smla_stream stream;
} smla_merge_params;

typedef struct smla_split_kv_b_proj_params {
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
    smla_stream stream;
} smla_split_kv_b_proj_params;

/* out[t,h,n] = sum_k x[t,h,k] * w(k,h,n): both up projections, told apart by the strides of w. */
typedef struct smla_projection_params {
    const char *op; /* "k_up_proj" or "v_up_proj", for errors */
    int64_t num_tokens;
    int64_t num_heads;
    int64_t inner_dim; /* k */
    int64_t outer_dim; /* n */
    const uint16_t *x; /* [T, H, k] bf16 */
    int64_t x_stride_token;
    int64_t x_stride_head;
    const uint16_t *w; /* bf16 */
    int64_t w_stride_inner;
    int64_t w_stride_head;
    int64_t w_stride_outer;
    uint16_t *out; /* [T, H, n] bf16 */
    int64_t out_stride_token;
    int64_t out_stride_head;
    smla_stream stream;
} smla_projection_params;

typedef struct smla_quant_params {
    int ndim;
    int64_t shape[SMLA_MAX_RANK];
    int64_t x_strides[SMLA_MAX_RANK];
    int64_t out_strides[SMLA_MAX_RANK];
    const void *x;
    smla_float_type type;
    uint8_t *out;
    float *scale;
    smla_stream stream;
} smla_quant_params;

/* ---- The backend table --------------------------------------------------------------------- */

/* Memory on the device whose contents the host writes anew for every step: the builder's metadata.
 * The host fills what `begin_write` lends, then `end_write` sends all of it, in order on a stream.
 * Work that reads the device's side stands between `begin_use` and `end_use`, so that steps on
 * different streams cannot overtake each other. Backends embed this struct in one of their own. */
typedef struct smla_mirror {
    void *device; /* fixed for the mirror's life */
    int64_t bytes;
} smla_mirror;

/* A place in the work of a stream. */
typedef struct smla_event smla_event;

/* Order between streams: for callers that bring arrays together whose producers work on streams of
 * their own, and that must know when memory is no longer in use. */
typedef struct smla_stream_ops {
    /* Whether the stream records a graph, to be run later, instead of working now. */
    smla_status (*is_capturing)(const char *op, smla_stream stream, bool *answer,
                                smla_error *error);
    /* Makes an event behind all work that the stream has been given. */
    smla_status (*record)(const char *op, smla_stream stream, smla_event **event,
                          smla_error *error);
    /* Work that the stream is given from now on starts behind the event. */
    smla_status (*wait)(const char *op, smla_stream stream, const smla_event *event,
                        smla_error *error);
    /* Whether the work before the event is over; true as well if the device has failed. */
    bool (*is_done)(const smla_event *event);
    /* Waits for the event on the host. */
    void (*finish)(const smla_event *event);
    void (*destroy)(smla_event *event);
    smla_status (*fill_zero)(const char *op, smla_stream stream, void *memory, int64_t bytes,
                             smla_error *error);
} smla_stream_ops;

/* The operators that are one call on every backend, with their args and params. A line here is a
 * public entry point (dispatch.c), its smla_check_<name> (check.h), a slot of smla_backend, and an
 * smla_cpu_<name> (cpu.h). */
#define SMLA_OPERATORS(X)                                                                  \
    X(concat_and_cache_mla, smla_concat_and_cache_mla_args, smla_cache_write_params)       \
    X(gather_kv_cache, smla_gather_kv_cache_args, smla_gather_params)                      \
    X(dequantize_kv_cache, smla_dequantize_kv_cache_args, smla_dequantize_params)          \
    X(convert_req_index_to_global_index, smla_convert_req_index_args, smla_convert_params) \
    X(merge_attn_states, smla_merge_attn_states_args, smla_merge_params)                   \
    X(split_kv_b_proj, smla_split_kv_b_proj_args, smla_split_kv_b_proj_params)             \
    X(dynamic_per_tensor_quant, smla_dynamic_per_tensor_quant_args, smla_quant_params)

#define SMLA_OPERATOR_SLOT(name, args_type, params_type) \
    smla_status (*name)(const params_type *params, smla_error *error);

/* Every slot is required, unless it says "Optional". */
typedef struct smla_backend {
    const char *name;
    DLDeviceType device_type;
    /* SMLA_OK, or why this device cannot be used: number out of range, too old, no driver. */
    smla_status (*check_device)(const char *op, int32_t device_id, smla_error *error);
    SMLA_OPERATORS(SMLA_OPERATOR_SLOT)
    /* Finds the errors in values of arrays that gather_kv_cache would find, and does no other work:
     * for callers that must not start before all of their work can be finished. Finds nothing if
     * the values are on a device. */
    smla_status (*check_gather)(const smla_gather_params *params, smla_error *error);
    /* Whether a step's prefills, of this shape, are estimated to take less time on the FP8 cache
     * than on a workspace that `num_rows` rows are gathered to in `num_chunks` calls. */
    bool (*prefers_direct)(const smla_attention_shape *prefills, int64_t num_rows,
                           int64_t num_chunks);
    /* Never falls when num_tokens grows: the size for the largest batch serves all batches. */
    int64_t (*attention_workspace_size)(const smla_attention_shape *shape);
    void (*plan_attention)(const smla_attention_shape *shape, smla_attention_plan *plan);
    /* `plan` is the plan of the call's own shape. */
    smla_status (*sparse_attention)(const smla_attention_params *params,
                                    const smla_attention_plan *plan, smla_error *error);
    /* k_up_proj and v_up_proj */
    smla_status (*up_proj)(const smla_projection_params *params, smla_error *error);
    /* Fills up to `capacity` rows, and returns how many there are. */
    int64_t (*kernels)(smla_kernel_info *rows, int64_t capacity);
    /* Memory of this device, aligned to 64 bytes at least, contents undefined; NULL if there is not
     * enough. */
    void *(*allocate)(int32_t device_id, int64_t bytes);
    void (*release)(int32_t device_id, void *memory);
    /* A mirror with zeros on both sides; NULL if there is not enough memory. */
    smla_mirror *(*create_mirror)(int32_t device_id, int64_t bytes);
    void (*destroy_mirror)(smla_mirror *mirror);
    /* Lends the mirror's bytes on the host, contents undefined. Nothing is sent unless end_write
     * follows. */
    smla_status (*begin_write)(const char *op, smla_mirror *mirror, smla_stream stream, void **host,
                               smla_error *error);
    smla_status (*end_write)(const char *op, smla_mirror *mirror, smla_stream stream,
                             smla_error *error);
    smla_status (*begin_use)(const char *op, smla_mirror *mirror, smla_stream stream,
                             smla_error *error);
    smla_status (*end_use)(const char *op, smla_mirror *mirror, smla_stream stream,
                           smla_error *error);
    /* Optional: NULL means that every call is over when it returns. */
    const smla_stream_ops *streams;
} smla_backend;

extern const smla_backend smla_cpu_backend;
#ifdef SMLA_HAVE_CUDA
extern const smla_backend smla_cuda_backend;
#endif

/* The backend of a device, or an error that says what this build has. */
smla_status smla_find_backend(const char *op, DLDevice device, const smla_backend **backend,
                              smla_error *error);

#ifdef __cplusplus
}
#endif
