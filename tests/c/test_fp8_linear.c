/* test_fp8_linear.c: scaled_quantize, byte for byte with single operations of numeric.h, and
 * fp8_linear beside sums in double.
 */
#include "instruction_sets.h"

/* ---- scaled_quantize ----------------------------------------------------------------------- */

typedef struct quantized {
    const array *x;
    const array *out;
    const array *descale;
    int64_t group_rows;
    int64_t group_columns;
} quantized;

static smla_status
quantize(const quantized *c)
{
    const smla_scaled_quantize_args args = {.struct_size = sizeof args,
                                            .x = &c->x->tensor,
                                            .out = &c->out->tensor,
                                            .descale = &c->descale->tensor,
                                            .group_rows = c->group_rows,
                                            .group_columns = c->group_columns};
    return smla_scaled_quantize(&args, &error);
}

static int64_t
size_of_group(int64_t size, int64_t axis)
{
    return size == -1 ? axis : size;
}

/* Compares the group at row i, column j of the scales. */
static void
expect_group(const quantized *c, int64_t i, int64_t j)
{
    const int64_t m = size_of_group(c->group_rows, c->x->shape[0]);
    const int64_t n = size_of_group(c->group_columns, c->x->shape[1]);
    float amax = 1e-12f;
    for (int64_t k = 0; k < m * n; k++) {
        const float magnitude = smla_finite_abs((float)GET(c->x, i * m + k / n, j * n + k % n));
        amax = magnitude > amax ? magnitude : amax;
    }
    const float factor = SMLA_E4M3_MAX / amax;
    EXPECT_EQ((float)GET(c->descale, i, j), amax / SMLA_E4M3_MAX);
    for (int64_t k = 0; k < m * n; k++) {
        const float x = (float)GET(c->x, i * m + k / n, j * n + k % n);
        EXPECT_EQ(GET(c->out, i * m + k / n, j * n + k % n), smla_float_to_e4m3(x * factor));
    }
}

static void
test_every_group(void)
{
    const DLDataType dtypes[] = {bf16, fp16, fp32};
    const struct {
        int64_t rows, columns, group_rows, group_columns;
    } sizes[] = {{3, 256, 1, 128}, {3, 200, 1, -1},    {6, 70, -1, -1}, {6, 70, -1, 1},
                 {6, 70, 3, 7},    {256, 64, 128, 64}, {1, 1, 1, 1},    {2, 40, 1, 4}};
    for (int i = 0; i < 24; i++) {
        const int64_t M = sizes[i % 8].rows, N = sizes[i % 8].columns;
        const int64_t m = size_of_group(sizes[i % 8].group_rows, M);
        const int64_t n = size_of_group(sizes[i % 8].group_columns, N);
        /* Rows of x and out have gaps; the scales are stored as columns. */
        quantized c = {.x = slice(fill_normal(ARRAY(dtypes[i / 8], M, N + 3), 2.0), 1, 0, N, 1),
                       .out = slice(ARRAY(uint8, M, N + 5), 1, 0, N, 1),
                       .descale = transpose(ARRAY(fp32, N / n, M / m), 0, 1),
                       .group_rows = sizes[i % 8].group_rows,
                       .group_columns = sizes[i % 8].group_columns};
        EXPECT_OK(quantize(&c));
        for (int64_t g = 0; g < M / m * (N / n); g++) {
            expect_group(&c, g / (N / n), g % (N / n));
        }
        free_arrays("scaled_quantize");
    }
}

static void
test_groups_that_do_not_fit(void)
{
    quantized c = {.x = fill_normal(ARRAY(fp32, 4, 6), 1.0),
                   .out = ARRAY(uint8, 4, 6),
                   .descale = ARRAY(fp32, 2, 3),
                   .group_rows = 2,
                   .group_columns = 4};
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE,
                "scaled_quantize: `x` must have a multiple of 4 columns (`group`), got 6");
    c.group_rows = 3;
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE,
                "scaled_quantize: `x` must have a multiple of 3 rows (`group`), got 4");
    c.group_rows = 0;
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE,
                "scaled_quantize: `group` must have sizes of at least 1, or -1 for a whole axis, "
                "got 0");
    c.group_rows = 2, c.group_columns = -1;
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE,
                "scaled_quantize: `descale` must have shape [2, 1], got [2, 3]: a scale per group");
}

/* ---- fp8_linear ---------------------------------------------------------------------------- */

enum { TILE = 128, WORKSPACE_BYTES = 1 << 14 };

typedef struct linear {
    const array *x;
    const array *weight;
    const array *descale;
    const array *out;
    const array *workspace;
    int64_t group_rows;
    int64_t group_columns;
} linear;

static smla_status
run(const linear *c)
{
    const smla_fp8_linear_args args = {.struct_size = sizeof args,
                                       .x = &c->x->tensor,
                                       .weight = &c->weight->tensor,
                                       .descale = &c->descale->tensor,
                                       .out = &c->out->tensor,
                                       .workspace = &c->workspace->tensor,
                                       .input_group_rows = c->group_rows,
                                       .input_group_columns = c->group_columns};
    return smla_fp8_linear(&args, &error);
}

/* The weight's scale of output n and value k, by the form of descale. */
static double
scale_of_weight(const linear *c, int64_t n, int64_t k)
{
    const array *const scale = c->descale;
    if (scale->tensor.ndim == 2) {
        return GET(scale, n / TILE, k / TILE);
    }
    return scale->shape[0] == 1 ? GET(scale, 0) : GET(scale, n);
}

static void
expect_product(const linear *c)
{
    const int64_t T = c->x->shape[0], K = c->x->shape[1];
    const int64_t m = size_of_group(c->group_rows, T), g = size_of_group(c->group_columns, K);
    quantized q = {.x = c->x,
                   .out = ARRAY(e4m3, T, K),
                   .descale = ARRAY(fp32, T / m, K / g),
                   .group_rows = c->group_rows,
                   .group_columns = c->group_columns};
    EXPECT_OK(quantize(&q));
    for (int64_t i = 0; i < T * c->out->shape[1]; i++) {
        const int64_t t = i / c->out->shape[1], n = i % c->out->shape[1];
        double sum = 0.0, magnitude = 0.0;
        for (int64_t k = 0; k < K; k++) {
            const double x = GET(q.out, t, k) * GET(q.descale, t / m, k / g);
            const double product = x * GET(c->weight, n, k) * scale_of_weight(c, n, k);
            sum += product;
            magnitude += fabs(product);
        }
        EXPECT_NEAR(GET(c->out, t, n), sum, 0x1p-8 * fabs(sum) + 0x1p-16 * magnitude);
    }
}

/* The four schemes, and 1, 5 and 70 tokens; the last block of outputs is ragged. */
static void
test_every_scheme(void)
{
    const int64_t tokens[] = {1, 5, 70};
    for (int i = 0; i < 12; i++) {
        const int64_t T = tokens[i % 3], N = 131, K = 256;
        linear c = {.x = slice(fill_normal(ARRAY(bf16, T, K + 8), 1.0), 1, 0, K, 1),
                    .weight = fill_normal(ARRAY(e4m3, N, K), 4.0),
                    .out = slice(ARRAY(bf16, T, N + 3), 1, 0, N, 1),
                    .workspace = ARRAY(uint8, WORKSPACE_BYTES * 2),
                    .group_rows = i / 3 == 0 ? -1 : 1,
                    .group_columns = i / 3 == 1 ? TILE : -1};
        c.descale = fill_normal(i / 3 == 1   ? ARRAY(fp32, 2, 2)
                                : i / 3 == 3 ? ARRAY(fp32, N)
                                             : ARRAY(fp32, 1),
                                1.0);
        EXPECT_OK(run(&c));
        expect_product(&c);
        free_arrays("fp8_linear");
    }
}

static void
test_no_scheme(void)
{
    linear c = {.x = fill_normal(ARRAY(bf16, 3, TILE), 1.0),
                .weight = fill_normal(ARRAY(e4m3, 5, TILE), 1.0),
                .descale = fill_normal(ARRAY(fp32, 5), 1.0),
                .out = ARRAY(bf16, 3, 5),
                .workspace = ARRAY(uint8, 3 * TILE),
                .group_rows = -1,
                .group_columns = -1};
    EXPECT_FAIL(run(&c), SMLA_ERROR_VALUE,
                "fp8_linear: `descale` must have the form of one of four schemes, with their "
                "`input_group`: tensor, one value and (-1, -1); block, [1, 1] and (1, 128); "
                "token_tensor, one value and (1, -1); token_channel, [5] or [5, 1] and (1, -1), "
                "got shape [5] and (-1, -1)");
    c.group_rows = 1;
    EXPECT_FAIL(run(&c), SMLA_ERROR_VALUE, "fp8_linear: `workspace` must have at least ");
    c.x = fill_normal(ARRAY(bf16, 3, 100), 1.0);
    EXPECT_FAIL(run(&c), SMLA_ERROR_VALUE,
                "fp8_linear: `x` must have a multiple of 128 values per token, got 100");
}

static void
run_kernel_tests(void)
{
    RUN(test_every_group);
    RUN(test_every_scheme);
}

int
main(void)
{
    RUN(test_groups_that_do_not_fit);
    RUN(test_no_scheme);
    run_on_every_instruction_set(run_kernel_tests);
    return report("test_fp8_linear");
}
