/* engine.h: a step of any model. The engine owns what all models need: buffers that are made once,
 * for the largest batch, the order of a build, and the last step. A plan says what is different.
 *
 * A builder of the public API is an smla_step with more behind it: its plan's config, arrays and
 * metadata. engine.c defines the functions of this file.
 */
#pragma once

#include "core/attention/visible.h"
#include "core/backend.h"
#include "core/dltensor.h"
#include "sparse_mla/step.h"
#include "step/arena.h"
#include "step/batch.h"
#include "step/chunks.h"
#include "step/modes.h"
#include "step/step_config.h"

/* What every plan says of a step. */
typedef struct smla_step_facts {
    smla_path path;
    int64_t num_reqs;
    int64_t num_actual_tokens;
    smla_batch_split split;
    int64_t decode_query_len; /* query tokens of the longest decode; 0 if none has any */
    int64_t num_first_tokens; /* tokens of a layer's first attention call: decodes, or all */
    int64_t num_chunks;
    int64_t num_parts; /* parts of prefills in them */
} smla_step_facts;

/* The fields of a plan's metadata that are the engine's facts. */
#define SMLA_METADATA_OF(facts)                                               \
    .path = (facts)->path, .num_reqs = (facts)->num_reqs,                     \
    .num_actual_tokens = (facts)->num_actual_tokens, .split = (facts)->split, \
    .decode_query_len = (facts)->decode_query_len

typedef struct smla_step_plan smla_step_plan;

/* Memory of bf16 rows that a step's layers share, and that a caller may bring. */
enum {
    SMLA_GATHERED, /* cache rows, which every plan has; what the others hold is their plan's */
    SMLA_MAX_WORKSPACES = 2
};

typedef struct smla_step {
    const smla_step_plan *plan;
    const smla_backend *backend;

    /* Of the config. */
    DLDevice device;
    int64_t num_heads;
    smla_batch_limits limits;
    int64_t max_num_chunks; /* max_num_seqs, or what the plan makes of it */
    smla_path path;

    /* The last step. */
    bool is_built;
    smla_step_facts facts;
    smla_prefill_chunk *chunks;      /* [max_num_chunks] */
    smla_prefill_chunk *next_chunks; /* as many, of the step that is being built */
    int32_t *seq_lens;               /* [max_num_seqs], of the requests with query tokens, else 0 */

    /* Device buffers, sized for the largest batch. */
    smla_arena sent; /* arrays that a build fills on the host, in `mirror` */
    smla_arena made; /* arrays that kernels write, in `lists` */
    smla_arena kept; /* arrays of the host alone, in `host` */
    smla_mirror *mirror;
    int32_t *lists;
    int32_t *host;
    uint8_t *scratch; /* attention workspace */
    int64_t scratch_bytes;
    uint16_t *own_workspaces[SMLA_MAX_WORKSPACES]; /* NULL: unused, or the caller's */
    smla_view workspaces[SMLA_MAX_WORKSPACES];     /* [rows, columns]; without rows if unused */
} smla_step;

/* Takes from a config what the engine reads of it. The configs of all plans have these fields. */
#define SMLA_TAKE_CONFIG(step, config)                                                   \
    ((step)->device = (config)->device, (step)->num_heads = (config)->num_heads,         \
     (step)->path = (smla_path)(config)->path,                                           \
     (step)->limits =                                                                    \
         (smla_batch_limits){.max_num_seqs = (config)->max_num_seqs,                     \
                             .max_num_batched_tokens = (config)->max_num_batched_tokens, \
                             .max_model_len = (config)->max_model_len,                   \
                             .decode_threshold = (config)->decode_threshold})

/* What a rank has of every request, in a config that is completed. */
#define SMLA_SHARE_OF(config)                              \
    ((smla_rank_share){.rank = (int32_t)(config)->cp_rank, \
                       .size = (int32_t)(config)->cp_size, \
                       .interleave = (int32_t)(config)->cp_interleave})

/* The row of a config's fields cp_rank, cp_size and cp_interleave. */
#define SMLA_SHARE_FIELD(config)          \
    {.name = "cp",                        \
     .kind = SMLA_FIELD_SHARE,            \
     .offset = offsetof(config, cp_rank), \
     .least = 1,                          \
     .most = INT32_MAX}

/* The workspace that a plan wants. */
typedef struct smla_workspace_rule {
    const char *name;      /* in the config */
    const DLTensor *given; /* NULL: the engine makes one */
    int64_t columns;
    int64_t rows;      /* rows that steps use; SMLA_ANY: all of those given */
    int64_t least;     /* rows that a given one must have, also if steps use none */
    bool may_be_pages; /* a given one may have rows in two dimensions */
    const char *hint;  /* explains a wrong shape, or NULL */
} smla_workspace_rule;

/* The numbers of a chunk, and of its parts. */
enum { SMLA_CHUNK_NUMBERS = sizeof(smla_prefill_chunk) / sizeof(int64_t) };
_Static_assert(sizeof(smla_context_chunk) == sizeof(smla_prefill_chunk), "both have five int64");

/* A number or an array of the last step, as a binding shows it. */
typedef struct smla_step_view {
    const char *name;
    int group; /* number of the compressed cache that it belongs to; -1: the whole step */
    int ndim;  /* 0: a number, shape[0] */
    int64_t shape[2];
    int64_t row_stride;
    DLDataType dtype; /* what an array has */
    bool is_list;     /* int64 on the host, shown as a list: of numbers, or tuples if ndim is 2 */
    const void *data; /* on the device; NULL: the step has no such array */
} smla_step_view;

enum { SMLA_MAX_STEP_VIEWS = 934 };

static inline void
smla_show_number(smla_step_view *view, const char *name, int64_t number)
{
    *view = (smla_step_view){.name = name, .group = -1, .shape = {number}};
}

static inline void
smla_show_vector(smla_step_view *view, const char *name, const void *data, int64_t count)
{
    *view = (smla_step_view){.name = name,
                             .group = -1,
                             .ndim = 1,
                             .shape = {count},
                             .row_stride = 1,
                             .dtype = {kDLInt, 32, 1},
                             .data = data};
}

/* A number of each of `count` chunks on the host, or several that are neighbours. */
static inline void
smla_show_list(smla_step_view *view, const char *name, const int64_t *numbers, int64_t count,
               int64_t columns)
{
    *view = (smla_step_view){.name = name,
                             .group = -1,
                             .ndim = columns > 1 ? 2 : 1,
                             .shape = {count, columns},
                             .row_stride = SMLA_CHUNK_NUMBERS,
                             .is_list = true,
                             .data = numbers};
}

/* Rows [start, start + num_rows) of a list. */
static inline void
smla_show_rows(smla_step_view *view, const char *name, const int32_t *data, int64_t start,
               int64_t num_rows, int64_t columns, int64_t row_stride)
{
    *view = (smla_step_view){.name = name,
                             .group = -1,
                             .ndim = 2,
                             .shape = {num_rows, columns},
                             .row_stride = row_stride,
                             .dtype = {kDLInt, 32, 1},
                             .data = data == NULL ? NULL : data + start * row_stride};
}

/* A model's part of a step. Functions that return no status cannot fail. `args` has the plan's type
 * and the size of this version.
 *
 * A plan without `fill` sends nothing from the host: what it has is made by kernels, from arrays of
 * the engine. Its batch has lengths on the device alone, so it is neither split nor cut, and such a
 * plan has no workspaces and no scratch. */
struct smla_step_plan {
    const char *name;
    const smla_config_field *fields;
    int num_fields;
    size_t step_bytes; /* the plan's struct, which begins with an smla_step */
    size_t config;     /* offsets in it: the config, the pointers of `sent` and of `made`, */
    size_t sent;
    size_t made;
    size_t kept;     /* those of `kept`, if the plan lists any, */
    size_t metadata; /* and the public metadata */
    size_t config_bytes;
    size_t workspaces[SMLA_MAX_WORKSPACES]; /* offsets in the config of its `const DLTensor *`; 0:
                                             * the plan has no such workspace */
    size_t args_bytes;

    /* Create. Checks the rules between fields, and takes what the engine reads. */
    smla_status (*check)(smla_step *step, smla_error *error);
    /* Lists the arrays in `sent`, `made` and `kept`. */
    void (*list_arrays)(smla_step *step);
    int64_t (*find_scratch_bytes)(const smla_step *step);
    /* Fills the rules of the workspaces that the plan has. Those of others are zeros. */
    smla_status (*find_workspaces)(const smla_step *step,
                                   smla_workspace_rule rules[SMLA_MAX_WORKSPACES],
                                   smla_error *error);
    /* What workspace_bytes counts beside the workspaces; NULL: nothing. */
    int64_t (*count_other_bytes)(const smla_step *step);
    smla_status (*report_no_memory)(const smla_step *step, smla_error *error);

    /* Build, in this order. Until `fill` is called, nothing of the last step is written. In the
     * batch that they get, requests without query tokens have no tokens at all. */
    smla_batch (*read_batch)(const void *args);
    smla_status (*check_args)(const smla_step *step, const smla_batch *batch, const void *args,
                              smla_error *error);
    /* Cuts next_chunks, counts them, and may change the path of this step. */
    smla_status (*cut_chunks)(const smla_step *step, const smla_batch *batch,
                              smla_step_facts *facts, smla_error *error);
    /* Fills the arrays of `sent`, which are in `memory`. The new facts and chunks are set. */
    void (*fill)(const smla_step *step, const smla_batch *batch, int32_t *memory);
    /* Starts the kernels that fill the arrays of `made`; NULL = there are none. */
    smla_status (*fill_lists)(const smla_step *step, const void *args, smla_stream stream,
                              smla_error *error);
    /* Sets the metadata, and keeps views of the block tables that layers read. */
    void (*commit)(smla_step *step, const void *args);

    /* Lists what a binding shows beside the facts; returns how many views. */
    int (*describe)(const smla_step *step, smla_step_view views[SMLA_MAX_STEP_VIEWS]);
};

/* The fields of a plan that follow from its types: a builder with members step, config, metadata
 * and made, the args of a build, and the table of the config's fields. */
#define SMLA_PLAN_TYPES(its_name, builder, args, table)                                           \
    .name = (its_name), .fields = (table), .num_fields = (int)(sizeof(table) / sizeof(table)[0]), \
    .step_bytes = sizeof(builder), .config = offsetof(builder, config),                           \
    .made = offsetof(builder, made), .metadata = offsetof(builder, metadata),                     \
    .config_bytes = sizeof(((builder *)NULL)->config), .args_bytes = sizeof(args)

/* The same of a plan that sends arrays from the host, and has a workspace of gathered rows. */
#define SMLA_PLAN_SENDS(builder)     \
    .sent = offsetof(builder, sent), \
    .workspaces[SMLA_GATHERED] = offsetof(builder, config.workspace) - offsetof(builder, config)

/* The functions that every plan has, under the names that all plans' files give them. */
#define SMLA_PLAN_FUNCTIONS                                                               \
    .check = check, .list_arrays = list_arrays, .find_scratch_bytes = find_scratch_bytes, \
    .find_workspaces = find_workspaces, .report_no_memory = report_no_memory,             \
    .read_batch = read_batch, .check_args = check_args, .fill = fill, .commit = commit,   \
    .describe = describe

/* The names of a creation and of a build in error texts. */
extern const char smla_create_op[];
extern const char smla_build_op[];

/* Checks that the arrays of a call, of which `name` is the first, are on the step's device. */
smla_status smla_require_step_device(const smla_step *step, const char *op, const char *name,
                                     DLDevice device, smla_error *error);

/* Makes a step with all memory that batches within the limits of `config` need. */
smla_status smla_create_step(const smla_step_plan *plan, const void *config, smla_step **step,
                             smla_error *error);

/* NULL is allowed. */
void smla_destroy_step(smla_step *step);

/* Cuts the chunks of a step that is being built, and sets their numbers in the facts. */
smla_status smla_cut_chunks(const smla_step *step, const smla_prefills *prefills,
                            smla_step_facts *facts, smla_error *error);

/* Plans a step. If an argument is refused, the last one stays valid. */
smla_status smla_build_step(smla_step *step, const void *args, smla_error *error);

/* The bytes of the workspaces in use, and of what the plan counts beside them. 0 for NULL. */
int64_t smla_step_workspace_bytes(const smla_step *step);
