/* sparse_mla.h: the public C API of sparse_mla, sparse Multi-head Latent Attention over any array.
 *
 * This is the one header that callers include. It needs the C standard library and DLPack, nothing
 * else. Reading order is from the simplest use to the rarest:
 *
 *   1. status and errors         every call returns a status and fills the caller's error
 *   2. cache                     write tokens into a paged cache, gather them back
 *   3. indices and attention     positions -> slots -> attention -> merge
 *   4. absorption                kv_b_proj split, up projections, per-tensor quantisation
 *   5. planning                  the metadata builder and the forward pass of one layer
 *
 * Conventions
 *   - Arrays are `const DLTensor *`; NULL means absent. Outputs are arrays of the caller; nothing
 *     is allocated for results. Strides are honoured; the last dimension is contiguous.
 *   - Args structs begin with `struct_size`, which the caller sets to sizeof: start from
 *     `{.struct_size = sizeof args}` and every field left out is zero, its default. A library older
 *     than its caller accepts a longer struct when the fields it does not know are zero.
 *   - `stream` is a cudaStream_t on CUDA devices and unused on the CPU.
 *   - No call prints or exits. On CUDA calls share caches: launch graphs per stream, a cuBLAS
 *     handle per device. Any thread may call.
 *
 * Shapes use T query tokens, H heads (1...128), K index columns, R requests, W block table columns,
 * D = 576 = 512 (kv_lora_rank) + 64 (qk_rope_head_dim), or 512 for rows without RoPE. The cache
 * formats are drawn in docs/formats.md; the docstrings of sparse_mla/ops/ tell the edge cases of
 * every operator.
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
    SMLA_ERROR_BUFFER = 3, /* an array that cannot be written */
    SMLA_ERROR_RUNTIME = 4, /* a device failure, or a device that this build lacks */
    SMLA_ERROR_MEMORY = 5,  /* out of host memory */
} smla_status;

/* Filled when a call does not return SMLA_OK; untouched otherwise. May be NULL. The text reads
 * "op: `argument` must RULE, got ACTUAL". */
typedef struct smla_error {
    smla_status status;
    char text[508];
} smla_error;

/* Version of the library at run time: major * 10000 + minor * 100 + patch. */
SMLA_API int smla_version(void);

/* "SMLA_ERROR_VALUE" and so on; never NULL. */
SMLA_API const char *smla_status_name(smla_status status);

/* ---- 2. Cache ------------------------------------------------------------------------------ */

/* How one token is stored. SMLA_KV_INFER takes it from the dtype and the last dimension. */
typedef enum smla_kv_format {
    SMLA_KV_INFER = 0,
    SMLA_KV_BFLOAT16 = 1,   /* 576 bf16, 1152 bytes; without RoPE 512, 1024 bytes */
    SMLA_KV_FP8_DS_MLA = 2, /* 512 e4m3, 4 fp32 scales, 64 bf16, 656 bytes */
} smla_kv_format;

/* Writes one token per entry of slot_mapping. Negative slots are skipped; on the CPU a slot past
 * the end is an error before anything is written. */
typedef struct smla_concat_and_cache_mla_args {
    size_t struct_size;
    const DLTensor *kv_c;         /* [>= T, 512] bf16 | fp16 | fp32 */
    const DLTensor *k_pe;         /* [>= T, 64], the dtype of kv_c */
    const DLTensor *kv_cache;     /* out [pages, block_size, row] (or with a head axis, or flat) */
    const DLTensor *slot_mapping; /* [T] int64 | int32 */
    int32_t kv_format;            /* smla_kv_format */
    void *stream;
} smla_concat_and_cache_mla_args;

SMLA_API smla_status smla_concat_and_cache_mla(const smla_concat_and_cache_mla_args *args,
                                               smla_error *error);

/* Upconvert-gather: out[workspace_starts[r] + p] = bf16(row of position p + seq_starts[r]) for
 * p < seq_lens[r]. */
typedef struct smla_gather_kv_cache_args {
    size_t struct_size;
    const DLTensor *kv_cache;         /* [pages, block_size, row] */
    const DLTensor *block_table;      /* [R, W] int32 */
    const DLTensor *seq_lens;         /* [R] int32 */
    const DLTensor *workspace_starts; /* [R] int32 */
    const DLTensor *seq_starts;       /* [R] int32, optional */
    const DLTensor *out;              /* out [>= sum of seq_lens, D] bf16 */
    int32_t kv_format;
    void *stream;
} smla_gather_kv_cache_args;

SMLA_API smla_status smla_gather_kv_cache(const smla_gather_kv_cache_args *args, smla_error *error);

/* Every value of a cache as float32 or bf16, one rounding: for inspection. */
typedef struct smla_dequantize_kv_cache_args {
    size_t struct_size;
    const DLTensor *kv_cache; /* [pages, block_size, row] */
    const DLTensor *out;      /* out [pages, block_size, D] fp32 | bf16 */
    int32_t kv_format;
    void *stream;
} smla_dequantize_kv_cache_args;

SMLA_API smla_status smla_dequantize_kv_cache(const smla_dequantize_kv_cache_args *args,
                                              smla_error *error);

/* ---- 3. Indices and attention -------------------------------------------------------------- */

/* Positions inside a request -> slots of the cache, or rows of the prefill workspace. */
typedef struct smla_convert_req_index_args {
    size_t struct_size;
    const DLTensor *req_id_per_token;         /* [T] int32 */
    const DLTensor *block_table;              /* [R, W] int32 */
    const DLTensor *topk_indices;             /* [T, K] int32, -1 = none */
    const DLTensor *prefill_request_ids;      /* [T] int32, optional, -1 = not a prefill token */
    const DLTensor *prefill_workspace_starts; /* [prefills] int32, with prefill_request_ids */
    const DLTensor *out;                      /* out [T, K] int32 */
    const DLTensor *counts;                   /* out [T] int32, optional: entries >= 0 of a row */
    int64_t block_size;
    void *stream;
} smla_convert_req_index_args;

SMLA_API smla_status smla_convert_req_index_to_global_index(const smla_convert_req_index_args *args,
                                                            smla_error *error);

/* out = softmax(softmax_scale * q k^T) v over the rows named by `indices`; lse is a natural log. */
typedef struct smla_sparse_attention_args {
    size_t struct_size;
    const DLTensor *q;                 /* [T, H, D] bf16, or [T, H, 512] when q_pe is given */
    const DLTensor *q_pe;              /* [T, H, 64] bf16, optional */
    const DLTensor *kv;                /* cache [pages, block_size, row], or flat [S, row] */
    const DLTensor *indices;           /* [T, K] int32 slots; negative or out of range = none */
    const DLTensor *topk_length;       /* [T] int32, optional: columns in use, clamped to [0, K] */
    const DLTensor *attn_sink;         /* [H] fp32, optional */
    const DLTensor *extra_kv;          /* a second cache, same softmax, optional */
    const DLTensor *extra_indices;     /* [T, K'] int32, with extra_kv */
    const DLTensor *extra_topk_length; /* [T] int32, optional */
    const DLTensor *out;               /* out [T, H, 512] bf16 */
    const DLTensor *lse;               /* out [T, H] fp32 */
    const DLTensor *max_logits;        /* out [T, H] fp32, optional */
    const DLTensor *workspace;         /* bytes: smla_attention_workspace_size */
    double softmax_scale;
    int32_t num_splits; /* 0 = the plan chooses; 1...64 fix the reduction tree */
    int32_t kv_format;
    int32_t extra_kv_format;
    int32_t lse_empty_is_plus_inf; /* 1: lse of a row without keys is +inf, as FlashMLA has it */
    void *stream;
} smla_sparse_attention_args;

SMLA_API smla_status smla_sparse_attention(const smla_sparse_attention_args *args,
                                           smla_error *error);

/* Bytes of workspace that smla_sparse_attention needs, from shapes alone. */
typedef struct smla_attention_workspace_args {
    size_t struct_size;
    int64_t num_tokens;
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
    int32_t num_splits;
    DLDevice device;
} smla_attention_workspace_args;

SMLA_API smla_status smla_attention_workspace_size(const smla_attention_workspace_args *args,
                                                   int64_t *bytes, smla_error *error);

/* Softmax-weighted merge of two partial results over disjoint key sets. */
typedef struct smla_merge_attn_states_args {
    size_t struct_size;
    const DLTensor *out_a; /* [T, H, V] bf16 | fp32 */
    const DLTensor *lse_a; /* [T, H] fp32, natural log */
    const DLTensor *out_b; /* the shape and dtype of out_a */
    const DLTensor *lse_b;
    const DLTensor *out; /* out, the shape and dtype of out_a */
    const DLTensor *lse; /* out [T, H] fp32 */
    void *stream;
} smla_merge_attn_states_args;

SMLA_API smla_status smla_merge_attn_states(const smla_merge_attn_states_args *args,
                                            smla_error *error);

/* ---- 4. Absorption ------------------------------------------------------------------------- */

/* kv_b_proj [512, H * (Pn + Pv)] or its transpose -> W_UK [512, H, Pn], W_UV [512, H, Pv]. */
typedef struct smla_split_kv_b_proj_args {
    size_t struct_size;
    const DLTensor *weight;           /* bf16 | fp32 | fp16, or e4m3 with weight_scale_inv */
    const DLTensor *weight_scale_inv; /* fp32, one scale per 128 x 128 block of weight, optional */
    const DLTensor *w_uk;             /* out [512, H, Pn] bf16 */
    const DLTensor *w_uv;             /* out [512, H, Pv] bf16 */
    void *stream;
} smla_split_kv_b_proj_args;

SMLA_API smla_status smla_split_kv_b_proj(const smla_split_kv_b_proj_args *args, smla_error *error);

/* out[t,h,l] = sum_p q_nope[t,h,p] * w_uk[l,h,p] */
typedef struct smla_k_up_proj_args {
    size_t struct_size;
    const DLTensor *q_nope; /* [T, H, Pn] bf16 */
    const DLTensor *w_uk;   /* [512, H, Pn] bf16 */
    const DLTensor *out;    /* out [T, H, 512] bf16 */
    void *stream;
} smla_k_up_proj_args;

SMLA_API smla_status smla_k_up_proj(const smla_k_up_proj_args *args, smla_error *error);

/* out[t,h,v] = sum_l x[t,h,l] * w_uv[l,h,v] */
typedef struct smla_v_up_proj_args {
    size_t struct_size;
    const DLTensor *x;    /* [T, H, 512] bf16 */
    const DLTensor *w_uv; /* [512, H, Pv] bf16 */
    const DLTensor *out;  /* out [T, H, Pv] bf16 */
    void *stream;
} smla_v_up_proj_args;

SMLA_API smla_status smla_v_up_proj(const smla_v_up_proj_args *args, smla_error *error);

/* One scale for the whole array: scale = max(amax, 1e-10) / 448, out = e4m3(x / scale). */
typedef struct smla_dynamic_per_tensor_quant_args {
    size_t struct_size;
    const DLTensor *x;     /* any rank up to 8, bf16 | fp16 | fp32 */
    const DLTensor *out;   /* out, the shape of x, e4m3 | uint8 */
    const DLTensor *scale; /* out, one fp32 */
    void *stream;
} smla_dynamic_per_tensor_quant_args;

SMLA_API smla_status smla_dynamic_per_tensor_quant(const smla_dynamic_per_tensor_quant_args *args,
                                                   smla_error *error);

/* ---- 5. Planning --------------------------------------------------------------------------- */

typedef struct smla_batch_split {
    int64_t num_decodes;
    int64_t num_prefills;
    int64_t num_decode_tokens;
    int64_t num_prefill_tokens;
} smla_batch_split;

/* Leading requests whose query length is at most decode_threshold are decodes; with require_uniform
 * they must all have the length of the first. Host integers: query_start_loc has num_reqs + 1. */
SMLA_API smla_status smla_split_decodes_and_prefills(const int32_t *query_start_loc,
                                                     int64_t num_reqs, int64_t num_actual_tokens,
                                                     int64_t decode_threshold, int require_uniform,
                                                     smla_batch_split *split, smla_error *error);

/* Packs requests in order while their lengths fit the workspace. `ends` has room for num_reqs
 * entries: chunk c is [ends[c - 1], ends[c]), the first one starts at 0. */
SMLA_API smla_status smla_split_prefill_chunks(const int32_t *seq_lens, int64_t num_reqs,
                                               int64_t workspace_tokens, int64_t *ends,
                                               int64_t *num_chunks, smla_error *error);

/* Default tokens of the prefill workspace: 5 * max_model_len. */
SMLA_API int64_t smla_prefill_workspace_size(int64_t max_model_len);

/* How a step runs. */
typedef enum smla_path {
    SMLA_PATH_AUTO = 0,
    SMLA_PATH_MIXED = 1,    /* FP8 cache, all tokens in one attention call */
    SMLA_PATH_SEPARATE = 2, /* FP8 decode; prefills through upconvert-gather and bf16 attention */
    SMLA_PATH_BF16 = 3,     /* bf16 cache, all tokens in one attention call */
    SMLA_PATH_DIRECT = 4,   /* FP8 decode; prefills on the FP8 cache, without a workspace */
} smla_path;

/* "mixed" and so on; NULL for a value that is no path. */
SMLA_API const char *smla_path_name(smla_path path);

typedef struct smla_builder_config {
    size_t struct_size;
    int64_t num_heads;
    int64_t block_size;   /* tokens per page */
    int64_t topk_tokens;  /* K */
    int64_t max_num_seqs; /* R at most */
    int64_t max_num_batched_tokens;
    int64_t max_model_len;
    int64_t decode_threshold;           /* 0 = 1; 1 + speculative tokens */
    int64_t min_heads_for_bf16_prefill; /* 0 = 32 */
    int64_t prefill_workspace_tokens;   /* 0 = 5 * max_model_len */
    int32_t kv_format;                  /* SMLA_KV_BFLOAT16 or SMLA_KV_FP8_DS_MLA */
    int32_t path;                       /* smla_path; SMLA_PATH_AUTO = the plan chooses */
    DLDevice device;
    const DLTensor *workspace; /* [tokens, 576] bf16 of the caller; NULL = the builder's own. Must
                                  outlive the builder. */
} smla_builder_config;

/* One step's batch, vLLM's CommonAttentionMetadata. Host arrays are read during the call; the
 * device arrays are referenced until the next build, and must stay alive until then. */
typedef struct smla_build_args {
    size_t struct_size;
    const int32_t *query_start_loc_cpu; /* [R + 1] */
    const int32_t *seq_lens_cpu;        /* [R] */
    const DLTensor *block_table;        /* [>= R, W] int32 */
    int64_t num_reqs;
    int64_t num_actual_tokens;
    void *stream;
} smla_build_args;

/* A chunk of prefill requests that fits the workspace; request numbers count prefills from 0. */
typedef struct smla_prefill_chunk {
    int64_t req_start;
    int64_t req_end;
    int64_t token_start;
    int64_t token_end;
    int64_t tot_seqlen; /* workspace rows in use */
} smla_prefill_chunk;

/* What a build made. The arrays are the builder's persistent buffers, cut to this step; everything
 * here is valid until the next build or destroy. */
typedef struct smla_metadata {
    smla_path path;
    int64_t num_reqs;
    int64_t num_actual_tokens;
    smla_batch_split split;
    int64_t decode_query_len;        /* query tokens per decode; 0 without a decode part */
    int64_t decode_num_splits;       /* split-KV ranges of the decode attention */
    const int32_t *req_id_per_token; /* device [num_actual_tokens] */
    /* The rest describes the prefill part of path "separate", and is NULL / 0 on other paths. */
    const int32_t *prefill_seq_lens;         /* device [num_prefills] */
    const int32_t *prefill_request_ids;      /* device [num_actual_tokens], -1 for decode tokens */
    const int32_t *prefill_workspace_starts; /* device [num_prefills], rebased per chunk */
    const smla_prefill_chunk *chunks;        /* host [num_chunks] */
    int64_t num_chunks;
} smla_metadata;

typedef struct smla_builder smla_builder;

/* Makes a builder with all memory that steps within the limits of `config` need. *builder is set on
 * success alone; smla_builder_destroy frees it. */
SMLA_API smla_status smla_builder_create(const smla_builder_config *config, smla_builder **builder,
                                         smla_error *error);

/* Plans a step; `metadata` may be NULL. What it is set to is the builder's, and the next step's
 * after the next build. Arguments that are refused leave the last step as it was; a device that
 * fails while the step is sent leaves none. One build or forward at a time per builder. */
SMLA_API smla_status smla_builder_build(smla_builder *builder, const smla_build_args *args,
                                        const smla_metadata **metadata, smla_error *error);

/* Frees the builder and its metadata; it may wait for the device. NULL is allowed. No build or
 * forward with it may be running. */
SMLA_API void smla_builder_destroy(smla_builder *builder);

/* Bytes of the bf16 prefill workspace; 0 on paths that have none. */
SMLA_API int64_t smla_builder_workspace_bytes(const smla_builder *builder);

/* One layer of the step that was built last: index conversion, then attention by the path. Only the
 * first num_actual_tokens rows of out and lse are written. One forward at a time per builder. */
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

/* One row of the dispatch table: which kernel serves which arguments. */
typedef struct smla_kernel_info {
    const char *device;    /* "cpu" */
    const char *arch;      /* instruction set or compute capability that the row needs */
    const char *kv_format; /* "fp8_ds_mla, bfloat16" */
    const char *heads;     /* "1...128" */
    const char *name;      /* source of the kernel */
    int available;         /* 1 when this machine can run it */
    int selected;          /* 1 when attention calls take it */
} smla_kernel_info;

/* Fills up to `capacity` rows and returns how many there are. */
SMLA_API int64_t smla_kernels(smla_kernel_info *rows, int64_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_H */
