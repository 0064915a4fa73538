/* test_cuda_attention.c: which kernels run_attention.c starts for a call, for which of its
 * tokens, and which calls it refuses. No kernel runs; their launchers record calls.
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
#include "fake_cuda/shape.h"

enum { NUM_TOKENS = 700 };

/* The arrays serve as addresses alone, and every stride is another number. */
static uint16_t q_nope[NUM_TOKENS * 5], q_pe[NUM_TOKENS * 7], out[NUM_TOKENS * 11];
static float lse[NUM_TOKENS * 13], max_logits[NUM_TOKENS * 17];
static int32_t indices[2][NUM_TOKENS * 23], lengths[2][NUM_TOKENS * 29], requests[2][NUM_TOKENS];
static int32_t block_table[1];
static uint8_t workspace[512];

static const smla_kv_format_info *
find_format(bool is_fp8)
{
    return &smla_kv_formats[is_fp8 ? SMLA_ROW_FP8_DS_MLA : SMLA_ROW_BFLOAT16];
}

/* One list of FP8 rows, with slots and without lengths. The workspace is always large enough. */
static smla_attention_params
make_params(int64_t tokens, int64_t heads, int64_t topk, int num_splits)
{
    num_launches = 0;
    num_good_launches = -1;
    devices[0] = h200;
    return (smla_attention_params){
        .call = {.op = "sparse_attention"},
        .queries = {.num_tokens = tokens,
                    .num_heads = heads,
                    .parts = {{.data = q_nope, .stride_token = 5},
                              {.data = q_pe, .stride_token = 7}},
                    .type = SMLA_FLOAT_BF16},
        .keys = {.lists = {{.kv = {.format = find_format(true)},
                            .indices = indices[0],
                            .indices_stride_token = 19,
                            .topk = topk}},
                 .num_lists = 1},
        .results = {.out = out,
                    .out_stride_token = 11,
                    .lse = lse,
                    .lse_stride_token = 13,
                    .out_type = SMLA_FLOAT_BF16,
                    .num_splits = num_splits},
        .workspace = {.memory = workspace, .bytes = INT64_MAX, .name = "workspace"},
    };
}

/* Adds all other arrays that a call may have. */
static void
add_everything(smla_attention_params *params, int64_t extra_topk)
{
    params->keys.num_lists = 2;
    params->keys.lists[1] = params->keys.lists[0];
    params->keys.lists[1].topk = extra_topk;
    for (int i = 0; i < 2; i++) {
        smla_key_list *const list = &params->keys.lists[i];
        list->indices = indices[i];
        list->indices_stride_token = 19 + 4 * i;
        list->end = lengths[i];
        list->end_stride = 25 + 4 * i;
        list->map.block_table = block_table;
        list->map.req_id_per_token = requests[i];
    }
    params->results.max_logits = max_logits;
    params->results.max_logits_stride_token = 17;
}

/* The plan for the num_splits of params; for 0 the backend chooses the number. */
static smla_attention_plan
plan_call(const smla_attention_params *params)
{
    const smla_attention_shape shape = shape_of(params);
    smla_attention_plan plan;
    smla_cuda_plan_attention(&shape, &plan);
    return plan;
}

static smla_status
run_call(const smla_attention_params *params)
{
    smla_attention_params planned = *params;
    planned.plan = plan_call(params);
    planned.results.num_splits = planned.plan.runs[0].num_splits;
    return smla_cuda_attend_lists(&planned, &error);
}

static void
expect_launch(int i, const char *launcher, int64_t tokens, int num_splits)
{
    EXPECT(i < num_launches);
    if (i < num_launches) {
        EXPECT(strcmp(launches[i].launcher, launcher) == 0);
        EXPECT_EQ(launches[i].params.queries.num_tokens, tokens);
        EXPECT_EQ(launches[i].params.results.num_splits, num_splits);
    }
}

/* The arrays of a launch are those of the call, from token `start` on. */
static void
expect_tokens(const smla_attention_params *part, const smla_attention_params *call, int64_t start)
{
    EXPECT(smla_row16(&part->queries.parts[0], 0, 0) ==
           smla_row16(&call->queries.parts[0], start, 0));
    EXPECT(smla_row16(&part->queries.parts[1], 0, 0) ==
           smla_row16(&call->queries.parts[1], start, 0));
    EXPECT(smla_out16(&part->results, 0, 0) == smla_out16(&call->results, start, 0));
    EXPECT(part->results.lse == call->results.lse + start * 13);
    EXPECT(part->results.max_logits ==
           (call->results.max_logits == NULL ? NULL : call->results.max_logits + start * 17));
    EXPECT_EQ(part->keys.num_lists, call->keys.num_lists);
    for (int i = 0; i < call->keys.num_lists; i++) {
        const smla_key_list *const own = &part->keys.lists[i];
        const smla_key_list *const all = &call->keys.lists[i];
        EXPECT(own->indices == all->indices + start * (19 + 4 * i));
        EXPECT(own->end == (all->end == NULL ? NULL : all->end + start * (25 + 4 * i)));
        EXPECT(own->map.req_id_per_token ==
               (all->map.block_table == NULL ? NULL : all->map.req_id_per_token + start));
        EXPECT(own->map.block_table == all->map.block_table);
        EXPECT_EQ(own->topk, all->topk);
    }
    EXPECT(part->workspace.memory == call->workspace.memory);
    EXPECT_EQ(part->workspace.bytes, call->workspace.bytes);
    EXPECT_EQ(part->queries.num_heads, call->queries.num_heads);
}

/* ---- Split counts of the caller's ---------------------------------------------------------- */

static void
test_given_splits(void)
{
    static const struct {
        int heads, topk, extra, splits;
        const char *launcher;
    } cases[] = {
        {64, 2048, 0, 1, "sm90_fp8_64"},    {64, 64, 0, 1, "sm90_fp8_64"},
        {64, 2048, 0, 8, "sm90_small_32"},  {64, 2048, 0, 7, "sm90_fp8_64"},
        {64, 512, 512, 4, "sm90_small_32"}, {64, 512, 513, 4, "sm90_fp8_64"},
        {16, 2048, 0, 64, "sm90_small_16"}, {20, 2048, 0, 2, "sm90_fp8_32"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        smla_attention_params params =
            make_params(9, cases[i].heads, cases[i].topk, cases[i].splits);
        if (cases[i].extra > 0) {
            add_everything(&params, cases[i].extra);
        }
        EXPECT_OK(run_call(&params));
        EXPECT_EQ(num_launches, cases[i].splits == 1 ? 1 : 2);
        expect_launch(0, cases[i].launcher, 9, cases[i].splits);
        expect_tokens(&launches[0].params, &params, 0);
        EXPECT_EQ(launches[0].cut_bytes, 0); /* a token's bits depend on no other token */
        if (cases[i].splits > 1) {
            expect_launch(1, "combine", 9, cases[i].splits);
            expect_tokens(&launches[1].params, &params, 0);
            EXPECT(strcmp(launcher_of(launches[1].combined), cases[i].launcher) == 0);
        }
    }
    const smla_attention_params params = make_params(0, 64, 2048, 2);
    EXPECT_OK(run_call(&params));
    EXPECT_EQ(num_launches, 0);
}

/* A given number of splits, and its kernels, serve the whole batch, however large that is. */
static void
test_batches_are_alike(void)
{
    for (int64_t tokens = 1; tokens <= NUM_TOKENS; tokens += 37) {
        const smla_attention_params params = make_params(tokens, 128, 2048, 8);
        EXPECT_OK(run_call(&params));
        EXPECT_EQ(num_launches, 2);
        expect_launch(0, "sm90_small_32", tokens, 8);
    }
}

static void
test_formats(void)
{
    smla_attention_params params = make_params(9, 64, 2048, 2);
    params.keys.lists[1].kv.format = find_format(false); /* the format of a list that is absent */
    EXPECT_OK(run_call(&params));
    expect_launch(0, "sm90_fp8_64", 9, 2);
    params = make_params(9, 64, 2048, 2);
    params.keys.lists[0].kv.format = find_format(false);
    EXPECT_OK(run_call(&params));
    expect_launch(0, "sm90_bf16_64", 9, 2);
    params = make_params(9, 64, 2048, 2);
    add_everything(&params, 64);
    params.keys.lists[1].kv.format = find_format(false);
    EXPECT_OK(run_call(&params));
    expect_launch(0, "sm80_mixed_16", 9, 2);
    params = make_params(9, 64, 2048, 2);
    params.call.stream.device_id = 1;
    devices[1] = a100;
    EXPECT_OK(run_call(&params));
    expect_launch(0, "sm80_fp8_64", 9, 2);
}

/* An e4m3 query has a kernel of its own, and all launches of a call begin at their own tokens. */
static void
test_e4m3_query(void)
{
    static const uint8_t q_e4m3[NUM_TOKENS * 5];
    smla_attention_params params = make_params(NUM_TOKENS, 64, 2048, 0);
    params.keys.lists[0].kv.format = &smla_kv_formats[SMLA_ROW_BFLOAT16_512];
    EXPECT_OK(run_call(&params));
    EXPECT(strcmp(launches[0].launcher, "sm90_bf16_512_64") == 0);
    params = make_params(NUM_TOKENS, 64, 2048, 0);
    params.keys.lists[0].kv.format = &smla_kv_formats[SMLA_ROW_BFLOAT16_512];
    params.queries.type = SMLA_FLOAT_E4M3;
    params.queries.parts[0].data = q_e4m3;
    params.queries.parts[1].data = NULL;
    EXPECT_OK(run_call(&params));
    EXPECT(num_launches > 1);
    int64_t start = 0;
    for (int i = 0; i < num_launches; i++) {
        const smla_attention_params *const part = &launches[i].params;
        if (strcmp(launches[i].launcher, "combine") != 0) {
            EXPECT(strncmp(launches[i].launcher, "sm80_512_", 9) == 0);
            EXPECT(part->queries.parts[0].data == q_e4m3 + start * 5);
            EXPECT(part->queries.parts[1].data == NULL);
            start += part->queries.num_tokens;
        }
    }
    EXPECT_EQ(start, NUM_TOKENS);
}

/* ---- Refusals ------------------------------------------------------------------------------ */

static void
test_no_kernel(void)
{
    smla_attention_params params = make_params(9, 64, 2048, 2);
    devices[0] = (smla_cuda_device){75, 40, 65536};
    for (int planned = 0; planned < 2; planned++) {
        params.results.num_splits = planned ? 0 : 2;
        EXPECT_FAIL(run_call(&params), SMLA_ERROR_RUNTIME,
                    "sparse_attention: no kernel for sm_75, 65536 bytes of shared memory, "
                    "fp8_ds_mla and 64 heads; there are, for 1 to 128 heads: sm_80+ fp8_ds_mla; ");
        const char *const last = "; sm_90 of 512 values, exact as bfloat16"; /* nothing is cut */
        EXPECT(strcmp(error.text + strlen(error.text) - strlen(last), last) == 0);
    }
    EXPECT_EQ(num_launches, 0);
}

/* The workspace is checked to the last byte, wherever it starts. */
static void
test_workspace(void)
{
    for (int offset = 0; offset < 33; offset++) {
        smla_attention_params params = make_params(3, 5, 2048, 3);
        params.workspace.memory = workspace + offset;
        const int64_t padding = (int64_t)(16 - (uintptr_t)params.workspace.memory % 16) % 16;
        params.workspace.bytes = padding + 368 + 45 * 2048; /* 45 rows, states of 360 bytes */
        EXPECT_OK(run_call(&params));
        EXPECT_EQ(num_launches, 2);
        num_launches = 0;
        char text[128];
        snprintf(text, sizeof text, "`workspace` must have at least %d bytes, got %d",
                 (int)params.workspace.bytes, (int)params.workspace.bytes - 1);
        params.workspace.bytes--;
        EXPECT_FAIL(run_call(&params), SMLA_ERROR_VALUE, text);
        params.workspace.memory = NULL;
        params.workspace.bytes = INT64_MAX;
        EXPECT_FAIL(run_call(&params), SMLA_ERROR_VALUE, "at least 92528 bytes, got 0");
        EXPECT_EQ(num_launches, 0);
    }
    smla_attention_params params = make_params(3, 5, 2048, 1);
    params.workspace.memory = NULL;
    params.workspace.bytes = 0;
    EXPECT_OK(run_call(&params));
    EXPECT_EQ(num_launches, 1);
}

/* The partial rows of the splits are arrays in the workspace, aligned, one behind the other. */
static void
test_partial_rows(void)
{
    for (int offset = 0; offset < 33; offset++) {
        smla_attention_params params = make_params(3, 5, 2048, 3);
        params.workspace.memory = workspace + offset;
        const uint8_t *const first =
            workspace + offset + smla_partial_padding(params.workspace.memory);
        const smla_partial_rows partials = smla_partials_of(&params, 0);
        EXPECT((uintptr_t)first % 16 == 0 && first - workspace - offset < 16);
        EXPECT((const uint8_t *)partials.state == first);
        EXPECT((const uint8_t *)partials.out == first + 368);
        EXPECT_EQ(smla_partial_num_rows(&params, 0), 45);
    }
    smla_attention_params params = make_params(3, 5, 1000, 3);
    EXPECT_EQ(smla_columns_of_split(&params, 3), 384);
    add_everything(&params, 100);
    EXPECT_EQ(smla_columns_of_split(&params, 3), 384 + 64);
    EXPECT_EQ((int)SMLA_HALF_UNIT, 256); /* 512 halves in front of it */
}

/* The error of a failed launch is reported, and nothing is launched behind it. */
static void
test_failed_launches(void)
{
    smla_attention_params params = make_params(9, 64, 2048, 4);
    for (int n = 0; n < 2; n++) {
        num_launches = 0;
        num_good_launches = n;
        EXPECT_FAIL(run_call(&params), SMLA_ERROR_RUNTIME,
                    "sparse_attention: cudaLaunchKernelExC: 719");
        EXPECT_EQ(num_launches, n + 1);
    }
    params = make_params(67, 128, 2048, 0); /* full waves and the rest in splits, its combine */
    EXPECT_OK(run_call(&params));
    EXPECT_EQ(num_launches, 2);
    for (int n = 0; n < 2; n++) {
        num_launches = 0;
        num_good_launches = n;
        EXPECT_FAIL(run_call(&params), SMLA_ERROR_RUNTIME, "719");
        EXPECT_EQ(num_launches, n + 1);
    }
}

/* ---- Plans --------------------------------------------------------------------------------- */

/* Every token is computed once, by a kernel of the plan, in a workspace of the promised size. */
static void
check_planned(int64_t tokens, int64_t heads, bool has_everything)
{
    smla_attention_params params = make_params(tokens, heads, 2048, 0);
    if (has_everything) {
        add_everything(&params, 512);
    }
    const smla_attention_plan plan = plan_call(&params);
    params.workspace.memory = workspace + 1; /* the start that needs most padding */
    params.workspace.bytes = plan.workspace_bytes;
    EXPECT_EQ(plan.runs[0].num_tokens + (plan.num_runs == 2 ? plan.runs[1].num_tokens : 0), tokens);
    EXPECT_OK(run_call(&params));
    int64_t start = 0;
    for (int i = 0; i < num_launches; i++) {
        const smla_attention_params *const part = &launches[i].params;
        const int64_t whole = launches[i].whole_tokens;
        EXPECT(launches[i].combined == NULL);
        EXPECT(part->results.num_splits >= 1 && part->queries.num_tokens > whole && whole >= 0);
        EXPECT(whole == 0 || (part->results.num_splits > 1 && start == 0));
        expect_tokens(part, &params, start);
        EXPECT(launches[i].cut_bytes >= 0 && launches[i].cut_bytes <= plan.workspace_bytes);
        EXPECT((launches[i].cut_bytes == 0) == (part->results.num_splits > 1));
        if (part->results.num_splits > 1) {
            i++;
            expect_launch(i, "combine", part->queries.num_tokens - whole, part->results.num_splits);
            expect_tokens(&launches[i].params, &params, start + whole);
            EXPECT(strcmp(launcher_of(launches[i].combined), launches[i - 1].launcher) == 0);
        }
        start += part->queries.num_tokens;
    }
    EXPECT_EQ(start, tokens);
}

static void
test_planned(void)
{
    static const int heads[] = {8, 24, 64, 128};
    for (int64_t tokens = 1; tokens <= NUM_TOKENS; tokens++) {
        for (int h = 0; h < 4; h++) {
            check_planned(tokens, heads[h], tokens % 2 == 0);
        }
    }
}

/* Plans of an H200, as they are now. */
static void
test_known_plans(void)
{
    smla_attention_params params = make_params(66, 128, 2048, 0);
    EXPECT_OK(run_call(&params));
    EXPECT_EQ(num_launches, 1);
    expect_launch(0, "sm90_fp8_64", 66, 1);
    for (int64_t whole = 66; whole < 10000000; whole *= 400) {
        params = make_params(whole + 1, 128, 2048, 0);
        EXPECT_OK(run_call(&params));
        EXPECT_EQ(num_launches, 2);
        expect_launch(0, "sm90_fp8_64", whole + 1, 16);
        EXPECT_EQ(launches[0].whole_tokens, whole);
        expect_launch(1, "combine", 1, 16);
    }
}

/* A run whose rows are widened starts the launcher that does both, over the run's own tokens, and
 * knows where the rows lie. The rest of the batch reads the cache. */
static void
test_widened_rows(void)
{
    smla_attention_params params = make_params(200, 128, 2048, 0);
    params.keys.lists[0].kv.num_pages = 10;
    params.keys.lists[0].kv.block_size = 64;
    smla_attention_params planned = params;
    planned.plan = plan_call(&params);
    EXPECT_EQ(planned.plan.num_runs, 2);
    EXPECT_EQ(planned.plan.runs[0].num_tokens, 198);
    planned.plan.runs[0].wide_offset = 256;
    EXPECT_OK(smla_cuda_attend_lists(&planned, &error));
    EXPECT_EQ(num_launches, 3);
    expect_launch(0, "sm90_widened_64", 198, 1);
    EXPECT(launches[0].wide >= workspace + 256);
    EXPECT(launches[0].wide < workspace + 256 + SMLA_WIDE_ALIGN);
    expect_tokens(&launches[0].params, &params, 0);
    EXPECT(launches[1].wide == NULL);
    expect_launch(2, "combine", 2, planned.plan.runs[1].num_splits);
}

/* The shape of a dense call that Hopper's kernels for dense calls take. */
static smla_attention_shape
make_dense_shape(bool is_fp8, int64_t tokens, int64_t heads)
{
    return (smla_attention_shape){.num_tokens = tokens,
                                  .num_heads = heads,
                                  .topk = 4096,
                                  .formats = {find_format(is_fp8)},
                                  .source = SMLA_KEYS_TABLE};
}

/* Tiles take dense calls of bf16 rows that fit them, whole or cut by lengths. Portable kernels take
 * others. */
static void
test_dense_plans(void)
{
    smla_attention_plan plan;
    smla_attention_params params = make_params(128, 64, 4096, 0);
    smla_attention_shape shape = make_dense_shape(false, 128, 64);
    smla_attention_shape most = {.num_tokens = 128,
                                 .num_heads = 64,
                                 .topk = 4096,
                                 .covers_tables = true};
    params.keys.entry_tokens = 64;
    for (int splits = 0; splits <= 2; splits++) {
        shape.num_splits = most.num_splits = splits;
        smla_cuda_plan_attention(&shape, &plan);
        EXPECT_EQ(plan.reads_lengths, splits < 2);
        EXPECT_EQ(plan.runs[0].cut_bytes, splits == 0 ? plan.workspace_bytes : 0);
        EXPECT_EQ(plan.workspace_bytes > 0, splits != 1);
        EXPECT(plan.workspace_bytes <= smla_cuda_attention_workspace_size(&most));
        num_launches = 0;
        params.plan = plan;
        params.results.num_splits = plan.runs[0].num_splits;
        EXPECT_OK(smla_cuda_attend_lists(&params, &error));
        expect_launch(0, splits < 2 ? "sm90_dense_64" : "sm80_bf16_64", 128, splits < 2 ? 1 : 2);
    }
    shape.num_splits = 0;
    shape.needs = SMLA_NEEDS_QUERY_SCALE;
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT(!plan.reads_lengths);
    shape.needs = SMLA_NEEDS_UNALIGNED;
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT(!plan.reads_lengths);
}

/* Plans of dense calls of FP8 rows on an H200: the first run's launcher, tokens and splits. However
 * wide the table is, they are the same, and every kernel reads the ranges per token. */
static void
test_dense_fp8_plans(void)
{
    static const struct {
        int64_t tokens, heads;
        int given;
        const char *launcher;
        int64_t first_tokens;
        int splits;
    } cases[] = {
        {128, 64, 0, "sm90_fp8_dense_64", 128, 1},  {128, 16, 0, "sm90_fp8_dense_16", 128, 1},
        {128, 128, 0, "sm90_fp8_dense_64", 128, 1}, {128, 20, 1, "sm90_fp8_dense_32", 128, 1},
        {1, 64, 3, "sm90_fp8_dense_64", 1, 3},      {5, 1, 64, "sm90_fp8_dense_16", 5, 64},
        {8, 16, 0, "sm90_fp8_dense_16", 8, 16},     {1, 128, 0, "sm90_fp8_dense_32", 1, 32},
        {1, 16, 0, "sm90_fp8_dense_16", 1, 64},     {64, 64, 0, "sm90_fp8_dense_64", 64, 2},
    };
    static const int64_t widths[] = {1, 4096, 1 << 20};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        smla_attention_shape shape = make_dense_shape(true, cases[i].tokens, cases[i].heads);
        shape.num_splits = cases[i].given;
        for (int w = 0; w < 3; w++) {
            smla_attention_plan plan;
            smla_attention_shape most = {.num_tokens = cases[i].tokens,
                                         .num_heads = cases[i].heads,
                                         .num_splits = cases[i].given,
                                         .topk = widths[w],
                                         .covers_tables = true};
            shape.topk = widths[w];
            smla_cuda_plan_attention(&shape, &plan);
            EXPECT(!plan.reads_lengths && !plan.runs[0].interleaves);
            EXPECT(strcmp(launcher_of(plan.runs[0].kernel), cases[i].launcher) == 0);
            EXPECT_EQ(plan.runs[0].num_tokens, cases[i].first_tokens);
            EXPECT_EQ(plan.runs[0].num_splits, cases[i].splits);
            EXPECT_EQ(plan.runs[0].cut_bytes > 0, cases[i].given == 0 && cases[i].splits == 1);
            EXPECT(plan.workspace_bytes <= smla_cuda_attention_workspace_size(&most));
        }
    }
    smla_attention_plan plan;
    smla_attention_shape shape = make_dense_shape(true, 128, 64);
    shape.needs = SMLA_NEEDS_SOFTCAP;
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT(strcmp(launcher_of(plan.runs[0].kernel), "sm80_fp8_64") == 0);
}

/* Rows of 576 e4m3 have plans of the same numbers, whether their query is bf16 or e4m3. */
static void
test_dense_e4m3_plans(void)
{
    static const struct {
        int64_t tokens, heads;
        int given;
        unsigned needs;
        const char *launcher;
        int splits;
    } cases[] = {
        {128, 64, 0, 0, "sm90_e4m3_dense_64", 1},
        {128, 16, 0, SMLA_NEEDS_QUERY_SCALE, "sm90_e4m3_dense_16", 1},
        {128, 128, 0, SMLA_NEEDS_QUERY_SCALE, "sm90_e4m3_dense_64", 1},
        {128, 20, 1, 0, "sm90_e4m3_dense_32", 1},
        {1, 64, 3, SMLA_NEEDS_QUERY_SCALE, "sm90_e4m3_dense_64", 3},
        {8, 16, 0, 0, "sm90_e4m3_dense_16", 16},
        {1, 128, 0, 0, "sm90_e4m3_dense_32", 32},
        {128, 64, 1, SMLA_NEEDS_SOFTCAP, "sm80_e4m3_576_64", 1},
        {128, 20, 1, SMLA_NEEDS_UNALIGNED | SMLA_NEEDS_QUERY_SCALE, "sm80_e4m3_576_32", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        smla_attention_plan plan;
        smla_attention_shape shape = make_dense_shape(true, cases[i].tokens, cases[i].heads);
        shape.formats[0] = &smla_kv_formats[SMLA_ROW_FP8_E4M3_576];
        shape.num_splits = cases[i].given;
        shape.needs = cases[i].needs;
        shape.topk = 4096;
        smla_cuda_plan_attention(&shape, &plan);
        EXPECT(!plan.reads_lengths && !plan.runs[0].interleaves);
        EXPECT(strcmp(launcher_of(plan.runs[0].kernel), cases[i].launcher) == 0);
        EXPECT_EQ(plan.runs[0].num_splits, cases[i].splits);
    }
}

/* A dense call of FP8 rows in two runs, which are one launch. The combine kernel has the tokens of
 * the second one. */
static void
test_dense_fp8_runs(void)
{
    int32_t ranges[160] = {0};
    smla_attention_plan plan;
    smla_attention_params params = make_params(160, 64, 4096, 0);
    smla_attention_shape shape = make_dense_shape(true, 160, 64);
    params.keys.entry_tokens = 64;
    params.keys.lists[0].indices = NULL;
    params.keys.lists[0].begin = params.keys.lists[0].end = ranges;
    params.keys.lists[0].begin_stride = params.keys.lists[0].end_stride = 1;
    params.keys.lists[0].map = (smla_index_map){.block_table = ranges, .req_id_per_token = ranges};
    smla_cuda_plan_attention(&shape, &plan);
    EXPECT_EQ(plan.num_runs, 2);
    num_launches = 0;
    params.plan = plan;
    params.results.num_splits = plan.runs[0].num_splits;
    params.workspace.memory = workspace;
    params.workspace.bytes = plan.workspace_bytes;
    EXPECT_OK(smla_cuda_attend_lists(&params, &error));
    EXPECT_EQ(num_launches, 2);
    expect_launch(0, "sm90_fp8_dense_64", 160, plan.runs[1].num_splits);
    EXPECT_EQ(launches[0].whole_tokens, 132);
    expect_launch(1, "combine", 28, plan.runs[1].num_splits);
    EXPECT(launches[1].params.keys.lists[0].begin == ranges + 132);
    EXPECT(launches[1].params.keys.lists[0].end == ranges + 132);
    EXPECT(launches[1].params.keys.lists[0].map.req_id_per_token == ranges + 132);
}

int
main(void)
{
    RUN(test_dense_plans);
    RUN(test_dense_fp8_plans);
    RUN(test_dense_e4m3_plans);
    RUN(test_dense_fp8_runs);
    RUN(test_given_splits);
    RUN(test_batches_are_alike);
    RUN(test_formats);
    RUN(test_e4m3_query);
    RUN(test_no_kernel);
    RUN(test_workspace);
    RUN(test_partial_rows);
    RUN(test_failed_launches);
    RUN(test_planned);
    RUN(test_known_plans);
    RUN(test_widened_rows);
    return report("test_cuda_attention");
}
