/* test_cuda_few_tiles.c: which dense calls over bf16 rows attention_few_sm90.cu takes on a Hopper
 * GPU that the machine need not have, and in how many splits. The plan knows shapes alone: tiles,
 * and how wide the table is.
 */
#include "cuda/attention/table/kernels.c"  // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/schedule.c" // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/widen.c"    // NOLINT(bugprone-suspicious-include)

#include "fake_cuda/launchers.h"

static smla_attention_shape
make_shape(int64_t reqs, int64_t query_len, int64_t heads, int64_t columns)
{
    return (smla_attention_shape){.num_tokens = reqs * query_len,
                                  .num_heads = heads,
                                  .topk = columns,
                                  .formats = {&smla_kv_formats[SMLA_ROW_BFLOAT16]},
                                  .source = SMLA_KEYS_TABLE,
                                  .table_reqs = reqs};
}

static smla_attention_plan
expect_plan(const smla_attention_shape *shape, const char *launcher, int num_splits)
{
    smla_attention_plan plan;
    devices[0] = h200;
    smla_cuda_plan_attention(shape, &plan);
    EXPECT_EQ(plan.num_runs, 1);
    EXPECT(strcmp(launcher_of(plan.runs[0].kernel), launcher) == 0);
    EXPECT_EQ(plan.runs[0].num_splits, num_splits);
    EXPECT_EQ(plan.runs[0].num_tokens, shape->num_tokens);
    return plan;
}

static void
test_choice(void)
{
    static const struct {
        int64_t reqs, query_len, heads, columns;
        const char *launcher;
        int splits;
    } cases[] = {
        /* one request: a block per CTA, unless partial rows cost more */
        {1, 1, 16, 4096, "sm90_few_64", 64},
        {1, 1, 128, 4096, "sm90_few_64", 32},
        {1, 1, 16, 1 << 20, "sm90_few_64", 64},
        {1, 1, 128, 1 << 20, "sm90_few_64", 64},
        {1, 1, 16, 64, "sm90_few_64", 1},
        {1, 1, 16, 0, "sm90_few_64", 1},
        /* several: as many CTAs as SMs */
        {8, 1, 16, 4096, "sm90_few_64", 16},
        {8, 1, 128, 4096, "sm90_few_64", 8},
        {2, 4, 128, 4096, "sm90_few_64", 8},
        {32, 4, 16, 4096, "sm90_few_64", 4},
        {33, 1, 64, 4096, "sm90_few_64", 4},
        {16, 1, 64, 8192, "sm90_few_64", 8},
        {16, 1, 64, 8193, "sm90_dense_64", 1}, /* one request might be so long, and others not */
        {16, 1, 128, 8192, "sm90_dense_64", 1},
        {34, 1, 64, 3072, "sm90_few_64", 3},
        {34, 1, 64, 3073, "sm90_dense_64", 1},
        {128, 1, 64, 1024, "sm90_few_64", 1},
        {128, 1, 64, 1025, "sm90_dense_64", 1},
        {132, 1, 1, 100, "sm90_few_64", 1},
        {66, 1, 65, 100, "sm90_few_64", 1},
        /* several waves of short requests */
        {133, 1, 1, 512, "sm90_few_64", 1},
        {133, 1, 1, 513, "sm90_dense_64", 1},
        {128, 1, 128, 512, "sm90_few_64", 1},
        {265, 1, 64, 320, "sm90_few_64", 1},
        {265, 1, 64, 321, "sm90_dense_64", 1},
        {264, 1, 128, 256, "sm90_few_64", 1},
        {265, 1, 128, 64, "sm90_dense_64", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const smla_attention_shape shape =
            make_shape(cases[i].reqs, cases[i].query_len, cases[i].heads, cases[i].columns);
        const smla_attention_plan plan = expect_plan(&shape, cases[i].launcher, cases[i].splits);
        EXPECT(plan.reads_lengths);
    }
}

/* Where only the device knows the query tokens of requests, there may be more tiles: tokens of no
 * request have their own. */
static void
test_choice_with_starts(void)
{
    static const struct {
        int64_t reqs, tokens, heads, columns;
        const char *launcher;
        int splits;
    } cases[] = {
        {8, 8, 16, 4096, "sm90_few_64", 16},    /* 8 tiles: no token has more than one */
        {8, 8, 128, 4096, "sm90_few_64", 8},    /* 16 */
        {8, 16, 16, 4096, "sm90_few_64", 10},   /* 4 + 9, where requests of equal length have 8 */
        {1, 4, 16, 4096, "sm90_few_64", 32},    /* 1 + 2: 44 would have two blocks, too */
        {1, 4, 128, 4096, "sm90_few_64", 16},   /* 8 */
        {200, 128, 64, 512, "sm90_few_64", 1},  /* 128: most requests have no token */
        {64, 132, 64, 512, "sm90_few_64", 1},   /* 132 */
        {64, 133, 64, 512, "sm90_few_64", 1},   /* 133: two waves */
        {64, 133, 64, 513, "sm90_dense_64", 1}, /* 133 */
        {32, 32, 16, 4096, "sm90_few_64", 4},   /* 32 */
        {32, 34, 16, 4096, "sm90_dense_64", 1}, /* 34 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        smla_attention_shape shape =
            make_shape(cases[i].tokens, 1, cases[i].heads, cases[i].columns);
        shape.table_reqs = cases[i].reqs;
        shape.has_starts = true;
        expect_plan(&shape, cases[i].launcher, cases[i].splits);
    }
}

/* Whatever the tokens of requests are, no more tiles than that are found, those of no request
 * included. */
static void
test_tiles_with_starts(void)
{
    for (int64_t seed = 1; seed < 3000; seed++) {
        const int64_t heads = 1 + seed * 7 % 128, num_reqs = 1 + seed % 9;
        int64_t tiles = 0, tokens = 0;
        for (int64_t req = 0; req <= num_reqs; req++) {
            const int64_t queries = (seed * (req + 3) * 2654435761 >> 7) % 6;
            tiles += smla_count_parts(queries * heads, (int64_t)SMLA_TILE_ROWS);
            tokens += queries;
        }
        EXPECT(tiles <= smla_count_few_tiles(tokens, heads, num_reqs, true));
    }
}

/* What this kernel does not serve goes where it went before it. */
static void
test_others(void)
{
    smla_attention_shape shape = make_shape(8, 1, 16, 4096);
    shape.num_splits = 1; /* a token's bits do not depend on the batch */
    expect_plan(&shape, "sm90_dense_64", 1);
    shape.num_splits = 16;
    expect_plan(&shape, "sm80_bf16_16", 16);
    shape.num_splits = 0;
    shape.table_reqs = 0; /* a mask of another kind */
    expect_plan(&shape, "sm90_dense_64", 1);
    shape.table_reqs = 8;
    shape.needs = SMLA_NEEDS_SOFTCAP;
    expect_plan(&shape, "sm80_bf16_16", 64);
    shape.needs = 0;
    shape.formats[0] = &smla_kv_formats[SMLA_ROW_BFLOAT16_512];
    expect_plan(&shape, "sm90_few_512_64", 16);
    shape.formats[0] = &smla_kv_formats[SMLA_ROW_FP8_DS_MLA];
    expect_plan(&shape, "sm90_fp8_dense_16", 16);
    shape.num_tokens = shape.table_reqs = 0;
    shape.formats[0] = &smla_kv_formats[SMLA_ROW_BFLOAT16];
    expect_plan(&shape, "sm90_dense_64", 1);
}

/* All splits run at once, and their partial rows fit the workspace that a caller asks for. */
static void
test_bounds(void)
{
    static const int64_t columns[] = {1, 64, 100, 512, 513, 4096, 131072};
    static const int64_t heads[] = {1, 16, 17, 64, 65, 128};
    for (int64_t reqs = 1; reqs <= 140; reqs++) {
        for (int i = 0; i < 7 * 6 * 4 * 2; i++) {
            smla_attention_shape shape =
                make_shape(reqs, 1 + i / 42 % 4, heads[i % 6], columns[i / 6 % 7]);
            shape.has_starts = i >= 7 * 6 * 4;
            const smla_attention_shape most = {.num_tokens = shape.num_tokens,
                                               .num_heads = shape.num_heads,
                                               .topk = shape.topk,
                                               .covers_tables = true};
            smla_attention_plan plan;
            devices[0] = h200;
            smla_cuda_plan_attention(&shape, &plan);
            const smla_attention_run *const run = &plan.runs[0];
            EXPECT(plan.workspace_bytes <= smla_cuda_attention_workspace_size(&most));
            if (run->kernel->is_few) {
                const int64_t rows = shape.num_tokens * shape.num_heads;
                const int64_t tiles =
                    smla_count_few_tiles(shape.num_tokens, shape.num_heads, reqs, shape.has_starts);
                EXPECT(tiles * run->num_splits <=
                       (run->num_splits == 1 ? 4 * h200.num_sms : h200.num_sms));
                EXPECT(run->num_splits == 1 ||
                       SMLA_PARTIAL_ALIGN + smla_partial_bytes(rows * run->num_splits) <=
                           plan.workspace_bytes);
                EXPECT_EQ(run->cut_bytes, 0);
            }
        }
    }
}

int
main(void)
{
    RUN(test_choice);
    RUN(test_choice_with_starts);
    RUN(test_tiles_with_starts);
    RUN(test_others);
    RUN(test_bounds);
    return report("test_cuda_few_tiles");
}
