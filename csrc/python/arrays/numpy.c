/* numpy.c: every use of NumPy's C-API: ndarrays in, new ndarrays, and views of our memory.
 *
 * NumPy arrays are not read through DLPack, because NumPy cannot export ml_dtypes' bfloat16 and
 * float8_e4m3fn through it, and because reading them here is twenty times as fast.
 */
#include "python/arrays/exchange.h"

#include <string.h>

#include <numpy/arrayobject.h>

/* ---- Types --------------------------------------------------------------------------------- */

/* The number that NumPy gave one of ml_dtypes' types when it was registered. */
static int
find_type_num(PyObject *ml_dtypes, const char *name, int *type_num)
{
    PyObject *type = PyObject_GetAttrString(ml_dtypes, name);
    if (type == NULL) {
        return -1;
    }
    PyArray_Descr *descr = NULL;
    const int converted = PyArray_DescrConverter(type, &descr);
    Py_DECREF(type);
    if (!converted) {
        return -1;
    }
    *type_num = descr->type_num;
    Py_DECREF((PyObject *)descr);
    return 0;
}

int
smla_py_init_numpy(smla_py_state *state)
{
    if (PyArray_ImportNumPyAPI() < 0) {
        return -1;
    }
    PyObject *ml_dtypes = PyImport_ImportModule("ml_dtypes");
    if (ml_dtypes == NULL) {
        return -1;
    }
    int status = find_type_num(ml_dtypes, "bfloat16", &state->bfloat16_type_num);
    if (status == 0) {
        status = find_type_num(ml_dtypes, "float8_e4m3fn", &state->float8_type_num);
    }
    Py_DECREF(ml_dtypes);
    return status;
}

/* Translates a NumPy dtype to DLPack's; false for a type that DLPack cannot express, which counts
 * at most 255 bits: complex256 has more. */
static bool
read_dtype(const smla_py_state *state, const PyArray_Descr *descr, DLDataType *dtype)
{
    static const struct {
        char kind;
        uint8_t code;
    } kinds[] = {{'b', kDLBool}, {'i', kDLInt}, {'u', kDLUInt}, {'f', kDLFloat}, {'c', kDLComplex}};
    const int type_num = descr->type_num;
    if (type_num == state->bfloat16_type_num) {
        *dtype = (DLDataType){kDLBfloat, 16, 1};
        return true;
    }
    if (type_num == state->float8_type_num) {
        *dtype = (DLDataType){kDLFloat8_e4m3fn, 8, 1};
        return true;
    }
    if (type_num >= NPY_NTYPES_LEGACY) {
        return false;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (descr->kind == kinds[i].kind && PyDataType_ELSIZE(descr) <= UINT8_MAX / 8) {
            *dtype = (DLDataType){kinds[i].code, (uint8_t)(8 * PyDataType_ELSIZE(descr)), 1};
            return true;
        }
    }
    return false;
}

/* NumPy's type number of a dtype, or -1. */
static int
find_numpy_type(const smla_py_state *state, DLDataType dtype)
{
    static const struct {
        uint8_t code;
        uint8_t bits;
        int type_num;
    } types[] = {
        {kDLFloat, 32, NPY_FLOAT32}, {kDLInt, 32, NPY_INT32},   {kDLUInt, 8, NPY_UINT8},
        {kDLInt, 64, NPY_INT64},     {kDLFloat, 16, NPY_HALF},  {kDLFloat, 64, NPY_FLOAT64},
        {kDLInt, 8, NPY_INT8},       {kDLInt, 16, NPY_INT16},   {kDLUInt, 16, NPY_UINT16},
        {kDLUInt, 32, NPY_UINT32},   {kDLUInt, 64, NPY_UINT64}, {kDLBool, 8, NPY_BOOL},
    };
    if (dtype.code == kDLBfloat) {
        return state->bfloat16_type_num;
    }
    if (dtype.code == kDLFloat8_e4m3fn) {
        return state->float8_type_num;
    }
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (types[i].code == dtype.code && types[i].bits == dtype.bits) {
            return types[i].type_num;
        }
    }
    return -1;
}

/* ---- In ------------------------------------------------------------------------------------ */

bool
smla_py_is_ndarray(PyObject *object)
{
    return PyArray_Check(object);
}

bool
smla_py_is_numpy_scalar(PyObject *object)
{
    return PyArray_IsScalar(object, Generic);
}

static int
read_native_dtype(const smla_py_state *state, const char *op, const char *name,
                  PyArray_Descr *descr, DLDataType *dtype)
{
    if (!read_dtype(state, descr, dtype)) {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must have a plain numeric dtype, got %R", op, name,
                     (PyObject *)descr);
        return -1;
    }
    if (!PyArray_ISNBO(descr->byteorder)) {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must be in native byte order, got %R", op, name,
                     (PyObject *)descr);
        return -1;
    }
    return 0;
}

PyObject *
smla_py_dtype_name(const smla_py_state *state, PyObject *object)
{
    if (PyUnicode_Check(object)) {
        return Py_NewRef(object);
    }
    if (smla_py_is_type_in_package(state, object, "torch")) { /* it prints as "torch.float32" */
        PyObject *text = PyObject_Str(object);
        const char *name = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, NULL);
        const char *const dot = name == NULL ? NULL : strrchr(name, '.');
        PyObject *result = name == NULL ? NULL : PyUnicode_FromString(dot == NULL ? "" : dot + 1);
        Py_XDECREF(text);
        return result;
    }
    PyArray_Descr *descr = NULL;
    DLDataType dtype;
    if (object == Py_None || !PyArray_DescrConverter(object, &descr)) {
        PyErr_Clear();
        return PyUnicode_FromString("");
    }
    const bool is_read = PyArray_ISNBO(descr->byteorder) && read_dtype(state, descr, &dtype);
    const smla_py_dtype *const known = is_read ? smla_py_find_dtype(dtype) : NULL;
    Py_DECREF((PyObject *)descr);
    return PyUnicode_FromString(known == NULL ? "" : known->name);
}

int
smla_py_read_descr(const smla_py_state *state, const char *op, const char *name, PyObject *descr,
                   DLDataType *dtype)
{
    if (!PyArray_DescrCheck(descr)) {
        PyErr_Format(PyExc_TypeError, "%s: `%s` must have a dtype of NumPy, got %R", op, name,
                     descr);
        return -1;
    }
    return read_native_dtype(state, op, name, (PyArray_Descr *)descr, dtype);
}

/* 1 for an array of numpy.ma, whose mask no operator knows; -1 with an exception set. */
static int
is_masked(const smla_py_state *state, PyObject *object)
{
    if (Py_TYPE(object) == &PyArray_Type) {
        return 0;
    }
    PyObject *module = PyImport_GetModule(state->str_numpy_ma);
    PyObject *type = module == NULL ? NULL : PyObject_GetAttr(module, state->str_masked_array);
    const int status = type == NULL ? 0 : PyObject_IsInstance(object, type);
    Py_XDECREF(module);
    Py_XDECREF(type);
    return PyErr_Occurred() == NULL ? status : -1;
}

int
smla_py_read_ndarray(const smla_py_state *state, const char *op, smla_py_array *array)
{
    PyArrayObject *ndarray = (PyArrayObject *)array->object;
    DLDataType dtype;
    const int masked = is_masked(state, array->object);
    if (masked != 0) {
        if (masked > 0) {
            PyErr_Format(PyExc_TypeError,
                         "%s: `%s` must be an array without a mask, got a numpy.ma.MaskedArray: "
                         "pass its .filled(), or its .data",
                         op, array->name);
        }
        return -1;
    }
    if (read_native_dtype(state, op, array->name, PyArray_DESCR(ndarray), &dtype) < 0) {
        return -1;
    }
    array->framework = SMLA_PY_NUMPY;
    array->is_read_only = !PyArray_ISWRITEABLE(ndarray);
    return smla_py_set_view(op, PyArray_DATA(ndarray), dtype, PyArray_NDIM(ndarray),
                            (const int64_t *)PyArray_DIMS(ndarray),
                            (const int64_t *)PyArray_STRIDES(ndarray), array);
}

/* ---- Out ----------------------------------------------------------------------------------- */

_Static_assert(sizeof(npy_intp) == sizeof(int64_t), "sizes and strides are passed as they are");

int
smla_py_new_ndarray(const smla_py_state *state, DLDataType dtype, int ndim, const int64_t *shape,
                    smla_py_array *array)
{
    array->object = PyArray_SimpleNew(ndim, (const npy_intp *)shape, find_numpy_type(state, dtype));
    if (array->object == NULL) {
        return -1;
    }
    array->view.data = PyArray_DATA((PyArrayObject *)array->object);
    return 0;
}

PyObject *
smla_py_new_descr(const smla_py_state *state, DLDataType dtype)
{
    return (PyObject *)PyArray_DescrFromType(find_numpy_type(state, dtype));
}

PyObject *
smla_py_numpy_view(const smla_py_state *state, PyObject *owner, const DLTensor *view,
                   bool is_writable)
{
    const int type_num = find_numpy_type(state, view->dtype);
    if (type_num < 0) {
        PyErr_SetString(PyExc_BufferError, "NumPy has no dtype for this tensor");
        return NULL;
    }
    npy_intp strides[SMLA_PY_MAX_RANK] = {0};
    for (int i = 0; i < view->ndim; i++) {
        strides[i] = view->strides[i] * smla_element_bytes(view);
    }
    PyObject *ndarray =
        PyArray_New(&PyArray_Type, view->ndim, (const npy_intp *)view->shape, type_num, strides,
                    view->data, 0, is_writable ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (ndarray == NULL) {
        return NULL;
    }
    PyArray_UpdateFlags((PyArrayObject *)ndarray, NPY_ARRAY_UPDATE_ALL);
    if (PyArray_SetBaseObject((PyArrayObject *)ndarray, Py_NewRef(owner)) < 0) { /* steals */
        Py_DECREF(ndarray);
        return NULL;
    }
    return ndarray;
}
