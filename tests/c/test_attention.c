/* test_attention.c: sparse_attention compared with the double-precision reference, and its promise
 * of equal bits: for any number of threads, in any batch, and in every run.
 *
 * All tests run once per instruction set of the machine.
 */
#include "instruction_sets.h"

#include "attention_calls.h"
#include "cpu/attention/attention.h"
#include "cpu/machine/threads.h"

/* ---- Values -------------------------------------------------------------------------------- */

static void
test_formats(void)
{
    const DLDataType dtypes[] = {bf16, uint8, e4m3};
    for (int i = 0; i < 3; i++) {
        attention_inputs in = make_inputs(dtypes[i], 3, 5, 23);
        attend_and_compare(&in, 0);
        in.lists[0].kv = make_cache(dtypes[i], 0, 44);
        attend_and_compare(&in, 0);
    }
}

static void
test_shapes(void)
{
    const int64_t heads[] = {1, 2, 17, 33, 128};
    const int64_t topk[] = {130, 64, 65, 1, 3};
    for (int i = 0; i < 5; i++) {
        const attention_inputs fp8 = make_inputs(uint8, 1, heads[i], topk[i]);
        attend_and_compare(&fp8, 0);
        const attention_inputs wide = make_inputs(bf16, 1, heads[i], topk[4 - i]);
        attend_and_compare(&wide, 0);
    }
}

/* Queries with gaps, backwards, or as a pair; padded and interleaved outputs. */
static void
test_strides(void)
{
    attention_inputs in = make_inputs(uint8, 3, 4, 12);
    array *wide = fill_normal(ARRAY(bf16, 5, 6, ROW + 8), 1.0);
    in.q = slice(slice(slice(wide, 2, 8, ROW + 8, 1), 0, 0, 3, -1), 1, 0, 4, 1);
    array *buffer = ARRAY(bf16, 6, 4, NOPE + 2);
    array *states = ARRAY(fp32, 4, 3, 2);
    outputs o = {.out = slice(slice(buffer, 2, 2, NOPE + 2, 1), 0, 0, 6, 2),
                 .lse = transpose(slice(states, 2, 0, 1, 1), 0, 1),
                 .max_logits = transpose(slice(states, 2, 1, 2, 1), 0, 1)};
    o.lse->tensor.ndim = 2;
    o.max_logits->tensor.ndim = 2;
    attend(&in, 2, &o);
    expect_attention(&in, o.out, o.lse, o.max_logits);
    EXPECT(is_poison(slice(buffer, 2, 0, 2, 1)));
    EXPECT(is_poison(slice(buffer, 0, 1, 6, 2)));
    in.q_pe = slice(in.q, 2, NOPE, ROW, 1); /* the same numbers, as a pair */
    in.q = slice(in.q, 2, 0, NOPE, 1);
    attend_and_compare(&in, 0);
}

static void
test_topk_length(void)
{
    attention_inputs in = make_inputs(uint8, 6, 3, 20);
    in.lists[0].topk_length = VECTOR(int32, 0, 1, 20, 21, -3, 13);
    attend_and_compare(&in, 0);
    attend_and_compare(&in, 3);
}

static void
test_sinks(void)
{
    for (int i = 0; i < 2; i++) {
        attention_inputs in = make_inputs(i == 0 ? uint8 : bf16, 3, 6, 10);
        array *sink = ARRAY(fp32, 6);
        const double values[] = {-INFINITY, INFINITY, 0.0, -4.0, 80.0, 1e30};
        for (int64_t h = 0; h < 6; h++) {
            SET(sink, values[h], h);
        }
        in.attn_sink = sink;
        in.lists[0].topk_length =
            VECTOR(int32, 10, 0, 4); /* token 1 has no keys: out is 0 for any sink */
        attend_and_compare(&in, 0);
        attend_and_compare(&in, 2);
    }
}

/* Cache rows that no list selects hold NaN in values and scales. */
static void
test_unselected_nan(void)
{
    const DLDataType dtypes[] = {bf16, uint8};
    for (int i = 0; i < 2; i++) {
        attention_inputs in = make_inputs(dtypes[i], 2, 3, 16);
        array *indices = ARRAY(int32, 2, 16);
        for (int64_t k = 0; k < 32; k++) {
            SET(indices, (double)(random_int(22) * 2), k / 16, k % 16);
        }
        for (int64_t slot = 1; slot < 44; slot += 2) {
            memset(row_of(in.lists[0].kv, slot), 0xFF, i == 0 ? ROW * 2 : FP8_ROW);
        }
        SET(indices, 1.0, 0, 15); /* past topk_length */
        in.lists[0].indices = indices;
        in.lists[0].topk_length = VECTOR(int32, 15, 16);
        attend_and_compare(&in, 0);
    }
}

/* Logits of many hundreds, whose exp overflows where the maximum is not subtracted first. */
static void
test_large_logits(void)
{
    attention_inputs in = make_inputs(uint8, 2, 3, 40);
    in.softmax_scale = 5.0;
    attend_and_compare(&in, 0);
    in.softmax_scale = -5.0;
    attend_and_compare(&in, 4);
    in.softmax_scale = 0.0; /* the mean of the values */
    attend_and_compare(&in, 0);
}

/* Subnormal numbers that matter because their factors are huge: in the query, in a bf16 row, and as
 * a product under a huge scale. Multiply units that flush them must notice. */
static void
test_subnormals(void)
{
    const double query[] = {0x1p-127, 0x1p122, 0x1p-118};
    const double key[] = {0x1p122, 0x1p-127, 0x1p-9};
    for (int i = 0; i < 3; i++) {
        const bool is_fp8_case = i == 2;
        attention_inputs in = make_inputs(is_fp8_case ? uint8 : bf16, 2, 9, 50);
        for (int64_t row = 0; row < 18; row++) {
            SET(in.q, query[i], row / 9, row % 9, 0);
        }
        for (int64_t slot = 0; slot < 44; slot++) {
            uint8_t *row = row_of(in.lists[0].kv, slot);
            const double value = slot % 2 == 0 ? key[i] : -key[i];
            if (is_fp8_case) {
                memset(row, 0, TILE);
                row[0] = nearest_e4m3(value);
                write_value(fp32, row + SCALES_AT, 0x1p120);
            } else {
                write_value(bf16, row, value);
            }
        }
        attend_and_compare(&in, 0);
    }
}

/* Weights are at most 1, so sums of values of 1e38 stay finite. Logits are just above an integer
 * power of two; a reference that is one too small would make weights 2 or 4 times as large. */
static void
test_large_values(void)
{
    attention_inputs in = make_inputs(bf16, 2, 17, 2);
    const array *kv = in.lists[0].kv;
    fill(slice((array *)kv, 2, 0, NOPE, 1), 1e38);
    fill(slice((array *)kv, 2, NOPE, ROW, 1), 0.2);
    fill((array *)in.q, 0.0);
    fill(slice((array *)in.q, 2, ROW - 1, ROW, 1), 10.0);
    for (int i = 0; i < 4; i++) {
        SET((array *)in.lists[0].indices, i, i / 2, i % 2);
    }
    attend_and_compare(&in, 1);
}

static void
test_extra_list(void)
{
    attention_inputs in = make_inputs(uint8, 3, 4, 9);
    in.lists[1] = (key_list){.kv = make_cache(bf16, 3, 7), .indices = random_slots(3, 30, 21)};
    attend_and_compare(&in, 0);
    in.lists[1].topk_length = VECTOR(int32, 0, 30, 5);
    attend_and_compare(&in, 0);
    attend_and_compare(&in, 3);
    in.lists[0].topk_length = VECTOR(int32, 0, 0, 0); /* keys in the second list alone */
    attend_and_compare(&in, 0);
    in.lists[1].indices = ARRAY(int32, 3, 0);
    in.lists[1].topk_length = NULL;
    attend_and_compare(&in, 0);
}

/* One token has the same slot in every column, the other has masked columns alone. */
static void
test_duplicates_and_empty_rows(void)
{
    attention_inputs in = make_inputs(uint8, 2, 2, 150);
    array *indices = ARRAY(int32, 2, 150);
    for (int64_t k = 0; k < 150; k++) {
        SET(indices, 43, 0, k);
        SET(indices, k % 2 == 0 ? -1 : INT32_MAX, 1, k);
    }
    in.lists[0].indices = indices;
    attend_and_compare(&in, 0);
    attend_and_compare(&in, 2);
}

/* ---- Bits ---------------------------------------------------------------------------------- */

static bool
is_same(const array *a, const array *b)
{
    return a->bytes == b->bytes && memcmp(a->tensor.data, b->tensor.data, a->bytes) == 0;
}

static void
test_same_bits_on_any_threads(void)
{
    static const int splits[] = {0, 1, 2, 3, 7, 64};
    for (int i = 0; i < 6; i++) {
        const attention_inputs in = make_inputs(uint8, 3, 4, 700);
        outputs first = make_outputs(3, 4);
        for (int threads = 1; threads <= 4; threads++) {
            smla_set_max_threads(threads);
            const outputs o = make_outputs(3, 4);
            attend(&in, splits[i], &o);
            first = threads == 1 ? o : first;
            if (threads == 1 && splits[i] % 3 == 0) { /* not always: the reference is slow */
                expect_attention(&in, o.out, o.lse, o.max_logits);
            }
            EXPECT(is_same(o.out, first.out));
            EXPECT(is_same(o.lse, first.lse));
            EXPECT(is_same(o.max_logits, first.max_logits));
        }
        smla_set_max_threads(2);
        free_arrays("test_same_bits_on_any_threads");
    }
}

/* With num_splits fixed, a token's bits do not depend on the other tokens. */
static void
test_batch_invariance(void)
{
    for (int num_splits = 1; num_splits <= 5; num_splits += 2) {
        const attention_inputs in = make_inputs(uint8, 70, 2, 300);
        const outputs all = make_outputs(70, 2);
        attend(&in, num_splits, &all);
        for (int64_t token = 0; token < 70; token += 23) {
            attention_inputs alone = in;
            alone.q = slice(in.q, 0, token, token + 1, 1);
            alone.lists[0].indices = slice(in.lists[0].indices, 0, token, token + 1, 1);
            const outputs o = make_outputs(1, 2);
            attend(&alone, num_splits, &o);
            EXPECT(memcmp(AT(all.out, token, 0, 0), o.out->tensor.data, o.out->bytes) == 0);
            EXPECT(memcmp(AT(all.lse, token, 0), o.lse->tensor.data, o.lse->bytes) == 0);
        }
        free_arrays("test_batch_invariance");
    }
}

/* ---- Edges --------------------------------------------------------------------------------- */

static void
test_nothing_to_do(void)
{
    attention_inputs in = make_inputs(uint8, 2, 3, 4);
    in.lists[0].indices = ARRAY(int32, 2, 0); /* K = 0: no token has keys */
    attend_and_compare(&in, 0);
    in.q = ARRAY(bf16, 0, 3, ROW);
    in.lists[0].indices = ARRAY(int32, 0, 4);
    attend_and_compare(&in, 0);
    in = make_inputs(uint8, 2, 3, 4);
    in.lists[0].kv = ARRAY(uint8, 0, 64, FP8_ROW); /* a cache without pages */
    attend_and_compare(&in, 0);
}

static void
test_workspace(void)
{
    const attention_inputs in = make_inputs(uint8, 2, 3, 600);
    const outputs o = make_outputs(2, 3);
    const array *small = ARRAY(uint8, 1000);
    smla_sparse_attention_args args = make_args(&in, 0, &o, small);
    EXPECT_FAIL(smla_sparse_attention(&args, &error), SMLA_ERROR_VALUE,
                "sparse_attention: `workspace` must have at least");
    args.workspace = NULL;
    EXPECT_FAIL(smla_sparse_attention(&args, &error), SMLA_ERROR_VALUE,
                "sparse_attention: `workspace` must have at least");
    args.workspace = &o.out->tensor;
    EXPECT_FAIL(smla_sparse_attention(&args, &error), SMLA_ERROR_TYPE,
                "`workspace` must be uint8 or int8, got bfloat16");
    /* A workspace at an odd address, of exactly the size asked for. */
    const int64_t bytes = workspace_bytes(&in, 0);
    const array *odd = slice(ARRAY(uint8, bytes + 1), 0, 1, bytes + 1, 1);
    args.workspace = &odd->tensor;
    EXPECT_OK(smla_sparse_attention(&args, &error));
    expect_attention(&in, o.out, o.lse, o.max_logits);
}

/* A call without a workspace is told its size, for both lists: together they make two splits. */
static void
test_workspace_of_two_lists(void)
{
    attention_inputs in = make_inputs(uint8, 2, 3, 230);
    const outputs o = make_outputs(2, 3);
    const int64_t bytes_of_one = workspace_bytes(&in, 0);
    in.lists[1] = (key_list){.kv = make_cache(uint8, 3, 7), .indices = random_slots(2, 30, 21)};
    const int64_t bytes = workspace_bytes(&in, 0);
    char words[64];
    snprintf(words, sizeof words, "must have at least %" PRId64 " bytes, got none", bytes);
    const smla_sparse_attention_args args = make_args(&in, 0, &o, NULL);
    EXPECT(bytes > bytes_of_one);
    EXPECT_FAIL(smla_sparse_attention(&args, &error), SMLA_ERROR_VALUE, words);
}

/* The splits that a call without num_splits takes: 64 parts at most, of 256 columns or more. */
static void
test_plan(void)
{
    static const struct {
        int64_t num_tokens, topk, extra_topk;
        int num_splits;
    } rows[] = {
        {0, 0, 0, 1},      {1, 0, 0, 1},     {1, 256, 0, 1},        {1, 257, 0, 2},
        {1, 512, 0, 2},    {1, 512, 1, 3},   {1, 0, 1024, 4},       {1, 64 * 256, 0, 64},
        {1, 99999, 0, 64}, {21, 2048, 0, 3}, {22, 2048, 0, 2},      {32, 2048, 0, 2},
        {33, 2048, 0, 1},  {64, 2048, 0, 1}, {1000000, 2048, 0, 1}, {8, 2048, 0, 8},
        {13, 4096, 0, 4},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        smla_attention_shape shape = {.num_tokens = rows[i].num_tokens,
                                      .num_heads = 5,
                                      .topk = rows[i].topk,
                                      .extra_topk = rows[i].extra_topk};
        smla_attention_plan plan;
        smla_cpu_plan_attention(&shape, &plan);
        EXPECT_EQ(plan.runs[0].num_splits, rows[i].num_splits);
        EXPECT_EQ(plan.runs[0].num_tokens, rows[i].num_tokens);
        EXPECT_EQ(plan.num_runs, 1);
        /* The promised size is enough for the plan's splits. */
        const int64_t promised = smla_cpu_attention_workspace_size(&shape);
        EXPECT_EQ(plan.workspace_bytes, promised);
        shape.num_splits = rows[i].num_splits;
        EXPECT(promised >= smla_cpu_attention_workspace_size(&shape));
        shape.num_splits = 7;
        smla_cpu_plan_attention(&shape, &plan);
        EXPECT_EQ(plan.runs[0].num_splits, 7);
    }
}

/* The size never falls when the batch grows, so that a builder's workspace serves every step. */
static void
test_workspace_of_growing_batches(void)
{
    attention_inputs in = make_inputs(uint8, 2, 3, 600);
    array q = *in.q;
    in.q = &q;
    int64_t before = 0;
    for (int64_t tokens = 1; tokens < 200; tokens++) {
        q.shape[0] = tokens;
        const int64_t bytes = workspace_bytes(&in, 0);
        EXPECT(bytes >= before && bytes > 0);
        before = bytes;
    }
    q.shape[0] = 0;
    EXPECT_EQ(workspace_bytes(&in, 0), 0);
}

static void
test_unknown_instruction_set(void)
{
    const attention_inputs in = make_inputs(uint8, 1, 1, 1);
    const outputs o = make_outputs(1, 1);
    const smla_sparse_attention_args args =
        make_args(&in, 0, &o, ARRAY(uint8, workspace_bytes(&in, 0)));
    setenv("SPARSE_MLA_CPU_ISA", "mmx", 1);
    EXPECT_FAIL(smla_sparse_attention(&args, &error), SMLA_ERROR_VALUE, "got mmx");
    unsetenv("SPARSE_MLA_CPU_ISA");
    EXPECT_OK(smla_sparse_attention(&args, &error));
}

static void
run_tests(void)
{
    RUN(test_formats);
    RUN(test_shapes);
    RUN(test_strides);
    RUN(test_topk_length);
    RUN(test_sinks);
    RUN(test_unselected_nan);
    RUN(test_large_logits);
    RUN(test_subnormals);
    RUN(test_large_values);
    RUN(test_extra_list);
    RUN(test_duplicates_and_empty_rows);
    RUN(test_same_bits_on_any_threads);
    RUN(test_batch_invariance);
    RUN(test_nothing_to_do);
    RUN(test_workspace);
    RUN(test_workspace_of_two_lists);
    RUN(test_plan);
    RUN(test_workspace_of_growing_batches);
}

int
main(void)
{
    run_on_every_instruction_set(run_tests);
    RUN(test_unknown_instruction_set);
    return report("test_attention");
}
