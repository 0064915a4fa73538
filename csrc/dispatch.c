/* dispatch.c: the public entry points. Each copies the caller's args, has check.c turn them into
 * params, and hands these to the backend of the device. Also errors, versions and names.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "builder.h"
#include "check.h"

/* ---- Errors and names ---------------------------------------------------------------------- */

smla_status
smla_fail(smla_error *error, smla_status status, const char *format, ...)
{
    if (error != NULL) {
        error->status = status;
        va_list values;
        va_start(values, format);
        vsnprintf(error->text, sizeof error->text, format, values);
        va_end(values);
    }
    return status;
}

int
smla_version(void)
{
    return SMLA_VERSION_MAJOR * 10000 + SMLA_VERSION_MINOR * 100 + SMLA_VERSION_PATCH;
}

const char *
smla_status_name(smla_status status)
{
    switch (status) {
    case SMLA_OK: return "SMLA_OK";
    case SMLA_ERROR_TYPE: return "SMLA_ERROR_TYPE";
    case SMLA_ERROR_VALUE: return "SMLA_ERROR_VALUE";
    case SMLA_ERROR_BUFFER: return "SMLA_ERROR_BUFFER";
    case SMLA_ERROR_RUNTIME: return "SMLA_ERROR_RUNTIME";
    case SMLA_ERROR_MEMORY: return "SMLA_ERROR_MEMORY";
    }
    return "unknown smla_status";
}

/* ---- Backends ------------------------------------------------------------------------------ */

static const smla_backend *const backends[] = {
    &smla_cpu_backend,
#ifdef SMLA_HAVE_CUDA
    &smla_cuda_backend,
#endif
};

enum { NUM_BACKENDS = sizeof backends / sizeof backends[0] };

smla_status
smla_find_backend(const char *op, DLDevice device, const smla_backend **backend, smla_error *error)
{
    for (int i = 0; i < NUM_BACKENDS; i++) {
        if (backends[i]->device_type == device.device_type) {
            *backend = backends[i];
            return backends[i]->check_device(op, device.device_id, error);
        }
    }
    if (device.device_type == kDLCUDA) {
        return smla_fail(
            error, SMLA_ERROR_RUNTIME,
            "%s: arrays must be on a device of this build (cpu), got cuda:%d: this is a CPU-only "
            "build; sparse_mla.build_info() says how to get CUDA",
            op, device.device_id);
    }
    return smla_fail(error, SMLA_ERROR_RUNTIME,
                     "%s: arrays must be on a device of this build (%s), got DLPack device type %d",
                     op, NUM_BACKENDS > 1 ? "cpu or cuda" : "cpu", (int)device.device_type);
}

int64_t
smla_kernels(smla_kernel_info *rows, int64_t capacity)
{
    int64_t count = 0;
    for (int i = 0; i < NUM_BACKENDS; i++) {
        const int64_t room = capacity > count ? capacity - count : 0;
        count += backends[i]->kernels(room > 0 ? rows + count : NULL, room);
    }
    return count;
}

/* ---- Args ---------------------------------------------------------------------------------- */

enum { MAX_ARGS_BYTES = 4096 }; /* of any version to come; a size nobody set is seldom less */

smla_status
smla_read_args(const char *op, void *known, size_t known_size, const void *args, smla_error *error)
{
    size_t size = 0;
    if (args != NULL) {
        memcpy(&size, args, sizeof size);
    }
    if (size < sizeof size || size > MAX_ARGS_BYTES) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `struct_size` must be set to sizeof args, got %zu", op, size);
    }
    const unsigned char *bytes = args;
    for (size_t i = known_size; i < size; i++) {
        if (bytes[i] != 0) {
            return smla_fail(
                error, SMLA_ERROR_VALUE,
                "%s: args must use fields that this version (%d.%d.%d) knows, got a value "
                "in a newer one",
                op, SMLA_VERSION_MAJOR, SMLA_VERSION_MINOR, SMLA_VERSION_PATCH);
        }
    }
    memset(known, 0, known_size);
    memcpy(known, args, size < known_size ? size : known_size);
    return SMLA_OK;
}

/* ---- Operators ----------------------------------------------------------------------------- */

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
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("sparse_attention", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_attention(&known, &params, &backend, error));
    return backend->sparse_attention(&params, error);
}

smla_status
smla_attend_positions(const smla_sparse_attention_args *args, const smla_index_map *map,
                      smla_error *error)
{
    smla_attention_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_check_attention(args, &params, &backend, error));
    params.lists[0].map = *map;
    return backend->sparse_attention(&params, error);
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
