/* test_rank_lists.c: a rank's positions, lists and lengths through the C API: the vectors of the
 * contract, with red zones beside every row. tests/index/test_rank_lists.py has random worlds.
 */
#include "testing.h"

enum { NUM_POSITIONS = 6 };

static const int64_t positions[NUM_POSITIONS] = {0, 3, 4, 9, -1, 13};
static const int64_t own_positions[2][NUM_POSITIONS] = {{0, 3, -1, 5, -1, -1},
                                                        {-1, -1, 0, -1, -1, 5}};

/* Two rows of the positions, in wider rows. */
static array *
make_rows(bool are_int64)
{
    array *const wide =
        are_int64 ? ARRAY(int64, 2, NUM_POSITIONS + 2) : ARRAY(int32, 2, NUM_POSITIONS + 2);
    for (int64_t row = 0; row < 2; row++) {
        for (int64_t i = 0; i < NUM_POSITIONS + 2; i++) {
            SET(wide, i < NUM_POSITIONS ? (double)positions[i] : 77, row, i);
        }
    }
    return slice(wide, 1, 0, NUM_POSITIONS, 1);
}

static void
expect_rows(const array *out, const int64_t *want)
{
    for (int64_t row = 0; row < 2; row++) {
        for (int64_t i = 0; i < NUM_POSITIONS; i++) {
            EXPECT_EQ((int64_t)GET(out, row, i), want[i]);
        }
        const uint8_t *const end =
            (const uint8_t *)out->tensor.data +
            (row * out->strides[0] + NUM_POSITIONS) * out->tensor.dtype.bits / 8;
        EXPECT_EQ((int64_t)end[0], 77);
    }
}

static void
test_positions(void)
{
    for (int are_int64 = 0; are_int64 < 2; are_int64++) {
        for (int64_t rank = 0; rank < 2; rank++) {
            array *const in = make_rows(are_int64);
            array *const out = make_rows(are_int64);
            smla_cp_positions_args args = {.struct_size = sizeof args,
                                           .positions = &in->tensor,
                                           .cp_rank = rank,
                                           .cp_size = 2,
                                           .cp_interleave = 4,
                                           .out = &out->tensor};
            EXPECT_OK(smla_cp_local_positions(&args, &error));
            expect_rows(out, own_positions[rank]);
        }
    }
}

static void
test_lists(void)
{
    const int64_t wanted[2][NUM_POSITIONS] = {{0, 3, 5, -1, -1, -1}, {0, 5, -1, -1, -1, -1}};
    for (int64_t rank = 0; rank < 2; rank++) {
        array *const in = make_rows(false);
        array *const out = make_rows(false);
        array *const lens = ARRAY(int32, 2);
        smla_cp_topk_args args = {.struct_size = sizeof args,
                                  .topk_indices = &in->tensor,
                                  .cp_rank = rank,
                                  .cp_size = 2,
                                  .cp_interleave = 4,
                                  .out = &out->tensor,
                                  .lens = &lens->tensor};
        EXPECT_OK(smla_cp_local_topk(&args, &error));
        expect_rows(out, wanted[rank]);
        EXPECT_EQ((int64_t)GET(lens, 0), 3 - rank);
        EXPECT_EQ((int64_t)GET(lens, 1), 3 - rank);
    }
}

static void
test_lengths(void)
{
    const int64_t wanted[2][5] = {{3, 4, 6, 8, 0}, {0, 2, 4, 6, 0}};
    for (int64_t rank = 0; rank < 2; rank++) {
        array *const out = ARRAY(int32, 5);
        smla_cp_lengths_args args = {.struct_size = sizeof args,
                                     .seq_lens = &VECTOR(int32, 3, 6, 10, 14, -9)->tensor,
                                     .cp_rank = rank,
                                     .cp_size = 2,
                                     .cp_interleave = 4,
                                     .out = &out->tensor};
        EXPECT_OK(smla_cp_local_lengths(&args, &error));
        for (int64_t i = 0; i < 5; i++) {
            EXPECT_EQ((int64_t)GET(out, i), wanted[rank][i]);
        }
    }
}

/* Left out, one rank has all; half left out, the call is refused. */
static void
test_shares(void)
{
    array *const out = ARRAY(int32, 2);
    smla_cp_lengths_args args = {.struct_size = sizeof args,
                                 .seq_lens = &VECTOR(int32, 9, -1)->tensor,
                                 .out = &out->tensor};
    EXPECT_OK(smla_cp_local_lengths(&args, &error));
    EXPECT(GET(out, 0) == 9 && GET(out, 1) == 0);
    args.cp_size = 2;
    EXPECT_FAIL(smla_cp_local_lengths(&args, &error), SMLA_ERROR_VALUE,
                "cp_local_lengths: `cp` must be (rank, ranks, interleave) with 0 <= rank < ranks "
                "and interleave >= 1, got (0, 2, 0)");
}

int
main(void)
{
    RUN(test_positions);
    RUN(test_lists);
    RUN(test_lengths);
    RUN(test_shares);
    return report("test_rank_lists");
}
