/* builder.h: inside the metadata builder, for builder.c, which fills it, and forward.c, which reads
 * it. */
#pragma once

#include "core/backend.h"
#include "core/dltensor.h"

/* The metadata of a step, one array behind another in the mirror: the same places on the host,
 * where a build fills them, and on the device. Those of prefills are there on path "separate"
 * only. */
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
    bool plans_path; /* the config leaves it open: a step on "separate" may be "direct" */
    bool is_built;
    smla_step_arrays arrays; /* on the device */
    smla_view block_table;   /* the caller's, of the last build */

    /* Persistent device buffers, sized for the largest batch. */
    smla_mirror *mirror; /* what a build writes: the arrays of smla_step_arrays */
    int32_t *indices;    /* [max_num_batched_tokens, topk_tokens]; NULL unless path "separate" */
    uint8_t *scratch;    /* attention workspace */
    int64_t scratch_bytes;
    uint16_t *own_workspace;     /* [prefill_workspace_tokens, 576] bf16, or NULL */
    smla_view prefill_workspace; /* own_workspace or the caller's; data NULL on paths without */

    /* Host. */
    smla_prefill_chunk *chunks; /* [max_num_seqs] */
    int64_t *chunk_ends;        /* [max_num_seqs] */
};
