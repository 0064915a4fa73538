/* dispatch.h: entry points that are not public. forward.c composes a layer of these and of public
 * ones.
 */
#pragma once

#include "core/backend.h"
#include "sparse_mla.h"

/* Runs attention whose params are filled: the end of every attention's entry point. */
smla_status smla_attend(const smla_attention_params *params, const smla_backend *backend,
                        smla_error *error);

/* attention_workspace_size without what only mla_attention needs. */
smla_status smla_sparse_workspace_size(const smla_attention_workspace_args *args, int64_t *bytes,
                                       smla_error *error);

/* How sparse_attention would run calls of this shape on cache rows of `format`. */
smla_status smla_find_attention_plan(const smla_attention_workspace_args *args,
                                     const smla_kv_format_info *format, smla_attention_plan *plan,
                                     const smla_backend **backend, smla_error *error);

/* Finds the errors that a gather would find, also in array values. Does no other work. */
smla_status smla_check_gather_values(const smla_gather_kv_cache_args *args, smla_error *error);
smla_status smla_check_gather_k_values(const smla_gather_k_cache_args *args, smla_error *error);
