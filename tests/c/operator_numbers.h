/* operator_numbers.h: a number for each operator, so that a test's tables have a row for each. */
#pragma once

#include "core/operators.h"

#define NUMBER(name, ...) OP_##name,

enum {
    SMLA_OPERATORS(NUMBER) SMLA_PROJECTIONS(NUMBER) SMLA_ATTENTIONS(NUMBER) NUM_OPERATORS,
};

#undef NUMBER
