/* test_projections.c: k_up_proj, v_up_proj, kv_up_proj and grouped_output_projection beside sums in
 * double. */
#include "instruction_sets.h"

#include "reference.h"

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

static void
run_kernel_tests(void)
{
    RUN(test_k_up_proj);
    RUN(test_v_up_proj);
    RUN(test_kv_up_proj);
    RUN(test_projected_subnormals);
    RUN(test_grouped_e4m3);
    RUN(test_grouped_bf16);
    RUN(test_grouped_empty);
}

int
main(void)
{
    RUN(test_grouped_errors);
    run_on_every_instruction_set(run_kernel_tests);
    return report("test_projections");
}
