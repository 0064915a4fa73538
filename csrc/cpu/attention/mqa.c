/* mqa.c: how attention over latents is cut into tasks, and where their threads' scratch lies.
 *
 * A token with n splits has n parts (mqa.h). Both schedules fold them in the order 0, 1, ...,
 * n - 1, so they give the same bits on any number of threads:
 *   - few parts in all (a small decode): parts run in parallel and leave their states in the
 *     workspace; then groups of heads of a token run in parallel and fold them;
 *   - otherwise tokens run in parallel, each on one thread, part after part.
 * Parts without keys cost next to nothing, because tables are often wider than lists are long: no
 * kernel runs for them. They are folded like others, since that makes -0 of a sum 0; a second one
 * behind the first would change nothing, and is left out.
 *
 * Workspace: [states of all parts, in the first schedule] [scratch of thread 0] [thread 1] ...
 * Scratch of a thread: [total state] [part state] [kernel scratch, which has a state, too].
 */
#include "cpu/attention/mqa.h"

#include <math.h>
#include <string.h>

#include "core/fp_mode.h"
#include "cpu/attention/mqa_block.h"
#include "cpu/isa.h"
#include "cpu/machine/thread_scratch.h"

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
    (void)num_rows;
    (void)num_chunks;
    /* A workspace is faster, because its rows are widened once, not per token. Keys of 512 values
     * have not been timed. */
    return prefills->formats[0]->head_dim != SMLA_HEAD_DIM;
}

static int64_t
thread_bytes(int64_t num_heads)
{
    const int64_t counts[2] = {smla_pad_heads(num_heads)};
    const int64_t bytes =
        smla_cpu_attention_scratch_bytes(false, counts) + 3 * smla_mqa_state_bytes(num_heads);
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
    return SMLA_WORKSPACE_ALIGN + parts * smla_mqa_state_bytes(shape->num_heads) +
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

/* ---- Tasks --------------------------------------------------------------------------------- */

/* The keys of a part as smla_find_keys gives them. */
typedef struct part_keys {
    int count;
    smla_only_key first;
} part_keys;

/* Parts that run in parallel. */
typedef struct parallel_parts {
    uint8_t *states;
    int64_t folds_per_token;
    part_keys found[MAX_PARALLEL_PARTS];
} parallel_parts;

static uint8_t *
skip_states(const smla_attention_params *params, uint8_t *memory, int64_t count)
{
    return memory + count * smla_mqa_state_bytes(params->queries.num_heads);
}

static smla_mqa_state
state_at(const smla_attention_params *params, uint8_t *memory, int64_t number)
{
    return smla_mqa_state_at(skip_states(params, memory, number), params->queries.num_heads);
}

/* The state of a part without keys, for some heads. */
static void
clear_heads(smla_head_range heads, smla_mqa_state state)
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

/* Runs a part in the calling thread. */
static void
run_part(const smla_attention_work *work, int64_t token, int split, smla_mqa_state state)
{
    uint8_t *const scratch = skip_states(work->params, smla_own_scratch(work->scratch), 2);
    work->isa->mqa->run_part(work->params, token, split, scratch, state);
}

/* Attends to some heads of a token, whose parts have the keys `found`. If the parts have run, their
 * states lie in `states`, one behind the other; else it is NULL, and they run here, one after the
 * other. The first part's state is the total of the others. */
static void
attend_heads(const smla_attention_work *work, int64_t token, smla_head_range heads,
             const part_keys *found, uint8_t *states)
{
    const smla_attention_params *const params = work->params;
    const smla_mqa_isa *const isa = work->isa->mqa;
    const bool have_run = states != NULL;
    const smla_only_key *only = NULL;
    int count = 0;
    for (int split = 0; split < params->results.num_splits; split++) {
        only = found[split].count > 0 ? &found[split].first : only;
        count += found[split].count;
    }
    if (count == 0) {
        smla_attend_no_key(params, token, heads);
        return;
    }
    if (count == 1) {
        attend_one_key(params, token, heads, only);
        return;
    }
    states = have_run ? states : smla_own_scratch(work->scratch);
    const smla_mqa_state total = state_at(params, states, 0);
    for (int split = 0; split < params->results.num_splits; split++) {
        const smla_mqa_state state = state_at(params, states, have_run || split == 0 ? split : 1);
        const bool is_empty = found[split].count == 0;
        if (is_empty && split > 0 && found[split - 1].count == 0) {
            continue;
        }
        if (is_empty) {
            clear_heads(heads, state);
        } else if (!have_run) {
            run_part(work, token, split, state);
        }
        if (split > 0) {
            isa->fold(heads, total, state);
        }
    }
    isa->finish(params, token, heads, total);
}

/* Runs all parts of a token on one thread. */
static void
run_token(const smla_attention_work *work, int64_t token)
{
    const smla_attention_params *const params = work->params;
    const smla_head_range heads = {.begin = 0, .end = params->queries.num_heads};
    part_keys found[SMLA_MAX_SPLITS];
    if (smla_is_left_alone(&params->keys, token)) {
        return;
    }
    for (int split = 0; split < params->results.num_splits; split++) {
        found[split].count = smla_find_keys(params, token, split, &found[split].first);
    }
    attend_heads(work, token, heads, found, NULL);
}

/* Whether a token has keys in other splits than one. */
static bool
has_other_keys(const smla_attention_params *params, int64_t token, int split)
{
    int count = 0;
    smla_only_key key;
    for (int other = 0; other < params->results.num_splits && count == 0; other++) {
        count = other == split ? 0 : smla_find_keys(params, token, other, &key);
    }
    return count > 0;
}

static void
run_parallel_part(const smla_attention_work *work, int64_t part)
{
    parallel_parts *const parts = work->cut;
    const int num_splits = work->params->results.num_splits;
    const int64_t token = part / num_splits;
    const int split = (int)(part % num_splits);
    part_keys *const found = &parts->found[part];
    found->count = smla_find_keys(work->params, token, split, &found->first);
    /* A token with one key, and a part without keys, needs no state. */
    if (found->count > 1 || (found->count == 1 && has_other_keys(work->params, token, split))) {
        run_part(work, token, split, state_at(work->params, parts->states, part));
    }
}

/* Folds the parts of a token for some of its heads. */
static void
fold_heads(const smla_attention_work *work, int64_t task)
{
    parallel_parts *const parts = work->cut;
    const smla_attention_params *const params = work->params;
    const int64_t token = task / parts->folds_per_token;
    const int64_t first_part = token * params->results.num_splits;
    const int64_t begin = task % parts->folds_per_token * SMLA_FOLD_HEADS;
    const smla_head_range heads = {begin,
                                   min_int64(begin + SMLA_FOLD_HEADS, params->queries.num_heads)};
    if (!smla_is_left_alone(&params->keys, token)) {
        attend_heads(work, token, heads, parts->found + first_part,
                     skip_states(params, parts->states, first_part));
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
smla_attend_mqa(const smla_attention_params *given, const smla_cpu_isa *isa, smla_error *error)
{
    smla_attention_params scaled = *given;
    const smla_attention_params *const params = &scaled;
    scaled.logits.softmax_scale = smla_read_logit_scale(&given->logits) * choose_key_unit(given);
    const int64_t num_tokens = params->queries.num_tokens;
    if (num_tokens == 0) {
        return SMLA_OK;
    }
    const int64_t num_heads = params->queries.num_heads;
    const int64_t num_parts = num_tokens * params->results.num_splits;
    const bool parts_run_in_parallel =
        params->results.num_splits > 1 && num_parts <= MAX_PARALLEL_PARTS;
    const int64_t part_bytes =
        parts_run_in_parallel ? num_parts * smla_mqa_state_bytes(num_heads) : 0;
    const int64_t scratch_bytes = thread_bytes(num_heads);
    const int64_t misalignment =
        (int64_t)(-(uintptr_t)params->workspace.memory % SMLA_WORKSPACE_ALIGN);
    const int64_t least = misalignment + part_bytes + scratch_bytes;
    if (params->workspace.memory == NULL || params->workspace.bytes < least) {
        return smla_fail_value(
            error, params->call.op, "`%s` must have at least %lld bytes, got %lld",
            params->workspace.name, (long long)least,
            (long long)(params->workspace.memory == NULL ? 0 : params->workspace.bytes));
    }
    uint8_t *const memory = (uint8_t *)params->workspace.memory + misalignment;
    const int64_t room = (params->workspace.bytes - misalignment - part_bytes) / scratch_bytes;
    const int64_t num_tasks = parts_run_in_parallel ? num_parts : num_tokens;
    const int num_threads = (int)min_int64(min_int64(room, num_tasks), smla_max_threads());
    const smla_thread_scratch scratch = {.first = memory + part_bytes,
                                         .num_parts = num_threads,
                                         .part_bytes = scratch_bytes};
    smla_attention_work work = {.params = params, .isa = isa, .scratch = &scratch};
    if (!parts_run_in_parallel) {
        const smla_attention_loop tokens = {num_tokens, num_threads, run_token};
        return smla_run_attention(&work, &tokens, 1, error);
    }
    parallel_parts parts;
    parts.states = memory;
    parts.folds_per_token = (num_heads + SMLA_FOLD_HEADS - 1) / SMLA_FOLD_HEADS;
    work.cut = &parts;
    const int64_t num_long = count_parts_with_columns(params);
    const smla_attention_loop loops[] = {
        {num_parts, (int)min_int64(num_threads, num_long < 1 ? 1 : num_long), run_parallel_part},
        {num_tokens * parts.folds_per_token, num_threads, fold_heads},
    };
    return smla_run_attention(&work, loops, 2, error);
}
