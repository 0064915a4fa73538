/* operator.h: an operator as a table. Each argument is one row: its name in Python, its kind, and
 * the field of the core's args that it fills. All code that handles arguments reads the table:
 * calls from Python (run.c), calls from XLA (xla_ffi.c), the binding of a declaration's parameters
 * (operator.c) and, through an operator's attribute `table`, the integrations of PyTorch and JAX.
 *
 * A new operator needs a function of the core, a table and a row in one of the ops_*.c files, and a
 * declaration in sparse_mla/ops/.
 */
#pragma once

#include <stddef.h>
#include <string.h>

#include "python/call/call.h"
#include "python/call/kind.h"
#include "python/call/result_row.h"

/* A table row. Arrays come first; arrays that are read come before arrays that are only written. */
typedef struct smla_py_param {
    const char *name;
    int kind;      /* smla_py_role or smla_py_kind */
    size_t offset; /* the field's: const DLTensor *, or the type in the kind's comment */
} smla_py_param;

enum {
    SMLA_PY_MAX_PARAMS = 32,
    SMLA_PY_MAX_ARGS_BYTES = 320, /* the largest args of an operator */
};

typedef struct smla_py_operator {
    const char *name;  /* as Python declares it */
    const char *title; /* the name in errors; NULL = `name` */
    const smla_py_param *params;
    int num_params;
    size_t args_bytes; /* size of the struct that the offsets refer to */
    size_t core_bytes; /* size of the core's args, with which that struct begins */
    /* The operator of the core. Runs without the GIL. */
    smla_status (*compute)(const void *args, smla_error *error);
    /* Whether the values of a call let it write its first array: see SMLA_PY_OVER_FIRST. NULL = no
     * call does. */
    bool (*writes_first)(PyObject *const *values);
    /* Whether the values of a call let it write its arrays of kind SMLA_PY_MAYBE_INOUT. */
    bool (*maybe_writes)(PyObject *const *values);
    /* The results that a call makes where its caller left them out, in the table's order, and what
     * their rows need of a call (result_row.h). */
    const smla_py_result_row *results;
    int num_results;
    const smla_py_limit *limits;
    int num_limits;
    size_t fills_offset; /* fills_padding of the core's args; 0 = no row of results has `fills` */
    /* Makes the results instead, where a row cannot say their sizes. NULL = the rows do. */
    int (*allocate)(smla_py_call *call, const void *args);
    /* Checks options that the core does not know, before results are made. NULL = it has none. */
    int (*check_options)(const smla_py_call *call, const void *args);
    /* Bytes of workspace that a call needs, once its other arrays are set. NULL = no workspace. */
    int64_t (*workspace_bytes)(const void *args);
    /* For operators without arrays, instead of the functions above. */
    PyObject *(*answer)(const void *args);
} smla_py_operator;

/* A number that is at most `most`; a larger one does not compile. */
#define SMLA_PY_AT_MOST(most, number) ((number) + 0 * sizeof(char[(number) <= (most) ? 1 : -1]))

/* The fields of an operator that follow from its table. The table's offsets refer to `args`: the
 * core's args, `core`, or a struct that begins with them and adds options that only Python has. */
#define SMLA_PY_TABLE(table, core, args)                                          \
    .params = (table),                                                            \
    .num_params = (int)SMLA_PY_AT_MOST(SMLA_PY_MAX_PARAMS, SMLA_PY_COUNT(table)), \
    .args_bytes = SMLA_PY_AT_MOST(SMLA_PY_MAX_ARGS_BYTES, sizeof(args)),          \
    .core_bytes = sizeof(core)

/* The fields of an operator that makes results. */
#define SMLA_PY_RESULTS(rows) .results = (rows), .num_results = SMLA_PY_COUNT(rows)
#define SMLA_PY_LIMITS(rows)  .limits = (rows), .num_limits = SMLA_PY_COUNT(rows)

/* The fields of an operator that takes the core's args as they are, and whose table is named by
 * `stem`; of one that makes results, too; and of one whose results have limits. */
#define SMLA_PY_PLAIN_OPERATOR(op, stem, core) \
    .name = #op, SMLA_PY_TABLE(stem##_params, core, core), .compute = compute_##op
#define SMLA_PY_MAKING_OPERATOR(op, stem, core) \
    SMLA_PY_PLAIN_OPERATOR(op, stem, core), SMLA_PY_RESULTS(stem##_results)
#define SMLA_PY_OPERATOR(op, stem, core) \
    SMLA_PY_MAKING_OPERATOR(op, stem, core), SMLA_PY_LIMITS(stem##_limits)

/* Defines compute_<name>, the core's operator as smla_py_operator.compute. */
#define SMLA_PY_COMPUTE(name)                                              \
    static smla_status compute_##name(const void *args, smla_error *error) \
    {                                                                      \
        return smla_##name(args, error);                                   \
    }

/* The same of args with a window, which is a pair in Python, each side of which may be open. */
#define SMLA_PY_COMPUTE_WINDOW(name, args_type)                            \
    static smla_status compute_##name(const void *args, smla_error *error) \
    {                                                                      \
        args_type a = *(const args_type *)args;                            \
        a.has_window = true;                                               \
        return smla_##name(&a, error);                                     \
    }

/* The operators of each ops_*.c file. Each list ends with a row without a name. */
extern const smla_py_operator smla_py_cache_operators[];
extern const smla_py_operator smla_py_attention_operators[];
extern const smla_py_operator smla_py_index_operators[];
extern const smla_py_operator smla_py_topk_operators[];
extern const smla_py_operator smla_py_indexer_operators[];
extern const smla_py_operator smla_py_norm_operators[];
extern const smla_py_operator smla_py_rope_operators[];
extern const smla_py_operator smla_py_projection_operators[];
extern const smla_py_operator smla_py_compressor_operators[];
extern const smla_py_operator smla_py_varlen_operators[];

/* The operator of a name, which need not end with 0. NULL if there is none. */
const smla_py_operator *smla_py_find_operator(const char *name, size_t length);

/* Allocates the results that the caller left out. If a malformed input leaves a result's shape or
 * dtype unknown, the result stays absent, because the core reports the input first. result_row.c */
int smla_py_allocate_results(smla_py_call *call, const smla_py_operator *op, const void *args);

/* New tuples: the rows of an operator's results, and their limits. result_row.c */
PyObject *smla_py_list_results(const smla_py_operator *op);
PyObject *smla_py_list_limits(const smla_py_operator *op);

/* Runs one call. values[i] belongs to row i, and is ignored where the row is no argument. */
PyObject *smla_py_run(const smla_py_state *state, const smla_py_operator *op,
                      PyObject *const *values);

static inline bool
smla_py_is_array(const smla_py_param *param)
{
    return param->kind < SMLA_PY_INT;
}

/* Whether a call from Python has an argument for the row. */
static inline bool
smla_py_is_argument(const smla_py_param *param)
{
    return param->kind < SMLA_PY_SECOND ||
           (param->kind >= SMLA_PY_INT && param->kind <= SMLA_PY_STREAM);
}

/* Whether the row is an array that a call returns if the array is present, before those that it
 * reads and writes. */
static inline bool
smla_py_is_result(const smla_py_param *param)
{
    const unsigned results = 1u << SMLA_PY_OUTPUT | 1u << SMLA_PY_OUTPUT_OR_NONE |
                             1u << SMLA_PY_OVER_FIRST | 1u << SMLA_PY_ASKED_OUTPUT |
                             1u << SMLA_PY_RESULT | 1u << SMLA_PY_ASKED_RESULT;
    return results >> param->kind & 1;
}

static inline int
smla_py_count_arrays(const smla_py_operator *op)
{
    int count = 0;
    while (count < op->num_params && smla_py_is_array(&op->params[count])) {
        count++;
    }
    return count;
}

/* The workspace's row, for an operator that has one. */
static inline const smla_py_param *
smla_py_find_workspace(const smla_py_operator *op)
{
    const smla_py_param *param = op->params;
    while (param->kind != SMLA_PY_WORKSPACE) {
        param++;
    }
    return param;
}

/* Clears `args` and sets its struct_size, so that it is this operator's args without any value. */
static inline void
smla_py_clear_args(const smla_py_operator *op, void *args)
{
    memset(args, 0, op->args_bytes);
    memcpy(args, &op->core_bytes, sizeof op->core_bytes);
}

/* Tells the core which results the call has made: the sum of their rows' `fills`. */
static inline void
smla_py_set_fills(const smla_py_operator *op, void *args, int32_t fills)
{
    if (op->fills_offset != 0) {
        memcpy((char *)args + op->fills_offset, &fills, sizeof fills);
    }
}

/* Fills a pointer field of args: by memcpy, because the args of all operators share memory. */
static inline void
smla_py_set_pointer(void *args, const smla_py_param *param, const void *pointer)
{
    memcpy((char *)args + param->offset, &pointer, sizeof(void *));
}
