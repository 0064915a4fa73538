/* error.h: how functions of the core fail. Compiles as C and as CUDA. */
#pragma once

#include "sparse_mla/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills `error`, which may be NULL, and returns `status`. */
__attribute__((cold, format(printf, 3, 4))) smla_status smla_fail(smla_error *error,
                                                                  smla_status status,
                                                                  const char *format, ...);

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
