/* operator_numbers.h: a number for each operator, so that a test's tables have a row for each. */
#pragma once

#include "core/operators.h"

#define NUMBER(name, args_type, params_type, family) OP_##name,

enum {
    SMLA_OPERATORS(NUMBER) SMLA_PROJECTIONS(NUMBER) OP_sparse_attention,
    OP_sparse_mla_dsv4,
    OP_mla_attention,
    NUM_OPERATORS,
};

#undef NUMBER
