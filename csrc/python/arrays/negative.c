/* negative.c: PyTorch's negative bit, which says that a tensor's values are those of its memory
 * with the other sign. An export says nothing of it.
 *
 * is_neg() costs as much as an export, because it lets go of the GIL. A borrowed view points at the
 * sizes inside of the tensor's own object, and the bit lies a few words behind them. Where, is
 * found out once per type, from pairs of tensors that differ in this bit alone. Bits in which equal
 * tensors differ are padding, which nobody initialises, and do not count. If pairs differ in
 * anything else, or are not as expected, all tensors are asked.
 */
#include "python/arrays/exchange.h"

#include <string.h>

enum {
    INLINE_RANK = 5, /* sizes of more dimensions lie elsewhere */
    LAST_WORD = 13,  /* sizes, strides, the offset, the number of elements, types, and the bits */
    NUM_PAIRS = 16,  /* a random bit of padding looks like the negative bit once in 2^32 times */
};

/* ---- What is asked ------------------------------------------------------------------------- */

int
smla_py_refuse_sign(const char *op, const smla_py_array *array)
{
    PyErr_Format(PyExc_BufferError,
                 "%s: `%s` must hold its values as they are, got a tensor with the negative bit: "
                 "pass its .resolve_neg()",
                 op, array->name);
    return -1;
}

int
smla_py_check_sign(const smla_py_state *state, const char *op, const smla_py_array *array)
{
    PyObject *flag = PyObject_CallMethodObjArgs(array->object, state->str_is_neg, NULL);
    if (flag == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    const bool is_neg = flag == Py_True;
    Py_DECREF(flag);
    return is_neg ? smla_py_refuse_sign(op, array) : 0;
}

/* ---- What is seen -------------------------------------------------------------------------- */

static uint64_t
read_word(const int64_t *shape, int word)
{
    uint64_t value;
    memcpy(&value, shape + word, sizeof value);
    return value;
}

static bool
is_inline(const DLTensor *view)
{
    return view->ndim <= INLINE_RANK && view->shape != NULL &&
           view->strides == view->shape + INLINE_RANK;
}

int
smla_py_see_sign(const smla_py_sign *sign, const DLTensor *borrowed)
{
    if (sign->bit == 0 || !is_inline(borrowed)) {
        return SMLA_PY_UNSEEN;
    }
    return (read_word(borrowed->shape, sign->word) & sign->bit) != 0;
}

/* The one bit that all negative tensors have and all plain ones lack; bit 0 if they differ
 * otherwise. views[pair][0] is plain, views[pair][1] negative. */
static smla_py_sign
compare(DLTensor views[NUM_PAIRS][2])
{
    smla_py_sign found = {.bit = 0};
    for (int word = 0; word <= LAST_WORD; word++) {
        uint64_t bit = UINT64_MAX;
        uint64_t lost = UINT64_MAX;
        for (int pair = 0; pair < NUM_PAIRS; pair++) {
            const uint64_t plain = read_word(views[pair][0].shape, word);
            const uint64_t negative = read_word(views[pair][1].shape, word);
            bit &= negative & ~plain;
            lost &= plain & ~negative;
        }
        if (lost == 0 && bit == 0) {
            continue;
        }
        if (found.bit != 0 || lost != 0 || (bit & (bit - 1)) != 0) {
            return (smla_py_sign){.bit = 0};
        }
        found = (smla_py_sign){.word = word, .bit = bit};
    }
    return found;
}

/* Makes a tensor of the CPU, and its negative view. */
static bool
make_pair(PyObject *torch, int rank, const char *dtype, PyObject *pair[2])
{
    PyObject *sizes = PyTuple_New(rank);
    for (int i = 0; sizes != NULL && i < rank; i++) {
        PyTuple_SetItem(sizes, i, PyLong_FromLong(i + 2));
    }
    PyObject *make = PyObject_GetAttrString(torch, "zeros");
    PyObject *type = PyObject_GetAttrString(torch, dtype);
    PyObject *args = sizes == NULL ? NULL : PyTuple_Pack(1, sizes);
    PyObject *options =
        type == NULL ? NULL : Py_BuildValue("{s:O,s:s}", "dtype", type, "device", "cpu");
    pair[0] =
        make == NULL || args == NULL || options == NULL ? NULL : PyObject_Call(make, args, options);
    pair[1] = pair[0] == NULL ? NULL : PyObject_CallMethod(torch, "_neg_view", "O", pair[0]);
    Py_XDECREF(sizes);
    Py_XDECREF(make);
    Py_XDECREF(type);
    Py_XDECREF(args);
    Py_XDECREF(options);
    PyErr_Clear();
    return pair[1] != NULL;
}

static smla_py_sign
probe(PyObject *torch, const DLPackExchangeAPI *api, int rank, const char *dtype)
{
    PyObject *pairs[NUM_PAIRS][2] = {{NULL}}; /* all live at once, so that their memory differs */
    DLTensor views[NUM_PAIRS][2];
    bool is_good = true;
    for (int pair = 0; is_good && pair < NUM_PAIRS; pair++) {
        is_good = make_pair(torch, rank, dtype, pairs[pair]);
        for (int i = 0; is_good && i < 2; i++) {
            DLTensor *const view = &views[pair][i];
            is_good = api->dltensor_from_py_object_no_sync(pairs[pair][i], view) == 0 &&
                      is_inline(view) && view->ndim == rank;
        }
    }
    const smla_py_sign found = is_good ? compare(views) : (smla_py_sign){.bit = 0};
    PyErr_Clear();
    for (int pair = 0; pair < NUM_PAIRS; pair++) {
        Py_XDECREF(pairs[pair][0]);
        Py_XDECREF(pairs[pair][1]);
    }
    return found;
}

smla_py_sign
smla_py_find_sign(const smla_py_state *state, const DLPackExchangeAPI *api)
{
    const smla_py_sign none = {.bit = 0};
    PyObject *torch = PyImport_GetModule(state->str_torch);
    if (torch == NULL || api->dltensor_from_py_object_no_sync == NULL) {
        Py_XDECREF(torch);
        return none;
    }
    const smla_py_sign first = probe(torch, api, 1, "float32");
    const smla_py_sign other = probe(torch, api, 3, "int32");
    Py_DECREF(torch);
    return first.word == other.word && first.bit == other.bit ? first : none;
}
