/* errors.h: what dispatch.c defines and every file calls. Taken from the library, it would bring
 * all backends along, and CUDA's own runtime. Included once in a program, in front of testing.h.
 */
#ifndef SMLA_FAKE_ERRORS_H
#define SMLA_FAKE_ERRORS_H

#include <stdarg.h>
#include <stdio.h>

#include "backend.h"

smla_status
smla_fail(smla_error *error, smla_status status, const char *format, ...)
{
    if (error != NULL) {
        va_list values;
        va_start(values, format);
        error->status = status;
        vsnprintf(error->text, sizeof error->text, format, values);
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
