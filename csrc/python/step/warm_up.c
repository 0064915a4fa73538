/* warm_up.c: the results of a DeepSeek V4 layer that is called without a step, as engines do to
 * warm up: zeros. No builder takes part.
 */
#include "python/step/step.h"

enum { WARM_Q, WARM_OUT, WARM_LSE };

/* Zeroes the first rows of an array whose rows may have gaps. */
static int
zero_rows(smla_py_call *call, const DLTensor *array, int64_t num_rows, int64_t num_heads)
{
    const int64_t bytes = smla_element_bytes(array);
    const int64_t head_bytes = bytes * (array->ndim == 3 ? array->shape[2] : 1);
    const int64_t strides[2] = {smla_stride(array, 0) * bytes, smla_stride(array, 1) * bytes};
    const bool is_dense = array->shape[1] == num_heads &&
                          (num_heads == 1 || strides[1] == head_bytes) &&
                          (num_rows == 1 || strides[0] == num_heads * head_bytes);
    char *const memory = smla_data(array);
    int status = 0;
    if (is_dense) {
        return num_rows == 0 ? 0
                             : smla_py_fill_zero(call, array->device, memory,
                                                 num_rows * num_heads * head_bytes);
    }
    for (int64_t i = 0; status == 0 && i < num_rows * num_heads; i++) {
        char *const head = memory + i / num_heads * strides[0] + i % num_heads * strides[1];
        status = smla_py_fill_zero(call, array->device, head, head_bytes);
    }
    return status;
}

/* Checks q and the results. */
static smla_status
check_warm_up(const smla_py_call *call, int64_t num_heads, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, call->op, error);
    const DLTensor *const q = smla_py_view(&call->arrays[WARM_Q]);
    SMLA_TRY(smla_require_3d(&c, "q", q, SMLA_DTYPE_BF16 | SMLA_DTYPE_E4M3_OR_BYTES, SMLA_ANY,
                             num_heads, SMLA_V4_HEAD_DIM, 0, NULL));
    SMLA_TRY(smla_require_3d(&c, "out", smla_py_view(&call->arrays[WARM_OUT]), SMLA_DTYPE_BF16,
                             smla_size(q, 0), num_heads, SMLA_V4_HEAD_DIM,
                             SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS | SMLA_RULE_MORE_HEADS, NULL));
    SMLA_TRY(smla_require_2d(&c, "lse", smla_py_view(&call->arrays[WARM_LSE]), SMLA_DTYPE_FP32,
                             smla_size(q, 0), num_heads,
                             SMLA_RULE_OUTPUT | SMLA_RULE_MORE_ROWS | SMLA_RULE_ANY_LAST_STRIDE,
                             NULL));
    return smla_require_disjoint(&c);
}

static PyObject *
run_warm_up(smla_py_call *call, int64_t num_heads)
{
    static const int results[] = {WARM_OUT, WARM_LSE};
    smla_error error;
    const smla_status status = check_warm_up(call, num_heads, &error);
    if (status == SMLA_OK) {
        const int64_t num_rows = smla_py_call_dim(call, WARM_Q, 0);
        if (zero_rows(call, smla_py_view(&call->arrays[WARM_OUT]), num_rows, num_heads) < 0 ||
            zero_rows(call, smla_py_view(&call->arrays[WARM_LSE]), num_rows, num_heads) < 0) {
            return NULL;
        }
    }
    return smla_py_finish(call, status, &error, results, SMLA_PY_COUNT(results));
}

PyObject *
smla_py_warm_up(PyObject *type, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "attend";
    int64_t num_heads = 0;
    void *stream = NULL;
    smla_py_call call;
    smla_py_open(&call, PyType_GetModuleState((PyTypeObject *)type), op);
    if (smla_py_check_count(op, num_args, 5) < 0 ||
        smla_py_parse_int(op, "num_heads", args[3], &num_heads) < 0 ||
        smla_py_take_stream(&call, args[4]) < 0) {
        return NULL;
    }
    PyObject *results = NULL;
    call.asks = true;
    if (smla_py_add(&call, "q", SMLA_PY_INPUT, args[0]) == 0 &&
        smla_py_add(&call, "out", SMLA_PY_OUTPUT, args[1]) == 0 &&
        smla_py_add(&call, "lse", SMLA_PY_OUTPUT, args[2]) == 0 &&
        smla_py_resolve_stream(&call, &stream) == 0 &&
        smla_py_allocate_rows(&call, WARM_OUT, 3, num_heads, SMLA_V4_HEAD_DIM,
                              smla_py_call_dim(&call, WARM_Q, 0)) == 0) {
        results = run_warm_up(&call, num_heads);
    }
    smla_py_close(&call);
    return results;
}
