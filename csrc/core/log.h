/* log.h: one line on stderr per call, if SPARSE_MLA_LOG=1 was set when the library was loaded.
 *
 * An entry point calls smla_begin_log before its work and smla_end_log behind it. What it learns in
 * between, arrays and kernels and paths, is added to the line of the innermost call of the thread.
 */
#pragma once

#include <stdbool.h>

#include "sparse_mla/status.h"

enum { SMLA_LOG_TEXT_BYTES = 2048 };

/* A call whose line is not yet printed. */
typedef struct smla_log_call {
    const char *op;
    int64_t start_ns;
    struct smla_log_call *outer; /* the call that made this one, or NULL */
    bool has_device;
    DLDevice device;
    char text[SMLA_LOG_TEXT_BYTES];
} smla_log_call;

/* Never changes after the library was loaded. */
extern bool smla_is_logging;

void smla_start_line(smla_log_call *call, const char *op);
void smla_print_line(const smla_log_call *call, smla_status status);

/* These are meant for calls that are logged: ask smla_is_logging first. */
void smla_log_device(DLDevice device);
bool smla_is_logged(const char *op); /* whether the line is of this operator */
__attribute__((format(printf, 1, 2))) void smla_log_text(const char *format, ...);

static inline void
smla_begin_log(smla_log_call *call, const char *op)
{
    if (smla_is_logging) {
        smla_start_line(call, op);
    }
}

/* Prints the line. Returns `status`, which is what the call returned. */
static inline smla_status
smla_end_log(const smla_log_call *call, smla_status status)
{
    if (smla_is_logging) {
        smla_print_line(call, status);
    }
    return status;
}
