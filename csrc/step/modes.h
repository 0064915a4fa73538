/* modes.h: the modes of a step. A path is a mode: a row that says which attention calls a layer
 * makes, and where they find their keys. Plans and layers read the row; they do not ask for paths.
 * Defined in modes.c. */
#pragma once

#include <stdbool.h>

#include "sparse_mla/step.h"

typedef struct smla_step_mode {
    const char *name;
    bool is_split; /* decodes, which come first, have a call of their own; else tokens share one */
    bool gathers;  /* prefills attend to a workspace, chunk by chunk; else to the cache */
} smla_step_mode;

/* By smla_path. What a config may leave open has all memory that its steps may need. */
extern const smla_step_mode smla_step_modes[];
