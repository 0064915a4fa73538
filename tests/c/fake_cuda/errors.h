/* errors.h: what dispatch.c defines and every file calls. Taken from the library, it would bring all
 * backends along, and CUDA's own runtime. Included once in a program.
 */
#ifndef SMLA_FAKE_ERRORS_H
#define SMLA_FAKE_ERRORS_H

#include <stdarg.h>
#include <stdio.h>

#include "backend.h"

smla_status
smla_fail(smla_error *to, smla_status status, const char *format, ...)
{
    if (to != NULL) {
        va_list values;
        va_start(values, format);
        to->status = status;
        vsnprintf(to->text, sizeof to->text, format, values);
        va_end(values);
    }
    return status;
}

const char *
smla_status_name(smla_status status)
{
    return status == SMLA_OK ? "ok" : "an error";
}

#endif /* SMLA_FAKE_ERRORS_H */
