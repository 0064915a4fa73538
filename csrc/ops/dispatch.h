/* dispatch.h: entry points that are not public, of which forward.c composes a layer, beside public
 * ones. Args are of this version.
 */
#pragma once

#include "core/backend.h"

/* sparse_attention of positions: `map` makes them slots. Without a block table in the map, they are
 * slots already. */
smla_status smla_attend_positions(const smla_sparse_attention_args *args, const smla_index_map *map,
                                  smla_error *error);

/* The errors that a gather would find, array values included, and no work. */
smla_status smla_check_gather_values(const smla_gather_kv_cache_args *args, smla_error *error);
