/* test_index.c: convert_req_index_to_global_index compared with its definition. */
#include "instruction_sets.h"

typedef struct convert {
    const array *req_ids, *block_table, *topk, *prefill_ids, *starts, *out, *counts;
    int64_t block_size;
} convert;

static const DLTensor *
optional(const array *a)
{
    return a == NULL ? NULL : &a->tensor;
}

static smla_status
run_convert(const convert *c)
{
    const smla_convert_req_index_args args = {.struct_size = sizeof args,
                                              .req_id_per_token = &c->req_ids->tensor,
                                              .block_table = &c->block_table->tensor,
                                              .topk_indices = &c->topk->tensor,
                                              .prefill_request_ids = optional(c->prefill_ids),
                                              .prefill_workspace_starts = optional(c->starts),
                                              .out = &c->out->tensor,
                                              .counts = optional(c->counts),
                                              .block_size = c->block_size};
    return smla_convert_req_index_to_global_index(&args, &error);
}

static int64_t
expected_index(const convert *c, int64_t token, int64_t position)
{
    const int64_t block = position / c->block_size;
    if (position < 0 || block >= c->block_table->shape[1]) {
        return -1;
    }
    const int64_t page = (int64_t)GET(c->block_table, (int64_t)GET(c->req_ids, token), block);
    const int64_t prefill = c->prefill_ids == NULL ? -1 : (int64_t)GET(c->prefill_ids, token);
    if (page < 0) {
        return -1;
    }
    return prefill >= 0 ? (int64_t)GET(c->starts, prefill) + position
                        : page * c->block_size + position % c->block_size;
}

static void
expect_converted(const convert *c)
{
    EXPECT_OK(run_convert(c));
    for (int64_t token = 0; token < c->topk->shape[0]; token++) {
        int64_t count = 0;
        for (int64_t k = 0; k < c->topk->shape[1]; k++) {
            const int64_t wanted = expected_index(c, token, (int64_t)GET(c->topk, token, k));
            EXPECT_EQ((int64_t)GET(c->out, token, k), wanted);
            count += wanted >= 0;
        }
        if (c->counts != NULL) {
            EXPECT_EQ((int64_t)GET(c->counts, token), count);
        }
    }
}

static array *
random_indices(int64_t tokens, int64_t topk, int64_t low, int64_t high)
{
    array *a = ARRAY(int32, tokens, topk);
    for (int64_t i = 0; i < tokens * topk; i++) {
        SET(a, (double)(low + random_int(high - low)), i / topk, i % topk);
    }
    return a;
}

/* Positions before, inside and past the block table, which has holes; all arrays are strided. */
static convert
make_case(int64_t tokens, int64_t topk, int64_t block_size)
{
    convert c = {.req_ids = ARRAY(int32, tokens),
                 .block_table = /* more pages behind the last column */
                 slice(transpose(random_indices(8, 4, -2, 900), 0, 1), 1, 0, 6, 1),
                 .topk = slice(random_indices(2 * tokens, topk, -3, 7 * block_size), 0, 0,
                               2 * tokens, 2),
                 .out = slice(ARRAY(int32, tokens, topk + 5), 1, 0, topk, 1),
                 .counts = slice(ARRAY(int32, tokens, 3), 1, 1, 2, 1),
                 .block_size = block_size};
    array *counts = (array *)(uintptr_t)c.counts;
    counts->tensor.ndim = 1;
    for (int64_t token = 0; token < tokens; token++) {
        SET(c.req_ids, (double)random_int(4), token);
    }
    return c;
}

static void
test_slots(void)
{
    const int64_t block_sizes[] = {1, 3, 64};
    for (int i = 0; i < 3; i++) {
        convert c = make_case(7, 150, block_sizes[i]);
        expect_converted(&c);
        c.block_table = random_indices(4, 6, -2, 900); /* pages of a request lie side by side */
        expect_converted(&c);
    }
    const convert large = make_case(40, 2048, 64); /* enough to share out among threads */
    expect_converted(&large);
}

static void
test_workspace_rows(void)
{
    convert c = make_case(9, 33, 16);
    c.prefill_ids = VECTOR(int32, -1, -1, 0, 0, 1, 2, 2, 2, -1);
    c.starts = slice(VECTOR(int32, 0, 99, 17, 99, 4000, 99), 0, 0, 6, 2);
    expect_converted(&c);
    c.counts = NULL;
    expect_converted(&c);
}

static void
test_extremes(void)
{
    convert c = {.req_ids = VECTOR(int32, 0),
                 .block_table = slice(ARRAY(int32, 1, 2), 1, 0, 2, 1),
                 .topk = ARRAY(int32, 1, 4),
                 .out = ARRAY(int32, 1, 4),
                 .block_size = 1 << 20};
    SET(c.block_table, 2047, 0, 0); /* the last slots that int32 holds */
    SET(c.block_table, 2048, 0, 1); /* past them */
    const int64_t positions[] = {(1 << 20) - 1, 1 << 20, INT32_MAX, INT32_MIN};
    for (int64_t k = 0; k < 4; k++) {
        SET(c.topk, (double)positions[k], 0, k);
    }
    EXPECT_OK(run_convert(&c));
    EXPECT_EQ((int64_t)GET(c.out, 0, 0), INT32_MAX);
    for (int64_t k = 1; k < 4; k++) {
        EXPECT_EQ((int64_t)GET(c.out, 0, k), -1);
    }
}

static void
test_empty(void)
{
    convert c = {.req_ids = ARRAY(int32, 0),
                 .block_table = ARRAY(int32, 0, 0),
                 .topk = ARRAY(int32, 0, 5),
                 .out = ARRAY(int32, 0, 5),
                 .block_size = 64};
    EXPECT_OK(run_convert(&c));
    c = (convert){.req_ids = VECTOR(int32, 0, 0),
                  .block_table = ARRAY(int32, 1, 0),
                  .topk = ARRAY(int32, 2, 0),
                  .out = ARRAY(int32, 2, 0),
                  .counts = ARRAY(int32, 2),
                  .block_size = 64};
    EXPECT_OK(run_convert(&c));
    EXPECT_EQ((int64_t)GET(c.counts, 1), 0);
    c.topk = random_indices(2, 3, 0, 100); /* a table without columns names no page */
    c.out = ARRAY(int32, 2, 3);
    expect_converted(&c);
}

static void
test_bad_values(void)
{
    convert c = make_case(3, 4, 16);
    c.req_ids = VECTOR(int32, 0, 4, 1);
    EXPECT_FAIL(run_convert(&c), SMLA_ERROR_VALUE,
                "convert_req_index_to_global_index: `req_id_per_token` must name a row of "
                "`block_table` (0 to 3), got 4 at token 1");
    c.req_ids = VECTOR(int32, 0, 1, -1);
    EXPECT_FAIL(run_convert(&c), SMLA_ERROR_VALUE, "got -1 at token 2");
    c.req_ids = VECTOR(int32, 0, 1, 2);
    c.prefill_ids = VECTOR(int32, -1, 0, 2);
    EXPECT_FAIL(run_convert(&c), SMLA_ERROR_VALUE,
                "`prefill_workspace_starts` must be given, got none");
    c.starts = VECTOR(int32, 0, 5);
    EXPECT_FAIL(
        run_convert(&c), SMLA_ERROR_VALUE,
        "`prefill_request_ids` must name an entry of `prefill_workspace_starts` (0 to 1) or "
        "be -1, got 2 at token 2");
    c.prefill_ids = NULL;
    c.block_size = 0;
    EXPECT_FAIL(run_convert(&c), SMLA_ERROR_VALUE, "`block_size` must be");
}

static void
run_tests(void)
{
    RUN(test_slots);
    RUN(test_extremes);
    RUN(test_empty);
}

int
main(void)
{
    run_on_every_instruction_set(run_tests);
    RUN(test_workspace_rows);
    RUN(test_bad_values);
    return report("test_index");
}
