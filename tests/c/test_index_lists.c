/* test_index_lists.c: the index lists of DeepSeek V4 through the C API: examples by hand, with red
 * zones beside every row. tests/index/test_index_lists.py compares random batches with a reference.
 */
#include "instruction_sets.h"

/* A table of int32 values, row by row. */
static array *
table(int64_t rows, int64_t columns, const int64_t *values)
{
    array *a = ARRAY(int32, rows, columns);
    for (int64_t i = 0; i < rows * columns; i++) {
        SET(a, (double)values[i], i / columns, i % columns);
    }
    return a;
}

#define TABLE(rows, columns, ...) table(rows, columns, (const int64_t[]){__VA_ARGS__})

/* Columns in the middle of wider rows: the red zones of an output. */
static array *
make_out(int64_t rows, int64_t columns)
{
    array *wide = ARRAY(int32, rows, columns + 3);
    for (int64_t i = 0; i < rows; i++) {
        SET(wide, 77, i, 0);
        SET(wide, 77, i, columns + 1);
        SET(wide, 77, i, columns + 2);
    }
    return slice(wide, 1, 1, columns + 1, 1);
}

static void
expect_lists(const array *out, const array *lens, const int64_t *rows, const int64_t *lengths)
{
    const int64_t columns = out->shape[1];
    for (int64_t i = 0; i < out->shape[0]; i++) {
        const int32_t *const row = (const int32_t *)out->tensor.data + i * out->strides[0];
        for (int64_t j = 0; j < columns; j++) {
            EXPECT_EQ((int64_t)row[j], rows[i * columns + j]);
        }
        EXPECT(row[-1] == 77 && row[columns] == 77 && row[columns + 1] == 77);
        EXPECT_EQ((int64_t)GET(lens, i), lengths[i]);
    }
}

static void
test_global_topk(void)
{
    array *const out = make_out(3, 4);
    array *const lens = ARRAY(int32, 3);
    array *const is_valid = ARRAY(uint8, 3);
    memcpy(is_valid->data, (const uint8_t[]){1, 255, 0}, 3);
    smla_topk_slots_args args = {.struct_size = sizeof args,
                                 .topk_indices =
                                     &TABLE(3, 4, 3, 0, -1, 9, 5, -1, -1, -1, 1, 2, 3, 4)->tensor,
                                 .req_id_per_token = &VECTOR(int32, 0, 0, -5)->tensor,
                                 .block_table = &TABLE(1, 2, 6, 1)->tensor,
                                 .block_size = 4,
                                 .is_valid = &is_valid->tensor,
                                 .out = &out->tensor,
                                 .lens = &lens->tensor};
    const int64_t rows[] = {27, 24, -1, -1, 5, -1, -1, -1, -1, -1, -1, -1};
    EXPECT_OK(smla_compute_global_topk_indices_and_lens(&args, &error));
    expect_lists(out, lens, rows, (const int64_t[]){2, 1, 0});
    is_valid->tensor.dtype = (DLDataType){kDLBool, 8, 1};
    EXPECT_OK(smla_compute_global_topk_indices_and_lens(&args, &error));
    expect_lists(out, lens, rows, (const int64_t[]){2, 1, 0});
    args.is_valid = NULL;
    EXPECT_FAIL(smla_compute_global_topk_indices_and_lens(&args, &error), SMLA_ERROR_VALUE,
                "`req_id_per_token` must name a row of `block_table` (0 to 0), got -5 at token 2");
}

static void
test_combine(void)
{
    array *const out = make_out(5, 5);
    array *const lens = ARRAY(int32, 5);
    smla_combine_topk_swa_args args = {.struct_size = sizeof args,
                                       .topk_indices =
                                           &TABLE(5, 2, 0, -1, 0, -1, 0, 1, 1, 0, 3, 3)->tensor,
                                       .query_start_loc = &VECTOR(int32, 10, 12, 14)->tensor,
                                       .seq_lens = &VECTOR(int32, 6, 9)->tensor,
                                       .gather_lens = &VECTOR(int32, 4, 4)->tensor,
                                       .window = 3,
                                       .ratio = 4,
                                       .topk = 2,
                                       .M = 8,
                                       .N = 3,
                                       .align = 1,
                                       .out = &out->tensor,
                                       .lens = &lens->tensor};
    const int64_t rows[] = {0,  3,  4, 5, -1, 0,  4,  5,  6,  -1, 8,  9, 11,
                            12, 13, 9, 8, 12, 13, 14, -1, -1, -1, -1, -1};
    EXPECT_OK(smla_combine_topk_swa_indices(&args, &error));
    expect_lists(out, lens, rows, (const int64_t[]){4, 4, 5, 5, 0});
    args.align = 0;
    EXPECT_FAIL(smla_combine_topk_swa_indices(&args, &error), SMLA_ERROR_VALUE,
                "`align` must be 1 to 2147483647, got 0");
}

static void
test_mixed(void)
{
    array *const out = make_out(3, 7);
    array *const lens = ARRAY(int32, 3);
    smla_mixed_indices_args args = {.struct_size = sizeof args,
                                    .decode_swa_indices = &TABLE(1, 3, 8, 9, -1)->tensor,
                                    .decode_compressed_indices = &TABLE(1, 2, 2, -1)->tensor,
                                    .prefill_topk_indices = &TABLE(2, 2, 0, 1, 1, 0)->tensor,
                                    .query_start_loc = &VECTOR(int32, 0, 1, 3)->tensor,
                                    .seq_lens = &VECTOR(int32, 3, 9)->tensor,
                                    .req_id_per_token = &VECTOR(int32, 0, 1, 1)->tensor,
                                    .swa_block_table = &TABLE(2, 3, 4, 0, 0, 2, 5, 6)->tensor,
                                    .swa_block_size = 4,
                                    .compressed_block_table = &TABLE(2, 1, 7, 3)->tensor,
                                    .compressed_block_size = 4,
                                    .window = 3,
                                    .ratio = 4,
                                    .topk = 2,
                                    .decode_indices_are_local = 1,
                                    .out = &out->tensor,
                                    .lens = &lens->tensor};
    int64_t rows[] = {8,  9,  -1, 30, -1, -1, -1, 21, 22, 23, 12,
                      13, -1, -1, 22, 23, 24, 13, 12, -1, -1};
    EXPECT_OK(smla_build_mixed_sparse_indices(&args, &error));
    expect_lists(out, lens, rows, (const int64_t[]){4, 5, 5});
    /* The same numbers as slots, with a length, and without. */
    args.decode_indices_are_local = 0;
    args.decode_compressed_lens = &VECTOR(int32, 1)->tensor;
    rows[3] = 2;
    EXPECT_OK(smla_build_mixed_sparse_indices(&args, &error));
    expect_lists(out, lens, rows, (const int64_t[]){4, 5, 5});
    args.decode_compressed_lens = NULL;
    EXPECT_OK(smla_build_mixed_sparse_indices(&args, &error));
    expect_lists(out, lens, rows, (const int64_t[]){5, 5, 5});
    args.compressed_block_table = NULL;
    EXPECT_FAIL(smla_build_mixed_sparse_indices(&args, &error), SMLA_ERROR_VALUE,
                "`compressed_block_table` must be given, got none");
    args.query_start_loc = NULL;
    EXPECT_FAIL(smla_build_mixed_sparse_indices(&args, &error), SMLA_ERROR_VALUE,
                "`query_start_loc` must be given, got none");
}

static void
run_tests(void)
{
    RUN(test_global_topk);
    RUN(test_combine);
    RUN(test_mixed);
}

int
main(void)
{
    run_on_every_instruction_set(run_tests);
    return report("test_index_lists");
}
