/* attention.c: how attention is divided among threads, and where their scratch lies.
 *
 * A token with n splits has n parts (attention.h). Both schedules fold them in the order 0, 1, ...,
 * n - 1, so they give the same bits on any number of threads:
 *   - few parts in all (a small decode): parts run in parallel and leave their states in the
 *     workspace; then groups of heads of a token run in parallel and fold them;
 *   - otherwise tokens run in parallel, each on one thread, part after part.
 * Parts without keys cost next to nothing, because tables are often wider than lists are long: no
 * kernel runs for them. They are folded like others, since that makes -0 of a sum 0; a second one
 * behind the first would change nothing, and is left out.
 *
 * Workspace: [states of all parts, in the first schedule] [scratch of thread 0] [thread 1] ...
 * Scratch of a thread: [total state] [part state] [kernel scratch].
 */
#include <math.h>
#include <string.h>

#include "core/fp_mode.h"
#include "cpu/attention/attention.h"
#include "cpu/attention/attention_block.h"
#include "cpu/isa.h"
#include "cpu/machine/threads.h"

enum {
    MAX_PARALLEL_PARTS = 64, /* limit of the first schedule: enough for 64 cores, 17 MB of states */
    MIN_COLUMNS_PER_SPLIT = 256, /* each part packs the whole query, so short parts do not pay */
};

/* ---- Plan ---------------------------------------------------------------------------------- */

static int64_t
min_int64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The most splits that a token can have. */
static int64_t
max_splits(const smla_attention_shape *shape)
{
    if (shape->num_splits != 0) {
        return shape->num_splits;
    }
    const int64_t columns = shape->topk + shape->extra_topk;
    const int64_t useful = (columns + MIN_COLUMNS_PER_SPLIT - 1) / MIN_COLUMNS_PER_SPLIT;
    return useful < 1 ? 1 : min_int64(useful, SMLA_MAX_SPLITS);
}

static int
choose_num_splits(const smla_attention_shape *shape)
{
    if (shape->num_splits != 0) {
        return shape->num_splits;
    }
    const int64_t fair = shape->num_tokens < 1 ? 1 : MAX_PARALLEL_PARTS / shape->num_tokens;
    return (int)min_int64(fair < 1 ? 1 : fair, max_splits(shape));
}

bool
smla_cpu_prefers_direct(const smla_attention_shape *prefills, int64_t num_rows, int64_t num_chunks)
{
    (void)prefills;
    (void)num_rows;
    (void)num_chunks;
    return false; /* a workspace is faster: its rows are widened once, not per token */
}

static int64_t
thread_bytes(int64_t num_heads)
{
    const int64_t bytes =
        smla_cpu_attention_scratch_bytes(num_heads) + 2 * smla_attention_state_bytes(num_heads);
    return (bytes + SMLA_WORKSPACE_ALIGN - 1) / SMLA_WORKSPACE_ALIGN * SMLA_WORKSPACE_ALIGN;
}

int64_t
smla_cpu_attention_workspace_size(const smla_attention_shape *shape)
{
    if (shape->num_tokens == 0) {
        return 0;
    }
    const int64_t splits = max_splits(shape);
    const int64_t parts =
        splits == 1 ? 0 : min_int64(shape->num_tokens * splits, MAX_PARALLEL_PARTS);
    return SMLA_WORKSPACE_ALIGN + parts * smla_attention_state_bytes(shape->num_heads) +
           smla_max_threads() * thread_bytes(shape->num_heads);
}

void
smla_cpu_plan_attention(const smla_attention_shape *shape, smla_attention_plan *plan)
{
    *plan = (smla_attention_plan){
        .workspace_bytes = smla_cpu_attention_workspace_size(shape),
        .num_runs = 1,
        .runs[0] = {.num_tokens = shape->num_tokens, .num_splits = choose_num_splits(shape)},
    };
}

const char *
smla_cpu_kernel_name(const smla_attention_run *run)
{
    (void)run; /* one instruction set runs them all */
    const smla_cpu_isa *isa = NULL;
    (void)smla_cpu_choose_isa("kernels", &isa, NULL);
    return isa == NULL ? NULL : isa->attention_name;
}

smla_status
smla_cpu_find_key_ranges(const smla_key_ranges_params *params, smla_error *error)
{
    (void)error;
    for (int64_t token = 0; token < params->reqs.num_tokens; token++) {
        smla_write_key_range(params, token);
    }
    smla_fill_padding(&params->padding, smla_query_start(&params->reqs, params->reqs.num_reqs), 1,
                      params->reqs.num_tokens, 0, 1);
    return SMLA_OK;
}

/* ---- Running ------------------------------------------------------------------------------- */

/* The keys of a part as smla_find_keys gives them. */
typedef struct part_keys {
    int count;
    smla_only_key first;
} part_keys;

typedef struct attention_run {
    const smla_attention_params *params;
    const smla_attention_isa *isa;
    smla_interrupt *interrupt;
    uint8_t *parts;   /* states of the parts if parts run in parallel */
    part_keys *found; /* the keys of these parts */
    uint8_t *threads; /* scratch of all threads */
    int64_t state_bytes;
    int64_t thread_bytes;
    int64_t fold_tasks_per_token;
} attention_run;

static uint8_t *
thread_scratch_of(const attention_run *run)
{
    return run->threads + smla_thread_idx() * run->thread_bytes;
}

static smla_attention_state
state_at(const attention_run *run, uint8_t *memory)
{
    return smla_attention_state_at(memory, run->params->queries.num_heads);
}

/* The state of a part without keys, for some heads. */
static void
clear_heads(smla_head_range heads, smla_attention_state state)
{
    const int64_t end = smla_pad_heads(heads.end);
    for (int64_t head = heads.begin; head < end; head++) {
        state.sum[head] = 0.0;
        state.max_log2[head] = -INFINITY;
    }
    memset(state.out + heads.begin * SMLA_KV_LORA_RANK, 0,
           (size_t)(end - heads.begin) * SMLA_KV_LORA_RANK * sizeof *state.out);
}

/* Some heads of a token with one key, whose value is promised to the bit, subnormal ones too. */
static void
attend_one_key(const smla_attention_params *params, int64_t token, smla_head_range heads,
               const smla_only_key *key)
{
    const smla_fp_mode before = smla_fp_change(SMLA_FP_EXACT);
    smla_attend_one_key(params, token, heads, key);
    smla_fp_change(before);
}

/* Whether a token has so few keys that it needs no state. Then it is done. */
static bool
attend_few_keys(const smla_attention_params *params, int64_t token, smla_head_range heads,
                int count, const smla_only_key *only)
{
    if (count == 0) {
        smla_attend_no_key(params, token, heads);
    } else if (count == 1) {
        attend_one_key(params, token, heads, only);
    }
    return count < 2;
}

/* Runs all parts of a token on one thread. The first part's state is the total of the others. */
static void
run_token(const attention_run *run, int64_t token)
{
    const smla_attention_params *const params = run->params;
    const smla_head_range heads = {.begin = 0, .end = params->queries.num_heads};
    smla_only_key key;
    if (smla_is_left_alone(&params->keys, token)) {
        return;
    }
    if (attend_few_keys(params, token, heads, smla_find_only_key(params, token, &key), &key)) {
        return;
    }
    uint8_t *const memory = thread_scratch_of(run);
    const smla_attention_state total = state_at(run, memory);
    const smla_attention_state part = state_at(run, memory + run->state_bytes);
    uint8_t *const kernel_scratch = memory + 2 * run->state_bytes;
    bool was_empty = false;
    for (int split = 0; split < params->results.num_splits; split++) {
        const smla_attention_state state = split == 0 ? total : part;
        const bool is_empty = smla_find_keys(params, token, split, &key) == 0;
        if (is_empty && was_empty) {
            continue;
        }
        was_empty = is_empty;
        if (is_empty) {
            clear_heads(heads, state);
        } else {
            run->isa->run_part(params, token, split, kernel_scratch, state);
        }
        if (split > 0) {
            run->isa->fold(heads, total, part);
        }
    }
    run->isa->finish(params, token, heads, total);
}

static void
run_part(const attention_run *run, int64_t part)
{
    const int num_splits = run->params->results.num_splits;
    const int64_t token = part / num_splits;
    const int split = (int)(part % num_splits);
    uint8_t *const kernel_scratch = thread_scratch_of(run) + 2 * run->state_bytes;
    part_keys *const found = &run->found[part];
    smla_only_key key;
    found->count = smla_find_keys(run->params, token, split, &found->first);
    /* Of a token with one key, and of parts without keys, fold_heads needs no state. */
    if (found->count > 1 ||
        (found->count == 1 && smla_find_only_key(run->params, token, &key) > 1)) {
        run->isa->run_part(run->params, token, split, kernel_scratch,
                           state_at(run, run->parts + part * run->state_bytes));
    }
}

/* smla_find_only_key of a token whose parts have run. */
static int
find_only_key(const part_keys *found, int num_splits, smla_only_key *only)
{
    int count = 0;
    for (int split = 0; split < num_splits; split++) {
        *only = found[split].count > 0 ? found[split].first : *only;
        count += found[split].count;
    }
    return count;
}

/* Folds the parts of a token for some of its heads, with the same sums as run_token. */
static void
fold_heads(const attention_run *run, int64_t task)
{
    const smla_attention_params *const params = run->params;
    const int64_t token = task / run->fold_tasks_per_token;
    const int64_t begin = task % run->fold_tasks_per_token * SMLA_FOLD_HEADS;
    const smla_head_range heads = {.begin = begin,
                                   .end = min_int64(begin + SMLA_FOLD_HEADS,
                                                    params->queries.num_heads)};
    const part_keys *const found = run->found + token * params->results.num_splits;
    if (smla_is_left_alone(&params->keys, token)) {
        return;
    }
    smla_only_key key;
    const int count = find_only_key(found, params->results.num_splits, &key);
    if (attend_few_keys(params, token, heads, count, &key)) {
        return;
    }
    uint8_t *const parts = run->parts + token * params->results.num_splits * run->state_bytes;
    const smla_attention_state total = state_at(run, parts);
    for (int split = 0; split < params->results.num_splits; split++) {
        const smla_attention_state state = state_at(run, parts + split * run->state_bytes);
        const bool is_empty = found[split].count == 0;
        if (is_empty && split > 0 && found[split - 1].count == 0) {
            continue;
        }
        if (is_empty) {
            clear_heads(heads, state);
        }
        if (split > 0) {
            run->isa->fold(heads, total, state);
        }
    }
    run->isa->finish(params, token, heads, total);
}

static void
run_all(const attention_run *run, int num_threads, int64_t count,
        void (*task)(const attention_run *, int64_t))
{
    (void)num_threads; /* without OpenMP there is one */
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t i = 0; i < count; i++) {
        if (!smla_is_ended(run->interrupt)) {
            task(run, i);
        }
    }
}

/* Parts that have columns, though maybe no keys. */
static int64_t
count_parts_with_columns(const smla_attention_params *params)
{
    int64_t count = 0;
    for (int64_t token = 0; token < params->queries.num_tokens; token++) {
        for (int split = 0; split < params->results.num_splits; split++) {
            count += smla_has_columns(params, token, split);
        }
    }
    return count;
}

smla_status
smla_cpu_attend_lists(const smla_attention_params *given, smla_error *error)
{
    smla_attention_params scaled = *given;
    const smla_attention_params *const params = &scaled;
    scaled.logits.softmax_scale = smla_read_logit_scale(&given->logits) * choose_key_unit(given);
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(given->call.op, &isa, error));
    if (params->queries.num_tokens == 0) {
        return SMLA_OK;
    }
    attention_run run = {
        .params = params,
        .isa = isa->attention,
        .interrupt = smla_find_interrupt(),
        .state_bytes = smla_attention_state_bytes(params->queries.num_heads),
        .thread_bytes = thread_bytes(params->queries.num_heads),
        .fold_tasks_per_token = (params->queries.num_heads + SMLA_FOLD_HEADS - 1) / SMLA_FOLD_HEADS,
    };
    const int64_t num_parts = params->queries.num_tokens * params->results.num_splits;
    const bool parts_run_in_parallel =
        params->results.num_splits > 1 && num_parts <= MAX_PARALLEL_PARTS;
    const int64_t part_bytes = parts_run_in_parallel ? num_parts * run.state_bytes : 0;
    const int64_t misalignment =
        (int64_t)(-(uintptr_t)params->workspace.memory % SMLA_WORKSPACE_ALIGN);
    const int64_t least = misalignment + part_bytes + run.thread_bytes;
    if (params->workspace.memory == NULL || params->workspace.bytes < least) {
        return smla_fail(error, SMLA_ERROR_VALUE,
                         "%s: `%s` must have at least %lld bytes, got %lld", params->call.op,
                         params->workspace.name, (long long)least,
                         (long long)(params->workspace.memory == NULL ? 0
                                                                      : params->workspace.bytes));
    }
    run.parts = (uint8_t *)params->workspace.memory + misalignment;
    run.threads = run.parts + part_bytes;
    const int64_t room = (params->workspace.bytes - misalignment - part_bytes) / run.thread_bytes;
    const int64_t tasks = parts_run_in_parallel ? num_parts : params->queries.num_tokens;
    const int num_threads = (int)min_int64(min_int64(room, tasks), smla_max_threads());
    const smla_fp_mode before = smla_fp_change(SMLA_FP_FLUSH);
    if (parts_run_in_parallel) {
        part_keys found[MAX_PARALLEL_PARTS];
        run.found = found;
        const int64_t num_long = count_parts_with_columns(params);
        run_all(&run, (int)min_int64(num_threads, num_long < 1 ? 1 : num_long), num_parts,
                run_part);
        run_all(&run, num_threads, params->queries.num_tokens * run.fold_tasks_per_token,
                fold_heads);
    } else {
        run_all(&run, num_threads, params->queries.num_tokens, run_token);
    }
    smla_fp_change(before);
    return smla_check_ended(params->call.op, run.interrupt, error);
}
