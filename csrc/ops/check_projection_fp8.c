/* check_projection_fp8.c: the argument rules of scaled_quantize and of fp8_linear, which quantises
 * its input as scaled_quantize does. check_parts.c has the shared ones.
 */
#include "core/params_projection.h"
#include "core/rule_parts.h"
#include "ops/check.h"

/* ---- Groups -------------------------------------------------------------------------------- */

/* Checks item `i` of `group`, -1 for the whole axis of x. */
static smla_status
require_group(const smla_checker *c, int i, int64_t size, int64_t axis)
{
    if (size < 1 && size != -1) {
        return smla_refuse(
            c, "`group` must have sizes of at least 1, or -1 for a whole axis, got %lld",
            (long long)size);
    }
    if (axis % size != 0) {
        return smla_refuse(c, "`x` must have a multiple of %lld %s (`group`), got %lld",
                           (long long)size, i == 0 ? "rows" : "columns", (long long)axis);
    }
    return SMLA_OK;
}

/* The size of an axis' groups, at least 1. A whole axis is one group, even if it is empty. */
static int64_t
group_size(int64_t size, int64_t axis)
{
    return size != -1 ? size : axis > 0 ? axis : 1;
}

static int64_t
count_groups(int64_t size, int64_t axis)
{
    return size == -1 ? 1 : axis / size;
}

/* Fills what the sizes of x and the checked sizes of its groups decide. */
static void
fill_groups(int64_t num_rows, int64_t num_columns, int64_t group_rows, int64_t group_columns,
            smla_scaled_quantize_params *params)
{
    *params = (smla_scaled_quantize_params){
        .num_rows = num_rows,
        .num_columns = num_columns,
        .group_rows = group_size(group_rows, num_rows),
        .group_columns = group_size(group_columns, num_columns),
        .num_row_groups = count_groups(group_rows, num_rows),
        .num_column_groups = count_groups(group_columns, num_columns),
    };
}

/* ---- scaled_quantize ----------------------------------------------------------------------- */

smla_status
smla_check_scaled_quantize(const smla_scaled_quantize_args *args,
                           smla_scaled_quantize_params *params, const smla_backend **backend,
                           smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "scaled_quantize", error);
    SMLA_TRY(smla_require_2d(&c, "x", args->x, SMLA_DTYPE_FLOATS, SMLA_ANY, SMLA_ANY, 0, NULL));
    const int64_t num_rows = smla_size(args->x, 0), num_columns = smla_size(args->x, 1);
    SMLA_TRY(require_group(&c, 0, args->group_rows, num_rows));
    SMLA_TRY(require_group(&c, 1, args->group_columns, num_columns));
    fill_groups(num_rows, num_columns, args->group_rows, args->group_columns, params);
    SMLA_TRY(smla_require_2d(&c, "out", args->out, SMLA_DTYPE_E4M3_OR_BYTES, params->num_rows,
                             params->num_columns, SMLA_RULE_OUTPUT, NULL));
    SMLA_TRY(smla_require_2d(&c, "descale", args->descale, SMLA_DTYPE_FP32, params->num_row_groups,
                             params->num_column_groups,
                             SMLA_RULE_OUTPUT | SMLA_RULE_ANY_LAST_STRIDE, "a scale per group"));
    SMLA_TRY(smla_finish_check(&c, backend));
    params->call = smla_call_of(&c, args->stream, NULL);
    params->x = smla_data(args->x);
    params->type = smla_float_type_of(args->x);
    params->x_stride_row = smla_stride(args->x, 0);
    params->out = smla_data(args->out);
    params->out_stride_row = smla_stride(args->out, 0);
    params->descale = smla_data(args->descale);
    params->descale_stride_row = smla_stride(args->descale, 0);
    params->descale_stride_column = smla_stride(args->descale, 1);
    return SMLA_OK;
}

/* ---- fp8_linear ---------------------------------------------------------------------------- */

typedef enum weight_scales {
    SCALE_OF_TENSOR = 1,
    SCALE_OF_BLOCK = 2,
    SCALE_OF_OUTPUT = 3,
} weight_scales;

/* What the shape of descale says. One value is taken for that of the tensor. */
static bool
has_scales(const DLTensor *descale, weight_scales kind, int64_t outer_dim, int64_t inner_dim)
{
    switch (kind) {
    case SCALE_OF_TENSOR: return smla_has_one_value(descale);
    case SCALE_OF_BLOCK:
        return descale->ndim == 2 && descale->shape[0] == smla_count_scale_tiles(outer_dim) &&
               descale->shape[1] == inner_dim / SMLA_SCALE_TILE;
    default:
        return (descale->ndim == 1 || (descale->ndim == 2 && descale->shape[1] == 1)) &&
               descale->shape[0] == outer_dim;
    }
}

/* The schemes: an input group, and the scales that the weight has with it. */
static const struct scheme {
    int64_t group_rows;
    int64_t group_columns;
    weight_scales kind;
} schemes[] = {
    {-1, -1, SCALE_OF_TENSOR},
    {1, SMLA_SCALE_TILE, SCALE_OF_BLOCK},
    {1, -1, SCALE_OF_TENSOR},
    {1, -1, SCALE_OF_OUTPUT},
};

enum { NUM_SCHEMES = sizeof schemes / sizeof schemes[0] };

/* The scales of a weight in the scheme that they make with the groups of its input; 0: in none. */
static weight_scales
find_scales(const smla_fp8_linear_args *args)
{
    for (int i = 0; i < NUM_SCHEMES; i++) {
        if (schemes[i].group_rows == args->input_group_rows &&
            schemes[i].group_columns == args->input_group_columns &&
            has_scales(args->descale, schemes[i].kind, smla_size(args->weight, 0),
                       smla_size(args->weight, 1))) {
            return schemes[i].kind;
        }
    }
    return (weight_scales)0;
}

static smla_status
require_scheme(const smla_checker *c, const smla_fp8_linear_args *args)
{
    const int64_t outer_dim = smla_size(args->weight, 0);
    const int64_t inner_dim = smla_size(args->weight, 1);
    if (find_scales(args) != 0) {
        return SMLA_OK;
    }
    return smla_refuse(
        c,
        "`descale` must have the form of one of four schemes, with their `input_group`: tensor, "
        "one value and (-1, -1); block, [%lld, %lld] and (1, 128); token_tensor, one value and (1, "
        "-1); token_channel, [%lld] or [%lld, 1] and (1, -1), got shape %s and (%lld, %lld)",
        (long long)smla_count_scale_tiles(outer_dim), (long long)(inner_dim / SMLA_SCALE_TILE),
        (long long)outer_dim, (long long)outer_dim, smla_describe_shape(args->descale).text,
        (long long)args->input_group_rows, (long long)args->input_group_columns);
}

/* The strides of the weight's scales: 0 where one scale serves an axis. */
static void
fill_weight_scales(const smla_fp8_linear_args *args, smla_projection_scales *scales)
{
    const weight_scales kind = find_scales(args);
    scales->w = smla_data(args->descale);
    scales->w_is_per_output = kind == SCALE_OF_OUTPUT;
    scales->w_stride_outer = kind == SCALE_OF_TENSOR ? 0 : smla_stride(args->descale, 0);
    scales->w_stride_inner = kind == SCALE_OF_BLOCK ? smla_stride(args->descale, 1) : 0;
}

/* The alignment that kernels like rows of quantised values to have. */
enum { QUANTIZED_ALIGN = 16 };

/* Puts the quantised input into memory, its scales behind it. */
static void
place_quantized(uint8_t *memory, smla_scaled_quantize_params *q)
{
    q->out = memory + -(uintptr_t)memory % QUANTIZED_ALIGN;
    q->out_stride_row = q->num_columns;
    q->descale = (float *)(void *)((uint8_t *)q->out + q->num_rows * q->num_columns);
    q->descale_stride_row = q->num_column_groups;
    q->descale_stride_column = 1;
}

static smla_status
require_tiles(const smla_checker *c, int64_t columns)
{
    return columns % SMLA_SCALE_TILE == 0
               ? SMLA_OK
               : smla_refuse(c, "`x` must have a multiple of %d values per token, got %lld",
                             SMLA_SCALE_TILE, (long long)columns);
}

smla_status
smla_require_fp8_scheme(const smla_checker *c, const smla_fp8_linear_args *args)
{
    SMLA_TRY(require_tiles(c, smla_size(args->weight, 1)));
    return require_scheme(c, args);
}

/* Checks the arrays that are read. */
static smla_status
require_operands(smla_checker *c, const smla_fp8_linear_args *args)
{
    SMLA_TRY(smla_require_2d(c, "x", args->x, SMLA_DTYPE_BF16, SMLA_ANY, SMLA_ANY, 0, NULL));
    SMLA_TRY(require_tiles(c, smla_size(args->x, 1)));
    SMLA_TRY(smla_require_2d(c, "weight", args->weight, SMLA_DTYPE_E4M3_OR_BYTES, SMLA_ANY,
                             smla_size(args->x, 1), 0, "outputs, and the values of a token"));
    SMLA_TRY(
        smla_require_any(c, "descale", args->descale, SMLA_DTYPE_FP32, SMLA_RULE_ANY_LAST_STRIDE));
    return require_scheme(c, args);
}

static smla_status
require_results(smla_checker *c, const smla_fp8_linear_args *args)
{
    SMLA_TRY(smla_require_2d(c, "out", args->out, SMLA_DTYPE_BF16, smla_size(args->x, 0),
                             smla_size(args->weight, 0), SMLA_RULE_OUTPUT, NULL));
    return smla_require_workspace(c, "workspace", args->workspace, SMLA_RULE_OPTIONAL);
}

/* Checks that the workspace has room for the quantised input. */
static smla_status
require_room(const smla_checker *c, const smla_fp8_linear_args *args)
{
    const int64_t num_rows = smla_size(args->x, 0), num_columns = smla_size(args->x, 1);
    const int64_t num_scales = count_groups(args->input_group_rows, num_rows) *
                               count_groups(args->input_group_columns, num_columns);
    const int64_t given = args->workspace == NULL ? 0 : smla_size(args->workspace, 0);
    const int64_t padding = (int64_t)(-(uintptr_t)smla_data(args->workspace) % QUANTIZED_ALIGN);
    const int64_t needed = padding + num_rows * num_columns + num_scales * (int64_t)sizeof(float);
    return num_rows == 0 || given >= needed
               ? SMLA_OK
               : smla_refuse(c, "`workspace` must have at least %lld bytes, got %lld",
                             (long long)needed, (long long)given);
}

smla_status
smla_check_fp8_linear(const smla_fp8_linear_args *args, smla_fp8_linear_params *params,
                      const smla_backend **backend, smla_error *error)
{
    smla_checker c;
    smla_open_checker(&c, "fp8_linear", error);
    SMLA_TRY(require_operands(&c, args));
    SMLA_TRY(require_results(&c, args));
    SMLA_TRY(smla_finish_check(&c, backend));
    SMLA_TRY(require_room(&c, args));
    smla_fill_fp8_linear(smla_call_of(&c, args->stream, NULL), args, smla_size(args->x, 0),
                         smla_data(args->workspace), params);
    params->quantize.x = smla_data(args->x);
    params->quantize.x_stride_row = smla_stride(args->x, 0);
    params->project.out = smla_data(args->out);
    params->project.out_stride_token = smla_stride(args->out, 0);
    return SMLA_OK;
}

void
smla_fill_fp8_linear(smla_call call, const smla_fp8_linear_args *args, int64_t num_tokens,
                     void *memory, smla_fp8_linear_params *params)
{
    smla_scaled_quantize_params *const quantize = &params->quantize;
    fill_groups(num_tokens, smla_size(args->weight, 1), args->input_group_rows,
                args->input_group_columns, quantize);
    place_quantized(memory, quantize);
    quantize->type = SMLA_FLOAT_BF16;
    params->call = quantize->call = call;
    params->project = (smla_projection_params){
        .call = call,
        .num_tokens = num_tokens,
        .num_heads = 1,
        .inner_dim = quantize->num_columns,
        .outer_dim = smla_size(args->weight, 0),
        .is_e4m3 = true,
        .x = quantize->out,
        .x_stride_token = quantize->out_stride_row,
        .w = smla_data(args->weight),
        .w_stride_inner = 1,
        .w_stride_outer = smla_stride(args->weight, 0),
        .scales = {.x = quantize->descale,
                   .x_stride_token =
                       quantize->num_row_groups == 1 ? 0 : quantize->descale_stride_row,
                   .x_stride_column = quantize->num_column_groups == 1 ? 0 : 1},
    };
    fill_weight_scales(args, &params->project.scales);
}
