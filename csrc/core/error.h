/* error.h: how functions of the core fail. Compiles as C and as CUDA. */
#pragma once

#include <stdarg.h>

#include "sparse_mla/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills `error`, which may be NULL, and returns `status`. */
__attribute__((cold, format(printf, 3, 4))) smla_status smla_fail(smla_error *error,
                                                                  smla_status status,
                                                                  const char *format, ...);

/* Refuses a value of a call: the text behind "op: " reads "`argument` must RULE, got ACTUAL". */
__attribute__((cold, format(printf, 3, 4))) smla_status smla_fail_value(smla_error *error,
                                                                        const char *op,
                                                                        const char *format, ...);

__attribute__((cold, format(printf, 3, 0))) smla_status smla_fail_with(smla_error *error,
                                                                       const char *op,
                                                                       const char *format,
                                                                       va_list values);

/* The one control-flow macro: returns the status of a call that failed. */
#define SMLA_TRY(call)                   \
    do {                                 \
        const smla_status try_ = (call); \
        if (try_ != SMLA_OK) {           \
            return try_;                 \
        }                                \
    } while (0)

#ifdef __cplusplus
}
#endif
