/* test_varlen.c: varlen_attention compared with doubles, on every instruction set. */
#include "instruction_sets.h"

enum { TOKENS = 6, KEYS = 140, HEADS = 4, KV_HEADS = 2, NOPE = 40, PE = 8, VALUES = 24 };

static const int64_t first_query[] = {0, 2, 2, 5}; /* the last token belongs to no request */
static const int64_t first_key[] = {0, 5, 9, 139};

typedef struct varlen_call {
    smla_varlen_attention_args args;
    const array *q, *q_pe, *k, *k_pe, *v, *sink, *out, *lse;
} varlen_call;

static varlen_call
make_call(void)
{
    varlen_call c = {.q = fill_normal(ARRAY(bf16, TOKENS, HEADS, NOPE), 1.0),
                     .q_pe = fill_normal(ARRAY(bf16, TOKENS, HEADS, PE), 1.0),
                     .k = fill_normal(ARRAY(bf16, KEYS, KV_HEADS, NOPE), 1.0),
                     .k_pe = fill_normal(ARRAY(bf16, KEYS, PE), 1.0),
                     .v = fill_normal(ARRAY(bf16, KEYS, KV_HEADS, VALUES), 1.0),
                     .sink = fill_normal(ARRAY(fp32, HEADS), 1.0),
                     .out = ARRAY(fp32, TOKENS, HEADS, VALUES),
                     .lse = ARRAY(fp32, TOKENS, HEADS)};
    c.args = (smla_varlen_attention_args){
        .struct_size = sizeof c.args,
        .q = &c.q->tensor,
        .q_pe = &c.q_pe->tensor,
        .k = &c.k->tensor,
        .k_pe = &c.k_pe->tensor,
        .v = &c.v->tensor,
        .cu_seqlens_q = &VECTOR(int32, 0, 2, 2, 5)->tensor,
        .cu_seqlens_k = &VECTOR(int32, 0, 5, 9, 139)->tensor,
        .attn_sink = &c.sink->tensor,
        .out = &c.out->tensor,
        .lse = &c.lse->tensor,
        .softmax_scale = 0.2,
        .softcap = 4.0,
        .is_causal = 1,
    };
    return c;
}

static double
logit_of(const varlen_call *c, int64_t token, int64_t head, int64_t key)
{
    double sum = 0.0;
    for (int64_t d = 0; d < NOPE; d++) {
        sum += GET(c->q, token, head, d) * GET(c->k, key, head / (HEADS / KV_HEADS), d);
    }
    for (int64_t d = 0; d < PE; d++) {
        sum += GET(c->q_pe, token, head, d) * GET(c->k_pe, key, d);
    }
    return 4.0 * tanh(0.2 * sum / 4.0);
}

/* Compares a head of a token that sees keys begin...end - 1. */
static void
expect_head(const varlen_call *c, int64_t token, int64_t head, int64_t begin, int64_t end)
{
    double total = 0.0;
    double want[VALUES] = {0.0};
    for (int64_t key = begin; key < end; key++) {
        const double weight = exp(logit_of(c, token, head, key));
        total += weight;
        for (int64_t d = 0; d < VALUES; d++) {
            want[d] += weight * GET(c->v, key, head / (HEADS / KV_HEADS), d);
        }
    }
    const double lse = log(total);
    const double factor = 1.0 / (1.0 + exp(GET(c->sink, head) - lse));
    EXPECT_NEAR(GET(c->lse, token, head), lse, 1e-5);
    for (int64_t d = 0; d < VALUES; d++) {
        EXPECT_NEAR(GET(c->out, token, head, d), factor * want[d] / total, 0.02);
    }
}

static void
expect_attended(const varlen_call *c)
{
    EXPECT_OK(smla_varlen_attention(&c->args, &error));
    for (int64_t req = 0; req < 3; req++) {
        for (int64_t token = first_query[req]; token < first_query[req + 1]; token++) {
            const int64_t end = first_key[req + 1] - (first_query[req + 1] - 1 - token);
            for (int64_t head = 0; head < HEADS; head++) {
                expect_head(c, token, head, first_key[req], end);
            }
        }
    }
    EXPECT(is_poison(slice(c->out, 0, TOKENS - 1, TOKENS, 1)));
    EXPECT(is_poison(slice(c->lse, 0, TOKENS - 1, TOKENS, 1)));
}

static void
test_values(void)
{
    const varlen_call c = make_call();
    expect_attended(&c);
    free_arrays("test_values");
}

/* Fields that change nothing, and the window, which is read where the call has one. */
static void
test_options(void)
{
    varlen_call c = make_call();
    c.args.window_left = 1; /* not read without has_window */
    c.args.num_splits = 64;
    expect_attended(&c);
    c.args.has_window = 1;
    c.args.window_left = -2;
    EXPECT_FAIL(smla_varlen_attention(&c.args, &error), SMLA_ERROR_VALUE,
                "varlen_attention: `window_size` must have -1 (open) or a number of keys on its "
                "left, got -2");
    free_arrays("test_options");
}

static void
test_no_requests(void)
{
    varlen_call c = make_call();
    c.args.cu_seqlens_q = c.args.cu_seqlens_k = &VECTOR(int32, 0)->tensor;
    EXPECT_OK(smla_varlen_attention(&c.args, &error));
    EXPECT(is_poison(c.out) && is_poison(c.lse));
    free_arrays("test_no_requests");
}

static void
tests(void)
{
    RUN(test_values);
    RUN(test_options);
    RUN(test_no_requests);
}

int
main(void)
{
    run_on_every_instruction_set(tests);
    return report("test_varlen");
}
