/* schedule.c: how many splits the keys of a call are cut into, and which kernel runs them. The file
 * estimates the time of each plan and takes the shortest. The size of the workspace depends on the
 * plans, so it is computed here, too.
 */
#include <stdatomic.h>

#include "core/attention/needs.h"
#include "cuda/attention/table/few_tiles.h"
#include "cuda/attention/table/schedule.h"
#include "cuda/attention/table/split_problem.h"
#include "cuda/attention/table/wide_rows.h"

/* A way to run a batch, and its estimated time, which is counted in waves of CTAs. */
typedef struct run_plan {
    const smla_attention_kernel *kernel;
    int num_splits;
    int64_t cost;
} run_plan;

/* A plan for a batch. `run` is that of its last `rest` tokens, with the cost of the whole batch. If
 * there are others, they run unsplit in front of them, in full waves of CTAs of the same launch.
 * That is estimated to take less time than one more wave. */
typedef struct batch_plan {
    run_plan run;
    int64_t rest;
} batch_plan;

enum { REST_COST = 30 }; /* the cost of a second launch, which portable kernels need for splits */

/* The costs below are in sixteenths of attention_fp8_sm90.cu's time for 128 keys in 64 heads. */

/* The cost of the combine kernel, and of the partial rows that it reads. */
static int64_t
find_combine_cost(const split_problem *problem, const smla_attention_kernel *kernel,
                  int64_t num_tokens, int num_splits)
{
    if (num_splits == 1) {
        return 0;
    }
    if (kernel->arch == SMLA_PORTABLE_ARCH) {
        return 16 + num_splits;
    }
    const int64_t num_rows = num_tokens * num_splits * problem->num_heads;
    if (!kernel->leaves_halves) {
        return 12 + num_splits / 2 + num_rows / 192;
    }
    const int sixteens = (num_splits + 15) / 16;
    return 12 + 6 * sixteens + num_rows / 512;
}

/* The cost of starting late. A kernel starts before the grid in front of it is done where there is
 * room, beside the combine kernel's CTAs or on SMs that they leave free. */
static int64_t
find_late_cost(const split_problem *problem, const smla_attention_kernel *kernel,
               int64_t num_tokens, int num_splits, int64_t num_ctas, int64_t resident_ctas)
{
    const bool is_beside =
        kernel->leaves_room && smla_fits_beside(num_ctas, num_tokens * problem->num_heads,
                                                num_splits, problem->device->num_sms);
    return kernel->leaves_halves && 2 * num_ctas > resident_ctas && !is_beside ? 6 : 0;
}

/* The cost of a CTA. Hopper's CTAs for FP8 rows take a little longer where each row goes to more
 * than two of them: with 128 heads, tiles of 32 heads would be estimated like two splits of tiles
 * of 64, which are faster (benchmarks/RESULTS.md). */
static int64_t
find_cta_cost(const smla_attention_kernel *kernel, int64_t num_tiles, int64_t columns)
{
    const int64_t blocks = smla_count_parts(columns, kernel->block_columns);
    const bool is_crowded = kernel->leaves_halves && kernel->max_columns == 0 && num_tiles > 2;
    return blocks * kernel->block_cost + kernel->cta_cost + (is_crowded ? blocks / 16 : 0);
}

/* The cost of `num_tokens` tokens in splits of so many columns, behind `whole_tokens` tokens that
 * are not split. */
static int64_t
estimate_cost(const split_problem *problem, const smla_attention_kernel *kernel,
              int64_t whole_tokens, int64_t num_tokens, int num_splits, int64_t columns)
{
    const int64_t resident_ctas = count_resident_ctas(problem->device, kernel);
    const int64_t tiles = count_tiles(problem, kernel);
    const int64_t whole_ctas = whole_tokens * tiles;
    const int64_t ctas = num_tokens * tiles * num_splits;
    const bool has_second = kernel->arch == SMLA_PORTABLE_ARCH && whole_tokens > 0;
    return kernel->start_cost + (has_second ? REST_COST : 0) +
           smla_count_parts(whole_ctas, resident_ctas) *
               find_cta_cost(kernel, tiles, count_columns(problem, 1)) +
           smla_count_parts(ctas, resident_ctas) * find_cta_cost(kernel, tiles, columns) +
           find_combine_cost(problem, kernel, num_tokens, num_splits) +
           find_late_cost(problem, kernel, num_tokens, num_splits, whole_ctas + ctas,
                          resident_ctas);
}

/* A call of the problem's size that needs all that its kernel serves. */
static smla_kernel_call
call_like(const split_problem *problem, int64_t columns)
{
    return (smla_kernel_call){
        .formats = problem->whole->formats,
        .source = smla_source_of(problem->whole),
        .needs = problem->whole->serves,
        .num_heads = problem->num_heads,
        .columns = columns,
    };
}

/* Whether one wave of CTAs can run the batch on the first kernel for few columns. Kernels with more
 * heads per CTA take longer then, and the estimates do not tell by how much. */
static bool
fits_one_wave(const split_problem *problem, int64_t num_tokens)
{
    int splits = 2;
    while (count_columns(problem, splits) > SMLA_SM90_SMALL_KEYS) {
        if (++splits > SMLA_MAX_SPLITS) {
            return false;
        }
    }
    const smla_kernel_call call = call_like(problem, count_columns(problem, splits));
    const smla_attention_kernel *const kernel = smla_find_kernel(problem->device, &call);
    return kernel != NULL && kernel->max_columns != 0 &&
           num_tokens * count_tiles(problem, kernel) * splits <=
               count_resident_ctas(problem->device, kernel);
}

/* The kernel with the shortest estimated time for this many splits; of equal kernels, the first
 * row. `is_small` is the result of fits_one_wave. */
static run_plan
choose_kernel(const split_problem *problem, int64_t num_tokens, int num_splits, bool is_small)
{
    const int64_t columns = count_columns(problem, num_splits);
    const smla_kernel_call call = call_like(problem, num_splits == 1 ? SMLA_UNSPLIT : columns);
    run_plan best = {.num_splits = num_splits, .cost = INT64_MAX};
    for (const smla_attention_kernel *kernel = smla_attention_kernels; kernel->launch != NULL;
         kernel++) {
        if (kernel->arch != problem->whole->arch || kernel->formats != problem->whole->formats ||
            (kernel->saves_waves && is_small) ||
            (problem->has_tiles && kernel->heads_per_cta < problem->num_heads) ||
            !smla_fits_kernel(kernel, problem->device, &call)) {
            continue;
        }
        const int64_t cost = estimate_cost(problem, kernel, 0, num_tokens, num_splits, columns);
        if (cost < best.cost) {
            best.kernel = kernel;
            best.cost = cost;
        }
    }
    return best;
}

/* Tries all numbers of splits for the last `rest` tokens of a batch, behind `whole` tokens that are
 * not split, and keeps the best plan. Of equal plans, the one with fewer splits stays. */
static void
try_splits(const split_problem *problem, int64_t whole, int64_t rest, batch_plan *best)
{
    const int64_t most =
        rest == 0 ? 1 : min_int64(max_useful_splits(problem), max_parts(problem) / rest);
    const bool is_small = whole == 0 && fits_one_wave(problem, rest);
    int64_t columns = count_columns(problem, 1);
    for (int splits = 2; splits <= most; splits++) {
        const int64_t fewer = count_columns(problem, splits);
        if (fewer == columns) {
            continue; /* there are more CTAs, but none of them is shorter */
        }
        columns = fewer;
        const run_plan run = whole == 0
                                 ? choose_kernel(problem, rest, splits, is_small)
                                 : (run_plan){.kernel = problem->whole,
                                              .num_splits = splits,
                                              .cost = estimate_cost(problem, problem->whole, whole,
                                                                    rest, splits, columns)};
        if (run.cost < best->run.cost) {
            *best = (batch_plan){.run = run, .rest = rest};
        }
    }
}

/* The plan with the shortest estimated time. */
static batch_plan
plan_batch(const split_problem *problem, int64_t num_tokens)
{
    batch_plan best = {.run = choose_kernel(problem, num_tokens, 1, false), .rest = num_tokens};
    const int64_t tiles = count_tiles(problem, problem->whole);
    const int64_t resident_ctas = count_resident_ctas(problem->device, problem->whole);
    const int64_t full = num_tokens * tiles / resident_ctas * resident_ctas / tiles;
    if (full > 0) {
        try_splits(problem, full, num_tokens - full, &best);
    }
    try_splits(problem, 0, num_tokens, &best);
    return best;
}

/* The latest plans, because layers of a model and steps of a server ask for the same ones again and
 * again. A thread that finds the table locked plans without it. */
enum { KNOWN_PLANS = 16 };

typedef struct known_plan {
    split_problem problem; /* `whole` is NULL in an empty entry */
    int64_t num_tokens;
    batch_plan plan;
} known_plan;

static known_plan known_plans[KNOWN_PLANS];
static atomic_flag known_plans_lock = ATOMIC_FLAG_INIT;

static bool
is_same_problem(const split_problem *a, const split_problem *b)
{
    return a->device == b->device && a->whole == b->whole && a->num_heads == b->num_heads &&
           a->topk == b->topk && a->extra_topk == b->extra_topk && a->has_tiles == b->has_tiles;
}

/* The plan with the shortest estimated time. */
static batch_plan
find_plan(const split_problem *problem, int64_t num_tokens)
{
    if (atomic_flag_test_and_set_explicit(&known_plans_lock, memory_order_acquire)) {
        return plan_batch(problem, num_tokens);
    }
    known_plan *const known = &known_plans[num_tokens % KNOWN_PLANS];
    if (known->num_tokens != num_tokens || !is_same_problem(&known->problem, problem)) {
        *known = (known_plan){*problem, num_tokens, plan_batch(problem, num_tokens)};
    }
    const batch_plan plan = known->plan;
    atomic_flag_clear_explicit(&known_plans_lock, memory_order_release);
    return plan;
}

/* Several splits that are given are a need, too. */
static smla_kernel_call
call_of(const smla_attention_shape *shape, smla_kv_set formats)
{
    return (smla_kernel_call){
        .formats = formats,
        .source = shape->source,
        .needs = shape->needs | (shape->num_splits > 1 ? SMLA_NEEDS_SPLITS : 0),
        .num_heads = shape->num_heads,
        .columns = SMLA_UNSPLIT,
    };
}

/* Returns false where no row of the kernel table serves the call. */
static bool
find_problem(const smla_cuda_device *device, const smla_attention_shape *shape,
             const smla_kernel_call *call, split_problem *problem)
{
    *problem = (split_problem){
        .device = device,
        .whole = smla_find_kernel(device, call),
        .num_heads = call->num_heads,
        .topk = shape->topk,
        .extra_topk = shape->extra_topk,
    };
    return problem->whole != NULL;
}

/* Whether the kernel's plan of a table is that of lists of an expected length. */
static bool
expects_keys(const smla_attention_kernel *kernel)
{
    return kernel->sources == SMLA_SOURCE(TABLE) && !kernel->plans_itself;
}

/* ---- Workspace ------------------------------------------------------------------------------ */

/* No length of a dense call is known, so its number of splits follows from the number of tokens
 * alone. */
enum {
    DENSE_WAVES = 2, /* waves of the portable kernel, so that unequal lengths fill the device */
    /* Keys per token for which Hopper's kernel for FP8 rows is planned. For 4096, one request would
     * have half as many splits, which would take twice as long for a very long one. */
    DENSE_KEYS = 16384,
};

static int64_t
max_dense_parts(const split_problem *problem)
{
    return DENSE_WAVES * count_resident_ctas(problem->device, problem->whole) /
           count_tiles(problem, problem->whole);
}

static int
count_dense_splits(const split_problem *problem, int64_t num_tokens)
{
    const int64_t splits = num_tokens == 0 ? 1 : max_dense_parts(problem) / num_tokens;
    return (int)min_int64(splits < 1 ? 1 : splits, SMLA_MAX_SPLITS);
}

/* Workspace bytes for `parts` pairs of token and split. */
static int64_t
parts_bytes(int64_t parts, int64_t num_heads)
{
    return parts == 0 ? 0 : SMLA_PARTIAL_ALIGN + smla_partial_bytes(parts * num_heads);
}

/* The same where rows have the values that the size was asked for. */
static int64_t
asked_bytes(const smla_attention_shape *shape, int64_t parts)
{
    const int64_t left_out = shape->value_dim == 0 ? 0 : SMLA_KV_LORA_RANK - shape->value_dim;
    return parts_bytes(parts, shape->num_heads) -
           parts * shape->num_heads * left_out * (int64_t)sizeof(float);
}

/* The most pairs of token and split that plan_batch may choose for this batch or a smaller one. */
static int64_t
most_parts(const split_problem *problem, int64_t num_tokens)
{
    const int64_t useful = max_useful_splits(problem);
    return useful == 1 ? 0 : min_int64(num_tokens * useful, max_parts(problem));
}

/* The most pairs of token and split of a dense call of so many tokens or fewer. */
static int64_t
most_dense_parts(const split_problem *problem, int64_t num_tokens)
{
    const int64_t most = max_dense_parts(problem);
    return min_int64(num_tokens * SMLA_MAX_SPLITS, most);
}

/* Makes the plan of a dense call independent of how wide its table is. */
static void
expect_dense_keys(split_problem *problem)
{
    problem->topk = DENSE_KEYS;
    problem->extra_topk = 0;
}

/* Makes a problem of tokens into one of groups of `count` tokens, if the kernel has tiles. A given
 * number of splits excludes them, because a row's bits must then not depend on other tokens. Where
 * single tokens take little more than one wave, tiles would have SMs to spare: requests of 1024
 * keys then took up to 1.5 times as long. */
static bool
take_tiles(const smla_attention_shape *shape, smla_kernel_call call, int64_t count,
           split_problem *problem)
{
    split_problem tiles;
    call.num_heads *= count;
    if (count == 1 || shape->num_splits != 0 ||
        2 * shape->num_tokens <= 3 * problem->device->num_sms ||
        !find_problem(problem->device, shape, &call, &tiles) || tiles.whole->launch_tiles == NULL) {
        return false;
    }
    *problem = tiles;
    problem->has_tiles = true;
    expect_dense_keys(problem);
    return true;
}

/* most_parts of a call with these formats; 0 where no kernel serves them. */
static int64_t
most_parts_of(const smla_cuda_device *device, const smla_attention_shape *shape,
              smla_kv_set formats)
{
    split_problem problem;
    const smla_kernel_call call = call_of(shape, formats);
    smla_kernel_call table = call;
    table.source = SMLA_KEYS_TABLE;
    table.needs = shape->needs | SMLA_NEEDS_SOFTCAP;
    int64_t parts =
        find_problem(device, shape, &call, &problem) ? most_parts(&problem, shape->num_tokens) : 0;
    if (shape->covers_tables && find_problem(device, shape, &table, &problem)) {
        const int64_t dense = most_dense_parts(&problem, shape->num_tokens);
        parts = dense > parts ? dense : parts;
    }
    table.needs = 0;
    if (shape->covers_tables && find_problem(device, shape, &table, &problem) &&
        expects_keys(problem.whole)) {
        expect_dense_keys(&problem);
        const int64_t dense = most_parts(&problem, shape->num_tokens);
        parts = dense > parts ? dense : parts;
    }
    return parts;
}

/* Workspace bytes of a dense call whose tiles may be cut. */
static int64_t
tiles_bytes(const smla_cuda_device *device, const smla_attention_shape *shape)
{
    return smla_cut_tiles_bytes(shape->num_tokens * shape->num_heads, device->num_sms);
}

int64_t
smla_cuda_attention_workspace_size(const smla_attention_shape *shape)
{
    if (shape->num_splits != 0) {
        const bool has_parts = shape->num_splits > 1;
        return asked_bytes(shape, has_parts ? shape->num_tokens * shape->num_splits : 0);
    }
    const smla_cuda_device *const device = smla_cuda_find_device(shape->device_id);
    int64_t parts = 0;
    if (device != NULL && shape->formats[0] != NULL) {
        parts =
            most_parts_of(device, shape, smla_join_formats(shape->formats[0], shape->formats[1]));
    } else if (device != NULL) { /* any formats that a kernel serves */
        smla_kv_set last = 0;
        for (const smla_attention_kernel *kernel = smla_attention_kernels; kernel->launch != NULL;
             kernel++) {
            const smla_kv_set formats = kernel->formats; /* none with ragged keys */
            const bool is_new = formats != 0 && formats != last;
            const int64_t more = is_new ? most_parts_of(device, shape, formats) : 0;
            parts = more > parts ? more : parts;
            last = formats;
        }
    }
    const int64_t tiles = device != NULL && shape->covers_tables ? tiles_bytes(device, shape) : 0;
    const int64_t bytes = asked_bytes(shape, parts);
    return smla_add_wide_bytes(shape, bytes > tiles ? bytes : tiles);
}

/* ---- Plans of calls -------------------------------------------------------------------------- */

/* Whether splits take chunks of columns in turn. Splits of few columns have a range each, so that
 * no split is without columns, and so have those of dense calls. */
static bool
interleaves(const split_problem *problem, const smla_attention_kernel *kernel, int num_splits)
{
    return num_splits > 1 && kernel->arch == 90 && kernel->max_columns == 0 &&
           kernel->sources == SMLA_SOURCE(LISTS) &&
           count_columns(problem, num_splits) >= 2 * SMLA_SM90_KEYS;
}

static smla_attention_run
make_run(const split_problem *problem, const smla_attention_kernel *kernel, int64_t num_tokens,
         int num_splits)
{
    const int64_t cut_bytes =
        num_splits > 1 ? 0 : parts_bytes(most_parts(problem, num_tokens), problem->num_heads);
    return (smla_attention_run){.kernel = kernel,
                                .num_tokens = num_tokens,
                                .num_splits = num_splits,
                                .cut_bytes = cut_bytes,
                                .interleaves = interleaves(problem, kernel, num_splits)};
}

/* Fills in the runs of a plan: tokens in full waves of CTAs, then the rest, which may be split. */
static void
plan_runs(const split_problem *problem, int64_t num_tokens, smla_attention_plan *plan)
{
    const batch_plan batch = find_plan(problem, num_tokens);
    const run_plan *const last = &batch.run;
    smla_attention_run *const run = plan->runs;
    plan->num_runs = 1;
    run[0] = make_run(problem, last->kernel, batch.rest, last->num_splits);
    if (batch.rest < num_tokens) { /* one launch, whose splits have ranges */
        plan->num_runs = 2;
        run[1] = run[0];
        run[1].interleaves = false;
        run[0] = make_run(problem, problem->whole, num_tokens - batch.rest, 1);
    }
}

/* Plans a call in tiles of `count` query tokens. */
static void
plan_token_tiles(const split_problem *problem, int64_t num_tokens, int64_t count,
                 smla_attention_plan *plan)
{
    const int64_t groups = num_tokens / count;
    plan->workspace_bytes = parts_bytes(most_parts(problem, groups), problem->num_heads);
    plan_runs(problem, groups, plan);
    for (int i = 0; i < plan->num_runs; i++) {
        plan->runs[i].num_tokens *= count;
        plan->runs[i].tile_tokens = count;
    }
}

/* Plans a call whose kernel reads lengths itself. Its workspace is enough for the splits of few
 * tiles, too: they have fewer partial rows than all CTAs have slots for. */
static void
plan_tiles(const split_problem *problem, const smla_attention_shape *shape, smla_kernel_call call,
           smla_attention_plan *plan)
{
    smla_attention_run *const run = &plan->runs[0];
    const bool is_given = shape->num_splits != 0;
    const int num_splits = is_given ? 0 : count_few_splits(problem->device, shape);
    plan->workspace_bytes = is_given ? 0 : tiles_bytes(problem->device, shape);
    plan->reads_lengths = true;
    run->kernel = problem->whole;
    run->cut_bytes = plan->workspace_bytes;
    if (num_splits > 0) {
        call.is_few = true;
        run->kernel = smla_find_kernel(problem->device, &call);
        run->num_splits = num_splits;
        run->cut_bytes = 0;
    }
}

/* Bytes that a workspace has which was asked for without keys, so that no call widens rows by
 * chance. */
static int64_t
bytes_without_keys(const smla_attention_shape *shape)
{
    const smla_attention_shape any = {.num_tokens = shape->num_tokens,
                                      .num_heads = shape->num_heads,
                                      .topk = shape->topk,
                                      .extra_topk = shape->extra_topk,
                                      .device_id = shape->device_id,
                                      .covers_tables = true};
    return smla_cuda_attention_workspace_size(&any) + smla_key_ranges_bytes(shape->num_tokens);
}

/* Finds where a run's wide rows lie, if it wants them and they fit. */
static void
place_wide_rows(const smla_attention_shape *shape, smla_attention_run *run)
{
    if (smla_wants_wide_rows(shape, run)) {
        const int64_t offset = bytes_without_keys(shape);
        run->wide_offset = offset + smla_wide_bytes(shape->num_keys) <= shape->room ? offset : 0;
    }
}

void
smla_cuda_plan_attention(const smla_attention_shape *shape, smla_attention_plan *plan)
{
    const smla_kv_set formats = shape->formats[0] == NULL
                                    ? SMLA_ROWS_FP8
                                    : smla_join_formats(shape->formats[0], shape->formats[1]);
    const smla_cuda_device *const device = smla_cuda_find_device(shape->device_id);
    const bool is_given = shape->num_splits != 0;
    *plan = (smla_attention_plan){
        .workspace_bytes = is_given ? smla_cuda_attention_workspace_size(shape) : 0,
        .num_runs = 1,
        .runs[0] = {.num_tokens = shape->num_tokens,
                    .num_splits = is_given ? shape->num_splits : 1},
    };
    smla_kernel_call call = call_of(shape, formats);
    split_problem problem;
    if (device == NULL || !find_problem(device, shape, &call, &problem)) {
        return;
    }
    plan->lack = shape->explains ? smla_find_lack(device, &call) : NULL;
    if (problem.whole->plans_itself) {
        plan_tiles(&problem, shape, call, plan);
        return;
    }
    if (is_given) { /* a token's bits must not depend on the batch */
        call.columns =
            shape->num_splits > 1 ? count_columns(&problem, shape->num_splits) : call.columns;
        plan->runs[0].kernel = smla_find_kernel(device, &call);
        return;
    }
    if (expects_keys(problem.whole)) {
        const int64_t tile_tokens = count_tile_tokens(shape);
        if (take_tiles(shape, call, tile_tokens, &problem)) {
            plan_token_tiles(&problem, shape->num_tokens, tile_tokens, plan);
            return;
        }
        expect_dense_keys(&problem);
    } else if (shape->source == SMLA_KEYS_TABLE) {
        const int num_splits = count_dense_splits(&problem, shape->num_tokens);
        const int64_t parts = num_splits == 1 ? 0 : shape->num_tokens * num_splits;
        plan->workspace_bytes = parts_bytes(parts, shape->num_heads);
        plan->runs[0].kernel = problem.whole;
        plan->runs[0].num_splits = num_splits;
        return;
    }
    plan->workspace_bytes = parts_bytes(most_parts(&problem, shape->num_tokens), shape->num_heads);
    plan_runs(&problem, shape->num_tokens, plan);
    place_wide_rows(shape, &plan->runs[0]);
    place_wide_rows(shape, &plan->runs[1]); /* without a second run it has no kernel */
}
