/* index.h: lists of positions become lists of slots, or of a rank's own positions. The conventions
 * are in sparse_mla.h. */
#ifndef SPARSE_MLA_INDEX_H
#define SPARSE_MLA_INDEX_H

#include "sparse_mla/status.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* Rows of a prefill chunk's workspace [requests, M] for each token: the first
 * tl = min((p + 1) / ratio, topk) of its topk_indices, then the window that ends at its position p.
 * Request b has its compressed rows from M * b on, and its last gather_lens[b] tokens from
 * M * b + N on. Tokens past the last request have no rows. gather_lens[b] must hold the windows of
 * b's tokens, and is at most seq_lens[b] and M - N: else an error on the CPU, and on CUDA -1 for
 * tokens that are not there. */
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

/* ---- Context parallelism -------------------------------------------------------------------- */

/* Of a request whose cache is split over cp_size ranks, rank cp_rank has of every
 * cp_interleave * cp_size positions those from cp_rank * cp_interleave on, cp_interleave of them.
 * Its local position x is the number of its own positions in front of one. cp_size 0: one rank has
 * all positions. */

/* Positions that the rank has -> its local positions; others, and negative ones, become -1 where
 * they stand. */
typedef struct smla_cp_positions_args {
    size_t struct_size;
    const DLTensor *positions; /* [N] or [T, K], int64 | int32, any strides */
    int64_t cp_rank;
    int64_t cp_size;
    int64_t cp_interleave;
    const DLTensor *out; /* out, shape and dtype of positions, rows any stride apart */
    void *stream;
} smla_cp_positions_args;

SMLA_API smla_status smla_cp_local_positions(const smla_cp_positions_args *args, smla_error *error);

/* The same for lists, without holes: the local positions of each row in their order, then -1. */
typedef struct smla_cp_topk_args {
    size_t struct_size;
    const DLTensor *topk_indices; /* [T, K] int32 positions, -1 = none */
    int64_t cp_rank;
    int64_t cp_size;
    int64_t cp_interleave;
    const DLTensor *out;  /* out [T, K] int32 */
    const DLTensor *lens; /* out [T] int32: local positions per row */
    void *stream;
} smla_cp_topk_args;

SMLA_API smla_status smla_cp_local_topk(const smla_cp_topk_args *args, smla_error *error);

/* How many of the first seq_lens[b] positions the rank has; a length below 0 counts as 0. */
typedef struct smla_cp_lengths_args {
    size_t struct_size;
    const DLTensor *seq_lens; /* [B] int32 */
    int64_t cp_rank;
    int64_t cp_size;
    int64_t cp_interleave;
    const DLTensor *out; /* out [B] int32 */
    void *stream;
} smla_cp_lengths_args;

SMLA_API smla_status smla_cp_local_lengths(const smla_cp_lengths_args *args, smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_INDEX_H */
