/* test_top_k.c: top_k_per_row and top_k_merge through the C API: examples by hand, with red zones
 * beside every row. tests/topk/test_top_k.py compares random rows with a reference.
 */
#include "instruction_sets.h"

#include <math.h>

/* A row of fp32 logits. */
static array *
make_logits(int64_t count, const float *values)
{
    array *const a = ARRAY(fp32, 1, count);
    memcpy(a->data, values, (size_t)count * sizeof *values);
    return a;
}

#define LOGITS(count, ...) make_logits(count, (const float[]){__VA_ARGS__})

/* `k` columns in the middle of a wider row: the red zones of an output. */
static array *
make_out(int64_t k)
{
    array *const wide = ARRAY(int32, 1, k + 2);
    SET(wide, 77, 0, 0);
    SET(wide, 77, 0, k + 1);
    return slice(wide, 1, 1, k + 1, 1);
}

static void
expect_row(const array *out, const int64_t *want)
{
    const int32_t *const row = (const int32_t *)out->tensor.data;
    const int64_t k = out->shape[1];
    for (int64_t i = 0; i < k; i++) {
        EXPECT_EQ((int64_t)row[i], want[i]);
    }
    EXPECT(row[-1] == 77 && row[k] == 77);
}

static void
test_by_hand(void)
{
    array *const out = make_out(3);
    array *const values = ARRAY(fp32, 1, 3);
    smla_top_k_args args = {.struct_size = sizeof args,
                            .logits = &LOGITS(7, 1, 3, NAN, 3, 0, -0.0f, 2)->tensor,
                            .starts = &VECTOR(int32, 0)->tensor,
                            .ends = &VECTOR(int32, 7)->tensor,
                            .k = 3,
                            .out = &out->tensor,
                            .values = &values->tensor};
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){1, 3, 6});
    EXPECT(GET(values, 0, 0) == 3 && GET(values, 0, 1) == 3 && GET(values, 0, 2) == 2);
    /* columns are counted from the start, and the end is clamped */
    args.starts = &VECTOR(int32, 3)->tensor;
    args.ends = &VECTOR(int32, 99)->tensor;
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){0, 1, 3});
    /* fewer columns than k */
    args.ends = &VECTOR(int32, 5)->tensor;
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){0, 1, -1});
    EXPECT(GET(values, 0, 1) == 0 && GET(values, 0, 2) == -INFINITY);
    args.ends = &VECTOR(int32, -1)->tensor;
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){-1, -1, -1});
}

/* -0 equals 0, and NaN of either sign is below -inf. */
static void
test_order(void)
{
    array *const out = make_out(2);
    smla_top_k_args args = {.struct_size = sizeof args,
                            .logits = &LOGITS(4, 0, -0.0f, 0, -1)->tensor,
                            .starts = &VECTOR(int32, 0)->tensor,
                            .ends = &VECTOR(int32, 4)->tensor,
                            .k = 2,
                            .out = &out->tensor};
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){0, 1});
    args.logits = &LOGITS(4, NAN, -NAN, -INFINITY, -INFINITY)->tensor;
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){2, 3});
    args.logits = &LOGITS(4, NAN, -NAN, NAN, -INFINITY)->tensor;
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){0, 3});
}

static void
test_slots(void)
{
    array *const out = make_out(3);
    array *const slots = make_out(3);
    array *const lens = ARRAY(int32, 1);
    array *const table = ARRAY(int32, 1, 2);
    smla_top_k_args args = {.struct_size = sizeof args,
                            .logits = &LOGITS(9, 9, 0, 0, 0, 0, 5, 0, 0, 7)->tensor,
                            .starts = &VECTOR(int32, 0)->tensor,
                            .ends = &VECTOR(int32, 9)->tensor,
                            .k = 3,
                            .slots_block_table = &table->tensor,
                            .slots_block_size = 4,
                            .req_id_per_token = &VECTOR(int32, 0)->tensor,
                            .out = &out->tensor,
                            .slots = &slots->tensor,
                            .lens = &lens->tensor};
    SET(table, 6, 0, 0);
    SET(table, 1, 0, 1);
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, (const int64_t[]){0, 5, 8});
    expect_row(slots, (const int64_t[]){24, 5, -1}); /* 8 is past the table */
    EXPECT_EQ((int64_t)GET(lens, 0), 2);
    args.req_id_per_token = &VECTOR(int32, 1)->tensor;
    EXPECT_FAIL(smla_top_k_per_row(&args, &error), SMLA_ERROR_VALUE,
                "top_k_per_row: `req_id_per_token` must name a row of `slots_block_table` (0 to "
                "0), got 1 at token 0");
    args.req_id_per_token = NULL;
    EXPECT_FAIL(smla_top_k_per_row(&args, &error), SMLA_ERROR_VALUE,
                "`req_id_per_token` must come with `slots_block_table`, got none");
    args.slots_block_table = NULL;
    EXPECT_FAIL(smla_top_k_per_row(&args, &error), SMLA_ERROR_VALUE,
                "`slots_block_size` must be left out without `slots_block_table`, got one");
}

/* More columns than an index can name. Nothing of such a row is read. */
static void
test_too_many_columns(void)
{
    array *const out = make_out(1);
    int64_t shape[2] = {1, (int64_t)INT32_MAX + 1};
    DLTensor logits = LOGITS(1, 0)->tensor;
    logits.shape = shape;
    logits.strides = NULL;
    const smla_top_k_args args = {.struct_size = sizeof args,
                                  .logits = &logits,
                                  .starts = &VECTOR(int32, 0)->tensor,
                                  .ends = &VECTOR(int32, 1)->tensor,
                                  .k = 1,
                                  .out = &out->tensor};
    EXPECT_FAIL(smla_top_k_per_row(&args, &error), SMLA_ERROR_VALUE,
                "`logits` must have at most 2147483647 columns, got 2147483648");
}

/* Rows longer than a vector and a block of the kernels, of few values. */
static void
test_long_row(void)
{
    enum { COLUMNS = 1000, K = 130 };
    float values[COLUMNS];
    int64_t want[K];
    array *const out = make_out(K);
    int64_t count = 0;
    for (int64_t i = 0; i < COLUMNS; i++) {
        values[i] = (float)(i * 7 % 10);
        const bool is_taken = values[i] == 9 || (values[i] == 8 && i < 300);
        if (is_taken) {
            want[count++] = i;
        }
    }
    EXPECT_EQ(count, K);
    const smla_top_k_args args = {.struct_size = sizeof args,
                                  .logits = &make_logits(COLUMNS, values)->tensor,
                                  .starts = &VECTOR(int32, 0)->tensor,
                                  .ends = &VECTOR(int32, COLUMNS)->tensor,
                                  .k = K,
                                  .out = &out->tensor};
    EXPECT_OK(smla_top_k_per_row(&args, &error));
    expect_row(out, want);
}

/* Two lists of a token, of which the second is shorter: equal scores, NaN, and k of every kind. */
static void
test_merge(void)
{
    array *const indices = ARRAY(int32, 2, 1, 3);
    array *const values = ARRAY(fp32, 2, 1, 3);
    memcpy(indices->data, (const int32_t[]){0, 3, 8, 5, 6, -1}, 6 * sizeof(int32_t));
    memcpy(values->data, (const float[]){2, NAN, 7, 7, -INFINITY, 9}, 6 * sizeof(float));
    const int64_t wanted[5][5] = {{5}, {5, 8}, {0, 5, 8}, {0, 5, 6, 8}, {0, 3, 5, 6, 8}};
    smla_top_k_merge_args args = {.struct_size = sizeof args,
                                  .indices = &indices->tensor,
                                  .values = &values->tensor};
    for (int64_t k = 1; k <= 5; k++) {
        array *const out = make_out(k);
        args.k = k;
        args.out = &out->tensor;
        EXPECT_OK(smla_top_k_merge(&args, &error));
        expect_row(out, wanted[k - 1]);
    }
    array *const out = make_out(6);
    args.k = 6;
    args.out = &out->tensor;
    EXPECT_OK(smla_top_k_merge(&args, &error));
    expect_row(out, (const int64_t[]){0, 3, 5, 6, 8, -1});
    args.k = 0;
    EXPECT_FAIL(smla_top_k_merge(&args, &error), SMLA_ERROR_VALUE,
                "top_k_merge: `k` must be 1 to 2147483647, got 0");
    args.indices = &ARRAY(int32, 65, 1, 3)->tensor;
    EXPECT_FAIL(smla_top_k_merge(&args, &error), SMLA_ERROR_VALUE,
                "top_k_merge: `indices` must have 1 to 64 lists, got 65");
}

static void
tests(void)
{
    RUN(test_merge);
    RUN(test_by_hand);
    RUN(test_order);
    RUN(test_long_row);
    RUN(test_slots);
}

int
main(void)
{
    RUN(test_too_many_columns);
    run_on_every_instruction_set(tests);
    return report("test_top_k");
}
