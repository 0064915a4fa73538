/* builder.h: the contents of the metadata builder. builder.c fills them, and forward.c reads
 * them. */
#pragma once

#include "core/backend.h"
#include "core/dltensor.h"
#include "sparse_mla/step.h"

/* The metadata of a step: arrays that follow each other in the mirror. A build fills them on the
 * host, and they have the same offsets on the device. The arrays for prefills exist on path
 * "separate" only. */
typedef struct smla_step_arrays {
    int32_t *req_id_per_token;         /* [max_num_batched_tokens], zeros past the step's tokens */
    int32_t *prefill_request_ids;      /* [max_num_batched_tokens] */
    int32_t *prefill_seq_lens;         /* [max_num_seqs] */
    int32_t *prefill_workspace_starts; /* [max_num_seqs] */
} smla_step_arrays;

struct smla_builder {
    smla_builder_config config; /* defaults filled in; `workspace` is not used after create */
    const smla_backend *backend;
    smla_metadata metadata;
    bool plans_path; /* the config has no path: a step on "separate" may be "direct" */
    bool is_built;
    smla_step_arrays arrays; /* on the device */
    smla_view block_table;   /* block_table of the last build, the caller's memory */

    /* Persistent device buffers, sized for the largest batch. */
    smla_mirror *mirror; /* holds the arrays of smla_step_arrays, which a build writes */
    int32_t *indices;    /* [max_num_batched_tokens, topk_tokens]; NULL unless path "separate" */
    uint8_t *scratch;    /* attention workspace */
    int64_t scratch_bytes;
    uint16_t *own_workspace;     /* [prefill_workspace_tokens, 576] bf16, or NULL */
    smla_view prefill_workspace; /* own_workspace or the caller's; data NULL on other paths */

    /* Host. */
    smla_prefill_chunk *chunks; /* [max_num_seqs] */
    int64_t *chunk_ends;        /* [max_num_seqs] */
};
