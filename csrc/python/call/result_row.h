/* result_row.h: what an operator's results look like, as rows. Each result has a row, or several
 * with conditions, of which the first that holds counts. result_row.c allocates by these rows the
 * results that a caller leaves out. Through an operator's attributes `results` and `limits`,
 * sparse_mla/_results.py reads them for PyTorch's compiler and JAX, which must know results before
 * the call, and whose sizes may be symbolic.
 */
#pragma once

#include "python/call/call.h"

enum {
    SMLA_PY_MAX_RESULT_DIMS = 4,
    SMLA_PY_STORED_DIMS = 3, /* dimensions of a result that is not contiguous */
    SMLA_PY_MAX_TERMS = 4,
};

/* A number that a shape depends on. `row` is a row of the operator's table. */
typedef enum smla_py_number_kind {
    SMLA_PY_CONSTANT = 1,    /* `number` */
    SMLA_PY_SIZE_OF = 2,     /* dimension `number` of array `row`, which must be given */
    SMLA_PY_SIZE_OR_0 = 3,   /* the same; 0 where the array is absent */
    SMLA_PY_VALUE_OF = 4,    /* option `row`, an int64_t */
    SMLA_PY_PAGE_KEYS = 5,   /* option `row`: keys per page of cache `number`, [pages, bytes] */
    SMLA_PY_KEY_VALUES = 6,  /* values of a key of cache `row`; option `number` is its format */
    SMLA_PY_WHOLE_SHAPE = 7, /* no number: the result has all dimensions of array `row` */
    /* groups along dimension `number` of the first array: one for a size of -1 in option `row`,
     * which is two of them */
    SMLA_PY_GROUPS_ALONG = 8,
} smla_py_number_kind;

/* What a term does with its number and the value of the terms before it, which begins as 0. */
typedef enum smla_py_term_kind {
    SMLA_PY_NO_TERM = 0,
    SMLA_PY_ADD = 1,
    SMLA_PY_MULTIPLY = 2,
    SMLA_PY_DIVIDE = 3,   /* a remainder is an error of the array whose heads are divided */
    SMLA_PY_ROUND_UP = 4, /* up to a multiple of the number */
    SMLA_PY_RAISE_TO = 5, /* the larger of the two */
} smla_py_term_kind;

/* A dimension is computed term by term. It has at least one. */
typedef struct smla_py_term {
    smla_py_term_kind kind;
    smla_py_number_kind number_kind;
    int row;
    int number;
} smla_py_term;

typedef enum smla_py_condition_kind {
    SMLA_PY_ALWAYS = 0,
    SMLA_PY_IF_GIVEN = 1,       /* argument `row` is given */
    SMLA_PY_IF_ASKED = 2,       /* the call asks for the asked results, or gives one of them */
    SMLA_PY_IF_NDIM = 3,        /* array `row` has `value` dimensions */
    SMLA_PY_IF_SPLIT_PAGES = 4, /* cache `row` is [pages, bytes]; option `value` is its format */
    SMLA_PY_IF_SCALES = 5,      /* option `row` is the scale layout `value` */
} smla_py_condition_kind;

typedef struct smla_py_condition {
    smla_py_condition_kind kind;
    int row;
    int value;
} smla_py_condition;

typedef enum smla_py_dtype_source {
    SMLA_PY_FIXED_DTYPE = 0,
    SMLA_PY_FLOATS_OF_ARRAY = 1, /* array `row`, which the operator takes in bf16, fp16 or fp32 */
    SMLA_PY_DTYPE_OF_OPTION = 2, /* option `row`, a DLDataType */
    /* array `row`, which the operator takes in bf16, fp16 or e4m3; bf16 for e4m3 */
    SMLA_PY_HALVES_OF_ARRAY = 3,
    SMLA_PY_INTEGERS_OF_ARRAY = 4, /* array `row`, which the operator takes in int32 or int64 */
} smla_py_dtype_source;

typedef struct smla_py_result_dtype {
    smla_py_dtype_source source;
    int row;
    DLDataType fixed;
} smla_py_result_dtype;

/* The storage of a result that is not contiguous: dimension k of the result is dimension order[k]
 * of the storage, which has room for a multiple of `multiple` in the result's dimension 0. */
typedef struct smla_py_storage {
    int order[SMLA_PY_STORED_DIMS];
    int multiple; /* 0: the result is contiguous */
} smla_py_storage;

typedef struct smla_py_result_row {
    int result; /* its row in the operator's table */
    smla_py_result_dtype dtype;
    smla_py_term dims[SMLA_PY_MAX_RESULT_DIMS][SMLA_PY_MAX_TERMS];
    smla_py_condition when;
    smla_py_storage storage;
    /* SMLA_FILLS_...: what the core is asked to fill where the call makes the result, because the
     * core leaves rows of no request as they are; 0: the core writes all of it */
    int32_t fills;
} smla_py_result_row;

/* What must hold before the rows mean anything. Where it does not hold, C makes no results, because
 * the core refuses the call. Python refuses it with the core's words, or leaves it to the call. */
typedef enum smla_py_limit_kind {
    SMLA_PY_LIMIT_NDIM = 1,    /* array `row`, if given, has `least` to `most` dimensions */
    SMLA_PY_LIMIT_VALUE = 2,   /* option `row` is `least` to `most` */
    SMLA_PY_LIMIT_HEADS = 3,   /* dimension 1 of array `row` is `least` to `most`; C only */
    SMLA_PY_LIMIT_COLUMNS = 4, /* option `row` is at most dimension 1 of array `least`; C only */
} smla_py_limit_kind;

typedef struct smla_py_limit {
    smla_py_limit_kind kind;
    int row;
    int least;
    int most;
} smla_py_limit;

/* ---- Spelling of rows ---------------------------------------------------------------------- */

#define SMLA_PY_MAKES_BF16  {SMLA_PY_FIXED_DTYPE, 0, {kDLBfloat, 16, 1}}
#define SMLA_PY_MAKES_FP32  {SMLA_PY_FIXED_DTYPE, 0, {kDLFloat, 32, 1}}
#define SMLA_PY_MAKES_E4M3  {SMLA_PY_FIXED_DTYPE, 0, {kDLFloat8_e4m3fn, 8, 1}}
#define SMLA_PY_MAKES_INT32 {SMLA_PY_FIXED_DTYPE, 0, {kDLInt, 32, 1}}
#define SMLA_PY_MAKES_UINT8 {SMLA_PY_FIXED_DTYPE, 0, {kDLUInt, 8, 1}}

/* A result of a fixed dtype. */
#define SMLA_PY_MAKES(row, type, ...) \
    .result = (row), .dtype = SMLA_PY_MAKES_##type, .dims = {__VA_ARGS__}

#define SMLA_PY_TERM(kind, number_kind, row, number) {kind, number_kind, row, number}

/* Dimensions of one term; the last stands for all dimensions of a result. */
#define SMLA_PY_SIZE(array, dim)    {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_SIZE_OF, array, dim)}
#define SMLA_PY_VALUE(option)       {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_VALUE_OF, option, 0)}
#define SMLA_PY_GROUPS(option, dim) {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_GROUPS_ALONG, option, dim)}
#define SMLA_PY_NUMBER(value)       {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_CONSTANT, 0, value)}
#define SMLA_PY_ALL_SIZES(array)    {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_WHOLE_SHAPE, array, 0)}
