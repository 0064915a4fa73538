/* kind.h: the kinds of the rows of an operator's table (operator.h).
 *
 * A new kind of integer needs a value of the enumeration and a row in kind.c: calls from Python,
 * from XLA and the schemas of PyTorch read them by that row.
 */
#pragma once

#include "python/arrays/array.h"

/* The kind of a table row. The values of smla_py_role are kinds of arrays, too. */
typedef enum smla_py_kind {
    /* arrays that a caller gives */
    SMLA_PY_PAIR = SMLA_PY_NUM_ROLES, /* one array, or a tuple of two: the next row is the second */
    SMLA_PY_PARTS,    /* smla_parts_arg: one array, or a list or tuple of arrays; read */
    SMLA_PY_NULLABLE, /* given, but may be None; read */
    SMLA_PY_ASKING,   /* None or read; asks for the asked outputs where given */
    /* read, and also written where maybe_writes of the operator says so; never returned */
    SMLA_PY_MAYBE_INOUT,
    SMLA_PY_SCALE,         /* smla_scale_arg: a float, or an array of one, which is read */
    SMLA_PY_SCALE_OR_NONE, /* the same, or None, which leaves both of its fields empty */
    SMLA_PY_ASKED_OUTPUT,  /* None or written; returned where it is given or asked for */
    /* As SMLA_PY_OUTPUT where its result's row holds; elsewhere None is returned. */
    SMLA_PY_OUTPUT_OR_NONE,
    /* None or written. With None the first array is written and returned in its place, unless
     * writes_first of the operator says no: then as SMLA_PY_OUTPUT. */
    SMLA_PY_OVER_FIRST,
    SMLA_PY_WORKSPACE, /* None or written; not returned */
    SMLA_PY_TABLE,     /* a build: None, or read until the next build */
    SMLA_PY_TABLES,    /* a build: a tuple of tables, for fields that follow each other */
    /* arrays without an argument in Python */
    SMLA_PY_SECOND, /* second array of a pair */
    SMLA_PY_RESULT, /* always new */
    SMLA_PY_ASKED_RESULT,
    /* options */
    SMLA_PY_INT,           /* int64_t */
    SMLA_PY_INT32,         /* int32_t */
    SMLA_PY_FLAG,          /* int32_t: 1 where the argument is true */
    SMLA_PY_UNLESS,        /* int32_t: 1 where the argument is false */
    SMLA_PY_SIZE,          /* int64_t: None, which is 0, or at least 1 */
    SMLA_PY_COUNT_OR_NONE, /* int64_t: None, which is -1, or at least 0 */
    SMLA_PY_HINT,          /* int64_t: None, which is 0, or at least 0 */
    SMLA_PY_TWO_INTS,      /* int64_t[2]: a tuple */
    SMLA_PY_THREE_INTS,    /* int64_t[3]: None, which is zeros, or a tuple */
    SMLA_PY_FLOAT,         /* double */
    SMLA_PY_KV_FORMAT,     /* int32_t: None or the name of a cache format */
    SMLA_PY_FLOATS,        /* DLDataType: "float32" or "bfloat16" */
    SMLA_PY_SCALES,        /* int32_t: the name of a scale layout */
    SMLA_PY_DEVICE,        /* DLDevice */
    SMLA_PY_STARTS,        /* a build: a copy of host integers, one more than requests */
    SMLA_PY_LENGTHS,       /* a build: the same, one per request */
    SMLA_PY_LENGTHS_OR_NONE,
    SMLA_PY_GENERATION, /* no field: the number of the step's latest build */
    SMLA_PY_ASK,        /* no field: whether to return the asked output or result */
    SMLA_PY_STREAM,     /* void *; the last row where there are arrays */
    /* as SMLA_PY_STREAM, but without an argument: always the stream of the arrays */
    SMLA_PY_ARRAYS_STREAM,
    SMLA_PY_STEP, /* a layer's step, without an argument; before its generation */
    SMLA_PY_NUM_KINDS,
} smla_py_kind;

/* What the readers of options know of a kind. */
typedef struct smla_py_kind_row {
    const char *name; /* its name in Python; a kind of builds alone has none */
    const char *type; /* an option's in Python: "int", "bool", "float" or "str"; else NULL */
    bool may_be_none;
    /* of integers */
    int count;     /* 1, or how many a tuple has; 0 if the kind is no integer */
    bool is_int32; /* int32_t in the args, in place of int64_t */
    int64_t least; /* a smaller one is refused */
    int64_t none;  /* what None becomes */
} smla_py_kind_row;

extern const smla_py_kind_row smla_py_kinds[SMLA_PY_NUM_KINDS];

/* Fills the field of an option of integers that was left out, or is None. */
void smla_py_fill_none(const smla_py_kind_row *kind, int64_t *field);

/* New dict: name of each kind of option -> (type, count, is_int32, may_be_none). */
PyObject *smla_py_option_kinds(void);
