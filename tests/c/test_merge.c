/* test_merge.c: merges of two and of many parts compared with doubles, also where some are empty.
 */
#include "testing.h"

typedef struct merge {
    array *out_a, *lse_a, *out_b, *lse_b, *out, *lse, *sink;
    int64_t without_context;
} merge;

static smla_status
run_merge(const merge *m)
{
    const smla_merge_attn_states_args args = {.struct_size = sizeof args,
                                              .out_a = &m->out_a->tensor,
                                              .lse_a = &m->lse_a->tensor,
                                              .out_b = &m->out_b->tensor,
                                              .lse_b = &m->lse_b->tensor,
                                              .out = &m->out->tensor,
                                              .lse = &m->lse->tensor,
                                              .attn_sink =
                                                  m->sink == NULL ? NULL : &m->sink->tensor,
                                              .tokens_without_context = m->without_context};
    return smla_merge_attn_states(&args, &error);
}

static merge
make_merge(DLDataType dtype, int64_t tokens, int64_t heads, int64_t value_dim)
{
    return (merge){.out_a = fill_normal(ARRAY(dtype, tokens, heads, value_dim), 1.0),
                   .lse_a = fill_normal(ARRAY(fp32, tokens, heads), 5.0),
                   .out_b = fill_normal(ARRAY(dtype, tokens, heads, value_dim), 1.0),
                   .lse_b = fill_normal(ARRAY(fp32, tokens, heads), 5.0),
                   .out = ARRAY(dtype, tokens, heads, value_dim),
                   .lse = ARRAY(fp32, tokens, heads)};
}

/* The bound: rounded weights, two products and a sum in fp32, and the rounding of the output. */
static void
expect_merged(const merge *m)
{
    const bool is_bf16 = m->out->tensor.dtype.code == kDLBfloat;
    for (int64_t t = 0; t < m->out->shape[0]; t++) {
        for (int64_t h = 0; h < m->out->shape[1]; h++) {
            const double lse_a = GET(m->lse_a, t, h);
            const double lse_b = GET(m->lse_b, t, h);
            const double top = fmax(lse_a, lse_b);
            const double lse = top + log(exp(lse_a - top) + exp(lse_b - top));
            const double factor = m->sink == NULL ? 1.0 : 1.0 / (1.0 + exp(GET(m->sink, h) - lse));
            EXPECT_NEAR(GET(m->lse, t, h), lse, 0x1p-23 * fabs(lse) + 1e-12);
            for (int64_t i = 0; i < m->out->shape[2]; i++) {
                const double a = factor * exp(lse_a - lse) * GET(m->out_a, t, h, i);
                const double b = factor * exp(lse_b - lse) * GET(m->out_b, t, h, i);
                const double rounding = is_bf16 ? 0x1p-8 * fabs(a + b) : 0.0;
                EXPECT_NEAR(GET(m->out, t, h, i), a + b,
                            3.0 * 0x1p-23 * (fabs(a) + fabs(b)) + rounding);
            }
        }
    }
}

static void
test_values(void)
{
    const DLDataType dtypes[] = {bf16, fp32};
    for (int i = 0; i < 2; i++) {
        const merge small = make_merge(dtypes[i], 3, 2, 5);
        EXPECT_OK(run_merge(&small));
        expect_merged(&small);
        const merge large = make_merge(dtypes[i], 40, 8, 512);
        EXPECT_OK(run_merge(&large));
        expect_merged(&large);
    }
}

/* A sink per head, and more sinks than heads. */
static void
test_sinks(void)
{
    const DLDataType dtypes[] = {bf16, fp32};
    for (int i = 0; i < 2; i++) {
        merge m = make_merge(dtypes[i], 5, 3, 40);
        m.sink = slice(fill_normal(ARRAY(fp32, 10), 3.0), 0, 0, 10, 3);
        SET(m.sink, -INFINITY, 1);
        SET(m.sink, INFINITY, 2);
        EXPECT_OK(run_merge(&m));
        expect_merged(&m);
    }
}

static void
test_strides(void)
{
    merge m = make_merge(bf16, 3, 4, 6);
    m.out_a = transpose(fill_normal(ARRAY(bf16, 4, 3, 6), 1.0), 0, 1);
    m.lse_b = transpose(fill_normal(ARRAY(fp32, 4, 3), 1.0), 0, 1);
    array *buffer = ARRAY(bf16, 3, 4, 9);
    m.out = slice(buffer, 2, 3, 9, 1);
    m.lse = transpose(ARRAY(fp32, 4, 3), 0, 1);
    EXPECT_OK(run_merge(&m));
    expect_merged(&m);
    EXPECT(is_poison(slice(buffer, 2, 0, 3, 1)));
}

/* An empty state adds nothing, whatever its values are. Some kernels mark it by an lse of +inf. */
static void
test_empty_sides(void)
{
    const double empty[] = {-INFINITY, INFINITY};
    for (int i = 0; i < 2; i++) {
        merge m = make_merge(fp32, 3, 1, 4);
        SET(m.lse_a, empty[i], 0, 0);
        SET(m.lse_b, empty[i], 1, 0);
        SET(m.lse_a, empty[1 - i], 2, 0);
        SET(m.lse_b, empty[i], 2, 0);
        SET(m.out_a, NAN, 0, 0, 2);
        SET(m.out_b, NAN, 1, 0, 3);
        EXPECT_OK(run_merge(&m));
        for (int64_t k = 0; k < 4; k++) {
            EXPECT_NEAR(GET(m.out, 0, 0, k), GET(m.out_b, 0, 0, k), 0.0);
            EXPECT_NEAR(GET(m.out, 1, 0, k), GET(m.out_a, 1, 0, k), 0.0);
            EXPECT_NEAR(GET(m.out, 2, 0, k), GET(m.out_a, 2, 0, k), 0.0);
        }
        EXPECT_NEAR(GET(m.lse, 0, 0), GET(m.lse_b, 0, 0), 0.0);
        EXPECT_NEAR(GET(m.lse, 1, 0), GET(m.lse_a, 1, 0), 0.0);
        EXPECT_NEAR(GET(m.lse, 2, 0), -INFINITY, 0.0);
    }
}

/* Tokens without context take part b, whatever part a holds, and in place as well. */
static void
test_tokens_without_context(void)
{
    merge m = make_merge(bf16, 4, 2, 40);
    merge same = m;
    same.out = same.out_b;
    same.lse = same.lse_b;
    m.without_context = same.without_context = 3;
    SET(m.lse_a, NAN, 2, 1);
    SET(m.out_a, NAN, 1, 0, 7);
    EXPECT_OK(run_merge(&m));
    for (int64_t t = 1; t < 4; t++) {
        EXPECT_NEAR(GET(m.out, t, 0, 7), GET(m.out_b, t, 0, 7), 0.0);
        EXPECT_NEAR(GET(m.lse, t, 1), GET(m.lse_b, t, 1), 0.0);
    }
    EXPECT_OK(run_merge(&same));
    for (int64_t i = 0; i < 40; i++) {
        EXPECT_NEAR(GET(same.out, 0, 1, i), GET(m.out, 0, 1, i), 0.0);
        EXPECT_NEAR(GET(same.out, 3, 0, i), GET(m.out, 3, 0, i), 0.0);
    }
    m.without_context = 5;
    EXPECT_FAIL(run_merge(&m), SMLA_ERROR_VALUE,
                "`prefill_tokens_with_context` must be 0 to the 4 tokens of `out_a`, got -1");
    m.without_context = INT64_MIN;
    EXPECT_FAIL(run_merge(&m), SMLA_ERROR_VALUE, "of `out_a`, got 9223372036854775812");
    m.without_context = INT64_MAX;
    EXPECT_FAIL(run_merge(&m), SMLA_ERROR_VALUE, "of `out_a`, got -9223372036854775803");
}

/* Where the lse are far apart, the smaller state vanishes without overflow. */
static void
test_extreme_lse(void)
{
    merge m = make_merge(fp32, 2, 1, 4);
    SET(m.lse_a, 3e38, 0, 0);
    SET(m.lse_b, -3e38, 0, 0);
    SET(m.lse_a, -1e4, 1, 0);
    SET(m.lse_b, -1e4, 1, 0);
    EXPECT_OK(run_merge(&m));
    expect_merged(&m);
}

static void
test_nothing_to_do(void)
{
    const merge none = make_merge(bf16, 0, 4, 512);
    EXPECT_OK(run_merge(&none));
    const merge no_values = make_merge(bf16, 2, 2, 0);
    EXPECT_OK(run_merge(&no_values));
    EXPECT(!is_poison(no_values.lse));
}

enum { PARTS = 5 };

typedef struct partials {
    array *outs[PARTS], *lses[PARTS], *out, *lse;
    const DLTensor *out_list[PARTS], *lse_list[PARTS];
} partials;

static partials
make_partials(DLDataType dtype, int64_t tokens, int64_t heads, int64_t value_dim)
{
    partials m = {.out = ARRAY(dtype, tokens, heads, value_dim), .lse = ARRAY(fp32, tokens, heads)};
    for (int i = 0; i < PARTS; i++) {
        m.outs[i] = fill_normal(ARRAY(dtype, tokens, heads, value_dim), 1.0);
        m.lses[i] = fill_normal(ARRAY(fp32, tokens, heads), 5.0);
        m.out_list[i] = &m.outs[i]->tensor;
        m.lse_list[i] = &m.lses[i]->tensor;
    }
    return m;
}

static smla_status
run_partials(const partials *m, int64_t count)
{
    const smla_merge_attn_partials_args args = {.struct_size = sizeof args,
                                                .outs = {.list = m->out_list, .count = count},
                                                .lses = {.list = m->lse_list, .count = count},
                                                .out = &m->out->tensor,
                                                .lse = &m->lse->tensor};
    return smla_merge_attn_partials(&args, &error);
}

/* The parts of a list, of which the second is empty. */
static void
test_lists(void)
{
    const partials m = make_partials(fp32, 40, 3, 70);
    fill(m.lses[1], (double)INFINITY);
    fill(m.outs[1], (double)NAN);
    EXPECT_OK(run_partials(&m, PARTS));
    for (int64_t t = 0; t < 40; t++) {
        for (int64_t h = 0; h < 3; h++) {
            double sum = 0.0;
            for (int i = 0; i < PARTS; i++) {
                sum += i == 1 ? 0.0 : exp(GET(m.lses[i], t, h));
            }
            EXPECT_NEAR(GET(m.lse, t, h), log(sum), 0x1p-22 * (1.0 + fabs(log(sum))));
            for (int64_t d = 0; d < 70; d++) {
                double value = 0.0;
                for (int i = 0; i < PARTS; i++) {
                    value +=
                        i == 1 ? 0.0 : exp(GET(m.lses[i], t, h)) / sum * GET(m.outs[i], t, h, d);
                }
                EXPECT_NEAR(GET(m.out, t, h, d), value, 0x1p-18);
            }
        }
    }
}

static void
test_bad_lists(void)
{
    partials m = make_partials(bf16, 4, 3, 8);
    EXPECT_FAIL(run_partials(&m, 0), SMLA_ERROR_VALUE, "`outs` must have 1 to 64 parts, got 0");
    EXPECT_FAIL(run_partials(&m, 65), SMLA_ERROR_VALUE, "`outs` must have 1 to 64 parts, got 65");
    m.out_list[3] = NULL;
    EXPECT_FAIL(run_partials(&m, PARTS), SMLA_ERROR_VALUE, "`outs[3]` must be given, got none");
    EXPECT_OK(run_partials(&m, 3));
    m.out_list[3] = &ARRAY(bf16, 4, 2, 8)->tensor;
    EXPECT_FAIL(run_partials(&m, PARTS), SMLA_ERROR_VALUE, "`outs[3]` must have shape [4, 3, 8]");
    m.out_list[3] = &m.out->tensor;
    EXPECT_FAIL(run_partials(&m, PARTS), SMLA_ERROR_VALUE, "`out` must not overlap `outs[3]`");
    m.out_list[3] = &m.outs[3]->tensor;
    m.lse_list[4] = &m.lse->tensor;
    EXPECT_FAIL(run_partials(&m, PARTS), SMLA_ERROR_VALUE, "`lse` must not overlap `lses[4]`");
    const smla_merge_attn_partials_args none = {.struct_size = sizeof none};
    EXPECT_FAIL(smla_merge_attn_partials(&none, &error), SMLA_ERROR_VALUE,
                "`outs` must be given, got none");
}

int
main(void)
{
    RUN(test_values);
    RUN(test_sinks);
    RUN(test_strides);
    RUN(test_empty_sides);
    RUN(test_tokens_without_context);
    RUN(test_extreme_lse);
    RUN(test_nothing_to_do);
    RUN(test_lists);
    RUN(test_bad_lists);
    return report("test_merge");
}
