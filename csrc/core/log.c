/* log.c: composes and prints the lines of SPARSE_MLA_LOG=1. Nothing else in csrc/ prints. */
#include "core/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/clock.h"

bool smla_is_logging = false;

/* Calls that other calls make, such as those of a forward, have their own lines. */
static _Thread_local smla_log_call *innermost;

__attribute__((constructor)) static void
read_environment(void)
{
    const char *const value = getenv("SPARSE_MLA_LOG");
    smla_is_logging = value != NULL && value[0] != '\0' && strcmp(value, "0") != 0;
}

void
smla_start_line(smla_log_call *call, const char *op)
{
    call->op = op;
    call->outer = innermost;
    call->has_device = false;
    call->text[0] = '\0';
    innermost = call;
    call->start_ns = smla_clock_ns();
}

void
smla_log_text(const char *format, ...)
{
    if (innermost == NULL) {
        return;
    }
    const size_t used = strlen(innermost->text);
    va_list values;
    va_start(values, format);
    vsnprintf(innermost->text + used, sizeof innermost->text - used, format, values);
    va_end(values);
}

void
smla_log_device(DLDevice device)
{
    if (innermost != NULL) {
        innermost->has_device = true;
        innermost->device = device;
    }
}

bool
smla_is_logged(const char *op)
{
    return innermost != NULL && strcmp(innermost->op, op) == 0;
}

/* The line is printed at once, so that lines of several threads do not mix. */
void
smla_print_line(const smla_log_call *call, smla_status status)
{
    const double ms = (double)(smla_clock_ns() - call->start_ns) / 1e6;
    char device[32] = "";
    char line[SMLA_LOG_TEXT_BYTES + 256];
    int depth = 0;
    for (const smla_log_call *outer = call->outer; outer != NULL; outer = outer->outer) {
        depth++;
    }
    const bool is_cuda = call->has_device && call->device.device_type == kDLCUDA;
    if (is_cuda) {
        snprintf(device, sizeof device, " on cuda:%d", call->device.device_id);
    } else if (call->has_device) {
        snprintf(device, sizeof device, " on cpu");
    }
    snprintf(line, sizeof line, "sparse_mla: %*s%s%s:%s %s%s%.3f ms%s\n", 2 * depth, "", call->op,
             device, call->text, status == SMLA_OK ? "" : smla_status_name(status),
             status == SMLA_OK ? "" : ", ", ms, is_cuda ? " of the host" : "");
    fputs(line, stderr);
    innermost = call->outer;
}
