/* modes.c: the table of modes. */
#include "step/modes.h"

const smla_step_mode smla_step_modes[] = {
    [SMLA_PATH_AUTO] = {"auto", .gathers = true},
    [SMLA_PATH_MIXED] = {"mixed"},
    [SMLA_PATH_SEPARATE] = {"separate", .is_split = true, .gathers = true},
    [SMLA_PATH_BF16] = {"bf16"},
    [SMLA_PATH_DIRECT] = {"direct", .is_split = true},
};

const char *
smla_path_name(smla_path path)
{
    const unsigned num_modes = sizeof smla_step_modes / sizeof smla_step_modes[0];
    return (unsigned)path < num_modes ? smla_step_modes[path].name : NULL;
}
