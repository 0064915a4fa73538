/* test_tensor_quant.c: dynamic_per_tensor_quant, code by code, for any rank and strides. */
#include "instruction_sets.h"

#include <float.h>

#include "core/quant_dims.h"
#include "reference.h"

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

static void
run_kernel_tests(void)
{
    RUN(test_quant);
    RUN(test_quant_special_values);
    RUN(test_quant_ranks);
    RUN(test_quant_padded);
}

int
main(void)
{
    RUN(test_quant_dims);
    run_on_every_instruction_set(run_kernel_tests);
    return report("test_tensor_quant");
}
