/* dispatch.c: the public entry points. Each copies the caller's args, lets a check turn them into
 * params, and passes the params to the backend of the device. Plans and sizes are estimated with
 * floating-point numbers, so asking for one sets the default mode as a call does.
 */
#include "ops/dispatch.h"

#include <stddef.h>

#include "core/args.h"
#include "core/entry.h"
#include "core/params_all.h"
#include "ops/check.h"

/* Whatever is generic about calls finds their header first in their params. */
#define BEGINS_WITH_CALL(name, args_type, params_type, family) \
    _Static_assert(offsetof(params_type, call) == 0, "params begin with the call");

SMLA_OPERATORS(BEGINS_WITH_CALL)
SMLA_PROJECTIONS(BEGINS_WITH_CALL)

#define ENTRY_POINT_TO(slot, name, args_type, params_type)                  \
    static smla_status run_##name(const args_type *args, smla_error *error) \
    {                                                                       \
        args_type known;                                                    \
        params_type params;                                                 \
        const smla_backend *backend;                                        \
        SMLA_TRY(smla_read_args(#name, &known, sizeof known, args, error)); \
        SMLA_TRY(smla_check_##name(&known, &params, &backend, error));      \
        return backend->slot(&params, error);                               \
    }                                                                       \
                                                                            \
    smla_status smla_##name(const args_type *args, smla_error *error)       \
    {                                                                       \
        smla_entry entry;                                                   \
        smla_enter(&entry, #name);                                          \
        return smla_leave(&entry, run_##name(args, error));                 \
    }

#define ENTRY_POINT(name, args_type, params_type, family) \
    ENTRY_POINT_TO(name, name, args_type, params_type)
#define PROJECTION(name, args_type, params_type, family) \
    ENTRY_POINT_TO(projection, name, args_type, params_type)

SMLA_OPERATORS(ENTRY_POINT)
SMLA_PROJECTIONS(PROJECTION)

smla_status
smla_check_gather_values(const smla_gather_kv_cache_args *args, smla_error *error)
{
    smla_gather_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_check_gather_kv_cache(args, &params, &backend, error));
    return backend->check_gather(&params, error);
}

smla_status
smla_check_gather_k_values(const smla_gather_k_cache_args *args, smla_error *error)
{
    smla_gather_params params;
    const smla_backend *backend;
    SMLA_TRY(smla_check_dequantize_and_gather_k_cache(args, &params, &backend, error));
    return backend->check_gather(&params, error);
}

smla_status
smla_sparse_attention(const smla_sparse_attention_args *args, smla_error *error)
{
    static const smla_index_map no_map = {.block_table = NULL};
    smla_sparse_attention_args known;
    SMLA_TRY(smla_read_args("sparse_attention", &known, sizeof known, args, error));
    return smla_attend_positions(&known, &no_map, error);
}

/* Adds to the call's line which kernels run, and over how many tokens and splits. */
static void
log_plan(const smla_backend *backend, const smla_attention_plan *plan)
{
    for (int i = 0; i < plan->num_runs; i++) {
        const char *const kernel = backend->kernel_name(&plan->runs[i]);
        smla_log_text(" kernel %s (tokens %lld, splits %d),", kernel == NULL ? "none" : kernel,
                      (long long)plan->runs[i].num_tokens, plan->runs[i].num_splits);
    }
}

static smla_status
attend(const smla_attention_params *params, const smla_attention_plan *plan,
       const smla_backend *backend, smla_error *error)
{
    if (smla_is_logging) {
        log_plan(backend, plan);
    }
    return backend->sparse_attention(params, plan, error);
}

static smla_status
attend_positions(const smla_sparse_attention_args *args, const smla_index_map *map,
                 smla_error *error)
{
    smla_attention_params params;
    smla_attention_plan plan;
    const smla_backend *backend;
    SMLA_TRY(smla_check_attention(args, &params, &plan, &backend, error));
    params.lists[0].map = *map;
    return attend(&params, &plan, backend, error);
}

smla_status
smla_attend_positions(const smla_sparse_attention_args *args, const smla_index_map *map,
                      smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, "sparse_attention");
    return smla_leave(&entry, attend_positions(args, map, error));
}

/* A line of the log lists the arrays that a check has seen. */
smla_status
smla_attend_checked(const smla_sparse_attention_args *args, const smla_kv_view *kv,
                    const smla_index_map *map, int32_t device_id, const smla_backend *backend,
                    smla_error *error)
{
    smla_attention_params params;
    smla_attention_plan plan;
    if (smla_is_logging) {
        return smla_attend_positions(args, map, error);
    }
    const smla_stream stream = {.device_id = device_id, .handle = args->stream};
    smla_fill_attention(args, kv, stream, backend, &params, &plan);
    params.lists[0].map = *map;
    return backend->sparse_attention(&params, &plan, error);
}

static smla_status
run_sparse_mla_dsv4(const smla_sparse_mla_dsv4_args *args, smla_error *error)
{
    smla_sparse_mla_dsv4_args known;
    smla_attention_params params;
    smla_attention_plan plan;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("sparse_mla_dsv4", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_sparse_mla_dsv4(&known, &params, &plan, &backend, error));
    return attend(&params, &plan, backend, error);
}

smla_status
smla_sparse_mla_dsv4(const smla_sparse_mla_dsv4_args *args, smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, "sparse_mla_dsv4");
    return smla_leave(&entry, run_sparse_mla_dsv4(args, error));
}

static smla_status
run_mla_attention(const smla_mla_attention_args *args, smla_error *error)
{
    smla_mla_attention_args known;
    smla_attention_params params;
    smla_key_ranges_params ranges;
    smla_attention_plan plan;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("mla_attention", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_mla_attention(&known, &params, &ranges, &plan, &backend, error));
    if (ranges.reqs.num_tokens > 0 && !plan.reads_lengths) {
        SMLA_TRY(backend->find_key_ranges(&ranges, error));
    }
    return attend(&params, &plan, backend, error);
}

smla_status
smla_mla_attention(const smla_mla_attention_args *args, smla_error *error)
{
    smla_entry entry;
    smla_enter(&entry, "mla_attention");
    return smla_leave(&entry, run_mla_attention(args, error));
}

/* The workspace of sparse_attention, and with covers_dense of mla_attention, too. */
static smla_status
find_workspace_size(const smla_attention_workspace_args *args, bool covers_dense, int64_t *bytes,
                    smla_error *error)
{
    smla_attention_workspace_args known;
    smla_attention_shape shape;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("attention_workspace_size", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_attention_workspace(&known, &shape, &backend, error));
    SMLA_TRY(smla_require_pointer("attention_workspace_size", "bytes", bytes, error));
    shape.covers_dense = covers_dense;
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    *bytes = backend->attention_workspace_size(&shape) +
             (covers_dense ? smla_key_ranges_bytes(shape.num_tokens) : 0);
    smla_fp_change(callers);
    return SMLA_OK;
}

smla_status
smla_attention_workspace_size(const smla_attention_workspace_args *args, int64_t *bytes,
                              smla_error *error)
{
    return find_workspace_size(args, true, bytes, error);
}

smla_status
smla_sparse_workspace_size(const smla_attention_workspace_args *args, int64_t *bytes,
                           smla_error *error)
{
    return find_workspace_size(args, false, bytes, error);
}

smla_status
smla_lightning_indexer_workspace_size(const smla_lightning_workspace_args *args, int64_t *bytes,
                                      smla_error *error)
{
    static const char op[] = "lightning_indexer_workspace_size";
    smla_lightning_workspace_args known;
    SMLA_TRY(smla_read_args(op, &known, sizeof known, args, error));
    SMLA_TRY(smla_require_pointer(op, "bytes", bytes, error));
    return smla_check_lightning_workspace(&known, bytes, error);
}

smla_status
smla_find_attention_plan(const smla_attention_workspace_args *args,
                         const smla_kv_format_info *format, smla_attention_plan *plan,
                         const smla_backend **backend, smla_error *error)
{
    smla_attention_workspace_args known;
    smla_attention_shape shape;
    SMLA_TRY(smla_read_args("attention_workspace_size", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_attention_workspace(&known, &shape, backend, error));
    shape.formats[0] = format;
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    (*backend)->plan_attention(&shape, plan);
    smla_fp_change(callers);
    return SMLA_OK;
}
