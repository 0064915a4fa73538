/* test_cuda_runs.c: what schedule.c makes of a plan: its runs with their kernels and splits, and
 * the workspace that callers give.
 */
#include "fake_cuda/plan_model.h"

/* ---- Runs of a plan ------------------------------------------------------------------------ */

static void
expect_run(const smla_attention_run *run, const split_problem *problem, smla_kv_set formats,
           const run_plan *model, int64_t tokens, bool is_rest)
{
    const smla_attention_shape part =
        make_shape(formats, tokens, problem->num_heads, problem->topk, problem->extra_topk);
    const bool is_split = model->num_splits > 1;
    const bool is_long = model_columns(problem, model->num_splits) >= 256;
    EXPECT(run->kernel == model->kernel);
    EXPECT_EQ(run->num_tokens, tokens);
    EXPECT_EQ(run->num_splits, model->num_splits);
    EXPECT_EQ(run->cut_bytes, is_split ? 0 : model_workspace(formats, &part));
    EXPECT_EQ(run->interleaves, is_split && is_long && !is_rest && model->kernel->arch == 90 &&
                                    model->kernel->max_columns == 0);
}

/* Tokens in front of a rest run whole on the kernel for whole calls, as does the rest, in splits of
 * ranges. Where the caller gives the number of splits, there is one run, of the first kernel that
 * fits so many columns. */
static void
test_runs_of_plans(void)
{
    static const int64_t topks[][2] = {{2048, 0},  {512, 0},    {128, 512}, {256, 256},
                                       {256, 768}, {1024, 512}, {65, 0},    {300, 300}};
    int num_rests = 0;
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
        const run_plan last = model.run;
        if (start > 0) {
            const run_plan whole = {.kernel = problem.whole, .num_splits = 1};
            expect_run(&plan.runs[0], &problem, formats, &whole, start, false);
            num_rests++;
        }
        expect_run(&plan.runs[plan.num_runs - 1], &problem, formats, &last, model.rest, start > 0);
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
    EXPECT(num_rests > 100 && num_interleaved > 100 && num_at_limit > 0);
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

/* ---- Widened rows -------------------------------------------------------------------------- */

/* Bytes for the rows of a call: `num_keys` of them, or none. */
static int64_t
wide_room(const smla_attention_shape *shape, int64_t num_keys)
{
    const smla_attention_shape asked = {.num_tokens = shape->num_tokens,
                                        .num_heads = shape->num_heads,
                                        .topk = shape->topk,
                                        .extra_topk = shape->extra_topk,
                                        .num_keys = num_keys,
                                        .covers_tables = true};
    return smla_cuda_attention_workspace_size(&asked) + smla_key_ranges_bytes(shape->num_tokens);
}

/* Whether a call with so many rows and bytes of workspace widens its first run. */
static bool
widens(smla_attention_shape shape, int64_t num_keys, int64_t room)
{
    smla_attention_plan plan;
    shape.num_keys = num_keys;
    shape.room = room;
    smla_cuda_plan_attention(&shape, &plan);
    for (int i = 0; i < plan.num_runs; i++) {
        const smla_attention_run *const run = &plan.runs[i];
        const bool is_wide = run->wide_offset != 0;
        EXPECT(!is_wide || (i == 0 && run->num_splits == 1));
        EXPECT(!is_wide || run->wide_offset >= plan.workspace_bytes);
        EXPECT(!is_wide || run->wide_offset + smla_wide_bytes(num_keys) <= room);
        EXPECT_EQ(is_wide, strstr(smla_cuda_kernel_name(run), "attention_wide_sm90.cu") != NULL);
    }
    return plan.runs[0].wide_offset != 0;
}

/* Calls widen rows exactly where the workspace has the bytes that num_keys asks for, and where that
 * asks for more than a call without it. */
static void
test_room_for_rows(void)
{
    int num_wide = 0;
    devices[0] = h200;
    for (int i = 0; i < 3000; i++) {
        const smla_attention_shape shape =
            make_shape(i % 4 < 2 ? SMLA_ROWS_FP8 : SMLA_ROWS_V4, 1 + random_int(5000),
                       1 + random_int(128), 1 + random_int(4096), i % 3 == 0 ? 0 : random_int(900));
        const int64_t num_keys = 1 + random_int(i % 2 == 0 ? 3000 : 1000000);
        const int64_t room = wide_room(&shape, num_keys);
        const bool asks = room != wide_room(&shape, 0);
        EXPECT(!asks || room == wide_room(&shape, 0) + smla_wide_bytes(num_keys));
        /* The tokens in front of a rest may be too few. */
        const bool is_wide = widens(shape, num_keys, room);
        EXPECT(asks || !is_wide);
        EXPECT(!widens(shape, num_keys, room - 1));
        EXPECT(!widens(shape, num_keys, 0));
        num_wide += is_wide;
    }
    EXPECT(num_wide > 300);
}

static void
test_shapes_that_widen(void)
{
    devices[0] = h200;
    smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 4096, 128, 2048, 0);
    EXPECT(widens(shape, 32768, INT64_MAX));
    EXPECT(widens(shape, 1290000, INT64_MAX));
    EXPECT(!widens(shape, 1310000, INT64_MAX));
    shape.num_tokens = 462; /* whole waves of 512 tokens */
    EXPECT(widens(shape, 131072, INT64_MAX));
    shape.num_tokens = 66;
    EXPECT(!widens(shape, 32768, INT64_MAX));
    EXPECT(widens(shape, 5000, INT64_MAX));
    shape = make_shape(SMLA_ROWS_FP8, 4096, 64, 2048, 0);
    EXPECT(widens(shape, 32768, INT64_MAX));
    EXPECT(!widens(shape, 131072, INT64_MAX)); /* rows that miss L2 */
    shape.num_heads = 32;                      /* the kernel for wide rows always computes 64 */
    EXPECT(!widens(shape, 32768, INT64_MAX));
    shape.num_heads = 64;
    shape.num_splits = 1; /* bits must not depend on the workspace */
    EXPECT(!widens(shape, 32768, INT64_MAX));
    shape = make_shape(SMLA_ROWS_V4, 4096, 128, 128, 512);
    EXPECT(widens(shape, 32768, INT64_MAX));
    shape = make_shape(SMLA_ROWS_FP8, 4096, 128, 128, 512);
    EXPECT(widens(shape, 32768, INT64_MAX));
    shape = make_shape(SMLA_ROWS_MIXED, 4096, 128, 2048, 512);
    EXPECT(!widens(shape, 32768, INT64_MAX));
    shape = make_shape(SMLA_ROWS_BF16, 4096, 128, 2048, 0);
    EXPECT(!widens(shape, 32768, INT64_MAX));
    devices[0] = a100;
    shape = make_shape(SMLA_ROWS_FP8, 4096, 128, 2048, 0);
    EXPECT(!widens(shape, 32768, INT64_MAX));
    EXPECT_EQ(wide_room(&shape, 32768), wide_room(&shape, 0));
}

/* A header is as large as a row, and rows keep their slots. */
static void
test_wide_rows(void)
{
    static uint8_t memory[32768];
    const smla_attention_params params = {.workspace = {.memory = memory}};
    const smla_attention_run run = {.wide_offset = 1000};
    const smla_wide_header *const header = smla_wide_header_of(&params, &run);
    EXPECT_EQ((uintptr_t)header % SMLA_WIDE_ALIGN, 0);
    EXPECT((const uint8_t *)header >= memory + 1000);
    EXPECT((const uint8_t *)header < memory + 1000 + SMLA_WIDE_ALIGN);
    EXPECT_EQ(sizeof *header, SMLA_WIDE_ROW_BYTES);
    for (int row_bytes = 1152; row_bytes >= 1024; row_bytes -= 128) {
        const smla_kv_format_info *const format =
            &smla_kv_formats[row_bytes == 1152 ? SMLA_ROW_FP8_DS_MLA : SMLA_ROW_FP8_V4];
        smla_key_lists keys = {
            .lists = {{.kv = {.num_pages = 5, .block_size = 3, .page_stride_bytes = -5000}},
                      {.kv = {.num_pages = 2, .block_size = 4, .page_stride_bytes = 5000}}},
            .num_lists = 2};
        keys.lists[0].kv.format = keys.lists[1].kv.format = format;
        smla_take_wide_rows(header, &keys);
        const uint8_t *at = (const uint8_t *)header + 1152;
        for (int64_t slot = 0; slot < 15 + 8; slot++, at += row_bytes) {
            EXPECT(smla_kv_slot(&keys.lists[slot >= 15].kv, slot % 15).row == at);
        }
    }
    EXPECT_EQ(smla_wide_bytes(0), 0);
    EXPECT_EQ(smla_wide_bytes(15), SMLA_WIDE_ALIGN + 16 * 1152);
}

int
main(void)
{
    RUN(test_runs_of_plans);
    RUN(test_columns);
    RUN(test_planned_splits);
    RUN(test_ranged_lists);
    RUN(test_workspace);
    RUN(test_room_for_rows);
    RUN(test_shapes_that_widen);
    RUN(test_wide_rows);
    return report("test_cuda_runs");
}
