/* test_absorption.c: split_kv_b_proj, which gives W_UK and W_UV, and absorb_q_proj and
 * absorb_o_proj, which multiply other weights by them. */
#include "instruction_sets.h"

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
    w.w_uk = ARRAY(bf16, 7, 3, 12);
    EXPECT_FAIL(run_split(&w), SMLA_ERROR_VALUE,
                "`w_uk` must have 512 rows, or 512 or 60 like the weight, got [7, 3, 12]");
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
}

int
main(void)
{
    RUN(test_split);
    RUN(test_split_blocks);
    RUN(test_split_strided);
    RUN(test_split_errors);
    run_on_every_instruction_set(run_kernel_tests);
    return report("test_absorption");
}
