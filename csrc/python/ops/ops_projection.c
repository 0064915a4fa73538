/* ops_projection.c: the split and the absorption of weights, the projections, quantisation, linear
 * layers of e4m3. */
#include "python/call/operator.h"

/* ---- Split --------------------------------------------------------------------------------- */

typedef struct split_args {
    smla_split_kv_b_proj_args core;
    int64_t num_heads;
    int64_t nope_dim;
    int64_t value_dim;
} split_args;

SMLA_PY_COMPUTE(split_kv_b_proj)

enum { SPLIT_WEIGHT, SPLIT_W_UK = 2, SPLIT_W_UV, SPLIT_HEADS, SPLIT_NOPE_DIM, SPLIT_VALUE_DIM };

static const smla_py_param split_params[] = {
    [SPLIT_WEIGHT] = {"weight", SMLA_PY_INPUT, offsetof(split_args, core.weight)},
    {"weight_scale_inv", SMLA_PY_OPTIONAL, offsetof(split_args, core.weight_scale_inv)},
    [SPLIT_W_UK] = {"W_UK", SMLA_PY_RESULT, offsetof(split_args, core.w_uk)},
    [SPLIT_W_UV] = {"W_UV", SMLA_PY_RESULT, offsetof(split_args, core.w_uv)},
    [SPLIT_HEADS] = {"num_heads", SMLA_PY_INT, offsetof(split_args, num_heads)},
    [SPLIT_NOPE_DIM] = {"qk_nope_head_dim", SMLA_PY_INT, offsetof(split_args, nope_dim)},
    [SPLIT_VALUE_DIM] = {"v_head_dim", SMLA_PY_INT, offsetof(split_args, value_dim)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(split_args, core.stream)},
};

/* The shapes of the results come from numbers of the caller. Check that these fit the weight before
 * memory is allocated for them. */
static int
check_weight_shape(const smla_py_call *call, const void *args)
{
    const split_args *const a = args;
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
    const int64_t rows = smla_py_call_dim(call, SPLIT_WEIGHT, 0);
    const int64_t columns = smla_py_call_dim(call, SPLIT_WEIGHT, 1);
    if (smla_py_has_rank(call, SPLIT_WEIGHT, 2) &&
        !(rows == SMLA_KV_LORA_RANK && columns == wanted) &&
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

static const smla_py_result_row split_results[] = {
    {SMLA_PY_MAKES(SPLIT_W_UK, BF16, SMLA_PY_NUMBER(SMLA_KV_LORA_RANK), SMLA_PY_VALUE(SPLIT_HEADS),
                   SMLA_PY_VALUE(SPLIT_NOPE_DIM))},
    {SMLA_PY_MAKES(SPLIT_W_UV, BF16, SMLA_PY_NUMBER(SMLA_KV_LORA_RANK), SMLA_PY_VALUE(SPLIT_HEADS),
                   SMLA_PY_VALUE(SPLIT_VALUE_DIM))},
};

static const smla_py_limit split_limits[] = {{SMLA_PY_LIMIT_NDIM, SPLIT_WEIGHT, 2, 2}};

/* ---- Weights ------------------------------------------------------------------------------- */

/* The split of any weight, in bf16 or fp32. */
typedef struct parts_args {
    smla_split_kv_b_proj_args core;
    int64_t num_rows;
    int64_t num_heads;
    int64_t first_dim;
    int64_t second_dim;
    DLDataType dtype;
} parts_args;

enum {
    PARTS_WEIGHT,
    PARTS_FIRST = 2,
    PARTS_SECOND,
    PARTS_ROWS,
    PARTS_HEADS,
    PARTS_FIRST_DIM,
    PARTS_SECOND_DIM,
    PARTS_DTYPE
};

static const smla_py_param parts_params[] = {
    [PARTS_WEIGHT] = {"weight", SMLA_PY_INPUT, offsetof(parts_args, core.weight)},
    {"weight_scale_inv", SMLA_PY_NULLABLE, offsetof(parts_args, core.weight_scale_inv)},
    [PARTS_FIRST] = {"first", SMLA_PY_RESULT, offsetof(parts_args, core.w_uk)},
    [PARTS_SECOND] = {"second", SMLA_PY_RESULT, offsetof(parts_args, core.w_uv)},
    [PARTS_ROWS] = {"num_rows", SMLA_PY_INT, offsetof(parts_args, num_rows)},
    [PARTS_HEADS] = {"num_heads", SMLA_PY_INT, offsetof(parts_args, num_heads)},
    [PARTS_FIRST_DIM] = {"first_dim", SMLA_PY_INT, offsetof(parts_args, first_dim)},
    [PARTS_SECOND_DIM] = {"second_dim", SMLA_PY_INT, offsetof(parts_args, second_dim)},
    [PARTS_DTYPE] = {"dtype", SMLA_PY_FLOATS, offsetof(parts_args, dtype)},
    {"storage", SMLA_PY_INT32, offsetof(parts_args, core.storage)},
    {"rows_are_outputs", SMLA_PY_FLAG, offsetof(parts_args, core.rows_are_outputs)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(parts_args, core.stream)},
};

#define DTYPE_OF(option) {.source = SMLA_PY_DTYPE_OF_OPTION, .row = (option)}

static const smla_py_result_row parts_results[] = {
    {.result = PARTS_FIRST,
     .dtype = DTYPE_OF(PARTS_DTYPE),
     .dims = {SMLA_PY_VALUE(PARTS_ROWS), SMLA_PY_VALUE(PARTS_HEADS),
              SMLA_PY_VALUE(PARTS_FIRST_DIM)}},
    {.result = PARTS_SECOND,
     .dtype = DTYPE_OF(PARTS_DTYPE),
     .dims = {SMLA_PY_VALUE(PARTS_ROWS), SMLA_PY_VALUE(PARTS_HEADS),
              SMLA_PY_VALUE(PARTS_SECOND_DIM)}},
};

static const smla_py_limit parts_limits[] = {
    {SMLA_PY_LIMIT_NDIM, PARTS_WEIGHT, 2, 2},
    {SMLA_PY_LIMIT_VALUE, PARTS_ROWS, 0, INT32_MAX},
    {SMLA_PY_LIMIT_VALUE, PARTS_HEADS, 1, SMLA_MAX_HEADS},
    {SMLA_PY_LIMIT_VALUE, PARTS_FIRST_DIM, 0, INT32_MAX},
    {SMLA_PY_LIMIT_VALUE, PARTS_SECOND_DIM, 0, INT32_MAX},
};

SMLA_PY_COMPUTE(absorb_q_proj)
SMLA_PY_COMPUTE(absorb_o_proj)

typedef struct absorb_q_args {
    smla_absorb_q_proj_args core;
    int64_t num_rows;
    DLDataType dtype;
} absorb_q_args;

typedef struct absorb_o_args {
    smla_absorb_o_proj_args core;
    int64_t num_rows;
    DLDataType dtype;
} absorb_o_args;

enum { ABSORB_W = 2, ABSORB_OUT, ABSORB_ROWS, ABSORB_DTYPE };

static const smla_py_param absorb_q_params[] = {
    {"q_proj", SMLA_PY_INPUT, offsetof(absorb_q_args, core.q_proj)},
    {"q_scale", SMLA_PY_NULLABLE, offsetof(absorb_q_args, core.q_scale)},
    [ABSORB_W] = {"W_UK", SMLA_PY_INPUT, offsetof(absorb_q_args, core.w_uk)},
    [ABSORB_OUT] = {"out", SMLA_PY_RESULT, offsetof(absorb_q_args, core.out)},
    [ABSORB_ROWS] = {"num_rows", SMLA_PY_INT, offsetof(absorb_q_args, num_rows)},
    [ABSORB_DTYPE] = {"dtype", SMLA_PY_FLOATS, offsetof(absorb_q_args, dtype)},
    {"storage", SMLA_PY_INT32, offsetof(absorb_q_args, core.storage)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(absorb_q_args, core.stream)},
};

static const smla_py_param absorb_o_params[] = {
    {"o_proj", SMLA_PY_INPUT, offsetof(absorb_o_args, core.o_proj)},
    {"o_scale", SMLA_PY_NULLABLE, offsetof(absorb_o_args, core.o_scale)},
    [ABSORB_W] = {"W_UV", SMLA_PY_INPUT, offsetof(absorb_o_args, core.w_uv)},
    [ABSORB_OUT] = {"out", SMLA_PY_RESULT, offsetof(absorb_o_args, core.out)},
    [ABSORB_ROWS] = {"num_rows", SMLA_PY_INT, offsetof(absorb_o_args, num_rows)},
    [ABSORB_DTYPE] = {"dtype", SMLA_PY_FLOATS, offsetof(absorb_o_args, dtype)},
    {"storage", SMLA_PY_INT32, offsetof(absorb_o_args, core.storage)},
    {"stream", SMLA_PY_ARRAYS_STREAM, offsetof(absorb_o_args, core.stream)},
};

/* Products of all heads and latents: [H, L] of W_UK or W_UV. */
#define ABSORBED_DIM                                          \
    {SMLA_PY_TERM(SMLA_PY_ADD, SMLA_PY_SIZE_OF, ABSORB_W, 0), \
     SMLA_PY_TERM(SMLA_PY_MULTIPLY, SMLA_PY_SIZE_OF, ABSORB_W, 1)}

static const smla_py_result_row absorb_q_results[] = {
    {.result = ABSORB_OUT,
     .dtype = DTYPE_OF(ABSORB_DTYPE),
     .dims = {ABSORBED_DIM, SMLA_PY_VALUE(ABSORB_ROWS)}},
};

static const smla_py_result_row absorb_o_results[] = {
    {.result = ABSORB_OUT,
     .dtype = DTYPE_OF(ABSORB_DTYPE),
     .dims = {SMLA_PY_VALUE(ABSORB_ROWS), ABSORBED_DIM}},
};

static const smla_py_limit absorb_limits[] = {
    {SMLA_PY_LIMIT_NDIM, ABSORB_W, 3, 3},
    {SMLA_PY_LIMIT_VALUE, ABSORB_ROWS, 0, INT32_MAX},
};

/* ---- Up projections ------------------------------------------------------------------------ */

SMLA_PY_COMPUTE(k_up_proj)

enum { UP_X, UP_W, UP_OUT };

static const smla_py_param k_up_params[] = {
    [UP_X] = {"q_nope", SMLA_PY_INPUT, offsetof(smla_k_up_proj_args, q_nope)},
    [UP_W] = {"W_UK", SMLA_PY_INPUT, offsetof(smla_k_up_proj_args, w_uk)},
    [UP_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_k_up_proj_args, out)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_k_up_proj_args, stream)},
};

SMLA_PY_COMPUTE(v_up_proj)

static const smla_py_param v_up_params[] = {
    [UP_X] = {"x", SMLA_PY_INPUT, offsetof(smla_v_up_proj_args, x)},
    [UP_W] = {"W_UV", SMLA_PY_INPUT, offsetof(smla_v_up_proj_args, w_uv)},
    [UP_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_v_up_proj_args, out)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_v_up_proj_args, stream)},
};

static const smla_py_result_row k_up_results[] = {
    {SMLA_PY_MAKES(UP_OUT, BF16, SMLA_PY_SIZE(UP_X, 0), SMLA_PY_SIZE(UP_X, 1),
                   SMLA_PY_NUMBER(SMLA_KV_LORA_RANK))},
};

static const smla_py_result_row v_up_results[] = {
    {SMLA_PY_MAKES(UP_OUT, BF16, SMLA_PY_SIZE(UP_X, 0), SMLA_PY_SIZE(UP_X, 1),
                   SMLA_PY_SIZE(UP_W, 2))},
};

SMLA_PY_COMPUTE(kv_up_proj)

static const smla_py_param kv_up_params[] = {
    [UP_X] = {"kv_c", SMLA_PY_INPUT, offsetof(smla_kv_up_proj_args, kv_c)},
    [UP_W] = {"kv_b_proj", SMLA_PY_INPUT, offsetof(smla_kv_up_proj_args, kv_b_proj)},
    [UP_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_kv_up_proj_args, out)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_kv_up_proj_args, stream)},
};

static const smla_py_result_row kv_up_results[] = {
    {SMLA_PY_MAKES(UP_OUT, BF16, SMLA_PY_SIZE(UP_X, 0), SMLA_PY_SIZE(UP_W, 1))},
};

static const smla_py_limit kv_up_limits[] = {
    {SMLA_PY_LIMIT_NDIM, UP_X, 2, 2},
    {SMLA_PY_LIMIT_NDIM, UP_W, 2, 2},
};

static const smla_py_limit up_limits[] = {
    {SMLA_PY_LIMIT_NDIM, UP_X, 3, 3},
    {SMLA_PY_LIMIT_NDIM, UP_W, 3, 3},
    {SMLA_PY_LIMIT_HEADS, UP_X, 1, SMLA_MAX_HEADS},
};

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

static const smla_py_result_row grouped_results[] = {
    {SMLA_PY_MAKES(GROUPED_OUT, BF16, SMLA_PY_SIZE(GROUPED_O, 0), SMLA_PY_SIZE(GROUPED_O, 1),
                   SMLA_PY_SIZE(GROUPED_WEIGHT, 1))},
};

static const smla_py_limit grouped_limits[] = {
    {SMLA_PY_LIMIT_NDIM, GROUPED_O, 3, 3},
    {SMLA_PY_LIMIT_NDIM, GROUPED_WEIGHT, 3, 3},
    {SMLA_PY_LIMIT_HEADS, GROUPED_O, 1, SMLA_MAX_HEADS},
};

/* ---- Quantisation -------------------------------------------------------------------------- */

SMLA_PY_COMPUTE(dynamic_per_tensor_quant)

enum { QUANT_X, QUANT_OUT, QUANT_SCALE };

static const smla_py_param quant_params[] = {
    [QUANT_X] = {"x", SMLA_PY_INPUT, offsetof(smla_dynamic_per_tensor_quant_args, x)},
    [QUANT_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_dynamic_per_tensor_quant_args, out)},
    [QUANT_SCALE] = {"scale", SMLA_PY_RESULT, offsetof(smla_dynamic_per_tensor_quant_args, scale)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_dynamic_per_tensor_quant_args, stream)},
};

static const smla_py_result_row quant_results[] = {
    {SMLA_PY_MAKES(QUANT_OUT, E4M3, SMLA_PY_ALL_SIZES(QUANT_X))},
    {.result = QUANT_SCALE, .dtype = SMLA_PY_MAKES_FP32}, /* no dimension */
};

SMLA_PY_COMPUTE(scaled_quantize)

enum { SCALED_X, SCALED_OUT, SCALED_DESCALE, SCALED_GROUP };

static const smla_py_param scaled_params[] = {
    [SCALED_X] = {"x", SMLA_PY_INPUT, offsetof(smla_scaled_quantize_args, x)},
    [SCALED_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_scaled_quantize_args, out)},
    [SCALED_DESCALE] = {"descale", SMLA_PY_OUTPUT, offsetof(smla_scaled_quantize_args, descale)},
    [SCALED_GROUP] = {"group", SMLA_PY_TWO_INTS, offsetof(smla_scaled_quantize_args, group_rows)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_scaled_quantize_args, stream)},
};

static const smla_py_result_row scaled_results[] = {
    {SMLA_PY_MAKES(SCALED_OUT, E4M3, SMLA_PY_SIZE(SCALED_X, 0), SMLA_PY_SIZE(SCALED_X, 1))},
    {SMLA_PY_MAKES(SCALED_DESCALE, FP32, SMLA_PY_GROUPS(SCALED_GROUP, 0),
                   SMLA_PY_GROUPS(SCALED_GROUP, 1))},
};

static const smla_py_limit scaled_limits[] = {{SMLA_PY_LIMIT_NDIM, SCALED_X, 2, 2}};

/* ---- Linear layers of e4m3 ----------------------------------------------------------------- */

SMLA_PY_COMPUTE(fp8_linear)

enum { LINEAR_X, LINEAR_WEIGHT, LINEAR_OUT = 3 };

static const smla_py_param linear_params[] = {
    [LINEAR_X] = {"x", SMLA_PY_INPUT, offsetof(smla_fp8_linear_args, x)},
    [LINEAR_WEIGHT] = {"weight", SMLA_PY_INPUT, offsetof(smla_fp8_linear_args, weight)},
    {"descale", SMLA_PY_INPUT, offsetof(smla_fp8_linear_args, descale)},
    [LINEAR_OUT] = {"out", SMLA_PY_OUTPUT, offsetof(smla_fp8_linear_args, out)},
    {"workspace", SMLA_PY_WORKSPACE, offsetof(smla_fp8_linear_args, workspace)},
    {"input_group", SMLA_PY_TWO_INTS, offsetof(smla_fp8_linear_args, input_group_rows)},
    {"stream", SMLA_PY_STREAM, offsetof(smla_fp8_linear_args, stream)},
};

static const smla_py_result_row linear_results[] = {
    {SMLA_PY_MAKES(LINEAR_OUT, BF16, SMLA_PY_SIZE(LINEAR_X, 0), SMLA_PY_SIZE(LINEAR_WEIGHT, 0))},
};

static const smla_py_limit linear_limits[] = {
    {SMLA_PY_LIMIT_NDIM, LINEAR_X, 2, 2},
    {SMLA_PY_LIMIT_NDIM, LINEAR_WEIGHT, 2, 2},
};

/* Room for the quantised input and for its scales, of which there are most with one per 128 values.
 * 0 for malformed arguments: the call itself words that error better. */
static int64_t
linear_workspace_bytes(const void *args)
{
    enum { ALIGN = 16 };
    const smla_fp8_linear_args *const a = args;
    int64_t bytes = 0;
    if (a->workspace != NULL || a->out == NULL || a->x->ndim != 2) {
        return 0;
    }
    const int64_t inner_dim = smla_size(a->x, 1);
    const int64_t num_scales = inner_dim < SMLA_SCALE_TILE ? 1 : inner_dim / SMLA_SCALE_TILE;
    return __builtin_mul_overflow(smla_size(a->x, 0), inner_dim + 4 * num_scales, &bytes)
               ? 0
               : bytes + ALIGN - 1;
}

/* ---- List ---------------------------------------------------------------------------------- */

const smla_py_operator smla_py_projection_operators[] = {
    {.name = "_split_kv_b_proj",
     .title = "split_kv_b_proj",
     SMLA_PY_TABLE(split_params, smla_split_kv_b_proj_args, split_args),
     .compute = compute_split_kv_b_proj,
     SMLA_PY_RESULTS(split_results),
     SMLA_PY_LIMITS(split_limits),
     .check_options = check_weight_shape},
    {.name = "_split_weight",
     .title = "split_kv_b_proj",
     SMLA_PY_TABLE(parts_params, smla_split_kv_b_proj_args, parts_args),
     .compute = compute_split_kv_b_proj,
     SMLA_PY_RESULTS(parts_results),
     SMLA_PY_LIMITS(parts_limits)},
    {.name = "_absorb_q_proj",
     .title = "absorb",
     SMLA_PY_TABLE(absorb_q_params, smla_absorb_q_proj_args, absorb_q_args),
     .compute = compute_absorb_q_proj,
     SMLA_PY_RESULTS(absorb_q_results),
     SMLA_PY_LIMITS(absorb_limits)},
    {.name = "_absorb_o_proj",
     .title = "absorb",
     SMLA_PY_TABLE(absorb_o_params, smla_absorb_o_proj_args, absorb_o_args),
     .compute = compute_absorb_o_proj,
     SMLA_PY_RESULTS(absorb_o_results),
     SMLA_PY_LIMITS(absorb_limits)},
    {SMLA_PY_MAKING_OPERATOR(k_up_proj, k_up, smla_k_up_proj_args), SMLA_PY_LIMITS(up_limits)},
    {SMLA_PY_MAKING_OPERATOR(v_up_proj, v_up, smla_v_up_proj_args), SMLA_PY_LIMITS(up_limits)},
    {SMLA_PY_OPERATOR(kv_up_proj, kv_up, smla_kv_up_proj_args)},
    {SMLA_PY_OPERATOR(grouped_output_projection, grouped, smla_grouped_output_projection_args)},
    {SMLA_PY_MAKING_OPERATOR(dynamic_per_tensor_quant, quant, smla_dynamic_per_tensor_quant_args)},
    {SMLA_PY_OPERATOR(scaled_quantize, scaled, smla_scaled_quantize_args)},
    {SMLA_PY_OPERATOR(fp8_linear, linear, smla_fp8_linear_args),
     .workspace_bytes = linear_workspace_bytes},
    {.name = NULL},
};
