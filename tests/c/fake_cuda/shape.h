/* shape.h: the shape that a check asks a backend to plan, made from the params of its call. */
#pragma once

#include "core/attention/needs.h"
#include "core/backend.h"

static inline smla_attention_shape
shape_of(const smla_attention_params *params)
{
    const bool has_extra = params->keys.num_lists == 2;
    return (smla_attention_shape){
        .num_tokens = params->queries.num_tokens,
        .num_heads = params->queries.num_heads,
        .topk = params->keys.lists[0].topk,
        .extra_topk = has_extra ? params->keys.lists[1].topk : 0,
        .num_splits = params->results.num_splits,
        .device_id = params->call.stream.device_id,
        .formats = {params->keys.lists[0].kv.format,
                    has_extra ? params->keys.lists[1].kv.format : NULL},
        .needs = params->queries.type == SMLA_FLOAT_E4M3 || params->logits.q_scale.pointer != NULL
                     ? SMLA_NEEDS_QUERY_SCALE
                     : 0,
    };
}
