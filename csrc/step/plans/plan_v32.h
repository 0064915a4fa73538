/* plan_v32.h: the step of DeepSeek-V3.2. plan_v32.c fills it, and layer_v32.c reads it. */
#pragma once

#include "step/engine.h"

/* The arrays that a build sends, one behind another. Those of prefills exist on path "separate"
 * only. */
typedef struct smla_v32_sent {
    int32_t *req_id_per_token;         /* [max_num_batched_tokens], zeros past the step's tokens */
    int32_t *prefill_request_ids;      /* [max_num_batched_tokens] */
    int32_t *prefill_seq_lens;         /* [max_num_seqs] */
    int32_t *prefill_workspace_starts; /* [max_num_seqs] */
} smla_v32_sent;

/* What kernels write. */
typedef struct smla_v32_made {
    int32_t *indices; /* [max_num_batched_tokens, topk_tokens]; on path "separate" only */
    /* With several ranks: the rank's own positions of the tokens' lists, without holes, and their
     * numbers. */
    int32_t *own_topk; /* [max_num_batched_tokens, topk_tokens] */
    int32_t *own_lens; /* [max_num_batched_tokens] */
} smla_v32_made;

/* What only the host reads. */
typedef struct smla_v32_kept {
    int32_t *seq_lens; /* [max_num_seqs]: the rank's rows of the requests of the planned batch */
} smla_v32_kept;

struct smla_builder {
    smla_step step;
    smla_builder_config config; /* defaults filled in; `workspace` is not used after create */
    smla_metadata metadata;
    bool plans_path;    /* the config has no path: a step on "separate" may be "direct" */
    smla_v32_sent sent; /* on the device */
    smla_v32_made made; /* on the device */
    smla_v32_kept kept;
    smla_rank_share share; /* what the builder's rank has of every request */
    smla_view block_table; /* the caller's, of the last build */
};
