/* entry.h: what every public entry point does around its work: it sets the default floating-point
 * mode, so that results do not depend on the caller's, and logs the call.
 */
#pragma once

#include "core/fp_mode.h"
#include "core/log.h"

typedef struct smla_entry {
    smla_fp_mode callers; /* given back when the call returns, exception flags included */
    smla_log_call log;
} smla_entry;

static inline void
smla_enter(smla_entry *entry, const char *op)
{
    entry->callers = smla_fp_change(SMLA_FP_EXACT);
    smla_begin_log(&entry->log, op);
}

/* Returns `status`, which is what the call returns. */
static inline smla_status
smla_leave(const smla_entry *entry, smla_status status)
{
    const smla_status logged = smla_end_log(&entry->log, status);
    smla_fp_change(entry->callers);
    return logged;
}
