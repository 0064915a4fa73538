/* status.h: what every call returns, and the version. The conventions are in sparse_mla.h. */
#ifndef SPARSE_MLA_STATUS_H
#define SPARSE_MLA_STATUS_H

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SMLA_VERSION_MAJOR 0
#define SMLA_VERSION_MINOR 1
#define SMLA_VERSION_PATCH 0

#if defined(SMLA_BUILD_SHARED)
#define SMLA_API __attribute__((visibility("default")))
#else
#define SMLA_API
#endif

typedef enum smla_status {
    SMLA_OK = 0,
    SMLA_ERROR_TYPE = 1,   /* wrong dtype */
    SMLA_ERROR_VALUE = 2,  /* rank, shape, stride, alignment, device mismatch, overlap, bad value */
    SMLA_ERROR_BUFFER = 3, /* bindings only: an array cannot be exported or written */
    SMLA_ERROR_RUNTIME = 4, /* a device failure, or a device that this build lacks */
    SMLA_ERROR_MEMORY = 5,  /* out of host memory */
} smla_status;

/* A call that does not return SMLA_OK fills the error; other calls leave it untouched. The pointer
 * may be NULL. The text reads "op: `argument` must RULE, got ACTUAL". */
typedef struct smla_error {
    smla_status status;
    char text[508];
} smla_error;

/* The version of the library at run time: major * 10000 + minor * 100 + patch. */
SMLA_API int smla_version(void);

/* The constant's name, such as "SMLA_ERROR_VALUE"; never NULL. */
SMLA_API const char *smla_status_name(smla_status status);

#ifdef __cplusplus
}
#endif

#endif /* SPARSE_MLA_STATUS_H */
