/* step.h: a step of an engine: its plan, its metadata, and the forward pass of one layer. The
 * conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_STEP_H
#define SPARSE_MLA_STEP_H

#include "sparse_mla/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct smla_batch_split {
    int64_t num_decodes;
    int64_t num_prefills;
    int64_t num_decode_tokens;
    int64_t num_prefill_tokens;
} smla_batch_split;

/* Leading requests whose query length is at most decode_threshold (>= 1) are decodes; with
 * require_uniform, only those as long as the first. Requests without query tokens may stand
 * anywhere and count as long as the others: before the first prefill they are decodes, behind it
 * prefills. query_start_loc [num_reqs + 1] is in host memory. Tokens past its last entry, up to
 * num_actual_tokens, are padding. */
SMLA_API smla_status smla_split_decodes_and_prefills(const int32_t *query_start_loc,
                                                     int64_t num_reqs, int64_t num_actual_tokens,
                                                     int64_t decode_threshold, int require_uniform,
                                                     smla_batch_split *split, smla_error *error);

/* The swaps of two requests that, done in order, put decodes first: those with at most
 * decode_threshold (>= 1) tokens in this step, also with none. `swaps` has room for num_reqs
 * entries: pairs, of which the first number is the smaller. A batch in order has none. */
SMLA_API smla_status smla_reorder_batch(const int32_t *num_scheduled_tokens, int64_t num_reqs,
                                        int64_t decode_threshold, int64_t *swaps,
                                        int64_t *num_swaps, smla_batch_split *split,
                                        smla_error *error);

/* Packs requests in order into chunks that fit the workspace; a longer request is an error. `ends`
 * has room for num_reqs entries. Chunk c is [ends[c - 1], ends[c]), and chunk 0 starts at 0. */
SMLA_API smla_status smla_split_prefill_chunks(const int32_t *seq_lens, int64_t num_reqs,
                                               int64_t workspace_tokens, int64_t *ends,
                                               int64_t *num_chunks, smla_error *error);

/* The default number of tokens in the prefill workspace: 5 * max_model_len. */
SMLA_API int64_t smla_prefill_workspace_size(int64_t max_model_len);

/* How the cached context of prefills is cut. EQUAL: every chunk has the same rows of every prefill.
 * PACKED: a chunk is filled prefill by prefill, so that fewer chunks are needed. */
typedef enum smla_context_plan {
    SMLA_CONTEXT_EQUAL = 0,
    SMLA_CONTEXT_PACKED = 1,
} smla_context_plan;

typedef struct smla_context_args {
    size_t struct_size;
    const int32_t *context_lens; /* host [num_prefills]: cached tokens in front of each query */
    int64_t num_prefills;
    int64_t workspace_tokens; /* rows of the workspace */
    int64_t block_size;       /* tokens per page; chunks begin at pages */
    smla_context_plan plan;
} smla_context_args;

/* Rows of the prefills req_start to req_end - 1: `lens[first + i]` rows of prefill req_start + i,
 * from its token `starts[first + i]` on. */
typedef struct smla_context_chunk {
    int64_t req_start;
    int64_t req_end;
    int64_t first;
    int64_t num_tokens; /* the sum of its lens */
    int64_t max_len;
} smla_context_chunk;

/* Cuts context into chunks of at most workspace_tokens rows, so that each token is in one chunk.
 * With `chunks` NULL it only counts: how much room `chunks`, and `starts` and `lens` need. */
SMLA_API smla_status smla_split_context_chunks(const smla_context_args *args,
                                               smla_context_chunk *chunks, int32_t *starts,
                                               int32_t *lens, int64_t *num_chunks,
                                               int64_t *num_entries, smla_error *error);

/* The default rows of that workspace: room for eight of the longest requests or four pages of each
 * request, up to 65536, and at least a page of each. All arguments are at least 1. */
SMLA_API int64_t smla_context_workspace_size(int64_t max_model_len, int64_t max_num_seqs,
                                             int64_t block_size);

typedef struct smla_local_attention_args {
    size_t struct_size;
    const int32_t *query_start_loc; /* host [num_reqs + 1] */
    const int32_t *seq_lens;        /* host [num_reqs]; less than a request's queries: padding */
    const int32_t *block_table;     /* host [num_reqs, table_width] */
    int64_t num_reqs;
    int64_t table_width;
    int64_t attention_chunk; /* a multiple of block_size */
    int64_t block_size;      /* tokens per page */
} smla_local_attention_args;

/* Virtual requests, in the order of the tokens: each has a request's queries in one block of
 * attention_chunk positions, and the block's keys. */
typedef struct smla_local_batches {
    int32_t *query_lens;      /* [num_batches] */
    int32_t *query_start_loc; /* [num_batches + 1] */
    int32_t *seq_lens;        /* [num_batches] */
    int32_t *block_table;     /* [num_batches, attention_chunk / block_size] */
} smla_local_batches;

/* Makes attention_chunk's virtual requests. With `out` NULL it only counts them. A request without
 * queries has none, and padding has one without keys. */
SMLA_API smla_status smla_local_attention_batches(const smla_local_attention_args *args,
                                                  const smla_local_batches *out,
                                                  int64_t *num_batches, smla_error *error);

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
    /* Context parallelism: of every cp_interleave * cp_size positions of a request, rank cp_rank
     * has those from cp_rank * cp_interleave on, cp_interleave of them; cp_size 0: one rank has
     * all. Block tables are of the rank's own pages; lengths and topk_indices are those of whole
     * requests. */
    int64_t cp_rank;
    int64_t cp_size;
    int64_t cp_interleave;
} smla_builder_config;

/* One step's batch, as in vLLM's CommonAttentionMetadata. The host arrays are read during the call.
 * block_table is only referenced, and must stay alive until the next build. A request without query
 * tokens may stand anywhere, with any length up to max_model_len: the step reads nothing of it, and
 * the results of the others are those of a batch without it, bit for bit. */
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
    int64_t decode_query_len;        /* query tokens per decode that has any; 0 if none has */
    int64_t decode_num_splits;       /* number of split-KV ranges in the decode attention */
    const int32_t *req_id_per_token; /* device [num_actual_tokens] */
    /* The fields below describe the prefills of path "separate". They are NULL or 0 otherwise. */
    const int32_t *prefill_seq_lens;         /* device [num_prefills]; 0 without query tokens */
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

/* Runs one layer of the last built step. Writes the first T = num_actual_tokens rows of outputs.
 * With ranks, out and lse are the part of the rank's own keys, which smla_merge_attn_partials
 * merges, and attn_sink is that merge's. */
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

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_STEP_H */
