/* test_indexer.c: the operators that choose keys, on every instruction set: the indexer's queries
 * byte for byte.
 */
#include "instruction_sets.h"

#include "core/numeric.h"

/* ---- fused_indexer_q_rope_quant ------------------------------------------------------------ */

typedef struct queries {
    array *q, *weights, *positions, *cos_sin, *out, *out_weights, *out_scale;
} queries;

static smla_status
quantize(const queries *c)
{
    const smla_index_query_args args = {
        .struct_size = sizeof args,
        .q = &c->q->tensor,
        .weights = &c->weights->tensor,
        .positions = &c->positions->tensor,
        .cos_sin = &c->cos_sin->tensor,
        .out = &c->out->tensor,
        .out_weights = &c->out_weights->tensor,
        .out_scale = c->out_scale == NULL ? NULL : &c->out_scale->tensor,
        .softmax_scale = 0.5,
        .head_scale = 0.25,
    };
    return smla_fused_indexer_q_rope_quant(&args, &error);
}

static queries
make_queries(int64_t tokens, int64_t heads, bool is_fp4)
{
    const queries c = {.q = fill_normal(ARRAY(bf16, tokens, heads, 128), 3.0),
                       .weights = fill_normal(ARRAY(fp32, tokens, heads), 1.0),
                       .positions = ARRAY(int64, tokens),
                       .cos_sin = ARRAY(fp32, 20, 64),
                       .out = ARRAY(uint8, tokens, heads, is_fp4 ? 64 : 128),
                       .out_weights = ARRAY(fp32, tokens, heads),
                       .out_scale = is_fp4 ? ARRAY(uint8, tokens, heads, 4) : NULL};
    for (int64_t t = 0; t < tokens; t++) {
        ((int64_t *)c.positions->tensor.data)[t] = t * 7 % 20;
    }
    for (int64_t t = 0; t < 20; t++) {
        for (int64_t i = 0; i < 32; i++) {
            SET(c.cos_sin, cos(0.3 * (double)(t * (i + 1))), t, i);
            SET(c.cos_sin, sin(0.3 * (double)(t * (i + 1))), t, 32 + i);
        }
    }
    return c;
}

/* Value i of a head after RoPE: each product is rounded, then the sum, then to bf16. */
static float
turned_value(const queries *c, int64_t t, int64_t h, int64_t i)
{
    if (i < 64) {
        return (float)GET(c->q, t, h, i);
    }
    const int64_t position = t * 7 % 20;
    const int64_t pair = (i - 64) / 2;
    const volatile float cos = (float)GET(c->cos_sin, position, pair);
    const volatile float sin = (float)GET(c->cos_sin, position, 32 + pair);
    const volatile float own = (float)GET(c->q, t, h, i) * cos;
    const volatile float other = (float)GET(c->q, t, h, i ^ 1) * sin;
    return smla_bf16_to_float(smla_float_to_bf16(i % 2 == 0 ? own - other : own + other));
}

static void
expect_queries(const queries *c)
{
    const bool is_fp4 = c->out_scale != NULL;
    const int64_t tile = is_fp4 ? 32 : 128;
    for (int64_t row = 0; row < c->q->shape[0] * c->q->shape[1]; row++) {
        const int64_t t = row / c->q->shape[1];
        const int64_t h = row % c->q->shape[1];
        float scale = 1.0f;
        for (int64_t i = 0; i < 128; i++) {
            if (i % tile == 0) {
                float amax = 0.0f;
                for (int64_t k = i; k < i + tile; k++) {
                    amax = fmaxf(amax, fabsf(turned_value(c, t, h, k)));
                }
                scale = is_fp4 ? smla_power_of_two_scale(amax, 6.0f, 0x1.8p-124f)
                               : smla_power_of_two_scale(amax, 448.0f, 1e-4f);
            }
            const float x = turned_value(c, t, h, i) / scale;
            if (is_fp4) {
                const uint8_t byte = (uint8_t)GET(c->out, t, h, i / 2);
                EXPECT_EQ(byte >> 4 * (i % 2) & 15, smla_float_to_e2m1(x));
                EXPECT_NEAR(smla_ue8m0_to_float((uint8_t)GET(c->out_scale, t, h, i / 32)), scale,
                            0.0);
            } else {
                EXPECT_EQ((uint8_t)GET(c->out, t, h, i), smla_float_to_e4m3(x));
            }
        }
        const volatile float weight = (float)GET(c->weights, t, h) * 0.125f;
        EXPECT_NEAR(GET(c->out_weights, t, h), is_fp4 ? weight : weight * scale, 0.0);
    }
}

static void
test_queries(void)
{
    static const int64_t shapes[][2] = {{1, 1}, {5, 3}, {70, 4}};
    for (int i = 0; i < 6; i++) {
        const queries c = make_queries(shapes[i / 2][0], shapes[i / 2][1], i % 2 == 1);
        EXPECT_OK(quantize(&c));
        expect_queries(&c);
        free_arrays("test_queries");
    }
}

static void
test_bad_queries(void)
{
    queries c = make_queries(3, 2, true);
    ((int64_t *)c.positions->tensor.data)[2] = 20;
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE,
                "fused_indexer_q_rope_quant: `positions` must be rows of `cos_sin`, which has 20");
    EXPECT(is_poison(c.out) && is_poison(c.out_weights) && is_poison(c.out_scale));
    c.out_scale = NULL;
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE, "`out` must have shape [3, 2, 128]");
    c.q = slice(c.q, 1, 0, 0, 1);
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE, "`q` must have at least one head, got 0");
}

static void
tests(void)
{
    RUN(test_queries);
    RUN(test_bad_queries);
}

int
main(void)
{
    run_on_every_instruction_set(tests);
    return report("test_indexer");
}
