/* dispatch.c: the public entry points. Each copies the caller's args, has check.c turn them into
 * params, and hands these to the backend of the device.
 */
#include "ops/dispatch.h"

#include "core/args.h"
#include "ops/check.h"

#define ENTRY_POINT(name, args_type, params_type)                           \
    smla_status smla_##name(const args_type *args, smla_error *error)       \
    {                                                                       \
        args_type known;                                                    \
        params_type params;                                                 \
        const smla_backend *backend;                                        \
        SMLA_TRY(smla_read_args(#name, &known, sizeof known, args, error)); \
        SMLA_TRY(smla_check_##name(&known, &params, &backend, error));      \
        return backend->name(&params, error);                               \
    }

SMLA_OPERATORS(ENTRY_POINT)

smla_status
smla_check_gather_values(const smla_gather_kv_cache_args *args, smla_error *error)
{
    smla_gather_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_check_gather_kv_cache(args, &params, &backend, error));
    return backend->check_gather(&params, error);
}

smla_status
smla_sparse_attention(const smla_sparse_attention_args *args, smla_error *error)
{
    smla_sparse_attention_args known;
    smla_attention_params params;
    smla_attention_plan plan;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("sparse_attention", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_attention(&known, &params, &plan, &backend, error));
    return backend->sparse_attention(&params, &plan, error);
}

smla_status
smla_attend_positions(const smla_sparse_attention_args *args, const smla_index_map *map,
                      smla_error *error)
{
    smla_attention_params params;
    smla_attention_plan plan;
    const smla_backend *backend;
    SMLA_TRY(smla_check_attention(args, &params, &plan, &backend, error));
    params.lists[0].map = *map;
    return backend->sparse_attention(&params, &plan, error);
}

smla_status
smla_attention_workspace_size(const smla_attention_workspace_args *args, int64_t *bytes,
                              smla_error *error)
{
    smla_attention_workspace_args known;
    smla_attention_shape shape;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("attention_workspace_size", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_attention_workspace(&known, &shape, &backend, error));
    if (bytes == NULL) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "attention_workspace_size: `bytes` must be given, got none");
    }
    *bytes = backend->attention_workspace_size(&shape);
    return SMLA_OK;
}

smla_status
smla_k_up_proj(const smla_k_up_proj_args *args, smla_error *error)
{
    smla_k_up_proj_args known;
    smla_projection_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("k_up_proj", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_k_up_proj(&known, &params, &backend, error));
    return backend->up_proj(&params, error);
}

smla_status
smla_v_up_proj(const smla_v_up_proj_args *args, smla_error *error)
{
    smla_v_up_proj_args known;
    smla_projection_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("v_up_proj", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_v_up_proj(&known, &params, &backend, error));
    return backend->up_proj(&params, error);
}
