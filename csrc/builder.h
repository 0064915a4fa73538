/* builder.h: inside the metadata builder, for builder.c, which fills it, and forward.c, which reads
 * it. */
#ifndef SMLA_BUILDER_H
#define SMLA_BUILDER_H

#include "backend.h"
#include "dltensor.h"

struct smla_builder {
    smla_builder_config config; /* defaults filled in; `workspace` is not used after create */
    const smla_backend *backend;
    smla_metadata metadata;
    bool is_built;
    smla_view block_table; /* the caller's, of the last build */

    /* Persistent device buffers, sized for the largest batch. */
    int32_t *req_id_per_token;         /* [max_num_batched_tokens] */
    int32_t *prefill_seq_lens;         /* [max_num_seqs] */
    int32_t *prefill_request_ids;      /* [max_num_batched_tokens] */
    int32_t *prefill_workspace_starts; /* [max_num_seqs] */
    int32_t *indices;                  /* [max_num_batched_tokens, topk_tokens], converted */
    uint8_t *scratch;                  /* attention workspace */
    int64_t scratch_bytes;
    uint16_t *own_workspace;     /* [prefill_workspace_tokens, 576] bf16, or NULL */
    smla_view prefill_workspace; /* own_workspace or the caller's; data NULL on paths without */

    /* Host. */
    smla_prefill_chunk *chunks; /* [max_num_seqs] */
    int64_t *chunk_ends;        /* [max_num_seqs] */
};

/* The errors that a gather would find, array values included, and no work. Defined in
 * dispatch.c. */
smla_status smla_check_gather_values(const smla_gather_kv_cache_args *args, smla_error *error);

#endif /* SMLA_BUILDER_H */
