/* test_absorption.c: split_kv_b_proj, absorb_q_proj and absorb_o_proj, the projections,
 * dynamic_per_tensor_quant. */
#include "instruction_sets.h"

#include <float.h>

#include "core/quant_dims.h"
#include "reference.h"

/* ---- kv_b_proj -> W_UK, W_UV --------------------------------------------------------------- */

typedef struct weights {
    array *weight, *scale, *w_uk, *w_uv;
} weights;

static smla_status
run_split(const weights *w)
{
    const smla_split_kv_b_proj_args args = {.struct_size = sizeof args,
                                            .weight = &w->weight->tensor,
                                            .weight_scale_inv =
                                                w->scale == NULL ? NULL : &w->scale->tensor,
                                            .w_uk = &w->w_uk->tensor,
                                            .w_uv = &w->w_uv->tensor};
    return smla_split_kv_b_proj(&args, &error);
}

/* Element (latent, column) of a weight of either storage, dequantised in fp32. */
static float
weight_at(const weights *w, bool is_transposed, int64_t latent, int64_t column)
{
    const int64_t row = is_transposed ? column : latent;
    const int64_t col = is_transposed ? latent : column;
    const double value = GET(w->weight, row, col);
    return (float)(w->scale == NULL ? value : value * GET(w->scale, row / TILE, col / TILE));
}

static void
expect_split(const weights *w, bool is_transposed)
{
    const int64_t heads = w->w_uk->shape[1];
    const int64_t nope = w->w_uk->shape[2];
    const int64_t value = w->w_uv->shape[2];
    for (int64_t latent = 0; latent < NOPE; latent++) {
        for (int64_t column = 0; column < heads * (nope + value); column++) {
            const int64_t head = column / (nope + value);
            const int64_t at = column % (nope + value);
            const uint16_t wanted = smla_float_to_bf16(weight_at(w, is_transposed, latent, column));
            uint16_t got;
            memcpy(&got,
                   at < nope ? AT(w->w_uk, latent, head, at) : AT(w->w_uv, latent, head, at - nope),
                   sizeof got);
            EXPECT_EQ(got, wanted);
        }
    }
}

static void
test_split(void)
{
    const DLDataType dtypes[] = {bf16, fp32, e4m3};
    for (int i = 0; i < 6; i++) {
        const DLDataType dtype = dtypes[i % 3];
        const bool is_transposed = i >= 3;
        weights w = {.weight = ARRAY(dtype, is_transposed ? 60 : NOPE, is_transposed ? NOPE : 60),
                     .w_uk = ARRAY(bf16, NOPE, 3, 12),
                     .w_uv = slice(ARRAY(bf16, NOPE, 3, 10), 2, 1, 9, 1)};
        fill_normal(w.weight, 3.0);
        if (dtype.code == e4m3.code) {
            w.scale = fill_normal(ARRAY(fp32, is_transposed ? 1 : 4, is_transposed ? 4 : 1), 0.01);
        }
        EXPECT_OK(run_split(&w));
        expect_split(&w, is_transposed);
    }
}

/* A weight whose scale blocks end inside a head, stored as [out, in] and seen as [in, out]. */
static void
test_split_blocks(void)
{
    weights w = {.weight = fill_normal(ARRAY(e4m3, 400, NOPE), 40.0),
                 .scale = fill_normal(ARRAY(fp32, 4, 4), 0.02),
                 .w_uk = ARRAY(bf16, NOPE, 2, 128),
                 .w_uv = ARRAY(bf16, NOPE, 2, 72)};
    EXPECT_OK(run_split(&w));
    expect_split(&w, true);
    w.weight = transpose(w.weight, 0, 1);
    w.scale = transpose(w.scale, 0, 1);
    EXPECT_OK(run_split(&w));
    expect_split(&w, false);
    w.weight->tensor.dtype = uint8; /* the same bytes under another dtype */
    EXPECT_OK(run_split(&w));
    w.weight->tensor.dtype = e4m3;
    expect_split(&w, false);
}

/* Both results have gaps around their rows, and w_uk has its heads outermost. */
static void
test_split_strided(void)
{
    array *wide_uk = ARRAY(bf16, 3, NOPE + 1, 12 + 5);
    array *wide_uv = ARRAY(bf16, 2 * NOPE, 4, 8 + 3);
    weights w = {.weight = fill_normal(ARRAY(bf16, NOPE, 60), 1.0),
                 .w_uk = transpose(slice(slice(wide_uk, 2, 2, 14, 1), 1, 0, NOPE, 1), 0, 1),
                 .w_uv = slice(slice(slice(wide_uv, 2, 0, 8, 1), 1, 1, 4, 1), 0, 0, 2 * NOPE, 2)};
    EXPECT_OK(run_split(&w));
    expect_split(&w, false);
    EXPECT(is_poison(slice(wide_uk, 2, 0, 2, 1)));
    EXPECT(is_poison(slice(wide_uk, 2, 14, 17, 1)));
    EXPECT(is_poison(slice(wide_uk, 1, NOPE, NOPE + 1, 1)));
    EXPECT(is_poison(slice(wide_uv, 2, 8, 11, 1)));
    EXPECT(is_poison(slice(wide_uv, 1, 0, 1, 1)));
    EXPECT(is_poison(slice(wide_uv, 0, 1, 2 * NOPE, 2)));
}

static void
test_split_errors(void)
{
    weights w = {.weight = fill_normal(ARRAY(e4m3, 512, 60), 1.0),
                 .w_uk = ARRAY(bf16, NOPE, 3, 12),
                 .w_uv = ARRAY(bf16, NOPE, 3, 8)};
    EXPECT_FAIL(run_split(&w), SMLA_ERROR_VALUE,
                "split_kv_b_proj: `weight_scale_inv` must be given for an e4m3 weight, got none");
    w.scale = ARRAY(fp32, 4, 2);
    EXPECT_FAIL(run_split(&w), SMLA_ERROR_VALUE,
                "`weight_scale_inv` must have shape [4, 1], got [4, 2]");
    w.scale = ARRAY(fp32, 4, 1);
    w.w_uv = ARRAY(bf16, NOPE, 3, 9);
    EXPECT_FAIL(
        run_split(&w), SMLA_ERROR_VALUE,
        "`weight` must have shape [512, 63] or [63, 512] (3 heads x (12 + 9)), got [512, 60]");
    w.w_uv = ARRAY(bf16, NOPE, 2, 18);
    EXPECT_FAIL(run_split(&w), SMLA_ERROR_VALUE, "`w_uv` must have shape [512, 3, any], got");
}

/* ---- Up projections ------------------------------------------------------------------------ */

/* The bound: fp32 sums of `inner` products, then one rounding to bf16. */
static void
expect_projected(const array *x, const array *w, const array *out, bool latent_is_inner)
{
    const int64_t inner = x->shape[2];
    for (int64_t t = 0; t < out->shape[0]; t++) {
        for (int64_t h = 0; h < out->shape[1]; h++) {
            for (int64_t n = 0; n < out->shape[2]; n++) {
                double sum = 0.0;
                double magnitude = 0.0;
                for (int64_t k = 0; k < inner; k++) {
                    const double product =
                        GET(x, t, h, k) * (latent_is_inner ? GET(w, k, h, n) : GET(w, n, h, k));
                    sum += product;
                    magnitude += fabs(product);
                }
                EXPECT_NEAR(GET(out, t, h, n), sum,
                            0x1p-8 * fabs(sum) + (double)inner * 0x1p-24 * magnitude);
            }
        }
    }
}

static smla_status
run_k_up(const array *q_nope, const array *w_uk, const array *out)
{
    const smla_k_up_proj_args args = {.struct_size = sizeof args,
                                      .q_nope = &q_nope->tensor,
                                      .w_uk = &w_uk->tensor,
                                      .out = &out->tensor};
    return smla_k_up_proj(&args, &error);
}

static smla_status
run_v_up(const array *x, const array *w_uv, const array *out)
{
    const smla_v_up_proj_args args = {.struct_size = sizeof args,
                                      .x = &x->tensor,
                                      .w_uv = &w_uv->tensor,
                                      .out = &out->tensor};
    return smla_v_up_proj(&args, &error);
}

static void
test_k_up_proj(void)
{
    const int64_t nope_dims[] = {128, 1, 70};
    for (int i = 0; i < 3; i++) {
        const array *q =
            slice(fill_normal(ARRAY(bf16, 4, 2, nope_dims[i] + 3), 1.0), 2, 3, nope_dims[i] + 3, 1);
        const array *w = transpose(fill_normal(ARRAY(bf16, 2, NOPE, nope_dims[i]), 1.0), 0, 1);
        array *buffer = ARRAY(bf16, 4, 2, NOPE + 1);
        const array *out = slice(buffer, 2, 0, NOPE, 1);
        EXPECT_OK(run_k_up(q, w, out));
        expect_projected(q, w, out, false);
        EXPECT(is_poison(slice(buffer, 2, NOPE, NOPE + 1, 1)));
    }
}

static void
test_v_up_proj(void)
{
    const int64_t value_dims[] = {128, 1, 67};
    for (int i = 0; i < 3; i++) {
        const array *x = fill_normal(ARRAY(bf16, 18, 2, NOPE), 1.0);
        const array *w = fill_normal(ARRAY(bf16, NOPE, 2, value_dims[i]), 1.0);
        const array *out = ARRAY(bf16, 18, 2, value_dims[i]);
        EXPECT_OK(run_v_up(x, w, out));
        expect_projected(x, w, out, true);
    }
    /* No tokens, and no values: nothing to write. */
    EXPECT_OK(run_v_up(ARRAY(bf16, 0, 2, NOPE), ARRAY(bf16, NOPE, 2, 4), ARRAY(bf16, 0, 2, 4)));
    EXPECT_OK(run_v_up(ARRAY(bf16, 3, 2, NOPE), ARRAY(bf16, NOPE, 2, 0), ARRAY(bf16, 3, 2, 0)));
    EXPECT_OK(run_k_up(ARRAY(bf16, 3, 2, 0), ARRAY(bf16, NOPE, 2, 0), ARRAY(bf16, 3, 2, NOPE)));
}

static smla_status
run_kv_up(const array *kv_c, const array *kv_b_proj, const array *out)
{
    const smla_kv_up_proj_args args = {.struct_size = sizeof args,
                                       .kv_c = &kv_c->tensor,
                                       .kv_b_proj = &kv_b_proj->tensor,
                                       .out = &out->tensor};
    return smla_kv_up_proj(&args, &error);
}

/* A weight [512, n] whose rows lie in memory as they are (0) or as columns (1), or that has gaps in
 * both dimensions (2). */
static const array *
make_kv_b_proj(int64_t n, int layout)
{
    switch (layout) {
    case 0: return fill_normal(ARRAY(bf16, NOPE, n), 1.0);
    case 1: return transpose(fill_normal(ARRAY(bf16, n, NOPE), 1.0), 0, 1);
    default:
        return slice(slice(fill_normal(ARRAY(bf16, 2 * NOPE, 3 * n), 1.0), 0, 0, 2 * NOPE, 2), 1, 0,
                     3 * n, 3);
    }
}

static void
test_kv_up_proj(void)
{
    const int64_t num_outputs[] = {192, 1, 67};
    for (int i = 0; i < 9; i++) {
        const int64_t n = num_outputs[i % 3];
        const array *x = slice(fill_normal(ARRAY(bf16, 18, NOPE + 64), 1.0), 1, 0, NOPE, 1);
        const array *w = make_kv_b_proj(n, i / 3);
        array *buffer = ARRAY(bf16, 18, n + 1);
        const array *out = slice(buffer, 1, 0, n, 1);
        EXPECT_OK(run_kv_up(x, w, out));
        for (int64_t t = 0; t < 18; t++) {
            for (int64_t j = 0; j < n; j++) {
                double sum = 0.0;
                double magnitude = 0.0;
                for (int64_t k = 0; k < NOPE; k++) {
                    sum += GET(x, t, k) * GET(w, k, j);
                    magnitude += fabs(GET(x, t, k) * GET(w, k, j));
                }
                EXPECT_NEAR(GET(out, t, j), sum, 0x1p-8 * fabs(sum) + NOPE * 0x1p-24 * magnitude);
            }
        }
        EXPECT(is_poison(slice(buffer, 1, n, n + 1, 1)));
    }
    /* No tokens, and no outputs: nothing to write. */
    EXPECT_OK(run_kv_up(ARRAY(bf16, 0, NOPE), ARRAY(bf16, NOPE, 4), ARRAY(bf16, 0, 4)));
    EXPECT_OK(run_kv_up(ARRAY(bf16, 3, NOPE), ARRAY(bf16, NOPE, 0), ARRAY(bf16, 3, 0)));
    EXPECT_FAIL(
        run_kv_up(ARRAY(bf16, 3, NOPE), ARRAY(bf16, 4, NOPE), ARRAY(bf16, 3, 4)), SMLA_ERROR_VALUE,
        "kv_up_proj: `kv_b_proj` must have shape [512, any], got [4, 512]: a layer's weight "
        "is given as its transpose");
}

/* Subnormal numbers that matter because their factors are huge: in one token, or in the weight. */
static void
test_projected_subnormals(void)
{
    for (int i = 0; i < 2; i++) {
        array *x = fill_normal(ARRAY(bf16, 5, 2, NOPE), i == 0 ? 1.0 : 0x1p115);
        if (i == 0) {
            fill_normal(slice(x, 0, 3, 4, 1), 0x1p-128);
        }
        const array *w = fill_normal(ARRAY(bf16, NOPE, 2, 40), i == 0 ? 0x1p115 : 0x1p-128);
        const array *out = ARRAY(bf16, 5, 2, 40);
        EXPECT_OK(run_v_up(x, w, out));
        expect_projected(x, w, out, true);
    }
}

/* ---- Output projection --------------------------------------------------------------------- */

enum { GROUPS = 2, SCALE_TILE = 128 };

typedef struct grouped {
    const array *o;
    const array *o_scale; /* NULL for bf16 */
    const array *weight;
    const array *weight_scale;
    const array *out;
} grouped;

static smla_status
run_grouped(const grouped *c)
{
    const smla_grouped_output_projection_args args = {
        .struct_size = sizeof args,
        .o = &c->o->tensor,
        .o_scale = c->o_scale == NULL ? NULL : &c->o_scale->tensor,
        .weight = &c->weight->tensor,
        .weight_scale = c->weight_scale == NULL ? NULL : &c->weight_scale->tensor,
        .out = &c->out->tensor};
    return smla_grouped_output_projection(&args, &error);
}

/* The factor of a product, from fp32 scales or the exponents of int32 scales; 1 for bf16. */
static double
scale_of_product(const grouped *c, int64_t t, int64_t g, int64_t n, int64_t r)
{
    const int64_t tile = r / SCALE_TILE;
    if (c->o_scale == NULL) {
        return 1.0;
    }
    const double w = GET(c->weight_scale, g, n / SCALE_TILE, tile);
    if (c->o_scale->tensor.dtype.code != kDLInt) {
        return w * GET(c->o_scale, t, g, tile);
    }
    const uint32_t four = (uint32_t)(int32_t)GET(c->o_scale, t, g, tile / 4);
    return w * exp2((double)(four >> tile % 4 * 8 & 255u) - 127.0);
}

/* The values of x [T, G, R] as fp32 without gaps, which is exact. */
static const float *
decode_values(const array *x)
{
    const array *values = ARRAY(fp32, x->shape[0], x->shape[1], x->shape[2]);
    for (int64_t t = 0; t < x->shape[0]; t++) {
        for (int64_t g = 0; g < x->shape[1]; g++) {
            for (int64_t r = 0; r < x->shape[2]; r++) {
                SET(values, GET(x, t, g, r), t, g, r);
            }
        }
    }
    return values->tensor.data;
}

/* Values are decoded once and scales once per tile, not once per product: that was most of the
 * time of this program. */
static void
expect_grouped(const grouped *c)
{
    const int64_t num_groups = c->out->shape[1];
    const int64_t num_outputs = c->out->shape[2];
    const int64_t inner = c->o->shape[2];
    const float *o = decode_values(c->o);
    const float *weight = decode_values(c->weight);
    for (int64_t t = 0; t < c->out->shape[0]; t++) {
        for (int64_t g = 0; g < num_groups; g++) {
            for (int64_t n = 0; n < num_outputs; n++) {
                const float *o_row = o + (t * num_groups + g) * inner;
                const float *weight_row = weight + (g * num_outputs + n) * inner;
                double scale = 1.0;
                double sum = 0.0;
                double magnitude = 0.0;
                for (int64_t r = 0; r < inner; r++) {
                    if (r % SCALE_TILE == 0) {
                        scale = scale_of_product(c, t, g, n, r);
                    }
                    const double product = (double)o_row[r] * (double)weight_row[r] * scale;
                    sum += product;
                    magnitude += fabs(product);
                }
                EXPECT_NEAR(GET(c->out, t, g, n), sum, 0x1p-8 * fabs(sum) + 0x1p-16 * magnitude);
            }
        }
    }
}

/* e4m3 with scales of both layouts, o in a wider array, scales with their columns outermost. */
static void
test_grouped_e4m3(void)
{
    static const int64_t sizes[][3] = {{1, 130, 512}, {5, 3, 1024}, {67, 257, 512}};
    for (int i = 0; i < 6; i++) {
        const int64_t T = sizes[i / 2][0];
        const int64_t N = sizes[i / 2][1];
        const int64_t R = sizes[i / 2][2];
        const bool is_packed = i % 2 == 1;
        const int64_t columns = R / SCALE_TILE / (is_packed ? 4 : 1);
        array *scale = is_packed ? ARRAY(int32, columns, GROUPS, T + 1)
                                 : fill_normal(ARRAY(fp32, columns, GROUPS, T + 1), 1.0);
        for (int64_t t = 0; is_packed && t < T; t++) {
            for (int64_t j = 0; j < columns * GROUPS; j++) {
                SET(scale, 0x7E7D8000 + 3 * t + j, j / GROUPS, j % GROUPS, t);
            }
        }
        array *buffer = ARRAY(bf16, T, GROUPS, N + 1);
        const grouped c = {.o = slice(fill_normal(ARRAY(e4m3, T, GROUPS, R + 3), 4.0), 2, 3, R + 3,
                                      1),
                           .o_scale = transpose(scale, 0, 2),
                           .weight = fill_normal(ARRAY(e4m3, GROUPS, N, R), 4.0),
                           .weight_scale =
                               fill_normal(ARRAY(fp32, GROUPS, (N + 127) / 128, R / 128), 1.0),
                           .out = slice(buffer, 2, 0, N, 1)};
        EXPECT_OK(run_grouped(&c));
        expect_grouped(&c);
        EXPECT(is_poison(slice(buffer, 2, N, N + 1, 1)));
    }
}

static void
test_grouped_bf16(void)
{
    const grouped c = {.o = fill_normal(ARRAY(bf16, 5, GROUPS, 201), 1.0),
                       .weight = fill_normal(ARRAY(bf16, GROUPS, 130, 201), 1.0),
                       .out = ARRAY(bf16, 5, GROUPS, 130)};
    EXPECT_OK(run_grouped(&c));
    expect_grouped(&c);
    const grouped one = {.o = fill_normal(ARRAY(bf16, 3, GROUPS, 40), 1.0),
                         .weight = fill_normal(ARRAY(bf16, GROUPS, 1, 40), 1.0),
                         .out = ARRAY(bf16, 3, GROUPS, 1)};
    EXPECT_OK(run_grouped(&one));
    expect_grouped(&one);
}

/* No tokens, no outputs; and no values, whose sums are 0. */
static void
test_grouped_empty(void)
{
    const int64_t sizes[][3] = {{0, 4, 128}, {3, 0, 128}, {3, 4, 0}};
    for (int i = 0; i < 3; i++) {
        const int64_t T = sizes[i][0];
        const int64_t N = sizes[i][1];
        const int64_t R = sizes[i][2];
        const grouped c = {.o = fill_normal(ARRAY(e4m3, T, GROUPS, R), 1.0),
                           .o_scale = fill_normal(ARRAY(fp32, T, GROUPS, R / 128), 1.0),
                           .weight = fill_normal(ARRAY(e4m3, GROUPS, N, R), 1.0),
                           .weight_scale = fill_normal(ARRAY(fp32, GROUPS, N > 0, R / 128), 1.0),
                           .out = ARRAY(bf16, T, GROUPS, N)};
        EXPECT_OK(run_grouped(&c));
        expect_grouped(&c);
    }
}

static void
test_grouped_errors(void)
{
    const array *const bf16_o = ARRAY(bf16, 3, 2, 128);
    grouped c = {.o = ARRAY(e4m3, 3, 2, 128),
                 .weight = ARRAY(e4m3, 2, 4, 128),
                 .weight_scale = ARRAY(fp32, 2, 1, 1),
                 .out = ARRAY(bf16, 3, 2, 4)};
    EXPECT_FAIL(run_grouped(&c), SMLA_ERROR_VALUE,
                "grouped_output_projection: `o_scale` must be given, got none: an e4m3 `o` has "
                "scales");
    c.o_scale = ARRAY(int32, 3, 2, 1);
    EXPECT_FAIL(run_grouped(&c), SMLA_ERROR_VALUE,
                "`o` must have a multiple of 512 values per group, got 128");
    c.o = bf16_o;
    EXPECT_FAIL(run_grouped(&c), SMLA_ERROR_VALUE,
                "`o_scale` must be None, got an array: a bf16 `o` has no scales");
    c.o_scale = NULL;
    EXPECT_FAIL(run_grouped(&c), SMLA_ERROR_TYPE, "`weight` must be bfloat16, got float8_e4m3fn");
    c.weight = ARRAY(bf16, 2, 4, 128);
    EXPECT_FAIL(run_grouped(&c), SMLA_ERROR_VALUE, "`weight_scale` must be None, got an array");
    c.weight_scale = NULL;
    c.o = ARRAY(bf16, 3, 129, 1);
    EXPECT_FAIL(run_grouped(&c), SMLA_ERROR_VALUE, "`o` must have 1 to 128 groups, got 129");
}

/* ---- Quantisation -------------------------------------------------------------------------- */

static smla_status
run_quant(const array *x, const array *out, const array *scale)
{
    const smla_dynamic_per_tensor_quant_args args = {.struct_size = sizeof args,
                                                     .x = &x->tensor,
                                                     .out = &out->tensor,
                                                     .scale = &scale->tensor};
    return smla_dynamic_per_tensor_quant(&args, &error);
}

/* x and out are vectors [n]. */
static void
expect_quantised(const array *x, const array *out, const array *scale)
{
    double amax = 1e-10;
    for (int64_t i = 0; i < x->shape[0]; i++) {
        const double value = fabs(GET(x, i));
        amax = isnan(value) ? amax : fmax(amax, fmin(value, FLT_MAX));
    }
    const float wanted = (float)((double)(float)amax / 448.0);
    EXPECT_NEAR(read_value(fp32, scale->tensor.data), wanted, 0.0);
    for (int64_t i = 0; i < x->shape[0]; i++) {
        uint8_t code;
        memcpy(&code, AT(out, i), sizeof code);
        EXPECT_EQ(code, nearest_e4m3((float)(GET(x, i) / (double)wanted)));
    }
}

static void
test_quant(void)
{
    const DLDataType dtypes[] = {bf16, fp32};
    for (int i = 0; i < 2; i++) {
        array *x = fill_normal(ARRAY(dtypes[i], 20000), 7.0);
        const array *out = slice(ARRAY(uint8, 40000), 0, 1, 40000, 2);
        const array *scale = ARRAY(fp32, 1);
        EXPECT_OK(run_quant(x, out, scale));
        expect_quantised(x, out, scale);
        x = slice(x, 0, 0, 20000, -3); /* backwards */
        out = ARRAY(e4m3, x->shape[0]);
        EXPECT_OK(run_quant(x, out, scale));
        expect_quantised(x, out, scale);
    }
}

static void
test_quant_special_values(void)
{
    array *x = fill(ARRAY(fp32, 5), 0.0);
    const array *out = ARRAY(uint8, 5);
    const array *scale = ARRAY(fp32, 1);
    SET(x, -0.0, 1);
    EXPECT_OK(run_quant(x, out, scale));
    expect_quantised(x, out, scale);
    SET(x, NAN, 0);
    SET(x, 1e-12, 2);
    EXPECT_OK(run_quant(x, out, scale));
    expect_quantised(x, out, scale);
    SET(x, -INFINITY, 3);
    EXPECT_OK(run_quant(x, out, scale));
    expect_quantised(x, out, scale);
}

/* Any rank up to 8; a scalar, and an array without elements. */
static void
test_quant_ranks(void)
{
    const array *scale = ARRAY(fp32, 1, 1, 1);
    array *x = fill_normal(ARRAY(bf16, 2, 1, 3, 1, 2, 1, 1, 2), 1.0);
    array *out = ARRAY(uint8, 2, 1, 3, 1, 2, 1, 1, 2);
    EXPECT_OK(run_quant(x, out, scale));
    x->tensor.ndim = out->tensor.ndim = 1; /* the same elements in one row */
    x->shape[0] = out->shape[0] = 24;
    x->strides[0] = out->strides[0] = 1;
    expect_quantised(x, out, scale);
    EXPECT_OK(run_quant(fill(new_array(fp32, 0, NULL), 3.0), new_array(e4m3, 0, NULL),
                        new_array(fp32, 0, NULL)));
    const array *none = ARRAY(fp32, 1);
    EXPECT_OK(run_quant(ARRAY(bf16, 4, 0, 2), ARRAY(uint8, 4, 0, 2), none));
    EXPECT_NEAR(GET(none, 0), (float)((double)1e-10f / 448.0), 0.0);
    EXPECT_FAIL(run_quant(x, ARRAY(uint8, 23), scale), SMLA_ERROR_VALUE,
                "dynamic_per_tensor_quant: `out` must have the shape of `x`");
    EXPECT_FAIL(run_quant(x, out, ARRAY(fp32, 2)), SMLA_ERROR_VALUE, "`scale` must hold one value");
}

/* Rows with gaps in x, in out or in both. Gaps are whole rows, so that strides divide evenly. */
static void
test_quant_padded(void)
{
    enum { ROWS = 5, COLUMNS = 8 };
    for (int gaps = 0; gaps < 9; gaps++) {
        const int64_t x_gap = gaps % 3 * COLUMNS;
        const int64_t out_gap = gaps / 3 * COLUMNS;
        const array *wide = fill_normal(ARRAY(fp32, ROWS, COLUMNS + x_gap), 1.0);
        const array *wide_out = ARRAY(uint8, ROWS, COLUMNS + out_gap);
        const array *x = slice(wide, 1, 0, COLUMNS, 1);
        const array *out = slice(wide_out, 1, 0, COLUMNS, 1);
        const array *scale = ARRAY(fp32, 1);
        array *flat = ARRAY(fp32, ROWS * COLUMNS);
        const array *flat_out = ARRAY(uint8, ROWS * COLUMNS);
        for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
            SET(flat, GET(x, i / COLUMNS, i % COLUMNS), i);
        }
        EXPECT_OK(run_quant(x, out, scale));
        EXPECT_OK(run_quant(flat, flat_out, ARRAY(fp32, 1)));
        expect_quantised(flat, flat_out, scale);
        for (int64_t i = 0; i < ROWS * COLUMNS; i++) {
            EXPECT_EQ(GET(out, i / COLUMNS, i % COLUMNS), GET(flat_out, i));
        }
        EXPECT(out_gap == 0 || is_poison(slice(wide_out, 1, COLUMNS, COLUMNS + out_gap, 1)));
    }
}

/* Dimensions that continue each other in both arrays become one. */
static void
test_quant_dims(void)
{
    static const struct {
        int64_t x_strides[4], out_strides[4];
        int ndim;
        int64_t shape[4];
    } rows[] = {
        {{24, 8, 8, 1}, {24, 8, 8, 1}, 1, {48}},
        {{48, 16, 7, 2}, {24, 8, 7, 1}, 1, {48}},      /* gaps behind elements of x */
        {{24, 8, 8, 1}, {48, 16, 16, 1}, 2, {6, 8}},   /* gaps behind rows of out */
        {{48, 16, 16, 1}, {24, 8, 8, 1}, 2, {6, 8}},   /* gaps behind rows of x */
        {{48, 16, 16, 1}, {96, 32, 32, 1}, 2, {6, 8}}, /* gaps behind rows of both */
        {{25, 8, 8, 1}, {24, 8, 8, 1}, 2, {2, 24}},    /* gaps behind planes of x */
        {{-24, -8, -8, -1}, {24, 8, 8, 1}, 1, {48}},
        {{24, -8, 8, 1}, {24, 8, 8, 1}, 3, {2, 3, 8}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        smla_quant_params params = {.ndim = 4, .shape = {2, 3, 1, 8}};
        memcpy(params.x_strides, rows[i].x_strides, sizeof rows[i].x_strides);
        memcpy(params.out_strides, rows[i].out_strides, sizeof rows[i].out_strides);
        const smla_quant_params merged = smla_merge_dims(&params);
        EXPECT_EQ(merged.ndim, rows[i].ndim);
        for (int dim = 0; dim < rows[i].ndim; dim++) {
            EXPECT_EQ(merged.shape[dim], rows[i].shape[dim]);
        }
        EXPECT_EQ(merged.x_strides[merged.ndim - 1], rows[i].x_strides[3]);
        EXPECT_EQ(merged.out_strides[merged.ndim - 1], rows[i].out_strides[3]);
    }
}

/* ---- Weights that absorb others ------------------------------------------------------------ */

/* Element (row, head, n) of a weight with an optional scale per 128 x 128 block, in fp32. */
static double
dequantise(const array *x, const array *scale, bool is_transposed, int64_t row, int64_t column)
{
    const int64_t i = is_transposed ? column : row, j = is_transposed ? row : column;
    const double value = GET(x, i, j);
    return (double)(float)(scale == NULL ? value : value * GET(scale, i / TILE, j / TILE));
}

/* Compares a product [rows, H * L], or its transpose, with fp64. */
static void
expect_absorbed(const array *x, const array *x_scale, bool x_is_transposed, const array *w,
                const array *out, bool out_is_transposed)
{
    const int64_t latents = w->shape[0], heads = w->shape[1], values = w->shape[2];
    const int64_t rows = out->shape[out_is_transposed ? 1 : 0];
    const int64_t head_columns = x->shape[x_is_transposed ? 0 : 1] / heads;
    const bool is_fp32 = out->tensor.dtype.bits == 32;
    for (int64_t at = 0; at < rows * heads * latents; at++) {
        const int64_t row = at / (heads * latents), column = at % (heads * latents);
        const int64_t head = column / latents, latent = column % latents;
        double sum = 0.0, size = 0.0;
        for (int64_t n = 0; n < values; n++) {
            const double product =
                dequantise(x, x_scale, x_is_transposed, row, head * head_columns + n) *
                GET(w, latent, head, n);
            sum += product;
            size += fabs(product);
        }
        const double got = out_is_transposed ? GET(out, column, row) : GET(out, row, column);
        EXPECT_NEAR(got, sum, (is_fp32 ? 0.0 : 0x1p-8 * fabs(sum)) + 0x1p-17 * size);
    }
}

static void
test_absorb(void)
{
    const DLDataType dtypes[] = {bf16, fp16, fp32, e4m3};
    for (int i = 0; i < 16; i++) {
        const DLDataType type = dtypes[i % 4];
        const bool is_transposed = i / 4 % 2 != 0, is_fp32 = i / 8 != 0;
        array *x = is_transposed ? ARRAY(type, 2 * 150, 11) : ARRAY(type, 11, 2 * 150);
        fill_normal(x, 1.0);
        array *scale = type.bits != 8  ? NULL
                       : is_transposed ? ARRAY(fp32, 3, 1)
                                       : ARRAY(fp32, 1, 3);
        const array *w = fill_normal(ARRAY(is_fp32 ? fp32 : bf16, 9, 2, 150), 1.0);
        const array *part = slice(w, 2, 0, 130, 1); /* R is 20 */
        const array *out = ARRAY(is_fp32 ? fp32 : bf16, 18, 11);
        const array *wide = ARRAY(is_fp32 ? fp32 : bf16, 11, 20);
        const array *outputs = slice(wide, 1, 0, 18, 1);
        if (scale != NULL) {
            fill_normal(scale, 0.1);
        }
        const smla_absorb_q_proj_args queries = {.struct_size = sizeof queries,
                                                 .q_proj = &x->tensor,
                                                 .q_scale = scale == NULL ? NULL : &scale->tensor,
                                                 .w_uk = &part->tensor,
                                                 .out = &out->tensor};
        EXPECT_OK(smla_absorb_q_proj(&queries, &error));
        expect_absorbed(x, scale, is_transposed, part, out, true);
        const smla_absorb_o_proj_args last = {.struct_size = sizeof last,
                                              .o_proj = &x->tensor,
                                              .o_scale = scale == NULL ? NULL : &scale->tensor,
                                              .w_uv = &w->tensor,
                                              .out = &outputs->tensor};
        EXPECT_OK(smla_absorb_o_proj(&last, &error));
        expect_absorbed(x, scale, is_transposed, w, outputs, false);
        EXPECT(is_poison(slice(wide, 1, 18, 20, 1)));
        free_arrays("test_absorb");
    }
}

static void
run_kernel_tests(void)
{
    RUN(test_absorb);
    RUN(test_k_up_proj);
    RUN(test_v_up_proj);
    RUN(test_kv_up_proj);
    RUN(test_projected_subnormals);
    RUN(test_grouped_e4m3);
    RUN(test_grouped_bf16);
    RUN(test_grouped_empty);
    RUN(test_quant);
    RUN(test_quant_special_values);
    RUN(test_quant_ranks);
    RUN(test_quant_padded);
}

int
main(void)
{
    RUN(test_split);
    RUN(test_split_blocks);
    RUN(test_split_strided);
    RUN(test_split_errors);
    RUN(test_grouped_errors);
    RUN(test_quant_dims);
    run_on_every_instruction_set(run_kernel_tests);
    return report("test_absorption");
}
