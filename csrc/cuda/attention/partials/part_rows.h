/* part_rows.h: the rows that the parts of a request's keys in pages leave in the caller's
 * workspace, [parts][T][H][Dv] fp32, and behind them each row's lse, fp32. Compiles as C and as
 * CUDA.
 */
#pragma once

#include "core/params_merge.h"
#include "cuda/attention/table/kernels.h"

/* Bytes of workspace for so many parts. */
static inline int64_t
smla_part_rows_bytes(const smla_attention_params *params, int64_t parts)
{
    const int64_t rows = params->queries.num_tokens * parts * params->queries.num_heads;
    return smla_partial_padding(params->workspace.memory) + smla_partial_state_bytes(rows) +
           rows * params->kv.value_dim * (int64_t)sizeof(float);
}

/* Refuses a workspace that is too small for the parts that the caller asks for. */
smla_status smla_cuda_require_part_rows(const smla_attention_params *params, smla_error *error);

/* merge.cu: merge_attn_partials for a call's own parts. Tokens behind *num_tokens, which is on the
 * device, stay as they are; NULL: all are merged. lse may be NULL. */
cudaError_t smla_cuda_launch_merge_parts(const smla_merge_partials_params *params,
                                         const int32_t *num_tokens);
