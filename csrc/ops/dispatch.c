/* dispatch.c: the public entry points. Each copies the caller's args, lets a check turn them into
 * params, and passes the params to the backend of the device.
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
