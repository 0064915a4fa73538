/* ops_projection.c: the split of kv_b_proj, the projections, per-tensor quantisation. */
#include "python/call/operator.h"

static const DLDataType e4m3 = {kDLFloat8_e4m3fn, 8, 1};

/* ---- Split --------------------------------------------------------------------------------- */

typedef struct split_args {
    smla_split_kv_b_proj_args core;
    int64_t num_heads;
    int64_t nope_dim;
    int64_t value_dim;
} split_args;

SMLA_PY_COMPUTE(split_kv_b_proj)

static const smla_py_param split_params[] = {
    {"weight", SMLA_PY_INPUT, offsetof(split_args, core.weight)},
    {"weight_scale_inv", SMLA_PY_OPTIONAL, offsetof(split_args, core.weight_scale_inv)},
    {"W_UK", SMLA_PY_RESULT, offsetof(split_args, core.w_uk)},
    {"W_UV", SMLA_PY_RESULT, offsetof(split_args, core.w_uv)},
    {"num_heads", SMLA_PY_INT, offsetof(split_args, num_heads)},
    {"qk_nope_head_dim", SMLA_PY_INT, offsetof(split_args, nope_dim)},
    {"v_head_dim", SMLA_PY_INT, offsetof(split_args, value_dim)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(split_args, core.stream)},
};

/* The shapes of the results come from numbers of the caller. Check that these fit the weight before
 * memory is allocated for them. */
static int
check_weight_shape(const smla_py_call *call, const split_args *a)
{
    const struct {
        const char *name;
        int64_t value;
        int64_t most;
    } sizes[] = {{"num_heads", a->num_heads, SMLA_MAX_HEADS},
                 {"qk_nope_head_dim", a->nope_dim, INT32_MAX},
                 {"v_head_dim", a->value_dim, INT32_MAX}};
    for (int i = 0; i < SMLA_PY_COUNT(sizes); i++) {
        if (sizes[i].value < 1 || sizes[i].value > sizes[i].most) {
            PyErr_Format(PyExc_ValueError, "%s: `%s` must be 1 to %lld, got %lld", call->op,
                         sizes[i].name, (long long)sizes[i].most, (long long)sizes[i].value);
            return -1;
        }
    }
    const int64_t wanted = a->num_heads * (a->nope_dim + a->value_dim);
    const int64_t rows = smla_py_call_dim(call, 0, 0);
    const int64_t columns = smla_py_call_dim(call, 0, 1);
    if (smla_py_has_rank(call, 0, 2) && !(rows == SMLA_KV_LORA_RANK && columns == wanted) &&
        !(rows == wanted && columns == SMLA_KV_LORA_RANK)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `weight` must have shape [%d, %lld] or [%lld, %d] (%lld heads x (%lld + "
                     "%lld)), got [%lld, %lld]",
                     call->op, SMLA_KV_LORA_RANK, (long long)wanted, (long long)wanted,
                     SMLA_KV_LORA_RANK, (long long)a->num_heads, (long long)a->nope_dim,
                     (long long)a->value_dim, (long long)rows, (long long)columns);
        return -1;
    }
    return 0;
}

static int
allocate_weights(smla_py_call *call, const void *args)
{
    enum { WEIGHT = 0, W_UK = 2, W_UV };
    const split_args *const a = args;
    if (check_weight_shape(call, a) < 0) {
        return -1;
    }
    if (!smla_py_has_rank(call, WEIGHT, 2)) {
        return 0;
    }
    const int64_t w_uk[3] = {SMLA_KV_LORA_RANK, a->num_heads, a->nope_dim};
    const int64_t w_uv[3] = {SMLA_KV_LORA_RANK, a->num_heads, a->value_dim};
    return smla_py_allocate_result(call, W_UK, smla_py_bf16, 3, w_uk) < 0
               ? -1
               : smla_py_allocate_result(call, W_UV, smla_py_bf16, 3, w_uv);
}

/* ---- Up projections ------------------------------------------------------------------------ */

SMLA_PY_COMPUTE(k_up_proj)

static const smla_py_param k_up_params[] = {
    {"q_nope", SMLA_PY_INPUT, offsetof(smla_k_up_proj_args, q_nope)},
    {"W_UK", SMLA_PY_INPUT, offsetof(smla_k_up_proj_args, w_uk)},
    {"out", SMLA_PY_OUTPUT, offsetof(smla_k_up_proj_args, out)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_k_up_proj_args, stream)},
};

SMLA_PY_COMPUTE(v_up_proj)

static const smla_py_param v_up_params[] = {
    {"x", SMLA_PY_INPUT, offsetof(smla_v_up_proj_args, x)},
    {"W_UV", SMLA_PY_INPUT, offsetof(smla_v_up_proj_args, w_uv)},
    {"out", SMLA_PY_OUTPUT, offsetof(smla_v_up_proj_args, out)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_v_up_proj_args, stream)},
};

/* Allocates out [T, H, width] for x [T, H, ...] and a weight. */
static int
allocate_projected(smla_py_call *call, int64_t width)
{
    enum { X, W, OUT };
    const int64_t shape[3] = {smla_py_call_dim(call, X, 0), smla_py_call_dim(call, X, 1), width};
    if (!smla_py_has_rank(call, X, 3) || !smla_py_has_rank(call, W, 3) ||
        !smla_py_is_head_count(shape[1])) {
        return 0;
    }
    return smla_py_allocate_result(call, OUT, smla_py_bf16, 3, shape);
}

static int
allocate_latents(smla_py_call *call, const void *Py_UNUSED(args))
{
    return allocate_projected(call, SMLA_KV_LORA_RANK);
}

static int
allocate_values(smla_py_call *call, const void *Py_UNUSED(args))
{
    return allocate_projected(call, smla_py_call_dim(call, 1, 2));
}

/* ---- Output projection --------------------------------------------------------------------- */

SMLA_PY_COMPUTE(grouped_output_projection)

enum { GROUPED_O, GROUPED_WEIGHT = 2, GROUPED_OUT = 4 };

static const smla_py_param grouped_params[] = {
    [GROUPED_O] = {"o", SMLA_PY_INPUT, offsetof(smla_grouped_output_projection_args, o)},
    {"o_scale", SMLA_PY_NULLABLE, offsetof(smla_grouped_output_projection_args, o_scale)},
    [GROUPED_WEIGHT] = {"weight", SMLA_PY_INPUT,
                        offsetof(smla_grouped_output_projection_args, weight)},
    {"weight_scale", SMLA_PY_NULLABLE, offsetof(smla_grouped_output_projection_args, weight_scale)},
    [GROUPED_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_grouped_output_projection_args, out)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_grouped_output_projection_args, stream)},
};

static int
allocate_grouped(smla_py_call *call, const void *Py_UNUSED(args))
{
    const int64_t shape[3] = {smla_py_call_dim(call, GROUPED_O, 0),
                              smla_py_call_dim(call, GROUPED_O, 1),
                              smla_py_call_dim(call, GROUPED_WEIGHT, 1)};
    if (!smla_py_has_rank(call, GROUPED_O, 3) || !smla_py_has_rank(call, GROUPED_WEIGHT, 3) ||
        !smla_py_is_head_count(shape[1])) {
        return 0;
    }
    return smla_py_allocate_result(call, GROUPED_OUT, smla_py_bf16, 3, shape);
}

/* ---- Quantisation -------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(dynamic_per_tensor_quant)

static const smla_py_param quant_params[] = {
    {"x", SMLA_PY_INPUT, offsetof(smla_dynamic_per_tensor_quant_args, x)},
    {"out", SMLA_PY_OUTPUT, offsetof(smla_dynamic_per_tensor_quant_args, out)},
    {"scale", SMLA_PY_RESULT, offsetof(smla_dynamic_per_tensor_quant_args, scale)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_dynamic_per_tensor_quant_args, stream)},
};

static int
allocate_quantized(smla_py_call *call, const void *Py_UNUSED(args))
{
    enum { X, OUT, SCALE };
    const smla_py_array *const x = &call->arrays[X];
    return smla_py_allocate_result(call, OUT, e4m3, x->view.ndim, x->shape) < 0
               ? -1
               : smla_py_allocate_result(call, SCALE, smla_py_fp32, 0, NULL);
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_projection_operators[] = {
    {.name = "_split_kv_b_proj",
     .title = "split_kv_b_proj",
     SMLA_PY_TABLE(split_params, smla_split_kv_b_proj_args, split_args),
     .compute = compute_split_kv_b_proj,
     .allocate = allocate_weights},
    {.name = "k_up_proj",
     SMLA_PY_TABLE(k_up_params, smla_k_up_proj_args, smla_k_up_proj_args),
     .compute = compute_k_up_proj,
     .allocate = allocate_latents},
    {.name = "v_up_proj",
     SMLA_PY_TABLE(v_up_params, smla_v_up_proj_args, smla_v_up_proj_args),
     .compute = compute_v_up_proj,
     .allocate = allocate_values},
    {.name = "grouped_output_projection",
     SMLA_PY_TABLE(grouped_params, smla_grouped_output_projection_args,
                   smla_grouped_output_projection_args),
     .compute = compute_grouped_output_projection,
     .allocate = allocate_grouped},
    {.name = "dynamic_per_tensor_quant",
     SMLA_PY_TABLE(quant_params, smla_dynamic_per_tensor_quant_args,
                   smla_dynamic_per_tensor_quant_args),
     .compute = compute_dynamic_per_tensor_quant,
     .allocate = allocate_quantized},
    {.name = NULL},
};
