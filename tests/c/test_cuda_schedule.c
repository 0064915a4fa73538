/* test_cuda_schedule.c: the plans of schedule.c, for devices that the machine need not have. A plan
 * is compared with the best of all plans, which the model of plan_model.h finds.
 */
#include "fake_cuda/plan_model.h"

/* ---- Plans --------------------------------------------------------------------------------- */

static void
expect_same_plan(const batch_plan *actual, const batch_plan *expected)
{
    EXPECT(actual->run.kernel == expected->run.kernel);
    EXPECT_EQ(actual->run.num_splits, expected->run.num_splits);
    EXPECT_EQ(actual->run.cost, expected->run.cost);
    EXPECT_EQ(actual->rest, expected->rest);
}

/* Checks what holds for every plan, and that no other plan is better. */
static void
check_plan(smla_kv_set formats, const smla_attention_shape *shape)
{
    const split_problem problem = make_problem(formats, shape);
    const int64_t tokens = shape->num_tokens;
    const int former = failures;
    const batch_plan plan = find_plan(&problem, tokens);
    const batch_plan model = model_plan(&problem, tokens);
    expect_same_plan(&plan, &model);
    EXPECT(plan.run.kernel != NULL &&
           (plan.run.kernel->formats & SMLA_KV_ALL) ==
               (formats != SMLA_ROWS_V4 || problem.device->compute_capability == 90
                    ? formats
                    : (smla_kv_set)SMLA_ROWS_512));
    EXPECT(plan.run.num_splits >= 1 && plan.run.num_splits <= SMLA_MAX_SPLITS);
    EXPECT(plan.rest >= 1 && plan.rest <= tokens);
    EXPECT(plan.rest == tokens || (plan.run.num_splits > 1 && plan.run.kernel == problem.whole));
    EXPECT(plan.run.cost > 0);
    EXPECT_EQ(planned_splits(shape), plan.run.num_splits);
    const int64_t room = smla_cuda_attention_workspace_size(shape);
    const int64_t rows = plan.rest * plan.run.num_splits * shape->num_heads;
    EXPECT(plan.run.num_splits == 1 || SMLA_PARTIAL_ALIGN - 1 + smla_partial_bytes(rows) <= room);
    /* The plan is the same when it is known already, and when it is made anew. */
    const batch_plan known = find_plan(&problem, tokens);
    memset(known_plans, 0, sizeof known_plans);
    const batch_plan fresh = find_plan(&problem, tokens);
    expect_same_plan(&known, &plan);
    expect_same_plan(&fresh, &plan);
    if (failures > former && former < MAX_PRINTED) {
        printf("    sm_%d, %d SMs: %s, %d tokens, %d heads, topk %d + %d\n",
               devices[0].compute_capability, devices[0].num_sms, plan.run.kernel->rows_text,
               (int)tokens, (int)shape->num_heads, (int)shape->topk, (int)shape->extra_topk);
    }
}

/* Every number of SMs, on devices of several kinds; everything else is random. */
static void
test_every_size_of_device(void)
{
    /* The last four kinds just lack or have room for two CTAs per SM, of bf16 and of FP8 rows. */
    static const int facts[][2] = {{80, 166912}, {89, 101376}, {90, 232448}, {100, 232448},
                                   {80, 132095}, {80, 132096}, {80, 138239}, {80, 138240}};
    for (int sms = 16; sms <= 160; sms++) {
        for (int draw = 0; draw < 1000; draw++) {
            const int kind = draw % 2 == 0 ? 2 : (int)random_int(8);
            const smla_kv_set formats = all_formats[draw / 2 % NUM_SETS];
            const int64_t *const topk = some_topks[random_int(NUM_TOPKS)];
            const int64_t extra = topk[1] == 0 && formats == SMLA_ROWS_MIXED ? 64 : topk[1];
            const int64_t few = 1 + random_int(2 * sms);
            const smla_attention_shape shape =
                make_shape(formats, draw % 4 < 2 ? few : 1 + random_int(4096),
                           some_heads[random_int(NUM_HEADS)], topk[0], extra);
            devices[0] = (smla_cuda_device){facts[kind][0], sms, facts[kind][1]};
            memset(known_plans, 0, sizeof known_plans); /* they are of the device before */
            check_plan(formats, &shape);
            EXPECT_EQ(smla_cuda_attention_workspace_size(&shape), model_workspace(formats, &shape));
        }
    }
}

/* Every batch up to 4096, and every number of heads. */
static void
test_every_batch(void)
{
    devices[0] = h200;
    int64_t former[3] = {0};
    for (int64_t tokens = 1; tokens <= 4096; tokens++) {
        for (int f = 0; f < 3; f++) {
            const smla_attention_shape shape =
                make_shape(all_formats[f], tokens, 128, 2048, f == 2 ? 512 : 0);
            check_plan(all_formats[f], &shape);
            const int64_t bytes = smla_cuda_attention_workspace_size(&shape);
            EXPECT(bytes >= former[f]);
            former[f] = bytes;
        }
        const smla_attention_shape shape =
            make_shape(SMLA_ROWS_FP8, tokens, 1 + tokens % 128, 1024, 0);
        check_plan(SMLA_ROWS_FP8, &shape);
    }
}

/* Plans of an H200 as they are now. Whoever tunes the table or the estimates sees what changes. */
static void
test_tuned_plans(void)
{
    static const struct {
        smla_kv_set formats;
        int tokens, heads, topk, extra;
        const char *launcher;
        int splits, rest, cost;
    } plans[] = {
        {SMLA_ROWS_FP8, 1, 128, 2048, 0, "sm90_small_16", 16, 1, 62},
        {SMLA_ROWS_FP8, 2, 128, 2048, 0, "sm90_small_32", 16, 2, 74},
        {SMLA_ROWS_FP8, 4, 128, 2048, 0, "sm90_small_32", 8, 4, 90},
        {SMLA_ROWS_FP8, 8, 128, 2048, 0, "sm90_small_64", 8, 8, 116},
        {SMLA_ROWS_FP8, 16, 128, 2048, 0, "sm90_fp8_64", 4, 16, 164},
        {SMLA_ROWS_FP8, 32, 128, 2048, 0, "sm90_fp8_64", 2, 32, 228},
        {SMLA_ROWS_FP8, 33, 128, 2048, 0, "sm90_fp8_64", 2, 33, 228},
        {SMLA_ROWS_FP8, 64, 64, 2048, 0, "sm90_fp8_32", 1, 64, 228},
        {SMLA_ROWS_FP8, 64, 128, 2048, 0, "sm90_fp8_64", 1, 64, 322},
        {SMLA_ROWS_FP8, 66, 128, 2048, 0, "sm90_fp8_64", 1, 66, 322},
        {SMLA_ROWS_FP8, 67, 128, 2048, 0, "sm90_fp8_64", 16, 1, 408},
        {SMLA_ROWS_FP8, 100, 128, 2048, 0, "sm90_fp8_64", 1, 100, 626},
        {SMLA_ROWS_FP8, 128, 128, 2048, 0, "sm90_fp8_64", 1, 128, 626},
        {SMLA_ROWS_FP8, 192, 128, 2048, 0, "sm90_fp8_64", 1, 192, 930},
        {SMLA_ROWS_FP8, 1, 64, 2048, 0, "sm90_small_16", 32, 1, 59},
        {SMLA_ROWS_FP8, 8, 64, 2048, 0, "sm90_small_32", 8, 8, 90},
        {SMLA_ROWS_FP8, 12, 64, 2048, 0, "sm90_small_64", 11, 12, 105},
        {SMLA_ROWS_FP8, 16, 64, 2048, 0, "sm90_small_64", 8, 16, 116},
        {SMLA_ROWS_FP8, 20, 64, 2048, 0, "sm90_fp8_64", 6, 20, 147},
        {SMLA_ROWS_FP8, 9, 64, 2048, 0, "sm90_small_64", 11, 9, 101},
        {SMLA_ROWS_FP8, 9, 40, 2048, 0, "sm90_small_64", 11, 9, 96},
        {SMLA_ROWS_FP8, 20, 64, 1024, 0, "sm90_small_64", 6, 20, 104},
        {SMLA_ROWS_FP8, 10, 100, 1024, 0, "sm90_small_64", 6, 10, 100},
        {SMLA_ROWS_FP8, 20, 64, 256, 768, "sm90_small_64", 6, 20, 104},
        {SMLA_ROWS_FP8, 10, 128, 256, 768, "sm90_small_64", 6, 10, 104},
        {SMLA_ROWS_FP8, 12, 64, 256, 0, "sm90_small_16", 2, 12, 67},
        {SMLA_ROWS_FP8, 20, 64, 512, 0, "sm90_small_32", 3, 20, 87},
        {SMLA_ROWS_FP8, 32, 64, 512, 0, "sm90_small_32", 2, 32, 96},
        {SMLA_ROWS_FP8, 48, 16, 512, 0, "sm90_small_16", 2, 48, 85},
        {SMLA_ROWS_FP8, 12, 128, 512, 0, "sm90_small_32", 2, 12, 94},
        {SMLA_ROWS_FP8, 80, 128, 512, 0, "sm90_fp8_64", 4, 14, 226},
        {SMLA_ROWS_FP8, 96, 128, 1024, 0, "sm90_fp8_64", 2, 30, 339},
        {SMLA_ROWS_FP8, 96, 128, 2048, 0, "sm90_fp8_64", 2, 30, 531},
        {SMLA_ROWS_FP8, 160, 64, 2048, 0, "sm90_fp8_64", 4, 28, 466},
        {SMLA_ROWS_V4, 24, 50, 128, 512, "sm90_small_v4_64", 4, 24, 98},
        {SMLA_ROWS_V4, 12, 128, 128, 512, "sm90_small_v4_64", 4, 12, 101},
        {SMLA_ROWS_V4, 9, 100, 128, 1024, "sm90_small_v4_64", 6, 9, 110},
        {SMLA_ROWS_FP8, 32, 64, 2048, 0, "sm90_fp8_64", 4, 32, 164},
        {SMLA_ROWS_FP8, 1, 16, 2048, 0, "sm90_small_16", 32, 1, 56},
        {SMLA_ROWS_FP8, 64, 16, 2048, 0, "sm90_fp8_16", 2, 64, 168},
        {SMLA_ROWS_FP8, 133, 16, 2048, 0, "sm90_fp8_16", 16, 1, 302},
        {SMLA_ROWS_FP8, 8, 32, 512, 0, "sm90_small_16", 8, 8, 53},
        {SMLA_ROWS_FP8, 140, 32, 2048, 0, "sm90_fp8_32", 16, 8, 314},
        {SMLA_ROWS_FP8, 1, 128, 64, 0, "sm90_fp8_16", 1, 1, 70},
        {SMLA_ROWS_FP8, 4, 128, 128, 0, "sm90_small_16", 2, 4, 51},
        {SMLA_ROWS_FP8, 8, 128, 2048, 512, "sm90_fp8_32", 4, 8, 144},
        {SMLA_ROWS_FP8, 5, 17, 256, 0, "sm90_small_16", 4, 5, 49},
        {SMLA_ROWS_FP8, 20, 24, 1024, 0, "sm90_small_32", 6, 20, 79},
        {SMLA_ROWS_V4, 16, 64, 128, 512, "sm90_small_v4_32", 4, 16, 88},
        {SMLA_ROWS_V4, 24, 64, 128, 512, "sm90_small_v4_64", 4, 24, 101},
        {SMLA_ROWS_V4, 4, 128, 128, 1024, "sm90_small_v4_32", 8, 4, 82},
        {SMLA_ROWS_V4, 8, 128, 128, 1024, "sm90_small_v4_64", 8, 8, 105},
        {SMLA_ROWS_V4, 11, 128, 128, 1024, "sm90_small_v4_64", 6, 11, 116},
        {SMLA_ROWS_BF16, 1, 128, 2048, 0, "sm90_bf16_64", 16, 1, 94},
        {SMLA_ROWS_BF16, 4, 64, 2048, 0, "sm90_bf16_64", 16, 4, 105},
        {SMLA_ROWS_BF16, 64, 64, 2048, 0, "sm90_bf16_64", 2, 64, 231},
        {SMLA_ROWS_BF16, 8, 64, 2048, 0, "sm90_bf16_64", 8, 8, 117},
        {SMLA_ROWS_BF16, 16, 64, 1024, 0, "sm90_bf16_64", 4, 16, 115},
        {SMLA_ROWS_BF16, 64, 64, 512, 0, "sm90_bf16_64", 1, 64, 112},
        {SMLA_ROWS_BF16, 16, 128, 2048, 0, "sm90_bf16_64", 4, 16, 168},
        {SMLA_ROWS_BF16, 66, 128, 2048, 0, "sm90_bf16_64", 1, 66, 304},
        {SMLA_ROWS_BF16, 140, 64, 2048, 0, "sm90_bf16_64", 8, 8, 421},
        {SMLA_ROWS_BF16_512, 16, 128, 2048, 0, "sm90_bf16_512_64", 4, 16, 168},
        {SMLA_ROWS_MIXED, 1, 128, 2048, 512, "sm80_mixed_16", 32, 1, 144},
        {SMLA_ROWS_MIXED, 16, 128, 2048, 512, "sm80_mixed_16", 2, 16, 690},
        {SMLA_ROWS_MIXED, 140, 16, 2048, 128, "sm80_mixed_16", 3, 140, 851},
    };
    devices[0] = h200;
    for (size_t i = 0; i < sizeof plans / sizeof plans[0]; i++) {
        const smla_attention_shape shape =
            make_shape(plans[i].formats, plans[i].tokens, plans[i].heads, plans[i].topk,
                       plans[i].extra);
        const split_problem problem = make_problem(plans[i].formats, &shape);
        const batch_plan plan = find_plan(&problem, shape.num_tokens);
        const bool is_same = strcmp(launcher_of(plan.run.kernel), plans[i].launcher) == 0 &&
                             plan.run.num_splits == plans[i].splits && plan.rest == plans[i].rest &&
                             plan.run.cost == plans[i].cost;
        EXPECT(is_same);
        if (!is_same) {
            printf("    plan %d is {\"%s\", %d, %d, %d}\n", (int)i, launcher_of(plan.run.kernel),
                   plan.run.num_splits, (int)plan.rest, (int)plan.run.cost);
        }
    }
}

/* Plans that share a place in the table of known plans are asked for in turns. */
static void
test_known_plans(void)
{
    devices[0] = h200;
    devices[1] = (smla_cuda_device){90, 60, 232448};
    const smla_attention_shape shapes[] = {
        make_shape(SMLA_ROWS_FP8, 8, 128, 2048, 0),
        make_shape(SMLA_ROWS_FP8, 8 + KNOWN_PLANS, 128, 2048, 0),
        make_shape(SMLA_ROWS_FP8, 8, 64, 2048, 0),
        make_shape(SMLA_ROWS_FP8, 8, 128, 512, 0),
        make_shape(SMLA_ROWS_FP8, 8, 128, 2048, 512),
        make_shape(SMLA_ROWS_BF16, 8, 128, 2048, 0),
    };
    enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0] };
    for (int i = 0; i < 2 * NUM_SHAPES * NUM_SHAPES; i++) {
        const smla_attention_shape *const shape =
            &shapes[i / 2 % NUM_SHAPES * (i / 24 + 1) % NUM_SHAPES];
        split_problem problem =
            make_problem(smla_join_formats(shape->formats[0], shape->formats[1]), shape);
        problem.device = &devices[i % 2];
        const batch_plan plan = find_plan(&problem, shape->num_tokens);
        const batch_plan model = model_plan(&problem, shape->num_tokens);
        expect_same_plan(&plan, &model);
    }
    /* At first no plan is known, not even that of 0 tokens. */
    memset(known_plans, 0, sizeof known_plans);
    const split_problem problem = make_problem(SMLA_ROWS_FP8, &shapes[0]);
    EXPECT(find_plan(&problem, 0).run.kernel != NULL);
    /* A plan that is known is not made again. */
    known_plans[3].plan.run.cost = 0;
    (void)find_plan(&problem, 3);
    known_plans[3].plan.run.cost = 12345;
    EXPECT_EQ(find_plan(&problem, 3).run.cost, 12345);
    /* A thread that finds another one at the table plans by itself, and leaves the table alone. */
    (void)atomic_flag_test_and_set(&known_plans_lock);
    const batch_plan own = find_plan(&problem, 3);
    const batch_plan model = model_plan(&problem, 3);
    expect_same_plan(&own, &model);
    EXPECT_EQ(known_plans[3].plan.run.cost, 12345);
    atomic_flag_clear(&known_plans_lock);
    EXPECT_EQ(find_plan(&problem, 3).run.cost, 12345);
    memset(known_plans, 0, sizeof known_plans);
    devices[1] = (smla_cuda_device){0};
}

/* Calls that differ in one field of a known plan's key, or in two whose sum, difference or product
 * is the same. Those of a pair share a place in the table. */
typedef struct plan_key {
    int device_id;
    smla_kv_set formats;
    int64_t tokens, heads, topk, extra;
} plan_key;

static split_problem
problem_of(const plan_key *key)
{
    const smla_attention_shape shape =
        make_shape(key->formats, key->tokens, key->heads, key->topk, key->extra);
    split_problem problem = make_problem(key->formats, &shape);
    problem.device = &devices[key->device_id];
    return problem;
}

static const plan_key key_pairs[][2] = {
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {1, SMLA_ROWS_FP8, 8, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_BF16, 8, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_V4, 8, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 0, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 16, 128, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 64, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 128, 512, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 128, 2048, 512}},
    /* equal sums */
    {{0, SMLA_ROWS_FP8, 4, 128, 128, 0}, {0, SMLA_ROWS_FP8, 4, 128, 64, 64}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 112, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 64, 2112, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 64}, {0, SMLA_ROWS_FP8, 8, 64, 2048, 128}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 128, 2032, 0}},
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 16}, {0, SMLA_ROWS_FP8, 24, 128, 2048, 0}},
    /* equal differences */
    {{0, SMLA_ROWS_FP8, 1, 128, 1024, 0}, {0, SMLA_ROWS_FP8, 1, 128, 2048, 1024}},
    {{0, SMLA_ROWS_FP8, 8, 100, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 116, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 64, 1984, 0}, {0, SMLA_ROWS_FP8, 8, 128, 2048, 0}},
    /* equal products, and fields that are swapped */
    {{0, SMLA_ROWS_FP8, 8, 128, 2048, 512}, {0, SMLA_ROWS_FP8, 8, 128, 1024, 1024}},
    {{0, SMLA_ROWS_FP8, 8, 96, 2048, 0}, {0, SMLA_ROWS_FP8, 24, 32, 2048, 0}},
    {{0, SMLA_ROWS_FP8, 8, 64, 2048, 0}, {0, SMLA_ROWS_FP8, 8, 128, 1024, 0}},
    {{0, SMLA_ROWS_FP8, 16, 128, 512, 0}, {0, SMLA_ROWS_FP8, 128, 16, 512, 0}},
    {{0, SMLA_ROWS_FP8, 8, 64, 128, 0}, {0, SMLA_ROWS_FP8, 8, 128, 64, 0}},
};

enum { NUM_KEY_PAIRS = sizeof key_pairs / sizeof key_pairs[0] };

static bool
is_same_plan(const batch_plan *a, const batch_plan *b)
{
    return a->run.kernel == b->run.kernel && a->run.num_splits == b->run.num_splits &&
           a->run.cost == b->run.cost && a->rest == b->rest;
}

/* Whoever asks for one of a pair must not get the plan of the other, which is in its place. */
static void
test_keys_of_known_plans(void)
{
    devices[0] = h200;
    devices[1] = (smla_cuda_device){90, 60, 232448};
    for (int i = 0; i < 2 * NUM_KEY_PAIRS; i++) {
        const plan_key *const pair = key_pairs[i / 2];
        const plan_key *const former = &pair[i % 2];
        const plan_key *const key = &pair[1 - i % 2];
        const split_problem known = problem_of(former);
        const split_problem asked = problem_of(key);
        const batch_plan model = model_plan(&asked, key->tokens);
        const batch_plan other = model_plan(&known, former->tokens);
        EXPECT(!is_same_plan(&model, &other)); /* or the pair would show nothing */
        EXPECT_EQ(former->tokens % KNOWN_PLANS, key->tokens % KNOWN_PLANS);
        memset(known_plans, 0, sizeof known_plans);
        (void)find_plan(&known, former->tokens);
        const batch_plan plan = find_plan(&asked, key->tokens);
        expect_same_plan(&plan, &model);
        const batch_plan again = find_plan(&asked, key->tokens);
        expect_same_plan(&again, &model);
        const batch_plan back = find_plan(&known, former->tokens);
        expect_same_plan(&back, &other);
    }
    memset(known_plans, 0, sizeof known_plans);
    devices[1] = (smla_cuda_device){0};
}

/* A shape of few different values, so that many shapes differ in a single field. */
static smla_attention_shape
draw_shape(void)
{
    static const int64_t tokens[] = {8, 24, 67, 140};
    static const int64_t heads[] = {16, 64, 128};
    static const int64_t topks[] = {512, 1024, 2048};
    static const int64_t extras[] = {0, 512, 1024};
    const smla_kv_set formats = all_formats[random_int(2)];
    smla_attention_shape shape = make_shape(formats, tokens[random_int(4)], heads[random_int(3)],
                                            topks[random_int(3)], extras[random_int(3)]);
    shape.device_id = (int32_t)random_int(2);
    shape.needs = random_int(4) == 0 ? SMLA_NEEDS_RANGES : 0;
    shape.num_splits = random_int(4) == 0 ? (int32_t)(1 + random_int(3)) : 0;
    return shape;
}

/* A call's plan depends on the call alone, whatever was planned before it. */
static void
test_plans_in_any_order(void)
{
    devices[0] = h200;
    devices[1] = (smla_cuda_device){90, 60, 232448};
    known_plan warm[KNOWN_PLANS] = {{.num_tokens = 0}};
    for (int i = 0; i < 20000; i++) {
        const smla_attention_shape shape = draw_shape();
        smla_attention_plan plan;
        smla_attention_plan cold;
        memset(&plan, POISON, sizeof plan);
        memcpy(known_plans, warm, sizeof warm);
        smla_cuda_plan_attention(&shape, &plan);
        memcpy(warm, known_plans, sizeof warm);
        memset(known_plans, 0, sizeof known_plans);
        smla_cuda_plan_attention(&shape, &cold);
        EXPECT_EQ(plan.workspace_bytes, cold.workspace_bytes);
        EXPECT_EQ(plan.num_runs, cold.num_runs);
        for (int r = 0; r < cold.num_runs; r++) {
            EXPECT(plan.runs[r].kernel == cold.runs[r].kernel);
            EXPECT_EQ(plan.runs[r].num_tokens, cold.runs[r].num_tokens);
            EXPECT_EQ(plan.runs[r].num_splits, cold.runs[r].num_splits);
            EXPECT_EQ(plan.runs[r].cut_bytes, cold.runs[r].cut_bytes);
            EXPECT_EQ(plan.runs[r].interleaves, cold.runs[r].interleaves);
        }
    }
    memset(known_plans, 0, sizeof known_plans);
    devices[1] = (smla_cuda_device){0};
}

/* ---- Direct prefills ----------------------------------------------------------------------- */

/* 38 ps per key and tile of 64 heads against 650 ps per gathered row and 8,000,000 per call. */
static void
test_prefers_direct(void)
{
    static const struct {
        int heads, tiles;
    } cases[] = {{33, 1}, {64, 1}, {65, 1}, {96, 1}, {97, 2}, {128, 2}};
    devices[0] = h200;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 650, cases[i].heads, 1000, 0);
        const int64_t equal = 1000 * 38 * cases[i].tiles;
        EXPECT(!smla_cuda_prefers_direct(&shape, equal, 0));
        EXPECT(smla_cuda_prefers_direct(&shape, equal + 1, 0));
        EXPECT(smla_cuda_prefers_direct(&shape, equal, 1));
        shape.num_tokens = 4000; /* 38 * 4,000,000 = 19 * 8,000,000 */
        EXPECT(!smla_cuda_prefers_direct(&shape, 0, 19 * cases[i].tiles));
        EXPECT(smla_cuda_prefers_direct(&shape, 1, 19 * cases[i].tiles));
        EXPECT(smla_cuda_prefers_direct(&shape, 0, 19 * cases[i].tiles + 1));
    }
    for (int heads = 1; heads <= 32; heads++) { /* FP8 rows lose nothing, so any gather is a loss */
        const smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 4096, heads, 2048, 0);
        EXPECT(smla_cuda_prefers_direct(&shape, 1, 0));
        EXPECT(smla_cuda_prefers_direct(&shape, 0, 1));
        EXPECT(!smla_cuda_prefers_direct(&shape, 0, 0));
    }
    smla_attention_shape shape = make_shape(SMLA_ROWS_FP8, 1, 64, 1, 0);
    EXPECT(smla_cuda_prefers_direct(&shape, 1000, 1));
    shape.device_id = 1; /* no such device */
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
    shape.device_id = 0;
    devices[0] = a100;
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
    devices[0] = (smla_cuda_device){100, 148, 232448}; /* has the portable kernels alone */
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
    devices[0] = (smla_cuda_device){75, 40, 65536};
    EXPECT(!smla_cuda_prefers_direct(&shape, 1000, 1));
}

/* 40 ns and 10 ps per key, per token and tile, against 500 ps per row and 16,000,000 per chunk. Of
 * one tile, 26,000 rows halve the former. */
static void
test_prefers_direct_of_v4(void)
{
    static const int one_tile[] = {33, 64, 96}, two_tiles[] = {97, 128};
    devices[0] = h200;
    for (int i = 0; i < 3; i++) {
        const smla_attention_shape shape = make_shape(SMLA_ROWS_V4, 1600, one_tile[i], 1000, 0);
        EXPECT(!smla_cuda_prefers_direct(&shape, 30, 4)); /* 80,000,000 and 64,015,000 */
        EXPECT(smla_cuda_prefers_direct(&shape, 30, 5));
        EXPECT(!smla_cuda_prefers_direct(&shape, 26000, 1)); /* 40,000,000 and 29,000,000 */
        EXPECT(smla_cuda_prefers_direct(&shape, 26000, 2));
    }
    for (int i = 0; i < 2; i++) {
        const smla_attention_shape shape = make_shape(SMLA_ROWS_V4, 1600, two_tiles[i], 1000, 0);
        EXPECT(!smla_cuda_prefers_direct(&shape, 320000, 0));
        EXPECT(smla_cuda_prefers_direct(&shape, 320001, 0));
        EXPECT(!smla_cuda_prefers_direct(&shape, 0, 10));
        EXPECT(smla_cuda_prefers_direct(&shape, 1, 10));
    }
    smla_attention_shape shape = make_shape(SMLA_ROWS_V4, 8192, 64, 128, 512);
    EXPECT(!smla_cuda_prefers_direct(&shape, 8192, 1));
    shape.num_heads = 32;
    EXPECT(smla_cuda_prefers_direct(&shape, 8192, 1));
    shape.num_heads = 64;
    shape.needs = SMLA_NEEDS_QUERY_SCALE; /* the portable kernel serves it */
    EXPECT(smla_cuda_prefers_direct(&shape, 8192, 1));
    shape.needs = 0;
    shape.formats[0] = &smla_kv_formats[SMLA_ROW_BFLOAT16_512];
    EXPECT(smla_cuda_prefers_direct(&shape, 8192, 1));
    shape.formats[0] = shape.formats[1];
    devices[0] = a100;
    EXPECT(smla_cuda_prefers_direct(&shape, 8192, 1));
    shape.device_id = 1; /* no such device */
    EXPECT(smla_cuda_prefers_direct(&shape, 8192, 1));
}

int
main(void)
{
    RUN(test_every_size_of_device);
    RUN(test_every_batch);
    RUN(test_tuned_plans);
    RUN(test_known_plans);
    RUN(test_keys_of_known_plans);
    RUN(test_plans_in_any_order);
    RUN(test_prefers_direct);
    RUN(test_prefers_direct_of_v4);
    return report("test_cuda_schedule");
}
