/* ops_projection.c: the split of kv_b_proj, both up projections, per-tensor quantisation. */
#include "call.h"

static const DLDataType e4m3 = {kDLFloat8_e4m3fn, 8, 1};

/* The results' shapes come from numbers of the caller: they must fit the weight before memory is
 * taken for them. */
static int
check_weight_shape(const smla_py_call *call, int64_t num_heads, int64_t nope_dim, int64_t value_dim)
{
    const struct {
        const char *name;
        int64_t value;
        int64_t most;
    } sizes[] = {{"num_heads", num_heads, SMLA_MAX_HEADS},
                 {"qk_nope_head_dim", nope_dim, INT32_MAX},
                 {"v_head_dim", value_dim, INT32_MAX}};
    for (int i = 0; i < SMLA_PY_COUNT(sizes); i++) {
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].most) {
            PyErr_Format(PyExc_ValueError, "%s: `%s` must be 1 to %lld, got %lld", call->op,
                         sizes[i].name, (long long)sizes[i].most, (long long)sizes[i].value);
            return -1;
        }
    }
    const int64_t wanted = num_heads * (nope_dim + value_dim);
    const int64_t rows = smla_py_call_dim(call, 0, 0);
    const int64_t columns = smla_py_call_dim(call, 0, 1);
    if (smla_py_has_rank(call, 0, 2) && !(rows == SMLA_KV_LORA_RANK && columns == wanted) &&
        !(rows == wanted && columns == SMLA_KV_LORA_RANK)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `weight` must have shape [%d, %lld] or [%lld, %d] (%lld heads x (%lld + "
                     "%lld)), got [%lld, %lld]",
                     call->op, SMLA_KV_LORA_RANK, (long long)wanted, (long long)wanted,
                     SMLA_KV_LORA_RANK, (long long)num_heads, (long long)nope_dim,
                     (long long)value_dim, (long long)rows, (long long)columns);
        return -1;
    }
    return 0;
}

static const smla_py_param split_kv_b_proj_params[] = {
    {"weight", SMLA_PY_INPUT}, {"weight_scale_inv", SMLA_PY_OPTIONAL},
    {.name = "num_heads"},     {.name = "qk_nope_head_dim"},
    {.name = "v_head_dim"},
};

static PyObject *
split_kv_b_proj(const smla_py_state *state, PyObject *const *args)
{
    enum { WEIGHT, SCALE, W_UK, W_UV, NUM_INPUTS = W_UK };
    static const char op[] = "split_kv_b_proj";
    smla_split_kv_b_proj_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    int64_t num_heads = 0;
    int64_t nope_dim = 0;
    int64_t value_dim = 0;
    smla_py_open(&call, state, op);
    if (smla_py_parse_int(op, "num_heads", args[NUM_INPUTS], &num_heads) < 0 ||
        smla_py_parse_int(op, "qk_nope_head_dim", args[NUM_INPUTS + 1], &nope_dim) < 0 ||
        smla_py_parse_int(op, "v_head_dim", args[NUM_INPUTS + 2], &value_dim) < 0 ||
        smla_py_add(&call, split_kv_b_proj_params, NUM_INPUTS, args) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    smla_py_add_absent(&call, "W_UK");
    smla_py_add_absent(&call, "W_UV");
    if (check_weight_shape(&call, num_heads, nope_dim, value_dim) < 0) {
        return smla_py_fail(&call);
    }
    if (smla_py_has_rank(&call, WEIGHT, 2)) {
        const int64_t w_uk[3] = {SMLA_KV_LORA_RANK, num_heads, nope_dim};
        const int64_t w_uv[3] = {SMLA_KV_LORA_RANK, num_heads, value_dim};
        if (smla_py_allocate_result(&call, W_UK, smla_py_bf16, 3, w_uk) < 0 ||
            smla_py_allocate_result(&call, W_UV, smla_py_bf16, 3, w_uv) < 0) {
            return smla_py_fail(&call);
        }
    }
    a.weight = smla_py_call_view(&call, WEIGHT);
    a.weight_scale_inv = smla_py_call_view(&call, SCALE);
    a.w_uk = smla_py_call_view(&call, W_UK);
    a.w_uv = smla_py_call_view(&call, W_UV);
    Py_BEGIN_ALLOW_THREADS
    status = smla_split_kv_b_proj(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){W_UK, W_UV}, 2);
}

/* What k_up_proj and v_up_proj share: their arrays and the result [T, H, n]; `outer_dim` < 0 takes
 * n from the weight. */
static int
open_up_proj(smla_py_call *call, const smla_py_state *state, const char *op,
             const smla_py_param *params, PyObject *const *args, int64_t outer_dim, void **stream)
{
    enum { X, W, OUT, NUM_ARRAYS };
    smla_py_open(call, state, op);
    if (smla_py_take_stream(call, args[NUM_ARRAYS]) < 0 ||
        smla_py_add(call, params, NUM_ARRAYS, args) < 0 || smla_py_settle(call, stream) < 0) {
        return -1;
    }
    const int64_t n = outer_dim >= 0 ? outer_dim : smla_py_call_dim(call, W, 2);
    const int64_t shape[3] = {smla_py_call_dim(call, X, 0), smla_py_call_dim(call, X, 1), n};
    if (smla_py_has_rank(call, X, 3) && smla_py_has_rank(call, W, 3) &&
        smla_py_is_head_count(shape[1]) &&
        smla_py_allocate_result(call, OUT, smla_py_bf16, 3, shape) < 0) {
        smla_py_close(call);
        return -1;
    }
    return 0;
}

static const smla_py_param k_up_proj_params[] = {
    {"q_nope", SMLA_PY_INPUT},
    {"W_UK", SMLA_PY_INPUT},
    {"out", SMLA_PY_OUTPUT},
    {.name = "stream"},
};

static PyObject *
k_up_proj(const smla_py_state *state, PyObject *const *args)
{
    smla_k_up_proj_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    if (open_up_proj(&call, state, "k_up_proj", k_up_proj_params, args, SMLA_KV_LORA_RANK,
                     &a.stream) < 0) {
        return NULL;
    }
    a.q_nope = smla_py_call_view(&call, 0);
    a.w_uk = smla_py_call_view(&call, 1);
    a.out = smla_py_call_view(&call, 2);
    Py_BEGIN_ALLOW_THREADS
    status = smla_k_up_proj(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){2}, 1);
}

static const smla_py_param v_up_proj_params[] = {
    {"x", SMLA_PY_INPUT},
    {"W_UV", SMLA_PY_INPUT},
    {"out", SMLA_PY_OUTPUT},
    {.name = "stream"},
};

static PyObject *
v_up_proj(const smla_py_state *state, PyObject *const *args)
{
    smla_v_up_proj_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    if (open_up_proj(&call, state, "v_up_proj", v_up_proj_params, args, -1, &a.stream) < 0) {
        return NULL;
    }
    a.x = smla_py_call_view(&call, 0);
    a.w_uv = smla_py_call_view(&call, 1);
    a.out = smla_py_call_view(&call, 2);
    Py_BEGIN_ALLOW_THREADS
    status = smla_v_up_proj(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){2}, 1);
}

static const smla_py_param dynamic_per_tensor_quant_params[] = {
    {"x", SMLA_PY_INPUT},
    {"out", SMLA_PY_OUTPUT},
    {.name = "stream"},
};

static PyObject *
dynamic_per_tensor_quant(const smla_py_state *state, PyObject *const *args)
{
    enum { X, OUT, SCALE, NUM_ARGS = SCALE /* that are arrays */ };
    static const char op[] = "dynamic_per_tensor_quant";
    smla_dynamic_per_tensor_quant_args a = {.struct_size = sizeof a};
    smla_py_call call;
    smla_error error;
    smla_status status;
    smla_py_open(&call, state, op);
    if (smla_py_take_stream(&call, args[NUM_ARGS]) < 0 ||
        smla_py_add(&call, dynamic_per_tensor_quant_params, NUM_ARGS, args) < 0 ||
        smla_py_settle(&call, &a.stream) < 0) {
        return NULL;
    }
    smla_py_add_absent(&call, "scale");
    if (smla_py_allocate_result(&call, OUT, e4m3, call.arrays[X].view.ndim, call.arrays[X].shape) <
            0 ||
        smla_py_allocate_result(&call, SCALE, smla_py_fp32, 0, NULL) < 0) {
        return smla_py_fail(&call);
    }
    a.x = smla_py_call_view(&call, X);
    a.out = smla_py_call_view(&call, OUT);
    a.scale = smla_py_call_view(&call, SCALE);
    Py_BEGIN_ALLOW_THREADS
    status = smla_dynamic_per_tensor_quant(&a, &error);
    Py_END_ALLOW_THREADS
    return smla_py_finish(&call, status, &error, (int[]){OUT, SCALE}, 2);
}

/* ---- Table --------------------------------------------------------------------------------- */

const smla_py_operator smla_py_projection_operators[] = {
    {"_split_kv_b_proj", split_kv_b_proj_params, SMLA_PY_COUNT(split_kv_b_proj_params),
     split_kv_b_proj},
    SMLA_PY_OPERATOR(k_up_proj),
    SMLA_PY_OPERATOR(v_up_proj),
    SMLA_PY_OPERATOR(dynamic_per_tensor_quant),
    {.name = NULL},
};
