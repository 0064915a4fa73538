/* args.c: converts args of the caller's version to args of this version. */
#include "core/args.h"

#include <string.h>

#include "core/error.h"

enum { MAX_ARGS_BYTES = 4096 }; /* enough for every version; an unset size is usually larger */

smla_status
smla_read_args(const char *op, void *known, size_t known_size, const void *args, smla_error *error)
{
    size_t size = 0;
    if (args != NULL) {
        memcpy(&size, args, sizeof size);
    }
    if (size < sizeof size || size > MAX_ARGS_BYTES) {
        return smla_fail_value(error, op, "`struct_size` must be set to sizeof args, got %zu",
                               size);
    }
    const unsigned char *bytes = args;
    for (size_t i = known_size; i < size; i++) {
        if (bytes[i] != 0) {
            return smla_fail(
                error, SMLA_ERROR_VALUE,
                "%s: args must use fields that this version (%d.%d.%d) knows, got a value "
                "in a newer one",
                op, SMLA_VERSION_MAJOR, SMLA_VERSION_MINOR, SMLA_VERSION_PATCH);
        }
    }
    memset(known, 0, known_size);
    memcpy(known, args, size < known_size ? size : known_size);
    return SMLA_OK;
}
