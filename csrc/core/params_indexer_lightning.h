/* params_indexer_lightning.h: what the backends read of lightning_indexer: the params of the two
 * operators that it is made of.
 */
#pragma once

#include "core/params_indexer.h"
#include "core/params_topk.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The calls of all tokens. Logits lie in a matrix of chunk_tokens rows, which each chunk of tokens
 * overwrites. If N <= k, there is no matrix and one chunk: top-k needs no logits, and logits are
 * only made where the caller wants `values`. */
typedef struct smla_lightning_params {
    smla_call call;
    smla_logits_params logits; /* its `out` is the matrix, or `values`; NULL: no logits are made */
    smla_top_k_params top_k;
    int64_t chunk_tokens; /* at least 1 */
} smla_lightning_params;

/* Tokens per chunk where the matrix has room for `most` rows: chunks of about the same size, in
 * multiples of `unit` where there is room for one. */
int64_t smla_lightning_chunk_tokens(int64_t num_tokens, int64_t most, int64_t unit);

/* The calls of the chunk that begins at a token. */
smla_lightning_params smla_lightning_chunk(const smla_lightning_params *params, int64_t token);

#ifdef __cplusplus
}
#endif
