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
BEGINS_WITH_CALL(attention, , smla_attention_params, )
SMLA_PROJECTIONS(BEGINS_WITH_CALL)

/* Adds to the call's line which kernels run, and over how many tokens and splits. */
static void
log_plan(const smla_backend *backend, const smla_attention_plan *plan)
{
    for (int i = 0; i < plan->num_runs; i++) {
        const char *const kernel = backend->kernel_name(&plan->runs[i]);
        smla_log_text(" kernel %s (tokens %lld, splits %d%s%s),", kernel == NULL ? "none" : kernel,
                      (long long)plan->runs[i].num_tokens, plan->runs[i].num_splits,
                      plan->lack == NULL ? "" : "; ", plan->lack == NULL ? "" : plan->lack);
    }
}

smla_status
smla_attend(const smla_attention_params *params, const smla_backend *backend, smla_error *error)
{
    const bool finds_ranges = params->source == SMLA_KEYS_TABLE && params->ranges.req_ids != NULL;
    if (finds_ranges && !params->plan.reads_lengths) {
        const smla_key_ranges_params ranges = {.call = params->call,
                                               .reqs = params->visible.reqs,
                                               .rule = params->visible.rule,
                                               .absent_req = -1,
                                               .to = params->ranges,
                                               .padding = params->padding};
        SMLA_TRY(backend->find_key_ranges(&ranges, error));
    }
    if (smla_is_logging) {
        log_plan(backend, &params->plan);
    }
    return backend->attend(params, error);
}

#define ENTRY_POINT_TO(call, name, args_type, params_type)                  \
    static smla_status run_##name(const args_type *args, smla_error *error) \
    {                                                                       \
        args_type known;                                                    \
        params_type params;                                                 \
        const smla_backend *backend;                                        \
        SMLA_TRY(smla_read_args(#name, &known, sizeof known, args, error)); \
        SMLA_TRY(smla_check_##name(&known, &params, &backend, error));      \
        return call;                                                        \
    }                                                                       \
                                                                            \
    smla_status smla_##name(const args_type *args, smla_error *error)       \
    {                                                                       \
        smla_entry entry;                                                   \
        smla_enter(&entry, #name);                                          \
        return smla_leave(&entry, run_##name(args, error));                 \
    }

#define OPERATOR(name, args_type, params_type, family) \
    ENTRY_POINT_TO(backend->name(&params, error), name, args_type, params_type)
#define ATTENTION(name, args_type) \
    ENTRY_POINT_TO(smla_attend(&params, backend, error), name, args_type, smla_attention_params)
#define PROJECTION(name, args_type, params_type, family) \
    ENTRY_POINT_TO(backend->projection(&params, error), name, args_type, params_type)

SMLA_OPERATORS(OPERATOR)
SMLA_ATTENTIONS(ATTENTION)
SMLA_PROJECTIONS(PROJECTION)

/* The workspace of sparse_attention, and with covers_tables of mla_attention, too. */
static smla_status
find_workspace_size(const smla_attention_workspace_args *args, bool covers_tables, int64_t *bytes,
                    smla_error *error)
{
    smla_attention_workspace_args known;
    smla_attention_shape shape;
    const smla_backend *backend;
    SMLA_TRY(smla_read_args("attention_workspace_size", &known, sizeof known, args, error));
    SMLA_TRY(smla_check_attention_workspace(&known, &shape, &backend, error));
    SMLA_TRY(smla_require_pointer("attention_workspace_size", "bytes", bytes, error));
    shape.covers_tables = covers_tables;
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    *bytes = backend->attention_workspace_size(&shape) +
             (covers_tables ? smla_key_ranges_bytes(shape.num_tokens) : 0);
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
    shape.explains = true;
    const smla_fp_mode callers = smla_fp_change(SMLA_FP_EXACT);
    (*backend)->plan_attention(&shape, plan);
    smla_fp_change(callers);
    return SMLA_OK;
}
