/* step_layer.c: runs one layer of a step, as an operator whose table has a row for the step. */
#include "python/step/step.h"

/* The number of the kind of layer that a call's keywords name. */
static int
find_layer(const smla_py_step *step, PyObject *keywords)
{
    int kind = SMLA_PY_MAX_LAYERS - 1;
    while (kind > 0 && (step->plan->layers[kind].num_params == 0 ||
                        !smla_py_has_keyword(keywords, step->layers[kind].names[0]))) {
        kind--;
    }
    return kind;
}

PyObject *
smla_py_run_layer(PyObject *self, PyObject *const *args, Py_ssize_t num_args, PyObject *keywords)
{
    smla_py_step *const step = (smla_py_step *)self;
    const int kind = find_layer(step, keywords);
    const smla_py_operator *const op = &step->plan->layers[kind];
    PyObject *const *const names = step->layers[kind].names;
    PyObject *values[SMLA_PY_MAX_PARAMS];
    if (smla_py_check_count(op->name, num_args, 0) < 0 ||
        smla_py_bind_keywords(op, &step->layers[kind], args, keywords, values) < 0) {
        return NULL;
    }
    for (int i = 0; i < op->num_params; i++) {
        if (op->params[i].kind == SMLA_PY_STEP) {
            values[i] = self;
        } else if (values[i] == NULL && names[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s: `%U` must be given, got none", op->name, names[i]);
            return NULL;
        }
    }
    return smla_py_run(smla_py_type_state(self), op, values);
}
