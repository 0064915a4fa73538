/* merge_rows.h: what the merge of a call's own parts writes. Compiles as C and as CUDA. */
#pragma once

#include "core/attention/params_attention.h"
#include "core/params_merge.h"

/* The call's rows and sinks. Parts are fp32. */
static inline smla_merge_rows
smla_merge_rows_of(const smla_attention_params *params)
{
    const smla_results *const results = &params->results;
    smla_merge_rows rows;
    rows.num_tokens = params->queries.num_tokens;
    rows.num_heads = params->queries.num_heads;
    rows.value_dim = params->kv.value_dim;
    rows.type = SMLA_FLOAT_FP32;
    rows.out_type = (smla_float_type)results->out_type;
    rows.sinks = params->logits.sinks;
    rows.out = results->out;
    rows.out_stride_token = results->out_stride_token;
    rows.out_stride_head = results->out_stride_head;
    rows.lse = results->lse;
    rows.lse_stride_token = results->lse_stride_token;
    rows.lse_stride_head = results->lse_stride_head;
    return rows;
}
