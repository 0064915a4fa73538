/* check_cache.h: what the checks of operators that write to a cache share. */
#pragma once

#include "core/params_cache.h"
#include "ops/check.h"

/* Fills a write to the cache `kv` at `slots`, without rows. Both are checked, and named so in
 * errors. Inline, because a call would copy both structs once more. */
static inline void
smla_fill_cache_write(const smla_call *call, const char *cache_name, const smla_kv_view *kv,
                      const char *slots_name, const DLTensor *slots,
                      smla_cache_write_params *params)
{
    *params = (smla_cache_write_params){
        .call = *call,
        .cache_name = cache_name,
        .slots_name = slots_name,
        .num_tokens = smla_size(slots, 0),
        .input_type = SMLA_FLOAT_BF16,
        .slot_mapping = smla_data(slots),
        .slot_stride = smla_stride(slots, 0),
        .slots_are_int64 = smla_dtype(slots) == SMLA_DTYPE_INT64,
        .kv = *kv,
    };
}
