/* test_cuda_token_tiles.c: which dense calls over FP8 rows are planned in tiles of several query
 * tokens of a request, on a Hopper GPU that the machine need not have, and how they are launched.
 */
#include "cuda/attention/table/kernels.c"       // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/run_attention.c" // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/schedule.c"      // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/widen.c"         // NOLINT(bugprone-suspicious-include)

smla_status
smla_cuda_status(const char *op, const char *call, cudaError_t code, smla_error *error)
{
    return code == cudaSuccess
               ? SMLA_OK
               : smla_fail(error, SMLA_ERROR_RUNTIME, "%s: %s: %d", op, call, (int)code);
}

#include "fake_cuda/launchers.h"

static smla_error error;

static smla_attention_shape
make_shape(int64_t reqs, int64_t queries, int64_t heads)
{
    return (smla_attention_shape){.num_tokens = reqs * queries,
                                  .num_heads = heads,
                                  .topk = 4096,
                                  .formats = {&smla_kv_formats[SMLA_ROW_FP8_DS_MLA]},
                                  .source = SMLA_KEYS_TABLE,
                                  .table_reqs = reqs,
                                  .tile_queries = queries};
}

/* The launcher that a run takes. */
static const char *
launcher_of_run(const smla_attention_run *run)
{
    return name_of_launcher(run->tile_tokens > 1 ? run->kernel->launch_tiles : run->kernel->launch);
}

static void
test_choice(void)
{
    static const struct {
        int64_t reqs, queries, heads;
        const char *launcher;
        int64_t tile_tokens;
        int splits;
    } cases[] = {
        {128, 1, 16, "sm90_fp8_dense_16", 0, 1},
        {128, 2, 8, "sm90_fp8_tiles_16", 2, 1},
        {128, 3, 8, "sm90_fp8_tiles_32", 3, 1},
        {128, 4, 8, "sm90_fp8_tiles_32", 4, 1},
        {128, 8, 8, "sm90_fp8_tiles_64", 8, 1},
        {128, 2, 16, "sm90_fp8_tiles_32", 2, 1},
        {128, 3, 16, "sm90_fp8_tiles_64", 3, 1},
        {128, 4, 16, "sm90_fp8_tiles_64", 4, 1},
        {128, 2, 32, "sm90_fp8_tiles_64", 2, 1},
        {128, 2, 17, "sm90_fp8_tiles_64", 2, 1},
        {128, 8, 1, "sm90_fp8_tiles_16", 8, 1},
        /* several tiles per request: as many tokens as divide those of a request */
        {128, 4, 32, "sm90_fp8_tiles_64", 2, 1},
        {128, 6, 16, "sm90_fp8_tiles_64", 3, 1},
        {128, 8, 16, "sm90_fp8_tiles_64", 4, 1},
        {128, 16, 1, "sm90_fp8_tiles_16", 8, 1},
        /* no tile has several tokens */
        {128, 2, 33, "sm90_fp8_dense_64", 0, 1},
        {128, 2, 64, "sm90_fp8_dense_64", 0, 1},
        {128, 2, 128, "sm90_fp8_dense_64", 0, 1},
        {128, 3, 32, "sm90_fp8_dense_32", 0, 1},
        {128, 7, 16, "sm90_fp8_dense_16", 0, 1},
        /* few groups: the splits are those of calls with as many heads as a tile has rows */
        {25, 8, 8, "sm90_fp8_tiles_64", 8, 5},
        {64, 4, 16, "sm90_fp8_tiles_64", 4, 2},
        /* at most one and a half tokens per SM */
        {99, 2, 16, "sm90_fp8_dense_16", 0, 1},
        {100, 2, 16, "sm90_fp8_tiles_32", 2, 1},
        {8, 2, 8, "sm90_fp8_dense_16", 0, 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const smla_attention_shape shape =
            make_shape(cases[i].reqs, cases[i].queries, cases[i].heads);
        smla_attention_plan plan;
        smla_cuda_plan_attention(&shape, &plan);
        const smla_attention_run *const run = &plan.runs[0];
        EXPECT_EQ(run->tile_tokens, cases[i].tile_tokens);
        EXPECT(strcmp(launcher_of_run(run), cases[i].launcher) == 0);
        EXPECT_EQ(run->num_splits, cases[i].splits);
        EXPECT(!plan.reads_lengths && !run->interleaves);
    }
}

/* What keeps calls from tiles: splits that are given, tokens that may not share one, other rows. */
static void
test_others(void)
{
    smla_attention_plan plan;
    smla_attention_shape shape = make_shape(128, 2, 16);
    for (int splits = 1; splits <= 3; splits++) {
        shape.num_splits = splits;
        smla_cuda_plan_attention(&shape, &plan);
        EXPECT_EQ(plan.runs[0].tile_tokens, 0);
        EXPECT_EQ(plan.runs[0].num_splits, splits);
        EXPECT(strcmp(launcher_of(plan.runs[0].kernel), "sm90_fp8_dense_16") == 0);
    }
    shape = make_shape(128, 2, 16);
    shape.tile_queries = 0;
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT_EQ(plan.runs[0].tile_tokens, 0);
    static const int rows[] = {SMLA_ROW_BFLOAT16, SMLA_ROW_FP8_NOPE, SMLA_ROW_FP8_E4M3_576};
    for (int i = 0; i < 3; i++) {
        shape = make_shape(128, 2, 16);
        shape.formats[0] = &smla_kv_formats[rows[i]];
        smla_cuda_plan_attention(&shape, &plan);
        EXPECT_EQ(plan.runs[0].tile_tokens, rows[i] == SMLA_ROW_FP8_E4M3_576 ? 2 : 0);
    }
    EXPECT(strcmp(launcher_of_run(&plan.runs[0]), "sm90_e4m3_tiles_32") == 0);
    EXPECT(strcmp(smla_cuda_kernel_name(&plan.runs[0]),
                  "attention_e4m3_tiles_sm90.cu, 32 rows per CTA") == 0);
    shape.needs = SMLA_NEEDS_QUERY_SCALE;
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT_EQ(plan.runs[0].tile_tokens, 2);
    shape.needs = SMLA_NEEDS_SOFTCAP;
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT_EQ(plan.runs[0].tile_tokens, 0);
    devices[0] = a100;
    shape = make_shape(128, 2, 16);
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT_EQ(plan.runs[0].tile_tokens, 0);
    devices[0] = h200;
}

/* Bytes of the partial rows of a plan, as its launches lay them out. */
static int64_t
count_partial_bytes(const smla_attention_plan *plan, int64_t heads)
{
    const smla_attention_run *const last = &plan->runs[plan->num_runs - 1];
    return last->num_splits == 1
               ? 0
               : SMLA_PARTIAL_ALIGN +
                     smla_partial_bytes(last->num_tokens * last->num_splits * heads);
}

/* Rows fit tiles, tiles have whole tokens, and workspaces that callers have asked for suffice,
 * whatever they know of requests. */
static void
check_plan(int64_t reqs, int64_t queries, int64_t heads, int64_t *num_split, int64_t *num_runs)
{
    const smla_attention_shape shape = make_shape(reqs, queries, heads);
    const smla_attention_shape asked = {.num_tokens = reqs * queries,
                                        .num_heads = heads,
                                        .topk = SMLA_SPLIT_ALIGN,
                                        .covers_tables = true};
    smla_attention_plan plan, again;
    smla_cuda_plan_attention(&shape, &plan);
    smla_cuda_plan_attention(&shape, &again);
    EXPECT_EQ(again.workspace_bytes, plan.workspace_bytes);
    EXPECT_EQ(again.num_runs, plan.num_runs);
    EXPECT(plan.num_runs == 1 || plan.num_runs == 2);
    int64_t tokens = 0;
    for (int i = 0; i < plan.num_runs; i++) {
        const smla_attention_run *const run = &plan.runs[i];
        EXPECT(again.runs[i].kernel == run->kernel);
        EXPECT_EQ(again.runs[i].num_splits, run->num_splits);
        EXPECT_EQ(again.runs[i].num_tokens, run->num_tokens);
        const int64_t count = run->tile_tokens > 1 ? run->tile_tokens : 1;
        EXPECT_EQ(run->tile_tokens, plan.runs[0].tile_tokens);
        EXPECT_EQ(run->num_tokens % count, 0);
        EXPECT_EQ(queries % count, 0);
        EXPECT(count <= SMLA_TILE_TOKENS);
        EXPECT(count == 1 || count * heads <= run->kernel->heads_per_cta);
        EXPECT(run->cut_bytes <= plan.workspace_bytes);
        tokens += run->num_tokens;
    }
    EXPECT_EQ(tokens, reqs * queries);
    EXPECT(count_partial_bytes(&plan, heads) <= plan.workspace_bytes);
    EXPECT(plan.workspace_bytes <= smla_cuda_attention_workspace_size(&asked));
    if (plan.runs[0].tile_tokens > 1) {
        *num_split += plan.runs[plan.num_runs == 2].num_splits > 1;
        *num_runs += plan.num_runs == 2;
    }
}

static void
test_plans(void)
{
    static const int64_t heads[] = {1, 2, 7, 8, 16, 17, 21, 32, 33, 64, 128};
    static const int64_t reqs[] = {0, 1, 2, 7, 32, 65, 66, 67, 128, 132, 133, 160, 200, 264, 300};
    int64_t num_split = 0, num_runs = 0;
    for (size_t r = 0; r < sizeof reqs / sizeof reqs[0]; r++) {
        for (size_t h = 0; h < sizeof heads / sizeof heads[0]; h++) {
            for (int64_t queries = 1; queries <= 12; queries++) {
                check_plan(reqs[r], queries, heads[h], &num_split, &num_runs);
            }
        }
    }
    EXPECT(num_split > 0 && num_runs > 0);
}

/* Plans that differ in nothing but tiles do not stand in for each other. */
static void
test_known_plans_have_tiles(void)
{
    for (int64_t groups = 100; groups < 400; groups++) {
        smla_attention_shape one = make_shape(groups, 1, 32);
        const smla_attention_shape two = make_shape(groups, 2, 16);
        smla_attention_plan of_one, of_two;
        smla_cuda_plan_attention(&one, &of_one);
        smla_cuda_plan_attention(&two, &of_two);
        EXPECT_EQ(of_one.runs[0].tile_tokens, 0);
        EXPECT_EQ(of_two.runs[0].tile_tokens, 2);
        EXPECT(of_two.runs[0].kernel->heads_per_cta >= 32);
    }
}

/* Both runs of a plan in one launch, whose tokens in front are whole. The combine kernel folds
 * partial rows token by token. */
static void
test_runs(void)
{
    enum { REQS = 160, TOKENS = 2 * REQS };
    static int32_t ranges[TOKENS];
    static uint8_t workspace[64]; /* an address alone */
    const smla_attention_shape shape = make_shape(REQS, 2, 32);
    smla_attention_params params = {
        .queries = {.num_tokens = TOKENS, .num_heads = 32},
        .source = SMLA_KEYS_TABLE,
        .keys = {.num_lists = 1, .entry_tokens = 64},
        .visible.reqs = {.num_tokens = TOKENS, .num_reqs = REQS, .query_len = 2},
    };
    params.keys.lists[0] = (smla_key_list){
        .begin = ranges,
        .end = ranges,
        .begin_stride = 1,
        .end_stride = 1,
        .topk = 4096,
        .kv.format = &smla_kv_formats[SMLA_ROW_FP8_DS_MLA],
        .map = {.block_table = ranges, .req_id_per_token = ranges},
    };
    smla_cuda_plan_attention(&shape, &params.plan);
    EXPECT_EQ(params.plan.num_runs, 2);
    params.results.num_splits = params.plan.runs[0].num_splits;
    params.workspace = (smla_workspace){workspace, params.plan.workspace_bytes, "workspace"};
    num_launches = 0;
    EXPECT_OK(smla_cuda_attend_lists(&params, &error));
    EXPECT_EQ(num_launches, 2);
    EXPECT(strcmp(launches[0].launcher, "sm90_fp8_tiles_64") == 0);
    EXPECT_EQ(launches[0].tile_tokens, 2);
    EXPECT_EQ(launches[0].whole_tokens, 2 * 132);
    EXPECT_EQ(launches[0].params.queries.num_tokens, TOKENS);
    EXPECT_EQ(launches[0].params.queries.num_heads, 32);
    EXPECT(strcmp(launches[1].launcher, "combine") == 0);
    EXPECT_EQ(launches[1].params.queries.num_tokens, TOKENS - 2 * 132);
    EXPECT_EQ(launches[1].params.results.num_splits, params.plan.runs[1].num_splits);
    EXPECT(launches[1].params.keys.lists[0].end == ranges + 2 * 132);
}

int
main(void)
{
    devices[0] = h200;
    RUN(test_choice);
    RUN(test_others);
    RUN(test_plans);
    RUN(test_known_plans_have_tiles);
    RUN(test_runs);
    return report("test_cuda_token_tiles");
}
