/* dispatch.h: entry points that are not public. */
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
