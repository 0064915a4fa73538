/* step_type.c: the type of steps: Step(plan, config, workspace, up_workspace). sparse_mla/steps/ is
 * its public interface.
 */
#include <stdalign.h>

#include "python/step/step.h"

enum { MAX_CONFIG_BYTES = 256 };

#define CHECK_CONFIG(name, builder, config, args, metadata) \
    _Static_assert(sizeof(config) <= MAX_CONFIG_BYTES, "room for a config");
SMLA_STEP_PLANS(CHECK_CONFIG)

/* ---- Create -------------------------------------------------------------------------------- */

/* Acquires workspace= and up_workspace=, which the step holds as long as it lives, and sets them in
 * the config. A plan without such a workspace takes None alone. */
static int
take_workspaces(smla_py_step *step, PyObject *const *given, unsigned char *config)
{
    static const char *const names[SMLA_MAX_WORKSPACES] = {"workspace", "up_workspace"};
    const smla_py_state *const state = smla_py_type_state((PyObject *)step);
    const size_t *const offsets = step->plan->core->workspaces;
    smla_py_stream stream = {.backend = NULL};
    for (int i = 0; i < SMLA_MAX_WORKSPACES; i++) {
        if (offsets[i] == 0 && given[i] != Py_None) {
            PyErr_Format(PyExc_TypeError, "%s: `%s` must be None, got %R", smla_create_op, names[i],
                         given[i]);
            return -1;
        }
        if (smla_py_acquire(state, smla_create_op, names[i], SMLA_PY_RETAINED_OUTPUT, given[i],
                            &step->workspaces[i]) < 0) {
            return -1;
        }
        const DLTensor *const view = smla_py_view(&step->workspaces[i]);
        if (offsets[i] != 0) {
            memcpy(config + offsets[i], &view, sizeof(void *));
        }
    }
    return smla_py_resolve_stream_of(state, smla_create_op, step->workspaces, SMLA_MAX_WORKSPACES,
                                     NULL, &stream);
}

static int
create(smla_py_step *step, PyObject *given, PyObject *const *workspaces)
{
    alignas(max_align_t) unsigned char config[MAX_CONFIG_BYTES] = {0};
    const smla_step_plan *const plan = step->plan->core;
    for (int i = 0; i < SMLA_PY_MAX_LAYERS; i++) {
        if (smla_py_intern_keywords(&step->plan->layers[i], &step->layers[i]) < 0) {
            return -1;
        }
    }
    if (smla_py_intern_keywords(&step->plan->build, &step->build) < 0 ||
        smla_py_read_config(plan, given, config) < 0 ||
        take_workspaces(step, workspaces, config) < 0) {
        return -1;
    }
    smla_error error;
    smla_status status;
    Py_BEGIN_ALLOW_THREADS
    status = smla_create_step(plan, config, &step->core, &error);
    Py_END_ALLOW_THREADS
    return smla_py_check(status, &error);
}

static PyObject *
step_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *name = NULL;
    PyObject *config = NULL;
    PyObject *workspaces[SMLA_MAX_WORKSPACES] = {Py_None, Py_None};
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_Format(PyExc_TypeError, "%s: takes positional arguments only", smla_create_op);
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "sOO|O:Step", &name, &config, &workspaces[0], &workspaces[1])) {
        return NULL;
    }
    const smla_py_plan *const plan = smla_py_find_plan(name);
    if (plan == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: `plan` must be a plan of a step, got \"%s\"",
                     smla_create_op, name);
        return NULL;
    }
    smla_py_step *step = (smla_py_step *)PyType_GenericAlloc(type, 0);
    if (step == NULL) {
        return NULL;
    }
    atomic_flag_clear(&step->is_busy);
    step->plan = plan;
    if (create(step, config, workspaces) < 0) {
        Py_CLEAR(step);
    }
    return (PyObject *)step;
}

static void
step_dealloc(PyObject *self)
{
    smla_py_step *const step = (smla_py_step *)self;
    PyTypeObject *const type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS /* this may wait for the device, and device callbacks for the GIL */
    smla_destroy_step(step->core);
    Py_END_ALLOW_THREADS
    for (int i = 0; i < SMLA_MAX_WORKSPACES; i++) {
        smla_py_release_array(&step->workspaces[i]);
    }
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < step->kept[k].num_arrays; i++) {
            smla_py_release_array(&step->kept[k].arrays[i]);
        }
    }
    smla_py_drop_keywords(&step->build);
    for (int i = 0; i < SMLA_PY_MAX_LAYERS; i++) {
        smla_py_drop_keywords(&step->layers[i]);
    }
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* ---- Type ---------------------------------------------------------------------------------- */

PyDoc_STRVAR(build_doc, "build($self, batch, /, **arguments)\n--\n\n"
                        "Plan a step; see MetadataBuilder.build. A dict of what was planned.");
PyDoc_STRVAR(refresh_doc, "refresh($self, batch, /, **arguments)\n--\n\n"
                          "The same without the dict: the number of the build.");
PyDoc_STRVAR(layer_doc, "layer($self, /, **arguments)\n--\n\n"
                        "One layer of the step; see SparseMLA.forward and v4.SparseMLA.attend.");
PyDoc_STRVAR(warm_up_doc, "warm_up($type, q, out, lse, num_heads, stream, /)\n--\n\n"
                          "The results of a layer without a step: zeros.");

PyDoc_STRVAR(check_doc, "check($self, generation, /)\n--\n\n"
                        "Raise a ValueError unless the latest build has this number.");

static PyObject *
check(PyObject *self, PyObject *generation)
{
    return smla_py_check_generation("forward", self, generation) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(mark_use_doc, "mark_use($self, stream, /)\n--\n\n"
                           "Let later builds wait for the work that a stream has been given, which "
                           "reads the step.");

static smla_status
mark_use(const smla_step *core, smla_stream stream, smla_error *error)
{
    SMLA_TRY(core->backend->begin_use("forward", core->mirror, stream, error));
    return core->backend->end_use("forward", core->mirror, stream, error);
}

static PyObject *
step_mark_use(PyObject *self, PyObject *handle)
{
    smla_py_step *const step = (smla_py_step *)self;
    smla_stream stream = {.device_id = step->core->device.device_id};
    smla_error error;
    if (smla_py_parse_stream("forward", handle, &stream.handle) < 0 ||
        smla_py_enter_step(step, "forward") < 0) {
        return NULL;
    }
    const smla_status status = mark_use(step->core, stream, &error);
    smla_py_leave_step(step);
    return smla_py_check(status, &error) < 0 ? NULL : Py_NewRef(Py_None);
}

/* `copy`, `pickle` and `dataclasses.asdict` of metadata ask for this. */
static PyObject *
step_reduce(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    PyErr_Format(PyExc_TypeError,
                 "copy: `step` must be made again, by a copy of its MetadataBuilder, got %R",
                 Py_TYPE(self));
    return NULL;
}

static PyMethodDef step_methods[] = {
    {"build", (PyCFunction)(void (*)(void))smla_py_build_step, METH_FASTCALL | METH_KEYWORDS,
     build_doc},
    {"refresh", (PyCFunction)(void (*)(void))smla_py_refresh_step, METH_FASTCALL | METH_KEYWORDS,
     refresh_doc},
    {"layer", (PyCFunction)(void (*)(void))smla_py_run_layer, METH_FASTCALL | METH_KEYWORDS,
     layer_doc},
    {"check", check, METH_O, check_doc},
    {"mark_use", step_mark_use, METH_O, mark_use_doc},
    {"warm_up", (PyCFunction)(void (*)(void))smla_py_warm_up, METH_FASTCALL | METH_CLASS,
     warm_up_doc},
    {"__reduce__", step_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *
get_workspace_bytes(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(smla_step_workspace_bytes(((smla_py_step *)self)->core));
}

static PyGetSetDef step_getset[] = {
    {"workspace_bytes", get_workspace_bytes, NULL,
     "Bytes of the prefill workspace, 0 where the path needs none; of a dense step's whole memory.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(step_doc,
             "Step(plan, config, workspace, up_workspace=None, /)\n--\n\n"
             "The compiled part of a MetadataBuilder: \"v32\", \"v4\", \"dense\" or \"paged\", and "
             "the values of its Config by name.");

static PyType_Slot step_slots[] = {
    {Py_tp_doc, (void *)step_doc}, {Py_tp_new, step_new},       {Py_tp_dealloc, step_dealloc},
    {Py_tp_methods, step_methods}, {Py_tp_getset, step_getset}, {0, NULL},
};

PyType_Spec smla_py_step_spec = {
    .name = "sparse_mla._C.Step",
    .basicsize = sizeof(smla_py_step),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = step_slots,
};
