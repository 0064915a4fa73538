/* kind.c: the rows of kinds. */
#include "python/call/kind.h"

/* A row of integers of at least `smallest`. */
#define INTEGERS(text, number, smallest) \
    .name = (text), .type = "int", .count = (number), .least = (smallest)

const smla_py_kind_row smla_py_kinds[SMLA_PY_NUM_KINDS] = {
    [SMLA_PY_INPUT] = {.name = "input"},
    [SMLA_PY_OPTIONAL] = {.name = "optional input"},
    [SMLA_PY_OUTPUT] = {.name = "output"},
    [SMLA_PY_INOUT] = {.name = "input and output"},
    [SMLA_PY_PAIR] = {.name = "pair"},
    [SMLA_PY_PARTS] = {.name = "parts"},
    [SMLA_PY_NULLABLE] = {.name = "input or none"},
    [SMLA_PY_ASKING] = {.name = "asking input"},
    [SMLA_PY_MAYBE_INOUT] = {.name = "input, maybe output"},
    [SMLA_PY_SCALE] = {.name = "scale"},
    [SMLA_PY_SCALE_OR_NONE] = {.name = "scale or none"},
    [SMLA_PY_ASKED_OUTPUT] = {.name = "asked output"},
    [SMLA_PY_OUTPUT_OR_NONE] = {.name = "output or none"},
    [SMLA_PY_OVER_FIRST] = {.name = "output or first"},
    [SMLA_PY_WORKSPACE] = {.name = "workspace"},
    [SMLA_PY_SECOND] = {.name = "second"},
    [SMLA_PY_RESULT] = {.name = "result"},
    [SMLA_PY_ASKED_RESULT] = {.name = "asked result"},
    [SMLA_PY_INT] = {INTEGERS("int", 1, INT64_MIN)},
    [SMLA_PY_INT32] = {INTEGERS("int32", 1, INT64_MIN), .is_int32 = true},
    [SMLA_PY_FLAG] = {.name = "flag", .type = "bool"},
    [SMLA_PY_UNLESS] = {.name = "flag", .type = "bool"},
    [SMLA_PY_SIZE] = {INTEGERS("size", 1, 1), .may_be_none = true},
    [SMLA_PY_COUNT_OR_NONE] = {INTEGERS("count or none", 1, 0), .may_be_none = true, .none = -1},
    [SMLA_PY_HINT] = {INTEGERS("hint", 1, 0), .may_be_none = true},
    [SMLA_PY_TWO_INTS] = {INTEGERS("two ints", 2, INT64_MIN)},
    [SMLA_PY_THREE_INTS] = {INTEGERS("three ints or none", 3, INT64_MIN), .may_be_none = true},
    [SMLA_PY_FLOAT] = {.name = "float", .type = "float"},
    [SMLA_PY_KV_FORMAT] = {.name = "kv_format", .type = "str", .may_be_none = true},
    [SMLA_PY_FLOATS] = {.name = "floats", .type = "str"},
    [SMLA_PY_SCALES] = {.name = "scales", .type = "str"},
    [SMLA_PY_DEVICE] = {.name = "device"},
    [SMLA_PY_ASK] = {.name = "ask"},
    [SMLA_PY_STREAM] = {.name = "stream"},
    [SMLA_PY_ARRAYS_STREAM] = {.name = "stream of the arrays"},
};

void
smla_py_fill_none(const smla_py_kind_row *kind, int64_t *field)
{
    for (int i = 0; i < kind->count; i++) {
        field[i] = kind->none;
    }
}

PyObject *
smla_py_option_kinds(void)
{
    PyObject *kinds = PyDict_New();
    for (int i = 0; kinds != NULL && i < SMLA_PY_NUM_KINDS; i++) {
        const smla_py_kind_row *const row = &smla_py_kinds[i];
        if (row->type == NULL) {
            continue;
        }
        PyObject *facts =
            Py_BuildValue("(siOO)", row->type, row->count, row->is_int32 ? Py_True : Py_False,
                          row->may_be_none ? Py_True : Py_False);
        if (facts == NULL || PyDict_SetItemString(kinds, row->name, facts) < 0) {
            Py_CLEAR(kinds);
        }
        Py_XDECREF(facts);
    }
    return kinds;
}
