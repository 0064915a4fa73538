/* paged_step.h: the metadata of a step for attention to pages: which keys each request has, and
 * where they lie, in every forward mode of a serving engine. The conventions are in sparse_mla.h.
 */
#ifndef SPARSE_MLA_PAGED_STEP_H
#define SPARSE_MLA_PAGED_STEP_H

#include "sparse_mla/cache.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a step does. N is num_draft_tokens, k is topk and S is speculative_num_steps of the config.
 * With k > 1 the drafts of a request are a tree. */
typedef enum smla_forward_mode {
    SMLA_MODE_DECODE = 1,        /* one token per request */
    SMLA_MODE_DRAFT = 2,         /* step i of a draft: one token per request, k with a tree */
    SMLA_MODE_TARGET_VERIFY = 3, /* N draft tokens per request */
    SMLA_MODE_EXTEND = 4,        /* extend_seq_lens tokens per request */
    SMLA_MODE_DRAFT_EXTEND = 5,  /* the same, of the draft model */
} smla_forward_mode;

typedef struct smla_paged_config {
    size_t struct_size;
    int64_t max_bs;           /* largest B */
    int64_t max_num_tokens;   /* query tokens of EXTEND and DRAFT_EXTEND */
    int64_t max_context_len;  /* largest seq_len, with tokens of an encoder; drafts come on top */
    int64_t page_size;        /* tokens per page; 0 = 1 */
    int64_t topk;             /* k: branches of a draft; 0 = 1 */
    int64_t num_draft_tokens; /* N; 0: there is no TARGET_VERIFY, and no DRAFT_EXTEND */
    int64_t speculative_num_steps; /* S; 0: there is no DRAFT */
    int64_t attention_chunk;       /* a multiple of page_size, for local layers; 0 = none */
    int64_t sliding_window_size;   /* keys before a token that it sees; read if has_window */
    int64_t has_window;
    int64_t has_window_pool;    /* builds have full_to_swa_index_mapping */
    int64_t is_encoder_decoder; /* builds have encoder_lens */
    int64_t drafts_only;        /* the builder serves DRAFT alone, and has no other arrays */
    DLDevice device;
} smla_paged_config;

/* One step's batch. The arrays are read by the work that the call starts. Host arrays are read
 * during the call, give maxima alone, and may be upper bounds. They may be NULL on the CPU. A
 * request whose seq_len is not positive is padding.
 *
 * With is_fixed, what the metadata says of sizes follows from num_reqs, num_tokens and the config
 * alone: the same call with other lengths refreshes the same arrays, by one kernel with the same
 * grid. So it may be captured in a graph, or be made again in front of a graph that has layers
 * alone. Host arrays are not read, and there are no EXTEND and no common_prefix_len. */
typedef struct smla_paged_build_args {
    size_t struct_size;
    const DLTensor *seq_lens;                  /* [B] int32 */
    const DLTensor *req_pool_indices;          /* [B] int64 | int32: rows of req_to_token */
    const DLTensor *req_to_token;              /* [rows, width] int32: the slot of each position */
    const DLTensor *full_to_swa_index_mapping; /* [slots] int32: slots of the window pool */
    const DLTensor *extend_seq_lens; /* [B] int32; NULL in EXTEND: no request has a prefix */
    const DLTensor *out_cache_loc;   /* int64 | int32 slots of this step's tokens, optional; in
                                      * DRAFT with a tree [B * k * S] */
    const DLTensor *custom_mask;     /* bool, of each request N rows of seq_len + N entries */
    const DLTensor *encoder_lens;    /* [B] int32 */
    const int32_t *seq_lens_cpu;     /* host [B], like the next two */
    const int32_t *extend_seq_lens_cpu;
    const int32_t *encoder_lens_cpu;
    int64_t num_reqs;
    int64_t spec_step;         /* DRAFT: the first of its steps */
    int64_t num_steps;         /* DRAFT: steps that this build plans; 0 = 1 */
    int64_t common_prefix_len; /* tokens that the requests share; 0 = none */
    int64_t num_tokens;        /* is_fixed: query tokens together, the same number for each request;
                                * in DRAFT_EXTEND a request may have less */
    int64_t num_padding_reqs;  /* is_fixed: so many of the last requests are padding */
    int32_t mode;              /* smla_forward_mode */
    int32_t is_fixed;
    void *stream;
} smla_paged_build_args;

/* Requests, or rows with one query each, and the keys that they see. Arrays are on the device. A
 * part that a batch lacks has no entries. */
typedef struct smla_paged_part {
    int64_t num_rows;
    int64_t columns; /* entries in a row */
    int64_t max_seq_len_q;
    int64_t max_seq_len_k;
    const int32_t *cache_seqlens; /* [num_rows] */
    const int32_t *cu_seqlens_q;  /* [num_rows + 1] */
    const int32_t *cu_seqlens_k;  /* [num_rows + 1] */
    const int32_t *entries;       /* [num_rows, columns]: pages, or slots of a tree's rows */
    int64_t entries_stride;
} smla_paged_part;

/* attention_chunk's virtual requests, see smla_local_attention_batches. Those behind the last one
 * have no tokens. */
typedef struct smla_paged_local {
    int64_t num_batches;
    int64_t columns;
    int64_t max_query_len;
    int64_t max_seq_len;
    const int32_t *query_start_loc; /* [num_batches + 1] */
    const int32_t *seqused_k;       /* [num_batches] */
    const int32_t *block_table;     /* [num_batches, columns], compact */
} smla_paged_local;

/* A build's result, in the builder's persistent buffers: valid until its next build of that mode,
 * or destroy. Step i of a DRAFT's steps has its own cache_seqlens and cu_seqlens_k, which lie
 * i * seqlens_stride and i * starts_stride behind the first ones; of expand and swa_spec,
 * i * row_seqlens_stride and i * row_starts_stride. Each step adds 1 to max_seq_len_k, and to the
 * columns of expand and swa_spec. With a tree or is_fixed, max_seq_len_k of `requests` stays. */
typedef struct smla_paged_metadata {
    smla_forward_mode mode;
    int64_t num_reqs;
    int64_t num_steps;
    int64_t first_step;
    int64_t is_fixed;         /* as in the args of the build */
    smla_paged_part requests; /* over pages */
    smla_paged_part expand;   /* a tree: a row per draft token or branch, over slots */
    smla_paged_part swa_spec; /* the same with the end of the prefix, for layers with a window */
    smla_paged_part prefix;   /* the shared prefix as one request */
    /* The same cut at a page, without cu_seqlens_k, for calls without a cache_leftpad: the whole
     * pages of the prefix, and the requests behind them. */
    smla_paged_part prefix_pages;
    smla_paged_part rest;
    smla_paged_part encoder; /* over pages; without cu_seqlens_q */
    smla_paged_local local;
    const int32_t *swa_page_table; /* pages of the window pool, beside the entries of `requests` */
    const int32_t *cache_leftpad;  /* [B], or NULL */
    const int32_t *swa_out_cache_loc;
    int64_t num_cache_loc;
    const int32_t *token_ids; /* [num_tokens + 1]: 0, 1, 2, ... */
    int64_t num_tokens;       /* query tokens; an upper bound where only the device knows it */
    int64_t seqlens_stride;
    int64_t starts_stride;
    int64_t row_seqlens_stride;
    int64_t row_starts_stride;
    int64_t local_stride; /* rows of the local arrays from one step to the next */
} smla_paged_metadata;

typedef struct smla_paged_builder smla_paged_builder;

/* As the functions of smla_builder in step.h, but workspace_bytes counts all memory of the device.
 */
SMLA_API smla_status smla_paged_builder_create(const smla_paged_config *config,
                                               smla_paged_builder **builder, smla_error *error);
SMLA_API smla_status smla_paged_builder_build(smla_paged_builder *builder,
                                              const smla_paged_build_args *args,
                                              const smla_paged_metadata **metadata,
                                              smla_error *error);
SMLA_API void smla_paged_builder_destroy(smla_paged_builder *builder);
SMLA_API int64_t smla_paged_builder_workspace_bytes(const smla_paged_builder *builder);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_PAGED_STEP_H */
