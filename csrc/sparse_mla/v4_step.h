/* v4_step.h: a step of DeepSeek V4, as step.h has it for DeepSeek-V3.2: its metadata, and the
 * attention of one layer. The conventions are in sparse_mla.h.
 *
 * A layer has a ratio r: its compressed cache has a row per r tokens. A layer whose ratio is 1 has
 * the sliding window only. The layers of SMLA_V4_INDEXED_RATIO have an indexer, which chooses rows
 * for every token; layers of other ratios attend to all complete groups.
 */
#ifndef SPARSE_MLA_V4_STEP_H
#define SPARSE_MLA_V4_STEP_H

#include "sparse_mla/step.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SMLA_V4_MAX_RATIOS = 4,
    SMLA_V4_INDEXED_RATIO = 4, /* its layers have an indexer */
};

typedef struct smla_v4_config {
    size_t struct_size;
    int64_t num_heads;
    int64_t window;         /* tokens that a query sees in the sliding window, itself included */
    int64_t topk_tokens;    /* most rows that an indexer chooses */
    int64_t block_size;     /* tokens per page of a compressed cache, a multiple of each ratio */
    int64_t swa_block_size; /* tokens per page of the sliding window's cache */
    int64_t max_num_seqs;   /* largest R */
    int64_t max_num_batched_tokens;
    int64_t max_model_len;
    int64_t decode_threshold;                      /* 1 + speculative tokens; 0 = 1 */
    int64_t prefill_chunk_size;                    /* prefills that share the workspace; 0 = 4 */
    int64_t num_ratios;                            /* 0...4 */
    int64_t compress_ratios[SMLA_V4_MAX_RATIOS];   /* different ones, at least 2 */
    int64_t state_block_sizes[SMLA_V4_MAX_RATIOS]; /* tokens per page of the states, by ratio */
    double softmax_scale;
    double q_scale;               /* scale of e4m3 queries; 0 = 1 */
    double kv_scale;              /* scale of SMLA_KV_FP8_E4M3 caches; 0 = 1 */
    int32_t kv_format;            /* smla_kv_format of the sliding window's cache */
    int32_t compressed_kv_format; /* smla_kv_format of the compressed caches */
    /* SMLA_PATH_SEPARATE or SMLA_PATH_DIRECT. AUTO is DIRECT without `workspace`; with one, each
     * step takes what is estimated to take less time. */
    int32_t path;
    DLDevice device;
    const DLTensor *workspace; /* [rows, 512] bf16, outlives the builder; NULL = its own */
    /* Context parallelism of compressed rows: of every cp_interleave * cp_size rows of a request in
     * a compressed cache, or the indexer's, rank cp_rank has those from cp_rank * cp_interleave on,
     * cp_interleave of them; cp_size 0: one rank has all. Tables of these caches are of the rank's
     * own pages. The window and the states are whole on every rank. Not with SMLA_PATH_SEPARATE. */
    int64_t cp_rank;
    int64_t cp_size;
    int64_t cp_interleave;
} smla_v4_config;

/* One step's batch. The host arrays are read during the call. slot_mapping is read by the work that
 * the call starts. Block tables must stay alive until the next build. Table i is that of ratio i of
 * the config; NULL: the step has none. */
typedef struct smla_v4_build_args {
    size_t struct_size;
    int64_t num_reqs;
    int64_t num_actual_tokens;
    int64_t max_seq_len;                /* at least the longest seq_len */
    const int32_t *query_start_loc_cpu; /* [R + 1] */
    const int32_t *seq_lens_cpu;        /* [R] */
    const DLTensor *slot_mapping;       /* [>= T] int64 | int32, of the sliding window's cache */
    const DLTensor *block_table;        /* [>= R, W] int32, of the sliding window's cache */
    const DLTensor *compressed_tables[SMLA_V4_MAX_RATIOS]; /* [>= R, W] int32 */
    const DLTensor *state_tables[SMLA_V4_MAX_RATIOS];      /* [>= R, W] int32 */
    const DLTensor *index_table;       /* the indexer's keys; NULL = as the indexed ratio */
    const DLTensor *index_state_table; /* their states; NULL = as the indexed ratio */
    void *stream;
} smla_v4_build_args;

/* The lists of one compressed cache, or of the indexer's, on the device. Vectors have T entries. */
typedef struct smla_v4_group {
    int64_t ratio;                     /* 0: the step has no such cache */
    const int32_t *slot_mapping;       /* where a token that ends a group has its row, else -1 */
    const int32_t *state_slot_mapping; /* where a token has its state; NULL without a table */
    const int32_t *context_lens;       /* complete groups that a token sees */
    const int32_t *lens;               /* those of them that `indices` has room for */
    const int32_t *indices; /* [T, width]: slots of a decode, row numbers of a prefill, then -1;
                             * NULL where an indexer chooses */
    int64_t width;
    int64_t indices_stride_token;
} smla_v4_group;

/* A build's result, in the builder's persistent buffers: valid until the next build or destroy. All
 * but the numbers and the chunks is on the device. */
typedef struct smla_v4_metadata {
    smla_path path;
    int64_t num_reqs;
    int64_t num_actual_tokens;
    smla_batch_split split;
    int64_t decode_query_len;         /* query tokens of the longest decode */
    const int32_t *req_id_per_token;  /* [T], 0 for padding */
    const int32_t *positions;         /* [T], 0 for padding */
    const int32_t *query_start_loc;   /* [R + 1] */
    const int32_t *seq_lens;          /* [R] */
    const int32_t *gather_lens;       /* [R]: a query and the part of the window before it */
    const uint8_t *is_valid;          /* [T]: whether a token has a request and a slot */
    const int32_t *swa_indices;       /* [T, window]: slots, oldest first, then -1 */
    const int32_t *swa_lens;          /* [T] */
    const smla_prefill_chunk *chunks; /* host [num_chunks]: prefills that share the workspace */
    int64_t num_chunks;
    int64_t num_groups; /* the ratios, and the indexer if a ratio has one */
    smla_v4_group groups[SMLA_V4_MAX_RATIOS + 1];
} smla_v4_metadata;

typedef struct smla_v4_builder smla_v4_builder;

/* These four are as those of step.h. */
SMLA_API smla_status smla_v4_builder_create(const smla_v4_config *config, smla_v4_builder **builder,
                                            smla_error *error);

SMLA_API smla_status smla_v4_builder_build(smla_v4_builder *builder, const smla_v4_build_args *args,
                                           const smla_v4_metadata **metadata, smla_error *error);

SMLA_API void smla_v4_builder_destroy(smla_v4_builder *builder);

SMLA_API int64_t smla_v4_builder_workspace_bytes(const smla_v4_builder *builder);

/* The attention of one layer of the last built step, whose rows are in the caches already. Writes
 * the first T = num_actual_tokens rows of outputs. A token that is not valid has out 0 and lse
 * -inf. With ranks, out and lse are the rank's part, which smla_merge_attn_partials merges: of its
 * own compressed rows, and on rank 0 of the window, too. topk_indices are numbers of all rows,
 * slots are not taken, and attn_sink is the merge's. */
typedef struct smla_v4_attend_args {
    size_t struct_size;
    smla_v4_builder *builder;
    int64_t compress_ratio;              /* the layer's; 1: it has the sliding window only */
    const DLTensor *q;                   /* [>= T, H, 512] bf16 | e4m3 */
    const DLTensor *swa_kv_cache;        /* pages of swa_block_size tokens */
    const DLTensor *compressed_kv_cache; /* pages of block_size / ratio rows: a ratio above 1 */
    const DLTensor
        *topk_indices;         /* [>= T, K] int32, -1 = none; layers with an indexer only. NULL is
                                   * enough with slots, unless path "separate" has prefills */
    const DLTensor *attn_sink; /* [>= H] fp32, optional */
    const DLTensor *out;       /* out [>= T, >= H, 512] bf16; more heads stay as they are */
    const DLTensor *lse;       /* out [>= T, H] fp32 */
    void *stream;
    const DLTensor *slots; /* [>= T, K] int32, optional: the slots of topk_indices, as the call of
                            * lightning_indexer that chose them gives them */
    const DLTensor *lens;  /* [>= T] int32, with slots: their number */
} smla_v4_attend_args;

SMLA_API smla_status smla_v4_attend(const smla_v4_attend_args *args, smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_V4_STEP_H */
