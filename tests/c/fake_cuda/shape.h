/* shape.h: the shape that a check asks a backend to plan, made from the params of its call. */
#pragma once

#include "core/backend.h"
#include "core/params_attention.h"

static inline smla_attention_shape
shape_of(const smla_attention_params *params)
{
    const bool has_extra = params->num_lists == 2;
    return (smla_attention_shape){
        .num_tokens = params->num_tokens,
        .num_heads = params->num_heads,
        .topk = params->lists[0].topk,
        .extra_topk = has_extra ? params->lists[1].topk : 0,
        .num_splits = params->num_splits,
        .device_id = params->call.stream.device_id,
        .formats = {params->lists[0].kv.format, has_extra ? params->lists[1].kv.format : NULL},
        .has_query_scale = params->q_e4m3 != NULL || params->q_scale.pointer != NULL,
    };
}
