/* kernel_params.cuh: what kernels read of attention's params. A launch's arguments are in no cache,
 * and come in lines of 64 bytes, so a launch copies no call and no source of keys but its own, and
 * what the fewest kernels read lies behind.
 */
#pragma once

#include "core/attention/params_attention.h"

/* Of calls over lists and tables. Hopper's kernels for FP8 rows read nothing behind the sinks, but
 * in calls on a table. */
typedef struct list_params {
    smla_queries queries;
    smla_key_lists keys;
    smla_results results;
    smla_logits logits;
    smla_visible visible; /* unused with lists */
} list_params;

static inline list_params
list_params_of(const smla_attention_params *params)
{
    return list_params{params->queries, params->keys, params->results, params->logits,
                       params->visible};
}

/* Of calls over ragged keys. */
typedef struct mha_params {
    smla_queries queries;
    smla_kv_heads kv;
    smla_results results;
    smla_logits logits;
    smla_visible visible;
    smla_padding_rows padding;
} mha_params;

static inline mha_params
mha_params_of(const smla_attention_params *params)
{
    return mha_params{params->queries, params->kv,      params->results,
                      params->logits,  params->visible, params->padding};
}
