/* dispatch.c: the public entry points. Each copies the caller's args, has check.c turn them into
 * params, and hands these to the backend of the device.
 */
#include "ops/dispatch.h"

#include "core/args.h"
#include "ops/check.h"

smla_status
smla_concat_and_cache_mla(const smla_concat_and_cache_mla_args *args, smla_error *error)
{
    smla_concat_and_cache_mla_args known;
    smla_cache_write_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("concat_and_cache_mla", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_cache_write(&known, &params, &backend, error));
    return backend->concat_and_cache_mla(&params, error);
}

smla_status
smla_gather_kv_cache(const smla_gather_kv_cache_args *args, smla_error *error)
{
    smla_gather_kv_cache_args known;
    smla_gather_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("gather_kv_cache", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_gather(&known, &params, &backend, error));
    return backend->gather_kv_cache(&params, error);
}

smla_status
smla_check_gather_values(const smla_gather_kv_cache_args *args, smla_error *error)
{
    smla_gather_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_check_gather(args, &params, &backend, error));
    return backend->check_gather(&params, error);
}

smla_status
smla_dequantize_kv_cache(const smla_dequantize_kv_cache_args *args, smla_error *error)
{
    smla_dequantize_kv_cache_args known;
    smla_dequantize_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("dequantize_kv_cache", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_dequantize(&known, &params, &backend, error));
    return backend->dequantize_kv_cache(&params, error);
}

smla_status
smla_convert_req_index_to_global_index(const smla_convert_req_index_args *args, smla_error *error)
{
    smla_convert_req_index_args known;
    smla_convert_params params;
    const smla_backend *backend;
    SMLA_TRY(
        smla_read_args("convert_req_index_to_global_index", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_convert(&known, &params, &backend, error));
    return backend->convert_req_index(&params, error);
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
smla_merge_attn_states(const smla_merge_attn_states_args *args, smla_error *error)
{
    smla_merge_attn_states_args known;
    smla_merge_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("merge_attn_states", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_merge(&known, &params, &backend, error));
    return backend->merge_attn_states(&params, error);
}

smla_status
smla_split_kv_b_proj(const smla_split_kv_b_proj_args *args, smla_error *error)
{
    smla_split_kv_b_proj_args known;
    smla_split_weight_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("split_kv_b_proj", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_split_weight(&known, &params, &backend, error));
    return backend->split_kv_b_proj(&params, error);
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

smla_status
smla_dynamic_per_tensor_quant(const smla_dynamic_per_tensor_quant_args *args, smla_error *error)
{
    smla_dynamic_per_tensor_quant_args known;
    smla_quant_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("dynamic_per_tensor_quant", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_quant(&known, &params, &backend, error));
    return backend->dynamic_per_tensor_quant(&params, error);
}
