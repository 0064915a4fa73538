/* plan_model.h: a model of the estimated times of schedule.c, which finds the best of all plans
 * without short cuts, and shapes to plan. Included once in a program.
 */
#pragma once

#include "cuda/attention/table/kernels.c"  // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/schedule.c" // NOLINT(bugprone-suspicious-include)
#include "cuda/attention/table/widen.c"    // NOLINT(bugprone-suspicious-include)

#include "launchers.h"

static const smla_kv_set all_formats[] = {SMLA_ROWS_FP8, SMLA_ROWS_BF16, SMLA_ROWS_MIXED,
                                          SMLA_ROWS_BF16_512, SMLA_KV_SET(SMLA_ROW_FP8_V4)};

enum { NUM_SETS = sizeof all_formats / sizeof all_formats[0] };

static inline int64_t
ceil_of(int64_t n, int64_t by)
{
    return n / by + (n % by > 0);
}

/* Columns per split; those of each list are rounded up to a multiple of 64. */
static inline int64_t
model_columns(const split_problem *p, int splits)
{
    return 64 *
           (ceil_of(ceil_of(p->topk, splits), 64) + ceil_of(ceil_of(p->extra_topk, splits), 64));
}

static inline int64_t
model_places(const split_problem *p, const smla_attention_kernel *row)
{
    int64_t per_sm = 1;
    while (per_sm < row->ctas_per_sm &&
           (per_sm + 1) * (row->shared_bytes + 1024) <= p->device->max_shared_bytes + 1024) {
        per_sm++;
    }
    return p->device->num_sms * per_sm;
}

static inline int64_t
model_tiles(const split_problem *p, const smla_attention_kernel *row)
{
    return ceil_of(p->num_heads, row->heads_per_cta);
}

/* Whether CTAs of the combine kernel, of 64 to 256 threads with 64 registers each, fit beside. */
static inline bool
model_is_beside(const split_problem *p, int64_t tokens, int splits, int64_t ctas)
{
    const int threads = splits <= 8 ? 64 : splits <= 16 ? 128 : 256;
    return splits <= 32 && ctas <= p->device->num_sms &&
           tokens * p->num_heads <= p->device->num_sms * (16384 / 64 / threads);
}

/* Waves of CTAs, without what comes once per launch. */
static inline int64_t
model_waves(const split_problem *p, const smla_attention_kernel *row, int64_t ctas, int splits)
{
    const int64_t blocks = ceil_of(model_columns(p, splits), row->block_columns);
    const bool is_crowded = row->leaves_halves && row->max_columns == 0 && model_tiles(p, row) >= 3;
    const int64_t crowd_cost = is_crowded ? blocks / 16 : 0;
    return ceil_of(ctas, model_places(p, row)) *
           (blocks * row->block_cost + row->cta_cost + crowd_cost);
}

/* Tokens in splits, behind others that are whole. */
static inline int64_t
model_cost(const split_problem *p, const smla_attention_kernel *row, int64_t whole, int64_t tokens,
           int splits)
{
    const int64_t places = model_places(p, row);
    const int64_t whole_ctas = whole * model_tiles(p, row);
    const int64_t split_ctas = tokens * model_tiles(p, row) * splits;
    const int64_t ctas = whole_ctas + split_ctas;
    int64_t cost = row->start_cost + model_waves(p, row, whole_ctas, 1) +
                   model_waves(p, row, split_ctas, splits);
    cost += whole > 0 && row->arch != 90 ? 30 : 0; /* portable kernels need another launch */
    if (splits > 1 && row->leaves_halves) {
        cost += 12 + 6 * ceil_of(splits, 16) + tokens * splits * p->num_heads / 512;
    } else if (splits > 1 && row->arch == 90) {
        cost += 12 + splits / 2 + tokens * splits * p->num_heads / 192;
    } else if (splits > 1) {
        cost += 16 + splits;
    }
    const bool is_beside = row->leaves_room && model_is_beside(p, tokens, splits, ctas);
    return cost + (row->leaves_halves && 2 * ctas > places && !is_beside ? 6 : 0);
}

static inline bool
model_fits(const split_problem *p, const smla_attention_kernel *row, int splits)
{
    const bool is_small = splits > 1 && model_columns(p, splits) <= row->max_columns;
    return row->formats == p->whole->formats && row->arch == p->whole->arch &&
           row->sources == p->whole->sources && row->min_heads <= p->num_heads &&
           p->num_heads <= 128 && row->shared_bytes <= p->device->max_shared_bytes &&
           (row->max_columns == 0 || is_small);
}

/* Whether one CTA per SM, of at most 32 heads and 256 columns, is enough for the batch. */
static inline bool
model_is_small(const split_problem *p, int64_t tokens)
{
    const int64_t tiles = ceil_of(p->num_heads, p->num_heads <= 16 ? 16 : 32);
    for (int splits = 2; splits <= 64; splits++) {
        if (model_columns(p, splits) <= 256) {
            return tokens * tiles * splits <= p->device->num_sms;
        }
    }
    return false;
}

/* The row with the lowest cost for a number of splits; the first where several have it. */
static inline run_plan
model_run(const split_problem *p, int64_t tokens, int splits)
{
    run_plan best = {.num_splits = splits};
    for (int i = 0; i < NUM_KERNELS; i++) {
        const smla_attention_kernel *const row = &smla_attention_kernels[i];
        const bool is_left_out = row->saves_waves && model_is_small(p, tokens);
        const int64_t cost =
            model_fits(p, row, splits) && !is_left_out ? model_cost(p, row, 0, tokens, splits) : 0;
        if (cost != 0 && (best.kernel == NULL || cost < best.cost)) {
            best.kernel = row;
            best.cost = cost;
        }
    }
    return best;
}

static inline int64_t
model_useful(const split_problem *p)
{
    const int64_t longest = p->topk > p->extra_topk ? p->topk : p->extra_topk;
    return longest <= 64 ? 1 : longest > 64 * 63 ? 64 : ceil_of(longest, 64);
}

/* Pairs of token and split whose CTAs fill three waves. */
static inline int64_t
model_parts(const split_problem *p)
{
    return 3 * model_places(p, p->whole) / model_tiles(p, p->whole);
}

/* The plan with the lowest cost: the batch in one piece, full waves and a rest in splits, or any
 * number of splits that three waves allow; the first in this order where several have it. */
static inline batch_plan
model_plan(const split_problem *p, int64_t tokens)
{
    batch_plan best = {.run = model_run(p, tokens, 1), .rest = tokens};
    const int64_t tiles = model_tiles(p, p->whole);
    const int64_t places = model_places(p, p->whole);
    const int64_t waves = tokens * tiles / places;
    const int64_t full = waves * places / tiles;
    const int64_t rest = tokens - full;
    for (int splits = 2; full > 0 && splits <= model_useful(p) && splits * rest <= model_parts(p);
         splits++) {
        const int64_t cost = rest == 0 ? INT64_MAX : model_cost(p, p->whole, full, rest, splits);
        if (cost < best.run.cost) {
            best = (batch_plan){{p->whole, splits, cost}, rest};
        }
    }
    for (int splits = 2; splits <= model_useful(p) && splits * tokens <= model_parts(p); splits++) {
        const run_plan run = model_run(p, tokens, splits);
        if (run.cost < best.run.cost) {
            best = (batch_plan){.run = run, .rest = tokens};
        }
    }
    return best;
}

/* ---- Shapes -------------------------------------------------------------------------------- */

static inline smla_attention_shape
make_shape(smla_kv_set formats, int64_t tokens, int64_t heads, int64_t topk, int64_t extra)
{
    return (smla_attention_shape){
        .num_tokens = tokens,
        .num_heads = heads,
        .topk = topk,
        .extra_topk = extra,
        .formats = {&smla_kv_formats[31 - __builtin_clz(formats)],
                    formats == SMLA_ROWS_MIXED || extra > 0
                        ? &smla_kv_formats[__builtin_ctz(formats)]
                        : NULL},
    };
}

static inline split_problem
make_problem(smla_kv_set formats, const smla_attention_shape *shape)
{
    split_problem problem;
    memset(&problem, POISON, sizeof problem);
    const smla_kernel_call call = {.formats = formats,
                                   .num_heads = shape->num_heads,
                                   .columns = SMLA_UNSPLIT};
    if (!find_problem(&devices[0], shape, &call, &problem)) {
        printf("no kernel for sm_%d\n", devices[0].compute_capability);
        exit(2);
    }
    EXPECT(problem.device == &devices[0]);
    EXPECT_EQ(problem.num_heads, shape->num_heads);
    EXPECT_EQ(problem.topk, shape->topk);
    EXPECT_EQ(problem.extra_topk, shape->extra_topk);
    return problem;
}

/* The number of splits of a call of this shape, or of its last tokens; its workspace has the size
 * that callers ask for. */
static inline int
planned_splits(const smla_attention_shape *shape)
{
    smla_attention_plan plan;
    smla_cuda_plan_attention(shape, &plan);
    if (shape->formats[0] != NULL) {
        EXPECT_EQ(plan.workspace_bytes, smla_cuda_attention_workspace_size(shape));
    }
    return plan.runs[plan.num_runs - 1].num_splits;
}

/* Bytes that any plan of up to this many tokens needs, with those for alignment. */
static inline int64_t
model_workspace(smla_kv_set formats, const smla_attention_shape *shape)
{
    const split_problem problem = make_problem(formats, shape);
    const int64_t all = shape->num_tokens * model_useful(&problem);
    const int64_t most = model_parts(&problem);
    const int64_t rows = (all < most ? all : most) * shape->num_heads;
    return model_useful(&problem) == 1 || rows == 0 ? 0
                                                    : 16 + ceil_of(rows * 8, 16) * 16 + rows * 2048;
}

static const int64_t some_topks[][2] = {{0, 0},      {1, 0},       {64, 0},     {65, 0},
                                        {128, 64},   {512, 0},     {2048, 0},   {2048, 512},
                                        {129, 2048}, {2111, 0},    {4033, 130}, {65536, 0},
                                        {0, 256},    {1024, 1024}, {4096, 0},   {4097, 0},
                                        {16384, 0},  {16385, 0},   {16640, 0},  {16641, 0}};
enum { NUM_TOPKS = sizeof some_topks / sizeof some_topks[0] };

static const int64_t some_heads[] = {1, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128};
enum { NUM_HEADS = sizeof some_heads / sizeof some_heads[0] };
