/* v4_builder.h: the metadata builder of DeepSeek V4's layers, and the attention of a layer.
 * v4_plan.c has its numbers, v4_builder.c fills it, and v4_attend.c reads it.
 *
 * A layer has a ratio r: its compressed cache has a row per r tokens. A layer whose ratio is 1 has
 * the sliding window only. The layers of SMLA_V4_INDEXED_RATIO have an indexer, which chooses rows
 * for every token; layers of other ratios attend to all complete groups.
 */
#pragma once

#include "core/backend.h"
#include "core/dltensor.h"
#include "core/params_step.h"
#include "sparse_mla/step.h"
#include "step/batch.h"

enum {
    SMLA_V4_MAX_RATIOS = SMLA_MAX_STEP_GROUPS - 1,
    SMLA_V4_INDEXED_RATIO = 4,
    SMLA_V4_LIST_ALIGN = 128, /* the columns of index lists are rounded up to it */
};

typedef struct smla_v4_config {
    int64_t num_heads;
    int64_t window;
    int64_t topk_tokens;    /* most rows that an indexer chooses */
    int64_t block_size;     /* tokens per page of a compressed cache, a multiple of each ratio */
    int64_t swa_block_size; /* tokens per page of the sliding window's cache */
    int64_t max_num_seqs;
    int64_t max_num_batched_tokens;
    int64_t max_model_len;
    int64_t decode_threshold;
    int64_t prefill_chunk_size; /* prefills that share the workspace at a time */
    int64_t num_ratios;
    int64_t ratios[SMLA_V4_MAX_RATIOS]; /* different ones, at least 2 */
    int64_t state_block_sizes[SMLA_V4_MAX_RATIOS];
    double softmax_scale;
    double q_scale;
    double kv_scale;
    int32_t kv_format; /* smla_kv_format of the sliding window's cache */
    int32_t compressed_kv_format;
    int32_t path; /* SMLA_PATH_DIRECT or SMLA_PATH_SEPARATE; AUTO is direct */
    DLDevice device;
    const DLTensor *workspace; /* [rows, 512] bf16, outlives the builder; NULL = its own */
} smla_v4_config;

/* What a build sends from the host, one array behind another in the mirror. */
typedef struct smla_v4_step {
    int32_t *req_id_per_token; /* [max_num_batched_tokens], 0 for padding */
    int32_t *positions;        /* [max_num_batched_tokens], 0 for padding */
    int32_t *query_start_loc;  /* [max_num_seqs + 1] */
    int32_t *seq_lens;         /* [max_num_seqs] */
    int32_t *gather_lens;      /* [max_num_seqs]: a query and the window before it */
    int32_t *compressed_lens[SMLA_V4_MAX_RATIOS]; /* [max_num_seqs]: seq_lens / ratio */
} smla_v4_step;

/* The lists of a compressed cache, see smla_step_group. */
typedef struct smla_v4_group {
    int32_t *slot_mapping; /* [max_num_batched_tokens], as the next three */
    int32_t *state_slot_mapping;
    int32_t *context_lens;
    int32_t *lens;
    int32_t *indices; /* [max_num_batched_tokens, columns]; empty with an indexer */
} smla_v4_group;

/* What kernels write on the device. Group i is that of ratio i, the last one the indexer's. */
typedef struct smla_v4_lists {
    int32_t *is_valid; /* [max_num_batched_tokens] bytes */
    int32_t *swa_indices;
    int32_t *swa_lens;
    smla_v4_group groups[SMLA_MAX_STEP_GROUPS];
} smla_v4_lists;

/* A step's batch. The host arrays are read during the call. slot_mapping is read by the work that
 * the call starts. Block tables must stay alive until the next build. */
typedef struct smla_v4_build_args {
    smla_batch batch;
    int64_t max_seq_len;          /* at least the longest seq_len */
    const DLTensor *slot_mapping; /* [>= T] int64 | int32 */
    const DLTensor *block_table;  /* [>= R, W] int32, of the sliding window's cache */
    /* The tables of ratio i; behind the last ratio, the indexer's. NULL: absent, or for the indexer
     * the same as those of the ratio that it chooses from. */
    const DLTensor *compressed_tables[SMLA_MAX_STEP_GROUPS];
    const DLTensor *state_tables[SMLA_MAX_STEP_GROUPS];
    void *stream;
} smla_v4_build_args;

typedef struct smla_v4_metadata {
    int64_t num_reqs;
    int64_t num_actual_tokens;
    smla_batch_split split;
    int64_t decode_query_len; /* query tokens of the longest decode */
    bool has_group[SMLA_MAX_STEP_GROUPS];
    bool has_state[SMLA_MAX_STEP_GROUPS];
    int64_t widths[SMLA_MAX_STEP_GROUPS]; /* columns of `indices` in use */
    int64_t num_chunks;
} smla_v4_metadata;

/* Prefills that share the workspace. */
typedef struct smla_v4_chunk {
    int64_t req_start; /* 0 is the batch's first request */
    int64_t req_end;
    int64_t token_start;
    int64_t token_end;
} smla_v4_chunk;

typedef struct smla_v4_builder {
    smla_v4_config config;
    const smla_backend *backend;
    smla_v4_metadata metadata;
    bool is_built;
    smla_v4_step step;                     /* on the device */
    smla_v4_lists lists;                   /* on the device */
    int64_t columns[SMLA_MAX_STEP_GROUPS]; /* row stride of each group's `indices` */
    smla_v4_chunk *chunks;                 /* [max_num_seqs], on the host */

    /* Block tables of the last build, the caller's memory. */
    smla_view swa_table;
    smla_view compressed_tables[SMLA_V4_MAX_RATIOS];

    /* Persistent device buffers, sized for the largest batch. */
    smla_mirror *mirror;  /* holds smla_v4_step */
    int32_t *list_memory; /* holds smla_v4_lists */
    int32_t *indices;     /* [max_num_batched_tokens, index_columns]: the lists of one call */
    int32_t *index_lens;  /* [max_num_batched_tokens] */
    int64_t index_columns;
    uint8_t *scratch; /* attention workspace */
    int64_t scratch_bytes;
    uint16_t *own_workspace; /* or NULL */
    smla_view workspace;     /* [workspace_rows, 512] bf16; data NULL on path "direct" */
} smla_v4_builder;

/* ---- Numbers: v4_plan.c -------------------------------------------------------------------- */

smla_status smla_v4_check_config(const smla_v4_config *config, smla_error *error);

/* The place of a ratio in the config, or -1. */
int smla_v4_find_ratio(const smla_v4_config *config, int64_t ratio);

/* The groups of a step: the ratios, and the indexer if a ratio has one. */
int smla_v4_num_groups(const smla_v4_config *config);
int64_t smla_v4_group_ratio(const smla_v4_config *config, int group);

/* Columns of a group's `indices`: all complete groups of the longest request, rounded up. */
int64_t smla_v4_list_columns(const smla_v4_config *config, int64_t ratio);

/* Those of them that a step uses. */
int64_t smla_v4_used_columns(const smla_v4_config *config, int64_t ratio, int64_t max_seq_len);

/* Workspace rows of a request: first its compressed rows, from `window_start` on its tokens. */
typedef struct smla_v4_rows {
    int64_t window_start; /* N; 0 for a layer without compressed rows */
    int64_t request_rows; /* M */
} smla_v4_rows;

smla_v4_rows smla_v4_workspace_rows(const smla_v4_config *config, int64_t ratio);

/* Rows of the workspace that all layers share; 0 on path "direct". */
int64_t smla_v4_workspace_size(const smla_v4_config *config);

/* Fills the host's arrays of a step. */
void smla_v4_fill_step(const smla_v4_config *config, const smla_batch *batch,
                       const smla_v4_step *step);

/* Cuts the prefills of a batch into chunks. Returns how many there are. */
int64_t smla_v4_cut_chunks(const smla_v4_config *config, const smla_batch *batch,
                           int64_t num_decodes, smla_v4_chunk *chunks);

/* ---- Builder: v4_builder.c ----------------------------------------------------------------- */

/* Makes a builder with all memory that steps within the limits of `config` need. */
smla_status smla_v4_builder_create(const smla_v4_config *config, smla_v4_builder **builder,
                                   smla_error *error);

/* Plans a step. If an argument is refused, the last step stays valid. */
smla_status smla_v4_builder_build(smla_v4_builder *builder, const smla_v4_build_args *args,
                                  smla_error *error);

/* NULL is allowed. */
void smla_v4_builder_destroy(smla_v4_builder *builder);

/* ---- Attention: v4_attend.c ---------------------------------------------------------------- */

/* One layer of the last step that the builder built. Writes the first T rows of outputs. */
typedef struct smla_v4_attend_args {
    smla_v4_builder *builder;
    int64_t ratio;                /* the layer's; 1: it has the sliding window only */
    const DLTensor *q;            /* [>= T, H, 512] bf16 | e4m3 */
    const DLTensor *swa_cache;    /* pages of swa_block_size tokens */
    const DLTensor *compressed;   /* pages of block_size / ratio rows, unless ratio is 1 */
    const DLTensor *topk_indices; /* [>= T, K] int32, -1 = none; layers with an indexer only */
    const DLTensor *attn_sink;    /* [>= H] fp32, optional */
    const DLTensor *out;          /* out [>= T, >= H, 512] bf16; more heads stay as they are */
    const DLTensor *lse;          /* out [>= T, H] fp32 */
    void *stream;
} smla_v4_attend_args;

smla_status smla_v4_attend(const smla_v4_attend_args *args, smla_error *error);
