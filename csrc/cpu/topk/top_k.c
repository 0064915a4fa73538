/* top_k.c: top_k_per_row. Logits become integer keys of the same order. The k-th largest key is
 * found digit by digit, from counts of the digits' values, and then the columns are taken in their
 * order. No step depends on the logits' distribution. select_kernel.c has the loops over logits.
 *
 * Many rows run in parallel, each on one thread. Of few long rows the columns do, in equal chunks.
 * Which way a row goes, and on how many threads, depends on how many columns the tokens have, not
 * on the width of the array.
 */
#include <limits.h>
#include <string.h>

#include "core/params_topk.h"
#include "cpu/cpu.h"
#include "cpu/index/slot.h"
#include "cpu/isa.h"
#include "cpu/machine/thread_scratch.h"
#include "cpu/topk/select.h"

enum {
    MIN_PARALLEL_LOGITS = 1 << 15, /* below, starting threads costs more than they save */
    MIN_CHUNK = 1 << 17, /* a loop over so many columns outweighs the start of its threads */
    MAX_CHUNKS = 16,     /* bounds the scratch */
};

/* ---- Rows ---------------------------------------------------------------------------------- */

/* The columns of a token, and their chunks. All chunks but the last have `chunk` columns. */
typedef struct row {
    smla_logit_rows logits;
    int64_t k;
    int num_chunks;
    int64_t chunk;
    smla_select_scratch *scratch; /* [num_chunks]; unused if there are at most k columns */
    smla_candidates *found;       /* once digit 0 is known; NULL: all columns are looked at */
} row;

static int64_t
clamp(int64_t value, int64_t most)
{
    return value < 0 ? 0 : value < most ? value : most;
}

/* The first column of a token. */
static int64_t
begin_of(const smla_top_k_params *p, int64_t token)
{
    return clamp(p->starts == NULL ? 0 : p->starts[token * p->starts_stride], p->num_columns);
}

static int64_t
count_columns(const smla_top_k_params *p, int64_t token)
{
    const int64_t begin = begin_of(p, token);
    const int64_t end = clamp(p->ends[token * p->ends_stride], p->num_columns);
    return end > begin ? end - begin : 0;
}

/* The chunks of a row that shares its columns; 1 if it is too short for that. */
static int
count_chunks(int64_t num_columns)
{
    const int64_t most = num_columns / MIN_CHUNK;
    return most < 1 ? 1 : most < MAX_CHUNKS ? (int)most : MAX_CHUNKS;
}

static row
open_row(const smla_top_k_params *p, int64_t token, int num_chunks, smla_select_scratch *scratch)
{
    const int64_t count = count_columns(p, token);
    const int64_t bytes = p->is_bf16 ? 2 : 4;
    const bool has_logits = count > 0 && p->logits != NULL;
    const int64_t first = has_logits ? token * p->logits_stride_token + begin_of(p, token) : 0;
    return (row){.logits = {.data = has_logits ? (const uint8_t *)p->logits + first * bytes : NULL,
                            .is_bf16 = p->is_bf16,
                            .count = count},
                 .k = p->k,
                 .num_chunks = num_chunks,
                 .chunk = (count + num_chunks - 1) / num_chunks,
                 .scratch = scratch};
}

static smla_logit_rows
chunk_of(const row *r, int i)
{
    const int64_t first = i * r->chunk;
    const int64_t left = r->logits.count - first;
    return (smla_logit_rows){.data = (const uint8_t *)r->logits.data +
                                     first * (r->logits.is_bf16 ? 2 : 4),
                             .is_bf16 = r->logits.is_bf16,
                             .count = left < r->chunk ? left : r->chunk};
}

/* ---- Threshold ----------------------------------------------------------------------------- */

/* Returns the only key that has the prefix, or 0. */
static uint32_t
count_digits(const row *r, const smla_select_isa *isa, int digit, uint32_t prefix,
             uint32_t total[SMLA_DIGIT_VALUES])
{
    memset(total, 0, SMLA_DIGIT_VALUES * sizeof *total);
    if (r->found != NULL) {
        return isa->count_listed_digits(r->found, digit, prefix, total);
    }
    if (r->num_chunks == 1) {
        return isa->count_digits(&r->logits, digit, prefix, r->scratch->digits.partial, total);
    }
#pragma omp parallel for schedule(static)
    for (int i = 0; i < r->num_chunks; i++) {
        const smla_logit_rows logits = chunk_of(r, i);
        smla_select_scratch *const own = &r->scratch[i];
        memset(own->digits.counts, 0, sizeof own->digits.counts);
        (void)isa->count_digits(&logits, digit, prefix, own->digits.partial, own->digits.counts);
    }
    for (int i = 0; i < r->num_chunks; i++) {
        for (int d = 0; d < SMLA_DIGIT_VALUES; d++) {
            total[d] += r->scratch[i].digits.counts[d];
        }
    }
    return 0;
}

/* Lists the columns whose first digit is at least `digit`, if they are few. A row of chunks has no
 * list. Digit 0 belongs to NaN alone, and then nearly all columns are candidates. */
static void
list_candidates(row *r, const smla_select_isa *isa, uint32_t digit)
{
    if (r->num_chunks == 1 && digit > 0) {
        smla_candidates *const list = &r->scratch->list;
        isa->list_candidates(&r->logits, digit << smla_digit_shift(0), list);
        r->found = list->count < 0 ? NULL : list;
    }
}

/* The threshold that k keys pass, of a row with more than k columns. It stops at a digit all of
 * whose keys are taken: then the threshold is the number below them. */
static smla_threshold
find_threshold(row *r, const smla_select_isa *isa)
{
    const int num_digits = r->logits.is_bf16 ? SMLA_KEY_DIGITS - 1 : SMLA_KEY_DIGITS;
    uint32_t counts[SMLA_DIGIT_VALUES];
    uint32_t prefix = 0;
    int64_t num_left = r->k;
    int digit = 0;
    for (;; digit++) {
        const uint32_t only = count_digits(r, isa, digit, prefix, counts);
        uint32_t value = smla_digit_mask(digit);
        while (counts[value] < num_left) {
            num_left -= counts[value--];
        }
        prefix = prefix * (smla_digit_mask(digit) + 1) + value;
        if (counts[value] == num_left) {
            return (smla_threshold){.key = (prefix << smla_digit_shift(digit)) - 1};
        }
        if (only != 0) {
            return (smla_threshold){.key = only, .num_equal = num_left};
        }
        if (digit == num_digits - 1) {
            return (smla_threshold){.key = prefix << smla_digit_shift(digit),
                                    .num_equal = num_left};
        }
        if (digit == 0) {
            list_candidates(r, isa, value);
        }
    }
}

/* ---- Columns ------------------------------------------------------------------------------- */

/* Each chunk writes behind those in front of it, so it must know how many columns they take. */
static void
take_chunks(const row *r, const smla_select_isa *isa, smla_threshold threshold, int32_t *out)
{
    int64_t above[MAX_CHUNKS];
    int64_t equal[MAX_CHUNKS];
    int64_t offsets[MAX_CHUNKS];
#pragma omp parallel for schedule(static)
    for (int i = 0; i < r->num_chunks; i++) {
        const smla_logit_rows logits = chunk_of(r, i);
        isa->count_keys(&logits, threshold.key, &above[i], &equal[i]);
    }
    int64_t offset = 0;
    int64_t num_equal = threshold.num_equal;
    for (int i = 0; i < r->num_chunks; i++) {
        equal[i] = equal[i] < num_equal ? equal[i] : num_equal;
        num_equal -= equal[i];
        offsets[i] = offset;
        offset += above[i] + equal[i];
    }
#pragma omp parallel for schedule(static)
    for (int i = 0; i < r->num_chunks; i++) {
        const smla_logit_rows logits = chunk_of(r, i);
        const smla_threshold part = {.key = threshold.key, .num_equal = equal[i]};
        (void)isa->take_columns(&logits, part, (int32_t)(i * r->chunk), out + offsets[i]);
    }
}

/* Every candidate that is taken moves to `out`, whose `k` places they fill. */
static void
take_candidates(const smla_candidates *found, smla_threshold threshold, int64_t k, int32_t *out)
{
    int64_t num_taken = 0;
    for (int64_t i = 0; num_taken < k; i++) {
        const bool is_equal = found->keys[i] == threshold.key && threshold.num_equal > 0;
        out[num_taken] = found->columns[i];
        num_taken += found->keys[i] > threshold.key || is_equal;
        threshold.num_equal -= is_equal;
    }
}

static void
choose_columns(row *r, const smla_select_isa *isa, int32_t *out)
{
    if (r->logits.count <= r->k) {
        smla_clear_columns(out, r->logits.count, r->k);
        smla_write_run(out, 0, r->logits.count);
        return;
    }
    const smla_threshold threshold = find_threshold(r, isa);
    if (r->found != NULL) {
        take_candidates(r->found, threshold, r->k, out);
    } else if (r->num_chunks > 1) {
        take_chunks(r, isa, threshold, out);
    } else {
        (void)isa->take_columns(&r->logits, threshold, 0, out);
    }
}

void
smla_cpu_choose_columns(const smla_select_isa *isa, const smla_logit_rows *logits, int64_t k,
                        smla_select_scratch *scratch, int32_t *out)
{
    row r = {
        .logits = *logits, .k = k, .num_chunks = 1, .chunk = logits->count, .scratch = scratch};
    choose_columns(&r, isa, out);
}

static void
write_values(const row *r, const int32_t *columns, void *values)
{
    for (int64_t i = 0; i < r->k; i++) {
        const int32_t column = columns[i];
        if (r->logits.is_bf16) {
            ((uint16_t *)values)[i] =
                column < 0 ? 0xFF80u : ((const uint16_t *)r->logits.data)[column];
        } else {
            ((uint32_t *)values)[i] =
                column < 0 ? 0xFF800000u : ((const uint32_t *)r->logits.data)[column];
        }
    }
}

static void
write_row(const smla_top_k_params *p, int64_t token, int num_chunks, smla_select_scratch *scratch,
          const smla_cpu_isa *isa)
{
    row r = open_row(p, token, num_chunks, scratch);
    int32_t *const out = p->out + token * p->out_stride_token;
    choose_columns(&r, isa->select, out);
    if (p->values != NULL) {
        const int64_t first = token * p->values_stride_token * (p->is_bf16 ? 2 : 4);
        write_values(&r, out, (uint8_t *)p->values + first);
    }
    if (p->slots.out != NULL) {
        smla_cpu_write_global_topk(isa->slot, &p->slots, token);
    }
}

/* ---- The operator -------------------------------------------------------------------------- */

/* How the rows of a call are divided among threads. */
typedef struct division {
    int64_t longest;     /* most columns of a row */
    bool shares_columns; /* if a row is long enough */
    int num_threads;     /* threads of the other rows */
} division;

static bool
is_shared(const smla_top_k_params *p, const division *by, int64_t token)
{
    return by->shares_columns && count_chunks(count_columns(p, token)) > 1;
}

/* `most_parts` bounds the threads. */
static division
divide_rows(const smla_top_k_params *p, int most_parts)
{
    division by = {.longest = 0};
    for (int64_t token = 0; token < p->num_tokens; token++) {
        const int64_t count = count_columns(p, token);
        by.longest = count > by.longest ? count : by.longest;
    }
    by.shares_columns = p->num_tokens < smla_max_threads() && count_chunks(by.longest) > 1;
    const int64_t least = clamp(p->k, p->num_columns); /* entries are written, too */
    int64_t work = 0;
    for (int64_t token = 0; token < p->num_tokens && work < MIN_PARALLEL_LOGITS; token++) {
        const int64_t count = count_columns(p, token);
        work += is_shared(p, &by, token) ? 0 : count > least ? count : least;
    }
    const int64_t most = p->num_tokens < most_parts ? p->num_tokens : most_parts;
    by.num_threads = work < MIN_PARALLEL_LOGITS ? 1 : smla_count_threads(most);
    return by;
}

smla_scratch_size
smla_cpu_top_k_scratch(const smla_top_k_params *p)
{
    const division by = divide_rows(p, INT_MAX);
    const int num_chunks = by.shares_columns ? count_chunks(by.longest) : 1;
    return (smla_scratch_size){num_chunks > by.num_threads ? num_chunks : by.num_threads,
                               by.longest > p->k ? sizeof(smla_select_scratch) : 0};
}

smla_status
smla_cpu_choose_keys(const smla_top_k_params *p, const smla_thread_scratch *scratch,
                     smla_error *error)
{
    const smla_cpu_isa *isa = NULL;
    SMLA_TRY(smla_cpu_choose_isa(p->call.op, &isa, error));
    const division by = divide_rows(p, scratch->num_parts);
    smla_interrupt *const interrupt = smla_find_interrupt();
    for (int64_t token = 0; by.shares_columns && token < p->num_tokens; token++) {
        if (is_shared(p, &by, token) && !smla_is_ended(interrupt)) {
            const int num_chunks = count_chunks(count_columns(p, token));
            const bool fits = num_chunks < scratch->num_parts;
            write_row(p, token, fits ? num_chunks : scratch->num_parts,
                      smla_scratch_part(scratch, 0), isa);
        }
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(by.num_threads)
    for (int64_t token = 0; token < p->num_tokens; token++) {
        if (!is_shared(p, &by, token) && !smla_is_ended(interrupt)) {
            write_row(p, token, 1, smla_own_scratch(scratch), isa);
        }
    }
    return smla_check_ended(p->call.op, interrupt, error);
}

smla_status
smla_cpu_top_k_per_row(const smla_top_k_params *p, smla_error *error)
{
    if (p->slots.out != NULL) {
        SMLA_TRY(smla_cpu_check_global_topk(&p->slots, error));
    }
    smla_thread_scratch scratch;
    SMLA_TRY(smla_open_scratch(&scratch, p->call.op, smla_cpu_top_k_scratch(p), error));
    const smla_status status = smla_cpu_choose_keys(p, &scratch, error);
    smla_close_scratch(&scratch);
    return status;
}
