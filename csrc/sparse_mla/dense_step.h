/* dense_step.h: a step of dense MLA, as step.h has it for DeepSeek-V3.2: its metadata, and one
 * layer. Every token attends to all tokens of its request that are not behind it. The conventions
 * are in sparse_mla.h.
 */
#ifndef SPARSE_MLA_DENSE_STEP_H
#define SPARSE_MLA_DENSE_STEP_H

#include "sparse_mla/step.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct smla_dense_config {
    size_t struct_size;
    int64_t num_heads;
    int64_t block_size;       /* tokens per page */
    int64_t qk_nope_head_dim; /* Pn */
    int64_t qk_rope_head_dim; /* R: 64; 0 = 64; -1: keys have no RoPE part, so R is 0 */
    int64_t v_head_dim;       /* Pv */
    int64_t max_num_seqs;     /* largest B */
    int64_t max_num_batched_tokens;
    int64_t max_model_len;
    int64_t decode_threshold; /* 1 + speculative tokens; 0 = 1 */
    int32_t kv_format;        /* a format of attention with keys of 512 + R values */
    int32_t path; /* SMLA_PATH_MIXED, SEPARATE, or AUTO: each step has the cheaper one */
    DLDevice device;
    /* Memory that outlives the builder; NULL: it makes its own. Path MIXED uses none. */
    const DLTensor *workspace;        /* [rows, 512 + R] bf16: gathered context */
    const DLTensor *up_workspace;     /* [rows, H * (Pn + Pv)] bf16: up-projected latents; at least
                                       * as many rows as `workspace`, and as a batch has tokens */
    int64_t prefill_workspace_tokens; /* 0: those of `workspace`, or smla_context_workspace_size */
    int32_t context_plan;             /* smla_context_plan */
    /* Context parallelism: of every cp_interleave * cp_size positions of a request, rank cp_rank
     * has those from cp_rank * cp_interleave on, cp_interleave of them; cp_size 0: one rank has
     * all. Block tables are of the rank's own pages, and slot_mapping is -1 for tokens of other
     * ranks. Lengths are those of whole requests. The other fields are the same on all ranks, so
     * that these choose the same path. */
    int64_t cp_rank;
    int64_t cp_size;
    int64_t cp_interleave;
} smla_dense_config;

/* One step's batch. The host arrays are read during the call; seq_lens_cpu may be upper bounds of
 * the seq_lens of decodes, and of all requests on path "mixed". The others are read by the work
 * that the call starts, and block_table and slot_mapping by the step's layers. They must stay alive
 * until the next build. */
typedef struct smla_dense_build_args {
    size_t struct_size;
    const int32_t *query_start_loc_cpu; /* [B + 1] */
    const int32_t *seq_lens_cpu;        /* [B] */
    const DLTensor *seq_lens;           /* [B] int32, on the config's device */
    const DLTensor *block_table;        /* [>= B, W] int32 */
    const DLTensor *slot_mapping;       /* [>= T] int64 | int32 */
    int64_t num_reqs;
    int64_t num_actual_tokens;
    void *stream;
} smla_dense_build_args;

/* A build's result, in the builder's persistent buffers: valid until the next build or destroy. */
typedef struct smla_dense_metadata {
    smla_path path;
    int64_t num_reqs;
    int64_t num_actual_tokens;
    smla_batch_split split;
    int64_t decode_query_len;
    const int32_t *query_start_loc;  /* device [B + 1] */
    const int32_t *req_id_per_token; /* device [T]; 0 for padding tokens */
    const int64_t *input_positions;  /* device [T]; 0 for padding tokens */
    /* device [prefills + 1]: where their queries start among the tokens of prefills */
    const int32_t *prefill_query_start_loc;
    /* The cached context of prefills on path "separate", in chunks. A chunk's part i belongs to
     * prefill req_start + i, and is entry `first` + i of starts and lens. Chunk c has its running
     * sums from entry `first` + c on, one more than parts. All are NULL or 0 without context. */
    int64_t num_context_chunks;
    const smla_context_chunk *context_chunks;  /* host [num_context_chunks] */
    const int32_t *context_chunk_starts;       /* device: the first token of each part */
    const int32_t *context_chunk_lens;         /* device: tokens of each part */
    const int32_t *context_chunk_key_starts;   /* device: where its rows begin in the workspace */
    const int32_t *context_chunk_query_starts; /* device: and its queries among the chunk's */
} smla_dense_metadata;

typedef struct smla_dense_builder smla_dense_builder;

/* As the functions of smla_builder in step.h, but workspace_bytes counts all memory of the device.
 */
SMLA_API smla_status smla_dense_builder_create(const smla_dense_config *config,
                                               smla_dense_builder **builder, smla_error *error);
SMLA_API smla_status smla_dense_builder_build(smla_dense_builder *builder,
                                              const smla_dense_build_args *args,
                                              const smla_dense_metadata **metadata,
                                              smla_error *error);
SMLA_API void smla_dense_builder_destroy(smla_dense_builder *builder);
SMLA_API int64_t smla_dense_builder_workspace_bytes(const smla_dense_builder *builder);

/* Runs one layer of the last built step: turns q_pe and k_pe to their positions (with a table), and
 * writes the new tokens to the cache. Decodes absorb W_UK into the queries, attend to the cache,
 * and apply W_UV; so do all tokens on path "mixed". On path "separate", prefills attend to keys and
 * values that kv_b_proj makes of the new latents, and of the cached ones chunk by chunk. No input
 * is written. Writes the first T = num_actual_tokens rows of out and lse, a natural logarithm. A
 * padding token has out 0 and lse -inf. With ranks, out and lse are the rank's part, which
 * smla_merge_attn_partials merges: of its own keys in the cache; of prefills on path "separate", of
 * their cached context, and on rank 0 of the new tokens, too. */
typedef struct smla_dense_forward_args {
    size_t struct_size;
    smla_dense_builder *builder;
    const DLTensor *q;          /* [>= T, H, Pn + R] bf16, or [>= T, H, Pn] when q_pe is given */
    const DLTensor *q_pe;       /* [>= T, H, R] bf16, optional; NULL where R is 0 */
    const DLTensor *kv_c;       /* [>= T, 512] bf16 */
    const DLTensor *k_pe;       /* [>= T, R] bf16; optional where R is 0 */
    const DLTensor *kv_cache;   /* [pages, block_size, row] */
    const DLTensor *W_UK;       /* [512, H, Pn] bf16 */
    const DLTensor *W_UV;       /* [512, H, Pv] bf16 */
    const DLTensor *rope_table; /* [positions, R] fp32 | bf16, optional: the inputs are turned */
    const DLTensor *out;        /* out [>= T, H, Pv] bf16 */
    smla_scale_arg kv_scale;    /* fp8_e4m3 only */
    double softmax_scale;
    int32_t is_neox; /* pairs of RoPE: halves instead of neighbours */
    void *stream;
    const DLTensor *kv_b_proj; /* [512, H * (Pn + Pv)] bf16, any strides; for path "separate" */
    const DLTensor *lse;       /* out [>= T, H] fp32, optional */
} smla_dense_forward_args;

SMLA_API smla_status smla_dense_forward(const smla_dense_forward_args *args, smla_error *error);

/* The same with weights that smla_absorb_q_proj and smla_absorb_o_proj have made: from the queries'
 * latents to the layer's output. Decodes multiply by W_Q_UK and W_QR, attend to the cache, and
 * multiply by W_UV_O; so do all tokens on path "mixed". On path "separate", prefills multiply by
 * W_Q and W_QR, attend as in smla_dense_forward, and multiply by o_proj. W_Q_UK and W_UV_O are both
 * bf16, or both e4m3 with descales: then fp8_linear multiplies, in groups of the input that the
 * descales have with it. Not with ranks, because W_UV_O adds up heads, and parts of heads are to be
 * merged first. */
typedef struct smla_dense_absorbed_forward_args {
    size_t struct_size;
    smla_dense_builder *builder;
    const DLTensor *q_c;            /* [>= T, Lq] bf16; with e4m3 weights Lq is a multiple of 128,
                                     * and at most 8192, or about 1000 * H if that is more */
    const DLTensor *kv_c;           /* [>= T, 512] bf16 */
    const DLTensor *k_pe;           /* [>= T, R] bf16; optional where R is 0 */
    const DLTensor *kv_cache;       /* [pages, block_size, row] */
    const DLTensor *W_Q_UK;         /* [Lq, H * 512] bf16, any strides; or [H * 512, Lq] e4m3 */
    const DLTensor *W_Q_UK_descale; /* e4m3 has one, as smla_fp8_linear takes it; else NULL */
    const DLTensor *W_QR;           /* [Lq, H * R] bf16, any strides; NULL where R is 0 */
    const DLTensor *W_UV_O;         /* [H * 512, hidden] bf16, any strides; or [hidden, H * 512] */
    const DLTensor *W_UV_O_descale;
    const DLTensor *W_Q;        /* [Lq, H * Pn] bf16, any strides; for path "separate" */
    const DLTensor *o_proj;     /* [H * Pv, hidden] bf16, any strides; for path "separate" */
    const DLTensor *kv_b_proj;  /* [512, H * (Pn + Pv)] bf16, any strides; for path "separate" */
    const DLTensor *rope_table; /* [positions, R] fp32 | bf16; NULL: nothing is turned */
    const DLTensor *out;        /* out [>= T, hidden] bf16 */
    smla_scale_arg kv_scale;    /* fp8_e4m3 only */
    double softmax_scale;
    int32_t is_neox;          /* pairs of RoPE: halves instead of neighbours */
    int64_t input_group_rows; /* groups of smla_fp8_linear; for e4m3 */
    int64_t input_group_columns;
    void *stream;
    const DLTensor *lse; /* out [>= T, H] fp32, optional */
} smla_dense_absorbed_forward_args;

SMLA_API smla_status smla_dense_absorbed_forward(const smla_dense_absorbed_forward_args *args,
                                                 smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_DENSE_STEP_H */
