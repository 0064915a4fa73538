/* attention.c: which attention kernel runs, into how many splits the keys are cut, and where splits
 * leave their partial rows.
 *
 * The table below is the whole choice: of the rows that fit the device, the formats of the caches, the
 * number of heads and the columns of a split, the first where the caller gave the number of splits,
 * else the one that is estimated to take the shortest time. Kernels of one architecture stand above the
 * portable ones, those for few columns above those for any, and then those with the most heads per CTA.
 */
#include <stdio.h>

#include "kernels.h"

/* ---- Table --------------------------------------------------------------------------------- */

enum { ANY_ARCH = 999 };

/* Kernels for calls of `least` heads and more, `heads` of them per CTA. */
#define SM90_FP8(least, heads, cost, start)                 \
    {.min_arch = 90,                                        \
     .max_arch = 90,                                        \
     .formats = SMLA_ROWS_FP8,                              \
     .min_heads = least,                                    \
     .max_heads = 128,                                      \
     .heads_per_cta = heads,                                \
     .block_columns = SMLA_SM90_KEYS,                       \
     .block_cost = cost,                                    \
     .cta_cost = start,                                     \
     .leaves_halves = true,                                 \
     .ctas_per_sm = 1,                                      \
     .shared_bytes = SMLA_SM90_SHARED_BYTES,                \
     .name = "attention_sm90.cu, " #heads " heads per CTA", \
     .launch = smla_attend_sm90_fp8_##heads}

/* For splits of few columns. A key takes a shade longer, the start much less, and columns need not
 * fill blocks. */
#define SM90_SMALL(least, heads)                                  \
    {.min_arch = 90,                                              \
     .max_arch = 90,                                              \
     .formats = SMLA_ROWS_FP8,                                    \
     .min_heads = least,                                          \
     .max_heads = 128,                                            \
     .heads_per_cta = heads,                                      \
     .max_columns = SMLA_SM90_SMALL_KEYS,                         \
     .block_columns = SMLA_SPLIT_ALIGN,                           \
     .block_cost = 9,                                             \
     .cta_cost = 32,                                              \
     .leaves_halves = true,                                       \
     .ctas_per_sm = 1,                                            \
     .shared_bytes = SMLA_SM90_SHARED_BYTES,                      \
     .name = "attention_small_sm90.cu, " #heads " heads per CTA", \
     .launch = smla_attend_sm90_small_##heads}

#define SM80(rows, suffix, least, heads)                    \
    {.min_arch = 80,                                        \
     .max_arch = ANY_ARCH,                                  \
     .formats = rows,                                       \
     .min_heads = least,                                    \
     .max_heads = 128,                                      \
     .heads_per_cta = heads,                                \
     .block_columns = SMLA_SM80_KEYS,                       \
     .block_cost = 16,                                      \
     .cta_cost = 32,                                        \
     .ctas_per_sm = SMLA_SM80_CTAS_PER_SM(heads),           \
     .shared_bytes = SMLA_SM80_SHARED_BYTES(heads, rows),   \
     .name = "attention_sm80.cu, " #heads " heads per CTA", \
     .launch = smla_attend_sm80_##suffix##_##heads}

static const smla_attention_kernel kernels[] = {
    SM90_SMALL(17, 32),
    SM90_SMALL(1, 16),
    SM90_FP8(33, 64, 16, 48),
    SM90_FP8(17, 32, 10, 50),
    SM90_FP8(1, 16, 9, 48),
    {.min_arch = 90,
     .max_arch = 90,
     .formats = SMLA_ROWS_BF16,
     .min_heads = 1,
     .max_heads = 128,
     .heads_per_cta = 64,
     .block_columns = SMLA_SM90_KEYS,
     .block_cost = 16,
     .cta_cost = 48,
     .ctas_per_sm = 1,
     .shared_bytes = SMLA_SM90_SHARED_BYTES,
     .name = "attention_bf16_sm90.cu, 64 heads per CTA",
     .launch = smla_attend_sm90_bf16_64},
    SM80(SMLA_ROWS_FP8, fp8, 33, 64),
    SM80(SMLA_ROWS_FP8, fp8, 17, 32),
    SM80(SMLA_ROWS_FP8, fp8, 1, 16),
    SM80(SMLA_ROWS_BF16, bf16, 33, 64),
    SM80(SMLA_ROWS_BF16, bf16, 17, 32),
    SM80(SMLA_ROWS_BF16, bf16, 1, 16),
    SM80(SMLA_ROWS_MIXED, mixed, 1, 16),
};

enum { NUM_KERNELS = sizeof kernels / sizeof kernels[0] };

/* What kernels() prints of a row; the texts live as long as the library. */
typedef struct row_text {
    const char *arch;
    const char *heads;
} row_text;

static row_text
text_of(const smla_attention_kernel *kernel)
{
    return (row_text){
        .arch = kernel->min_arch == 90 ? "sm_90" : "sm_80+",
        .heads = kernel->min_heads == 33   ? "33...128"
                 : kernel->min_heads == 17 ? "17...128"
                                           : "1...128",
    };
}

static const char *
formats_name(smla_row_formats formats)
{
    switch (formats) {
    case SMLA_ROWS_FP8: return "fp8_ds_mla";
    case SMLA_ROWS_BF16: return "bfloat16";
    default: return "fp8_ds_mla with bfloat16";
    }
}

/* Of a main list and an extra one, which may be absent (NULL). */
static smla_row_formats
join_formats(const smla_kv_format_info *main, const smla_kv_format_info *extra)
{
    const bool is_fp8 = main->nope_type == SMLA_NOPE_E4M3;
    if (extra != NULL && is_fp8 != (extra->nope_type == SMLA_NOPE_E4M3)) {
        return SMLA_ROWS_MIXED;
    }
    return is_fp8 ? SMLA_ROWS_FP8 : SMLA_ROWS_BF16;
}

static smla_row_formats
formats_of(const smla_attention_params *params)
{
    return join_formats(params->lists[0].kv.format,
                        params->num_lists == 2 ? params->lists[1].kv.format : NULL);
}

static bool
runs_on(const smla_attention_kernel *kernel, const smla_cuda_device *device)
{
    return device->compute_capability >= kernel->min_arch &&
           device->compute_capability <= kernel->max_arch &&
           device->max_shared_bytes >= kernel->shared_bytes;
}

/* `columns`: of a split, of both lists. */
static bool
fits(const smla_attention_kernel *kernel, const smla_cuda_device *device, smla_row_formats formats,
     int64_t num_heads, int num_splits, int64_t columns)
{
    return kernel->formats == formats && num_heads >= kernel->min_heads &&
           num_heads <= kernel->max_heads && runs_on(kernel, device) &&
           (kernel->max_columns == 0 || (num_splits > 1 && columns <= kernel->max_columns));
}

/* The first row that fits, NULL for none. */
static const smla_attention_kernel *
find_kernel(const smla_cuda_device *device, smla_row_formats formats, int64_t num_heads,
            int num_splits, int64_t columns)
{
    for (int i = 0; i < NUM_KERNELS; i++) {
        if (fits(&kernels[i], device, formats, num_heads, num_splits, columns)) {
            return &kernels[i];
        }
    }
    return NULL;
}

/* The row of a call that is not split. */
static const smla_attention_kernel *
find_whole_kernel(const smla_cuda_device *device, smla_row_formats formats, int64_t num_heads)
{
    return find_kernel(device, formats, num_heads, 1, 0);
}

/* Whether any number of heads takes this row. */
static bool
is_chosen(const smla_attention_kernel *kernel, const smla_cuda_device *device)
{
    const int num_splits = kernel->max_columns == 0 ? 1 : 2;
    for (int32_t heads = kernel->min_heads; heads <= kernel->max_heads; heads++) {
        if (find_kernel(device, kernel->formats, heads, num_splits, kernel->max_columns) ==
            kernel) {
            return true;
        }
    }
    return false;
}

int64_t
smla_cuda_kernels(smla_kernel_info *rows, int64_t capacity)
{
    const smla_cuda_device *const device = smla_cuda_find_device(0);
    for (int i = 0; i < NUM_KERNELS && i < capacity; i++) {
        const smla_attention_kernel *const kernel = &kernels[i];
        const row_text text = text_of(kernel);
        rows[i] = (smla_kernel_info){
            .device = "cuda",
            .arch = text.arch,
            .kv_format = formats_name(kernel->formats),
            .heads = text.heads,
            .name = kernel->name,
            .available = device != NULL && runs_on(kernel, device),
            .selected = device != NULL && is_chosen(kernel, device),
        };
    }
    return NUM_KERNELS;
}

/* A miss says what there is. */
static smla_status
fail_without_kernel(const smla_attention_params *params, const smla_cuda_device *device,
                    smla_error *error)
{
    char rows[512] = "";
    size_t length = 0;
    for (int i = 0; i < NUM_KERNELS && length < sizeof rows; i++) {
        const smla_attention_kernel *const kernel = &kernels[i];
        const int written =
            snprintf(rows + length, sizeof rows - length, "%s%s %s, heads %s", i == 0 ? "" : "; ",
                     text_of(kernel).arch, formats_name(kernel->formats), text_of(kernel).heads);
        length += written < 0 ? 0 : (size_t)written;
    }
    return smla_fail(error, SMLA_ERROR_RUNTIME,
                     "sparse_attention: no kernel for sm_%d, %d bytes of shared memory, %s and "
                     "%lld heads; there are: %s",
                     device->compute_capability, device->max_shared_bytes,
                     formats_name(formats_of(params)), (long long)params->num_heads, rows);
}

/* ---- Splits -------------------------------------------------------------------------------- */

/* More CTAs than this many per place on the device gain nothing and cost memory. */
enum { MAX_WAVES = 3 };

/* What the schedule looks at. */
typedef struct split_problem {
    const smla_cuda_device *device;
    const smla_attention_kernel *whole; /* of a call that is not split */
    int64_t num_heads;
    int64_t topk;
    int64_t extra_topk;
} split_problem;

static int64_t
min_int64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* CTAs that the device runs at once. */
static int64_t
count_places(const smla_cuda_device *device, const smla_attention_kernel *kernel)
{
    if (kernel->ctas_per_sm == 1) {
        return device->num_sms;
    }
    const int64_t fit = (device->max_shared_bytes + SMLA_RESERVED_SHARED_BYTES) /
                        (kernel->shared_bytes + SMLA_RESERVED_SHARED_BYTES);
    return device->num_sms * min_int64(kernel->ctas_per_sm, fit < 1 ? 1 : fit);
}

/* n / by, rounded up. The schedule divides a hundred times in a call, and 32 bits take a third of the
 * time. */
static int64_t
divide_up(int64_t n, int64_t by)
{
    if ((n | by) >> 31 == 0) {
        return (int64_t)(((uint32_t)n + (uint32_t)by - 1) / (uint32_t)by);
    }
    return n / by + (n % by != 0);
}

/* smla_split_columns of both lists. */
static int64_t
count_columns(const split_problem *problem, int num_splits)
{
    const int64_t units = divide_up(divide_up(problem->topk, num_splits), SMLA_SPLIT_ALIGN) +
                          divide_up(divide_up(problem->extra_topk, num_splits), SMLA_SPLIT_ALIGN);
    return units * SMLA_SPLIT_ALIGN;
}

/* CTAs of a token and split. */
static int64_t
count_tiles(const split_problem *problem, const smla_attention_kernel *kernel)
{
    return divide_up(problem->num_heads, kernel->heads_per_cta);
}

/* Splits beyond this have no columns of their own. */
static int64_t
max_useful_splits(const split_problem *problem)
{
    const int64_t columns =
        problem->topk > problem->extra_topk ? problem->topk : problem->extra_topk;
    const int64_t useful = (columns + SMLA_SPLIT_ALIGN - 1) / SMLA_SPLIT_ALIGN;
    return useful < 1 ? 1 : min_int64(useful, SMLA_MAX_SPLITS);
}

/* Pairs of token and split that a chosen split count above 1 may lead to, for any batch. */
static int64_t
max_parts(const split_problem *problem)
{
    return MAX_WAVES * count_places(problem->device, problem->whole) /
           count_tiles(problem, problem->whole);
}

/* The costs below are in sixteenths of 128 keys of the largest tile of attention_sm90.cu. */

/* Of the combine kernel, and of the partial rows that it reads. */
static int64_t
find_combine_cost(const split_problem *problem, const smla_attention_kernel *kernel,
                  int64_t num_tokens, int num_splits)
{
    if (num_splits == 1) {
        return 0;
    }
    if (!kernel->leaves_halves) {
        return 16 + num_splits;
    }
    const int flights = (num_splits + 15) / 16; /* of values that are asked for at once */
    return 12 + 7 * flights + num_tokens * num_splits * problem->num_heads / 512;
}

/* Kernels that start before the grid in front of them is done do so where there is room. */
static int64_t
find_late_cost(const smla_attention_kernel *kernel, int64_t num_ctas, int64_t places)
{
    return kernel->leaves_halves && 2 * num_ctas > places ? 6 : 0;
}

/* A way to run a batch, and its estimated time: CTAs run in waves. */
typedef struct run_plan {
    const smla_attention_kernel *kernel;
    int num_splits;
    int64_t cost;
} run_plan;

static int64_t
estimate_cost(const split_problem *problem, const smla_attention_kernel *kernel, int64_t num_tokens,
              int num_splits, int64_t columns)
{
    const int64_t places = count_places(problem->device, kernel);
    const int64_t ctas = num_tokens * count_tiles(problem, kernel) * num_splits;
    const int64_t cta_cost =
        divide_up(columns, kernel->block_columns) * kernel->block_cost + kernel->cta_cost;
    return divide_up(ctas, places) * cta_cost +
           find_combine_cost(problem, kernel, num_tokens, num_splits) +
           find_late_cost(kernel, ctas, places);
}

/* With this many splits: the row that is estimated to take the shortest time, the first when equal. */
static run_plan
choose_kernel(const split_problem *problem, int64_t num_tokens, int num_splits)
{
    const int64_t columns = count_columns(problem, num_splits);
    run_plan best = {.num_splits = num_splits, .cost = INT64_MAX};
    for (const smla_attention_kernel *kernel = kernels; kernel < kernels + NUM_KERNELS; kernel++) {
        if (kernel->min_arch != problem->whole->min_arch ||
            !fits(kernel, problem->device, problem->whole->formats, problem->num_heads, num_splits,
                  columns)) {
            continue;
        }
        const int64_t cost = estimate_cost(problem, kernel, num_tokens, num_splits, columns);
        if (cost < best.cost) {
            best.kernel = kernel;
            best.cost = cost;
        }
    }
    return best;
}

/* A plan for a batch. Of one split, `rest` tokens at the end may be left to a plan of their own, because
 * that is estimated to take less time than one more wave: all of them where they are the only wave,
 * or where nothing is left. */
typedef struct batch_plan {
    run_plan run;
    int64_t rest;
} batch_plan;

static batch_plan plan_batch(const split_problem *problem, int64_t num_tokens);

static batch_plan
plan_whole(const split_problem *problem, int64_t num_tokens)
{
    batch_plan plan = {.run = choose_kernel(problem, num_tokens, 1), .rest = num_tokens};
    const int64_t tiles = count_tiles(problem, problem->whole);
    const int64_t places = count_places(problem->device, problem->whole);
    const int64_t full = num_tokens * tiles / places * places / tiles;
    const int64_t rest = num_tokens - full;
    if (full == 0 || rest == 0) {
        return plan;
    }
    const int64_t columns = count_columns(problem, 1);
    const int64_t cost = estimate_cost(problem, problem->whole, full, 1, columns) +
                         plan_batch(problem, rest).run.cost;
    if (cost < plan.run.cost) {
        plan.run.cost = cost;
        plan.rest = rest;
    }
    return plan;
}

/* The plan with the shortest estimated time, the one with fewer splits when equal. */
static batch_plan
plan_batch(const split_problem *problem, int64_t num_tokens)
{
    const int64_t useful = max_useful_splits(problem);
    const int64_t most = num_tokens == 0 ? 1 : min_int64(useful, max_parts(problem) / num_tokens);
    batch_plan best = plan_whole(problem, num_tokens);
    int64_t columns = count_columns(problem, 1);
    for (int splits = 2; splits <= most; splits++) {
        const int64_t fewer = count_columns(problem, splits);
        if (fewer == columns) {
            continue; /* more CTAs, none of them shorter */
        }
        columns = fewer;
        const run_plan run = choose_kernel(problem, num_tokens, splits);
        if (run.cost < best.run.cost) {
            best = (batch_plan){.run = run, .rest = num_tokens};
        }
    }
    return best;
}

/* Layers of a model, and steps of a server, ask the same again and again. */
enum { KNOWN_PLANS = 8 };

static _Thread_local struct {
    split_problem problem; /* of no kernel: nothing is known */
    int64_t num_tokens;
    batch_plan plan;
} known_plans[KNOWN_PLANS];

static bool
is_same_problem(const split_problem *a, const split_problem *b)
{
    return a->device == b->device && a->whole == b->whole && a->num_heads == b->num_heads &&
           a->topk == b->topk && a->extra_topk == b->extra_topk;
}

static batch_plan
find_plan(const split_problem *problem, int64_t num_tokens)
{
    const int i = (int)(num_tokens % KNOWN_PLANS);
    if (known_plans[i].num_tokens != num_tokens ||
        !is_same_problem(&known_plans[i].problem, problem)) {
        known_plans[i].plan = plan_batch(problem, num_tokens);
        known_plans[i].problem = *problem;
        known_plans[i].num_tokens = num_tokens;
    }
    return known_plans[i].plan;
}

/* False where no row fits. */
static bool
find_problem(const smla_cuda_device *device, const smla_attention_shape *shape,
             smla_row_formats formats, split_problem *problem)
{
    *problem = (split_problem){
        .device = device,
        .whole = find_whole_kernel(device, formats, shape->num_heads),
        .num_heads = shape->num_heads,
        .topk = shape->topk,
        .extra_topk = shape->extra_topk,
    };
    return problem->whole != NULL;
}

int
smla_cuda_choose_num_splits(const smla_attention_shape *shape)
{
    split_problem problem;
    if (shape->num_splits != 0) {
        return shape->num_splits;
    }
    const smla_row_formats formats = shape->formats[0] == NULL
                                         ? SMLA_ROWS_FP8
                                         : join_formats(shape->formats[0], shape->formats[1]);
    const smla_cuda_device *const device = smla_cuda_find_device(shape->device_id);
    return device != NULL && find_problem(device, shape, formats, &problem)
               ? find_plan(&problem, shape->num_tokens).run.num_splits
               : 1;
}

/* Crossover of FP8 rows and gathered bf16 rows, of an H200 (benchmarks/RESULTS.md, CUDA run 4). */
enum {
    DIRECT_PS_PER_KEY = 62,       /* what the FP8 kernel takes longer per key of 33 to 64 heads */
    GATHER_PS_PER_ROW = 460,      /* 656 bytes in, 1152 out */
    GATHER_PS_PER_CALL = 4000000, /* its launch, and one more of attention */
};

/* Up to 32 heads the kernels are equal, for the one of bf16 rows pays for 64. */
bool
smla_cuda_prefers_direct(const smla_attention_shape *prefills, int64_t num_rows, int64_t num_chunks)
{
    const smla_cuda_device *const device = smla_cuda_find_device(prefills->device_id);
    const smla_attention_kernel *const kernel =
        device == NULL ? NULL : find_whole_kernel(device, SMLA_ROWS_FP8, prefills->num_heads);
    if (kernel == NULL || kernel->min_arch < 90) {
        return false;
    }
    const int64_t tiles = prefills->num_heads / 64 + (prefills->num_heads % 64 > 32);
    const int64_t loss = prefills->num_tokens * prefills->topk * tiles * DIRECT_PS_PER_KEY;
    return loss < num_rows * GATHER_PS_PER_ROW + num_chunks * GATHER_PS_PER_CALL;
}

/* The most pairs of token and split that plan_batch can lead to, for any smaller batch too. */
static int64_t
most_parts(const smla_attention_shape *shape, smla_row_formats formats)
{
    const smla_cuda_device *const device = smla_cuda_find_device(shape->device_id);
    split_problem problem;
    if (device == NULL || !find_problem(device, shape, formats, &problem)) {
        return 0;
    }
    const int64_t useful = max_useful_splits(&problem);
    return useful == 1 ? 0 : min_int64(shape->num_tokens * useful, max_parts(&problem));
}

int64_t
smla_cuda_attention_workspace_size(const smla_attention_shape *shape)
{
    static const smla_row_formats all[] = {SMLA_ROWS_FP8, SMLA_ROWS_BF16, SMLA_ROWS_MIXED};
    int64_t parts = 0;
    if (shape->num_splits > 1) {
        parts = shape->num_tokens * shape->num_splits;
    } else if (shape->num_splits == 0 && shape->formats[0] != NULL) {
        parts = most_parts(shape, join_formats(shape->formats[0], shape->formats[1]));
    } else if (shape->num_splits == 0) {
        for (int i = 0; i < 3; i++) {
            const int64_t more = most_parts(shape, all[i]);
            parts = more > parts ? more : parts;
        }
    }
    return parts == 0 ? 0 : SMLA_PARTIAL_ALIGN + smla_partial_bytes(parts * shape->num_heads);
}

/* ---- Running ------------------------------------------------------------------------------- */

static smla_status
require_workspace(const smla_attention_params *params, smla_error *error)
{
    if (params->num_splits == 1) {
        return SMLA_OK;
    }
    const int64_t least =
        smla_partial_padding(params->workspace) + smla_partial_bytes(smla_partial_num_rows(params));
    const int64_t given = params->workspace == NULL ? 0 : params->workspace_bytes;
    if (given < least) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "sparse_attention: `workspace` must have at least %lld bytes, got %lld",
                         (long long)least, (long long)given);
    }
    return SMLA_OK;
}

static void
skip_tokens(smla_key_list *keys, int64_t count)
{
    keys->indices += count * keys->indices_stride_token;
    keys->topk_length += keys->topk_length == NULL ? 0 : count * keys->topk_length_stride;
    keys->map.req_id_per_token += keys->map.block_table == NULL ? 0 : count;
}

/* Tokens [start, start + count) of a call. */
static smla_attention_params
slice_tokens(const smla_attention_params *params, int64_t start, int64_t count)
{
    smla_attention_params part = *params;
    part.num_tokens = count;
    part.q_nope += start * part.q_nope_stride_token;
    part.q_pe += start * part.q_pe_stride_token;
    skip_tokens(&part.lists[0], start);
    if (part.num_lists == 2) {
        skip_tokens(&part.lists[1], start);
    }
    part.out += start * part.out_stride_token;
    part.lse += start * part.lse_stride_token;
    part.max_logits += part.max_logits == NULL ? 0 : start * part.max_logits_stride_token;
    return part;
}

static smla_status
run_kernel(const smla_attention_kernel *kernel, const smla_attention_params *params,
           smla_error *error)
{
    static const char op[] = "sparse_attention";
    static const char call[] = "cudaLaunchKernelExC";
    SMLA_TRY(require_workspace(params, error));
    SMLA_TRY(smla_cuda_status(op, call, kernel->launch(params), error));
    if (params->num_splits == 1) {
        return SMLA_OK;
    }
    return smla_cuda_status(op, call, smla_cuda_launch_combine(params, kernel->leaves_halves),
                            error);
}

/* A call whose split count is the backend's own, that of its plan. What does not fill a wave of CTAs any more may be
 * split, after the rest. */
static smla_status
run_planned(const split_problem *problem, const smla_attention_params *params, smla_error *error)
{
    const batch_plan plan = find_plan(problem, params->num_tokens);
    const int64_t start = params->num_tokens - plan.rest;
    if (start == 0) {
        return run_kernel(plan.run.kernel, params, error);
    }
    const smla_attention_params full = slice_tokens(params, 0, start);
    SMLA_TRY(run_kernel(problem->whole, &full, error));
    smla_attention_params part = slice_tokens(params, start, plan.rest);
    const run_plan run = find_plan(problem, plan.rest).run;
    part.num_splits = run.num_splits;
    return run_kernel(run.kernel, &part, error);
}

smla_status
smla_cuda_sparse_attention(const smla_attention_params *params, smla_error *error)
{
    if (params->num_tokens == 0) {
        return SMLA_OK;
    }
    const smla_cuda_device *const device = smla_cuda_find_device(params->stream.device_id);
    const smla_attention_shape shape = {
        .num_heads = params->num_heads,
        .topk = params->lists[0].topk,
        .extra_topk = params->num_lists == 2 ? params->lists[1].topk : 0,
    };
    const smla_row_formats formats = formats_of(params);
    split_problem problem;
    if (!find_problem(device, &shape, formats, &problem)) {
        return fail_without_kernel(params, device, error);
    }
    if (params->is_planned) {
        return run_planned(&problem, params, error);
    }
    /* a token's bits must not depend on the batch */
    const smla_attention_kernel *const kernel =
        find_kernel(device, formats, params->num_heads, params->num_splits,
                    count_columns(&problem, params->num_splits));
    return run_kernel(kernel, params, error);
}
