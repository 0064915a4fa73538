/* test_paged.c: paged_attention compared with doubles, on every instruction set. Arrays end at a
 * page that cannot be read, so a load behind the last page's rows ends the test.
 */
#include "instruction_sets.h"

enum { TOKENS = 5, HEADS = 4, KV_HEADS = 2, PAGES = 4, TOKENS_PER_PAGE = 3, DIM = 40, VALUES = 24 };
enum { REQS = 2, COLUMNS = 4, NOWHERE = -1 };

static const int64_t first_query[] = {0, 3, 4}; /* the last token belongs to no request */
static const int64_t pads[] = {1, 0};
static const int64_t lens[] = {12, 5};
static const int32_t pages[REQS][COLUMNS] = {{3, 0, -7, 1}, {2, 3, 99, 99}};

typedef struct paged_call {
    smla_paged_attention_args args;
    const array *q, *qv, *k, *v, *out, *lse;
} paged_call;

static paged_call
make_call(void)
{
    paged_call c = {.q = fill_normal(ARRAY(bf16, TOKENS, HEADS, DIM), 1.0),
                    .qv = fill_normal(ARRAY(bf16, TOKENS, HEADS, VALUES), 1.0),
                    .k = fill_normal(ARRAY(bf16, PAGES, TOKENS_PER_PAGE, KV_HEADS, DIM), 1.0),
                    .v = fill_normal(ARRAY(bf16, PAGES, TOKENS_PER_PAGE, KV_HEADS, VALUES), 1.0),
                    .out = ARRAY(fp32, TOKENS, HEADS, VALUES),
                    .lse = ARRAY(fp32, TOKENS, HEADS)};
    const array *const table = ARRAY(int32, REQS, COLUMNS);
    memcpy(table->data, pages, sizeof pages);
    c.args = (smla_paged_attention_args){
        .struct_size = sizeof c.args,
        .q = &c.q->tensor,
        .k_cache = &c.k->tensor,
        .v_cache = &c.v->tensor,
        .block_table = &table->tensor,
        .cache_seqlens = &VECTOR(int32, 12, 5)->tensor,
        .cu_seqlens_q = &VECTOR(int32, 0, 3, 4)->tensor,
        .cache_leftpad = &VECTOR(int32, 1, 0)->tensor,
        .out = &c.out->tensor,
        .lse = &c.lse->tensor,
        .softmax_scale = 0.2,
        .is_causal = 1,
    };
    return c;
}

/* The slot of a position of a request, by its page. */
static int64_t
slot_of(int64_t req, int64_t position)
{
    const int64_t page = pages[req][position / TOKENS_PER_PAGE];
    return page < 0 || page >= PAGES ? NOWHERE
                                     : page * TOKENS_PER_PAGE + position % TOKENS_PER_PAGE;
}

static double
dot(const array *q, int64_t token, int64_t head, const array *cache, int64_t slot, int64_t dims)
{
    double sum = 0.0;
    for (int64_t d = 0; d < dims; d++) {
        sum += GET(q, token, head, d) * GET(cache, slot / TOKENS_PER_PAGE, slot % TOKENS_PER_PAGE,
                                            head / (HEADS / KV_HEADS), d);
    }
    return sum;
}

/* Compares a head of a token that sees a request's positions up to `end`. */
static void
expect_head(const paged_call *c, int64_t req, int64_t token, int64_t head, int64_t end)
{
    double total = 0.0;
    double want[VALUES] = {0.0};
    for (int64_t position = pads[req]; position < end; position++) {
        const int64_t slot = slot_of(req, position);
        if (slot == NOWHERE) {
            continue;
        }
        const double more = c->args.qv == NULL ? 0.0 : dot(c->qv, token, head, c->v, slot, VALUES);
        const double weight = exp(0.2 * (dot(c->q, token, head, c->k, slot, DIM) + more));
        total += weight;
        for (int64_t d = 0; d < VALUES; d++) {
            want[d] += weight * GET(c->v, slot / TOKENS_PER_PAGE, slot % TOKENS_PER_PAGE,
                                    head / (HEADS / KV_HEADS), d);
        }
    }
    EXPECT_NEAR(GET(c->lse, token, head), log(total), 1e-5);
    for (int64_t d = 0; d < VALUES; d++) {
        EXPECT_NEAR(GET(c->out, token, head, d), want[d] / total, 0.02);
    }
}

static void
expect_attended(const paged_call *c)
{
    EXPECT_OK(smla_paged_attention(&c->args, &error));
    for (int64_t req = 0; req < REQS; req++) {
        for (int64_t token = first_query[req]; token < first_query[req + 1]; token++) {
            const int64_t end = lens[req] - (first_query[req + 1] - 1 - token);
            for (int64_t head = 0; head < HEADS; head++) {
                expect_head(c, req, token, head, end);
            }
        }
    }
    EXPECT(is_poison(slice(c->out, 0, TOKENS - 1, TOKENS, 1)));
    EXPECT(is_poison(slice(c->lse, 0, TOKENS - 1, TOKENS, 1)));
}

static void
test_values(void)
{
    paged_call c = make_call();
    expect_attended(&c);
    c.args.qv = &c.qv->tensor;
    expect_attended(&c);
    free_arrays("test_values");
}

/* The same keys in a table of slots, whose bad entries are of other kinds. */
static void
test_slots(void)
{
    enum { WIDTH = COLUMNS * TOKENS_PER_PAGE };
    static const int32_t bad[] = {-1, INT32_MIN, PAGES * TOKENS_PER_PAGE, INT32_MAX};
    paged_call c = make_call();
    const array *const slots = ARRAY(int32, REQS, WIDTH);
    for (int64_t i = 0; i < REQS * WIDTH; i++) {
        const int64_t slot = slot_of(i / WIDTH, i % WIDTH);
        ((int32_t *)(void *)slots->data)[i] = slot == NOWHERE ? bad[i % 4] : (int32_t)slot;
    }
    c.args.block_table = NULL;
    c.args.slot_table = &slots->tensor;
    expect_attended(&c);
    free_arrays("test_slots");
}

/* Keys in parts, and the window, which is read where the call has one. */
static void
test_options(void)
{
    static const int32_t splits[] = {1, 2, 3, 64};
    paged_call c = make_call();
    c.args.window_left = 1; /* not read without has_window */
    for (size_t i = 0; i < sizeof splits / sizeof splits[0]; i++) {
        c.args.num_splits = splits[i];
        expect_attended(&c);
    }
    c.args.num_splits = 65;
    EXPECT_FAIL(smla_paged_attention(&c.args, &error), SMLA_ERROR_VALUE,
                "paged_attention: `num_splits` must be 0 (the plan chooses) or 1 to 64, got 65");
    c.args.num_splits = 0;
    c.args.has_window = 1;
    c.args.window_left = -2;
    EXPECT_FAIL(smla_paged_attention(&c.args, &error), SMLA_ERROR_VALUE,
                "paged_attention: `window_size` must have -1 (open) or a number of keys on its "
                "left, got -2");
    free_arrays("test_options");
}

static void
tests(void)
{
    RUN(test_values);
    RUN(test_slots);
    RUN(test_options);
}

int
main(void)
{
    run_on_every_instruction_set(tests);
    return report("test_paged");
}
