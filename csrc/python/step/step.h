/* step.h: a step of the core as a Python object. The object keeps alive what the core refers to:
 * the workspaces as long as it lives, and the arrays of a step until the next build.
 *
 * One type serves all plans. read_config.c reads a config by its plan's table, step_build.c and
 * step_layer.c the arguments of builds and layers by the tables in step_calls.c.
 */
#pragma once

#include <stdatomic.h>

#include "core/params_step.h"
#include "python/arrays/tensor.h"
#include "python/call/operator.h"
#include "step/plans.h"

enum { SMLA_PY_MAX_STEP_ARRAYS = 2 + 2 * SMLA_MAX_STEP_GROUPS };

enum { SMLA_PY_MAX_LAYERS = 2 };

/* What Python calls of a plan. A call of a layer is of the last kind whose first argument it names,
 * else of the first kind. */
typedef struct smla_py_plan {
    const smla_step_plan *core;
    smla_py_operator build;                      /* its arguments; step_build.c reads and runs it */
    smla_py_operator layers[SMLA_PY_MAX_LAYERS]; /* a kind that there is not has no rows */
} smla_py_plan;

/* The plan of a name, or NULL. */
const smla_py_plan *smla_py_find_plan(const char *name);

/* The keywords of a call: one per row of its table, interned, or NULL where the row is none. */
typedef struct smla_py_keywords {
    PyObject *names[SMLA_PY_MAX_PARAMS];
} smla_py_keywords;

typedef struct smla_py_step {
    PyObject_HEAD smla_step *core;
    const smla_py_plan *plan;
    smla_py_keywords build;
    smla_py_keywords layers[SMLA_PY_MAX_LAYERS];
    atomic_flag is_busy;
    int64_t generation;                            /* counts successful builds */
    smla_py_array workspaces[SMLA_MAX_WORKSPACES]; /* absent = the core has its own */
    struct {
        int num_arrays;
        smla_py_array arrays[SMLA_PY_MAX_STEP_ARRAYS];
    } kept[2]; /* one for this step, one for the next */
    int current;
} smla_py_step;

/* ---- Calls: step_arrays.c ------------------------------------------------------------------ */

/* Interns the keywords of a call's table. */
int smla_py_intern_keywords(const smla_py_operator *op, smla_py_keywords *keywords);
void smla_py_drop_keywords(smla_py_keywords *keywords);

/* Finds the rows of a call's keywords. `values` are borrowed; NULL where there is no keyword. */
int smla_py_bind_keywords(const smla_py_operator *op, const smla_py_keywords *keywords,
                          PyObject *const *args, PyObject *given, PyObject **values);

/* Whether the keywords of a call, a tuple or NULL, have a name. */
bool smla_py_has_keyword(PyObject *given, PyObject *name);

/* Admits one thread at a time: a build or a call of a layer runs, possibly without the GIL. A
 * second thread gets an exception, so that there is no race. */
int smla_py_enter_step(smla_py_step *step, const char *op);

static inline void
smla_py_leave_step(smla_py_step *step)
{
    atomic_flag_clear(&step->is_busy);
}

/* Begins a call of a layer with the step, which smla_py_close leaves. Sets the args' builder. */
int smla_py_take_step(smla_py_call *call, PyObject *object, void *builder);

/* Checks that the step of a layer's metadata, the build of this number, is the latest one. */
int smla_py_check_generation(const char *op, const void *step, PyObject *object);

/* ---- Arrays: step_arrays.c ----------------------------------------------------------------- */

/* New array of up to two dimensions over a persistent buffer, an ndarray on the CPU, else a Tensor
 * with `event`. NULL data gives None. The array is read-only, because only the step may write what
 * kernels read. */
PyObject *smla_py_view_buffer(smla_py_step *step, PyObject *event, const smla_step_view *view);

/* Allocates the results of attention, unless the caller gave them: array `out` [T, H, values] bf16
 * for the call's first array, q [T, H, any], or with `ndim` 2 [T, values] for [T, any]; and the
 * next array, lse [T, H] fp32, if the call asks for it. `num_heads` is H where q does not tell.
 * Rows from `num_written` on are zeroed, because the call does not write them. For a bad q it does
 * nothing, because the core refuses it. */
int smla_py_allocate_rows(smla_py_call *call, int out, int ndim, int64_t num_heads, int64_t values,
                          int64_t num_written);

/* Zeroes bytes of the device of a call. */
int smla_py_fill_zero(smla_py_call *call, DLDevice device, void *memory, int64_t bytes);

/* ---- Methods ------------------------------------------------------------------------------- */

/* Reads a mapping by the plan's table of fields into a cleared config. */
int smla_py_read_config(const smla_step_plan *plan, PyObject *object, void *config);

/* New dict: for each plan its fields by their names in Python, as (kind, least, most). */
PyObject *smla_py_config_fields(void);

PyObject *smla_py_build_step(PyObject *self, PyObject *const *args, Py_ssize_t num_args,
                             PyObject *keywords);
/* The same, but without a description: returns the number of the build. */
PyObject *smla_py_refresh_step(PyObject *self, PyObject *const *args, Py_ssize_t num_args,
                               PyObject *keywords);
PyObject *smla_py_run_layer(PyObject *self, PyObject *const *args, Py_ssize_t num_args,
                            PyObject *keywords);

/* The class method warm_up. Defined in warm_up.c. */
PyObject *smla_py_warm_up(PyObject *type, PyObject *const *args, Py_ssize_t num_args);
