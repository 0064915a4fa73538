/* error.c: fills errors, and names the version and the statuses. */
#include <stdarg.h>
#include <stdio.h>

#include "core/error.h"

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

smla_status
smla_fail_with(smla_error *error, const char *op, const char *format, va_list values)
{
    if (error == NULL) {
        return SMLA_ERROR_VALUE;
    }
    char rule[sizeof error->text];
    vsnprintf(rule, sizeof rule, format, values);
    return smla_fail(error, SMLA_ERROR_VALUE, "%s: %s", op, rule);
}

smla_status
smla_fail_value(smla_error *error, const char *op, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    const smla_status status = smla_fail_with(error, op, format, values);
    va_end(values);
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
