/* test_indexer.c: the operators that choose keys, on every instruction set: the indexer's queries
 * byte for byte, its logits within their bound of sums in double, the choice by them.
 */
#include "instruction_sets.h"

#include "core/interrupt.h"
#include "core/numeric.h"

/* ---- fused_indexer_q_rope_quant ------------------------------------------------------------ */

typedef struct queries {
    array *q, *weights, *positions, *rope_table, *out, *out_weights, *out_scale;
} queries;

static smla_status
quantize(const queries *c)
{
    const smla_index_query_args args = {
        .struct_size = sizeof args,
        .q = &c->q->tensor,
        .weights = &c->weights->tensor,
        .positions = &c->positions->tensor,
        .rope_table = &c->rope_table->tensor,
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
                       .rope_table = ARRAY(fp32, 20, 64),
                       .out = ARRAY(uint8, tokens, heads, is_fp4 ? 64 : 128),
                       .out_weights = ARRAY(fp32, tokens, heads),
                       .out_scale = is_fp4 ? ARRAY(uint8, tokens, heads, 4) : NULL};
    for (int64_t t = 0; t < tokens; t++) {
        ((int64_t *)c.positions->tensor.data)[t] = t * 7 % 20;
    }
    for (int64_t t = 0; t < 20; t++) {
        for (int64_t i = 0; i < 32; i++) {
            SET(c.rope_table, cos(0.3 * (double)(t * (i + 1))), t, i);
            SET(c.rope_table, sin(0.3 * (double)(t * (i + 1))), t, 32 + i);
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
    const volatile float cos = (float)GET(c->rope_table, position, pair);
    const volatile float sin = (float)GET(c->rope_table, position, 32 + pair);
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
    EXPECT_FAIL(
        quantize(&c), SMLA_ERROR_VALUE,
        "fused_indexer_q_rope_quant: `positions` must be rows of `rope_table`, which has 20");
    EXPECT(is_poison(c.out) && is_poison(c.out_weights) && is_poison(c.out_scale));
    c.out_scale = NULL;
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE, "`out` must have shape [3, 2, 128]");
    c.q = slice(c.q, 1, 0, 0, 1);
    EXPECT_FAIL(quantize(&c), SMLA_ERROR_VALUE, "`q` must have at least one head, got 0");
}

/* ---- indexer_logits ------------------------------------------------------------------------ */

typedef struct scores {
    array *q, *weights, *k, *k_scale, *lens, *starts, *q_scale, *table, *req, *out;
    int32_t leaves_rest;
} scores;

static smla_status
score(const scores *c)
{
    const smla_indexer_logits_args args = {
        .struct_size = sizeof args,
        .q = &c->q->tensor,
        .weights = &c->weights->tensor,
        .k_cache = &c->k->tensor,
        .k_scale = c->k_scale == NULL ? NULL : &c->k_scale->tensor,
        .context_lens = &c->lens->tensor,
        .block_table = c->table == NULL ? NULL : &c->table->tensor,
        .req_id_per_token = c->req == NULL ? NULL : &c->req->tensor,
        .starts = c->starts == NULL ? NULL : &c->starts->tensor,
        .q_scale = c->q_scale == NULL ? NULL : &c->q_scale->tensor,
        .out = &c->out->tensor,
        .leaves_rest = c->leaves_rest,
    };
    return smla_indexer_logits(&args, &error);
}

/* Random e4m3 codes of both signs, without NaN. */
static array *
fill_codes(array *a, int64_t most)
{
    for (size_t i = 0; i < a->bytes; i++) {
        ((uint8_t *)a->tensor.data)[i] = (uint8_t)(random_int(most) | random_int(2) << 7);
    }
    return a;
}

/* A token's row of FP8 scores in double, with the sum of magnitudes. */
static void
expect_row(const scores *c, int64_t t, int64_t slot, int64_t column)
{
    double sum = 0.0;
    double magnitude = 0.0;
    for (int64_t h = 0; h < c->q->shape[1]; h++) {
        double dot = 0.0;
        double size = 0.0;
        for (int64_t d = 0; d < 128; d++) {
            const double x = (double)smla_e4m3_to_float((uint8_t)GET(c->q, t, h, d)) *
                             (double)smla_e4m3_to_float((uint8_t)GET(c->k, slot, d)) *
                             GET(c->k_scale, slot);
            dot += x;
            size += fabs(x);
        }
        sum += GET(c->weights, t, h) * (dot > 0.0 ? dot : 0.0);
        magnitude += fabs(GET(c->weights, t, h)) * size;
    }
    EXPECT_NEAR(GET(c->out, t, column), sum, 0x1p-18 * magnitude);
}

static void
test_scores(void)
{
    static const int64_t heads[] = {1, 4, 7, 64};
    for (int i = 0; i < 4; i++) {
        scores c = {.q = fill_codes(ARRAY(uint8, 3, heads[i], 128), 100),
                    .weights = fill_normal(ARRAY(fp32, 3, heads[i]), 1.0),
                    .k = fill_codes(ARRAY(uint8, 150, 128), 90),
                    .k_scale = fill_normal(ARRAY(fp32, 150), 0.5),
                    .lens = ARRAY(int32, 3),
                    .starts = ARRAY(int32, 3),
                    .out = ARRAY(fp32, 3, 140)};
        for (int32_t t = 0; t < 3; t++) {
            ((int32_t *)c.lens->tensor.data)[t] = 130 - 60 * t;
            ((int32_t *)c.starts->tensor.data)[t] = 40 * t;
        }
        EXPECT_OK(score(&c));
        for (int64_t t = 0; t < 3; t++) {
            for (int64_t n = 0; n < 140; n++) {
                const int64_t slot = 40 * t + n;
                if (n < 130 - 60 * t && slot < 150) {
                    expect_row(&c, t, slot, n);
                } else {
                    EXPECT(isinf(GET(c.out, t, n)) && GET(c.out, t, n) < 0.0);
                }
            }
        }
        c.out = ARRAY(fp32, 3, 140);
        c.leaves_rest = 1;
        EXPECT_OK(score(&c));
        EXPECT(is_poison(slice(slice(c.out, 0, 2, 3, 1), 1, 10, 140, 1)));
        free_arrays("test_scores");
    }
}

static void
test_bad_scores(void)
{
    scores c = {.q = fill(ARRAY(uint8, 2, 1, 128), 0.0),
                .weights = fill(ARRAY(fp32, 2, 1), 1.0),
                .k = fill(ARRAY(uint8, 3, 4, 132), 0.0),
                .lens = fill(ARRAY(int32, 2), 5.0),
                .table = fill(ARRAY(int32, 1, 2), 0.0),
                .req = fill(ARRAY(int32, 2), 0.0),
                .out = ARRAY(fp32, 2, 8)};
    ((int32_t *)c.req->tensor.data)[1] = 1;
    EXPECT_FAIL(
        score(&c), SMLA_ERROR_VALUE,
        "indexer_logits: `req_id_per_token` must be 0 to 0 (rows of `block_table`), got 1 at "
        "token 1");
    EXPECT(is_poison(c.out));
    ((int32_t *)c.lens->tensor.data)[1] = 0; /* then its request is not needed */
    EXPECT_OK(score(&c));
    c.starts = c.lens;
    EXPECT_FAIL(score(&c), SMLA_ERROR_VALUE, "`starts` must be None for keys in pages");
}

/* ---- lightning_indexer --------------------------------------------------------------------- */

/* Makes the call for the tokens of `c` with a workspace of so many bytes. `values` may be NULL. */
static smla_status
choose(const scores *c, array *out, array *values, int64_t workspace_bytes)
{
    array *const workspace = ARRAY(uint8, workspace_bytes);
    const smla_lightning_indexer_args args = {
        .struct_size = sizeof args,
        .q = &c->q->tensor,
        .weights = &c->weights->tensor,
        .k_cache = &c->k->tensor,
        .k_scale = &c->k_scale->tensor,
        .context_lens = &c->lens->tensor,
        .k = out->shape[1],
        .starts = &c->starts->tensor,
        .out = &out->tensor,
        .values = values == NULL ? NULL : &values->tensor,
        .max_logits_bytes = 1 << 29,
        .workspace = &workspace->tensor,
    };
    return smla_lightning_indexer(&args, &error);
}

/* The choice and its logits are those of the two calls, for chunks of every size. */
static void
test_choice(void)
{
    enum { TOKENS = 11, KEYS = 150, CHOSEN = 20 };
    scores c = {.q = fill_codes(ARRAY(uint8, TOKENS, 3, 128), 100),
                .weights = fill_normal(ARRAY(fp32, TOKENS, 3), 1.0),
                .k = fill_codes(ARRAY(uint8, KEYS, 128), 90),
                .k_scale = fill_normal(ARRAY(fp32, KEYS), 0.5),
                .lens = ARRAY(int32, TOKENS),
                .starts = fill(ARRAY(int32, TOKENS), 0.0),
                .out = ARRAY(fp32, TOKENS, KEYS)};
    for (int32_t t = 0; t < TOKENS; t++) {
        ((int32_t *)c.lens->tensor.data)[t] = KEYS - 14 * t;
    }
    array *const want = ARRAY(int32, TOKENS, CHOSEN);
    array *const want_values = ARRAY(fp32, TOKENS, CHOSEN);
    const smla_top_k_args select = {.struct_size = sizeof select,
                                    .logits = &c.out->tensor,
                                    .starts = &c.starts->tensor,
                                    .ends = &c.lens->tensor,
                                    .k = CHOSEN,
                                    .out = &want->tensor,
                                    .values = &want_values->tensor};
    EXPECT_OK(score(&c));
    EXPECT_OK(smla_top_k_per_row(&select, &error));
    for (int64_t rows = 1; rows <= TOKENS + 1; rows++) {
        array *const out = ARRAY(int32, TOKENS, CHOSEN);
        array *const values = ARRAY(fp32, TOKENS, CHOSEN);
        EXPECT_OK(choose(&c, out, values, rows * 640 + 128));
        EXPECT(memcmp(out->tensor.data, want->tensor.data, out->bytes) == 0);
        EXPECT(memcmp(values->tensor.data, want_values->tensor.data, values->bytes) == 0);
    }
    EXPECT_FAIL(choose(&c, want, want_values, 639), SMLA_ERROR_VALUE,
                "lightning_indexer: `workspace` must have at least ");
}

/* A call that was ended names its own operator, not one that it is made of. The interrupt has
 * ended the calls before they begin, and never asks. */
static void
test_ended_calls(void)
{
    smla_interrupt interrupt = {.ask_at_ns = INT64_MAX, .is_ended = true};
    const scores c = {.q = fill(ARRAY(uint8, 2, 1, 128), 0.0),
                      .weights = fill(ARRAY(fp32, 2, 1), 1.0),
                      .k = fill(ARRAY(uint8, 9, 128), 0.0),
                      .k_scale = fill(ARRAY(fp32, 9), 1.0),
                      .lens = fill(ARRAY(int32, 2), 9.0),
                      .starts = fill(ARRAY(int32, 2), 0.0),
                      .out = ARRAY(fp32, 2, 9)};
    array *const some = ARRAY(int32, 2, 4);
    array *const all = ARRAY(int32, 2, 9);
    const smla_top_k_args select = {.struct_size = sizeof select,
                                    .logits = &c.out->tensor,
                                    .starts = &c.starts->tensor,
                                    .ends = &c.lens->tensor,
                                    .k = 4,
                                    .out = &some->tensor};
    EXPECT(smla_set_interrupt(&interrupt) == NULL);
    EXPECT_FAIL(score(&c), SMLA_ERROR_RUNTIME, "indexer_logits: the call was interrupted");
    EXPECT_FAIL(smla_top_k_per_row(&select, &error), SMLA_ERROR_RUNTIME,
                "top_k_per_row: the call was interrupted");
    EXPECT_FAIL(choose(&c, some, NULL, 512), SMLA_ERROR_RUNTIME,
                "lightning_indexer: the call was interrupted");
    EXPECT_FAIL(choose(&c, all, NULL, 512), SMLA_ERROR_RUNTIME, /* a choice without scores */
                "lightning_indexer: the call was interrupted");
    EXPECT(smla_set_interrupt(NULL) == &interrupt);
}

static void
tests(void)
{
    RUN(test_queries);
    RUN(test_bad_queries);
    RUN(test_scores);
    RUN(test_bad_scores);
    RUN(test_choice);
    RUN(test_ended_calls);
}

int
main(void)
{
    run_on_every_instruction_set(tests);
    return report("test_indexer");
}
