/* operator.h: an operator as a table. Each argument is one row: the name that Python knows, what it
 * is, and which field of the core's args it fills. All that handles arguments reads the table:
 * calls from Python (run.c), calls from XLA (xla_ffi.c), the binding of a declaration's parameters
 * (operator.c) and, through an operator's attribute `table`, the integrations of PyTorch and JAX.
 *
 * To add an operator: a function of the core, a table and a row in one of the ops_*.c files, and a
 * declaration in sparse_mla/ops/.
 */
#ifndef SMLA_PYTHON_OPERATOR_H
#define SMLA_PYTHON_OPERATOR_H

#include <stddef.h>
#include <string.h>

#include "python/call/call.h"

/* Arrays have the kinds of smla_py_role and some more. */
typedef enum smla_py_kind {
    /* arrays that a caller gives */
    SMLA_PY_PAIR = SMLA_PY_NUM_ROLES, /* one array, or a tuple of two: the next row is the second */
    SMLA_PY_ASKED_OUTPUT,             /* None or written; returned where it is given or asked for */
    SMLA_PY_WORKSPACE,                /* None or written; not returned */
    /* arrays without an argument of their own */
    SMLA_PY_SECOND, /* of a pair */
    SMLA_PY_RESULT, /* always new */
    SMLA_PY_ASKED_RESULT,
    /* options */
    SMLA_PY_INT,       /* int64_t */
    SMLA_PY_INT32,     /* int32_t */
    SMLA_PY_FLOAT,     /* double */
    SMLA_PY_KV_FORMAT, /* int32_t: None or the name of a cache format */
    SMLA_PY_FLOATS,    /* DLDataType: "float32" or "bfloat16" */
    SMLA_PY_DEVICE,    /* DLDevice */
    SMLA_PY_ASK,       /* no field: whether to return what is marked as asked for */
    SMLA_PY_STREAM,    /* void *; the last row where there are arrays */
    /* the same without an argument: always that of the arrays */
    SMLA_PY_ARRAYS_STREAM,
} smla_py_kind;

/* A row. Arrays come first, those that are read before those that are only written. */
typedef struct smla_py_param {
    const char *name;
    int kind;      /* a role or a kind */
    size_t offset; /* of a const DLTensor *, or of what the kind says */
} smla_py_param;

enum {
    SMLA_PY_MAX_PARAMS = 20,
    SMLA_PY_MAX_ARGS_BYTES = 192, /* of an operator's args */
};

typedef struct smla_py_operator {
    const char *name;  /* as Python declares it */
    const char *title; /* in errors, if it is another one */
    const smla_py_param *params;
    int num_params;
    size_t args_bytes; /* of the struct that the offsets are of */
    size_t core_bytes; /* of the core's args, with which it begins */
    /* The operator of the core. Runs without the GIL. */
    smla_status (*compute)(const void *args, smla_error *error);
    /* Allocates the results that the caller left out. Rules are the core's: where a result's shape
     * cannot be known, because an input is malformed, it is left absent, and the core reports that
     * input first. NULL: all of them are given. */
    int (*allocate)(smla_py_call *call, const void *args, bool asks);
    /* Of an operator with a workspace: what a call needs whose other arrays are set, 0 for none. */
    int64_t (*workspace_bytes)(const void *args);
    /* For operators without arrays, in place of all of the above. */
    PyObject *(*answer)(const void *args);
} smla_py_operator;

/* A number that is at most `most`; a larger one does not compile. */
#define SMLA_PY_AT_MOST(most, number) ((number) + 0 * sizeof(char[(number) <= (most) ? 1 : -1]))

/* What an operator has of its table, of the core's args and of the struct that the offsets are of:
 * the same type, or one that begins with it and adds what Python alone has. */
#define SMLA_PY_TABLE(table, core, args)                                          \
    .params = (table),                                                            \
    .num_params = (int)SMLA_PY_AT_MOST(SMLA_PY_MAX_PARAMS, SMLA_PY_COUNT(table)), \
    .args_bytes = SMLA_PY_AT_MOST(SMLA_PY_MAX_ARGS_BYTES, sizeof(args)),          \
    .core_bytes = sizeof(core)

/* By file; each list ends with a null row. */
extern const smla_py_operator smla_py_cache_operators[];
extern const smla_py_operator smla_py_attention_operators[];
extern const smla_py_operator smla_py_absorption_operators[];

/* The operator of a name that need not end with 0, or NULL. */
const smla_py_operator *smla_py_find_operator(const char *name, size_t length);

/* One call; values[i] belongs to row i, and is not looked at where the row is no argument. */
PyObject *smla_py_run(const smla_py_state *state, const smla_py_operator *op,
                      PyObject *const *values);

static inline bool
smla_py_is_array(const smla_py_param *param)
{
    return param->kind < SMLA_PY_INT;
}

/* Whether calls of Python have an argument for it. */
static inline bool
smla_py_is_argument(const smla_py_param *param)
{
    return param->kind < SMLA_PY_SECOND ||
           (param->kind >= SMLA_PY_INT && param->kind <= SMLA_PY_STREAM);
}

/* Whether it is an array that a call returns, if it has one. */
static inline bool
smla_py_is_returned(const smla_py_param *param)
{
    const unsigned returned = 1u << SMLA_PY_OUTPUT | 1u << SMLA_PY_INOUT |
                              1u << SMLA_PY_ASKED_OUTPUT | 1u << SMLA_PY_RESULT |
                              1u << SMLA_PY_ASKED_RESULT;
    return returned >> param->kind & 1;
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

/* Of an operator that has one. */
static inline const smla_py_param *
smla_py_find_workspace(const smla_py_operator *op)
{
    const smla_py_param *param = op->params;
    while (param->kind != SMLA_PY_WORKSPACE) {
        param++;
    }
    return param;
}

/* Makes memory for any operator's args those of this one, without arrays and options. */
static inline void
smla_py_clear_args(const smla_py_operator *op, void *args)
{
    memset(args, 0, op->args_bytes);
    memcpy(args, &op->core_bytes, sizeof op->core_bytes); /* struct_size */
}

/* Fills a field of args that is a pointer; a memcpy, for args of all operators share memory. */
static inline void
smla_py_set_pointer(void *args, const smla_py_param *param, const void *pointer)
{
    memcpy((char *)args + param->offset, &pointer, sizeof(void *));
}

#endif /* SMLA_PYTHON_OPERATOR_H */
