/* topk.h: the choice of the best keys by their logits. The conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_TOPK_H
#define SPARSE_MLA_TOPK_H

#include "sparse_mla/status.h"

#ifdef __cplusplus
extern "C" {
#endif

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
    const DLTensor *values;            /* out [T, k] of the logits' type, optional: the chosen
                                        * logits, then -inf */
    void *stream;
} smla_top_k_args;

SMLA_API smla_status smla_top_k_per_row(const smla_top_k_args *args, smla_error *error);

enum { SMLA_MAX_MERGED_LISTS = 64 };

/* The k best of N lists of positions, each as smla_top_k_per_row gives it for its share of a
 * token's keys: what the call would give for all keys together, by the same order and the same rule
 * for equal scores. No two lists of a token share a position. Entries below 0 are none. Lists that
 * share a position, or do not ascend, give a row of no meaning. */
typedef struct smla_top_k_merge_args {
    size_t struct_size;
    const DLTensor *indices; /* [N, T, K] int32, N of 1 to SMLA_MAX_MERGED_LISTS, N * K < 2^31 */
    const DLTensor *values;  /* [N, T, K] fp32 | bf16: the scores of the positions */
    int64_t k;
    const DLTensor *out; /* out [T, k] int32, ascending, then -1 */
    void *stream;
} smla_top_k_merge_args;

SMLA_API smla_status smla_top_k_merge(const smla_top_k_merge_args *args, smla_error *error);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_TOPK_H */
