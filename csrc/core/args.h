/* args.h: reads an args struct of any version. */
#pragma once

#include "sparse_mla/status.h"

/* Copies the caller's struct, which begins with its own size, into `known`. Fields that an older
 * caller does not have become zero. Extra fields of a newer caller must be zero. */
smla_status smla_read_args(const char *op, void *known, size_t known_size, const void *args,
                           smla_error *error);
