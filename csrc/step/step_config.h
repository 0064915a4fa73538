/* step_config.h: a config as a table of fields. The table gives the limits and the defaults of a
 * config from C, and it says how a config of Python is read. Defined in step_config.c. */
#pragma once

#include <stdbool.h>

#include "core/error.h"
#include "sparse_mla/step.h"

typedef enum smla_field_kind {
    SMLA_FIELD_COUNT = 1, /* int64_t of `least` to `most` */
    SMLA_FIELD_LIST,      /* int64_t[capacity] of such numbers; `count` of them are in use */
    SMLA_FIELD_BY_NUMBER, /* the same, with an entry for each number of the list at `keys` */
    SMLA_FIELD_NUMBER,    /* double, a factor of logits */
    SMLA_FIELD_SCALE,     /* double, positive */
    SMLA_FIELD_FORMAT,    /* int32_t, smla_kv_format; the plan checks which ones it serves */
    SMLA_FIELD_PATH,      /* int32_t, smla_path; the plan checks it, too */
    SMLA_FIELD_NAME,      /* int32_t, an index into `names` */
    SMLA_FIELD_DEVICE,    /* DLDevice */
    SMLA_FIELD_SHARE, /* int64_t[3]: rank, ranks and interleave, or zeros; Python's None is zeros */
} smla_field_kind;

typedef struct smla_config_field {
    const char *name;
    const char *in_python; /* the name in Python's config, or NULL: the same */
    smla_field_kind kind;
    bool is_optional; /* 0 is good, the plan sets the value; Python's None is 0 */
    size_t offset;    /* in the plan's config */
    size_t count;     /* offset of an int64_t */
    size_t keys;      /* offset of an int64_t[capacity] */
    int64_t capacity;
    int64_t least;
    int64_t most;
    double standard;          /* the value that 0 stands for; 0 = there is none */
    const smla_path *paths;   /* a path: those that Python takes, up to SMLA_PATH_AUTO */
    const char *const *names; /* a name: all of them, up to NULL */
} smla_config_field;

/* Rows of a table for a config of type `config`. */
#define SMLA_COUNT_FIELD(config, field, highest, ...) \
    SMLA_NUMBER_FIELD(config, field, 1, highest, __VA_ARGS__)
#define SMLA_NUMBER_FIELD(config, field, lowest, highest, ...) \
    {.name = #field,                                           \
     .kind = SMLA_FIELD_COUNT,                                 \
     .offset = offsetof(config, field),                        \
     .least = (lowest),                                        \
     .most = (highest),                                        \
     __VA_ARGS__}
#define SMLA_CONFIG_FIELD(config, field, its_kind, ...) \
    {.name = #field, .kind = (its_kind), .offset = offsetof(config, field), __VA_ARGS__}

/* Puts defaults where the config has 0, and checks the limits of each field. */
smla_status smla_complete_config(const char *op, const smla_config_field *fields, int num_fields,
                                 void *config, smla_error *error);
