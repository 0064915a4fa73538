/* check_projection_weights.c: the argument rules of what makes weights once a model: the split of
 * kv_b_proj, and absorption. A weight has any storage, and e4m3 values have scales of one of three
 * kinds. check_parts.c has the shared rules.
 */
#include "core/params_projection.h"
#include "core/rule_parts.h"
#include "ops/check.h"

enum {
    SCALE_BITS = 7, /* log2 of SMLA_SCALE_TILE */
    WEIGHT_DTYPES = SMLA_DTYPE_FLOATS | SMLA_DTYPE_E4M3_OR_BYTES,
};

_Static_assert(SMLA_SCALE_TILE == 1 << SCALE_BITS, "blocks of scales are found by shifts");

typedef struct weight_rule {
    const char *name;
    const DLTensor *tensor;
    const char *scale_name;
    const DLTensor *scale;
    int32_t storage;       /* smla_storage */
    bool rows_are_outputs; /* else columns are */
} weight_rule;

/* ---- Scales -------------------------------------------------------------------------------- */

static smla_status
refuse_scale(const smla_checker *c, const weight_rule *rule, int64_t rows, int64_t columns)
{
    return smla_refuse(c, "`%s` must have shape [%lld, %lld], got %s", rule->scale_name,
                       (long long)rows, (long long)columns, smla_describe_shape(rule->scale).text);
}

/* Checks that a scale has the shape of a kind: one value, one per output, or one per block.
 * `out_dim` is the dimension of the weight, as it is stored, that has the outputs. */
static smla_status
require_scale_shape(const smla_checker *c, const weight_rule *rule, int out_dim)
{
    const DLTensor *const scale = rule->scale;
    const int64_t sizes[2] = {smla_size(rule->tensor, 0), smla_size(rule->tensor, 1)};
    const int64_t blocks[2] = {smla_count_scale_tiles(sizes[0]), smla_count_scale_tiles(sizes[1])};
    if (smla_has_one_value(scale) || (scale->ndim == 1 && scale->shape[0] == sizes[out_dim])) {
        return SMLA_OK;
    }
    const bool is_block =
        scale->ndim == 2 && scale->shape[0] == blocks[0] && scale->shape[1] == blocks[1];
    const bool is_per_output = scale->ndim == 2 && scale->shape[out_dim] == sizes[out_dim] &&
                               scale->shape[1 - out_dim] == 1;
    return is_block || is_per_output ? SMLA_OK : refuse_scale(c, rule, blocks[0], blocks[1]);
}

/* Describes a scale that has been checked. */
static void
describe_scale(const weight_rule *rule, int row_dim, int out_dim, smla_weight *weight)
{
    const DLTensor *const scale = rule->scale;
    int64_t strides[2] = {0, 0};
    int32_t bits[2] = {0, 0};
    for (int dim = 0; dim < 2 && !smla_has_one_value(scale); dim++) {
        const bool is_vector = scale->ndim == 1;
        if (is_vector ? dim == out_dim : smla_size(scale, dim) != 1) {
            strides[dim] = smla_stride(scale, is_vector ? 0 : dim);
            bits[dim] =
                is_vector || smla_size(scale, dim) == smla_size(rule->tensor, dim) ? 0 : SCALE_BITS;
        }
    }
    weight->scale = smla_data(scale);
    weight->scale_stride_row = strides[row_dim];
    weight->scale_stride_column = strides[1 - row_dim];
    weight->scale_row_bits = bits[row_dim];
    weight->scale_column_bits = bits[1 - row_dim];
}

/* ---- Weights ------------------------------------------------------------------------------- */

/* Checks the array of a weight, and whether it has scales if it needs them. Their shape is checked
 * once it is known which dimension has the outputs. */
static smla_status
require_values(smla_checker *c, const weight_rule *rule)
{
    SMLA_TRY(smla_require_2d(c, rule->name, rule->tensor, WEIGHT_DTYPES, SMLA_ANY, SMLA_ANY,
                             SMLA_RULE_ANY_LAST_STRIDE, NULL));
    SMLA_TRY(smla_require_count(c->op, "storage", rule->storage, SMLA_STORED_EITHER,
                                SMLA_STORED_TRANSPOSED, c->error));
    const bool is_e4m3 = (smla_dtype(rule->tensor) & SMLA_DTYPE_FLOATS) == 0;
    if (is_e4m3 && rule->scale == NULL) {
        return smla_refuse(c, "`%s` must be given for an e4m3 weight, got none", rule->scale_name);
    }
    return smla_require_any(c, rule->scale_name, rule->scale, SMLA_DTYPE_FP32,
                            SMLA_RULE_OPTIONAL | SMLA_RULE_ANY_LAST_STRIDE);
}

/* Finds which dimension of a stored weight has its rows. Returns false where neither order fits. */
static bool
find_rows(const weight_rule *rule, int64_t rows, int64_t columns, int *row_dim)
{
    const int64_t first = smla_size(rule->tensor, 0), second = smla_size(rule->tensor, 1);
    const bool is_plain = first == rows && second == columns;
    const bool is_transposed = first == columns && second == rows;
    *row_dim = is_plain && rule->storage != SMLA_STORED_TRANSPOSED ? 0 : 1;
    return *row_dim == 0 || (is_transposed && rule->storage != SMLA_STORED_PLAIN);
}

static smla_weight
weight_of(const weight_rule *rule, int row_dim)
{
    smla_weight weight = {.values = smla_data(rule->tensor),
                          .type = smla_float_type_of(rule->tensor),
                          .stride_row = smla_stride(rule->tensor, row_dim),
                          .stride_column = smla_stride(rule->tensor, 1 - row_dim)};
    if (rule->scale != NULL) {
        describe_scale(rule, row_dim, rule->rows_are_outputs ? row_dim : 1 - row_dim, &weight);
    }
    return weight;
}

/* ---- split_kv_b_proj ----------------------------------------------------------------------- */

/* Checks both parts, [L, H, Pn] and [L, H, Pv], where L is 512 or the weight's. */
static smla_status
require_parts(smla_checker *c, const smla_split_kv_b_proj_args *args)
{
    smla_rule rule = {.name = "w_uk",
                      .tensor = args->w_uk,
                      .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32,
                      .flags = SMLA_RULE_OUTPUT,
                      .ndim = 3,
                      .shape = {SMLA_ANY, SMLA_ANY, SMLA_ANY}};
    SMLA_TRY(smla_require(c, &rule));
    const int64_t rows = smla_size(args->w_uk, 0);
    if (rows != SMLA_KV_LORA_RANK && rows != smla_size(args->weight, 0) &&
        rows != smla_size(args->weight, 1)) {
        return smla_refuse(c, "`w_uk` must have %d rows, or %lld or %lld like the weight, got %s",
                           SMLA_KV_LORA_RANK, (long long)smla_size(args->weight, 0),
                           (long long)smla_size(args->weight, 1),
                           smla_describe_shape(args->w_uk).text);
    }
    SMLA_TRY(smla_require_num_heads(c, "w_uk", smla_size(args->w_uk, 1)));
    rule.name = "w_uv";
    rule.tensor = args->w_uv;
    rule.dtypes = smla_dtype(args->w_uk);
    rule.shape[0] = rows;
    rule.shape[1] = smla_size(args->w_uk, 1);
    return smla_require(c, &rule);
}

static smla_status
refuse_weight(const smla_checker *c, const smla_split_kv_b_proj_args *args, int64_t rows,
              int64_t columns)
{
    return smla_refuse(c,
                       "`weight` must have shape [%lld, %lld] or [%lld, %lld] (%lld heads x (%lld "
                       "+ %lld)), got [%lld, %lld]",
                       (long long)rows, (long long)columns, (long long)columns, (long long)rows,
                       (long long)smla_size(args->w_uk, 1), (long long)smla_size(args->w_uk, 2),
                       (long long)smla_size(args->w_uv, 2), (long long)smla_size(args->weight, 0),
                       (long long)smla_size(args->weight, 1));
}

smla_status
smla_check_split_kv_b_proj(const smla_split_kv_b_proj_args *args,
                           smla_split_kv_b_proj_params *params, const smla_backend **backend,
                           smla_error *error)
{
    const weight_rule rule = {.name = "weight",
                              .tensor = args->weight,
                              .scale_name = "weight_scale_inv",
                              .scale = args->weight_scale_inv,
                              .storage = args->storage,
                              .rows_are_outputs = args->rows_are_outputs != 0};
    smla_checker c;
    smla_open_checker(&c, "split_kv_b_proj", error);
    SMLA_TRY(require_values(&c, &rule));
    SMLA_TRY(require_parts(&c, args));
    const int64_t num_heads = smla_size(args->w_uk, 1);
    const int64_t nope_dim = smla_size(args->w_uk, 2), value_dim = smla_size(args->w_uv, 2);
    const int64_t rows = smla_size(args->w_uk, 0);
    const int64_t columns = num_heads * (nope_dim + value_dim);
    int row_dim;
    if (!find_rows(&rule, rows, columns, &row_dim)) {
        return refuse_weight(&c, args, rows, columns);
    }
    if (rule.scale != NULL) {
        SMLA_TRY(require_scale_shape(&c, &rule, rule.rows_are_outputs ? row_dim : 1 - row_dim));
    }
    SMLA_TRY(smla_finish_check(&c, backend));
    *params = (smla_split_kv_b_proj_params){
        .call = smla_call_of(&c, args->stream, NULL),
        .num_rows = rows,
        .num_heads = num_heads,
        .nope_dim = nope_dim,
        .value_dim = value_dim,
        .weight = weight_of(&rule, row_dim),
        .is_fp32 = smla_dtype(args->w_uk) == SMLA_DTYPE_FP32,
        .w_uk = smla_data(args->w_uk),
        .w_uk_stride_in = smla_stride(args->w_uk, 0),
        .w_uk_stride_head = smla_stride(args->w_uk, 1),
        .w_uv = smla_data(args->w_uv),
        .w_uv_stride_in = smla_stride(args->w_uv, 0),
        .w_uv_stride_head = smla_stride(args->w_uv, 1),
    };
    return SMLA_OK;
}

/* ---- absorb_q_proj, absorb_o_proj ---------------------------------------------------------- */

typedef struct absorb_args {
    weight_rule x;
    const char *w_name;
    const DLTensor *w;
    const DLTensor *out;
    void *stream;
} absorb_args;

/* The values of x per head: exactly those of w, or more where x has others behind them. Returns
 * false where the shapes do not fit. */
static bool
find_columns(const absorb_args *a, int64_t rows, int64_t *head_columns, int *row_dim)
{
    const int64_t heads = smla_size(a->w, 1), values = smla_size(a->w, 2);
    for (int dim = 0; dim < 2; dim++) {
        const int64_t columns = smla_size(a->x.tensor, 1 - dim);
        const bool fits =
            columns % heads == 0 &&
            (a->x.rows_are_outputs ? columns / heads == values : columns / heads >= values);
        if (fits && find_rows(&a->x, rows, columns, row_dim) && *row_dim == dim) {
            *head_columns = columns / heads;
            return true;
        }
    }
    return false;
}

static smla_status
check_absorb(smla_checker *c, const absorb_args *a, smla_absorb_params *params,
             const smla_backend **backend)
{
    SMLA_TRY(require_values(c, &a->x));
    SMLA_TRY(smla_require_3d(c, a->w_name, a->w, SMLA_DTYPE_FLOATS, SMLA_ANY, SMLA_ANY, SMLA_ANY,
                             SMLA_RULE_ANY_LAST_STRIDE, NULL));
    const int64_t latents = smla_size(a->w, 0), heads = smla_size(a->w, 1);
    SMLA_TRY(smla_require_num_heads(c, a->w_name, heads));
    const int inner_dim = a->x.rows_are_outputs ? 1 : 0; /* the result's dimension of inputs */
    smla_rule out = {.name = "out",
                     .tensor = a->out,
                     .dtypes = SMLA_DTYPE_BF16 | SMLA_DTYPE_FP32,
                     .flags = SMLA_RULE_OUTPUT,
                     .ndim = 2,
                     .shape = {SMLA_ANY, SMLA_ANY}};
    out.shape[inner_dim] = heads * latents;
    SMLA_TRY(smla_require(c, &out));
    const int64_t rows = smla_size(a->out, 1 - inner_dim), values = smla_size(a->w, 2);
    int64_t head_columns;
    int row_dim;
    if (!find_columns(a, rows, &head_columns, &row_dim)) {
        return smla_refuse(c,
                           "`%s` must have shape [%lld, n] or [n, %lld], where n is %lld heads x "
                           "%s%lld values, got [%lld, %lld]",
                           a->x.name, (long long)rows, (long long)rows, (long long)heads,
                           a->x.rows_are_outputs ? "" : "at least ", (long long)values,
                           (long long)smla_size(a->x.tensor, 0),
                           (long long)smla_size(a->x.tensor, 1));
    }
    if (a->x.scale != NULL) {
        SMLA_TRY(require_scale_shape(c, &a->x, a->x.rows_are_outputs ? row_dim : 1 - row_dim));
    }
    SMLA_TRY(smla_finish_check(c, backend));
    *params = (smla_absorb_params){
        .call = smla_call_of(c, a->stream, NULL),
        .num_rows = rows,
        .num_heads = heads,
        .num_latents = latents,
        .num_values = values,
        .x = weight_of(&a->x, row_dim),
        .head_columns = head_columns,
        .w = smla_data(a->w),
        .w_type = smla_float_type_of(a->w),
        .w_stride_latent = smla_stride(a->w, 0),
        .w_stride_head = smla_stride(a->w, 1),
        .w_stride_value = smla_stride(a->w, 2),
        .is_fp32 = smla_dtype(a->out) == SMLA_DTYPE_FP32,
        .out = smla_data(a->out),
        .out_stride_row = smla_stride(a->out, 1 - inner_dim),
        .out_stride_head = latents * smla_stride(a->out, inner_dim),
        .out_stride_latent = smla_stride(a->out, inner_dim),
    };
    return SMLA_OK;
}

smla_status
smla_check_absorb_q_proj(const smla_absorb_q_proj_args *args, smla_absorb_params *params,
                         const smla_backend **backend, smla_error *error)
{
    const absorb_args a = {.x = {.name = "q_proj",
                                 .tensor = args->q_proj,
                                 .scale_name = "q_scale",
                                 .scale = args->q_scale,
                                 .storage = args->storage},
                           .w_name = "W_UK",
                           .w = args->w_uk,
                           .out = args->out,
                           .stream = args->stream};
    smla_checker c;
    smla_open_checker(&c, "absorb", error);
    return check_absorb(&c, &a, params, backend);
}

smla_status
smla_check_absorb_o_proj(const smla_absorb_o_proj_args *args, smla_absorb_params *params,
                         const smla_backend **backend, smla_error *error)
{
    const absorb_args a = {.x = {.name = "o_proj",
                                 .tensor = args->o_proj,
                                 .scale_name = "o_scale",
                                 .scale = args->o_scale,
                                 .storage = args->storage,
                                 .rows_are_outputs = true},
                           .w_name = "W_UV",
                           .w = args->w_uv,
                           .out = args->out,
                           .stream = args->stream};
    smla_checker c;
    smla_open_checker(&c, "absorb", error);
    return check_absorb(&c, &a, params, backend);
}
