/* test_cuda_runs.c: what schedule.c makes of a plan: its runs with their kernels and splits, and
 * the workspace that callers give.
 */
#include "fake_cuda/plan_model.h"

/* ---- Runs of a plan ------------------------------------------------------------------------ */

static void
expect_run(const smla_attention_run *run, const split_problem *problem, smla_kv_set formats,
           const run_plan *model, int64_t tokens)
{
    const smla_attention_shape part =
        make_shape(formats, tokens, problem->num_heads, problem->topk, problem->extra_topk);
    const bool is_split = model->num_splits > 1;
    const bool is_long = model_columns(problem, model->num_splits) >= 256;
    EXPECT(run->kernel == model->kernel);
    EXPECT_EQ(run->num_tokens, tokens);
    EXPECT_EQ(run->num_splits, model->num_splits);
    EXPECT_EQ(run->cut_bytes, is_split ? 0 : model_workspace(formats, &part));
    EXPECT_EQ(run->interleaves,
              is_split && is_long && model->kernel->arch == 90 && model->kernel->max_columns == 0);
}

/* Tokens in front of a rest run unsplit on the kernel for whole calls, and the rest as a batch of
 * its own. Where the caller gives the number of splits, there is one run, of the first kernel that
 * fits so many columns. */
static void
test_runs_of_plans(void)
{
    static const int64_t topks[][2] = {{2048, 0},  {512, 0},    {128, 512}, {256, 256},
                                       {256, 768}, {1024, 512}, {65, 0},    {300, 300}};
    int num_rests = 0;
    int num_split_rests = 0;
    int num_interleaved = 0;
    int num_at_limit = 0;
    devices[0] = h200;
    memset(known_plans, 0, sizeof known_plans);
    for (int i = 0; i < 20000; i++) {
        const smla_kv_set formats = all_formats[random_int(2)];
        const int64_t *const topk = topks[random_int(8)];
        smla_attention_shape shape =
            make_shape(formats, 1 + random_int(400), some_heads[random_int(NUM_HEADS)], topk[0],
                       topk[1]);
        const split_problem problem = make_problem(formats, &shape);
        const batch_plan model = model_plan(&problem, shape.num_tokens);
        smla_attention_plan plan;
        smla_cuda_plan_attention(&shape, &plan);
        const int64_t start = shape.num_tokens - model.rest;
        EXPECT_EQ(plan.num_runs, start > 0 ? 2 : 1);
        run_plan last = model.run;
        if (start > 0) {
            const run_plan whole = {.kernel = problem.whole, .num_splits = 1};
            expect_run(&plan.runs[0], &problem, formats, &whole, start);
            last = model_plan(&problem, model.rest).run;
            num_rests++;
            num_split_rests += last.num_splits > 1 && last.kernel != problem.whole;
        }
        expect_run(&plan.runs[plan.num_runs - 1], &problem, formats, &last, model.rest);
        num_interleaved += plan.runs[plan.num_runs - 1].interleaves;
        num_at_limit += last.num_splits > 1 && last.kernel->max_columns == 0 &&
                        model_columns(&problem, last.num_splits) == 256;

        shape.num_splits = 1 + (int)random_int(SMLA_MAX_SPLITS);
        smla_cuda_plan_attention(&shape, &plan);
        EXPECT_EQ(plan.num_runs, 1);
        const smla_kernel_call call = {
            .formats = formats,
            .num_heads = shape.num_heads,
            .columns =
                shape.num_splits == 1 ? SMLA_UNSPLIT : model_columns(&problem, shape.num_splits),
        };
        EXPECT(plan.runs[0].kernel == smla_find_kernel(&devices[0], &call));
        EXPECT_EQ(plan.runs[0].num_tokens, shape.num_tokens);
        EXPECT_EQ(plan.runs[0].num_splits, shape.num_splits);
        EXPECT_EQ(plan.runs[0].cut_bytes, 0);
        EXPECT(!plan.runs[0].interleaves);
    }
    /* The shapes have all kinds of runs. */
    EXPECT(num_rests > 100 && num_split_rests > 10 && num_interleaved > 100 && num_at_limit > 0);
}

static void
test_columns(void)
{
    static const int64_t topks[] = {0,
                                    1,
                                    63,
                                    64,
                                    65,
                                    2048,
                                    4097,
                                    INT32_MAX,
                                    INT64_C(1) << 31,
                                    UINT32_MAX,
                                    INT64_C(1) << 32,
                                    INT64_C(1) << 40};
    for (int splits = 1; splits <= SMLA_MAX_SPLITS; splits++) {
        for (int i = 0; i < 12; i++) {
            const split_problem problem = {.topk = topks[i], .extra_topk = topks[11 - i]};
            EXPECT_EQ(count_columns(&problem, splits), model_columns(&problem, splits));
            EXPECT_EQ(count_columns(&problem, splits),
                      smla_split_columns(topks[i], splits) +
                          smla_split_columns(topks[11 - i], splits));
        }
    }
}

/* The number of splits where there is no plan, and where the caller gives it. */
static void
test_planned_splits(void)
{
    devices[0] = h200;
    smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 1, 128, 2048, 0);
    const int planned = planned_splits(&shape);
    EXPECT(planned > 1);
    shape.formats[0] = NULL; /* not known yet: planned as FP8 */
    EXPECT_EQ(planned_splits(&shape), planned);
    shape.num_splits = 7;
    EXPECT_EQ(planned_splits(&shape), 7);
    shape.num_splits = 0;
    shape.device_id = 1;
    EXPECT_EQ(planned_splits(&shape), 1);
    shape.device_id = 0;
    shape.num_tokens = 0;
    EXPECT_EQ(planned_splits(&shape), 1);
    shape.num_tokens = 1;
    devices[0].compute_capability = 75;
    EXPECT_EQ(planned_splits(&shape), 1);
}

/* Lists with dense columns or a `begin` are for kernels that serve them, on Hopper too. */
static void
test_ranged_lists(void)
{
    devices[0] = h200;
    for (int num_splits = 0; num_splits <= 2; num_splits++) {
        for (int f = 0; f < NUM_SETS; f++) {
            smla_attention_shape shape =
                make_shape(all_formats[f], 8, 64, 2048, all_formats[f] == SMLA_ROWS_MIXED ? 64 : 0);
            smla_attention_plan plan;
            shape.num_splits = num_splits;
            shape.needs = SMLA_NEEDS_RANGES;
            smla_cuda_plan_attention(&shape, &plan);
            for (int i = 0; i < plan.num_runs; i++) {
                EXPECT(plan.runs[i].kernel != NULL && plan.runs[i].kernel->arch == 80);
            }
            EXPECT(plan.workspace_bytes == smla_cuda_attention_workspace_size(&shape));
            EXPECT(num_splits == 1 || plan.workspace_bytes > 0);
        }
    }
}

/* ---- Workspace ----------------------------------------------------------------------------- */

static void
test_workspace(void)
{
    devices[0] = h200;
    for (int i = 0; i < NUM_TOPKS; i++) {
        for (int h = 0; h < NUM_HEADS; h++) {
            int64_t former = 0;
            for (int64_t tokens = 0; tokens <= 600; tokens += 1 + tokens / 8) {
                smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, tokens, some_heads[h],
                                                        some_topks[i][0], some_topks[i][1]);
                shape.formats[0] = shape.formats[1] = NULL; /* every format */
                int64_t largest = 0;
                for (int f = 0; f < 3; f++) {
                    const int64_t bytes = model_workspace(all_formats[f], &shape);
                    largest = bytes > largest ? bytes : largest;
                }
                const int64_t bytes = smla_cuda_attention_workspace_size(&shape);
                EXPECT_EQ(bytes, largest);
                EXPECT(bytes >= former);
                former = bytes;
            }
        }
    }
    smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 3, 5, 2048, 0);
    shape.num_splits = 1;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
    shape.num_splits = 2;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 16 + 30 * 8 + 30 * 2048);
    shape.value_dim = 128;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 16 + 30 * 8 + 30 * 512);
    shape.value_dim = 0;
    shape.num_splits = 3; /* 45 rows of 8 bytes, rounded up to 16 */
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 16 + 368 + 45 * 2048);
    shape.num_splits = 2;
    shape.num_tokens = 0;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
    shape = make_shape(SMLA_ROWS_FP8, 3, 5, 2048, 0);
    shape.device_id = 1;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
    shape.formats[0] = NULL;
    EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), 0);
}

int
main(void)
{
    RUN(test_runs_of_plans);
    RUN(test_columns);
    RUN(test_planned_splits);
    RUN(test_ranged_lists);
    RUN(test_workspace);
    return report("test_cuda_runs");
}
