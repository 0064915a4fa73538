/* read_config.c: reads a config of Python by its plan's table (step/step_config.h). The limits of
 * its numbers are the core's.
 */
#include "python/step/step.h"

static const char *
name_in_python(const smla_config_field *field)
{
    return field->in_python != NULL ? field->in_python : field->name;
}

/* Reads path=: None, or the name of one of `paths`. */
static int
parse_path(const char *op, const smla_path *paths, PyObject *object, int32_t *path)
{
    char choices[64] = "";
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : "";
    *path = SMLA_PATH_AUTO;
    if (object == Py_None) {
        return 0;
    }
    for (int i = 0; text != NULL && paths[i] != SMLA_PATH_AUTO; i++) {
        const char *const name = smla_path_name(paths[i]);
        if (strcmp(text, name) == 0) {
            *path = paths[i];
            return 0;
        }
        const char *const comma = i == 0 ? "" : paths[i + 1] == SMLA_PATH_AUTO ? " or " : ", ";
        const size_t used = strlen(choices);
        (void)PyOS_snprintf(choices + used, sizeof choices - used, "%s\"%s\"", comma, name);
    }
    if (text != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: `path` must be None, %s, got %R", op, choices, object);
    }
    return -1;
}

/* Reads one of the field's names as its index. */
static int
parse_name(const char *op, const smla_config_field *field, PyObject *object, int32_t *index)
{
    const char *const text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : "";
    if (text == NULL) {
        return -1;
    }
    for (*index = 0; field->names[*index] != NULL; (*index)++) {
        if (strcmp(text, field->names[*index]) == 0) {
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s: `%s` must be one of %d names, such as \"%s\", got %R", op,
                 field->name, (int)*index, field->names[0], object);
    return -1;
}

static int
parse_list(const char *op, const smla_config_field *field, PyObject *object, char *config)
{
    int64_t *const numbers = (void *)(config + field->offset);
    int64_t *const count = (void *)(config + field->count);
    if (!PyTuple_Check(object) || PyTuple_Size(object) > field->capacity) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be a tuple of at most %lld numbers, got %R",
                     op, field->name, (long long)field->capacity, object);
        return -1;
    }
    *count = PyTuple_Size(object);
    for (int64_t i = 0; i < *count; i++) {
        PyObject *const number = PyTuple_GetItem(object, (Py_ssize_t)i);
        if (smla_py_parse_int(op, field->name, number, &numbers[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
require_dict(const char *op, const char *name, PyObject *object)
{
    if (PyDict_Check(object)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s: `%s` must be a dict, got %R", op, name, object);
    return -1;
}

/* New reference to an item of a dict, or NULL with an exception. A borrowed reference would not do,
 * because another thread may change the dict. */
static PyObject *
look_up(const char *op, const char *name, PyObject *dict, PyObject *key)
{
    PyObject *const value = PyObject_GetItem(dict, key);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must have a value of %R, got none", op, name, key);
    }
    return value;
}

/* Reads a dict that has an entry for each number of the list at `keys`. */
static int
parse_by_number(const char *op, const smla_config_field *field, PyObject *object, char *config)
{
    int64_t *const numbers = (void *)(config + field->offset);
    const int64_t *const keys = (const void *)(config + field->keys);
    const int64_t count = *(const int64_t *)(const void *)(config + field->count);
    int status = require_dict(op, field->name, object);
    for (int64_t i = 0; status == 0 && i < count; i++) {
        PyObject *key = PyLong_FromLongLong(keys[i]);
        PyObject *number = key == NULL ? NULL : look_up(op, field->name, object, key);
        status = number == NULL ? -1 : smla_py_parse_int(op, field->name, number, &numbers[i]);
        Py_XDECREF(number);
        Py_XDECREF(key);
    }
    return status;
}

static int
parse_field(const char *op, const smla_config_field *field, PyObject *object, char *config)
{
    const char *const name = name_in_python(field);
    void *const at = config + field->offset;
    switch (field->kind) {
    case SMLA_FIELD_COUNT:
        return field->is_optional && object == Py_None ? 0
                                                       : smla_py_parse_int(op, name, object, at);
    case SMLA_FIELD_LIST: return parse_list(op, field, object, config);
    case SMLA_FIELD_BY_NUMBER: return parse_by_number(op, field, object, config);
    case SMLA_FIELD_NUMBER:
    case SMLA_FIELD_SCALE: return smla_py_parse_float(op, name, object, at);
    case SMLA_FIELD_FORMAT: return smla_py_parse_kv_format(op, name, object, at);
    case SMLA_FIELD_PATH: return parse_path(op, field->paths, object, at);
    case SMLA_FIELD_NAME: return parse_name(op, field, object, at);
    case SMLA_FIELD_DEVICE: return smla_py_parse_device(op, name, object, at);
    case SMLA_FIELD_SHARE:
        return object == Py_None ? 0 : smla_py_parse_ints(op, name, object, 3, at);
    }
    return -1;
}

int
smla_py_read_config(const smla_step_plan *plan, PyObject *object, void *config)
{
    int status = require_dict(smla_create_op, "config", object);
    memcpy(config, &plan->config_bytes, sizeof plan->config_bytes);
    for (int i = 0; status == 0 && i < plan->num_fields; i++) {
        PyObject *key = PyUnicode_FromString(name_in_python(&plan->fields[i]));
        PyObject *value = key == NULL ? NULL : look_up(smla_create_op, "config", object, key);
        status = value == NULL ? -1 : parse_field(smla_create_op, &plan->fields[i], value, config);
        Py_XDECREF(value);
        Py_XDECREF(key);
    }
    return status;
}

/* ---- The tables ---------------------------------------------------------------------------- */

static const char *
name_kind(smla_field_kind kind)
{
    static const char *const names[] = {
        [SMLA_FIELD_COUNT] = "count",         [SMLA_FIELD_LIST] = "list",
        [SMLA_FIELD_BY_NUMBER] = "by number", [SMLA_FIELD_NUMBER] = "number",
        [SMLA_FIELD_SCALE] = "scale",         [SMLA_FIELD_FORMAT] = "format",
        [SMLA_FIELD_PATH] = "path",           [SMLA_FIELD_NAME] = "name",
        [SMLA_FIELD_DEVICE] = "device",       [SMLA_FIELD_SHARE] = "share",
    };
    return names[kind];
}

static PyObject *
list_fields(const smla_step_plan *plan)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < plan->num_fields; i++) {
        const smla_config_field *const field = &plan->fields[i];
        PyObject *row = Py_BuildValue("(sLL)", name_kind(field->kind), (long long)field->least,
                                      (long long)field->most);
        if (row == NULL || PyDict_SetItemString(dict, name_in_python(field), row) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(row);
    }
    return dict;
}

PyObject *
smla_py_config_fields(void)
{
#define PLAN_ROW(name, builder, config, args, metadata) &smla_##name##_plan,
    static const smla_step_plan *const plans[] = {SMLA_STEP_PLANS(PLAN_ROW)};
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < SMLA_PY_COUNT(plans); i++) {
        PyObject *fields = list_fields(plans[i]);
        if (fields == NULL || PyDict_SetItemString(dict, plans[i]->name, fields) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(fields);
    }
    return dict;
}
