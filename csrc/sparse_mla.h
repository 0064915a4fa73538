/* sparse_mla.h: the public C API of sparse_mla, sparse Multi-head Latent Attention over any array.
 *
 * This is the one header that callers include. It needs the C standard library and DLPack, nothing
 * else. Its sections go from the simplest use to the rarest:
 *   1. status and errors         every call returns a status and fills the caller's error
 *   2. cache                     write tokens into a paged cache, gather them back
 *   3. indices and attention     positions -> slots -> attention -> merge
 *   4. absorption                kv_b_proj split, projections, per-tensor quantisation
 *   5. norms and RoPE            what DeepSeek V4's layer does around its attention
 *   6. planning                  the metadata builder and the forward pass of one layer
 *
 * Conventions
 *   - Arrays are `const DLTensor *`, all on one device; NULL means absent. The caller provides the
 *     outputs, which must not overlap other arrays unless an args struct says that they may be an
 *     input. Strides are honoured. The last dimension must be contiguous, except in arrays [T], [R]
 *     and [H], block tables, lse, max_logits, the weight and scales of split_kv_b_proj, o_scale,
 *     weight_scale, out_scale and the arrays of dynamic_per_tensor_quant.
 *   - An args struct begins with `struct_size`, which the caller sets to sizeof. Start from
 *     `{.struct_size = sizeof args}`: every field left out is zero, its default. A library older
 *     than its caller accepts a longer struct if the fields that it does not know are zero.
 *   - Every argument is checked before anything is written. No call prints or exits.
 *   - On CUDA a call enqueues its work on `stream`, a cudaStream_t. The CPU ignores `stream`.
 *   - Any thread may call. CUDA calls share launch graphs per stream, a cuBLAS handle per device.
 *
 * Shapes use T query tokens, H heads (1...128), K index columns, R requests, W block table columns,
 * D = 576 = 512 (kv_lora_rank) + 64 (qk_rope_head_dim), or D = 512 for rows without RoPE, whose
 * k_pe is [T, 0]. A cache is [pages, block_size, row], [pages, block_size, 1, row] or flat [S, row]
 * (docs/formats.md). A cache in split pages may also be [pages, page bytes], with `block_size` and
 * `kv_format`. The docstrings of sparse_mla/ops/ tell every operator's edge cases.
 */
#ifndef SPARSE_MLA_H
#define SPARSE_MLA_H

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SMLA_VERSION_MAJOR 0
#define SMLA_VERSION_MINOR 1
#define SMLA_VERSION_PATCH 0

#if defined(SMLA_BUILD_SHARED)
#define SMLA_API __attribute__((visibility("default")))
#else
#define SMLA_API
#endif

/* ---- 1. Status and errors ------------------------------------------------------------------ */

typedef enum smla_status {
    SMLA_OK = 0,
    SMLA_ERROR_TYPE = 1,   /* wrong dtype */
    SMLA_ERROR_VALUE = 2,  /* rank, shape, stride, alignment, device mismatch, overlap, bad value */
    SMLA_ERROR_BUFFER = 3, /* bindings only: an array cannot be exported or written */
    SMLA_ERROR_RUNTIME = 4, /* a device failure, or a device that this build lacks */
    SMLA_ERROR_MEMORY = 5,  /* out of host memory */
} smla_status;

/* A call that does not return SMLA_OK fills the error; other calls leave it untouched. The pointer
 * may be NULL. The text reads "op: `argument` must RULE, got ACTUAL". */
typedef struct smla_error {
    smla_status status;
    char text[508];
} smla_error;

/* The version of the library at run time: major * 10000 + minor * 100 + patch. */
SMLA_API int smla_version(void);

/* The constant's name, such as "SMLA_ERROR_VALUE"; never NULL. */
SMLA_API const char *smla_status_name(smla_status status);

/* ---- 2. Cache ------------------------------------------------------------------------------ */

/* How one token is stored. SMLA_KV_INFER: the cache's dtype and last dimension decide. */
typedef enum smla_kv_format {
    SMLA_KV_INFER = 0,
    SMLA_KV_BFLOAT16 = 1,    /* 576 bf16, 1152 bytes; without RoPE 512 bf16, 1024 bytes */
    SMLA_KV_FP8_DS_MLA = 2,  /* 512 e4m3, 4 fp32 scales, 64 bf16, 656 bytes */
    SMLA_KV_FP8_V4 = 3,      /* 448 e4m3, 64 bf16, 7 UE8M0 scales and a 0, 584 bytes, split pages */
    SMLA_KV_FP8_E4M3 = 4,    /* 512 e4m3, 512 bytes, one kv_scale for the cache */
    SMLA_KV_FP8_INDEX = 5,   /* 128 e4m3, 1 fp32 scale, 132 bytes, split pages */
    SMLA_KV_MXFP4_INDEX = 6, /* 128 e2m1, 4 UE8M0 scales, 68 bytes, split pages */
    SMLA_KV_FP8_V41 = 7,     /* 512 e4m3, 16 UE8M0 scales, 528 bytes */
    SMLA_KV_FP8_V41_SPLIT = 8,  /* the same in split pages */
    SMLA_KV_FP4_V41 = 9,        /* 512 e2m1, 32 e4m3 scales, 288 bytes */
    SMLA_KV_FP4_V41_SPLIT = 10, /* the same in split pages */
    SMLA_KV_FP8_NOPE = 11,      /* 512 e4m3, 4 fp32 scales, 528 bytes */
} smla_kv_format;

/* A scale: one fp32 on the device, or else a number, which is 1 if it is left out. */
typedef struct smla_scale_arg {
    const DLTensor *tensor;
    double value;
} smla_scale_arg;

/* Writes one token per entry of slot_mapping. Negative slots are skipped. A slot past the end is an
 * error on the CPU, and is skipped on CUDA. */
typedef struct smla_concat_and_cache_mla_args {
    size_t struct_size;
    const DLTensor *kv_c;         /* [>= T, 512] bf16 | fp16 | fp32 */
    const DLTensor *k_pe;         /* [>= T, 64], the dtype of kv_c */
    const DLTensor *kv_cache;     /* out: a cache; slot = page * block_size + row number */
    const DLTensor *slot_mapping; /* [T] int64 | int32 */
    int32_t kv_format;            /* smla_kv_format */
    void *stream;
} smla_concat_and_cache_mla_args;

SMLA_API smla_status smla_concat_and_cache_mla(const smla_concat_and_cache_mla_args *args,
                                               smla_error *error);

/* Upconvert-gather: out[workspace_starts[r] + p] = bf16(row of position p + seq_starts[r]) for
 * p < seq_lens[r]. A bad page or a row past out fails on the CPU; CUDA writes zeros or skips it. */
typedef struct smla_gather_kv_cache_args {
    size_t struct_size;
    const DLTensor *kv_cache;         /* [pages, block_size, row] */
    const DLTensor *block_table;      /* [R, W] int32 */
    const DLTensor *seq_lens;         /* [R] int32 */
    const DLTensor *workspace_starts; /* [R] int32 */
    const DLTensor *seq_starts;       /* [R] int32, optional: 0 when absent */
    const DLTensor *out;              /* out [>= sum of seq_lens, D] bf16 */
    int32_t kv_format;
    void *stream;
    smla_scale_arg kv_scale; /* fp8_e4m3 only */
    int64_t block_size;      /* a cache [pages, page bytes] needs it; else 0 or the cache's */
} smla_gather_kv_cache_args;

SMLA_API smla_status smla_gather_kv_cache(const smla_gather_kv_cache_args *args, smla_error *error);

/* Writes every value of a cache as fp32 or bf16, rounded once: for inspection. */
typedef struct smla_dequantize_kv_cache_args {
    size_t struct_size;
    const DLTensor *kv_cache; /* [pages, block_size, row] */
    const DLTensor *out;      /* out [pages, block_size, D], or [S, D] if flat; fp32 | bf16 */
    int32_t kv_format;
    void *stream;
    smla_scale_arg kv_scale; /* fp8_e4m3 only */
    int64_t block_size;      /* a cache [pages, page bytes] needs it; else 0 or the cache's */
} smla_dequantize_kv_cache_args;

SMLA_API smla_status smla_dequantize_kv_cache(const smla_dequantize_kv_cache_args *args,
                                              smla_error *error);

/* Writes rows of 512 values, after norm and RoPE, in any format but fp8_ds_mla and those of the
 * indexer. Slots are as in concat_and_cache_mla. */
typedef struct smla_insert_k_cache_args {
    size_t struct_size;
    const DLTensor *k;            /* [>= T, 512] bf16 | fp16 | fp32, rounded to bf16 */
    const DLTensor *k_cache;      /* out: a cache of keys of 512 values */
    const DLTensor *slot_mapping; /* [T] int64 | int32 */
    smla_scale_arg kv_scale;      /* fp8_e4m3 only */
    int32_t kv_format;
    int64_t block_size; /* a cache [pages, page bytes] needs it; else 0 or the cache's */
    void *stream;
} smla_insert_k_cache_args;

SMLA_API smla_status smla_quantize_and_insert_k_cache(const smla_insert_k_cache_args *args,
                                                      smla_error *error);

/* Writes the indexer's keys of 128 values, as fp8_index or mxfp4_index. */
typedef struct smla_indexer_k_cache_args {
    size_t struct_size;
    const DLTensor *k;            /* [>= T, 128] bf16 | fp16 | fp32, rounded to bf16 */
    const DLTensor *k_cache;      /* out: a cache of keys of 128 values */
    const DLTensor *slot_mapping; /* [T] int64 | int32 */
    int32_t kv_format;
    int64_t block_size; /* a cache [pages, page bytes] needs it; else 0 or the cache's */
    void *stream;
} smla_indexer_k_cache_args;

SMLA_API smla_status smla_indexer_k_quant_and_cache(const smla_indexer_k_cache_args *args,
                                                    smla_error *error);

/* out[r, offset + i] = bf16(row of position seq_lens[r] - g + i of request r) for i < g =
 * gather_lens[r]. A bad page or a row past M fails on the CPU; CUDA writes zeros or skips it. */
typedef struct smla_gather_k_cache_args {
    size_t struct_size;
    const DLTensor *out;         /* out [R, M, D] bf16 */
    const DLTensor *k_cache;     /* [pages, block_size, row] */
    const DLTensor *seq_lens;    /* [R] int32 */
    const DLTensor *gather_lens; /* [R] int32, optional: seq_lens when absent */
    const DLTensor *block_table; /* [R, W] int32 */
    int64_t block_size;
    int64_t offset;
    smla_scale_arg kv_scale; /* fp8_e4m3 only */
    int32_t kv_format;
    void *stream;
} smla_gather_k_cache_args;

SMLA_API smla_status smla_dequantize_and_gather_k_cache(const smla_gather_k_cache_args *args,
                                                        smla_error *error);

/* ---- 3. Indices and attention -------------------------------------------------------------- */

/* Position p of request r -> slot block_table[r, p / block_size] * block_size + p % block_size, or
 * row prefill_workspace_starts[i] + p for a token of prefill i. Without a page the result is -1. */
typedef struct smla_convert_req_index_args {
    size_t struct_size;
    const DLTensor *req_id_per_token;         /* [T] int32; a bad id is an error, or -1 on CUDA */
    const DLTensor *block_table;              /* [R, W] int32 */
    const DLTensor *topk_indices;             /* [T, K] int32 positions, -1 = none */
    const DLTensor *prefill_request_ids;      /* [T] int32, optional, -1 = not a prefill token */
    const DLTensor *prefill_workspace_starts; /* [prefills] int32, with prefill_request_ids */
    const DLTensor *out;                      /* out [T, K] int32 */
    const DLTensor *counts;                   /* out [T] int32, optional: entries >= 0 per row */
    int64_t block_size;
    void *stream;
} smla_convert_req_index_args;

SMLA_API smla_status smla_convert_req_index_to_global_index(const smla_convert_req_index_args *args,
                                                            smla_error *error);

/* The indexer's choice for decodes -> slots: the entries of a row that have a slot, in order, then
 * -1. A row of an invalid token is -1 everywhere, and has length 0. */
typedef struct smla_topk_slots_args {
    size_t struct_size;
    const DLTensor *topk_indices;     /* [T, K] int32, compressed positions, -1 = none */
    const DLTensor *req_id_per_token; /* [>= T] int32; a bad id is an error, or no slots on CUDA */
    const DLTensor *block_table;      /* [R, W] int32 */
    int64_t block_size;               /* rows per page of the compressed cache */
    const DLTensor *is_valid;         /* [>= T] bool | uint8, optional: all are valid */
    const DLTensor *out;              /* out [T, K] int32 */
    const DLTensor *lens;             /* out [T] int32: slots per row */
    void *stream;
} smla_topk_slots_args;

SMLA_API smla_status smla_compute_global_topk_indices_and_lens(const smla_topk_slots_args *args,
                                                               smla_error *error);

/* The k best keys of each token by their logits, in ascending order, then -1: of columns starts[t]
 * to ends[t] - 1, both clamped to 0...N, all where there are at most k, else the k largest. The
 * smaller column of equal logits wins, -0 equals +0, and NaN is below -inf. Columns are counted
 * from starts[t]. With slots_block_table the call also does, in the same launch, what
 * smla_compute_global_topk_indices_and_lens does with out. */
typedef struct smla_top_k_args {
    size_t struct_size;
    const DLTensor *logits; /* [T, N] fp32 | bf16, N < 2^31 */
    const DLTensor *starts; /* [>= T] int32 */
    const DLTensor *ends;   /* [>= T] int32 */
    int64_t k;
    const DLTensor *slots_block_table; /* [R, W] int32, optional: no slots */
    int64_t slots_block_size;          /* rows per page of the attention's cache; 0 without table */
    const DLTensor *req_id_per_token;  /* [>= T] int32, with the table; a bad id is an error, or no
                                        * slots on CUDA */
    const DLTensor *is_valid;          /* [>= T] bool | uint8, with the table, optional: all are */
    const DLTensor *out;               /* out [T, k] int32 */
    const DLTensor *slots;             /* out [T, k] int32, with the table */
    const DLTensor *lens;              /* out [T] int32, with the table: slots per row */
    const DLTensor
        *values; /* out [T, k] of the logits' type, optional: the chosen logits, then -inf */
    void *stream;
} smla_top_k_args;

SMLA_API smla_status smla_top_k_per_row(const smla_top_k_args *args, smla_error *error);

/* Rows of a prefill chunk's workspace [requests, M] for each token: the first
 * tl = min((p + 1) / ratio, topk) of its topk_indices, then the window that ends at its position p.
 * Request b has its compressed rows from M * b on, and its last gather_lens[b] tokens from
 * M * b + N on. Tokens past the last request have no rows. */
typedef struct smla_combine_topk_swa_args {
    size_t struct_size;
    const DLTensor *topk_indices;    /* [T, >= topk] int32, -1 = none */
    const DLTensor *query_start_loc; /* [R + 1] int32, of any first value */
    const DLTensor *seq_lens;        /* [R] int32 */
    const DLTensor *gather_lens;     /* [R] int32 */
    int64_t window;
    int64_t ratio;
    int64_t topk;
    int64_t M;
    int64_t N;
    int64_t align;        /* usually 128 */
    const DLTensor *out;  /* out [T, topk + window rounded up to align] int32, -1 behind the rows */
    const DLTensor *lens; /* out [T] int32: tl + the window's tokens */
    void *stream;
} smla_combine_topk_swa_args;

SMLA_API smla_status smla_combine_topk_swa_indices(const smla_combine_topk_swa_args *args,
                                                   smla_error *error);

/* The slots that a batch attends to: of Td decode tokens, then of prefill tokens. A row has
 * `window` columns for the window, then max(topk, D) compressed ones, rounded up to a multiple of
 * 4. */
typedef struct smla_mixed_indices_args {
    size_t struct_size;
    const DLTensor *decode_swa_indices;        /* [Td, window] int32 slots, optional: no decodes */
    const DLTensor *decode_compressed_indices; /* [Td, D] int32, optional: D = 0 */
    const DLTensor *decode_compressed_lens;    /* [>= Td] int32, optional: D; not of positions */
    const DLTensor *prefill_topk_indices;      /* [T - Td, >= topk] int32 positions, optional */
    const DLTensor *query_start_loc;           /* [R + 1] int32 */
    const DLTensor *seq_lens;                  /* [R] int32 */
    const DLTensor *req_id_per_token;          /* [>= T] int32; a bad id is an error, or no slots */
    const DLTensor *swa_block_table;           /* [>= R, W] int32 */
    int64_t swa_block_size;
    const DLTensor *compressed_block_table; /* [>= R, W] int32, if any position becomes a slot */
    int64_t compressed_block_size;
    int64_t window;
    int64_t ratio;
    int64_t topk;
    int32_t decode_indices_are_local; /* 1: decode_compressed_indices are positions */
    const DLTensor *is_valid;         /* [>= Td] bool | uint8, optional: all are valid */
    const DLTensor *out;              /* out [T, columns] int32, -1 where there is no slot */
    const DLTensor *lens;             /* out [T] int32: window + compressed length */
    void *stream;
} smla_mixed_indices_args;

SMLA_API smla_status smla_build_mixed_sparse_indices(const smla_mixed_indices_args *args,
                                                     smla_error *error);

/* out = softmax(softmax_scale * q k^T) v over the cache rows that `indices` names, where v is the
 * first 512 values of k. A duplicate counts twice. A row without keys has out 0 and lse -inf. */
typedef struct smla_sparse_attention_args {
    size_t struct_size;
    const DLTensor *q;                 /* [T, H, D] bf16, [T, H, 512] with q_pe; e4m3 if D is 512 */
    const DLTensor *q_pe;              /* [T, H, 64] bf16, optional */
    const DLTensor *kv;                /* cache [pages, block_size, row], or flat [S, row] */
    const DLTensor *indices;           /* [T, K] int32 slots; negative or out of range = none */
    const DLTensor *topk_length;       /* [T] int32, optional: columns in use, clamped to [0, K] */
    const DLTensor *attn_sink;         /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
    const DLTensor *extra_kv;          /* a second cache in the same softmax, optional */
    const DLTensor *extra_indices;     /* [T, K'] int32, with extra_kv */
    const DLTensor *extra_topk_length; /* [T] int32, optional */
    const DLTensor *out;               /* out [T, >= H, 512] bf16; further heads stay as they are */
    const DLTensor *lse;               /* out [T, H] fp32: natural log of the softmax sum */
    const DLTensor *max_logits;        /* out [T, H] fp32, optional: the largest scaled logit */
    const DLTensor *workspace;         /* [size below] uint8, not shared with concurrent calls */
    double softmax_scale;
    int32_t num_splits; /* 0 = the plan chooses; 1...64 fix the order of all sums */
    int32_t kv_format;
    int32_t extra_kv_format;
    int32_t lse_empty_is_plus_inf; /* 1: lse of a row without keys is +inf, as in FlashMLA */
    void *stream;
    smla_scale_arg q_scale;        /* an e4m3 query only: it multiplies logits */
    smla_scale_arg kv_scale;       /* fp8_e4m3 only */
    smla_scale_arg extra_kv_scale; /* fp8_e4m3 only */
    int64_t block_size;            /* tokens per page of a kv [pages, page bytes], else 0 */
    int64_t extra_block_size;
} smla_sparse_attention_args;

SMLA_API smla_status smla_sparse_attention(const smla_sparse_attention_args *args,
                                           smla_error *error);

/* sparse_attention of a DeepSeek V4 layer, with one table of indices for both caches: the first
 * `window` columns are slots of swa_kv_cache, the others of compressed_kv_cache. A length counts
 * both parts. Caches are bfloat16, fp8_v4 or fp8_e4m3. The workspace is that of attention, whose
 * lists have window and K' columns. */
typedef struct smla_sparse_mla_dsv4_args {
    size_t struct_size;
    const DLTensor *query;            /* [T, H, 512] bf16 | e4m3 */
    const DLTensor *swa_kv_cache;     /* [pages, block_size, row] */
    const DLTensor *workspace_buffer; /* [attention_workspace_size] uint8, with any contents */
    const DLTensor *sparse_indices;   /* [T, window + K'] int32; negative or past the end = none */
    const DLTensor *compressed_kv_cache; /* as swa_kv_cache; where K' is 0, it may be the same */
    const DLTensor *sparse_topk_lens;    /* [T] int32: columns in use */
    const DLTensor *seq_lens;            /* [R] int32, optional, not read */
    smla_scale_arg bmm1_scale;           /* softmax_scale * q_scale * kv_scale; required */
    smla_scale_arg bmm2_scale;           /* kv_scale; fp8_e4m3 only */
    const DLTensor *sinks;               /* [>= H] fp32, optional */
    int64_t window;
    const DLTensor *cum_seq_lens_q; /* [R + 1] int32, optional, not read */
    int64_t max_q_len;              /* not read */
    const DLTensor *out;            /* out [T, >= H, 512] bf16 */
    void *stream;
} smla_sparse_mla_dsv4_args;

SMLA_API smla_status smla_sparse_mla_dsv4(const smla_sparse_mla_dsv4_args *args, smla_error *error);

/* The bytes of workspace that smla_sparse_attention needs. They never fall if T, H or K grows. */
typedef struct smla_attention_workspace_args {
    size_t struct_size;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk; /* 0 without extra_indices */
    int32_t num_splits; /* as in the call of attention */
    DLDevice device;
} smla_attention_workspace_args;

SMLA_API smla_status smla_attention_workspace_size(const smla_attention_workspace_args *args,
                                                   int64_t *bytes, smla_error *error);

/* Merges two partial results over disjoint keys by softmax weight. An lse +inf counts as -inf. The
 * parts have been computed without the sink, which is no part of lse either. */
typedef struct smla_merge_attn_states_args {
    size_t struct_size;
    const DLTensor *out_a; /* [T, H, V] bf16 | fp32 */
    const DLTensor *lse_a; /* [T, H] fp32, natural log */
    const DLTensor *out_b; /* the shape and dtype of out_a */
    const DLTensor *lse_b; /* [T, H] fp32, natural log */
    const DLTensor *out;   /* out, the shape and dtype of out_a */
    const DLTensor *lse;   /* out [T, H] fp32 */
    void *stream;
    const DLTensor *attn_sink; /* [>= H] fp32, optional: out *= 1 / (1 + exp(sink - lse)) */
} smla_merge_attn_states_args;

SMLA_API smla_status smla_merge_attn_states(const smla_merge_attn_states_args *args,
                                            smla_error *error);

/* ---- 4. Absorption ------------------------------------------------------------------------- */

/* kv_b_proj [512, H * (Pn + Pv)] or else its transpose -> W_UK [512, H, Pn], W_UV [512, H, Pv]. */
typedef struct smla_split_kv_b_proj_args {
    size_t struct_size;
    const DLTensor *weight;           /* bf16 | fp32 | fp16; e4m3 | uint8 with weight_scale_inv */
    const DLTensor *weight_scale_inv; /* fp32, one scale per 128 x 128 block of weight, optional */
    const DLTensor *w_uk;             /* out [512, H, Pn] bf16 */
    const DLTensor *w_uv;             /* out [512, H, Pv] bf16 */
    void *stream;
} smla_split_kv_b_proj_args;

SMLA_API smla_status smla_split_kv_b_proj(const smla_split_kv_b_proj_args *args, smla_error *error);

/* out[t,h,l] = sum_p q_nope[t,h,p] * w_uk[l,h,p], summed in fp32 */
typedef struct smla_k_up_proj_args {
    size_t struct_size;
    const DLTensor *q_nope; /* [T, H, Pn] bf16 */
    const DLTensor *w_uk;   /* [512, H, Pn] bf16 */
    const DLTensor *out;    /* out [T, H, 512] bf16 */
    void *stream;
} smla_k_up_proj_args;

SMLA_API smla_status smla_k_up_proj(const smla_k_up_proj_args *args, smla_error *error);

/* out[t,h,v] = sum_l x[t,h,l] * w_uv[l,h,v], summed in fp32 */
typedef struct smla_v_up_proj_args {
    size_t struct_size;
    const DLTensor *x;    /* [T, H, 512] bf16 */
    const DLTensor *w_uv; /* [512, H, Pv] bf16 */
    const DLTensor *out;  /* out [T, H, Pv] bf16 */
    void *stream;
} smla_v_up_proj_args;

SMLA_API smla_status smla_v_up_proj(const smla_v_up_proj_args *args, smla_error *error);

/* out[t,g,n] = sum_r o[t,g,r] * weight[g,n,r], rounded once. Either o and weight are bf16 and there
 * are no scales, or both are e4m3 with scales, R is a multiple of 128 (512 for int32 scales), and
 * every 128 values of r are summed before they are scaled, in fp32. */
typedef struct smla_grouped_output_projection_args {
    size_t struct_size;
    const DLTensor *o;            /* [T, G, R] bf16 | e4m3 | uint8 */
    const DLTensor *o_scale;      /* [>= T, G, R / 128] fp32 | [>= T, G, R / 512] int32 of four
                                   * exponents, as fused_inv_rope_fp8_quant writes them; or NULL */
    const DLTensor *weight;       /* [G, N, R], bf16 or e4m3 as o */
    const DLTensor *weight_scale; /* [G, ceil(N / 128), R / 128] fp32; or NULL */
    const DLTensor *out;          /* out [T, G, N] bf16 */
    void *stream;
} smla_grouped_output_projection_args;

SMLA_API smla_status smla_grouped_output_projection(const smla_grouped_output_projection_args *args,
                                                    smla_error *error);

/* One scale for the whole array: max(amax, 1e-10) / 448. out = e4m3(x / scale), saturating. */
typedef struct smla_dynamic_per_tensor_quant_args {
    size_t struct_size;
    const DLTensor *x;     /* any rank up to 8, bf16 | fp16 | fp32; amax leaves out NaN */
    const DLTensor *out;   /* out, the shape of x, e4m3 | uint8 */
    const DLTensor *scale; /* out, one fp32 of any rank */
    void *stream;
} smla_dynamic_per_tensor_quant_args;

SMLA_API smla_status smla_dynamic_per_tensor_quant(const smla_dynamic_per_tensor_quant_args *args,
                                                   smla_error *error);

/* ---- 5. Norms and RoPE --------------------------------------------------------------------- */

/* y = bf16(x * rsqrt(mean(x^2) + eps) * weight) for the rows of q and of kv, in fp32. The rows are
 * usually columns of one buffer. q_out may be q itself, and kv_out kv. */
typedef struct smla_fused_q_kv_rmsnorm_args {
    size_t struct_size;
    const DLTensor *q;         /* [T, any size] bf16 */
    const DLTensor *kv;        /* [T, 512] bf16 */
    const DLTensor *q_weight;  /* [size of a row of q] bf16 | fp32 */
    const DLTensor *kv_weight; /* [512] bf16 | fp32 */
    const DLTensor *q_out;     /* out, the shape of q, bf16 */
    const DLTensor *kv_out;    /* out, the shape of kv, bf16 */
    double eps;                /* finite, >= 0 */
    void *stream;
} smla_fused_q_kv_rmsnorm_args;

SMLA_API smla_status smla_fused_q_kv_rmsnorm(const smla_fused_q_kv_rmsnorm_args *args,
                                             smla_error *error);

/* Before attention, in one launch. Every head of q becomes RMSNorm(q) without a weight, turned by
 * RoPE of its token's position: in place, or in q_out. The first slots of slot_mapping get the rows
 * of kv, turned and rounded to bf16, in the cache's format, as quantize_and_insert_k_cache writes
 * them. T is the number of rows of q_out, or else of q. A bad position or slot is an error on the
 * CPU; CUDA does not turn that token, or skips that row. */
typedef struct smla_qnorm_insert_args {
    size_t struct_size;
    const DLTensor *q;            /* [>= T, H, 512] bf16; out, if q_out is absent */
    const DLTensor *q_out;        /* out [T, >= H, 512] bf16, optional, may be q; e4m3 | uint8 and
                                   * required with q_scale_inv. Heads from H on become 0. */
    const DLTensor *kv;           /* [>= T, 512] bf16 */
    const DLTensor *positions;    /* [>= T] int64 | int32 */
    const DLTensor *cos_sin;      /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    const DLTensor *cache;        /* out: a cache of 512 values per token */
    const DLTensor *slot_mapping; /* [<= T] int64 | int32; negative slots are skipped */
    double eps;                   /* finite, >= 0 */
    smla_scale_arg q_scale_inv;   /* if given, q_out = e4m3(value * q_scale_inv) */
    smla_scale_arg kv_scale;      /* fp8_e4m3 only */
    int64_t block_size;           /* tokens per page of a cache [pages, page bytes], else 0 */
    int32_t kv_format;            /* smla_kv_format */
    void *stream;
} smla_qnorm_insert_args;

SMLA_API smla_status smla_fused_qnorm_rope_kv_insert(const smla_qnorm_insert_args *args,
                                                     smla_error *error);

/* DeepSeek V4's compressor keeps a state row per token in fp32: kv, then score + ape[position % r].
 * Both have c D values: D is 512 or 128, and c is 2 where r is 4, else 1. A bad position or slot is
 * an error on the CPU; CUDA skips that token. Tokens must have different slots. */
typedef struct smla_partial_states_args {
    size_t struct_size;
    const DLTensor *kv;           /* [>= T, c D] fp32 | bf16 */
    const DLTensor *score;        /* [>= T, c D], the dtype of kv */
    const DLTensor *ape;          /* [r, c D] fp32 */
    const DLTensor *positions;    /* [>= T] int64 | int32 */
    const DLTensor *state;        /* out [pages, block_size, 2 c D] fp32 */
    const DLTensor *slot_mapping; /* [T] int64 | int32; negative slots are skipped */
    void *stream;
} smla_partial_states_args;

SMLA_API smla_status smla_save_partial_states(const smla_partial_states_args *args,
                                              smla_error *error);

/* Turns each group of r positions whose last token is in the step into a row of a compressed cache.
 * Token t closes a group if its slot and its kv slot are not negative and (position + 1) % r is 0.
 * Its row pools the states of the last c r positions of its request, channel by channel: the sum of
 * kv weighted by the softmax of the scores; where c is 2, the first r of them with their first D
 * channels, the others with their last. Then RMSNorm with weights, RoPE at the group's first
 * position, and one rounding to bf16. A position without a page takes no part. With kv, score and
 * ape the call does smla_save_partial_states, too: the tokens of a request must then be neighbours
 * in the order of their positions. A bad position, slot, page or request is an error on the CPU;
 * CUDA skips that token or page, and does not turn a key past the end of cos_sin. */
typedef struct smla_compress_args {
    size_t struct_size;
    const DLTensor *state;            /* [pages, block_size, 2 c D] fp32; out, if kv is given */
    const DLTensor *block_table;      /* [R, W] int32: pages of state; negative = none */
    const DLTensor *req_id_per_token; /* [>= T] int32 */
    const DLTensor *positions;        /* [>= T] int64 | int32 */
    const DLTensor *slot_mapping;     /* [T] int64 | int32: rows of state */
    const DLTensor *cache;            /* out: a cache of D values per row */
    const DLTensor *kv_slot_mapping;  /* [>= T] int64 | int32: rows of cache */
    const DLTensor *norm_weight;      /* [D] bf16 | fp32 */
    const DLTensor *cos_sin;          /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    double eps;                       /* finite, >= 0 */
    int64_t ratio;                    /* r */
    const DLTensor *kv;               /* [>= T, c D] fp32 | bf16, optional */
    const DLTensor *score;            /* [>= T, c D], the dtype of kv; given where kv is */
    const DLTensor *ape;              /* [r, c D] fp32; given where kv is */
    smla_scale_arg kv_scale;          /* fp8_e4m3 only */
    int64_t block_size;               /* rows per page of a cache [pages, page bytes], else 0 */
    int32_t kv_format;                /* smla_kv_format */
    void *stream;
} smla_compress_args;

SMLA_API smla_status smla_compress_norm_rope_store(const smla_compress_args *args,
                                                   smla_error *error);

/* How the scales of 128 values each are stored. They are powers of two. */
typedef enum smla_scale_layout {
    SMLA_SCALES_INFER = 0,   /* the dtype of the array decides */
    SMLA_SCALES_FP32 = 1,    /* one fp32 per scale */
    SMLA_SCALES_UE8M0X4 = 2, /* four exponents (2^(e - 127)) per int32, the first in its low byte */
} smla_scale_layout;

/* Turns the last 64 values of every head back to position 0, then quantises all 512: per 128 values
 * the scale is the smallest power of two with 448 scale >= max(amax, 1e-10), and a byte is
 * e4m3(x / scale). A bad position is an error on the CPU; CUDA does not turn that token. Rows of
 * out_scale from T on, up to the next multiple of 4, become 0. */
typedef struct smla_fused_inv_rope_fp8_quant_args {
    size_t struct_size;
    const DLTensor *o;         /* [T, H, 512] bf16 */
    const DLTensor *positions; /* [>= T] int64 | int32 */
    const DLTensor *cos_sin;   /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    const DLTensor *out;       /* out [T, G, H / G * 512] e4m3 | uint8; bf16 without out_scale */
    const DLTensor *out_scale; /* out [>= T, G, H / G * 4] fp32 | [>= T, G, H / G] int32; optional:
                                * without it the turned values are rounded to bf16 */
    int64_t groups;            /* G, which divides H */
    int32_t scale_layout;      /* smla_scale_layout */
    void *stream;
} smla_fused_inv_rope_fp8_quant_args;

SMLA_API smla_status smla_fused_inv_rope_fp8_quant(const smla_fused_inv_rope_fp8_quant_args *args,
                                                   smla_error *error);

/* The indexer's queries, quantised: RoPE of the last 64 values, rounded to bf16, then the bytes of
 * fp8_index, or with out_scale those of mxfp4_index (kv_format.h). out_weights = weights *
 * fp32(softmax_scale * head_scale), times the scale of fp8_index. A bad position is an error on the
 * CPU; CUDA does not turn that token. */
typedef struct smla_index_query_args {
    size_t struct_size;
    const DLTensor *q;           /* [T, any heads, 128] bf16 */
    const DLTensor *weights;     /* [T, heads] bf16 | fp32 */
    const DLTensor *positions;   /* [>= T] int64 | int32 */
    const DLTensor *cos_sin;     /* [max_pos, 64] fp32: 32 cosines, then 32 sines */
    const DLTensor *out;         /* out [T, heads, 128] e4m3 | uint8; [T, heads, 64] uint8 if FP4 */
    const DLTensor *out_weights; /* out [T, heads] fp32 */
    const DLTensor *out_scale;   /* out [T, heads, 4] uint8, optional: asks for FP4 */
    double softmax_scale;        /* finite; usually 128^-0.5 */
    double head_scale;           /* finite; usually heads^-0.5 */
    void *stream;
} smla_index_query_args;

SMLA_API smla_status smla_fused_indexer_q_rope_quant(const smla_index_query_args *args,
                                                     smla_error *error);

/* The indexer's scores: out[t,n] = sum_h weights[t,h] * relu(q[t,h] . key n of token t), for n
 * below context_lens[t], which is clamped to 0...N. Keys are rows of a cache in pages, or k_cache
 * and k_scale are flat arrays in which starts[t] is the token's key 0. Columns from the context on,
 * and of keys that do not exist, become -inf. A bad request of a token with keys is an error on the
 * CPU; on CUDA its row is -inf. */
typedef struct smla_indexer_logits_args {
    size_t struct_size;
    const DLTensor *q;       /* [T, heads, 128] e4m3 | uint8; with q_scale [T, heads, 64] uint8 */
    const DLTensor *weights; /* [T, heads] fp32 */
    const DLTensor *k_cache; /* an fp8_index or mxfp4_index cache; flat [S, 128] e4m3 | uint8 or
                               * [S, 64] uint8 with k_scale */
    const DLTensor *k_scale; /* [S] fp32, or [S, 4] uint8 for [S, 64]; optional: no flat keys */
    const DLTensor *context_lens;     /* [>= T] int32 */
    const DLTensor *block_table;      /* [R, W] int32, for pages */
    const DLTensor *req_id_per_token; /* [>= T] int32, for pages */
    const DLTensor *starts;           /* [>= T] int32, optional: 0; for flat keys only */
    const DLTensor *q_scale;          /* [T, heads, 4] uint8, optional: q is e4m3 */
    const DLTensor *out;              /* out [T, N] fp32 | bf16 */
    int32_t leaves_rest;              /* 1: columns from the context on are not written */
    int32_t kv_format;
    int64_t block_size; /* a cache [pages, page bytes] needs it; else 0 or the cache's */
    void *stream;
} smla_indexer_logits_args;

SMLA_API smla_status smla_indexer_logits(const smla_indexer_logits_args *args, smla_error *error);

/* The k best keys of each token: smla_top_k_per_row of the logits of smla_indexer_logits, which are
 * kept in `workspace` for a chunk of tokens at a time. The result does not depend on the chunks. A
 * token with at most k keys takes all of them, and its logits are not computed unless `values` are
 * wanted. The arguments are those of the two operators. */
typedef struct smla_lightning_indexer_args {
    size_t struct_size;
    const DLTensor *q;
    const DLTensor *weights;
    const DLTensor *k_cache;
    const DLTensor *k_scale;      /* optional: keys are in pages */
    const DLTensor *context_lens; /* [>= T] int32 */
    int64_t k;
    const DLTensor *block_table;      /* pages only */
    const DLTensor *req_id_per_token; /* pages and slots */
    const DLTensor *starts;           /* optional: 0; flat keys only */
    const DLTensor *q_scale;          /* optional: q is e4m3 */
    DLDataType dtype; /* fp32 | bf16, the logits' and that of `values`; {0} = fp32 */
    int32_t kv_format;
    int64_t block_size;
    const DLTensor *slots_block_table; /* optional: no slots */
    int64_t slots_block_size;
    const DLTensor *is_valid; /* optional: all are */
    const DLTensor *out;      /* out [T, k] int32 */
    const DLTensor *slots;    /* out [T, k] int32, with slots_block_table */
    const DLTensor *lens;     /* out [T] int32, with slots_block_table */
    const DLTensor *values;   /* out [T, k] of `dtype`, optional */
    int64_t max_logits_bytes; /* at least the logits of a token; 2^29 is usual */
    /* uint8 with any contents, smla_lightning_indexer_workspace_size bytes. Fewer bytes make
     * smaller chunks; they must suffice for one token. */
    const DLTensor *workspace;
    void *stream;
} smla_lightning_indexer_args;

SMLA_API smla_status smla_lightning_indexer(const smla_lightning_indexer_args *args,
                                            smla_error *error);

/* The bytes of workspace of smla_lightning_indexer: at most max_logits_bytes and 128. They never
 * fall if T or the context grows. */
typedef struct smla_lightning_workspace_args {
    size_t struct_size;
    int64_t num_tokens;
    int64_t max_context; /* N: the keys of a row of block_table, or the number of flat keys */
    int64_t k;
    DLDataType dtype; /* as in the call, like max_logits_bytes */
    int64_t max_logits_bytes;
    DLDevice device;
} smla_lightning_workspace_args;

SMLA_API smla_status smla_lightning_indexer_workspace_size(
    const smla_lightning_workspace_args *args, int64_t *bytes, smla_error *error);

/* ---- 6. Planning --------------------------------------------------------------------------- */

typedef struct smla_batch_split {
    int64_t num_decodes;
    int64_t num_prefills;
    int64_t num_decode_tokens;
    int64_t num_prefill_tokens;
} smla_batch_split;

/* Leading requests whose query length is at most decode_threshold (>= 1) are decodes; with
 * require_uniform, only those as long as the first. query_start_loc [num_reqs + 1] is in host
 * memory. Tokens past its last entry, up to num_actual_tokens, are padding. */
SMLA_API smla_status smla_split_decodes_and_prefills(const int32_t *query_start_loc,
                                                     int64_t num_reqs, int64_t num_actual_tokens,
                                                     int64_t decode_threshold, int require_uniform,
                                                     smla_batch_split *split, smla_error *error);

/* Packs requests in order into chunks that fit the workspace; a longer request is an error. `ends`
 * has room for num_reqs entries. Chunk c is [ends[c - 1], ends[c]), and chunk 0 starts at 0. */
SMLA_API smla_status smla_split_prefill_chunks(const int32_t *seq_lens, int64_t num_reqs,
                                               int64_t workspace_tokens, int64_t *ends,
                                               int64_t *num_chunks, smla_error *error);

/* The default number of tokens in the prefill workspace: 5 * max_model_len. */
SMLA_API int64_t smla_prefill_workspace_size(int64_t max_model_len);

/* How a step runs: which attention calls it makes, and over which rows. */
typedef enum smla_path {
    SMLA_PATH_AUTO = 0,     /* cache format and heads decide; a SEPARATE step may run as DIRECT */
    SMLA_PATH_MIXED = 1,    /* FP8 cache, all tokens in one attention call */
    SMLA_PATH_SEPARATE = 2, /* FP8 decodes; prefills through upconvert-gather and bf16 attention */
    SMLA_PATH_BF16 = 3,     /* bf16 cache, all tokens in one attention call */
    SMLA_PATH_DIRECT = 4,   /* FP8 decodes; prefills on the FP8 cache, without a workspace */
} smla_path;

/* The path's name, such as "mixed"; NULL for a value that is no path. */
SMLA_API const char *smla_path_name(smla_path path);

typedef struct smla_builder_config {
    size_t struct_size;
    int64_t num_heads;
    int64_t block_size;   /* tokens per page */
    int64_t topk_tokens;  /* K */
    int64_t max_num_seqs; /* largest R */
    int64_t max_num_batched_tokens;
    int64_t max_model_len;
    int64_t decode_threshold;           /* 1 + speculative tokens; 0 = 1 */
    int64_t min_heads_for_bf16_prefill; /* below it AUTO is MIXED on FP8; 0 = 32 */
    int64_t prefill_workspace_tokens;   /* 0 = those of `workspace`, or 5 * max_model_len */
    int32_t kv_format;                  /* SMLA_KV_BFLOAT16 or SMLA_KV_FP8_DS_MLA */
    int32_t path;                       /* smla_path; SMLA_PATH_AUTO = the builder chooses */
    DLDevice device;
    const DLTensor *workspace; /* [tokens, 576] bf16, outlives the builder; NULL = its own */
} smla_builder_config;

/* One step's batch, as in vLLM's CommonAttentionMetadata. The host arrays are read during the call.
 * block_table is only referenced, and must stay alive until the next build. */
typedef struct smla_build_args {
    size_t struct_size;
    const int32_t *query_start_loc_cpu; /* [R + 1] */
    const int32_t *seq_lens_cpu;        /* [R] */
    const DLTensor *block_table;        /* [>= R, W] int32 */
    int64_t num_reqs;
    int64_t num_actual_tokens;
    void *stream;
} smla_build_args;

/* A chunk of prefill requests that fits the workspace. Request 0 is the first prefill. */
typedef struct smla_prefill_chunk {
    int64_t req_start;
    int64_t req_end;
    int64_t token_start;
    int64_t token_end;
    int64_t tot_seqlen; /* workspace rows in use */
} smla_prefill_chunk;

/* A build's result, in the builder's persistent buffers: valid until the next build or destroy. */
typedef struct smla_metadata {
    smla_path path;
    int64_t num_reqs;
    int64_t num_actual_tokens;
    smla_batch_split split;
    int64_t decode_query_len;        /* query tokens per decode; 0 without a decode part */
    int64_t decode_num_splits;       /* number of split-KV ranges in the decode attention */
    const int32_t *req_id_per_token; /* device [num_actual_tokens] */
    /* The fields below describe the prefills of path "separate". They are NULL or 0 otherwise. */
    const int32_t *prefill_seq_lens;         /* device [num_prefills] */
    const int32_t *prefill_request_ids;      /* device [num_actual_tokens], -1 for decode tokens */
    const int32_t *prefill_workspace_starts; /* device [num_prefills], from 0 in every chunk */
    const smla_prefill_chunk *chunks;        /* host [num_chunks] */
    int64_t num_chunks;
} smla_metadata;

typedef struct smla_builder smla_builder;

/* Makes a builder with all memory that steps within the limits of `config` need. *builder is set
 * only on success; smla_builder_destroy frees it. */
SMLA_API smla_status smla_builder_create(const smla_builder_config *config, smla_builder **builder,
                                         smla_error *error);

/* Plans a step. `metadata` may be NULL; *metadata becomes a struct of the builder, which the next
 * build overwrites. If an argument is refused, the last step stays valid. If the device fails while
 * the step is sent, no step is left. Only one build or forward may run on a builder at a time. */
SMLA_API smla_status smla_builder_build(smla_builder *builder, const smla_build_args *args,
                                        const smla_metadata **metadata, smla_error *error);

/* Frees the builder, and may wait for the device. NULL is allowed. No build or forward may run. */
SMLA_API void smla_builder_destroy(smla_builder *builder);

/* The bytes of the bf16 prefill workspace; 0 on paths without one. */
SMLA_API int64_t smla_builder_workspace_bytes(const smla_builder *builder);

/* Runs one layer of the last built step. Writes the first T = num_actual_tokens rows of outputs. */
typedef struct smla_forward_args {
    size_t struct_size;
    smla_builder *builder;
    const DLTensor *q;            /* [>= T, H, 576] bf16, or [>= T, H, 512] when q_pe is given */
    const DLTensor *q_pe;         /* [>= T, H, 64] bf16, optional */
    const DLTensor *kv_cache;     /* [pages, block_size, row] */
    const DLTensor *topk_indices; /* [>= T, K] int32 positions inside each request, -1 = none */
    const DLTensor *attn_sink;    /* [H] fp32, optional */
    const DLTensor *out;          /* out [>= T, H, 512] bf16 */
    const DLTensor *lse;          /* out [>= T, H] fp32 */
    double softmax_scale;
    void *stream;
} smla_forward_args;

SMLA_API smla_status smla_forward(const smla_forward_args *args, smla_error *error);

/* ---- Introspection ------------------------------------------------------------------------- */

/* One entry of the dispatch table: which kernel serves which arguments. */
typedef struct smla_kernel_info {
    const char *device;    /* "cpu" or "cuda" */
    const char *arch;      /* instruction set or compute capability that the kernel needs */
    const char *kv_format; /* "fp8_ds_mla, bfloat16" */
    const char *heads;     /* "1...128" */
    const char *name;      /* source file of the kernel */
    int available;         /* 1 when this machine can run it */
    int selected;          /* 1 when attention calls take it */
} smla_kernel_info;

/* Fills at most `capacity` entries of `rows`, and returns how many the table has. */
SMLA_API int64_t smla_kernels(smla_kernel_info *rows, int64_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_H */
