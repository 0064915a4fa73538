/* layer.h: what the layers of all plans share: the checks of a step and of results, views of its
 * memory, and the order of a call. Defined in layer.c.
 */
#pragma once

#include "core/rule.h"
#include "sparse_mla/cache.h"
#include "step/engine.h"

/* A call of a layer. */
typedef struct smla_layer {
    const char *op;
    const smla_step *step;
    void *stream;
    smla_error *error;
} smla_layer;

/* Enters the public function of a layer: reads its args into `known`, and runs it on them. */
smla_status smla_enter_layer(const char *op, const void *args, void *known, size_t known_size,
                             smla_status (*run)(const void *known, smla_error *error),
                             smla_error *error);

/* Checks that the layer has a step. */
smla_status smla_require_step(const smla_layer *layer);

/* Checks an indexer's choice [>= T, up to topk_tokens]. */
smla_status smla_require_topk(const smla_layer *layer, smla_checker *checker, const char *name,
                              const DLTensor *topk, int64_t topk_tokens);

typedef struct smla_layer_results {
    const DLTensor *attn_sink;   /* [H], optional */
    const DLTensor *out;         /* [>= T, H, 512] */
    const DLTensor *lse;         /* [>= T, H] */
    const DLTensor *block_table; /* the step's, which its layers read */
    bool may_have_more_heads;    /* in attn_sink and out */
} smla_layer_results;

/* The end of a layer's check: the results, the step's own arrays, the device, and that nothing
 * which is written shares memory with another array. */
smla_status smla_require_results(const smla_layer *layer, smla_checker *checker,
                                 const smla_layer_results *results);

/* Makes a view [count] of int32 in the step's memory. */
const DLTensor *smla_view_vector(const smla_layer *layer, smla_view *view, const int32_t *data,
                                 int64_t count);

/* Makes a view [rows, columns] of int32 in the step's memory. */
const DLTensor *smla_view_rows(const smla_layer *layer, smla_view *view, const int32_t *data,
                               int64_t rows, int64_t columns, int64_t stride);

/* Makes a contiguous view of the step's memory: bf16, or fp32 for 32 bits. */
const DLTensor *smla_view_memory(const smla_layer *layer, smla_view *view, const void *data,
                                 int bits, int ndim, const int64_t *shape);

/* Rows of neighbouring requests that a layer gathers from the cache, one request behind another. */
typedef struct smla_chunk_rows {
    const DLTensor *kv_cache;
    const DLTensor *block_table; /* the rows of all requests of the step */
    int32_t kv_format;
    smla_scale_arg kv_scale; /* zeros: 1 */
    int64_t first_req;
    int64_t num_reqs;
    int64_t num_rows;
    const int32_t *lens;             /* device [num_reqs], like the next two */
    const int32_t *starts;           /* the first token of each; NULL: 0 */
    const int32_t *workspace_starts; /* where its rows begin in the workspace */
} smla_chunk_rows;

/* The arguments of the gather to the workspace. They point to arrays in `views`. */
smla_gather_kv_cache_args smla_chunk_gather(const smla_layer *layer, const smla_chunk_rows *rows,
                                            smla_view views[5]);

/* Makes a view of the attention workspace. */
const DLTensor *smla_view_scratch(const smla_layer *layer, smla_view *view);

/* Computes a layer whose args are checked: `run(call)`, unless the step has no tokens. */
smla_status smla_run_layer(const smla_layer *layer, smla_status (*run)(void *call), void *call);
